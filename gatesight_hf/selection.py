"""Which KV entries stay: scores and budgets in, kept indices out. Pure tensor functions."""

import torch
from torch import Tensor


def select(scores: Tensor, counts: list[int], lengths: list[int], protected_prefix: int = 0) -> tuple[Tensor, Tensor]:
    """The protected prefix and each head's top-K of the rest, in position order.

    Rows of a batch are left-padded: row r holds `lengths[r]` tokens in its last slots. Rows that keep fewer entries
    than the largest row are filled up with slot 0 and marked invalid.

    Args:
        scores (`Tensor`): `[B, H, T]`, float; higher is kept.
        counts (`list[int]`): K of each row: kept entries per head outside the protected prefix.
        lengths (`list[int]`): Tokens of each row, padding not counted.
        protected_prefix (`int`): First tokens of each row that are always kept and not counted.

    Returns:
        `(indices, valid)`: slots `[B, H, N]` (int64, ascending where valid) and `[B, N]` (bool).

    Raises:
        ValueError: A score that is NaN, or a K beyond the evictable tokens of its row.
    """
    batch, heads, slots = scores.shape
    rows: list[Tensor] = []
    for row in range(batch):
        start = slots - lengths[row]
        protected = min(protected_prefix, lengths[row])
        candidates = scores[row, :, start + protected :]
        if counts[row] > candidates.shape[-1]:
            raise ValueError(f"Row {row} cannot keep {counts[row]} of {candidates.shape[-1]} evictable entries.")
        if torch.isnan(candidates).any():
            raise ValueError("A scorer gave NaN for a KV entry; check its weights and the model's activations.")
        top = candidates.topk(counts[row], dim=-1, sorted=False).indices.sort(dim=-1).values
        head = torch.arange(start, start + protected, device=scores.device).expand(heads, -1)
        rows.append(torch.cat([head, top + (start + protected)], dim=-1))

    kept = max(slots_kept.shape[-1] for slots_kept in rows)
    indices = scores.new_zeros((batch, heads, kept), dtype=torch.long)
    valid = torch.zeros((batch, kept), dtype=torch.bool, device=scores.device)
    for row, slots_kept in enumerate(rows):
        indices[row, :, : slots_kept.shape[-1]] = slots_kept
        valid[row, : slots_kept.shape[-1]] = True
    return indices, valid
