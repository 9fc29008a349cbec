"""Methods that read cached keys and values alone: KeyDiff, L2 norm, LagKV, StreamingLLM."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gatesight_kernels.checks import check_whole_number

from ..scoring.interface import Needs
from .base import Row, RowScorer, protect


@dataclass(frozen=True)
class KeyDiff(RowScorer):
    """Keeps keys that differ from the mean direction: -cos(k, mean of k/‖k‖) (arXiv 2504.15364)."""

    def score_row(self, row: Row, ordinal: int) -> Tensor:
        keys = row.keys(ordinal)
        anchor = F.normalize(keys, dim=-1).mean(dim=1, keepdim=True)
        return -F.cosine_similarity(keys, anchor, dim=-1)


@dataclass(frozen=True)
class KeyNorm(RowScorer):
    """Keeps keys of small L2 norm: -‖k‖ (arXiv 2406.11430).

    Models with a key norm, such as Qwen3.5, leave little in it: only the norm's weights make lengths differ.
    """

    def score_row(self, row: Row, ordinal: int) -> Tensor:
        return -row.keys(ordinal).norm(dim=-1)


@dataclass(frozen=True)
class LagKV(RowScorer):
    """Rank within a partition of how unlike keys and values are to the next partition (arXiv 2504.04704).

    In a partition of `lag` tokens, x is scaled by the minimum and maximum of each channel in the next partition; the
    score is softmax over the tokens of the standard deviation over channels, the mean for keys and values. The first
    `sinks` entries, the last whole partition and what follows it always stay. Contexts too short for two partitions
    keep their latest entries.
    """

    sinks: int = 4
    lag: int = 128

    def __post_init__(self) -> None:
        check_whole_number("sinks", self.sinks, least=0)
        check_whole_number("lag", self.lag)

    @property
    def needs(self) -> Needs:
        return Needs(whole=True)

    def score_row(self, row: Row, ordinal: int) -> Tensor:
        keys, values = row.keys(ordinal), row.values(ordinal)
        partitions = (row.length - self.sinks) // self.lag
        if partitions < 2:
            recency = torch.arange(row.length, device=keys.device, dtype=keys.dtype) / row.length
            return protect(recency.repeat(len(keys), 1), first=self.sinks)
        end = self.sinks + partitions * self.lag
        both = [
            self._scores(states[:, self.sinks : end].unflatten(1, (partitions, self.lag))) for states in (keys, values)
        ]
        order = torch.stack(both).mean(0).argsort(dim=-1, stable=True)  # equal scores: the later one ranks higher
        ranks = order.argsort(dim=-1).to(keys.dtype) / self.lag
        tail = self.lag + row.length - end
        free = F.pad(ranks.flatten(1), (self.sinks, tail))
        return protect(free, first=self.sinks, last=tail)

    @staticmethod
    def _scores(states: Tensor) -> Tensor:
        """`[H, P, lag, D]` -> `[H, P - 1, lag]`."""
        lower, upper = states[:, 1:].amin(2, keepdim=True), states[:, 1:].amax(2, keepdim=True)
        # A channel that is constant in the next partition says nothing, where the formula would divide by zero.
        span = upper - lower
        scaled = torch.where(span == 0, 0, (states[:, :-1] - lower) / span.clamp_min(1e-12))
        return scaled.std(-1).softmax(-1)


@dataclass(frozen=True)
class StreamingLLM(RowScorer):
    """The first `sinks` entries and the latest ones (arXiv 2309.17453), with their original positions."""

    sinks: int = 4

    def __post_init__(self) -> None:
        check_whole_number("sinks", self.sinks, least=0)

    def score_row(self, row: Row, ordinal: int) -> Tensor:
        positions = row.first + torch.arange(row.length, device=row.prefill.keys[ordinal].device, dtype=torch.float32)
        return protect(positions.repeat(row.spec.num_key_value_heads, 1), first=max(0, self.sinks - row.first))
