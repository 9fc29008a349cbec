"""Every operation, as a Triton kernel and as its torch twin, against float64 computed here in the plainest way.

Without a GPU the kernels are interpreted. The error of either is at most twice that of the same maths in plain torch in
the inputs' dtype, as relative RMS; selection and compaction are exact.
"""

import importlib.util
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gatesight_kernels as kernels
from gatesight_kernels import score

pytestmark = pytest.mark.usefixtures("poisoned")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
NAMES = {F32: "f32", BF16: "bf16", F16: "f16"}
#: Where plain torch happens to be exact.
FLOOR = torch.finfo(F32).eps
NO_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(params=["torch", pytest.param("triton", marks=NO_TRITON)])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, device: str) -> Iterator[str]:
    """Twin and kernel in turn."""
    with kernels.use_backend(request.param):
        yield request.param


def few_programs(monkeypatch: pytest.MonkeyPatch, device: str, length: int) -> None:
    """Larger blocks for long inputs: an interpreted program takes milliseconds, whatever its size."""
    if device == "cpu" and length >= 1000 and importlib.util.find_spec("triton"):
        for module in ("gates", "signals"):
            monkeypatch.setattr(f"gatesight_kernels.triton_ops.{module}.BLOCK_T", 512)


def cases(letters: str, *rows: tuple[Any, ...]) -> Any:
    """Parametrise `case` with readable ids: `B2-T63-bf16`."""

    def shown(letter: str, value: Any) -> str:
        return NAMES.get(value) or f"{'' if letter == '_' else letter}{value}".replace(", ", "+").strip("()")

    ids = ["-".join(map(shown, letters.split(), row)) for row in rows]
    return pytest.mark.parametrize("case", rows, ids=ids)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.cpu().double() - exact).norm() / exact.norm())


def check(found: Tensor, exact: Tensor, plain: Tensor) -> None:
    assert found.shape == exact.shape
    assert error(found, exact) <= 2 * error(plain, exact) + FLOOR


# -- gdn_signals -------------------------------------------------------------------------------------------------------


def plain_signals(dtype: torch.dtype, b: Tensor, a: Tensor, values: Tensor, *others: Tensor | None) -> Tensor:
    b, a, values = b.to(dtype), a.to(dtype), values.to(dtype).flatten(2)
    log_a, dt_bias, weight, bias, context = (None if other is None else other.to(dtype) for other in others)
    assert log_a is not None and dt_bias is not None and weight is not None
    past = values.new_zeros(len(values), len(weight), weight.shape[1] - 1) if context is None else context
    inputs = torch.cat([past.mT, values], dim=1)
    mixed = torch.zeros_like(values) if bias is None else bias.expand_as(values)
    for tap in range(weight.shape[1]):
        mixed = mixed + inputs[:, tap : tap + values.shape[1]] * weight[:, tap]
    magnitude = F.silu(mixed).unflatten(-1, (len(log_a), -1)).norm(dim=-1)
    return torch.stack([b.sigmoid(), -log_a.exp() * F.softplus(a + dt_bias), magnitude], dim=2)


def signal_inputs(case: tuple[Any, ...]) -> list[Tensor | None]:
    """Views of projections: of one group behind the keys, as Qwen3.5 has it, or of many, as Qwen3-Next has it."""
    batch, length, heads, size, groups, taps, bias, context, dtype = case
    channels = heads * size
    per_group = channels // groups
    values = torch.randn(batch, length, groups, 2 * per_group + 3, dtype=dtype)[..., per_group + 1 : 2 * per_group + 1]
    b, a = torch.randn(batch, length, groups, 2, heads // groups, dtype=dtype).mul(4).unbind(-2)
    log_a, dt_bias, weight = torch.randn(heads), torch.randn(heads).to(dtype), torch.randn(channels, taps, dtype=dtype)
    past = torch.randn(batch, channels, taps + 1, dtype=dtype)[..., 2:] if context else None
    of_conv = torch.randn(channels, dtype=dtype) if bias else None
    return [b.flatten(2), a.flatten(2) if groups > 1 else a[:, :, 0], values, log_a, dt_bias, weight, of_conv, past]


@cases(
    "B T HV D G K bias context _",
    (1, 1, 4, 16, 1, 4, False, True, F32),
    (3, 1, 6, 5, 3, 5, True, True, BF16),
    (2, 3, 4, 16, 2, 5, False, False, F16),
    (2, 63, 6, 20, 3, 4, True, True, F32),
    (1, 100, 4, 24, 4, 3, True, False, BF16),
    (1, 17, 48, 16, 16, 4, False, True, BF16),
    (2, 20, 48, 3, 1, 2, False, True, F16),
    (2, 1000, 4, 16, 2, 4, False, True, BF16),
    (1, 1000, 4, 7, 1, 1, True, False, F32),
    (1, 4097, 4, 8, 1, 4, False, True, F16),
)
@pytest.mark.usefixtures("backend")
def test_signals(case, device, monkeypatch):
    few_programs(monkeypatch, device, case[1])
    inputs = signal_inputs(case)
    found = kernels.gdn_signals(*[tensor if tensor is None else tensor.to(device) for tensor in inputs])
    assert found.dtype == case[-1]
    exact, plain = plain_signals(torch.float64, *inputs), plain_signals(case[-1], *inputs)
    for signal in range(3):
        check(found[:, :, signal], exact[:, :, signal], plain[:, :, signal])
