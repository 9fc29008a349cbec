"""The scheduler's book of sessions: what each holds of the block pool, who uses it, and which one goes first."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from .metrics import SessionStats
from .paged import Inherited


@dataclass
class Session:
    """A compacted parent.

    Attributes:
        tokens: Of the context: where children begin.
        digest: Of the context's ids.
        attention: Per KV-cache group of an attention layer.
        states: Per group of GDN layers, their states after the context.
        report: Of the compaction, for whoever asks.
        users: Requests that are its children now, waiting ones included.
    """

    tokens: int
    digest: bytes
    attention: dict[int, Inherited] = field(default_factory=dict)
    states: dict[int, Inherited] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    users: set[str] = field(default_factory=set)

    @property
    def blocks(self) -> list[KVCacheBlock]:
        """All that it holds."""
        return [block for held in (self.states, self.attention) for one in held.values() for block in one.blocks]


class Sessions:
    """By id, the least recently used one first. Holds one reference to each block of each session.

    Args:
        most: Sessions at a time; idle ones beyond that are dropped.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: OrderedDict[str, Session] = OrderedDict()
        #: Dropped while in use: gone for new requests, and given back when the last user ends.
        self._leaving: list[Session] = []
        self._stale: list[tuple[int, int]] = []
        self.pool: BlockPool | None = None
        self.stats = SessionStats()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def all(self) -> list[Session]:
        """Those that wait for their last child included."""
        return [*self._held.values(), *self._leaving]

    @property
    def blocks(self) -> int:
        """Held by all."""
        return sum(len(session.blocks) for session in self.all)

    def get(self, session_id: str) -> Session | None:
        return self._held.get(session_id)

    def add(self, session_id: str, session: Session) -> None:
        """Take over one reference to each block; a session of the same id is dropped."""
        self.drop(session_id)
        self._held[session_id] = session
        while len(self._held) > self._most and self.drop_idle(spared=session_id):
            pass

    def find(self, session_id: str, request_id: str) -> Session | None:
        """The one that the request uses, even if it was dropped since; or else the one of that id, if there is one."""
        of_request = (session for session in self.all if request_id in session.users)
        return next(of_request, self._held.get(session_id))

    def use(self, session: Session, session_id: str, request_id: str) -> None:
        """Hold a session until `release`."""
        session.users.add(request_id)
        if self._held.get(session_id) is session:
            self._held.move_to_end(session_id)

    def release(self, request_id: str) -> None:
        """A request ended."""
        for session in self.all:
            session.users.discard(request_id)
        self._end_unused()

    def _end_unused(self) -> None:
        ended = [session for session in self._leaving if not session.users]
        self._leaving = [session for session in self._leaving if session.users]
        for session in ended:
            self._give_back(session)

    def drop(self, session_id: str) -> bool:
        """End a session; its blocks go back now, or when its last child has ended. False if there is none."""
        session = self._held.pop(session_id, None)
        if session is None:
            return False
        self.stats.add(sessions_dropped=1)
        if session.users:
            self._leaving.append(session)
        else:
            self._give_back(session)
        return True

    def drop_idle(self, spared: str | None = None) -> bool:
        """Drop the least recently used session that no request uses, but not `spared`; False if there is none."""
        idle = next((name for name, session in self._held.items() if not session.users and name != spared), None)
        return idle is not None and self.drop(idle)

    def make_room(self, blocks: int, request_id: str = "") -> None:
        """Drop idle sessions until so many blocks are free, or none is left.

        Where sessions alone hold blocks and still too many, all requests wait, and for ever: then those that wait lose
        their sessions too, the one of `request_id` last.
        """
        assert self.pool is not None
        self._drop_idle_until(blocks)
        if self.pool.get_num_free_blocks() + self.blocks < self.pool.num_gpu_blocks - 1:
            return  # a running request will give blocks back; one block of the pool is nobody's
        for session in sorted((*self._leaving, *self._held.values()), key=lambda one: request_id in one.users):
            if self.pool.get_num_free_blocks() < blocks:
                session.users.clear()
                self._end_unused()
                self._drop_idle_until(blocks)

    def _drop_idle_until(self, blocks: int) -> None:
        assert self.pool is not None
        while self.pool.get_num_free_blocks() < blocks and self.drop_idle():
            self.stats.add(sessions_dropped=-1, sessions_made_room=1)

    def take_stale(self) -> list[tuple[int, int]]:
        """Group and id of the first blocks of sessions that ended since the last call."""
        stale, self._stale = self._stale, []
        return stale

    def _give_back(self, session: Session) -> None:
        assert self.pool is not None
        self._stale += [(i, held.blocks[0].block_id) for i, held in session.attention.items() if held.blocks]
        self.pool.free_blocks(reversed(session.blocks))
