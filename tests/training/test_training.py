"""`gatesight train` from documents to an estimator folder, with resume and honest baselines."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from gatesight_hf import Estimator, EstimatorMismatchError, GateSightCache
from gatesight_hf.commands.cli import main
from gatesight_hf.methods import HiddenStateConfig, HiddenStateScorer
from gatesight_hf.models import HybridSpec
from gatesight_hf.scoring import EstimatorConfig, Recorder
from gatesight_hf.training import collect as collecting
from gatesight_hf.training.collect import Sampling, Shard, collect, read_shards
from gatesight_hf.training.documents import read_texts, reference_texts, tokenized
from gatesight_hf.training.fit import (
    FitOptions,
    fit,
    gather_moments,
    hidden_state_inputs,
    log_target,
    mlp_scores,
    signal_inputs,
)
from gatesight_hf.training.metrics import overlap
from gatesight_hf.training.run import claim_folder

from ..helpers.models import tiny_model
from ..helpers.running import as_new, cache_kwargs, prefilled, random_ids

pytestmark = pytest.mark.core

SAMPLING = Sampling(continuations=2, tokens=4)


def documents(count: int, length: int = 40) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(1, 128, (count, length), generator=generator).tolist()


def test_a_killed_collection_goes_on_where_it_stopped(dense: Any, tmp_path: Path, monkeypatch: Any) -> None:
    made: list[int] = []
    original = collecting.document_tensors

    def dies_at_the_third(model: Any, ids: Any, sampling: Any, seed: int, hidden_states: bool) -> Any:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(seed)
        return original(model, ids, sampling, seed)

    monkeypatch.setattr(collecting, "document_tensors", dies_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        collect(dense, documents(4), tmp_path / "run", SAMPLING, "documents")
    monkeypatch.setattr(collecting, "document_tensors", original)
    stamps = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()}
    shards = collect(dense, documents(4), tmp_path / "run", SAMPLING, "documents")
    assert len(stamps) == 2 and all((tmp_path / "run" / name).stat().st_mtime_ns == at for name, at in stamps.items())
    again = collect(dense, documents(4), tmp_path / "fresh", SAMPLING, "documents")
    for one, other in zip(read_shards(shards), read_shards(again), strict=True):
        assert torch.equal(one.utilities, other.utilities)
        assert all(torch.equal(a, b) for a, b in zip(one.signals, other.signals, strict=True))


def continued(model: Any, ids: torch.Tensor, sampling: Sampling) -> list[list[int]]:
    """Continuations as `document_tensors` draws them."""
    parent = GateSightCache(Recorder(), model, kept_fraction=1.0, allocation="flat")
    logits = model(ids, **cache_kwargs(model, parent)).logits[0, -1]
    parent.compact()
    found = collecting._continuations(model, parent, ids, logits, sampling.prompts[0], sampling)
    return [row.tolist() for row in found]


@pytest.mark.parametrize("rows", [None, 1, 2])
@pytest.mark.parametrize("tokens", [1, 6])
def test_continuations_without_a_prompt_are_those_of_generate(dense: Any, rows: int | None, tokens: int) -> None:
    """At a temperature near 0 sampling is greedy, whether from forks or from a prefill of its own."""
    ids = random_ids(40)
    expected = dense.generate(ids, max_new_tokens=tokens, do_sample=False, use_cache=True)[0, 40:].tolist()
    found = continued(dense, ids, Sampling(3, tokens, temperature=1e-4, rows=rows))
    assert found == [expected] * 3


def test_continuations_of_every_family_go_on_from_the_prefill(any_model: Any) -> None:
    ids = random_ids(40)
    expected = any_model.generate(ids, max_new_tokens=4, do_sample=False)[0, 40:].tolist()
    assert continued(any_model, ids, Sampling(2, 4, temperature=1e-4)) == [expected] * 2


def test_first_tokens_have_the_chances_of_the_prefill(dense: Any) -> None:
    ids, drawn = random_ids(40), 20_000
    found = torch.tensor([row[0] for row in continued(dense, ids, Sampling(drawn, 1, temperature=1.5))])
    chances = (dense(ids).logits[0, -1] / 1.5).softmax(-1)
    counts = found.bincount(minlength=len(chances)).float()
    error = (chances * (1 - chances) * drawn).sqrt()
    assert ((counts - chances * drawn).abs() <= 5 * error + 1).all()


def test_continuations_differ_and_with_a_prompt_are_those_of_one_generate(dense: Any) -> None:
    ids, prompt = random_ids(40), (5, 6)
    assert len({tuple(row) for row in continued(dense, ids, Sampling(8, 6))}) > 1
    torch.manual_seed(3)
    found = continued(dense, ids, Sampling(4, 6, prompts=(prompt,)))
    torch.manual_seed(3)
    given = torch.cat([ids, torch.tensor([prompt])], dim=1)
    options, end = {"do_sample": True, "top_k": 0, "max_new_tokens": 6}, dense.generation_config.eos_token_id
    expected = dense.generate(given, **options, num_return_sequences=4)[:, 40:]
    assert found == [[*prompt, *collecting._until_end(row[2:], end).tolist()] for row in expected]
    rest = continued(dense, ids, Sampling(5, 3, prompts=(prompt,), rows=2))
    assert len(rest) == 5 and all(row[:2] == [5, 6] and len(row) <= 5 for row in rest)


def test_repeats_of_one_row_share_its_entries(dense: Any) -> None:
    """Sampling many continuations of a long document holds its entries once."""
    parent = prefilled(dense, random_ids(40), kept_fraction=1.0)
    parent.compact()
    child = parent.fork()
    new, options = random_ids(3, seed=1), {"do_sample": True, "num_return_sequences": 5, "max_new_tokens": 2}
    dense.generate(new, **as_new(new, child), **cache_kwargs(dense, child), **options)
    for layer, shared in zip(child.attention_layers, parent.attention_layers, strict=True):
        assert layer.kept_keys.shape[0] == 5
        assert layer.kept_keys.untyped_storage().data_ptr() == shared.kept_keys.untyped_storage().data_ptr()


def test_shards_hold_the_signals_of_a_plain_prefill_and_normalised_utilities(dense: Any, tmp_path: Path) -> None:
    (shard,) = read_shards(collect(dense, documents(1), tmp_path, SAMPLING, "documents"))
    assert shard.utilities.shape == (2, 2, 40)
    assert torch.allclose(shard.utilities.amax(-1), torch.ones(2, 2)) and (shard.utilities >= 0).all()
    assert len(shard.signals) == 6 and all(signal.shape == (40, 3, 4) for signal in shard.signals)
    assert shard.hidden == []


def test_a_scorer_on_hidden_states_is_fitted_saved_and_scores_as_in_training(dense: Any, tmp_path: Path) -> None:
    """Its metrics stand beside the estimator's, and a cache that records hidden states gives it the same inputs."""
    paths = collect(dense, documents(6), tmp_path / "data", SAMPLING, "documents", hidden_states=True)
    spec = HybridSpec.from_config(dense.config)
    hidden_config = HiddenStateConfig.for_model(spec, "tiny", 64, hidden_size=8)
    config = EstimatorConfig.for_model(spec, "tiny", hidden_size=8)
    fitted = fit(config, paths[:5], paths[5:], FitOptions(epochs=2), hidden_config)
    assert "mlp on hidden states" in fitted.metrics
    assert fitted.hidden_states is not None
    fitted.hidden_states.save_pretrained(tmp_path / "scorer")
    scorer = HiddenStateScorer.from_pretrained(tmp_path / "scorer")

    (shard,) = read_shards(paths[5:])
    cache = prefilled(dense, torch.tensor(documents(6)[5:]), [17, 23], scorer=scorer, allocation="flat")
    for j, scores in enumerate(cache.score().of):
        layer = {name: scorer.tensors[f"layers.{j}.{name}"] for name in
                 ("input_mean", "input_std", "weight_in", "bias_in", "weight_out", "bias_out")}  # fmt: skip
        expected = mlp_scores(layer, hidden_state_inputs(shard, j))
        assert torch.allclose(scores[0], expected, atol=1e-3)

    with pytest.raises(ValueError, match="kind None"):
        HiddenStateConfig.from_dict(asdict(config))
    with pytest.raises(EstimatorMismatchError, match="hidden-states"):
        GateSightCache(scorer, tiny_model(num_key_value_heads=3))


