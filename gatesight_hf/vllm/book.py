"""The book of sessions that vLLM's scheduler keeps: who opens one, who asks it, whose blocks stay, who is refused."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import RequestStatus

from ..models.hybrid import HybridSpec
from .messages import Compaction, Outcome, Outcomes, StepMetadata, digest
from .metrics import SessionStats
from .options import ASK, DROP, OPEN, REPORT, Asked, Limits, OpenOptions
from .paged import GateSightAttentionManager, GateSightAttentionSpec, Inherited, blocks_to_run, without_hashes
from .refusals import BAD, FAILED, FULL, LIMITED, MISSING, REPLACED, Refusals
from .sessions import Session, Sessions

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


@dataclass
class _Parent:
    """A request that opens a session, until it is compacted."""

    session: Session
    asked: Asked
    options: OpenOptions
    seen: int = 0
    blocks: list[list[KVCacheBlock]] | None = None


class SessionBook:
    """The scheduler's half of the connector, whose methods are called from vLLM's hooks of similar names.

    Args:
        spec: Layout of the model.
        kv_cache_config: Of the engine.
        estimators: Names of the scorers.
        given: Of the connector's configuration: `Limits`, and defaults of `OpenOptions`.
        workers: That share the model's heads; each has a block of a number.
    """

    def __init__(
        self,
        spec: HybridSpec,
        kv_cache_config: "KVCacheConfig",
        estimators: list[str],
        given: dict[str, Any],
        workers: int,
    ) -> None:
        given = dict(given)
        self._spec, self._estimators = spec, estimators
        self.sessions = Sessions(Limits.taken_from(given))
        self._options = OpenOptions(scorer=estimators[0]).updated(given)
        self._options.check_scorer(estimators)
        groups = kv_cache_config.kv_cache_groups
        #: Layer of each attention group.
        self.layers = {
            i: group.layer_names[0]
            for i, group in enumerate(groups)
            if isinstance(group.kv_cache_spec, GateSightAttentionSpec)
        }
        self.block_size = min(groups[i].kv_cache_spec.block_size for i in self.layers)
        #: Bytes of a block in each group, those of all workers.
        self._block_bytes = [workers * group.kv_cache_spec.page_size_bytes * len(group.layer_names) for group in groups]
        self._meta = StepMetadata()
        self._parents: dict[str, _Parent] = {}
        self._refused: set[str] = set()
        #: Gauges as they were told last.
        self._levels: dict[str, int] = {"sessions": 0, "session_blocks": 0}
        self._refusals = Refusals(self.sessions)
        #: By request that drops a session, whether there was one.
        self._dropped: dict[str, bool] = {}

    def bind(self, manager: "KVCacheManager") -> None:
        """Take the scheduler's manager of blocks."""
        self._manager = manager
        self.sessions.pool = manager.block_pool

    def managers(self) -> list[Any]:
        """Of the engine's groups of layers."""
        return list(self._manager.coordinator.single_type_managers)

    def _attention_managers(self) -> list[tuple[int, GateSightAttentionManager]]:
        return [(i, m) for i, m in enumerate(self.managers()) if isinstance(m, GateSightAttentionManager)]

    def begin(self, request: "Request") -> None:
        asked = Asked.by(request)
        if asked.kind is not None:
            # Set for prompt log-probabilities: vLLM would then ignore what a child inherits, and that it is refused.
            request.skip_reading_prefix_cache = False
            without_hashes(request)
        if asked.kind == OPEN:
            self._open(request, asked)
        elif asked.kind == DROP:
            self._dropped[request.request_id] = self.sessions.drop(asked.session_id)

    def _open(self, request: "Request", asked: Asked) -> None:
        try:
            if request.max_tokens != 1 or request.prompt_token_ids is None or not asked.session_id:
                raise ValueError("a request that opens a session has an id for it, token ids or text, and max_tokens=1")
            options = self._options.updated(asked.options)
            options.check_scorer(self._estimators)
        except (ValueError, TypeError) as error:
            self._refusals.note(asked, BAD, str(error))
            return
        if why := self.sessions.why_no_more(asked.owner, asked.session_id):
            self._refusals.note(asked, LIMITED, why)
            return
        session = Session(request.num_prompt_tokens, digest(request.prompt_token_ids), asked.owner, asked.token)
        self._parents[request.request_id] = _Parent(session, asked, options)

    def inherited_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
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
            inherited = {**session.attention, **session.states}
            for i, manager in enumerate(self.managers()):
                manager.inherit(request_id, inherited[i])
            self._make_room(request, session.tokens)
            if request_id not in session.users:
                self._refusals.note(asked, FULL, "no blocks are left for a child beside it")
                session = None
        if session is None:
            # A load that fails is the one way in which a connector can refuse a request. It needs blocks like others:
            # where idle sessions had them all, it would wait, and all requests behind it.
            self._refused.add(request_id)
            for manager in self.managers():
                manager.disinherit(request_id)
            self._make_room(request)
            return 1, True
        return session.tokens - num_computed_tokens, False

    def _child_of(self, request: "Request", asked: Asked) -> Session | None:
        """The session that a request is a child of from now on; None, with the reason noted, if it cannot be."""
        if asked.kind == OPEN:
            return None  # noted when it came
        session = self.sessions.find(asked.session_id, request.request_id) if asked.kind == ASK else None
        why = _why_no_child(request, asked, session)
        if why is not None or session is None:
            self._refusals.note(asked, MISSING if asked.kind == ASK and session is None else BAD, why or "")
            return None
        self.sessions.use(session, asked.session_id, request.request_id)
        return session

    def _make_room(self, request: "Request", inherited: int = 0) -> None:
        """Drop idle sessions until the prompt fits, so many tokens of which a child inherits."""
        needed = blocks_to_run(self._manager, request, inherited)
        if needed < self._manager.block_pool.num_gpu_blocks:  # or else it waits for a block that is being filled
            self.sessions.make_room(needed, request.request_id)

    def free_idle(self) -> bool:
        """Called where a running request finds no block: an idle session goes before anything is preempted."""
        return self.sessions.drop_idle()

    def note_blocks(self, request: "Request", num_external_tokens: int) -> None:
        if request.request_id in self._refused:
            # Only now, when it has blocks for the load, may the load fail.
            self._meta.failed.add(request.request_id)
            return
        asked = Asked.by(request)
        session = self.sessions.find(asked.session_id, request.request_id) if asked.kind == ASK else None
        if session is None or not num_external_tokens:
            return
        self.sessions.stats.add(children=1)
        for i, manager in self._attention_managers():
            first = manager.req_to_blocks[request.request_id][0]
            self._meta.evicted.append((i, first.block_id, session.attention[i].evicted))

    def take_step(self, scheduler_output: "SchedulerOutput") -> StepMetadata:
        meta, self._meta = self._meta, StepMetadata()
        stale = [(i, block, 0) for i, manager in self._attention_managers() for block in manager.take_stale()]
        stale += [(i, block, 0) for i, block in self.sessions.take_stale()]
        meta.evicted = [*stale, *meta.evicted]
        meta.copies = [(i, *copy) for i, manager in enumerate(self.managers()) for copy in manager.take_copies()]
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
                compaction = Compaction(request_id, parent.seen, blocks, self.block_size, parent.options)
                meta.compactions.append(compaction)
        return meta

    def finish(self, request: "Request") -> tuple[bool, dict[str, Any] | None]:
        self.sessions.release(request.request_id)
        self._refused.discard(request.request_id)
        dropped = self._dropped.pop(request.request_id, None)
        parent = self._parents.get(request.request_id)
        if parent is not None:
            if parent.seen < parent.session.tokens or request.status == RequestStatus.FINISHED_ABORTED:
                del self._parents[request.request_id]
                self._meta.forgotten.append(request.request_id)
            else:
                # Its blocks go back to the pool when this returns: held until the worker says which ones are kept.
                parent.blocks = [list(manager.req_to_blocks[request.request_id]) for manager in self.managers()]
                for blocks in parent.blocks:
                    self._manager.block_pool.touch(blocks)
        asked = Asked.by(request)
        if asked.kind == REPORT:
            return False, self._report(asked)
        return False, None if dropped is None else {"dropped": dropped}

    def _report(self, asked: Asked) -> dict[str, Any]:
        """Of a session; with a token, of what became of the request that had it."""
        session = self.sessions.get(asked.session_id)
        status, refusal = self._refusals.forget(asked)
        if asked.token and session is not None and session.token != asked.token:
            session = None
            status, refusal = (status or REPLACED), (refusal or "another request opened a session of that id since")
        return {"report": None if session is None else session.report, "refusal": refusal, "status": status}

    def take_outcomes(self, outcomes: Outcomes) -> None:
        """Make sessions of the parents that the worker has compacted, and note why others could not be."""
        for request_id, outcome in outcomes.of.items():
            parent = self._parents.get(request_id)
            if parent is None or parent.blocks is None:
                continue  # aborted in this very step, or preempted, in which case it runs again
            del self._parents[request_id]
            if outcome.error is not None:
                for blocks in parent.blocks:
                    self._manager.block_pool.free_blocks(reversed(blocks))
                self.sessions.drop(parent.asked.session_id)
                self.sessions.stats.add(failed_compactions=1)
                self._refusals.note(parent.asked, FAILED, outcome.error)
            else:
                self._keep(parent, parent.blocks, outcome)

    def _keep(self, parent: _Parent, held: list[list[KVCacheBlock]], outcome: Outcome) -> None:
        """Make the session of a compacted parent, and give back the blocks that it does not need."""
        session = parent.session
        for i, (manager, blocks) in enumerate(zip(self.managers(), held, strict=True)):
            if i in outcome.kept:
                stay = cdiv(outcome.kept[i], manager.block_size)
                session.attention[i] = Inherited(blocks[:stay], outcome.kept[i], session.tokens - outcome.kept[i])
                rest = blocks[stay:]
            else:
                state = manager.state_at(session.tokens)
                session.states[i] = Inherited(blocks[state : state + 1], session.tokens)
                rest = blocks[:state] + blocks[state + 1 :]
            self._manager.block_pool.free_blocks(reversed(rest))
        session.report = _report_of(session, outcome, held, self._block_bytes)
        heads, kept = self._spec.num_key_value_heads, sum(outcome.kept_per_layer)
        self.sessions.stats.add(
            compactions=1,
            entries_kept=heads * kept,
            entries_evicted=heads * (session.tokens * len(outcome.kept) - kept),
            blocks_kept=len(session.blocks),
            blocks_freed=session.report["blocks_before"] - len(session.blocks),
            bytes_freed=session.report["kv_bytes_before"] - session.report["kv_bytes"],
            **{f"{name}_seconds": seconds for name, seconds in outcome.seconds.items()},
        )
        self._refusals.forget(parent.asked)
        if why := self.sessions.add(parent.asked.session_id, session):
            self._refusals.note(parent.asked, LIMITED, why)

    def take_stats(self) -> SessionStats | None:
        """What has happened since the last call; None if nothing has."""
        levels = {"sessions": len(self.sessions), "session_blocks": self.sessions.blocks}
        # The last child of a dropped session gives its blocks back, which nothing else counts.
        if self.sessions.stats.is_empty() and levels == self._levels:
            return None
        stats, self.sessions.stats, self._levels = self.sessions.stats, SessionStats(), levels
        stats.add(**levels)
        return stats


