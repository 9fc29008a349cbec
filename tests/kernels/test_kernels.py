"""Signals, gates and scores, by Triton kernels and by their torch twins, against float64 in the plainest way.

The error of either, as relative RMS, is at most twice that of the same maths in plain torch in the inputs' dtype.
Without a GPU the kernels are interpreted.
"""

import importlib.util
import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gatesight_kernels as kernels
from gatesight_kernels import score

from ..helpers.kernel_fixtures import NO_TRITON, cases, sparse

pytestmark = pytest.mark.usefixtures("poisoned")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
#: Where plain torch happens to be exact.
FLOOR = torch.finfo(F32).eps


def few_programs(monkeypatch: pytest.MonkeyPatch, device: str, length: int) -> None:
    """Larger blocks for long inputs: an interpreted program takes milliseconds, whatever its size."""
    if device == "cpu" and length >= 1000 and importlib.util.find_spec("triton"):
        for module in ("gates", "signals"):
            monkeypatch.setattr(f"gatesight_kernels.triton_ops.{module}.BLOCK_T", 512)


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
    return [b.flatten(2), a.flatten(2), values, log_a, dt_bias, weight, of_conv, past]


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
    check_signals(case, device)


def check_signals(case: tuple[Any, ...], device: str) -> None:
    inputs = signal_inputs(case)
    found = kernels.gdn_signals(*[tensor if tensor is None else tensor.to(device) for tensor in inputs])
    assert found.dtype == case[-1]
    exact, plain = plain_signals(torch.float64, *inputs), plain_signals(case[-1], *inputs)
    for signal in range(3):
        check(found[:, :, signal], exact[:, :, signal], plain[:, :, signal])


@pytest.mark.usefixtures("backend")
def test_small_decays_keep_their_digits(device):
    """Relative to each decay by itself: softplus of a very negative number is a very small one."""
    a = torch.linspace(-80, 80, 321)[None, :, None].expand(-1, -1, 4)
    zeros, values = torch.zeros(4), torch.zeros(1, 321, 1, 4)
    inputs = [a, a, values, zeros, zeros, torch.zeros(4, 1)]
    found = kernels.gdn_signals(*[tensor.to(device) for tensor in inputs])[:, :, 1].cpu()
    torch.testing.assert_close(found.double(), -a.double().exp().log1p(), rtol=1e-5, atol=0)


# -- gate_means --------------------------------------------------------------------------------------------------------


@cases(
    "B T H D _",
    (1, 1, 4, 32, F32),
    (3, 1, 1, 1, BF16),
    (2, 63, 6, 20, BF16),
    (1, 100, 48, 8, F32),
    (2, 1000, 4, 33, F16),
    (1, 4097, 3, 16, BF16),
)
@pytest.mark.parametrize("layout", ["interleaved", "channels apart"])
@pytest.mark.usefixtures("backend")
def test_gates(case, layout, device, monkeypatch):
    few_programs(monkeypatch, device, case[1])
    *shape, size, dtype = case
    gate = torch.randn(*shape, 2, size, dtype=dtype).mul(4)[..., 1, :]
    if layout == "channels apart":
        gate = gate.mT.contiguous().mT
    found = kernels.gate_means(gate.to(device))
    assert found.dtype == F32
    check(found, gate.double().sigmoid().mean((2, 3)), gate.sigmoid().mean((2, 3)))


# -- score_entries -----------------------------------------------------------------------------------------------------


def plain_scores(dtype: torch.dtype, x: Tensor, ages: bool, *parameters: Tensor, first: int = 0) -> Tensor:
    """Standardise, linear, GELU, linear, head after head."""
    position, oldest = first + torch.arange(len(x), dtype=torch.float64), max(1, first + len(x) - 1)
    age, scale = first + len(x) - 1 - position, math.log(1 + oldest)
    of_age = torch.stack([age / oldest, (1 + age).log() / scale, (1 + position).log() / scale], dim=1)
    x = torch.cat([x.to(dtype), of_age.to(dtype)], dim=1) if ages else x.to(dtype)
    weight_in, bias_in, weight_out, bias_out, mean, std = (tensor.to(dtype) for tensor in parameters)
    x = (x - mean) / std
    heads = zip(weight_in, bias_in, weight_out, bias_out, strict=True)
    return torch.stack([F.gelu(x @ w_in + b_in) @ w_out + b_out for w_in, b_in, w_out, b_out in heads])