def planted_shards(folder: Path, config: EstimatorConfig, count: int) -> list[Path]:
    """Documents whose utility is a known, not linear function of one signal of one head."""
    from safetensors.torch import save_file

    folder.mkdir()
    paths = []
    for k in range(count):
        generator = torch.Generator().manual_seed(k)
        signals = [torch.rand(200, 3, config.num_value_heads, generator=generator) for _ in range(6)]
        peak = 1 - (signals[2][:, 0, 1] - 0.5).abs() * 2
        utilities = (peak.pow(8) + 1e-5).expand(2, config.num_key_value_heads, -1)
        stored = {f"signals.{i}": s for i, s in enumerate(signals)}
        save_file({**stored, "utilities": utilities.contiguous()}, folder / f"{k}.safetensors")
        paths.append(folder / f"{k}.safetensors")
    return paths


def test_the_mlp_finds_what_no_baseline_can(dense: Any, tmp_path: Path) -> None:
    config = EstimatorConfig.for_model(HybridSpec.from_config(dense.config), "planted", hidden_size=16)
    train, held_out = planted_shards(tmp_path / "t", config, 24), planted_shards(tmp_path / "e", config, 4)
    fitted = fit(config, train, held_out, FitOptions(epochs=40))
    estimator, metrics, singles = fitted.estimator, fitted.metrics, fitted.best_single_signals
    assert metrics["mlp"]["overlap@10"] > 0.5 and metrics["mlp"]["spearman"] > 0.9
    for baseline in ("ridge", "best single signal", "age only"):
        assert metrics[baseline]["overlap@10"] < 0.3
    assert estimator.num_parameters == sum(
        2 * (config.input_size(j) * 16 + 16 + 16 + 1) for j in range(len(config.gdn_windows))
    )
    assert len(singles) == 2 and all(len(layer) == 2 for layer in singles)


