"""What a session's document looks like: its kept entries on a page, and answers from full, kept and random caches."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..cache.storage import AbsentScorer
from ..errors import CacheStateError
from ..methods import RandomScorer
from ..scoring.interface import Scorer
from ..view import Answered, Page, followed, recorded, view_of
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
    if document.grown:
        raise CacheStateError(
            "The document was compacted again with the text that was added: what stays of it does not follow from its "
            "scores alone. Open it anew with all its text."
        )
    others: dict[str, Scorer] = {"random": RandomScorer()} if scorers is None else dict(scorers)
    names = itertools.chain(("gatesight", "session"), (f"session {number}" for number in itertools.count(2)))
    shown = {next(name for name in names if name not in others): own, **others}
    rated, added = ids[0, : document.compacted].tolist(), ids[0, document.compacted :].tolist()
    parent = recorded(
        model,
        rated,
        shown,
        allocation=options.allocation,
        protected_prefix=options.protected_prefix,
        protected_suffix=options.protected_suffix,
        block_size=options.block_size,
        gate_exponent=options.gate_exponent,
        prefill_chunk_size=prefill_chunk_size,
    )
    shown = {name: parent.score(scorer) for name, scorer in shown.items()}
    tokens = texts_of(tokenizer, [*rated, *added])
    view = view_of(parent, shown, tokens[: len(rated)], options.allocation, options.block_size)
    view = followed(view, tokens[len(rated) :])
    asked = [document.prompt.turn((), question) for question in questions]
    kept = {
        "full": parent.fork(kept_fraction=1.0),
        "kept": parent.fork(scorer=next(iter(shown.values())), kept_fraction=options.kept_fraction),
        "random": parent.fork(scorer=RandomScorer(), kept_fraction=options.kept_fraction),
    }
    answers: dict[str, list[list[int]]] = {}
    for label, child in kept.items() if asked else ():
        child.compact()
        if added:
            document.prefill(model, child, added, prefill_chunk_size)
        (answers[label],) = answer_many(model, child, asked, [max_new_tokens] * len(asked), 1, {})
    rows = [
        Answered(question, {label: decoded(tokenizer, found[number]) for label, found in answers.items()})
        for number, question in enumerate(questions)
    ]
    return Page(replace(view, answered=tuple(rows), answered_at=options.kept_fraction if rows else None))


def texts_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text, with the spaces before it."""
    alone = tokenizer.batch_decode([[token] for token in ids])
    pairs = tokenizer.batch_decode([list(pair) for pair in itertools.pairwise(ids)])
    added = [
        pair[len(first) :] if pair.startswith(first) else second
        for first, second, pair in zip(alone, alone[1:], pairs, strict=False)
    ]
    return [*alone[:1], *added]
