"""A compacted cache equals a full cache with an explicit -inf mask on the evicted entries, per layer and head."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from gatesight_hf import GateSightCache
from gatesight_hf.compaction import ALLOCATIONS

from ..helpers.models import KeyNorm, random_estimator, tiny_model
from ..helpers.oracle import Oracle, assert_same, evicted_of
from ..helpers.running import compacted, forward, generate, left_padded, padded, prefilled, random_ids, steps

pytestmark = pytest.mark.core

CONTEXT = 43
LENGTHS = (CONTEXT, 17, 5)
FRACTIONS = (0.9, 0.5, 0.1)
QUESTIONS = (1, 6)
#: Fractions with lengths of a protected suffix, and allocations, all with all; questions in turn, since each attention
#: implementation answers every length after every fraction and every allocation.
CASES = [
    (fraction, suffix, allocation, QUESTIONS[(i + j) % 2])
    for i, (fraction, suffix) in enumerate(zip(FRACTIONS, (0, 3, 0), strict=True))
    for j, allocation in enumerate(ALLOCATIONS)
]


def dynamic(model: Any, ids: Tensor, mask: Tensor | None = None) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    forward(model, ids, cache, **({} if mask is None else padded(mask, ids.shape[1])))
    return cache


def rows_of(lengths: tuple[int, ...]) -> list[Tensor]:
    return [random_ids(length, seed=length) for length in lengths]


def questions_of(count: int, length: int) -> list[Tensor]:
    return [random_ids(length, seed=100 + row) for row in range(count)]


# -- everything kept ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(CONTEXT,), (CONTEXT, CONTEXT), LENGTHS], ids=["one row", "rows", "ragged"])
@pytest.mark.parametrize("question", QUESTIONS)
def test_keeping_all_equals_a_dynamic_cache_bit_for_bit(dense, attention, lengths, question):
    ids, mask = left_padded(rows_of(lengths))
    new = torch.cat(questions_of(len(lengths), question))
    full, full_mask = torch.cat([ids, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
    expected, cache = dynamic(dense, ids, mask), compacted(dense, ids, mask=mask, kept_fraction=1.0)
    assert cache.is_compacted
    given = padded(full_mask, question)
    logits = forward(dense, new, copy.deepcopy(expected), **given)
    assert torch.equal(forward(dense, new, cache.fork(), **given), logits)
    if len(lengths) == 1:
        assert torch.equal(forward(dense, new, cache.fork()), logits)
    expected_steps = steps(dense, full, expected, attention_mask=full_mask)
    for found, step in zip(steps(dense, full, cache.fork(), attention_mask=full_mask), expected_steps, strict=True):
        assert torch.equal(found, step)


@pytest.mark.parametrize("lengths", [(CONTEXT,), LENGTHS], ids=["one row", "ragged"])
def test_until_compaction_it_is_a_dynamic_cache_bit_for_bit(dense, attention, lengths):
    ids, mask = left_padded(rows_of(lengths))
    cache, expected = GateSightCache(random_estimator(dense), dense), DynamicCache(config=dense.config)
    for start, stop in ((0, 20), (20, 42), (42, CONTEXT)):
        given = padded(mask[:, :stop], stop - start)
        found, logits = (forward(dense, ids[:, start:stop], c, **given) for c in (cache, expected))
        assert torch.equal(found, logits)


def test_generate_from_nothing_keeping_all_equals_a_dynamic_cache(any_model):
    ids = random_ids(CONTEXT)
    expected = steps(any_model, ids, DynamicCache(config=any_model.config))
    cache = GateSightCache(random_estimator(any_model), any_model, kept_fraction=1.0)
    for found, step in zip(steps(any_model, ids, cache), expected, strict=True):
        assert torch.equal(found, step)
    assert cache.is_compacted


@pytest.mark.parametrize("question", QUESTIONS)
def test_bfloat16_keeping_all_equals_a_dynamic_cache_bit_for_bit(question):
    model = tiny_model().bfloat16()
    ids, new = random_ids(CONTEXT), random_ids(question, seed=1)
    expected = forward(model, new, dynamic(model, ids))
    assert torch.equal(forward(model, new, compacted(model, ids, kept_fraction=1.0)), expected)


# -- the oracle --------------------------------------------------------------------------------------------------------


def kept_entries(cache: GateSightCache, row: int, length: int) -> int:
    """Over all layers and both heads."""
    return sum(int((~evicted).sum()) for evicted in evicted_of(cache, row, length))


def check_rows(oracle_model: Any, cache: GateSightCache, rows: list[Tensor], new: list[Tensor], model: Any) -> None:
    """Direct forwards of a question and generation, row by row against the oracle."""
    ids, mask = left_padded(rows)
    question = torch.cat(new)
    full, full_mask = torch.cat([ids, question], 1), torch.cat([mask, torch.ones_like(question)], 1)
    logits = forward(model, question, cache.fork(), **padded(full_mask, question.shape[1]))
    tokens, step_logits = steps(model, full, cache.fork(), attention_mask=full_mask)
    for r, (row, asked) in enumerate(zip(rows, new, strict=True)):
        with Oracle(oracle_model, evicted_of(cache, r, row.shape[1])) as oracle:
            assert_same(logits[r : r + 1], oracle.logits(row, asked))
            expected_tokens, expected_logits = oracle.steps(torch.cat([row, asked], 1))
        assert_same(step_logits[r : r + 1], expected_logits)
        assert torch.equal(tokens[r : r + 1], expected_tokens)


@pytest.mark.quick
@pytest.mark.parametrize(("fraction", "suffix", "allocation", "question"), CASES)
def test_one_row_equals_the_oracle(dense, plain, attention, fraction, suffix, allocation, question):
    rows, rest = rows_of((CONTEXT,)), CONTEXT - suffix
    options = {"kept_fraction": fraction, "allocation": allocation, "protected_suffix": suffix}
    cache = compacted(dense, rows[0], **options)
    assert kept_entries(cache, 0, CONTEXT) == 2 * (math.floor(fraction * 2 * rest + 0.5) + 2 * suffix)
    check_rows(plain, cache, rows, questions_of(1, question), dense)


@pytest.mark.parametrize(("fraction", "suffix", "allocation", "question"), CASES)
def test_ragged_rows_equal_the_oracle_row_by_row(dense, plain, attention, fraction, suffix, allocation, question):
    rows = rows_of(LENGTHS)
    ids, mask = left_padded(rows)
    options = {"kept_fraction": fraction, "allocation": allocation, "protected_prefix": 2, "protected_suffix": suffix}
    cache, protected = compacted(dense, ids, mask=mask, **options), 2 + suffix
    for row, length in enumerate(LENGTHS):
        rest = length - min(protected, length)
        kept = (max(2, math.floor(fraction * 2 * rest + 0.5)) if rest else 0) + 2 * (length - rest)
        assert kept_entries(cache, row, length) == 2 * kept
    check_rows(plain, cache, rows, questions_of(3, question), dense)


@pytest.mark.parametrize("question", QUESTIONS)
def test_ragged_rows_need_no_positions(dense, plain, attention, question):
    """Prefilled by a forward with nothing but a mask, then asked through a forward and through generate."""
    rows, new = rows_of(LENGTHS), questions_of(3, question)
    ids, mask = left_padded(rows)
    cache = GateSightCache(random_estimator(dense), dense, kept_fraction=0.5)
    forward(dense, ids, cache, attention_mask=mask)
    cache.compact()
    logits = forward(dense, torch.cat(new), cache.fork())
    full, full_mask = torch.cat([ids, torch.cat(new)], 1), torch.nn.functional.pad(mask, (0, question), value=1)
    tokens, step_logits = steps(dense, full, cache.fork(), attention_mask=full_mask)
    for r, (row, asked) in enumerate(zip(rows, new, strict=True)):
        with Oracle(plain, evicted_of(cache, r, row.shape[1])) as oracle:
            assert_same(logits[r : r + 1], oracle.logits(row, asked))
            expected_tokens, expected_logits = oracle.steps(torch.cat([row, asked], 1))
        assert_same(step_logits[r : r + 1], expected_logits)
        assert torch.equal(tokens[r : r + 1], expected_tokens)


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_ragged_rows_prefilled_by_generate_equal_the_oracle_row_by_row(dense, plain, attention, fraction):
    rows = rows_of(LENGTHS)
    ids, mask = left_padded(rows)
    cache = GateSightCache(random_estimator(dense), dense, kept_fraction=fraction)
    tokens, logits = steps(dense, ids, cache, attention_mask=mask)
    for r, row in enumerate(rows):
        with Oracle(plain, evicted_of(cache, r, row.shape[1])) as oracle:
            expected_tokens, expected_logits = oracle.steps(row)
        assert_same(logits[r : r + 1], expected_logits)
        assert torch.equal(tokens[r : r + 1], expected_tokens)


def test_ragged_rows_keep_what_each_keeps_alone(dense):
    rows = rows_of(LENGTHS)
    ids, mask = left_padded(rows)
    together = compacted(dense, ids, mask=mask, kept_fraction=0.3)
    for r, row in enumerate(rows):
        alone = compacted(dense, row, kept_fraction=0.3)
        pairs = zip(evicted_of(together, r, row.shape[1]), evicted_of(alone, 0, row.shape[1]), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("lengths", [(CONTEXT,), LENGTHS], ids=["one row", "ragged"])
@pytest.mark.parametrize("chunks", [[CONTEXT], [19, 23, 1]], ids=["at once", "chunks"])
def test_every_family_equals_the_oracle(any_model, any_plain, chunks, lengths):
    rows = rows_of(lengths)
    ids, mask = left_padded(rows)
    cache = compacted(any_model, ids, chunks, mask, kept_fraction=0.4)
    check_rows(any_plain, cache, rows, questions_of(len(rows), 6), any_model)


def test_the_oracle_can_tell(dense, plain):
    """Eviction changes the logits by far more than the tolerance, and what is hidden depends on layer and head."""
    row, new = random_ids(CONTEXT), random_ids(6, seed=1)
    cache = compacted(dense, row, kept_fraction=0.5)
    evicted = evicted_of(cache, 0, CONTEXT)
    logits = forward(dense, new, cache.fork())
    nothing, swapped = [e & False for e in evicted], [e.flip(0) for e in evicted]
    for wrong in (nothing, swapped, [evicted[0], nothing[1]]):
        with Oracle(plain, wrong) as oracle:
            assert (oracle.logits(row, new) - logits).abs().max() > 1e-2


def test_gates_make_layers_unequal(dense):
    report = compacted(dense, random_ids(CONTEXT), kept_fraction=0.3).report()
    (first, second), (low, high) = report.kept_per_layer[0], report.gate_means[0]
    assert low < high
    assert first / (first + second) == pytest.approx(low / (low + high), abs=0.5 / (first + second))


def test_a_long_conversation_equals_the_oracle(dense, plain, attention):
    """Questions of several lengths, one after another, as one session."""
    row = random_ids(CONTEXT)
    cache = compacted(dense, row, kept_fraction=0.2)
    later = random_ids(17, seed=3)
    pieces = later.split([1, 5, 1, 1, 8, 1], dim=1)
    logits = torch.cat([forward(dense, piece, cache) for piece in pieces], dim=1)
    with Oracle(plain, evicted_of(cache, 0, CONTEXT)) as oracle:
        assert_same(logits, oracle.logits(row, later))


# -- chunks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chunks", [[42, 1], [1, 42], [10, 10, 10, 10, 3], [1] * 43], ids=lambda c: f"{len(c)} of {c[0]}"
)
def test_chunked_prefill_equals_the_oracle(dense, plain, attention, chunks):
    rows = rows_of((CONTEXT,))
    cache = compacted(dense, rows[0], chunks, kept_fraction=0.3)
    check_rows(plain, cache, rows, questions_of(1, 6), dense)


@pytest.mark.parametrize("chunk", [1, 6, 42, 43, 100])
def test_generate_with_chunked_prefill_compacts_once_at_its_end(dense, plain, attention, chunk):
    row = random_ids(CONTEXT)
    cache = GateSightCache(random_estimator(dense), dense, kept_fraction=0.3)
    tokens, logits = steps(dense, row, cache, prefill_chunk_size=chunk)
    assert cache.report().kept_per_layer == [[n - 3 for n in cache.report().physical_lengths]]
    with Oracle(plain, evicted_of(cache, 0, CONTEXT)) as oracle:
        expected_tokens, expected_logits = oracle.steps(row)
    assert_same(logits, expected_logits)
    assert torch.equal(tokens, expected_tokens)


@pytest.mark.parametrize("chunk", [1, 4])
def test_a_question_can_come_in_chunks(dense, attention, chunk):
    row, new = random_ids(CONTEXT), random_ids(9, seed=1)
    cache, full = compacted(dense, row, kept_fraction=0.3), torch.cat([row, new], 1)
    tokens, logits = steps(dense, full, cache.fork(), prefill_chunk_size=chunk)
    expected_tokens, expected_logits = steps(dense, full, cache.fork())
    assert torch.equal(tokens, expected_tokens)
    assert_same(logits, expected_logits)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_both_names_of_the_argument_work_without_a_warning(dense, name):
    ids = random_ids(CONTEXT)
    cache = GateSightCache(random_estimator(dense), dense)
    dense(ids, **{name: cache})
    cache.compact()
    expected = compacted(dense, ids)
    full = torch.cat([ids, random_ids(3, seed=1)], 1)
    tokens = dense.generate(full, max_new_tokens=4, do_sample=False, **{name: cache.fork()})
    assert torch.equal(tokens[:, -4:], generate(dense, full, expected.fork()))
    assert torch.equal(dense(full[:, -3:], **{name: cache.fork()}).logits, forward(dense, full[:, -3:], expected))


def test_another_scorer_uses_the_same_machine(dense, plain):
    rows = rows_of((CONTEXT,))
    cache = compacted(dense, rows[0], scorer=KeyNorm(), kept_fraction=0.3)
    check_rows(plain, cache, rows, questions_of(1, 6), dense)
    norms = KeyNorm().score(prefilled(dense, rows[0]).prefill())[0][0]
    for head, gone in enumerate(evicted_of(cache, 0, CONTEXT)[0]):
        assert norms[head][~gone].min() > norms[head][gone].max()
