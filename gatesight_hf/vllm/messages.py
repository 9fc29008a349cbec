"""What scheduler and worker tell each other in a step."""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from .options import OpenOptions


def digest(ids: Sequence[int]) -> bytes:
    """Of token ids: whether a child's prompt begins as its parent's."""
    return hashlib.sha256(array("q", ids).tobytes()).digest()


@dataclass(frozen=True)
class Compaction:
    """A parent whose prefill ends in this step: its blocks in each attention group, and how much is to stay."""

    request_id: str
    tokens: int
    blocks: dict[int, list[int]]
    block_size: int
    options: OpenOptions


@dataclass
class StepMetadata(KVConnectorMetadata):
    """From the scheduler to the worker, for one step.

    Attributes:
        scheduled: Tokens of each request in the step.
        parents: Requests whose tokens are recorded.
        forgotten: Requests that are parents no more, or begin again.
        compactions: Of parents whose prefill ends.
        copies: Group, source and target block.
        evicted: Group, first block, and how many entries per head are gone from the row that begins with it.
        failed: Requests that cannot be served.
    """

    scheduled: dict[str, int] = field(default_factory=dict)
    parents: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    compactions: list[Compaction] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    evicted: list[tuple[int, int, int]] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Outcome:
    """Of one compaction.

    Attributes:
        kept: Entries per head that stay, by group; empty if it failed.
        kept_per_layer: The same by attention ordinal.
        achieved_fraction: Kept share of the evictable entries.
        gate_means: By attention ordinal.
        seconds: Of the steps that the prefill took part in (`prefill`), of scoring (`score`), and of budget, selection
            and moving entries (`compact`).
        error: Why it failed.
    """

    kept: dict[int, int] = field(default_factory=dict)
    kept_per_layer: list[int] = field(default_factory=list)
    achieved_fraction: float = 1.0
    gate_means: list[float] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    error: str | None = None


@dataclass
class Outcomes(KVConnectorWorkerMetadata):
    """From the worker to the scheduler: what became of each parent whose prefill ended."""

    of: dict[str, Outcome]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Outcomes":
        """Of one more worker: a session needs all of them."""
        assert isinstance(other, Outcomes)
        return Outcomes({name: _worse(self.of[name], outcome) for name, outcome in other.of.items()})


def _worse(one: Outcome, other: Outcome) -> Outcome:
    """Of two workers' outcomes the one that failed; that of the first, if they agree."""
    if one.error is None and other.error is None and one.kept != other.kept:
        return Outcome(error=f"its workers kept different numbers of entries: {one.kept} and {other.kept}")
    return one if other.error is None or one.error is not None else other
