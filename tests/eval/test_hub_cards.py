"""`hub_cards/` is rendered from results and shows no number of its own."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from transformers import AutoConfig

from gatesight_eval.reports import cards
from gatesight_hf import EstimatorConfig
from gatesight_hf.commands.cli import parser
from gatesight_hf.commands.publishing import prepare
from gatesight_hf.files.hub import card_metadata
from gatesight_hf.models import HybridSpec
from gatesight_hf.reference import ESTIMATOR_PATH
from gatesight_hf.training.collect import Sampling, document_tensors
from gatesight_hf.training.plan import H200, estimate, estimator_sizes, layout_of, text_model_without_storage

from ..helpers.models import tiny_model
from ..helpers.paths import ROOT
from ..helpers.running import random_ids

FILES = cards.files()
REPOS = sorted({path.parts[1] for path in FILES})
PLANS = {plan["repo"]: plan for plan in json.loads((ROOT / cards.PLANS).read_text())}
TOY = json.loads((ROOT / cards.TOY).read_text())
METRICS = json.loads((ESTIMATOR_PATH / "metrics.json").read_text())


def card_of(repo: str) -> str:
    return (ROOT / "hub_cards" / repo / "README.md").read_text(encoding="utf-8")


def tables_of(card: str) -> list[list[list[str]]]:
    """Cells of each table, without the rule below its header."""
    blocks = re.findall(r"(?:^\|.*\n)+", card, re.MULTILINE)
    tables = [[row.strip("| ").split(" | ") for row in block.splitlines()] for block in blocks]
    return [[table[0], *table[2:]] for table in tables]


def check_reference_tables(card: str) -> None:
    """Each cell says what the results have for its method, kept fraction or metric."""
    evaluation, held_out = tables_of(card)
    means = TOY["groups"]["gated mean"]["mean"]
    for method, *cells in evaluation[1:]:
        for fraction, cell in zip(evaluation[0][1:], cells, strict=True):
            result = means[method][fraction]
            assert cell == f"{result['mean']:.3f} ±{(result['high'] - result['low']) / 2:.3f}"
    assert len(evaluation) - 1 == len(means) - 2, "all methods, without the two controls"
    for name, *cells in held_out[1:]:
        assert cells == [f"{METRICS['held_out'][name][metric]:.3f}" for metric in ("overlap@10", "mass@10", "spearman")]
    assert len(held_out) - 1 == len(METRICS["held_out"])


def check_plan_tables(card: str, plan: dict[str, Any]) -> None:
    """Each number in a cell is one of the plan's."""
    known = {f"{value:,}" for value in numbers_in(plan)} | {f"{value:g}" for value in numbers_in(plan)}
    layout, bounds = tables_of(card)
    for cells in layout[1:] + bounds[1:]:
        text = " ".join(cells).replace("bf16", "").replace(plan["machine"]["name"], "")
        for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text):
            assert number.rstrip(",") in known, f"{number} in {cells}"


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(part)
    elif isinstance(value, int | float):
        yield value


def test_what_is_committed_is_what_is_rendered():
    committed = {path.relative_to(ROOT): path for path in (ROOT / "hub_cards").rglob("*") if path.is_file()}
    del committed[Path("hub_cards/README.md")]
    assert set(committed) == set(FILES)
    for name, path in committed.items():
        assert path.read_bytes() == FILES[name], f"{name}: run python -m gatesight_eval.reports.cards"


def test_plans_are_those_of_the_formulas():
    assert json.loads(json.dumps(cards.plans())) == list(PLANS.values()), "run python -m gatesight_eval.reports.cards"


def test_every_number_in_a_table_is_in_a_result():
    check_reference_tables(card_of(cards.REFERENCE))
    for repo, plan in PLANS.items():
        check_plan_tables(card_of(repo), plan)


def test_another_number_in_a_table_would_be_found():
    card = card_of(cards.REFERENCE)
    for number in ("0.835 ±0.020 | 0.718", "| 0.403 |"):
        assert number in card
        with pytest.raises(AssertionError):
            check_reference_tables(card.replace(number, number.replace("3", "4", 1)))
    repo, plan = next(iter(PLANS.items()))
    for number in ("| 48 |", "18.5 GB", " 160 documents"):
        assert number in card_of(repo)
        with pytest.raises(AssertionError):
            check_plan_tables(card_of(repo).replace(number, number.replace("8", "9").replace("6", "7")), plan)


