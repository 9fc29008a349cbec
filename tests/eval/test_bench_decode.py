"""The decoding benchmark: a run on a very small model, and no times of wrong outputs."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gatesight_eval.bench import decode as bench_decode
from gatesight_hf.entries.frozen import FrozenAttentionLayer

QUICK = ["--tiny", "--dtype", "float32", "--backend", "eager", "--repeats", "1", "--steps", "1", "--lengths", "256"]


@pytest.fixture(autouse=True)
def _compiled_anew() -> None:
    torch._dynamo.reset()


def test_all_ways_are_checked_and_measured(tmp_path: Path) -> None:
    prefix = tmp_path / "runs" / "decode"
    assert bench_decode.main([*QUICK, "--rows", "2", "--output", str(prefix)]) == 0
    result = json.loads(prefix.with_suffix(".json").read_text(encoding="utf-8"))
    assert all(check["passed"] for check in result["checks"]) and len(result["checks"]) == len(bench_decode.WAYS) + 1
    (setting,) = result["settings"]
    assert (setting["tokens"], setting["rows"], setting["kept_per_head"]) == (256, 2, 26)
    for way, found in setting["ways"].items():
        evicted = bench_decode.WAYS[way][0]
        assert found["bytes"]["entries"] == 2 * (26 if evicted else 256) * 2 * 2 * 32 * 4  # K and V, heads, channels
        assert (found["bytes_ratio"] > 1) == evicted
        assert found["ms"] > 0 and found["tokens_per_s"] == pytest.approx(2e3 / found["ms"])
    assert setting["ways"][bench_decode.BASELINE]["speed_ratio"] == 1
    text = prefix.with_suffix(".md").read_text(encoding="utf-8")
    assert all(f"| {way} |" in text for way in bench_decode.WAYS)
    assert prefix.with_suffix(".png").stat().st_size > 1000


def test_wrong_outputs_get_no_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = FrozenAttentionLayer.attention_mask

    def wrong(layer: FrozenAttentionLayer, *args: object) -> Tensor:
        mask = right(layer, *args)  # type: ignore[arg-type]
        return mask.index_fill(-1, torch.arange(8), False)

    monkeypatch.setattr(FrozenAttentionLayer, "attention_mask", wrong)
    assert bench_decode.main([*QUICK, "--rows", "1", "--output", str(tmp_path / "decode")]) == 1
    result = json.loads((tmp_path / "decode.json").read_text(encoding="utf-8"))
    assert "settings" not in result and "compacted, frozen" in result["outputs_differ"]
    assert "no times" in (tmp_path / "decode.md").read_text(encoding="utf-8")
    assert "error: outputs differ" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--kept-fraction", "1"], ["--lengths", "16"], ["--rows", "0"], ["--steps", "0"]])
def test_impossible_arguments_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        bench_decode.main([*QUICK, *wrong])
