"""The KV connector that carries sessions: opened by a parent request, asked by children, dropped by id.

A request says what it is in `kv_transfer_params`. `{"gatesight": "open", "session": ID}`, options of the compaction
besides: a parent, whose prompt is the context, and which generates one token that is thrown away.
`{"gatesight": "ask", "session": ID}`: a child, whose prompt is context and question.
`{"gatesight": "drop", "session": ID}`: the end of a session.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.request import RequestStatus

from ..compaction import CompactionOptions
from ..estimator import Estimator
from ..hybrid import HybridSpec
from .paged import GateSightAttentionManager, GateSightAttentionSpec, Inherited
from .sessions import Session, Sessions
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

logger = init_logger(__name__)

OPEN, ASK, DROP = "open", "ask", "drop"
#: Options of a parent's compaction that a request may set.
OPTIONS = ("kept_fraction", "protected_prefix", "allocation", "gate_exponent")
#: Where neither the engine nor a request says another.
KEPT_FRACTION = 0.1


@dataclass(frozen=True)
class Compaction:
    """A parent whose prefill ends in this step: its blocks in each attention group, and how much is to stay."""

    request_id: str
    session_id: str
    tokens: int
    blocks: dict[int, list[int]]
    options: dict[str, Any]


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


@dataclass
class Compacted(KVConnectorWorkerMetadata):
    """From the worker to the scheduler: of each parent that was compacted, entries kept per head by group."""

    kept: dict[str, dict[int, int]]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Compacted":
        raise NotImplementedError("One worker only: other parallel modes are refused at the start.")


@dataclass
class _Parent:
    """A request that opens a session, until it is compacted."""

    session_id: str
    tokens: int
    options: dict[str, Any]
    seen: int = 0
    blocks: list[list[KVCacheBlock]] | None = None


class GateSightConnector(KVConnectorBase_V1, SupportsHMA):
    """Both halves: in the scheduler it keeps the book of sessions, in the worker it records, scores and compacts."""

    requires_kv_delivery = False

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_engine(vllm_config)
        given = dict(self._kv_transfer_config.kv_connector_extra_config)
        estimator, most = given.pop("estimator"), given.pop("max_sessions", 64)
        self._options = {"kept_fraction": KEPT_FRACTION, **checked_options(given)}
        self._spec = HybridSpec.from_config(vllm_config.model_config.hf_text_config)
        if self._spec.indexed:
            raise UnsupportedVLLMError("GateSight has not been run with: sparse attention, whose index has pages too.")
        groups = kv_cache_config.kv_cache_groups
        #: Layer of each attention group.
        self._layers = {
            i: group.layer_names[0]
            for i, group in enumerate(groups)
            if isinstance(group.kv_cache_spec, GateSightAttentionSpec)
        }
        self._block_size = {i: groups[i].kv_cache_spec.block_size for i in self._layers}
        self._meta = StepMetadata()
        self._sessions = Sessions(most)
        self._parents: dict[str, _Parent] = {}
        self._refused: set[str] = set()
        #: Per layer name, evicted entries of the rows that begin with a block, `[blocks]`, int64.
        self.evicted: dict[str, Tensor] = {}
        if role == KVConnectorRole.WORKER:
            self._worker = CompactingWorker(
                self._spec, Estimator.from_pretrained(estimator), self._layers, self.evicted
            )

    # -- scheduler -----------------------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._sessions.pool = kv_cache_manager.block_pool

    def _managers(self) -> list[Any]:
        return list(self._kv_cache_manager.coordinator.single_type_managers)

    def _attention_managers(self) -> list[tuple[int, GateSightAttentionManager]]:
        return [(i, m) for i, m in enumerate(self._managers()) if isinstance(m, GateSightAttentionManager)]

    def on_new_request(self, request: "Request") -> None:
        kind, session_id, options = asked(request)
        if kind == OPEN and request.max_tokens == 1:
            try:
                options = checked_options({**self._options, **options})
            except ValueError as error:
                logger.error("GateSight: request %s: %s", request.request_id, error)
                return
            self._parents[request.request_id] = _Parent(session_id, request.num_prompt_tokens, options)
        elif kind == DROP:
            self._sessions.drop(session_id)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        kind, session_id, _ = asked(request)
        if kind is None or kind == DROP:
            self._make_room(request)
            return 0, False
        if kind == OPEN and (parent := self._parents.get(request.request_id)) is not None:
            if parent.seen:  # it was preempted
                parent.seen = 0
                self._meta.forgotten.append(request.request_id)
            self._make_room(request)
            return 0, False
        session = self._sessions.use(session_id, request.request_id) if kind == ASK else None
        if session is None or request.num_tokens <= session.tokens:
            logger.error(
                "GateSight: request %s cannot be served: %s", request.request_id, _why(kind, session_id, session)
            )
            # A load that fails is the one way in which a connector can refuse a request.
            self._refused.add(request.request_id)
            return 1, True
        self._refused.discard(request.request_id)
        for i, manager in self._attention_managers():
            manager.inherit(request.request_id, session.attention[i])
        self._make_room(request)
        return session.tokens - num_computed_tokens, False

    def _make_room(self, request: "Request") -> None:
        """Drop idle sessions until the prompt fits."""
        needed = 0
        for manager in self._managers():
            is_child = isinstance(manager, GateSightAttentionManager) and manager.is_child(request.request_id)
            if is_child:
                needed += manager.get_num_blocks_to_allocate(request.request_id, request.num_tokens)
            else:
                needed += cdiv(request.num_tokens, manager.block_size)
        self._sessions.make_room(needed)

    def has_pending_block_frees(self) -> bool:
        """Called where a running request finds no block: an idle session goes before anything is preempted."""
        return self._sessions.drop_idle()

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        if request.request_id in self._refused:
            # Only now, when it has blocks for the load, may the load fail.
            self._meta.failed.add(request.request_id)
            return
        kind, session_id, _ = asked(request)
        session = self._sessions.get(session_id) if kind == ASK else None
        if session is None or not num_external_tokens:
            return
        for i, manager in enumerate(self._managers()):
            held = manager.req_to_blocks[request.request_id]
            if isinstance(manager, MambaManager):
                self._meta.copies.append((i, session.states[i].block_id, held[0].block_id))
            else:
                self._meta.evicted.append((i, held[0].block_id, session.attention[i].evicted))

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepMetadata:
        meta, self._meta = self._meta, StepMetadata()
        stale = [(i, block, 0) for i, manager in self._attention_managers() for block in manager.take_stale()]
        stale += [(i, block, 0) for i, block in self._sessions.take_stale()]
        meta.evicted = [*stale, *meta.evicted]
        meta.copies += [(i, *copy) for i, manager in self._attention_managers() for copy in manager.take_copies()]
        meta.scheduled = dict(scheduler_output.num_scheduled_tokens)
        for request_id, tokens in meta.scheduled.items():
            parent = self._parents.get(request_id)
            if parent is None or parent.seen >= parent.tokens:
                continue
            meta.parents.append(request_id)
            parent.seen += tokens
            if parent.seen == parent.tokens:
                managers = self._attention_managers()
                blocks = {i: [b.block_id for b in manager.req_to_blocks[request_id]] for i, manager in managers}
                options = {**parent.options, "block_size": min(self._block_size.values())}
                meta.compactions.append(Compaction(request_id, parent.session_id, parent.tokens, blocks, options))
        return meta

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._sessions.release(request.request_id)
        self._refused.discard(request.request_id)
        parent = self._parents.get(request.request_id)
        if parent is not None:
            if parent.seen < parent.tokens or request.status == RequestStatus.FINISHED_ABORTED:
                del self._parents[request.request_id]
                self._meta.forgotten.append(request.request_id)
                self._meta.evicted += [(i, block_ids[i][0], 0) for i in self._layers if block_ids[i]]
            else:
                # Its blocks go back to the pool when this returns: held until the worker says which ones are kept.
                parent.blocks = [list(manager.req_to_blocks[request.request_id]) for manager in self._managers()]
                for blocks in parent.blocks:
                    self._kv_cache_manager.block_pool.touch(blocks)
        return False, None

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        compacted = connector_output.kv_connector_worker_meta
        if not isinstance(compacted, Compacted):
            return
        pool = self._kv_cache_manager.block_pool
        for request_id, kept in compacted.kept.items():
            parent = self._parents.pop(request_id, None)
            if parent is None or parent.blocks is None:
                continue  # aborted in this very step; its first blocks are told to be nobody's by the manager
            session = Session(parent.tokens, {}, {})
            for i, (manager, blocks) in enumerate(zip(self._managers(), parent.blocks, strict=True)):
                stay = cdiv(kept[i], manager.block_size) if i in kept else 1
                if i in kept:
                    session.attention[i] = Inherited(blocks[:stay], kept[i], parent.tokens - kept[i])
                else:
                    session.states[i] = blocks[0]
                pool.free_blocks(reversed(blocks[stay:]))
            self._sessions.add(parent.session_id, session)

    # -- worker --------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self._worker.register(kv_caches)

    def bind_runner(self, runner: Any) -> None:
        """Called by the worker when its model is loaded."""
        self._worker.bind(runner)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, StepMetadata)
        self._worker.begin(kv_connector_metadata)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        groups = self._kv_cache_config.kv_cache_groups
        for group, source, target in self._step().copies:
            self._worker.copy(groups[group].layer_names, source, target)

    def wait_for_save(self) -> None:
        self._worker.end(self._step())

    def build_connector_worker_meta(self) -> Compacted | None:
        kept = self._worker.take_kept()
        return Compacted(kept) if kept else None

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

    def report(self, session_id: str) -> dict[str, Any]:
        """Of the compaction that made a session."""
        return self._worker.reports[session_id]


def asked(request: "Request") -> tuple[str | None, str, dict[str, Any]]:
    """Kind of a request, its session, and options; `(None, "", {})` for ordinary ones."""
    params = request.kv_transfer_params or {}
    kind = params.get("gatesight")
    if kind is None:
        return None, "", {}
    return kind, str(params.get("session", "")), {name: params[name] for name in OPTIONS if name in params}


def checked_options(given: dict[str, Any]) -> dict[str, Any]:
    """The options of a compaction that are given.

    Raises:
        ValueError: Unknown ones, values out of range, or heads that would keep different numbers.
    """
    if unknown := sorted(set(given) - set(OPTIONS)):
        raise ValueError(f"GateSight has no options {unknown}; there are {', '.join(OPTIONS)}.")
    CompactionOptions(**{"kept_fraction": KEPT_FRACTION, **given})
    if given.get("allocation") == "global":
        raise ValueError(
            "allocation='global' keeps different numbers in the heads of a layer, which share a block table."
        )
    return given


def _why(kind: str, session_id: str, session: Session | None) -> str:
    if kind == OPEN:
        return "a request that opens a session generates one token, max_tokens=1, and has valid options"
    if session is None:
        return f"there is no session {session_id!r}: it was never opened, was dropped, or made room for others"
    return f"the prompt of a child is the {session.tokens} tokens of the context and a question"
