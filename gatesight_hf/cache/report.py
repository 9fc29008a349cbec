"""What a cache holds and what it cost."""

from dataclasses import asdict, dataclass
from typing import Any

from ..entries.held import storage_bytes
from .context import Context


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


def report_of(context: Context) -> CacheReport:
    """Lengths, bytes and seconds as they are now."""
    plan, recording, layers = context.plan, context.recording, context.attention_layers
    recorded = [] if recording is None else recording.tensors
    means = [] if plan is None else plan.gate_means
    if recording is not None and context.seen:
        means = recording.gate_means
    return CacheReport(
        logical_length=context.seen,
        physical_lengths=[layer.physical_length for layer in layers],
        kept_per_layer=[] if plan is None else plan.kept,
        kept_fraction=context.options.kept_fraction,
        achieved_fraction=None if plan is None else plan.achieved_fraction,
        gate_means=means,
        kv_bytes_before=None if plan is None else plan.kv_bytes_before,
        kv_bytes=context.kv_bytes(),
        index_bytes=storage_bytes(tensor for layer in layers for tensor in layer.index_tensors),
        gdn_bytes=sum(layer.nbytes for layer in context.gdn_layers),
        signal_bytes=storage_bytes([*recorded, *(layer.kept_scores for layer in layers)]),
        seconds=dict(context.seconds),
    )
