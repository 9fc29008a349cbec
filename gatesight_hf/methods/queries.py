"""Methods that read the context's own queries: SnapKV and Expected Attention."""

from dataclasses import dataclass
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from gatesight_kernels.checks import check_bool, check_whole_number, described

from ..entries.view import apply_rotary
from ..scoring.interface import Needs, QueryMoments
from .base import Row, RowScorer, protect


@dataclass(frozen=True)
class SnapKV(RowScorer):
    """Attention that the last `window` tokens pay to the others, pooled over neighbours (arXiv 2404.14469).

    The question is not known, so the window is the end of the context, as in kvpress. Mean over the window's softmax
    rows (over all keys, in float32), then a pool of `kernel` neighbours, then the mean over the GQA group; the window
    itself always stays.

    Args:
        window: Tokens at the end; of a context of n tokens at most n - 1 are used.
        kernel: Of the pool, odd.
        pool: `mean` (zeros beyond the ends count) or `max`.
    """

    window: int = 64
    kernel: int = 5
    pool: str = "mean"

    def __post_init__(self) -> None:
        check_whole_number("window", self.window)
        check_whole_number("kernel", self.kernel)
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, so that a neighbourhood has a middle, got {self.kernel}.")
        if self.pool not in ("mean", "max"):
            raise ValueError(f"pool must be mean or max, got {described(self.pool)}.")

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.window)

    def score_row(self, row: Row, ordinal: int) -> Tensor:
        keys = row.keys(ordinal)
        heads, length, _ = keys.shape
        window = min(self.window, length - 1)
        if window == 0:
            return protect(keys.new_zeros(heads, length), last=1)
        sums = keys.new_zeros(heads, length - window)
        own = torch.arange(length - window, length, device=keys.device).unsqueeze(-1)
        hidden = torch.arange(length, device=keys.device) > own
        for group in row.last_queries(ordinal, window).unbind(1):  # one query head at a time bounds the memory
            logits = (group @ keys.transpose(1, 2) * row.scale).masked_fill(hidden, float("-inf"))
            weights = logits.softmax(-1)[..., : length - window].mean(1, keepdim=True)
            pooled = F.avg_pool1d if self.pool == "mean" else F.max_pool1d
            sums += pooled(weights, self.kernel, stride=1, padding=self.kernel // 2).squeeze(1)
        scores = sums / (row.spec.num_attention_heads // heads)
        return protect(F.pad(scores, (0, window)), last=window)


@dataclass(frozen=True)
class ExpectedAttention(RowScorer):
    """Attention that future queries are expected to pay, from the moments of the past ones (arXiv 2510.00636).

    With mean μ and covariance Σ of the queries before RoPE and R the mean rotation of the next `future` positions:
    z = (Rμ)·k/√D + kᵀ(RΣRᵀ)k/(2D); softmax over the entries; mean over the GQA group; (p + `epsilon`)·‖v‖. Only the
    rotary channels turn (partial RoPE). The first 4 entries always stay.

    Args:
        future: Positions that R is the mean of.
        epsilon: Added to the attention before the norm of the value weighs it.
        value_norm: Whether it does.
    """

    future: int = 512
    epsilon: float = 0.0
    value_norm: bool = True

    def __post_init__(self) -> None:
        check_whole_number("future", self.future)
        if isinstance(self.epsilon, bool) or not isinstance(self.epsilon, (int, float)) or not 0 <= self.epsilon < inf:
            raise ValueError(f"epsilon must be a finite number of 0 or more, got {described(self.epsilon)}.")
        check_bool("value_norm", self.value_norm)

    @property
    def needs(self) -> Needs:
        return Needs(query_moments=True)

    def score_row(self, row: Row, ordinal: int) -> Tensor:
        keys, sinks = row.keys(ordinal), QueryMoments.SKIPPED
        heads, length, _ = keys.shape
        if length <= sinks:
            return protect(keys.new_zeros(heads, length), first=length)
        mean, covariance = row.query_moments(ordinal)
        positions = torch.arange(row.next_position, row.next_position + self.future, device=keys.device)
        cos, sin = (table.mean(0) for table in row.rotary(positions))
        mean = apply_rotary(mean, cos, sin)
        covariance = apply_rotary(apply_rotary(covariance, cos, sin).transpose(-1, -2), cos, sin)
        keys = keys[:, sinks:]
        scores = keys.new_zeros(heads, length - sinks)
        for mu, sigma in zip(mean.unbind(1), covariance.unbind(1), strict=True):
            expected = torch.einsum("hd,hnd->hn", mu, keys) * row.scale
            expected += torch.einsum("hnd,hde,hne->hn", keys, sigma, keys) * (row.scale**2 / 2)
            scores += expected.softmax(-1) / mean.shape[1]
        if self.value_norm:
            scores = (scores + self.epsilon) * row.values(ordinal)[:, sinks:].norm(dim=-1)
        return protect(F.pad(scores, (sinks, 0)), first=sinks)
