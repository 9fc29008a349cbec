"""Session: a document is prefilled and compacted once; every question is answered from a fork of it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gatesight_kernels.checks import check_bool, check_whole_number, described

from ..cache.cache import GateSightCache
from ..cache.prefill import prefill
from ..cache.report import CacheReport
from ..checks import check_model, check_text, check_tokenizer
from ..errors import CacheStateError
from ..models._compat import CACHE_ARGUMENTS, cache_argument
from ..scoring.estimator import Estimator
from ..scoring.interface import Scorer

#: For messages about texts.
ONE_DOCUMENT = "; a session holds one document"
#: What `ask` gives to `generate` itself.
_OWN = frozenset({*CACHE_ARGUMENTS, "inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids"})


def _scorer(
    estimator: str | Path | Scorer,
    revision: str | None,
    token: str | bool | None,
    cache_dir: str | Path | None,
    local_files_only: bool,
) -> Scorer:
    if isinstance(estimator, Scorer):
        return estimator
    return Estimator.from_pretrained(
        estimator, revision=revision, token=token, cache_dir=cache_dir, local_files_only=local_files_only
    )


class Session:
    """Text in, answers out, over one compacted document.

    Args:
        model: The hybrid model.
        tokenizer: Its tokenizer.
        cache: A cache that holds the document, compacted.

    Raises:
        TypeError: No model, no tokenizer, or no GateSight cache.
        CacheStateError: The cache is not compacted.
    """

    def __init__(self, model: Any, tokenizer: Any, cache: GateSightCache) -> None:
        check_model(model)
        check_tokenizer(tokenizer)
        if not isinstance(cache, GateSightCache):
            raise TypeError(f"cache must be a GateSightCache, got {described(cache)}.")
        if not cache.is_compacted:
            raise CacheStateError("cache is not compacted: prefill the document and call compact() before it is asked.")
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
        recompact_every: int | None = None,
        entries_dtype: str | None = None,
        protected_suffix: int = 0,
        prefill_chunk_size: int | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
    ) -> "Session":
        """Prefill a document and compact its cache.

        Args:
            model: The hybrid model.
            tokenizer: Its tokenizer.
            estimator: Folder of an estimator, its repo on the Hub, or a scorer.
            text: The document.
            kept_fraction, protected_prefix, allocation, recompact_every, entries_dtype, protected_suffix: See
                `GateSightCache`.
            prefill_chunk_size: Tokens per forward; None prefills in one.
            revision, token, cache_dir, local_files_only: See `Estimator.from_pretrained`.

        Raises:
            TypeError: The text is no string.
            OSError, ValueError: The document has no tokens, or see `GateSightCache.from_pretrained`.
        """
        check_text("text", text, ONE_DOCUMENT)
        check_model(model)
        check_tokenizer(tokenizer)
        check_whole_number("prefill_chunk_size", prefill_chunk_size, or_none=True)
        scorer = _scorer(estimator, revision, token, cache_dir, local_files_only)
        cache = GateSightCache(
            scorer,
            model,
            kept_fraction,
            protected_prefix,
            allocation,
            recompact_every=recompact_every,
            entries_dtype=entries_dtype,
            protected_suffix=protected_suffix,
        )
        ids = tokenizer(text, return_tensors="pt").input_ids.to(model.device)
        if ids.shape[1] == 0:
            raise ValueError("The document, text, has no tokens.")
        prefill(model, ids, cache, prefill_chunk_size)
        cache.compact()
        return cls(model, tokenizer, cache)

    def add(self, text: str, prefill_chunk_size: int | None = None) -> None:
        """Append a text to what all later questions see. If this fails, the session is as before.

        Raises:
            TypeError: The text is no string.
            ValueError: It has no tokens.
        """
        ids, cache = self._ids(text, "text"), self.cache.fork()
        prefill(self.model, ids, cache, prefill_chunk_size)
        self.cache = cache

    def ask(self, question: str, max_new_tokens: int = 64, *, keep: bool = False, **generate_options: Any) -> str:
        """The model's continuation of document + question; greedy unless `generate_options` say otherwise.

        Questions do not see each other: each runs on a fork, with its own GDN states.

        Args:
            question: Its text.
            max_new_tokens: Of the answer.
            keep: Whether question and answer become part of the session, for a conversation. If this fails, the session
                is as before.
            generate_options: See `generate` of the model; nothing that stands for the question itself.

        Raises:
            TypeError: The question is no string, or an option stands for it.
            ValueError: The question has no tokens, `max_new_tokens` below 1, or options that give several sequences.
        """
        if given := sorted(_OWN.intersection(generate_options)):
            raise TypeError(
                f"ask() makes {given[0]} of the question by itself: leave it out, or call generate of the model with "
                "session.cache.fork()."
            )
        check_whole_number("max_new_tokens", max_new_tokens)
        check_bool("keep", keep)
        ids, cache = self._ids(question, "question"), self.cache.fork()
        seen = cache.get_seq_length()
        output = self.model.generate(
            ids,
            attention_mask=torch.ones((1, seen + ids.shape[1]), dtype=torch.long, device=ids.device),
            max_new_tokens=max_new_tokens,
            **{"do_sample": False, **generate_options, cache_argument(self.model): cache},
        )
        sequences = getattr(output, "sequences", output)
        if len(sequences) > 1:
            raise ValueError(
                "ask() gives one answer; for num_return_sequences call generate with session.cache.fork()."
            )
        if keep:
            if cache.batch_size > 1:
                cache = self.cache.fork()  # of beams it holds several, and the best may not be among them
            # The last token was chosen, but the model has not read it.
            prefill(self.model, sequences[:, cache.get_seq_length() - seen :], cache)
            self.cache = cache
        return self.tokenizer.decode(sequences[0, ids.shape[1] :], skip_special_tokens=True).strip()

    def save(self, path: str | Path) -> None:
        """Write the document's cache into one file; see `GateSightCache.save`.

        Raises:
            CacheStateError, OSError, ValueError: See there.
        """
        self.cache.save(path, tokenizer=self.tokenizer)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: Any,
        tokenizer: Any,
        estimator: str | Path | Scorer | None = None,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
    ) -> "Session":
        """Open a saved session: the document is not prefilled again, and answers are the same.

        Args:
            path: The file that `save` wrote.
            model, tokenizer: Those it was saved with.
            estimator: As in `open`, to make sure that the document was compacted with it.
            revision, token, cache_dir, local_files_only: See `Estimator.from_pretrained`.

        Raises:
            FileNotFoundError, SessionFileError, SessionMismatchError: See `GateSightCache.load`.
            OSError, ValueError: See `Estimator.from_pretrained`.
        """
        scorer = None if estimator is None else _scorer(estimator, revision, token, cache_dir, local_files_only)
        return cls(model, tokenizer, GateSightCache.load(path, model, tokenizer=tokenizer, scorer=scorer))

    def report(self) -> CacheReport:
        """Lengths, bytes and seconds of the document's cache."""
        return self.cache.report()

    def _ids(self, text: str, kind: str) -> Tensor:
        check_text(kind, text, ONE_DOCUMENT)
        ids = self.tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids.to(self.model.device)
        if ids.shape[1] == 0:
            raise ValueError(f"The {kind} has no tokens.")
        return ids
