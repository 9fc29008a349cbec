"""Which KV entries stay: scores and budgets in, kept indices out. Pure tensor functions."""

from typing import NamedTuple

import torch
from torch import Tensor

from gatesight_kernels import select_top
from gatesight_kernels.checks import check_tensor, check_whole_number, described


class Protected(NamedTuple):
    """Tokens of each row that are always kept and not counted: so many first ones, and so many last ones."""

    prefix: int = 0
    suffix: int = 0

    def evictable(self, length: int) -> tuple[int, int]:
        """Of a row of `length` tokens, the first one that may go, and the end of those."""
        first = min(self.prefix, length)
        return first, max(first, length - self.suffix)


NOTHING = Protected()


def select(
    scores: Tensor, counts: list[int], lengths: list[int], protected: Protected = NOTHING
) -> tuple[Tensor, Tensor]:
    """The protected tokens and each head's top-K of the rest, in position order.

    Rows of a batch are left-padded: row r holds `lengths[r]` tokens in its last slots. Rows that keep fewer entries
    than the largest row are filled up with slot 0 and marked invalid.

    Args:
        scores: `[B, H, T]`, float; higher is kept.
        counts: K of each row: kept entries per head that are not protected.
        lengths: Tokens of each row, padding not counted.
        protected: Tokens that are always kept and not counted.

    Returns:
        `(indices, valid)`: slots `[B, H, N]` (int64, ascending where valid) and `[B, N]` (bool).

    Raises:
        ValueError: A score that is NaN, a K beyond the evictable tokens of its row, or arguments of another form.
    """
    check_tensor("scores", scores, "[B, H, T]")
    batch, heads, slots = scores.shape
    _check_rows(batch, slots, "counts", counts, lengths, protected)
    rows: list[Tensor] = []
    for row in range(batch):
        start = slots - lengths[row]
        first, end = protected.evictable(lengths[row])
        candidates = scores[row, :, start + first : start + end]
        if counts[row] > candidates.shape[-1]:
            raise ValueError(
                f"counts: row {row} cannot keep {counts[row]} of {candidates.shape[-1]} evictable entries."
            )
        _refuse_nan(candidates)
        top = select_top(candidates, counts[row])
        always = torch.arange(start, slots, device=scores.device).expand(heads, -1)
        rows.append(torch.cat([always[:, :first], top + (start + first), always[:, end:]], dim=-1))

    kept = max(slots_kept.shape[-1] for slots_kept in rows)
    indices = scores.new_zeros((batch, heads, kept), dtype=torch.long)
    valid = torch.zeros((batch, kept), dtype=torch.bool, device=scores.device)
    for row, slots_kept in enumerate(rows):
        indices[row, :, : slots_kept.shape[-1]] = slots_kept
        valid[row, : slots_kept.shape[-1]] = True
    return indices, valid


def select_global(
    scores: list[Tensor], totals: list[int], lengths: list[int], protected: Protected = NOTHING
) -> list[tuple[Tensor, Tensor]]:
    """The protected tokens and the best entries of all layers and heads together, in position order.

    Heads keep different numbers; each layer is filled up to its fullest head with slot 0, marked invalid (the
    non-uniform head budgets of KVzip, arXiv 2505.23416).

    Args:
        scores: Per layer `[B, H, T]`, float; higher is kept.
        totals: Entries that all heads of all layers keep together besides protected ones, for each row.
        lengths, protected: See `select`.

    Returns:
        Per layer `(indices, valid)`, `[B, H, N]` each.

    Raises:
        ValueError: A score that is NaN.
    """
    keep = best_of_all(scores, totals, lengths, protected)
    for row, length in enumerate(lengths):
        start = scores[0].shape[-1] - length
        first, end = protected.evictable(length)
        for of_layer in keep:
            of_layer[row, :, start : start + first] = True
            of_layer[row, :, start + end :] = True
    return [_packed(of_layer) for of_layer in keep]


def best_of_all(
    scores: list[Tensor], totals: list[int], lengths: list[int], protected: Protected = NOTHING
) -> list[Tensor]:
    """Which entries are the best of all layers and heads, protected ones apart, per layer `[B, H, T]` (bool).

    Args, Raises:
        See `select_global`.
    """
    if not isinstance(scores, (list, tuple)) or not scores:
        raise ValueError(f"scores must be a list of tensors [B, H, T], one for each layer, got {described(scores)}.")
    for of_layer in scores:
        check_tensor("scores", of_layer, "[B, H, T]")
        if of_layer.shape[::2] != scores[0].shape[::2]:
            raise ValueError(f"scores of layers differ in rows or slots: {[list(s.shape) for s in scores[:4]]}.")
    slots = scores[0].shape[-1]
    _check_rows(len(scores[0]), slots, "totals", totals, lengths, protected)
    best = [torch.zeros_like(of_layer, dtype=torch.bool) for of_layer in scores]
    for row, length in enumerate(lengths):
        first, end = (slots - length + n for n in protected.evictable(length))
        candidates = torch.cat([of_layer[row, :, first:end].flatten().to(scores[0].device) for of_layer in scores])
        _refuse_nan(candidates)
        chosen = torch.zeros_like(candidates, dtype=torch.bool)
        chosen[select_top(candidates.unsqueeze(0), totals[row])] = True
        of_layers = chosen.split([of_layer[row, :, first:end].numel() for of_layer in scores])
        for mask, part in zip(best, of_layers, strict=True):
            mask[row, :, first:end] = part.view(mask.shape[1], -1).to(mask.device)
    return best


def _check_rows(rows: int, slots: int, name: str, numbers: list[int], lengths: list[int], protected: Protected) -> None:
    """Raise an error unless `numbers` and `lengths` are a number for each row."""
    for of_rows, values in ((name, numbers), ("lengths", lengths)):
        if not isinstance(values, (list, tuple)) or len(values) != rows:
            raise ValueError(f"{of_rows} must be a list of a number for each of {rows} rows, got {described(values)}.")
        for value in values:
            check_whole_number(of_rows, value, least=0)
    if max(lengths, default=0) > slots:
        raise ValueError(f"lengths: a row cannot hold {max(lengths)} tokens in {slots} slots.")
    if not isinstance(protected, Protected):
        raise ValueError(f"protected must be Protected(prefix, suffix), got {described(protected)}.")


def _packed(keep: Tensor) -> tuple[Tensor, Tensor]:
    """Slots of the True entries of `[B, H, T]`, ascending, filled up with slot 0; and which of them are real."""
    counts = keep.sum(-1, keepdim=True)
    width = int(counts.max())
    # A stable sort of True before False leaves both in position order.
    order = keep.logical_not().to(torch.uint8).argsort(dim=-1, stable=True)[..., :width]
    valid = torch.arange(width, device=keep.device) < counts
    return order.masked_fill(~valid, 0), valid


def _refuse_nan(scores: Tensor) -> None:
    if torch.isnan(scores).any():
        raise ValueError("A scorer gave NaN for a KV entry; check its weights and the model's activations.")
