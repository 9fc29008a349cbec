"""The KV connector that carries sessions: opened by a parent request, asked by children, dropped by id.

`messages` says what a request may ask for. The scheduler's half is `book`, the worker's is `worker`.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from ..models.hybrid import HybridSpec
from .book import SessionBook
from .messages import Outcomes, StepMetadata
from .metrics import SessionPromMetrics, SessionStats
from .support import UnsupportedVLLMError, check_engine
from .worker import CompactingWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from .recording import Recorder


class GateSightConnector(KVConnectorBase_V1, SupportsHMA):
    """Both halves: in the scheduler it keeps the book of sessions, in the worker it records, scores and compacts."""

    #: What a parent gives is worth nothing if it was preempted meanwhile: it runs again.
    requires_kv_delivery = True

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_engine(vllm_config)
        given = dict(self._kv_transfer_config.kv_connector_extra_config)
        estimators: dict[str, str] = given.pop("estimators")
        spec = HybridSpec.from_config(vllm_config.model_config.hf_text_config)
        if spec.indexed:
            raise UnsupportedVLLMError("GateSight has not been run with: sparse attention, whose index has pages too.")
        workers = vllm_config.parallel_config.tensor_parallel_size
        self.book = SessionBook(spec, kv_cache_config, list(estimators), given, workers)
        #: Per layer name, evicted entries of the rows that begin with a block, `[blocks]`, int64.
        self.evicted: dict[str, Tensor] = {}
        if role == KVConnectorRole.WORKER:
            self._worker = CompactingWorker(spec, estimators, self.book.layers, self.evicted)

    # -- scheduler -----------------------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.book.bind(kv_cache_manager)

    def on_new_request(self, request: "Request") -> None:
        self.book.begin(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        return self.book.inherited_tokens(request, num_computed_tokens)

    def has_pending_block_frees(self) -> bool:
        """Called where a running request finds no block: an idle session goes before anything is preempted."""
        return self.book.free_idle()

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        self.book.note_blocks(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepMetadata:
        return self.book.take_step(scheduler_output)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.book.finish(request)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        outcomes = connector_output.kv_connector_worker_meta
        if isinstance(outcomes, Outcomes):
            self.book.take_outcomes(outcomes)

    def get_kv_connector_stats(self) -> SessionStats | None:
        """Called on both halves; the scheduler's one counts."""
        return self.book.take_stats() if self.role == KVConnectorRole.SCHEDULER else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> SessionStats:
        return SessionStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: "VllmConfig", metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> SessionPromMetrics:
        return SessionPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- worker --------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self._worker.register(kv_caches)

    def bind_recorder(self, recorder: "Recorder") -> None:
        """Called by the worker, whose recorder is older: it is attached before the model is compiled."""
        self._worker.recorder = recorder

    def begin_step(self, step: StepMetadata) -> None:
        """Called by the worker before anything of a step is prepared.

        The runner itself moves states from block to block then, where blocks are shorter than contexts.
        """
        self._worker.begin(step)
        groups = self._kv_cache_config.kv_cache_groups
        for group, source, target in step.copies:
            self._worker.copy(groups[group].layer_names, source, target)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Nothing is left to load: see `begin_step`."""

    def wait_for_save(self) -> None:
        self._worker.end(self._step())

    def build_connector_worker_meta(self) -> Outcomes | None:
        outcomes = self._worker.take_outcomes()
        return Outcomes(outcomes) if outcomes else None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        # Failed, and over: otherwise the request's blocks would wait for the end of a transfer.
        failed = self._step().failed
        return KVConnectorTransferResults(failed_recving=set(failed), finished_recving=set(failed))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded layer by layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved layer by layer."""

    def _step(self) -> StepMetadata:
        meta = self._get_connector_metadata()
        assert isinstance(meta, StepMetadata)
        return meta
