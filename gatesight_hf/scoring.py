"""The one interface that joins every eviction method: a scorer reads a prefill and rates its KV entries."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from .hybrid import HybridSpec


@dataclass(frozen=True)
class Prefill:
    """What a cache recorded of one context. Batches are left-padded: row r holds its tokens in the last slots.

    Attributes:
        spec: Layout of the model.
        lengths: Tokens of each row, padding not counted.
        signals: Per GDN ordinal `[B, T, 3, HV]` in the model's dtype: write gate β, log-decay g, write magnitude ‖v‖
            (`features.SIGNALS`). Empty unless the scorer needs signals.
        keys: Per attention ordinal `[B, H, T, D]`, with RoPE.
        values: Per attention ordinal `[B, H, T, D]`.
    """

    spec: HybridSpec
    lengths: list[int]
    signals: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]


@runtime_checkable
class Scorer(Protocol):
    """An eviction method. Budget, protection, compaction, positions and forks are the cache's and the same for all."""

    @property
    def needs_signals(self) -> bool:
        """Whether `score` reads `Prefill.signals`; they are recorded only then."""
        ...

    def check(self, spec: HybridSpec) -> None:
        """Raise an error that names the mend if this scorer cannot rate a model of this layout."""
        ...

    def score(self, prefill: Prefill, ordinal: int) -> Tensor:
        """Scores `[B, H, T]`, float32, of the entries of attention ordinal `ordinal`; higher is kept."""
        ...
