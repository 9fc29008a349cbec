"""The worker's half: parents' signals gathered over steps, scored, and their entries compacted in the pages."""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.worker.cpu_worker import CPUWorker

from ..compaction import CompactionOptions, plan_compaction
from ..estimator import Estimator
from ..hybrid import HybridSpec
from ..scoring import Prefill
from .paged import GateSightAttentionSpec
from .pages import Pages, check_layout
from .recording import Recorder

if TYPE_CHECKING:
    from .connector import Compaction, StepMetadata

#: Of the last sessions that were opened; whoever opens one asks at once.
REPORTS = 256


class GateSightWorker(CPUWorker):
    """vLLM's CPU worker with a KV-cache group for each attention layer."""

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        specs = super().get_kv_cache_spec()
        return {
            name: GateSightAttentionSpec.of(spec, name) if type(spec) is FullAttentionSpec else spec
            for name, spec in specs.items()
        }

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        connector: Any = get_kv_transfer_group()
        connector.bind_runner(self.model_runner)

    def gatesight_report(self, session_id: str) -> dict[str, Any]:
        """For `collective_rpc`: the compaction that made a session."""
        connector: Any = get_kv_transfer_group()
        return connector.report(session_id)


class CompactingWorker:
    """See the module.

    Args:
        spec: Layout of the model.
        estimator: Rates entries.
        layers: Layer name of each attention group.
        evicted: Filled here, read by the metadata builder: per layer name, evicted entries of the rows that begin with
            a block, `[blocks]`, int64.
    """

    def __init__(
        self, spec: HybridSpec, estimator: Estimator, layers: dict[int, str], evicted: dict[str, Tensor]
    ) -> None:
        estimator.check(spec)
        self._estimator = estimator
        self._spec = spec
        self._layers = layers
        #: KV-cache group of each attention ordinal.
        self._groups = sorted(layers, key=lambda group: extract_layer_index(layers[group]))
        self._evicted = evicted
        self._caches: dict[str, Tensor] = {}
        self._kept: dict[str, dict[int, int]] = {}
        self._recorder: Recorder | None = None
        self.reports: dict[str, dict[str, Any]] = {}

    def register(self, caches: dict[str, Tensor]) -> None:
        self._caches = caches
        for name in self._layers.values():
            check_layout(caches[name])
            self._evicted[name] = torch.zeros(len(caches[name]), dtype=torch.int64)

    def bind(self, runner: Any) -> None:
        self._recorder = Recorder(self._spec, lambda: runner.input_batch.req_ids)
        self._recorder.attach(runner.get_model())

    def begin(self, step: "StepMetadata") -> None:
        """Before the metadata of a step are built."""
        for group, block, evicted in step.evicted:
            self._evicted[self._layers[group]][block] = evicted
        assert self._recorder is not None
        for request_id in step.forgotten:
            self._recorder.of.pop(request_id, None)
        self._recorder.begin(step.parents, step.scheduled)

    def copy(self, layers: Iterable[str], source: int, target: int) -> None:
        """A block of all layers of a group."""
        for name in layers:
            self._caches[name][target].copy_(self._caches[name][source])

    def end(self, step: "StepMetadata") -> None:
        """After the forward of a step."""
        assert self._recorder is not None
        self._recorder.end()
        for compaction in step.compactions:
            self._kept[compaction.request_id] = self._compact(compaction)

    def take_kept(self) -> dict[str, dict[int, int]]:
        """Entries per head that stay, by group, of each parent compacted since the last call."""
        kept, self._kept = self._kept, {}
        return kept

    def _compact(self, compaction: "Compaction") -> dict[int, int]:
        assert self._recorder is not None
        recorded, tokens = self._recorder.of.pop(compaction.request_id), compaction.tokens
        assert recorded.tokens == tokens, f"{recorded.tokens} of {tokens} tokens were recorded"
        begun = time.perf_counter()
        heads = self._spec.num_key_value_heads
        entries = [torch.empty(1, heads, tokens, 0) for _ in self._groups]  # only their shape is read
        signals = [torch.cat(chunks).unsqueeze(0) for chunks in recorded.signals]
        gates = [[total / tokens for total in recorded.gate_sums]]
        prefill = Prefill(self._spec, [tokens], signals, entries, entries)
        options = CompactionOptions(**compaction.options)
        with torch.no_grad():
            plan = plan_compaction(prefill, self._estimator, gates, options, 0)
        scored = time.perf_counter()
        kept = {}
        for group, layer in zip(self._groups, plan.layers, strict=True):
            name, blocks = self._layers[group], compaction.blocks[group]
            kept[group] = tokens
            if layer.indices is not None:
                Pages(self._caches[name]).compact(torch.tensor(blocks), layer.indices[0])
                kept[group] = layer.indices.shape[2]
            self._evicted[name][blocks[0]] = tokens - kept[group]
        self.reports[compaction.session_id] = {
            "tokens": tokens,
            "kept": [kept[group] for group in self._groups],
            "achieved_fraction": plan.achieved_fraction,
            "gate_means": gates[0],
            "seconds": {"score": scored - begun, "compact": time.perf_counter() - scored},
        }
        while len(self.reports) > REPORTS:
            del self.reports[next(iter(self.reports))]
        return kept
