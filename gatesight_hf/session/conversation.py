"""A conversation about a document: its turns, and the caches that it goes on from."""

from collections.abc import Sequence
from typing import Any

import torch

from ..cache.cache import GateSightCache
from ..cache.prefill import prefill
from .document import Document
from .prompts import Turn, common

#: In place of a question, to see what a template has before one. Two, as a question may begin like one of them.
_OTHERS = ("What?", "(7)")


class Conversation:
    """Turns after a document.

    The next turn is what the prompt makes of all of them. Where it rewrites earlier ones, as templates do that drop
    reasoning, the conversation goes back to the last cache that has read a begin of the new ids, and reads the rest.
    Two caches are held for that besides the document's: the one before the last question, and the one after its answer.

    Args:
        turns: Of before, whose caches are gone: the document's is the one to go on from.
    """

    def __init__(self, turns: Sequence[Turn] = ()) -> None:
        self.turns = tuple(turns)
        self._caches: tuple[GateSightCache, ...] = ()

    def begin(self, model: Any, document: Document, question: str) -> tuple[GateSightCache, list[int]]:
        """A cache that has read all before a question, to be forked for it, and the ids that follow.

        Raises:
            ValueError: See `Prompt.turn`.
        """
        ids, tokens = document.prompt.turn(self.turns, question), document.cache.get_seq_length()
        caches = [cache for cache in self._caches if _begins(ids, _after(cache, tokens))]
        cache = max(caches, key=GateSightCache.get_seq_length, default=document.cache)
        # Up to the question itself: what the next turn may go back to, however it rewrites this one.
        border = min(common(ids, document.prompt.turn(self.turns, other)) for other in _OTHERS)
        seen = cache.get_seq_length() - tokens
        if border > seen:
            cache = cache.fork()
            prefill(model, torch.tensor([ids[seen:border]], device=model.device), cache)
            seen = border
        return cache, ids[seen:]

    def end(self, question: str, answer: str, before: GateSightCache, after: GateSightCache) -> None:
        """Take a turn in.

        Args:
            question, answer: Their texts.
            before: As `begin` gave it.
            after: A fork of it that has read question and answer; one of several beams is of no use, and not held.
        """
        self.turns = (*self.turns, Turn(question, answer))
        self._caches = (before, after) if after.batch_size == before.batch_size else (before,)


def _after(cache: GateSightCache, tokens: int) -> list[int]:
    """Ids that a cache has seen after those of the document."""
    ids = cache.context.tokens.ids
    assert ids is not None  # those of a session are known
    seen: list[int] = ids[0, tokens:].tolist()
    return seen


def _begins(ids: list[int], seen: list[int]) -> bool:
    """Whether the ids begin with those seen, and go on."""
    return len(seen) < len(ids) and ids[: len(seen)] == seen