def _report_of(
    session: Session, outcome: Outcome, held: list[list[KVCacheBlock]], block_bytes: list[int]
) -> dict[str, Any]:
    """What a session's report says; `held` are the blocks by group before the compaction."""
    return {
        "tokens": session.tokens,
        "kept": outcome.kept_per_layer,
        "achieved_fraction": outcome.achieved_fraction,
        "gate_means": outcome.gate_means,
        "blocks_before": sum(not block.is_null for blocks in held for block in blocks),
        "blocks": len(session.blocks),
        "kv_bytes_before": sum(len(held[i]) * block_bytes[i] for i in session.attention),
        "kv_bytes": sum(len(inherited.blocks) * block_bytes[i] for i, inherited in session.attention.items()),
        "gdn_bytes": sum(block_bytes[i] for i in session.states),
        "seconds": outcome.seconds,
    }


def _why_no_child(request: "Request", asked: Asked, session: Session | None) -> str | None:
    """Why a request cannot be a child of a session, None if it can."""
    if asked.kind != ASK:
        return f"there is no kind of request {asked.kind!r}"
    ids = request.prompt_token_ids
    if session is None:
        return "there is no such session: never opened, dropped, or it made room for others"
    if ids is None or len(ids) <= session.tokens or digest(ids[: session.tokens]) != session.digest:
        return f"the prompt of a child is the session's context, the same {session.tokens} tokens, and a question"
    if request.sampling_params is not None and request.sampling_params.prompt_logprobs is not None:
        return "a child has no log-probabilities of its prompt: its context is not run again"
    return None
