"""A document as it was read: what all questions and conversations begin from."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gatesight_kernels.checks import check_whole_number, described

from ..cache.cache import GateSightCache
from ..cache.prefill import prefill
from ..errors import CacheStateError
from ..scoring.estimator import HUB_OPTIONS, scorer_from
from ..scoring.interface import Scorer
from .prompts import Prompt


@dataclass(frozen=True)
class Document:
    """A value: a document with more text is another one.

    Attributes:
        cache: Has read it, compacted, in one row.
        prompt: Behind it.
        chunk_size: Tokens per forward, of all that is read; None reads in one.
        grown: Whether it was compacted again, with more text.
        length: Tokens that it has, the logical length of its cache.

    Raises:
        TypeError: No GateSight cache.
        CacheStateError: The cache is not compacted.
        ValueError: It has several rows.
    """

    cache: GateSightCache
    prompt: Prompt
    chunk_size: int | None = None
    grown: bool = False
    length: int = field(init=False)

    def __post_init__(self) -> None:
        cache = self.cache
        if not isinstance(cache, GateSightCache):
            raise TypeError(f"cache must be a GateSightCache, got {described(cache)}.")
        if not cache.is_compacted:
            raise CacheStateError("cache is not compacted: prefill the document and call compact() before it is asked.")
        if cache.batch_size != 1:
            raise ValueError(f"cache holds {cache.batch_size} rows, a session one document: select a row of a fork.")
        object.__setattr__(self, "length", cache.get_seq_length())

    @classmethod
    def read(
        cls,
        model: Any,
        estimator: str | Path | Scorer,
        prompt: Prompt,
        text: str,
        chunk_size: int | None,
        protected_prefix: int,
        options: Mapping[str, Any],
    ) -> "Document":
        """Prefill a text and compact its cache; arguments as of `Session.open`."""
        check_whole_number("prefill_chunk_size", chunk_size, or_none=True)
        check_whole_number("protected_prefix", protected_prefix, 0)
        scorer = scorer_from(estimator, **{name: options[name] for name in HUB_OPTIONS & set(options)})
        behind, ids = prompt.add(text)
        most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if most is not None and len(ids) >= most:
            warnings.warn(
                f"The document has {len(ids):,} tokens, and the model was made for {most:,}: answers may be wrong.",
                stacklevel=3,
            )
        always = behind.protected(ids) + protected_prefix
        of_cache = {name: value for name, value in options.items() if name not in HUB_OPTIONS}
        cache = GateSightCache(scorer, model, protected_prefix=always, **of_cache)
        prefill(model, torch.tensor([ids], device=model.device), cache, chunk_size)
        cache.compact()
        return cls(cache, behind, chunk_size)

    @property
    def compacted(self) -> int:
        """Tokens that the last compaction was over; those after them are all kept."""
        assert self.cache.context.plan is not None
        return self.cache.context.plan.context

    def fork(self) -> GateSightCache:
        """A child, for a question.

        Raises:
            CacheStateError: The cache has read more than the document since.
        """
        if (now := self.cache.get_seq_length()) != self.length:
            raise CacheStateError(
                f"The session's cache has {now} tokens, where its document has {self.length}: something else was read "
                "into it. Use forks of session.cache, and open or load the session again."
            )
        return self.cache.fork()

    def asked(self, question: str) -> tuple[GateSightCache, list[int]]:
        """A child for a question without a conversation, and the ids that it is to read.

        Raises:
            CacheStateError, ValueError: See `fork` and `Prompt.turn`.
        """
        return self.fork(), self.prompt.turn((), question)

    def prefill(self, model: Any, cache: GateSightCache, ids: Sequence[int], chunk_size: int | None = None) -> None:
        """Let a child read; in chunks of the document's size unless another one is given."""
        prefill(model, torch.tensor([list(ids)], device=model.device), cache, chunk_size or self.chunk_size)

    def added(self, model: Any, text: str, chunk_size: int | None) -> "Document":
        """With one more text, which stays whole unless the cache grows."""
        behind, ids = self.prompt.add(text)
        cache = self.fork()
        self.prefill(model, cache, ids, chunk_size)
        document = Document(cache, behind, self.chunk_size)
        return replace(document, grown=self.grown or document.compacted != self.compacted)
