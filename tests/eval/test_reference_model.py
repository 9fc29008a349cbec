"""The scripts that make the reference model: the fast delta rule is the model's own; training goes on after a stop."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

from ..helpers.paths import ROOT

ROOM = ROOT / "eval" / "reference_model"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOM / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("length", [1, 31, 32, 100])
@pytest.mark.parametrize("groups", [1, 2])
def test_fast_delta_rule_equals_the_models_own_with_gradients(length: int, groups: int) -> None:
    generator = torch.Generator().manual_seed(length)

    def inputs() -> list[Tensor]:
        shapes = [(2, length, 2, 16)] * 2 + [(2, length, 2 * groups, 8)]
        generator.manual_seed(length)
        states = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
        decay = torch.rand(2, length, 2 * groups, generator=generator).neg().requires_grad_()
        beta = torch.rand(2, length, 2 * groups, generator=generator).requires_grad_()
        return [*states, decay, beta]

    with torch.enable_grad():
        fast, own = inputs(), inputs()
        found = load("fast_delta").chunk_gated_delta_rule(*fast)[0]
        expected = modeling_qwen3_5.torch_chunk_gated_delta_rule(*own, use_qk_l2norm_in_kernel=True)[0]
        found.square().sum().backward()
        expected.square().sum().backward()
    assert torch.allclose(found, expected, atol=1e-6)
    for one, other in zip(fast, own, strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.allclose(one.grad, other.grad, atol=2e-5, rtol=1e-4)


def test_the_fast_rule_is_taken_back_after_an_error() -> None:
    original = modeling_qwen3_5.torch_chunk_gated_delta_rule

    def fail() -> None:
        with load("fast_delta").fast_delta_rule():
            assert modeling_qwen3_5.torch_chunk_gated_delta_rule is not original
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert modeling_qwen3_5.torch_chunk_gated_delta_rule is original


@pytest.mark.slow
def test_training_goes_on_where_it_stopped(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOM / "train.py"), "--out", str(tmp_path), "--hidden-size", "32", "--threads", "1"]
    command += ["--minutes", "0.05", "--tokens-per-step", "256"]
    steps = []
    for _ in range(2):
        subprocess.run(command, check=True, capture_output=True)
        steps.append(torch.load(tmp_path / "checkpoint.pt", weights_only=True)["state"]["step"])
    assert 0 < steps[0] < steps[1]
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["layer_types"].count("linear_attention") == 6
