"""A conversation about a document: its turns, and the caches that it goes on from."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..cache.cache import GateSightCache
from ..errors import CacheStateError
from .document import Document
from .prompts import Message, Turn


class Begun(NamedTuple):
    """A turn that has a question and no answer yet.

    Attributes:
        conversation: That it is of.
        question: Its text.
        before: Has read all that stands before the question, whichever that is.
        child: A fork of it, for question and answer.
        ids: That the child is to read, up to where the answer begins.
    """

    conversation: "Conversation"
    question: str
    before: GateSightCache
    child: GateSightCache
    ids: list[int]

    def ended(self, answer: str, now: "Conversation") -> "Conversation":
        """The conversation with this turn, whose question and answer the child has read.

        Args:
            answer: Text of it.
            now: The conversation that it is to become the next turn of.

        Raises:
            CacheStateError: It is another one than the turn is of.
        """
        if now is not self.conversation:
            raise CacheStateError(
                f"The session was changed before the answer to {self.question[:40]!r} had ended: the turn is not part "
                "of its conversation."
            )
        # A child of several rows, as beams leave it, is of no use.
        of_one = self.child.batch_size == self.before.batch_size
        caches = (self.before, self.child) if of_one else (self.before,)
        return replace(now, turns=(*now.turns, Turn(self.question, answer)), caches=caches)


@dataclass(frozen=True)
class Conversation:
    """Turns after a document. A value: with one more turn it is another one.

    The next turn is what the prompt makes of all of them. Where it rewrites earlier ones, as templates do that drop
    reasoning, the conversation goes back to the last cache that has read a begin of the new ids, and reads the rest.
    Two caches are held for that besides the document's: the one before the last question, and the one after its answer.

    Attributes:
        document: That it is about.
        turns: Of before; where they come from a file, their caches are gone, and the document's is the one to go on
            from.
        caches: Those two, or fewer.
    """

    document: Document
    turns: tuple[Turn, ...] = ()
    caches: tuple[GateSightCache, ...] = ()

    def messages(self) -> Iterator[Message]:
        """The turns, with `role` and `content`."""
        return (message for turn in self.turns for message in turn.messages())

    def begin(self, model: Any, question: str) -> Begun:
        """Read what stands before a question.

        Raises:
            CacheStateError: The document has no ids, or see `Document.fork`.
            ValueError: See `Prompt.turn`.
        """
        document = self.document
        if document.cache.context.tokens.ids is None:
            raise CacheStateError(
                "The document came as embeddings, without the ids that a conversation goes on from: ask() needs none."
            )
        ids = document.prompt.turn(self.turns, question)
        read = [cache for cache in self.caches if _begins(ids, self._seen(cache))]
        cache = max(read, key=GateSightCache.get_seq_length) if read else document.fork()
        # Up to the question itself: what the next turn may go back to, however it rewrites this one.
        border, seen = document.prompt.border(self.turns, ids), len(self._seen(cache))
        if border > seen:
            cache = cache.fork()
            document.prefill(model, cache, ids[seen:border])
            seen = border
        return Begun(self, question, cache, cache.fork(), ids[seen:])

    def _seen(self, cache: GateSightCache) -> list[int]:
        """Ids that a cache has read after the document's."""
        ids = cache.context.tokens.ids
        assert ids is not None  # `begin` has looked
        seen: list[int] = ids[0, self.document.length :].tolist()
        return seen


def _begins(ids: list[int], seen: list[int]) -> bool:
    """Whether the ids begin with those seen, and go on."""
    return len(seen) < len(ids) and ids[: len(seen)] == seen
