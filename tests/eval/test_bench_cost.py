"""The cost benchmark: a run on a very small model, no times of wrong outputs, and the least work by hand."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gatesight_eval.bench import cost as bench_cost
from gatesight_eval.bench import model as bench_model
from gatesight_eval.bench import ops as bench_ops
from gatesight_eval.bench import phases as bench_phases
from gatesight_eval.bench.check import check_recording
from gatesight_eval.bench.machine import PeakMeter
from gatesight_eval.bench.phases import PHASES, run_pass
from gatesight_hf import EstimatorConfig, GateSightCache
from gatesight_hf.entries import GateSightAttentionLayer
from gatesight_hf.methods import KeyDiff
from gatesight_hf.models import HybridSpec
from gatesight_hf.models import listening as signals
from gatesight_hf.scoring import recording

CPU = torch.device("cpu")
LENGTHS = (24, 48)
QUICK = ["--tiny", "--repeats", "1", "--lengths", "32", "--methods", "gatesight"]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of a run with all methods, whose longer context is prefilled in chunks."""
    out = tmp_path_factory.mktemp("bench") / "runs" / "cost"
    lengths = ",".join(map(str, LENGTHS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_phases, "CHUNK", 32)
        assert bench_cost.main(["--tiny", "--repeats", "1", "--lengths", lengths, "--output", str(out)]) == 0
    return out


def test_every_phase_of_every_method_is_measured(prefix: Path) -> None:
    result = json.loads(prefix.with_suffix(".json").read_text(encoding="utf-8"))
    assert [length["tokens"] for length in result["lengths"]] == list(LENGTHS)
    for length in result["lengths"]:
        prefill = length["prefill"]
        assert prefill["ms"] > 0 and prefill["peak_bytes"] > 0 and prefill["floor_ms"] > 0
        assert tuple(length["methods"]) == bench_cost.METHODS
        for name, method in length["methods"].items():
            assert tuple(method["phases"]) == PHASES
            for found in method["phases"].values():
                assert all(math.isfinite(v) and v >= 0 for v in found.values() if isinstance(v, float))
                assert found["percent_of_prefill"] == pytest.approx(100 * found["ms"] / prefill["ms"])
                assert found["ms_per_1k_tokens"] == pytest.approx(found["ms"] * 1000 / length["tokens"])
                assert ("floor_ms" in found) == (name == "gatesight")
            parts = [found["percent_of_prefill"] for found in method["phases"].values()]
            assert method["percent_of_prefill"] == pytest.approx(sum(parts))
            assert (method["phases"]["signals"]["ms"] > 0) == (name == "gatesight")
            assert method["phases"]["scoring"]["ms"] > 0 and method["phases"]["compaction"]["peak_bytes"] > 0
    scoring = [length["methods"]["gatesight"]["phases"]["scoring"]["peak_bytes"] for length in result["lengths"]]
    assert scoring[1] >= 48 * bench_model.signal_bytes_per_token(slice_spec(), 2)  # signals are laid side by side
    assert set(result["growth"]) == {"prefill", *bench_cost.METHODS}
    assert all(check["passed"] for check in result["checks"]) and "outputs_differ" not in result
    assert {verdict["verdict"] for verdict in result["verdicts"]} == {"not measured"}  # of a very small model
    assert result["memory"]["ratio"] == result["memory"]["whole_model_ratio"]
    assert result["backend"]["versions"]["torch"] and "commit" in result and result["asked"]["kept_fraction"] == 0.1
    assert len(result["implementations"]) == 4 and all(found["ratio"] > 0 for found in result["implementations"])
    text = prefix.with_suffix(".md").read_text(encoding="utf-8")
    assert all(part in text for part in ("## 24 tokens", "## 48 tokens", "| kvzip |", "## Goals", "Commit"))
    assert prefix.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_json_alone_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_cost.main(["--tiny", "--repeats", "1", "--lengths", "32", "--methods", "keydiff", "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["lengths"][0]["methods"]) == ["keydiff"] and result["memory"] is None


# -- no times of wrong outputs -----------------------------------------------------------------------------------------


def wrong_signals(patch: pytest.MonkeyPatch) -> None:
    plain = signals.gdn_signals
    patch.setattr(signals, "gdn_signals", lambda *args, **kwargs: 1.02 * plain(*args, **kwargs))


def wrong_gates_at_the_end(patch: pytest.MonkeyPatch) -> None:
    plain = recording.gate_means
    patch.setattr(recording, "gate_means", lambda gate: plain(gate) * (1 + (torch.arange(gate.shape[1]) > 20)))


def wrong_scores(patch: pytest.MonkeyPatch) -> None:
    plain = bench_model.SliceEstimator.score
    patch.setattr(bench_model.SliceEstimator, "score", lambda *args: [1.02 * of_layer for of_layer in plain(*args)])


def wrong_entries(patch: pytest.MonkeyPatch) -> None:
    plain = GateSightAttentionLayer.compact
    patch.setattr(GateSightAttentionLayer, "compact", lambda self, indices, *args: plain(self, indices.flip(1), *args))


@pytest.mark.parametrize("breaks", [wrong_signals, wrong_gates_at_the_end, wrong_scores, wrong_entries])
def test_wrong_outputs_are_not_timed(
    breaks: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    breaks(monkeypatch)
    assert bench_cost.main([*QUICK, "--json", str(tmp_path / "out.json")]) == 1
    found = capsys.readouterr()
    record = (tmp_path / "out.json").read_text(encoding="utf-8")
    assert "outputs differ" in found.err and "| no |" in found.out
    for word in ("percent", "ratio", "_ms", 'lengths": [\n    {'):
        assert word not in record
    assert "%" not in found.out and "ratio" not in found.out


def test_no_implementation_may_be_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_ops, "plain_select", lambda scores, count: torch.arange(count).expand(1, 2, -1))
    assert bench_cost.main([*QUICK, "--json", "-"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert "selection in an attention layer: topk, sort" in result["outputs_differ"]
    assert not {"lengths", "implementations", "verdicts"} & set(result)


def test_nothing_stays_patched_when_a_phase_fails() -> None:
    class Fails(KeyDiff):
        def score_row(self, *args: Any) -> Tensor:
            raise ArithmeticError("no scores")

    owners = [(signals, "gdn_signals"), (GateSightCache, "record_attention"), (GateSightCache, "prefill")]
    before = [vars(owner).get(name) for owner, name in owners]
    model = bench_model.build_slice(True, torch.float32, CPU, 0)
    for checked in (False, True):
        with pytest.raises(ArithmeticError, match="no scores"):
            run_pass(model, "keydiff", Fails(), bench_model.random_ids(model, 32, 0), 0.1, checked)
    assert [vars(owner).get(name) for owner, name in owners] == before
    assert not hasattr(model.model, "_gatesight_hooks")


# -- parts -------------------------------------------------------------------------------------------------------------


def slice_spec(layers: int = bench_model.SLICE_LAYERS, tiny: bool = True) -> HybridSpec:
    return HybridSpec.from_config(bench_model.config(layers, tiny))


def test_least_work_of_the_whole_model_by_hand() -> None:
    whole = slice_spec(bench_model.WHOLE_LAYERS, tiny=False)
    estimator = EstimatorConfig.for_model(whole, "Qwen3.8-27B")
    assert (len(whole.gdn_layers), whole.num_attention_layers) == (48, 16)
    assert [estimator.input_size(j) for j in (0, 1, 15)] == [435, 867, 867]
    assert bench_model.signal_bytes_per_token(whole, 2) == 13_824
    assert bench_model.kv_bytes_per_token(whole, 2) == 65_536
    assert bench_model.signals_work(whole, 10, 2, kernel=4) == bench_model.Work(
        10 * 48 * 2 * (6144 + 48 + 48 + 144), 10 * 48 * (6144 * 13 + 480)
    )
    assert bench_model.gates_work(whole, 10, 2) == bench_model.Work(10 * 16 * 24 * 256 * 2, 10 * 16 * 24 * 256 * 4)
    flop = 10 * (15 * (2 * 867 * 4 * 64 + 2 * 4 * 64) + 2 * 435 * 4 * 64 + 2 * 4 * 64)
    assert bench_model.scoring_work(estimator, 10, 2) == bench_model.Work(
        10 * (15 * 864 + 432) * 2 + 10 * 16 * 32, flop
    )
    assert bench_model.compaction_work(whole, 7, 2) == bench_model.Work(16 * 4 * 7 * (4 * 512 + 8), 0)


def test_the_slice_scores_with_as_many_inputs_as_the_whole_model() -> None:
    model = bench_model.build_slice(True, torch.float32, CPU, 0)
    scorer = bench_model.slice_estimator(model, 0)
    assert scorer.config.input_size(0) == 6 * 3 * model.config.linear_num_value_heads + 3
    assert [scorer.config.gdn_windows, scorer.num_parameters] == [((0, 1, 2, 0, 1, 2),), 2 * (75 * 64 + 64 + 64 + 1)]
    checks = check_recording(model, scorer, bench_model.random_ids(model, 33, 1), 20)
    assert len(checks) == 3 * 3 + 1 and all(check.error < 1e-6 for check in checks)


def test_peaks_are_those_of_tensors() -> None:
    meter = PeakMeter(CPU)
    with meter.watch():
        for size in (1000, 3000):
            with meter.part("outer"):
                held = torch.empty(size)
                with meter.part("inner"):
                    _ = held.neg().neg()
                del held
    assert (meter.peak("outer"), meter.peak("inner"), meter.peak("other")) == (3 * 12_000, 2 * 12_000, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths=-5,64"], "numbers of tokens >= 16"),
        (["--lengths", "many"], "numbers of tokens >= 16"),
        (["--methods", "magic"], "no methods ['magic']; there are gatesight, snapkv"),
        (["--kept-fraction", "1.5"], "1.5"),
        (["--kept-fraction", "1"], "scores and moves nothing"),
        (["--kept-fraction", "0.99", "--lengths", "16"], "keeps all of 16 tokens"),
        (["--json", "/"], "cannot write '/'"),
        (["--repeats", "0"], "whole number >= 1"),
        (["--dtype", "int8"], "invalid choice"),
    ],
)
def test_wrong_arguments_say_what_is_right(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench_cost.main(["--tiny", *arguments])
    assert message in capsys.readouterr().err
