"""A document as it was read: what all questions and conversations begin from."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gatesight_kernels.checks import described

from ..cache.cache import GateSightCache
from ..cache.prefill import prefill
from ..errors import CacheStateError
from ..scoring.interface import Scorer
from .prompts import Prompt


@dataclass(frozen=True)
class Document:
    """A value: a document with more text is another one.

    Attributes:
        cache: Has read it, compacted, in one row.
        prompt: Behind it.

    Raises:
        TypeError: No GateSight cache.
        CacheStateError: The cache is not compacted.
        ValueError: It has several rows.
    """

    cache: GateSightCache
    prompt: Prompt

    def __post_init__(self) -> None:
        cache = self.cache
        if not isinstance(cache, GateSightCache):
            raise TypeError(f"cache must be a GateSightCache, got {described(cache)}.")
        if not cache.is_compacted:
            raise CacheStateError("cache is not compacted: prefill the document and call compact() before it is asked.")
        if cache.batch_size != 1:
            raise ValueError(f"cache holds {cache.batch_size} rows, a session one document: select a row of a fork.")

    @classmethod
    def read(
        cls,
        model: Any,
        scorer: Scorer,
        prompt: Prompt,
        text: str,
        chunk_size: int | None,
        protected_prefix: int,
        options: Mapping[str, Any],
    ) -> "Document":
        """Prefill a text and compact its cache; arguments as of `Session.open`."""
        behind, ids = prompt.add(text)
        most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if most is not None and len(ids) >= most:
            warnings.warn(
                f"The document has {len(ids):,} tokens, and the model was made for {most:,}: answers may be wrong.",
                stacklevel=3,
            )
        always = behind.protected(ids) + protected_prefix
        cache = GateSightCache(scorer, model, protected_prefix=always, **options)
        prefill(model, torch.tensor([ids], device=model.device), cache, chunk_size)
        cache.compact()
        return cls(cache, behind)

    def added(self, model: Any, text: str, chunk_size: int | None) -> "Document":
        """With one more text, which stays whole unless the cache grows."""
        behind, ids = self.prompt.add(text)
        cache = self.cache.fork()
        prefill(model, torch.tensor([ids], device=model.device), cache, chunk_size)
        return Document(cache, behind)
