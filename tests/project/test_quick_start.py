"""The page for a real model: its tables are what the commands say of such layouts, and its code runs."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from gatesight_hf.commands.cli import parser
from gatesight_hf.commands.memory import inspect_model, readable
from gatesight_hf.models.hybrid import HybridSpec
from gatesight_hf.training.dry_run import dry_run

from ..helpers.chats import REASONING, TEXT, VOCAB, chat_tokenizer
from ..helpers.models import random_estimator, tiny_model
from ..helpers.paths import ROOT
from .test_readme import gatesight_commands

PAGE = (ROOT / "examples" / "quick_start_qwen3_5.md").read_text(encoding="utf-8")
COMMON = {
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
}
EXPERTS = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
#: Layers, width, width of the MLPs, query heads, KV heads and value heads: of public copies of the configurations of
#: these models, and of their cards.
LAYOUTS: dict[str, tuple[int, int, int | None, int, int, int]] = {
    "Qwen3.5-0.8B": (24, 1024, 3584, 8, 2, 16),
    "Qwen3.5-4B": (32, 2560, 9216, 16, 4, 32),
    "Qwen3.5-9B": (32, 4096, 12288, 16, 4, 32),
    "Qwen3.5-27B": (64, 5120, 17408, 24, 4, 48),
    "Qwen3.5-35B-A3B": (40, 2048, None, 16, 2, 32),
}
NAMES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
         "linear_num_value_heads")  # fmt: skip


def config_of(name: str, folder: Path) -> Path:
    sizes = {key: value for key, value in zip(NAMES, LAYOUTS[name], strict=True) if value is not None}
    kind, more = ("qwen3_5_text", {}) if "intermediate_size" in sizes else ("qwen3_5_moe_text", EXPERTS)
    more |= {"shared_expert_intermediate_size": 512} if more else {}
    tied = sizes["hidden_size"] < 4096 and not more
    AutoConfig.for_model(kind, **COMMON, **sizes, **more, tie_word_embeddings=tied).save_pretrained(folder / name)
    return folder / name


def memory_rows(folder: Path) -> list[str]:
    """Of the page's table of memory."""
    rows = []
    for name in LAYOUTS:
        found = inspect_model(str(config_of(name, folder)), [32768, 131072, 262144])
        for number, of_context in enumerate(found["contexts"]):
            sizes = [of_context["kv_bytes"], of_context["kept"][0]["kv_bytes"], found["gdn_bytes"]]
            sizes += [of_context["signal_bytes"], of_context["prefilled_bytes"]]
            first = ("", "") if number else (name, readable(found["weights_bytes"]))
            rows.append("| " + " | ".join([*first, f"{of_context['context']:,}", *map(readable, sizes)]) + " |")
    return [re.sub(r"\| +(?=\|)", "| ", row) for row in rows]


def training_rows(folder: Path) -> list[str]:
    """Of the page's table of training, for the page's own command."""
    words = next(words for words in gatesight_commands(PAGE) if words[0] == "train")
    rows = []
    for name in LAYOUTS:
        args = parser().parse_args(words)
        args.model = str(config_of(name, folder))
        found = dry_run(args)
        sizes, bounds = found["estimator"], found["bounds"]
        cells = [f"{sizes['mlps']}", f"{sizes['parameters']:,}", f"{bounds['minutes_in_all']:g}"]
        cells += [f"{bounds['accelerator_gb']:g} GB", f"{bounds['disk_gb']:g} GB", f"{bounds['host_gb']:g} GB"]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows


def table(title: str) -> list[str]:
    return PAGE.split(f"| {title} |", 1)[1].split("\n\n")[0].splitlines()[2:]


@pytest.mark.slow
def test_the_tables_are_what_the_commands_say(tmp_path: Path) -> None:
    assert table("model | weights") == memory_rows(tmp_path)
    assert table("model | MLPs") == training_rows(tmp_path)


def test_layouts_are_as_the_page_says(tmp_path: Path) -> None:
    for name in LAYOUTS:
        spec = HybridSpec.from_config(AutoConfig.from_pretrained(config_of(name, tmp_path)))
        sizes = (spec.num_attention_layers, spec.num_key_value_heads, len(spec.gdn_layers), spec.num_value_heads)
        attention, heads, gdn, values = sizes
        assert f"{name}: {attention} attention layers of {heads} KV heads, {gdn} GDN layers of {values}" in PAGE


def test_the_code_runs_one_block_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tiny model with a template that reasons, in place of the download."""
    monkeypatch.chdir(tmp_path)
    model = tiny_model(vocab_size=VOCAB)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name, **options: model)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name, **options: chat_tokenizer(REASONING))
    Path("document.txt").write_text(TEXT, encoding="utf-8")
    random_estimator(model).save_pretrained("my-estimator")
    names: dict[str, Any] = {}
    blocks = re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 2
    with torch.random.fork_rng():
        for block in blocks:
            exec(block, names)
    session = names["session"]
    assert [message["role"] for message in session.history] == ["user", "assistant"] * 2
    assert session.report().achieved_fraction == pytest.approx(0.1, abs=0.05)
    assert len(names["answers"]) == 2 and Path("document.gatesight").stat().st_size