@pytest.mark.quick
def test_overlaps_of_all_signals_and_heads_at_once_are_those_one_by_one() -> None:
    scores, utilities = torch.randn(2, 5, 60), torch.rand(3, 60)
    found = overlap(scores, utilities[:, None, None])
    for head, of_head in enumerate(utilities):
        best = set(of_head.argsort(descending=True)[:6].tolist())
        for sign in range(2):
            for signal in range(5):
                chosen = scores[sign, signal].argsort(descending=True)[:6].tolist()
                assert float(found[head, sign, signal]) == pytest.approx(len(best.intersection(chosen)) / 6)


@pytest.mark.quick
def test_streamed_ridge_equals_least_squares(dense: Any, tmp_path: Path) -> None:
    config = EstimatorConfig.for_model(HybridSpec.from_config(dense.config), "planted")
    paths = planted_shards(tmp_path / "t", config, 5)
    weights, bias = gather_moments(signal_inputs(config), paths)[1].ridge(strength=1e-9)
    shards = list(read_shards(paths))
    inputs = torch.cat([signal_inputs(config)(shard, 1) for shard in shards]).double()
    targets = torch.cat([log_target(shard.utilities[1]).T for shard in shards]).double()
    design = torch.cat([inputs, torch.ones(len(inputs), 1, dtype=torch.float64)], dim=1)
    expected = design @ torch.linalg.lstsq(design, targets).solution
    assert torch.allclose(inputs @ weights + bias, expected, atol=1e-4)


def test_documents_are_read_cut_and_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three four")
    (tmp_path / "b.jsonl").write_text('{"text": "one two three four"}\n{"text": "five six seven"}\n{"text": "x"}\n')

    def tokenizer(text: str) -> argparse.Namespace:
        return argparse.Namespace(input_ids=[len(word) * 7 + ord(word[0]) for word in text.split()])

    assert [len(ids) for ids in tokenized(read_texts([tmp_path]), tokenizer, 5)] == [4, 3]
    assert [len(ids) for ids in tokenized(read_texts([tmp_path]), tokenizer, 3)] == [3, 3, 1]
    (tmp_path / "c.pdf").write_text("")
    with pytest.raises(ValueError, match=r"\.txt or \.jsonl"):
        list(read_texts([tmp_path / "c.pdf"]))
    (tmp_path / "d.jsonl").write_text('{"body": 1}\n')
    with pytest.raises(ValueError, match="line 1"):
        list(read_texts([tmp_path / "d.jsonl"]))


