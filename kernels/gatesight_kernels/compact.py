"""Kept rows of keys, values or index keys, moved together."""

import torch
from torch import Tensor

from .backend import runs_triton
from .checks import check_tensor, described

#: Rows that the twin moves at a time in place: bounds its scratch memory.
ROWS_PER_TILE = 1024


def compact_rows(rows: Tensor, indices: Tensor, in_place: bool = False) -> Tensor:
    """Rows `indices` of each head, in that order.

    Out of place the result has a storage of its own of just the kept size, so that the whole is freed when its last
    holder lets it go; whoever shares `rows`, as forks of a cache do, sees no change. In place nothing is allocated: the
    kept rows move to the front of each head, and the owner of the storage gives the rest back, as a paged cache does
    with blocks.

    Args:
        rows: `[B, H, T, D]`, of any dtype and strides.
        indices: `[B, H, N]`, int64, each in 0 … T-1. In place they must ascend, so that no row is overwritten before it
            has moved.
        in_place: Whether `rows` itself is packed.

    Returns:
        `[B, H, N, D]`: a new tensor, or a view of the front of `rows`.

    Raises:
        ValueError: Shapes that do not belong together.
        RuntimeError: Triton is forced and cannot run.
    """
    check_tensor("rows", rows, "[B, H, T, D]")
    check_tensor("indices", indices, "[B, H, N]", (torch.int64,))
    if rows.device != indices.device:
        raise ValueError(f"indices must be on the device of rows, {rows.device}, got {described(indices)}.")
    if rows.shape[:2] != indices.shape[:2] or indices.shape[2] > rows.shape[2]:
        raise ValueError(
            f"indices must be [B, H, N] for rows [B, H, T, D], got {list(indices.shape)} for {list(rows.shape)}."
        )
    if runs_triton(rows, indices):
        from .triton_ops.compact import compact_rows_triton

        with torch.cuda.device_of(rows):
            return compact_rows_triton(rows, indices, in_place)
    return compact_rows_torch(rows, indices, in_place)


def compact_rows_torch(rows: Tensor, indices: Tensor, in_place: bool = False) -> Tensor:
    """The twin: see `compact_rows`."""
    size = rows.shape[-1]
    if not in_place:
        return rows.gather(2, indices.unsqueeze(-1).expand(-1, -1, -1, size))
    kept = indices.shape[2]
    for start in range(0, kept, ROWS_PER_TILE):
        tile = indices[:, :, start : start + ROWS_PER_TILE].unsqueeze(-1).expand(-1, -1, -1, size)
        # Gathered before it is written. Later tiles read only rows behind what this one writes.
        rows[:, :, start : start + tile.shape[2]] = rows.gather(2, tile)
    return rows[:, :, :kept]
