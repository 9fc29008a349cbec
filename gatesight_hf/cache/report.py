"""What a cache holds and what it cost."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class CacheReport:
    """A cache as it is now. Bytes are those of the tensors' own storages; sliding windows are not counted.

    Attributes:
        logical_length: Tokens seen, padding included.
        physical_lengths: Per attention layer, entries held per head (of the longest row).
        kept_per_layer: Per row and attention layer, entries kept per head by the last compaction; empty before one.
        kept_fraction: Kept share of the evictable entries that was asked for.
        achieved_fraction: The share of all seen then that was kept, protected ones not counted; None before.
        gate_means: Per row and attention layer, mean of sigmoid(output gate); empty if not needed or there is none.
        kv_bytes_before: Attention cache just before compaction; None before compaction.
        kv_bytes: Attention cache now, scales of quantised entries too. A fork counts what it shares with its parent.
        index_bytes: Index of sparse attention now, with the angles that it needs; 0 in other models.
        gdn_bytes: Convolution and recurrent states now.
        signal_bytes: Signals, and what else is held for scoring now; 0 after compaction unless the cache grows.
        seconds: Wall time of `prefill` (recorded forwards before compaction), `score` (with budget and selection) and
            `compact`, of all compactions together.
    """

    logical_length: int
    physical_lengths: list[int]
    kept_per_layer: list[list[int]]
    kept_fraction: float
    achieved_fraction: float | None
    gate_means: list[list[float]]
    kv_bytes_before: int | None
    kv_bytes: int
    index_bytes: int
    gdn_bytes: int
    signal_bytes: int
    seconds: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
