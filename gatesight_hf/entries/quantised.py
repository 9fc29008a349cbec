"""Kept entries as 8-bit integers: keys by channel, values by token, as KIVI found best (arXiv 2402.02750).

Keys have channels of large magnitude, which a scale of their own keeps away from the others; values have none. KIVI and
the quantised caches of transformers keep the last tokens as they are, until enough have come for new scales; here a
context is quantised when it is compacted, and everything after it stays in the model's dtype. A growing cache that is
compacted again quantises its survivors again, each time with an error of its own.

An entry x is `code · scale + zero point`, with 255 steps between the least and the greatest x of its group, so that it
is off by half a scale at most (and by the rounding to the model's dtype). Scales and zero points are float32: in
bfloat16 they are off by up to 2⁻⁹ of themselves, which at a channel far from zero is more than that half.
"""

import torch
from torch import Tensor

from gatesight_kernels.checks import described

#: Values of the option `entries_dtype`.
ENTRIES_DTYPES = (None, "int8")
LEAST, MOST = -128, 127


def check_entries_dtype(entries_dtype: str | None) -> None:
    """Raises ValueError unless kept entries can be held as that."""
    if not isinstance(entries_dtype, (str, type(None))) or entries_dtype not in ENTRIES_DTYPES:
        raise ValueError(f"entries_dtype is 'int8', or None for the model's dtype, got {described(entries_dtype)}.")


def quantise(entries: Tensor, dim: int, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes of some entries, and what turns them back.

    Args:
        entries: `[B, H, N, D]`, floating, at least one.
        dim: Along which entries share a scale: -2 for one per channel, -1 for one per token.
        valid: `[B, N]` or `[B, H, N]`, bool; others have no part in scales, and any finite code. None: all are.

    Returns:
        Codes `[B, H, N, D]`, int8; and scales and zero points, stacked last, `[B, H, 1, D, 2]` or `[B, H, N, 1, 2]`,
        float32. These are not finite for a group that holds NaN or infinity, or whose range is beyond float32.
    """
    entries = entries.float()
    if valid is None:
        least, most = entries.amin(dim, keepdim=True), entries.amax(dim, keepdim=True)
    else:
        real = valid.view(len(valid), -1, valid.shape[-1], 1)
        least = entries.masked_fill(~real, torch.inf).amin(dim, keepdim=True)
        most = entries.masked_fill(~real, -torch.inf).amax(dim, keepdim=True)
        # Groups without a real entry, such as those of a head that keeps none.
        nothing = least > most
        least, most = least.masked_fill(nothing, 0), most.masked_fill(nothing, 0)
        entries = torch.where(real, entries, least)
    scale = (most - least) / (MOST - LEAST)
    zero = least - LEAST * scale
    # A group of equal entries has scale 0, and its zero point is the entry itself.
    codes = (entries - zero).div_(scale.masked_fill(scale == 0, 1)).round_().clamp_(LEAST, MOST).to(torch.int8)
    return codes, torch.stack([scale, zero], dim=-1)


def scales_shape(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    """Of scales and zero points of entries of a shape `[B, H, N, D]`; `dim` as in `quantise`."""
    return (*shape[:dim], 1, *shape[dim:][1:], 2)


def dequantise(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write the entries that `quantise` gave codes and scales of into `out` `[B, H, N, D]`, of any floating dtype.

    It goes head by head, so that float32 copies, two on CPUs, are of one head only.
    """
    for head in range(codes.shape[1]):
        scale, zero = scales[:, head].unbind(-1)
        out[:, head] = (codes[:, head] * scale).add_(zero)