def test_data_of_other_settings_is_not_mixed_in(tmp_path: Path) -> None:
    claim_folder(tmp_path, {"seed": 1})
    claim_folder(tmp_path, {"seed": 1})
    with pytest.raises(ValueError, match="other settings"):
        claim_folder(tmp_path, {"seed": 2})


def test_train_command_writes_a_folder_that_loads(
    dense: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    from gatesight_hf import reference
    from gatesight_hf.training import run

    pair = dense, SmallVocabulary(reference.load_tokenizer())
    monkeypatch.setattr(run, "load_named", lambda name, dtype, device_map: pair)
    arguments = ["train", "--model", "reference", "--out", str(tmp_path / "estimator"), "--length", "48"]
    arguments += ["--train-documents", "3", "--eval-documents", "2", "--continuations", "2", "--epochs", "2", "--json"]
    assert main(arguments) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "estimator" / "metrics.json").read_text())
    assert set(printed["held_out"]) == {"mlp", "ridge", "best single signal", "age only"}
    estimator = Estimator.from_pretrained(tmp_path / "estimator")
    assert estimator.config.fingerprint == HybridSpec.from_config(dense.config).fingerprint
    cache = GateSightCache.from_pretrained(tmp_path / "estimator", model=dense, kept_fraction=0.5)
    dense.generate(torch.tensor([[1, 2, 3, 4, 5, 6]]), past_key_values=cache, max_new_tokens=2)
    assert cache.report().kept_per_layer and "overlap@10" in (tmp_path / "estimator" / "README.md").read_text()


class SmallVocabulary:
    """The reference tokenizer folded into the 128 ids of the tiny model."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, text: str, **options: Any) -> argparse.Namespace:
        ids = self.tokenizer(text, **options).input_ids
        return argparse.Namespace(input_ids=[1 + i % 127 for i in ids])


def test_training_and_evaluation_documents_are_disjoint() -> None:
    texts = reference_texts(60, seed=0)
    seen = [next(texts) for _ in range(200)]
    assert len(set(seen)) == 200
    assert next(reference_texts(60, seed=0)) == seen[0] != next(reference_texts(60, seed=1))


def test_shard_length() -> None:
    assert Shard([], [], torch.zeros(2, 3, 17)).length == 17


def test_shards_of_other_documents_are_not_taken(dense: Any, tmp_path: Path) -> None:
    collect(dense, documents(1), tmp_path, SAMPLING, "documents")
    with pytest.raises(ValueError, match="another document"):
        collect(dense, [[1, 2, 3]], tmp_path, SAMPLING, "documents")


def test_what_a_kill_left_half_written_is_cleared_with_its_document(dense: Any, tmp_path: Path) -> None:
    for k in (0, 1):
        collecting.partial_of(tmp_path / f"document_0000{k}.safetensors").write_bytes(b"half")
    collect(dense, documents(1), tmp_path, SAMPLING, "documents")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[0] == "document_00000.safetensors" and len(names) == 2, "another document may be under way"


def test_each_process_collects_its_share(dense: Any, tmp_path: Path) -> None:
    listed = [collect(dense, documents(3), tmp_path, SAMPLING, "documents", share=(1, 2)) for _ in range(2)]
    assert [path.exists() for path in listed[0]] == [False, True, False]
    collect(dense, documents(3), tmp_path, SAMPLING, "documents", share=(0, 2))
    assert all(path.exists() for path in listed[0])


def test_continuations_end_where_the_model_ends_them() -> None:
    row = torch.tensor([5, 6, 2, 0, 0])
    assert collecting._until_end(row, 2).tolist() == [5, 6, 2]
    assert collecting._until_end(row, [9, 6]).tolist() == [5, 6]
    assert collecting._until_end(row, None).tolist() == collecting._until_end(row, 7).tolist() == row.tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--documents", "missing.txt"], "missing.txt"),
        (["--documents", "short.txt"], "Only 0 different documents"),
        (["--documents", "short.txt", "--eval-documents", "0"], "at least 1"),
    ],
)
def test_train_command_names_what_is_wrong(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("the sky is blue .")
    assert main(["train", "--model", "reference", "--out", "estimator", *arguments]) == 1
    assert message in capsys.readouterr().err
