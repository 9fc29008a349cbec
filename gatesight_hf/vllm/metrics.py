"""What the plugin counts, for vLLM's log and its Prometheus page."""

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

COUNTERS = {
    "compactions": "Contexts that were scored and compacted.",
    "failed_compactions": "Contexts whose compaction failed.",
    "entries_kept": "KV entries (all layers and KV heads) that stayed.",
    "entries_evicted": "KV entries (all layers and KV heads) that were evicted.",
    "blocks_kept": "Blocks that compacted contexts hold, those of GDN states included.",
    "blocks_freed": "Blocks that compaction gave back.",
    "bytes_freed": "Bytes that compaction gave back.",
    "prefill_seconds": "Seconds of the steps that parents' prefills took part in.",
    "score_seconds": "Seconds of scoring.",
    "compact_seconds": "Seconds of budget, selection and moving entries.",
    "children": "Times that a child began from a session, after a preemption again.",
    "refusals": "Requests that could not be served.",
    "sessions_dropped": "Sessions that were dropped by request, replaced, or above the limit.",
    "sessions_made_room": "Idle sessions that were dropped for want of blocks.",
}
GAUGES = {
    "sessions": "Sessions that can be asked.",
    "session_blocks": "Blocks that sessions hold, those of GDN states included.",
}


@dataclass
class SessionStats(KVConnectorStats):
    """Counts since the last step, and the gauges now, by the names in `COUNTERS` and `GAUGES`."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def add(self, **counts: float) -> None:
        for name, count in counts.items():
            self.data[name] = self.data.get(name, 0) + count

    def aggregate(self, other: KVConnectorStats) -> "SessionStats":
        self.add(**{name: count for name, count in other.data.items() if name in COUNTERS})
        self.data |= {name: level for name, level in other.data.items() if name in GAUGES}
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"GateSight {name.replace('_', ' ')}": round(value, 4) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class SessionPromMetrics(KVConnectorPromMetrics):
    """`vllm:gatesight_…` for each of `COUNTERS` and `GAUGES`."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        self._counters = self._made(metric_types[Counter], COUNTERS)
        self._gauges = self._made(metric_types[Gauge], GAUGES, multiprocess_mode="mostrecent")

    def _made(self, metric: Any, documented: dict[str, str], **options: Any) -> dict[str, Any]:
        return {
            name: create_metric_per_engine(
                metric(name=f"vllm:gatesight_{name}", documentation=text, labelnames=self._labelnames, **options),
                self.per_engine_labelvalues,
            )
            for name, text in documented.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
            elif name in self._gauges:
                self._gauges[name][engine_idx].set(value)
