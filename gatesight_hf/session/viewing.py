"""What a session's document looks like: its kept entries on a page, and answers from full, kept and random caches."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..cache.cache import GateSightCache
from ..cache.storage import AbsentScorer
from ..errors import CacheStateError
from ..methods import RandomScorer
from ..scoring.interface import Recorder, Scorer
from ..view import Answered, Page, recorded, view_of
from .answering import answer_many, check_questions, decoded
from .document import Document


def page_of(
    model: Any,
    tokenizer: Any,
    document: Document,
    questions: Sequence[str],
    scorers: Mapping[str, Scorer] | None,
    max_new_tokens: int,
    prefill_chunk_size: int | None,
) -> Page:
    """See `Session.view`."""
    check_questions("view", questions, max_new_tokens, {})
    cache, ids = document.cache, document.cache.context.tokens.ids
    own, options = cache.scorer, cache.options
    if ids is None or cache.context.tokens.pictures:
        raise CacheStateError("A document of embeddings or pictures has no tokens to show.")
    if isinstance(own, AbsentScorer):
        raise CacheStateError(
            "The session was loaded without its estimator, which rates entries: give it to load (--estimator)."
        )
    name = "gatesight" if "gatesight" not in (scorers or {}) else "session"
    shown = {name: own, **({"random": RandomScorer()} if scorers is None else scorers)}
    tokens = texts_of(tokenizer, ids[0].tolist())
    parent = recorded(
        model,
        ids[0].tolist(),
        shown,
        allocation=options.allocation,
        protected_prefix=options.protected_prefix,
        protected_suffix=options.protected_suffix,
        block_size=options.block_size,
        gate_exponent=options.gate_exponent,
        prefill_chunk_size=prefill_chunk_size,
    )
    view = view_of(parent, shown, tokens, options.allocation, options.block_size)
    asked = [document.prompt.turn((), question) for question in questions]
    answers = _answers(model, parent, asked, own, max_new_tokens, options.kept_fraction) if asked else {}
    rows = [
        Answered(question, {label: decoded(tokenizer, found[number]) for label, found in answers.items()})
        for number, question in enumerate(questions)
    ]
    return Page(replace(view, answered=tuple(rows), answered_at=options.kept_fraction if rows else None))


def _answers(
    model: Any, parent: GateSightCache, asked: list[list[int]], own: Scorer, max_new_tokens: int, fraction: float
) -> dict[str, list[list[int]]]:
    """Ids of answers to all questions, by kind of cache."""
    kinds = {"full": (Recorder(), 1.0), "kept": (own, fraction), "random": (RandomScorer(), fraction)}
    found = {}
    for label, (scorer, kept) in kinds.items():
        child = parent.fork(scorer=scorer, kept_fraction=kept)
        child.compact()
        (found[label],) = answer_many(model, child, asked, [max_new_tokens] * len(asked), 1, {})
    return found


def texts_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text, with the spaces before it."""
    alone = tokenizer.batch_decode([[token] for token in ids])
    pairs = tokenizer.batch_decode([list(pair) for pair in itertools.pairwise(ids)])
    added = [
        pair[len(first) :] if pair.startswith(first) else second
        for first, second, pair in zip(alone, alone[1:], pairs, strict=False)
    ]
    return [*alone[:1], *added]
