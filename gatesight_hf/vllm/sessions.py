"""The scheduler's book of sessions: what each holds of the block pool, who uses it, and which one goes first."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from .metrics import SessionStats
from .options import Limits
from .paged import Inherited


@dataclass
class Session:
    """A compacted parent.

    Attributes:
        tokens: Of the context: where children begin.
        digest: Of the context's ids.
        owner: Whose it is, see `Asked`.
        token: Of the request that opened it, likewise.
        attention: Per KV-cache group of an attention layer.
        states: Per group of GDN layers, their states after the context.
        report: Of the compaction, for whoever asks.
        users: Requests that are its children now, waiting ones included.
    """

    tokens: int
    digest: bytes
    owner: str = ""
    token: str = ""
    attention: dict[int, Inherited] = field(default_factory=dict)
    states: dict[int, Inherited] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    users: set[str] = field(default_factory=set)

    @property
    def blocks(self) -> list[KVCacheBlock]:
        """All that it holds."""
        return [block for held in (self.states, self.attention) for one in held.values() for block in one.blocks]

    @property
    def nbytes(self) -> int:
        """Of these."""
        return int(self.report.get("kv_bytes", 0) + self.report.get("gdn_bytes", 0))


class Sessions:
    """By id, the least recently used one first. Holds one reference to each block of each session.

    Args:
        limits: Of all sessions, and of each owner's.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
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

    def add(self, session_id: str, session: Session) -> str | None:
        """Take over one reference to each block; a session of the same id is dropped.

        Returns:
            Why it was dropped itself at once, or None.
        """
        self.drop(session_id)
        self._held[session_id] = session
        while len(self._held) > self._limits.max_sessions and self.drop_idle(spared=session_id):
            pass
        while (why := self._beyond_limits(session.owner)) and self.drop_idle(session_id, session.owner):
            pass
        if why is not None:
            self.drop(session_id)
        return why

    def why_no_more(self, owner: str, session_id: str) -> str | None:
        """Why an owner cannot have one more session, whatever its size, or None; one of the same id is replaced."""
        idle = any(one.owner == owner and not one.users for one in self._held.values())
        replaced = session_id in self._held
        return None if idle or replaced else self._beyond_limits(owner, more=1)

    def _beyond_limits(self, owner: str, more: int = 0) -> str | None:
        """Which of its limits an owner's sessions exceed, with so many more of unknown size."""
        limits, own = self._limits, [one for one in (*self._held.values(), *self._leaving) if one.owner == owner]
        most, most_bytes = limits.max_sessions_per_key, limits.max_bytes_per_key
        if most is not None and len(own) + more > most:
            return f"more than {most} sessions of one key, of which none is idle"
        if most_bytes is not None and sum(one.nbytes for one in own) + more > most_bytes:
            return f"more than {most_bytes} bytes in sessions of one key, of which no other is idle"
        return None

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

    def drop_idle(self, spared: str | None = None, owner: str | None = None) -> bool:
        """Drop the least recently used session that no request uses, of one owner or of all; False if there is none.

        Args:
            spared: Id of one that stays.
            owner: None for all.
        """
        idle = (name for name, one in self._held.items() if not one.users and owner in (None, one.owner))
        found = next((name for name in idle if name != spared), None)
        return found is not None and self.drop(found)

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
