"""The KV connector that carries sessions: opened by a parent request, asked by children, dropped by id.

`messages` says what a request may ask for.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.request import RequestStatus

from ..models.hybrid import HybridSpec
from .messages import ASK, DROP, OPEN, REPORT, Asked, Compaction, OpenOptions, Outcome, Outcomes, StepMetadata, digest
from .metrics import SessionPromMetrics, SessionStats
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

#: Idle sessions beyond that are dropped.
MAX_SESSIONS = 64
#: Sessions of which it is remembered why their last request failed.
REFUSALS = 256


@dataclass
class _Parent:
    """A request that opens a session, until it is compacted."""

    session: Session
    session_id: str
    options: OpenOptions
    seen: int = 0
    blocks: list[list[KVCacheBlock]] | None = None


class GateSightConnector(KVConnectorBase_V1, SupportsHMA):
    """Both halves: in the scheduler it keeps the book of sessions, in the worker it records, scores and compacts."""

    requires_kv_delivery = False

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_engine(vllm_config)
        given = dict(self._kv_transfer_config.kv_connector_extra_config)
        estimators: dict[str, str] = given.pop("estimators")
        self._estimators = list(estimators)
        self._sessions = Sessions(given.pop("max_sessions", MAX_SESSIONS))
        self._options = OpenOptions(scorer=self._estimators[0]).updated(given)
        self._options.check_scorer(self._estimators)
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
        self._block_size = min(groups[i].kv_cache_spec.block_size for i in self._layers)
        #: Bytes of a block in each group.
        self._block_bytes = [group.kv_cache_spec.page_size_bytes * len(group.layer_names) for group in groups]
        self._meta = StepMetadata()
        self._parents: dict[str, _Parent] = {}
        self._refused: set[str] = set()
        #: Gauges as they were told last.
        self._levels: dict[str, int] = {"sessions": 0, "session_blocks": 0}
        #: By session, why its last request could not be served, until it is asked for.
        self._refusals: OrderedDict[str, str] = OrderedDict()
        #: By request that drops a session, whether there was one.
        self._dropped: dict[str, bool] = {}
        #: Per layer name, evicted entries of the rows that begin with a block, `[blocks]`, int64.
        self.evicted: dict[str, Tensor] = {}
        if role == KVConnectorRole.WORKER:
            self._worker = CompactingWorker(self._spec, estimators, self._layers, self.evicted)

    # -- scheduler -----------------------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._sessions.pool = kv_cache_manager.block_pool

    def _managers(self) -> list[Any]:
        return list(self._kv_cache_manager.coordinator.single_type_managers)

    def _attention_managers(self) -> list[tuple[int, GateSightAttentionManager]]:
        return [(i, m) for i, m in enumerate(self._managers()) if isinstance(m, GateSightAttentionManager)]

    def on_new_request(self, request: "Request") -> None:
        asked = Asked.by(request)
        if asked.kind is not None:
            # Set for prompt log-probabilities: vLLM would then ignore what a child inherits, and that it is refused.
            request.skip_reading_prefix_cache = False
        if asked.kind == OPEN:
            self._open(request, asked)
        elif asked.kind == DROP:
            self._dropped[request.request_id] = self._sessions.drop(asked.session_id)

    def _open(self, request: "Request", asked: Asked) -> None:
        try:
            if request.max_tokens != 1 or request.prompt_token_ids is None or not asked.session_id:
                raise ValueError("a request that opens a session has an id for it, token ids or text, and max_tokens=1")
            options = self._options.updated(asked.options)
            options.check_scorer(self._estimators)
        except (ValueError, TypeError) as error:
            self._note(asked.session_id, str(error))
            return
        session = Session(request.num_prompt_tokens, digest(request.prompt_token_ids))
        self._parents[request.request_id] = _Parent(session, asked.session_id, options)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        asked, request_id = Asked.by(request), request.request_id
        if asked.kind in (None, REPORT, DROP):
            self._make_room(request)
            return 0, False
        if asked.kind == OPEN and (parent := self._parents.get(request_id)) is not None:
            if parent.seen:  # it was preempted
                parent.seen = 0
                self._meta.forgotten.append(request_id)
            self._make_room(request)
            return 0, False
        session = None if request_id in self._refused else self._child_of(request, asked)
        if session is not None:
            for i, manager in self._attention_managers():
                manager.inherit(request_id, session.attention[i])
            self._make_room(request)
            if request_id not in session.users:
                self._note(asked.session_id, "no blocks are left for a child beside it")
                session = None
        if session is None:
            # A load that fails is the one way in which a connector can refuse a request. It needs blocks like others:
            # where idle sessions had them all, it would wait, and all requests behind it.
            self._refused.add(request_id)
            for _, manager in self._attention_managers():
                manager.disinherit(request_id)
            self._make_room(request)
            return 1, True
        return session.tokens - num_computed_tokens, False

    def _child_of(self, request: "Request", asked: Asked) -> Session | None:
        """The session that a request is a child of from now on; None, with the reason noted, if it cannot be."""
        if asked.kind == OPEN:
            return None  # noted when it came
        if asked.kind != ASK:
            self._note(asked.session_id, f"there is no kind of request {asked.kind!r}")
            return None
        session = self._sessions.find(asked.session_id, request.request_id)
        ids = request.prompt_token_ids
        if session is None:
            self._note(asked.session_id, "there is no such session: never opened, dropped, or it made room for others")
            return None
        if ids is None or len(ids) <= session.tokens or digest(ids[: session.tokens]) != session.digest:
            self._note(
                asked.session_id,
                f"the prompt of a child is the session's context, the same {session.tokens} tokens, and a question",
            )
            return None
        if request.sampling_params is not None and request.sampling_params.prompt_logprobs is not None:
            self._note(asked.session_id, "a child has no log-probabilities of its prompt: its context is not run again")
            return None
        self._sessions.use(session, asked.session_id, request.request_id)
        return session

    def _note(self, session_id: str, why: str) -> None:
        logger.error("GateSight: session %r: %s", session_id, why)
        self._refusals[session_id] = why.removesuffix(".")
        self._refusals.move_to_end(session_id)
        while len(self._refusals) > REFUSALS:
            self._refusals.popitem(last=False)
        self._sessions.stats.add(refusals=1)

    def _make_room(self, request: "Request") -> None:
        """Drop idle sessions until the prompt fits."""
        needed = 0
        for manager in self._managers():
            is_child = isinstance(manager, GateSightAttentionManager) and manager.is_child(request.request_id)
            if is_child:
                needed += manager.get_num_blocks_to_allocate(request.request_id, request.num_tokens)
            else:
                needed += cdiv(request.num_tokens, manager.block_size)
        self._sessions.make_room(needed, request.request_id)

    def has_pending_block_frees(self) -> bool:
        """Called where a running request finds no block: an idle session goes before anything is preempted."""
        return self._sessions.drop_idle()

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        if request.request_id in self._refused:
            # Only now, when it has blocks for the load, may the load fail.
            self._meta.failed.add(request.request_id)
            return
        asked = Asked.by(request)
        session = self._sessions.find(asked.session_id, request.request_id) if asked.kind == ASK else None
        if session is None or not num_external_tokens:
            return
        self._sessions.stats.add(children=1)
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
            if parent is None or parent.seen >= parent.session.tokens:
                continue
            meta.parents.append(request_id)
            parent.seen += tokens
            if parent.seen == parent.session.tokens:
                managers = self._attention_managers()
                blocks = {i: [b.block_id for b in manager.req_to_blocks[request_id]] for i, manager in managers}
                compaction = Compaction(request_id, parent.seen, blocks, self._block_size, parent.options)
                meta.compactions.append(compaction)
        return meta

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._sessions.release(request.request_id)
        self._refused.discard(request.request_id)
        dropped = self._dropped.pop(request.request_id, None)
        parent = self._parents.get(request.request_id)
        if parent is not None:
            if parent.seen < parent.session.tokens or request.status == RequestStatus.FINISHED_ABORTED:
                del self._parents[request.request_id]
                self._meta.forgotten.append(request.request_id)
                self._meta.evicted += [(i, block_ids[i][0], 0) for i in self._layers if block_ids[i]]
            else:
                # Its blocks go back to the pool when this returns: held until the worker says which ones are kept.
                parent.blocks = [list(manager.req_to_blocks[request.request_id]) for manager in self._managers()]
                for blocks in parent.blocks:
                    self._kv_cache_manager.block_pool.touch(blocks)
        asked = Asked.by(request)
        if asked.kind == REPORT:
            return False, self._report(asked.session_id)
        return False, None if dropped is None else {"dropped": dropped}

    def _report(self, session_id: str) -> dict[str, Any]:
        session = self._sessions.get(session_id)
        refusal = self._refusals.pop(session_id, None)
        return {"report": None if session is None else session.report, "refusal": refusal}

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        outcomes = connector_output.kv_connector_worker_meta
        if not isinstance(outcomes, Outcomes):
            return
        for request_id, outcome in outcomes.of.items():
            parent = self._parents.pop(request_id, None)
            if parent is None or parent.blocks is None:
                continue  # aborted in this very step; its first blocks are told to be nobody's by the manager
            if outcome.error is not None:
                for blocks in parent.blocks:
                    self._kv_cache_manager.block_pool.free_blocks(reversed(blocks))
                self._sessions.drop(parent.session_id)
                self._sessions.stats.add(failed_compactions=1)
                self._note(parent.session_id, outcome.error)
            else:
                self._keep(parent, parent.blocks, outcome)

    def _keep(self, parent: _Parent, held: list[list[KVCacheBlock]], outcome: Outcome) -> None:
        """Make the session of a compacted parent, and give back the blocks that it does not need."""
        session = parent.session
        for i, (manager, blocks) in enumerate(zip(self._managers(), held, strict=True)):
            if i in outcome.kept:
                stay = cdiv(outcome.kept[i], manager.block_size)
                session.attention[i] = Inherited(blocks[:stay], outcome.kept[i], session.tokens - outcome.kept[i])
            else:
                stay = 1
                session.states[i] = blocks[0]
            self._kv_cache_manager.block_pool.free_blocks(reversed(blocks[stay:]))
        size = self._block_bytes
        before = sum(len(blocks) for blocks in held)
        kv_before = sum(len(held[i]) * size[i] for i in self._layers)
        kv = sum(len(inherited.blocks) * size[i] for i, inherited in session.attention.items())
        session.report = {
            "tokens": session.tokens,
            "kept": outcome.kept_per_layer,
            "achieved_fraction": outcome.achieved_fraction,
            "gate_means": outcome.gate_means,
            "blocks_before": before,
            "blocks": len(session.blocks),
            "kv_bytes_before": kv_before,
            "kv_bytes": kv,
            "gdn_bytes": sum(size[i] for i in session.states),
            "seconds": outcome.seconds,
        }
        heads, kept = self._spec.num_key_value_heads, sum(outcome.kept_per_layer)
        self._sessions.stats.add(
            compactions=1,
            entries_kept=heads * kept,
            entries_evicted=heads * (session.tokens * len(outcome.kept) - kept),
            blocks_kept=len(session.blocks),
            blocks_freed=before - len(session.blocks),
            bytes_freed=kv_before - kv,
            **{f"{name}_seconds": seconds for name, seconds in outcome.seconds.items()},
        )
        self._sessions.add(parent.session_id, session)
        self._refusals.pop(parent.session_id, None)

    def get_kv_connector_stats(self) -> SessionStats | None:
        """Called on both halves; the scheduler's one counts."""
        levels = {"sessions": len(self._sessions), "session_blocks": self._sessions.blocks}
        # The last child of a dropped session gives its blocks back, which nothing else counts.
        if self.role != KVConnectorRole.SCHEDULER or (self._sessions.stats.is_empty() and levels == self._levels):
            return None
        stats, self._sessions.stats, self._levels = self._sessions.stats, SessionStats(), levels
        stats.add(**levels)
        return stats

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
