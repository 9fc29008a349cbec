"""The one interface that joins every eviction method: a scorer reads a prefill and rates its KV entries."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from gatesight_kernels.checks import check_tensor, described

from ..entries.view import RotaryTables
from ..models.hybrid import HybridSpec


@dataclass(frozen=True)
class Needs:
    """What a scorer reads of a context besides its keys and values; recorded during prefill only if asked for.

    Attributes:
        signals: β, g and ‖v‖ of every GDN layer.
        queries: How many of the last queries of every attention layer.
        query_moments: Mean and covariance of all queries before RoPE.
        hidden: Inputs of every attention layer.
        whole: The context as a whole, so that tokens which come after a compaction cannot be rated by themselves: a
            replay of it, or entries compared with those that follow. Nothing is recorded for it.
    """

    signals: bool = False
    queries: int = 0
    query_moments: bool = False
    hidden: bool = False
    whole: bool = False

    def __or__(self, other: "Needs") -> "Needs":
        return Needs(
            self.signals or other.signals,
            max(self.queries, other.queries),
            self.query_moments or other.query_moments,
            self.hidden or other.hidden,
            self.whole or other.whole,
        )

    def missing_from(self, recorded: "Needs") -> list[str]:
        """Names of what `recorded` does not have."""
        return [name for name in vars(self) if name != "whole" and getattr(self, name) > getattr(recorded, name)]

    @property
    def of_the_whole(self) -> list[str]:
        """Names of what is gone after a compaction."""
        return [name for name in ("queries", "query_moments", "whole") if getattr(self, name)]


@dataclass(frozen=True)
class QueryMoments:
    """Moments of one attention layer's queries before RoPE, without the first `SKIPPED` tokens of each row.

    Attributes:
        count: `[B]`, queries seen.
        mean: `[B, heads, D]`, float32.
        covariance: `[B, heads, D, D]`, float32, divided by the count.
    """

    #: Attention sinks: their queries are unlike all others (Expected Attention, arXiv 2510.00636).
    SKIPPED = 4

    count: Tensor
    mean: Tensor
    covariance: Tensor


@dataclass(frozen=True)
class Prefill:
    """What a cache recorded of one context. Batches are left-padded: row r holds its tokens in the last slots.

    Of a growing cache that was compacted before, it is what came since: T counts new tokens only.

    Attributes:
        spec: Layout of the model.
        lengths: Tokens of each row, padding not counted.
        signals: Per GDN ordinal `[B, T, 3, HV]` in the model's dtype: write gate β, log-decay g, write magnitude ‖v‖
            (`features.SIGNALS`).
        keys: Per attention ordinal `[B, H, T, D]`, with RoPE.
        values: Per attention ordinal `[B, H, T, D]`.
        queries: Per attention ordinal `[B, t, heads, D]`, with RoPE, of the last t tokens.
        query_moments: Per attention ordinal.
        hidden: Per attention ordinal `[B, T, C]`.
        rotary: Angles of any positions.
        ids: `[B, T]`; None where embeddings were given, as of pictures.
        fork: An uncompacted child that goes on from the end of the context and records nothing, for replays.
        next_positions: Of the token after each row; its length, unless pictures took fewer positions than tokens.
        before: Tokens of each row that were compacted before: the first of `lengths` has this position. Empty if none.

    `signals`, `queries`, `query_moments` and `hidden` are empty unless the scorer's `needs` name them.
    """

    spec: HybridSpec
    lengths: list[int]
    signals: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    queries: list[Tensor] = field(default_factory=list)
    query_moments: list[QueryMoments] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    rotary: RotaryTables | None = None
    ids: Tensor | None = None
    fork: Callable[[], Any] | None = None
    next_positions: list[int] | None = None
    before: list[int] = field(default_factory=list)

    def first(self, row: int) -> int:
        """Position of the row's first token."""
        return self.before[row] if self.before else 0


def check_prefill(prefill: Any) -> None:
    """Raises TypeError unless scorers were given a prefill."""
    if not isinstance(prefill, Prefill):
        raise TypeError(f"prefill must be a Prefill, as cache.prefill() gives it, got {described(prefill)}.")


@runtime_checkable
class Scorer(Protocol):
    """An eviction method. Budget, protection, compaction, positions and forks are the cache's and the same for all."""

    @property
    def needs(self) -> Needs:
        """What `score` reads besides keys and values."""
        ...

    def check(self, spec: HybridSpec) -> None:
        """Raise an error that names the mend if this scorer cannot rate a model of this layout."""
        ...

    def score(self, prefill: Prefill) -> list[Tensor]:
        """Per attention ordinal, scores `[B, H, T]` of the entries, float32; higher is kept. Pads may hold anything."""
        ...


@dataclass(frozen=True)
class Recorder:
    """Has a cache record what others need, and is never asked for scores: for forks, which bring their own scorer."""

    needs: Needs = Needs()

    def check(self, spec: HybridSpec) -> None:
        """Fits every hybrid."""

    def score(self, prefill: Prefill) -> list[Tensor]:
        raise TypeError("A Recorder gives no scores: compact a fork with a scorer of its own, fork(scorer=…).")


@dataclass(frozen=True)
class Scores:
    """Scores that were computed before, as a scorer: one scoring serves any number of compactions.

    Attributes:
        of: Per attention ordinal, `[B, H, T]`.
    """

    of: list[Tensor] = field(repr=False)
    needs: ClassVar[Needs] = Needs(whole=True)

    def __post_init__(self) -> None:
        if not isinstance(self.of, (list, tuple)):
            raise ValueError(f"of must be a list of scores [B, H, T], one for each layer, got {described(self.of)}.")
        for of_layer in self.of:
            check_tensor("each of the scores in of", of_layer, "[B, H, T]")

    def check(self, spec: HybridSpec) -> None:
        if len(self.of) != spec.num_attention_layers:
            raise ValueError(
                f"of: Scores of {len(self.of)} attention layers for a model of {spec.num_attention_layers}."
            )

    def score(self, prefill: Prefill) -> list[Tensor]:
        return self.of


def checked_scores(scorer: Scorer, prefill: Prefill) -> list[Tensor]:
    """What `scorer` gives for `prefill`, on the entries' devices.

    Raises:
        ValueError: Another number of layers, or a wrong shape. NaN is refused by the selection, which knows the pads.
    """
    with torch.no_grad():
        scores = scorer.score(prefill)
    who = str(scorer) if len(str(scorer)) <= 80 else type(scorer).__name__
    if not isinstance(scores, (list, tuple, Tensor)) or len(scores) != len(prefill.keys):
        given = f"scores of {len(scores)} attention layers" if isinstance(scores, (list, tuple)) else described(scores)
        raise ValueError(f"{who} gave {given}, where scores of {len(prefill.keys)} layers are due.")
    for of_layer, keys in zip(scores, prefill.keys, strict=True):
        if not isinstance(of_layer, Tensor) or not of_layer.is_floating_point() or of_layer.is_meta != keys.is_meta:
            raise ValueError(f"{who} gave scores that are no floating-point tensors: {described(of_layer)}.")
        if of_layer.shape != keys.shape[:3]:
            raise ValueError(
                f"{who} gave scores of shape {tuple(of_layer.shape)} for entries of shape {tuple(keys.shape[:3])}."
            )
    return [of_layer.to(keys.device) for of_layer, keys in zip(scores, prefill.keys, strict=True)]