def score_inputs(case: tuple[Any, ...], device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Signals `[T, 3 · HV]` of each layer, side by side in a run as they are recorded; and parameters of the MLPs."""
    length, values, runs, heads, width, ages, spread, dtype = case
    size = 3 * values * sum(runs)
    total = size + 3 * ages
    mean, std = torch.randn(total), torch.rand(total) + 0.5
    if spread != "usual":  # from the trainer's floor on
        std[:size] = 10 ** ((7 if spread == "wide" else 4) * torch.rand(size) - 4)
        mean[:size] *= std[:size] if spread == "wide" else 1
    blocks: list[Tensor] = []
    for part in torch.arange(size).split([3 * values * run for run in runs]):
        recorded = mean[part] + std[part] * torch.randn(2, length + 1, len(part))
        blocks += [layer[1, 1:] for layer in recorded.to(dtype).to(device).split(3 * values, dim=-1)]
    weights = [torch.randn(heads, total, width) * total**-0.5, 0.1 * torch.randn(heads, width)]
    weights += [torch.randn(heads, width) * width**-0.5, torch.randn(heads)]
    return blocks, [*weights, mean, std]


@cases(
    "T HV runs H W ages _ _",
    (1, 4, (1,), 8, 64, True, "usual", F32),
    (63, 4, (3,), 1, 64, True, "usual", BF16),
    (63, 6, (1, 1), 3, 20, True, "usual", F16),
    (100, 48, (3, 3), 4, 64, True, "usual", BF16),
    (100, 48, (3,), 4, 64, True, "usual", F32),
    (100, 6, (2, 1, 3), 2, 100, True, "usual", F32),
    (100, 4, (5,), 2, 5, False, "usual", BF16),
    (65, 4, (1, 3), 2, 1, True, "usual", F32),
    (70, 4, (2, 2), 2, 200, True, "usual", F16),
    (1000, 4, (1, 2), 8, 33, True, "usual", BF16),
    (4097, 4, (2,), 2, 16, True, "usual", F32),
    (4097, 6, (1,), 3, 16, True, "usual", F16),
    *[(200, 6, (3,), 2, 64, True, spread, dtype) for spread in ("wide", "saturated") for dtype in (F32, BF16, F16)],
)
@pytest.mark.usefixtures("backend")
def test_scores(case, device):
    check_scores(case, device)


def check_scores(case: tuple[Any, ...], device: str) -> None:
    blocks, parameters = score_inputs(case, device)
    *_, ages, _, dtype = case
    mlp = kernels.pack_mlp(*parameters, ages=ages, dtype=kernels.packed_dtype(blocks[0]), device=device)
    found = kernels.score_entries(blocks, mlp)
    assert found.dtype == F32
    x = torch.cat(blocks, dim=1).cpu()
    check(found, plain_scores(torch.float64, x, ages, *parameters), plain_scores(dtype, x, ages, *parameters))


@pytest.mark.parametrize("first", [1, 100, 150])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.usefixtures("backend")
def test_the_last_tokens_of_a_context_are_scored_as_in_the_whole(dtype, first, device):
    blocks, parameters = score_inputs((200, 4, (2, 1), 2, 16, True, "usual", dtype), device)
    mlp = kernels.pack_mlp(*parameters, ages=True, dtype=kernels.packed_dtype(blocks[0]), device=device)
    found = kernels.score_entries([block[first:] for block in blocks], mlp, first)
    torch.testing.assert_close(found, kernels.score_entries(blocks, mlp)[:, first:], rtol=1e-5, atol=1e-5)
    at_start = kernels.score_entries([block[first:] for block in blocks], mlp)
    assert (found - at_start).abs().max() > 1e-3


@pytest.mark.parametrize(("first", "length"), [(0, 1), (1, 1), (5000, 70), (2**20 - 70, 70), (2**24, 3)])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.usefixtures("backend")
def test_what_comes_late_in_a_long_context(dtype, first, length, device):
    blocks, parameters = score_inputs((length, 4, (2, 1), 2, 16, True, "usual", dtype), device)
    mlp = kernels.pack_mlp(*parameters, ages=True, dtype=kernels.packed_dtype(blocks[0]), device=device)
    x, (exact, rounded) = torch.cat(blocks, dim=1).cpu(), (torch.float64, dtype)
    expected, same = (plain_scores(of, x, True, *parameters, first=first) for of in (exact, rounded))
    check(kernels.score_entries(blocks, mlp, first), expected, same)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.usefixtures("backend")
@pytest.mark.quick
def test_what_is_no_number_stays_none(dtype, device):
    """Whoever selects refuses NaN, so it must not be lost; numbers far from the mean are no reason for one."""
    blocks, parameters = score_inputs((70, 4, (2,), 2, 16, True, "usual", dtype), device)
    parameters[-1][:12] = 1e-4
    blocks[0][3, 5], blocks[0][5, 5] = torch.nan, 60000
    mlp = kernels.pack_mlp(*parameters, ages=True, dtype=kernels.packed_dtype(blocks[0]), device=device)
    found = kernels.score_entries(blocks, mlp)
    assert found[:, 3].isnan().all()
    assert found.isfinite().sum() == 2 * 69


@pytest.mark.usefixtures("backend")
def test_blocks_of_one_storage_are_read_as_one(device):
    recorded = torch.randn(9, 8, 12, device=device)
    first, second, third, *_ = recorded.unbind(1)
    apart = torch.randn(9, 12, device=device)
    for blocks, merged in (
        ([first, second, third], 1),
        ([first, third], 2),
        ([second, first], 2),
        ([first, apart, second], 3),
        ([first[:, 1:], second, third[:, :5]], 1),
        ([first, second[:, ::2]], 2),
        ([first[::2], second[::2]], 1),
    ):
        found = score._merged(blocks)
        assert len(found) == merged
        assert torch.equal(torch.cat(found, dim=1), torch.cat(blocks, dim=1))


@pytest.mark.parametrize("seed", range(100))
def test_twins_hold_for_random_shapes(seed):
    rng = random.Random(seed)
    length, dtype = rng.choice([1, 2, 63, 127, 128, 129, 300]), rng.choice([F32, BF16, F16])
    heads, groups = rng.choice([(4, 1), (4, 2), (6, 3), (48, 16), (3, 3), (1, 1)])
    flags = rng.random() < 0.5, rng.random() < 0.5
    runs = tuple(rng.choices([1, 2, 3], k=rng.randint(1, 3)))
    spread = rng.choice(["usual", "wide", "saturated"])
    batch, size, taps, kv_heads, width = (rng.randint(1, most) for most in (3, 40, 5, 8, 100))
    with kernels.use_backend("torch"):
        check_signals((batch, length, heads, size, groups, taps, *flags, dtype), "cpu")
        check_scores((length, heads, runs, kv_heads, width, flags[0], spread, dtype), "cpu")


# -- what these tests rest on ------------------------------------------------------------------------------------------


@NO_TRITON
def test_a_hole_in_an_output_does_not_pass(device, monkeypatch):
    from gatesight_kernels.triton_ops import gates

    class OneProgramLess:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, int]) -> Any:
            return self.kernel[(grid[0] - 1, grid[1])]

    gate = torch.randn(1, 20, 2, 8)
    exact = gate.double().sigmoid().mean((2, 3))
    with kernels.use_backend("triton"):
        check(kernels.gate_means(gate.to(device)), exact, exact.float())
        monkeypatch.setattr(gates, "gate_means_kernel", OneProgramLess(gates.gate_means_kernel))
        found = kernels.gate_means(gate.to(device))
        assert found.isnan().sum() == gates.BLOCK_T
        with pytest.raises(AssertionError):
            check(found, exact, exact.float())


def scored(x: Tensor) -> Tensor:
    parameters = [torch.linspace(-1, 1, n).view(*shape) for n, shape in ((192, (2, 24, 4)), (8, (2, 4)), (8, (2, 4)))]
    statistics = torch.zeros(2), torch.zeros(24), torch.ones(24)
    mlp = kernels.pack_mlp(*parameters, *statistics, ages=False, dtype=kernels.packed_dtype(x), device=x.device)
    return kernels.score_entries([x], mlp)


def signals_of(x: Tensor) -> Tensor:
    b, heads, weight = x[None, :, :4].float(), torch.ones(4, device=x.device), torch.ones(24, 3, device=x.device)
    return kernels.gdn_signals(b, b, x.view(1, -1, 1, 24), heads, heads, weight)


@pytest.mark.parametrize("op", [scored, signals_of, lambda x: kernels.gate_means(x.view(1, -1, 2, 12))])
@pytest.mark.usefixtures("backend")
def test_tokens_beyond_32_bits_are_read(op, device, tmp_path):
    length, stride = 130, 2**31 // 128
    near = torch.randn(length, 24, dtype=F16, device=device)
    far = sparse(tmp_path, device, length * stride, F16).as_strided((length, 24), (stride, 1))
    far.copy_(near)
    assert torch.equal(op(far), op(near))
