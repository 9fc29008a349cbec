"""Nothing is lost when something fails: a forward leaves the cache as it was, a compaction can be completed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gatesight_hf import CacheStateError, GateSightCache
from gatesight_hf.entries import GateSightAttentionLayer

from ..helpers.models import KeyNorm, random_estimator
from ..helpers.oracle import Oracle, assert_same, evicted_of
from ..helpers.running import compacted, forward, left_padded, padded, prefilled, random_ids, steps

pytestmark = [pytest.mark.core, pytest.mark.quick]

CONTEXT = 43


class BoomError(Exception):
    """Raised by the tests only."""


def answer(model: Any, cache: GateSightCache) -> tuple[Tensor, Tensor]:
    """Logits of a question's tokens and of the steps of an answer, on forks."""
    new = random_ids(6, seed=9)
    return forward(model, new, cache.fork()), steps(model, torch.cat([random_ids(CONTEXT), new], 1), cache.fork())[1]


def assert_answers_equal(model: Any, cache: GateSightCache, other: GateSightCache) -> None:
    for found, expected in zip(answer(model, cache), answer(model, other), strict=True):
        assert torch.equal(found, expected)


@pytest.fixture
def second_layer_fails(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Compaction of the second attention layer raises until the returned function is called."""
    compact, calls = GateSightAttentionLayer.compact, []

    def flaky(self: Any, *args: Any) -> None:
        calls.append(self)
        if len(calls) == 2:
            raise BoomError
        compact(self, *args)

    monkeypatch.setattr(GateSightAttentionLayer, "compact", flaky)
    return monkeypatch.undo


def test_compaction_that_fails_half_way_can_be_completed(dense, second_layer_fails):
    cache = prefilled(dense, random_ids(CONTEXT), kept_fraction=0.3)
    with pytest.raises(BoomError):
        cache.compact()
    assert not cache.is_compacted
    second_layer_fails()
    undisturbed = compacted(dense, random_ids(CONTEXT), kept_fraction=0.3)
    twin = cache.fork()
    report = cache.compact()
    assert report.kept_per_layer == undisturbed.report().kept_per_layer
    assert report.kv_bytes == undisturbed.report().kv_bytes
    assert report.kv_bytes_before == undisturbed.report().kv_bytes_before
    assert_answers_equal(dense, cache, undisturbed)
    twin.compact()
    assert_answers_equal(dense, twin, undisturbed)


@pytest.mark.parametrize("question", [1, 6])
def test_a_cache_whose_compaction_failed_half_way_still_answers(dense, plain, attention, second_layer_fails, question):
    """One layer is compacted and the other is not: the answer is right for what each layer holds."""
    row, new = random_ids(CONTEXT), random_ids(question, seed=9)
    cache = prefilled(dense, row, kept_fraction=0.3)
    with pytest.raises(BoomError):
        cache.compact()
    second_layer_fails()
    first = evicted_of(compacted(dense, row, kept_fraction=0.3), 0, CONTEXT)[0]
    with Oracle(plain, [first, torch.zeros_like(first)]) as oracle:
        assert_same(forward(dense, new, cache.fork()), oracle.logits(row, new))


@pytest.mark.parametrize(
    "options", [{}, {"allocation": "head"}, {"allocation": "global"}, {"entries_dtype": "int8"}], ids=str
)
def test_a_half_way_failure_can_be_completed_in_other_rows(dense, second_layer_fails, options):
    """Rows that came or went in between take what was decided for them along."""
    ids, mask = left_padded([random_ids(CONTEXT), random_ids(29, seed=1)])
    cache = prefilled(dense, ids, mask=mask, kept_fraction=0.3, **options)
    with pytest.raises(BoomError):
        cache.compact()
    second_layer_fails()
    undisturbed = compacted(dense, ids, mask=mask, kept_fraction=0.3, **options)
    for each in (cache, undisturbed):
        each.batch_select_indices(torch.tensor([1, 0, 0]))
        each.batch_repeat_interleave(2)
    assert cache.compact().kept_per_layer == undisturbed.report().kept_per_layer
    new = random_ids(4, rows=6, seed=9)
    assert torch.equal(forward(dense, new, cache), forward(dense, new, undisturbed))


def test_a_half_way_failure_leaves_nothing_to_score_or_fork_otherwise(dense, second_layer_fails):
    cache = prefilled(dense, random_ids(CONTEXT), kept_fraction=0.3)
    with pytest.raises(BoomError):
        cache.compact()
    for act in (cache.score, lambda: cache.fork(kept_fraction=0.9), lambda: cache.fork(scorer=KeyNorm())):
        with pytest.raises(CacheStateError, match="half-way"):
            act()
    second_layer_fails()
    assert cache.compact().achieved_fraction == pytest.approx(0.3, abs=0.02)


def test_tokens_after_a_half_way_failure_are_never_lost(dense, second_layer_fails):
    """Going on, or completing the compaction afterwards, is refused or keeps what came after the context."""
    cache = prefilled(dense, random_ids(CONTEXT), kept_fraction=0.3)
    with pytest.raises(BoomError):
        cache.compact()
    second_layer_fails()
    with suppress(CacheStateError):
        forward(dense, random_ids(1, seed=9), cache)
        report = cache.compact()
        assert report.physical_lengths == [kept + 1 for kept in report.kept_per_layer[0]]


@pytest.mark.parametrize("value", [torch.nan, "shape"])
def test_a_scorer_that_fails_changes_nothing(dense, value):
    class Wrong(KeyNorm):
        def score(self, prefill: Any) -> list[Tensor]:
            first, second = super().score(prefill)
            return [first, second[..., 1:] if value == "shape" else torch.full_like(second, value)]

    cache = prefilled(dense, random_ids(CONTEXT), scorer=Wrong(), kept_fraction=0.3)
    before = cache.report()
    with pytest.raises(ValueError, match="shape" if value == "shape" else "NaN"):
        cache.compact()
    assert replace(cache.report(), seconds={}) == replace(before, seconds={})
    cache.context.scorer = KeyNorm()
    cache.compact()
    assert_answers_equal(dense, cache, compacted(dense, random_ids(CONTEXT), scorer=KeyNorm(), kept_fraction=0.3))


@contextmanager
def failing(model: Any, error: type[BaseException]) -> Iterator[None]:
    """The model raises in its last but one layer, after most layers have taken their part of the tokens."""

    def fail(*args: Any) -> None:
        raise error

    handle = model.model.layers[-2].mlp.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("error", [BoomError, KeyboardInterrupt])
@pytest.mark.parametrize("done", [0, 20, 42])
def test_a_prefill_that_fails_can_be_repeated(dense, error, done):
    ids = random_ids(CONTEXT)
    cache = GateSightCache(random_estimator(dense), dense, kept_fraction=0.3)
    if done:
        forward(dense, ids[:, :done], cache)
    with failing(dense, error), pytest.raises(error):
        forward(dense, ids[:, done:], cache)
    logits = forward(dense, ids[:, done:], cache)
    cache.compact()
    other = GateSightCache(random_estimator(dense), dense, kept_fraction=0.3)
    if done:
        forward(dense, ids[:, :done], other)
    assert torch.equal(logits, forward(dense, ids[:, done:], other))
    other.compact()
    assert_answers_equal(dense, cache, other)


@pytest.mark.parametrize("error", [BoomError, KeyboardInterrupt])
@pytest.mark.parametrize("question", [1, 6])
def test_a_question_that_fails_can_be_repeated(dense, error, question):
    cache = compacted(dense, random_ids(CONTEXT), kept_fraction=0.3)
    child, new = cache.fork(), random_ids(question, seed=9)
    with failing(dense, error), pytest.raises(error):
        forward(dense, new, child)
    assert torch.equal(forward(dense, new, child), forward(dense, new, cache.fork()))
    assert child.get_seq_length() == CONTEXT + question


def test_a_padded_batch_that_fails_can_be_repeated(dense):
    ids, mask = left_padded([random_ids(CONTEXT), random_ids(17)])
    cache = GateSightCache(random_estimator(dense), dense, kept_fraction=0.3)
    with failing(dense, BoomError), pytest.raises(BoomError):
        forward(dense, ids, cache, **padded(mask, CONTEXT))
    expected = prefilled(dense, ids, mask=mask, kept_fraction=0.3)
    forward(dense, ids, cache, **padded(mask, CONTEXT))
    assert cache.compact().kept_per_layer == expected.compact().kept_per_layer


def test_several_questions_that_fail_leave_a_cache_of_one_row(dense):
    """The rows a failed forward was given are gone with it."""
    cache = compacted(dense, random_ids(CONTEXT), kept_fraction=0.3)
    child = cache.fork()
    with failing(dense, BoomError), pytest.raises(BoomError):
        forward(dense, random_ids(6, rows=3), child)
    assert_answers_equal(dense, child, cache)
