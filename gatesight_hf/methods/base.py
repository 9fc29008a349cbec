"""What the methods share: rows without padding, and protected entries."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ..entries.view import RotaryTables
from ..models.hybrid import HybridSpec
from ..scoring.interface import Needs, Prefill, QueryMoments, check_prefill

#: Beyond every score a method computes, and small enough to be told apart from its neighbours in float32.
PROTECTED = 1e30


@dataclass(frozen=True)
class Row:
    """One row of a prefill, of n tokens, without its padding; all tensors float32."""

    prefill: Prefill
    index: int

    @property
    def length(self) -> int:
        """n, tokens of the row."""
        return self.prefill.lengths[self.index]

    @property
    def first(self) -> int:
        """Position of the first of them: 0 unless a growing cache was compacted before."""
        return self.prefill.first(self.index)

    @property
    def next_position(self) -> int:
        """Of the token after the row."""
        known = self.prefill.next_positions
        return self.first + self.length if known is None else known[self.index]

    @property
    def spec(self) -> HybridSpec:
        return self.prefill.spec

    @property
    def scale(self) -> float:
        """Of attention logits."""
        return self.spec.scale

    def keys(self, ordinal: int) -> Tensor:
        """`[H, n, D]`, with RoPE."""
        return self.prefill.keys[ordinal][self.index, :, -self.length :].float()

    def values(self, ordinal: int) -> Tensor:
        """`[H, n, D]`."""
        return self.prefill.values[ordinal][self.index, :, -self.length :].float()

    def hidden(self, ordinal: int) -> Tensor:
        """`[n, C]`."""
        return self.prefill.hidden[ordinal][self.index, -self.length :].float()

    def last_queries(self, ordinal: int, count: int) -> Tensor:
        """`[H, G, count, D]`, with RoPE."""
        return self.by_group(self.prefill.queries[ordinal][self.index, -count:].float())

    def query_moments(self, ordinal: int) -> tuple[Tensor, Tensor]:
        """Mean `[H, G, D]` and covariance `[H, G, D, D]` of the queries before RoPE."""
        moments: QueryMoments = self.prefill.query_moments[ordinal]
        shape = (self.spec.num_key_value_heads, -1)
        return moments.mean[self.index].unflatten(0, shape), moments.covariance[self.index].unflatten(0, shape)

    def by_group(self, queries: Tensor) -> Tensor:
        """`[Q, heads, D]` -> `[H, G, Q, D]`."""
        return queries.unflatten(1, (self.spec.num_key_value_heads, -1)).permute(1, 2, 0, 3)

    @property
    def rotary(self) -> RotaryTables:
        assert self.prefill.rotary is not None
        return self.prefill.rotary


class RowScorer(ABC):
    """A scorer that rates one row and one layer at a time."""

    @property
    def needs(self) -> Needs:
        return Needs()

    def check(self, spec: HybridSpec) -> None:  # noqa: B027 - most methods have nothing to check
        """Fits every hybrid unless a method says otherwise."""

    def score(self, prefill: Prefill) -> list[Tensor]:
        check_prefill(prefill)
        rows = [Row(prefill, index) for index in range(len(prefill.lengths))]
        return [self._padded([self.score_row(row, j) for row in rows], prefill, j) for j in range(len(prefill.keys))]

    @abstractmethod
    def score_row(self, row: Row, ordinal: int) -> Tensor:
        """Scores `[H, n]` of one attention layer's entries, float32; higher is kept."""

    @staticmethod
    def _padded(rows: list[Tensor], prefill: Prefill, ordinal: int) -> Tensor:
        slots = prefill.keys[ordinal].shape[2]
        return torch.stack([torch.nn.functional.pad(row, (slots - row.shape[1], 0)) for row in rows])


def protect(scores: Tensor, first: int = 0, last: int = 0) -> Tensor:
    """Put the first and last entries of `[H, n]` above all others: the first ones in order, then the latest ones.

    They are ranked among themselves too, so that a budget below their number is well defined.
    """
    count = scores.shape[-1]
    first = min(first, count)
    last = min(last, count - first)
    ranks = torch.arange(first + last, 0, -1, device=scores.device, dtype=scores.dtype)
    protected = PROTECTED * (1 + ranks / (first + last + 1))
    head, tail = protected[:first], protected[first:].flip(0)
    heads = scores.shape[0]
    middle = scores[:, first : count - last]
    return torch.cat([head.expand(heads, -1), middle, tail.expand(heads, -1)], dim=-1)
