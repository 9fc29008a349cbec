"""Codes and scales of quantised entries: error bounds, outliers, constant groups, entries that do not count."""

import pytest
import torch
from torch import Tensor

from gatesight_hf.entries.quantised import quantise

from ..helpers.contents import read

pytestmark = [pytest.mark.core, pytest.mark.quick]


def entries_of(dtype: torch.dtype = torch.float32, tokens: int = 17) -> Tensor:
    """`[2, 3, tokens, 8]`, with channels of large magnitude, far from zero, small and constant."""
    entries = torch.randn(2, 3, tokens, 8, generator=torch.Generator().manual_seed(1))
    entries *= torch.tensor([1, 1, 300, 1, 1e-3, 1, 0, 1])
    return (entries + torch.tensor([0, 0, 0, 50, 0, -3, 7, 0])).to(dtype)


@pytest.mark.parametrize("dim", [-2, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_at_most_half_a_scale(dim, dtype):
    entries = entries_of(dtype)
    codes, scales = quantise(entries, dim, None)
    assert (codes.dtype, scales.dtype) == (torch.int8, torch.float32)
    assert scales.shape == ((2, 3, 1, 8, 2) if dim == -2 else (2, 3, 17, 1, 2))
    exact = entries.double()
    scale = (exact.amax(dim, keepdim=True) - exact.amin(dim, keepdim=True)) / 255
    torch.testing.assert_close(scales[..., 0].double(), scale, rtol=1e-6, atol=1e-30)
    rounding = 4 * torch.finfo(torch.float32).eps * exact.abs().amax(dim, keepdim=True)
    assert ((read(codes, scales, torch.float64) - exact).abs() <= scale / 2 + rounding).all()
    rounding = rounding + torch.finfo(dtype).eps * exact.abs().amax(dim, keepdim=True)
    assert ((read(codes, scales, dtype).double() - exact).abs() <= scale / 2 + rounding).all()
    # All 256 codes are there to be used, and the ends of every range with them.
    spread = codes.masked_select((scale > 0).expand_as(codes))
    assert (spread.min(), spread.max()) == (-128, 127)


@pytest.mark.parametrize("dim", [-2, -1])
def test_scales_in_bfloat16_would_not_keep_that_bound(dim):
    entries = entries_of()
    codes, scales = quantise(entries, dim, None)
    error = (read(codes, scales.bfloat16().float()) - entries).abs()
    assert (error > scales[..., 0] / 2 + 1e-3 * scales[..., 0]).any()


def test_an_outlier_spoils_neither_other_channels_of_keys_nor_other_tokens_of_values():
    plain = entries_of()
    for dim, place in ((-2, (..., 5)), (-1, (..., 5, slice(None)))):
        outlier = plain.clone()
        outlier[place] *= 1e4
        (codes, scales), (others, other_scales) = quantise(plain, dim, None), quantise(outlier, dim, None)
        same = torch.ones_like(codes, dtype=torch.bool)
        same[place] = False
        assert torch.equal(codes[same], others[same])
        same = same.all(dim, keepdim=True)
        assert torch.equal(scales[same], other_scales[same]) and not torch.equal(scales, other_scales)


def test_constant_channels_and_single_entries_are_exact():
    constant = entries_of()[..., 6:7]
    for entries, dim in ((constant, -2), (constant, -1), (entries_of(tokens=1), -2)):
        codes, scales = quantise(entries, dim, None)
        assert not scales[..., 0].any()
        assert torch.equal(read(codes, scales), entries)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("dim", [-2, -1])
def test_entries_that_do_not_count_have_no_part_in_scales(dim, per_head):
    counts = torch.tensor([[17, 4, 0], [5, 1, 16]])
    counts = counts if per_head else counts[:, :1]
    valid = torch.arange(17) >= 17 - counts[..., None]
    real = valid[..., None].expand(2, 3, 17, 8)
    entries = entries_of().masked_fill(~real, torch.nan)
    codes, scales = quantise(entries, dim, valid if per_head else valid[:, 0])
    assert scales.isfinite().all() and read(codes, scales).isfinite().all()
    for row in range(2):
        for head in range(3):
            held = entries[row, head, real[row, head, :, 0]][None, None]
            if held.numel():
                alone, own = quantise(held, dim, None)
                assert torch.equal(codes[row, head, real[row, head, :, 0]], alone[0, 0])
                mine = scales[row, head] if dim == -2 else scales[row, head, real[row, head, :, 0]]
                assert torch.equal(mine, own[0, 0])
