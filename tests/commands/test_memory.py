"""What `gatesight inspect MODEL` says of memory is what a cache really holds, to the byte, in every family."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3_5Config, Qwen3_5MoeConfig

from gatesight_hf import GateSightCache
from gatesight_hf.commands.cli import main
from gatesight_hf.commands.memory import inspect_model, readable
from gatesight_hf.entries.held import storage_bytes
from gatesight_hf.reference import ESTIMATOR_PATH, MODEL_PATH
from gatesight_hf.training.dry_run import dry_run

from ..entries.test_sparse import PLE
from ..helpers.hub_server import FakeRepo
from ..helpers.models import FAMILIES, random_estimator, tiny_model
from ..helpers.running import compacted, forward, prefilled, random_ids
from ..training.test_training_scale import arguments_for

CONTEXT, FRACTIONS = 50, (0.3, 1.0)
VARIANTS = {name: (name, {}) for name in FAMILIES} | {"qwen4_exp with embeddings": ("qwen4_exp", PLE)}


def kept_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    return found["contexts"][0]["kept"]


def positions_of(cache: GateSightCache) -> list[Tensor | None]:
    layers = cache.context.attention_layers
    return [tensor for layer in layers for tensor in (layer.kept_positions, getattr(layer, "positions", None))]


def windows_of(cache: GateSightCache) -> int:
    gdn = cache.context.gdn_layers
    windows = [layer for layer in cache.context.bounded_layers if layer not in gdn]
    return storage_bytes(tensor for layer in windows for tensor in (layer.keys, layer.values))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_sizes_are_those_of_a_real_cache(variant: str, rows: int, dtype: str, tmp_path: Path) -> None:
    family, options = VARIANTS[variant]
    model = tiny_model(family, **options).to(getattr(torch, dtype))
    model.config.save_pretrained(tmp_path)
    found = inspect_model(str(tmp_path), [CONTEXT], FRACTIONS, dtype, rows)
    (row,) = found["contexts"]

    cache = prefilled(model, random_ids(CONTEXT, rows), chunks=[20, 29, 1], allocation="flat")
    report = cache.report()
    assert row["kv_bytes"] == report.kv_bytes and row["index_bytes"] == report.index_bytes
    assert row["signal_bytes"] == report.signal_bytes
    assert row["position_bytes"] == storage_bytes(positions_of(cache))
    assert found["gdn_bytes"] == report.gdn_bytes
    states = [layer.state() for layer in cache.context.gdn_layers]
    for name in ("recurrent", "convolution"):
        held = [tensor for state in states for key, tensor in state.items() if key.startswith(name[:4])]
        assert found[f"{name}_bytes"] == sum(tensor.untyped_storage().nbytes() for tensor in held)

    for kept in kept_of(found):
        child = cache.fork(kept_fraction=kept["kept_fraction"])
        report = child.compact()
        assert (kept["kv_bytes"], kept["index_bytes"]) == (report.kv_bytes, report.index_bytes)
        assert kept["position_bytes"] == storage_bytes(positions_of(child))
        assert found["sliding_window_bytes"] >= windows_of(child)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fork_adds_what_is_said(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.config.save_pretrained(tmp_path)
    said = inspect_model(str(tmp_path), [CONTEXT], dtype="float32")["child"]
    parent = compacted(model, random_ids(CONTEXT))
    child = parent.fork()
    own = {s.untyped_storage().data_ptr() for layer in parent.context.gdn_layers for s in layer.state().values()}
    new = [tensor for layer in child.context.gdn_layers for tensor in layer.state().values()]
    assert not own & {tensor.untyped_storage().data_ptr() for tensor in new}
    assert storage_bytes(new) == said["gdn_bytes"]
    before = child.report().kv_bytes
    forward(model, random_ids(2), child)
    assert child.report().kv_bytes - before == 2 * said["kv_bytes_per_token"]
    forward(model, random_ids(1), child)
    assert windows_of(child) == said["sliding_window_bytes"]


def test_gate_budgets_take_the_same_and_signals_need_an_estimator(dense: Any, tmp_path: Path) -> None:
    dense.config.save_pretrained(tmp_path)
    (kept,) = kept_of(inspect_model(str(tmp_path), [CONTEXT], [0.2], "float32"))
    cache = compacted(dense, random_ids(CONTEXT), kept_fraction=0.2, allocation="gate")
    assert len(set(cache.report().kept_per_layer[0])) > 1
    assert (kept["kv_bytes"], kept["position_bytes"]) == (cache.report().kv_bytes, storage_bytes(positions_of(cache)))


@pytest.mark.parametrize(
    ("family", "around"), [("qwen3_5", Qwen3_5Config), ("qwen3_5_moe", Qwen3_5MoeConfig)], ids=["dense", "moe"]
)
def test_of_a_multimodal_configuration_the_text_model_counts(family: str, around: Any, tmp_path: Path) -> None:
    text = tiny_model(family).config
    text.save_pretrained(tmp_path / "text")
    around(text_config=text.to_dict()).save_pretrained(tmp_path / "around")
    alone, found = (inspect_model(str(tmp_path / name), [CONTEXT]) for name in ("text", "around"))
    assert {**found, "model": "", "estimator": ""} == {**alone, "model": "", "estimator": ""}
    assert found["parameters"] == sum(parameter.numel() for parameter in tiny_model(family).parameters())
    assert found["weights_bytes"] == found["parameters"] * (2 if found["dtype"] == "bfloat16" else 4)


def test_the_estimator_is_that_of_the_dry_run(dense: Any, tmp_path: Path) -> None:
    dense.config.save_pretrained(tmp_path)
    found = inspect_model(str(tmp_path / "config.json"))
    assert found["estimator"].items() >= dry_run(arguments_for(tmp_path))["estimator"].items()
    assert found["estimator"]["parameters"] == random_estimator(dense, hidden_size=64).config.num_parameters
    assert found["estimator"]["known"] is None


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_same_verb_reads_models_and_estimators(capsys: pytest.CaptureFixture[str]) -> None:
    for source in ("reference", str(MODEL_PATH), str(MODEL_PATH / "config.json")):
        assert main(["inspect", source, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [row["context"] for row in found["contexts"]] == [4096], "the longest that the model is made for"
        assert found["dtype"] == "float32" and found["longest_context"] == 4096
        assert (found["estimator"]["known"] is not None) == (source == "reference")
    assert main(["inspect", str(ESTIMATOR_PATH), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["attention_layers"] == 2


def test_configurations_come_from_the_hub_without_weights(hub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    repo = hub.repos["org/model"] = FakeRepo()
    old = repo.commit(
        {"config.json": tiny_model().config.to_json_string().encode(), "model.safetensors": b"no weights"}
    )
    repo.commit({"config.json": tiny_model("qwen3_next").config.to_json_string().encode()})
    for more, kind in (([], "qwen3_next"), (["--revision", old], "qwen3_5_text")):
        assert main(["inspect", "org/model", "--json", *more]) == 0
        assert json.loads(capsys.readouterr().out)["model_type"] == kind
    assert not [path for _, path, _ in hub.requests if "safetensors" in path]


def test_people_get_a_table_and_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model(max_position_embeddings=200_000).config.save_pretrained(tmp_path)
    arguments = ["inspect", str(tmp_path), "--kept-fraction", "0.1", "--kept-fraction", "0.05", "--rows", "2"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    table = [line.split() for line in printed.splitlines() if line.startswith((" ", "1", "2")) and "B  " in line]
    assert [line[0] for line in table] == ["4,096", "32,768", "131,072", "200,000"]
    assert "kept 0.1" in printed and "kept 0.05" in printed and "All of it for 2 rows" in printed
    assert "No estimator for this model is known" in printed
    assert f"gatesight train --model {tmp_path} --documents" in printed and "KeyDiff" in printed
    assert main(["inspect", "reference", "--context", "8192"]) == 0
    printed = capsys.readouterr().out
    assert "8,192 tokens are more than the 4,096 of the model" in printed and "bundled" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reference", "--context", "0"], "context"),
        (["reference", "--rows", "0"], "rows"),
        (["reference", "--kept-fraction", "2"], "kept_fraction must be in (0, 1]"),
        (["reference", "--dtype", "float17"], "no data type"),
        (["reference", "--revision", "main"], "is on this machine"),
        ([str(ESTIMATOR_PATH), "--rows", "2"], "--rows: for models"),
        (["./missing"], "no such folder"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_model_that_is_no_hybrid_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert main(["inspect", str(tmp_path)]) == 1
    assert "needs a hybrid" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (13 * 1024**2, "13.0 MiB"), (2**45, "32.0 TiB")],
)
def test_sizes_are_readable(size: int, text: str) -> None:
    assert readable(size) == text