@pytest.mark.parametrize("repo", REPOS)
def test_metadata_passes_the_validators_of_huggingface_hub(repo):
    card = ModelCard(card_of(repo))
    assert card.data.to_dict() == yaml.safe_load(card_of(repo).split("---")[1])
    assert card_metadata(card_of(repo))["library_name"] == "gatesight_hf"
    assert card.data.base_model == (PLANS[repo]["base_model"] if repo in PLANS else None)


def test_the_model_index_has_the_values_of_the_results():
    results = ModelCard(card_of(cards.REFERENCE)).data.eval_results
    found = {(result.dataset_type, result.metric_name): result.metric_value for result in results}
    means = TOY["groups"]["gated mean"]["mean"]
    assert found.pop(("gatesight-toy", "accuracy, full cache")) == means["full"]["1"]["mean"]
    assert found.pop(("gatesight-toy", "accuracy, attention cache emptied")) == means["empty"]["0"]["mean"]
    for fraction, cell in means["gatesight"].items():
        assert found.pop(("gatesight-toy", f"accuracy, kept fraction {fraction}")) == cell["mean"]
    assert sorted(found.values()) == sorted(METRICS["held_out"]["mlp"].values())


def test_the_reference_repo_is_the_bundled_estimator_and_can_be_pushed():
    uploads = {upload.path: upload.data for upload in prepare(ROOT / "hub_cards" / cards.REFERENCE)}
    for path in ESTIMATOR_PATH.rglob("*.*"):
        if path.name != "README.md":
            assert uploads[path.relative_to(ESTIMATOR_PATH).as_posix()] == path.read_bytes()


@pytest.mark.parametrize("repo", PLANS)
def test_a_repo_without_weights_says_so_and_is_not_pushed(repo):
    assert "**Weights not trained yet.**" in card_of(repo)
    assert "model-index" not in card_metadata(card_of(repo))
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        prepare(ROOT / "hub_cards" / repo)


@pytest.mark.parametrize("repo", PLANS)
def test_the_command_on_a_card_is_one_that_the_command_line_takes(repo):
    command = re.search(r"```bash\n(.*?)```", card_of(repo), re.DOTALL)
    assert command is not None
    program, *words = command[1].replace("\\\n", " ").split()
    args = parser().parse_args(words)
    assert program == "gatesight" and args.model == PLANS[repo]["base_model"]
    assert args.train_documents + args.eval_documents == PLANS[repo]["bounds"]["documents"]


# -- layouts and formulas ----------------------------------------------------------------------------------------------


def test_the_27b_is_that_of_the_paper():
    plan = PLANS["gatesight-qwen3.8-27b"]
    config = EstimatorConfig.from_dict(plan["config"])
    assert (plan["layout"]["attention_layers"], plan["layout"]["gdn_layers"]) == (16, 48)
    assert (plan["layout"]["key_value_heads"], plan["layout"]["group"], plan["layout"]["value_heads"]) == (4, 6, 48)
    assert plan["layout"]["cache_kib_per_token"] == 64
    assert [config.input_size(j) for j in range(16)] == [435] + [867] * 15
    assert config.num_parameters == plan["estimator"]["parameters"] and round(config.num_parameters / 1e5) == 34


def test_flash_next_has_the_parameters_that_are_said_of_it():
    """125 B in all, 6 B of them active, and 51 B of n-gram embeddings."""
    plan = PLANS["gatesight-qwen3.8-flash-next"]
    layout = layout_of(text_model_without_storage(AutoConfig.for_model(plan["model_type"], **plan["sizes"])))
    assert round((layout.parameters - 51.2e9) / 1e9) in (125, 126)
    assert 5e9 < layout.layer_parameters + layout.head_parameters < 7e9


def arguments(**options: Any) -> Any:
    words = ["train", "--model", "m", "--documents", "d", "--out", "o"]
    return parser().parse_args(
        words + [w for name, v in options.items() for w in (f"--{name.replace('_', '-')}", str(v))]
    )


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_layout_is_read_off_the_model(family):
    model = tiny_model(family)
    layout = layout_of(model)
    assert layout == replace(layout_of(text_model_without_storage(model.config)), value_bytes=4)
    assert layout.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (layout.attention_layers, layout.gdn_layers) == (2, 6)
    used = 0
    for name, parameter in model.named_parameters():
        share = 0.5 if ".experts." in name else 0 if "embed" in name or "lm_head" in name else 1
        used += int(share * parameter.numel())
    assert layout.layer_parameters == used, "2 of 4 experts"
    assert layout.head_parameters == model.lm_head.weight.numel()
    sizes = estimator_sizes(EstimatorConfig.for_model(HybridSpec.from_config(model.config), "tiny"))
    assert (sizes["mlps"], sizes["least_inputs"], sizes["most_inputs"]) == (4, 3 * 3 * 4 + 3, 6 * 3 * 4 + 3)


