"""Session: a document is prefilled and compacted once; every question is answered from a fork of it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._compat import cache_argument
from .cache import GateSightCache
from .estimator import Estimator
from .report import CacheReport
from .scoring import Scorer


def prefill(model: Any, ids: Tensor, cache: GateSightCache, chunk_size: int | None = None) -> None:
    """Run a model over a context, without its logits.

    Args:
        model: The model of the cache.
        ids: `[B, T]`.
        cache: Receives the context; it is not compacted here.
        chunk_size: Tokens per forward; None runs one.

    Raises:
        ValueError: A chunk size below 1.
    """
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"prefill_chunk_size is a number of tokens >= 1 or None, got {chunk_size}.")
    with torch.no_grad():
        for chunk in ids.split(chunk_size or ids.shape[1], dim=1):
            model(chunk, **{cache_argument(model): cache}, use_cache=True, logits_to_keep=1)


class Session:
    """Text in, answers out, over one compacted document.

    Args:
        model: The hybrid model.
        tokenizer: Its tokenizer.
        cache: A cache that holds the document, compacted.
    """

    def __init__(self, model: Any, tokenizer: Any, cache: GateSightCache) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.cache = cache

    @classmethod
    def open(
        cls,
        model: Any,
        tokenizer: Any,
        estimator: str | Path | Scorer,
        text: str,
        *,
        kept_fraction: float = 0.1,
        protected_prefix: int = 0,
        allocation: str = "gate",
        entries_dtype: str | None = None,
        prefill_chunk_size: int | None = None,
    ) -> "Session":
        """Prefill a document and compact its cache.

        Args:
            model: The hybrid model.
            tokenizer: Its tokenizer.
            estimator: Folder of an estimator, or a scorer.
            text: The document.
            kept_fraction, protected_prefix, allocation, entries_dtype: See `GateSightCache`.
            prefill_chunk_size: Tokens per forward; None prefills in one.

        Raises:
            ValueError: The document has no tokens, or see `GateSightCache`.
        """
        scorer = estimator if isinstance(estimator, Scorer) else Estimator.from_pretrained(estimator)
        cache = GateSightCache(scorer, model, kept_fraction, protected_prefix, allocation, entries_dtype=entries_dtype)
        ids = tokenizer(text, return_tensors="pt").input_ids.to(model.device)
        if ids.shape[1] == 0:
            raise ValueError("The document has no tokens.")
        prefill(model, ids, cache, prefill_chunk_size)
        cache.compact()
        return cls(model, tokenizer, cache)

    def ask(self, question: str, max_new_tokens: int = 64, **generate_options: Any) -> str:
        """The model's continuation of document + question; greedy unless `generate_options` say otherwise.

        Questions do not see each other: each runs on a fork, with its own GDN states.

        Raises:
            ValueError: The question has no tokens, or options that give several sequences.
        """
        ids = self.tokenizer(question, return_tensors="pt", add_special_tokens=False).input_ids.to(self.model.device)
        if ids.shape[1] == 0:
            raise ValueError("The question has no tokens.")
        seen = self.cache.get_seq_length()
        output = self.model.generate(
            ids,
            attention_mask=torch.ones((1, seen + ids.shape[1]), dtype=torch.long, device=ids.device),
            max_new_tokens=max_new_tokens,
            **{"do_sample": False, **generate_options, cache_argument(self.model): self.cache.fork()},
        )
        sequences = getattr(output, "sequences", output)
        if len(sequences) > 1:
            raise ValueError("ask() gives one answer; for several sequences call generate with session.cache.fork().")
        return self.tokenizer.decode(sequences[0, ids.shape[1] :], skip_special_tokens=True).strip()

    def report(self) -> CacheReport:
        """Lengths, bytes and seconds of the document's cache."""
        return self.cache.report()
