"""Masks of attention layers whose entries are compacted: each layer has its own, since they differ in length."""

import torch
from torch import Tensor


def entry_mask(
    kept: int,
    kept_valid: Tensor | None,
    late: int,
    late_valid: Tensor | None,
    query_length: int,
    group: int,
    device: torch.device,
) -> Tensor:
    """What the last `query_length` tokens may see: valid kept entries all of them, later ones causally.

    Args:
        kept: Kept entries of a head, N.
        kept_valid: `[B, N]`, or `[B, H, N]` where heads keep different numbers, bool; None if all are valid.
        late: Entries since then, t, those of the query among them.
        late_valid: `[B, t]`, bool, False at pads; None if none is one.
        query_length: Tokens of the query.
        group: Query heads of a KV head.
        device: Of the mask.

    Returns:
        `[B or 1, 1 or heads, query_length, N + t]`, bool.
    """
    mask = torch.ones((1, 1, query_length, kept + late), dtype=torch.bool, device=device)
    mask[..., kept:] = mask[..., kept:].tril(late - query_length)
    if kept_valid is None and late_valid is None:
        return mask
    # Every part is [rows, query heads or 1, entries].
    if kept_valid is None:
        of_kept = mask.new_ones((1, 1, kept))
    else:
        of_kept = kept_valid.repeat_interleave(group, dim=1) if kept_valid.ndim == 3 else kept_valid.unsqueeze(1)
    of_late = mask.new_ones((1, late)) if late_valid is None else late_valid
    rows = max(len(of_kept), len(of_late))
    of_late = of_late.unsqueeze(1).expand(rows, of_kept.shape[1], -1)
    return mask & torch.cat([of_kept.expand(rows, -1, -1), of_late], dim=-1).unsqueeze(2)


def mask_for_implementation(mask: Tensor, implementation: str, dtype: torch.dtype) -> Tensor:
    """The bool mask, or what an attention implementation takes in its place.

    Raises:
        ValueError: An implementation for which no such mask is known.
    """
    if implementation not in ("sdpa", "eager"):
        raise ValueError(
            "A compacted cache works with attention implementations sdpa and eager (and, unless frozen, flash without "
            f"padding), not {implementation!r}; call model.set_attn_implementation('sdpa')."
        )
    if implementation == "sdpa":
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
