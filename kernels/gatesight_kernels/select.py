"""The best entries of each head, in position order."""

import torch
from torch import Tensor

from .backend import runs_triton
from .checks import check_tensor, described


def select_top(scores: Tensor, count: int) -> Tensor:
    """Positions of each head's `count` best scores, ascending. Among equals the earlier ones are kept, on any device.

    Args:
        scores: `[H, T]`, float32, without NaN.
        count: K, from 0 to T.

    Returns:
        `[H, K]`, int64.

    Raises:
        ValueError: Scores of another form, or more than T are asked for.
        RuntimeError: Triton is forced and cannot run.
    """
    check_tensor("scores", scores, "[H, T]")
    length = scores.shape[1]
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= length:
        raise ValueError(f"Cannot select {described(count)} of {length} entries: count is a number from 0 to {length}.")
    if runs_triton(scores):
        from .triton_ops.select import select_top_triton

        with torch.cuda.device_of(scores):
            return select_top_triton(scores, count)
    return select_top_torch(scores, count)


def select_top_torch(scores: Tensor, count: int) -> Tensor:
    """The twin: see `select_top`."""
    heads, length = scores.shape
    if count in (0, length):
        return torch.arange(count, device=scores.device).expand(heads, -1)
    top = scores.topk(count, sorted=False)
    worst = top.values.amin(-1, keepdim=True)
    equal = scores == worst
    if bool((equal.sum(-1) == (top.values == worst).sum(-1)).all()):
        return top.indices.sort(dim=-1).values  # nothing that was left out ties with what was chosen
    above = scores > worst
    missing = count - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= missing))
    return chosen.nonzero()[:, 1].view(heads, count)