@pytest.mark.parametrize("prompts", [((),), ((5, 6),), ((), (5,))])
def test_a_collection_computes_what_the_formulas_count(dense, prompts):
    """Tokens that go through the model: one prefill of the document, whatever follows it."""
    tokens, rows, steps = 24, 3, 4
    seen = []
    handle = dense.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((args[0] if args else kwargs["hidden_states"]).shape[:2]),
        with_kwargs=True,
    )
    try:
        document_tensors(dense, random_ids(tokens), Sampling(rows, steps, prompts=prompts), seed=0)
    finally:
        handle.remove()
    whole = [shape[0] for shape in seen if shape[1] >= tokens]
    assert whole == [1]
    singles = [shape for shape in seen if shape[1] < tokens and shape[0] == 1]
    assert len(singles) == len(prompts) * rows, "one forward per continuation for its utilities"


def test_bounds_follow_from_the_sizes():
    model = tiny_model().bfloat16()
    layout = layout_of(model)
    asked = {"length": 1000, "train_documents": 3, "eval_documents": 1, "continuations": 5, "continuation_tokens": 6}
    asked["epochs"] = 7
    sizes = estimator_sizes(EstimatorConfig.for_model(HybridSpec.from_config(model.config), "tiny"))
    found = estimate(layout, sizes, arguments(**asked), H200)
    flops = 2 * layout.layer_parameters * 1000 + 2 * 1000 * 1000 * 6 * 32 * 2
    cache, weights = 1000 * 2 * 2 * 2 * 32 * 2, 2 * (layout.layer_parameters + layout.head_parameters)
    seconds = {
        "prefill": flops / 989e12,
        "sampling": 5 * (weights + 5 * cache) / 4.8e12,
        "utilities": 5 * (weights + cache) / 4.8e12,
    }
    for step, value in seconds.items():
        assert found["minutes"][step] == pytest.approx(4 * value / 60, rel=5e-3)
    shard = 1000 * (3 * 6 * 4 * 2 + 8 + 2 * 2 * 4)
    assert found["disk_gb"] == pytest.approx(4 * shard / 1e9, rel=5e-3)
    assert found["fit_reads_gb"] == pytest.approx(7 * 3 * shard / 1e9, rel=5e-3)
    with_prompt = estimate(layout, sizes, arguments(**asked, prompt="now"), H200)
    assert with_prompt["minutes"]["sampling"] == pytest.approx(4 / 60 * seconds["sampling"] * 6 / 5, rel=5e-3)
    in_twos = estimate(layout, sizes, arguments(**asked, rows=2), H200)
    expected = 5 * (3 * weights + 5 * cache) / 4.8e12
    assert in_twos["minutes"]["sampling"] == pytest.approx(4 / 60 * expected, rel=5e-3)
    state = 6 * 4 * 16 * 16 * 4
    held, prefilling = 2 * layout.parameters + cache + state, 1000 * (3 * 6 * 4 * 2 + 3 * 96 * 2)
    assert found["accelerator_gb"] == pytest.approx((held + max(prefilling, 5 * (state + cache / 2))) / 1e9, rel=5e-3)
    assert in_twos["accelerator_gb"] == pytest.approx((held + max(prefilling, 2 * (state + cache / 2))) / 1e9, rel=5e-3)
    hidden = arguments(**asked)
    hidden.hidden_states = True
    with_hidden = estimate(layout, sizes, hidden, H200)
    assert with_hidden["disk_gb"] == pytest.approx(4 * (shard + 1000 * 2 * 64 * 2) / 1e9, rel=5e-3)


def test_a_shard_has_the_bytes_that_are_counted():
    model = tiny_model().bfloat16()
    stored = document_tensors(model, random_ids(16), Sampling(1, 2), seed=0)
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in stored.items()}
    layout = layout_of(model)
    assert sum(sizes.values()) - sizes["utilities"] == 16 * layout.signal_bytes_per_token
    assert sizes["utilities"] == 16 * layout.attention_layers * layout.key_value_heads * 4
