"""How well scores find the entries of high utility."""

import torch
from torch import Tensor


def overlap(scores: Tensor, utilities: Tensor, fraction: float = 0.1) -> Tensor:
    """Share of the true top `fraction` that is in the top `fraction` by score; `[..., T]`, broadcast -> `[...]`."""
    count = _top(scores, fraction)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(count, dim=-1).indices, True)
    best = utilities.topk(count, dim=-1).indices
    shape = torch.broadcast_shapes(chosen.shape[:-1], best.shape[:-1])
    return chosen.expand(*shape, -1).gather(-1, best.expand(*shape, -1)).float().mean(-1)


def mass_covered(scores: Tensor, utilities: Tensor, fraction: float = 0.1) -> Tensor:
    """Share of all utility that the top `fraction` by score holds; `[..., T]` each -> `[...]`."""
    chosen = utilities.gather(-1, scores.topk(_top(scores, fraction), dim=-1).indices).sum(-1)
    return chosen / utilities.sum(-1).clamp_min(torch.finfo(utilities.dtype).tiny)


def spearman(scores: Tensor, utilities: Tensor) -> Tensor:
    """Rank correlation over the last dimension; equal values share their mean rank."""
    a, b = _ranks(scores), _ranks(utilities)
    a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
    scale = (a.square().sum(-1) * b.square().sum(-1)).sqrt()
    return (a * b).sum(-1) / scale.clamp_min(torch.finfo(scale.dtype).tiny)


def _top(scores: Tensor, fraction: float) -> int:
    return max(1, round(fraction * scores.shape[-1]))


def _ranks(values: Tensor) -> Tensor:
    flat = values.reshape(-1, values.shape[-1])
    ranks = []
    for row in flat:
        _, inverse, counts = row.unique(return_inverse=True, return_counts=True)
        last = counts.cumsum(0).double()
        ranks.append((last - (counts - 1) / 2)[inverse])
    return torch.stack(ranks).view(values.shape)


METRICS = {"overlap@10": overlap, "mass@10": mass_covered, "spearman": spearman}
