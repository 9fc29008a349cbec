"""Sparse attention (QSA): heads keep the same entries, and queries select among regrouped blocks as the oracle does."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from gatesight_hf import GateSightCache
from gatesight_hf.compaction import ALLOCATIONS
from gatesight_hf.scoring import Recorder, Scores, continuation_utilities

from ..helpers.models import random_estimator, tiny_model
from ..helpers.oracle import Oracle, assert_same, evicted_of
from ..helpers.running import cache_kwargs, compacted, forward, left_padded, padded, prefilled, random_ids, steps
from ..helpers.sparse_oracle import (
    BUDGET,
    CONTEXT,
    LENGTHS,
    RATIO,
    check_rows,
    eager,
    explicit,
    kept_of,
    questions_of,
    row_of,
)

pytestmark = pytest.mark.core

#: Per-layer embeddings: short convolutions and n-grams of ids, in states of their own.
PLE = {"ple_layer_ids": [2], "ple_embed_dim": 16, "heads_per_ngram": 2, "ngram_vocab_size_base": 50,
       "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 1, "eos_token_id": 1}  # fmt: skip


@pytest.fixture(params=["sdpa", "eager"])
def attention(request: pytest.FixtureRequest, sparse: Any) -> Iterator[str]:
    sparse.set_attn_implementation(request.param)
    yield request.param
    sparse.set_attn_implementation("sdpa")


# -- the oracle --------------------------------------------------------------------------------------------------------


def test_the_oracle_is_the_model_where_nothing_is_evicted(plain_sparse):
    ids = random_ids(CONTEXT)
    with explicit(plain_sparse, [list(range(CONTEXT))] * 2, CONTEXT) as fresh:
        made = forward(plain_sparse, ids, fresh)
    assert_same(forward(plain_sparse, ids, DynamicCache(config=plain_sparse.config)), made)


def test_the_oracle_can_tell(sparse, plain_sparse):
    """Eviction, the token budget and regrouping change logits by far more than the tolerance."""
    row, new = random_ids(CONTEXT), random_ids(6, seed=1)
    cache = compacted(sparse, row, kept_fraction=0.5)
    found, kept = forward(sparse, new, cache.fork()), kept_of(cache, 0, CONTEXT)
    shifted = [of_layer[1:] for of_layer in kept]  # without its first entry, all blocks are others
    for model, wrong in (
        (plain_sparse, [list(range(CONTEXT))] * 2),
        (plain_sparse, kept[::-1]),
        (plain_sparse, shifted),
        (eager(), kept),
    ):
        with explicit(model, wrong, CONTEXT) as fresh:
            other = forward(model, torch.cat([row, new], 1), fresh)[:, CONTEXT:]
        assert (other - found).abs().max() > 1e-3


# -- everything kept ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(CONTEXT,), LENGTHS], ids=["one row", "ragged"])
@pytest.mark.parametrize("question", [1, 6])
def test_keeping_all_equals_a_dynamic_cache_bit_for_bit(sparse, attention, lengths, question):
    ids, mask = left_padded([row_of(length) for length in lengths])
    new = torch.cat(questions_of(len(lengths), question))
    whole, whole_mask = torch.cat([ids, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
    expected = DynamicCache(config=sparse.config)
    before = forward(sparse, ids, expected, **padded(mask, ids.shape[1]))
    cache = GateSightCache(random_estimator(sparse), sparse, kept_fraction=1.0)
    found = forward(sparse, ids, cache, **padded(mask, ids.shape[1]))
    cache.compact()
    assert found[mask.bool()].isfinite().all()
    if not before[mask.bool()].isfinite().all():
        pytest.skip("transformers up to 5.22: the model's own indexer overflows at pads in eager attention")
    assert torch.equal(found[mask.bool()], before[mask.bool()])
    given = padded(whole_mask, question)
    logits = forward(sparse, new, copy.deepcopy(expected), **given)
    assert torch.equal(forward(sparse, new, cache.fork(), **given), logits)
    expected_steps = steps(sparse, whole, expected, attention_mask=whole_mask)
    for found, step in zip(steps(sparse, whole, cache.fork(), attention_mask=whole_mask), expected_steps, strict=True):
        assert torch.equal(found, step)


@pytest.mark.parametrize("chunks", [[20, 22, 1], [1] * CONTEXT], ids=lambda c: f"{len(c)} chunks")
def test_until_compaction_it_is_a_dynamic_cache_bit_for_bit(sparse, attention, chunks):
    cache, expected = GateSightCache(random_estimator(sparse), sparse), DynamicCache(config=sparse.config)
    for part in random_ids(CONTEXT).split(chunks, dim=1):
        assert torch.equal(*(forward(sparse, part, held) for held in (cache, expected)))


@pytest.mark.parametrize("options", [{}, PLE], ids=["plain", "per-layer embeddings"])
def test_bfloat16_keeping_all_equals_a_dynamic_cache_bit_for_bit(options):
    model = tiny_model("qwen4_exp", indexer_budget=BUDGET, **options).bfloat16()
    ids, new = random_ids(CONTEXT), random_ids(6, seed=1)
    expected = DynamicCache(config=model.config)
    forward(model, ids, expected)
    cache = compacted(model, ids, kept_fraction=1.0)
    for part in (new, new[:, :1], new[:, 1:2]):
        assert torch.equal(forward(model, part, cache), forward(model, part, expected))


# -- eviction ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allocation", ALLOCATIONS)
@pytest.mark.parametrize("fraction", [0.9, 0.1])
def test_one_row_equals_the_oracle(sparse, plain_sparse, attention, fraction, allocation):
    row = random_ids(CONTEXT)
    cache = compacted(sparse, row, kept_fraction=fraction, allocation=allocation)
    assert sum(map(len, kept_of(cache, 0, CONTEXT))) == int(fraction * 2 * CONTEXT + 0.5)
    assert cache.report().achieved_fraction == pytest.approx(fraction, abs=0.01)
    check_rows(sparse, plain_sparse, cache, [row], questions_of(1, 6))


@pytest.mark.parametrize("question", [1, 6])
@pytest.mark.parametrize("allocation", ["gate", "head", "global"])
@pytest.mark.parametrize("fraction", [0.9, 0.5])
def test_ragged_rows_equal_the_oracle_row_by_row(sparse, plain_sparse, fraction, allocation, question):
    rows = [row_of(length) for length in LENGTHS]
    ids, mask = left_padded(rows)
    cache = compacted(sparse, ids, mask=mask, kept_fraction=fraction, allocation=allocation, protected_prefix=2)
    check_rows(sparse, plain_sparse, cache, rows, questions_of(3, question))


@pytest.mark.parametrize("chunks", [[42, 1], [10, 10, 10, 10, 3], [1] * 43], ids=lambda c: f"{len(c)} of {c[0]}")
def test_chunked_prefill_equals_the_oracle(sparse, plain_sparse, chunks):
    row = random_ids(CONTEXT)
    cache = compacted(sparse, row, chunks, kept_fraction=0.5)
    check_rows(sparse, plain_sparse, cache, [row], questions_of(1, 6))


@pytest.mark.parametrize(("ratio", "budget"), [(1, 5), (3, 6), (8, 8)])
def test_blocks_of_other_sizes_equal_the_oracle(ratio, budget):
    options = {"indexer_compress_ratio": ratio, "indexer_budget": budget}
    model, rows = tiny_model("qwen4_exp", **options), [row_of(length) for length in (CONTEXT, 17)]
    ids, mask = left_padded(rows)
    cache = compacted(model, ids, mask=mask, kept_fraction=0.6)
    check_rows(model, eager(**options), cache, rows, questions_of(2, 6))


@pytest.mark.parametrize("pieces", [[1, 5, 1, 1, 8, 1], [17], [1] * 17], ids=lambda p: f"{len(p)} pieces")
def test_a_long_conversation_fills_new_blocks_as_the_oracle_does(sparse, plain_sparse, attention, pieces):
    rows = [row_of(length) for length in (CONTEXT, 17)]
    ids, mask = left_padded(rows)
    cache = compacted(sparse, ids, mask=mask, kept_fraction=0.3)
    kept = [kept_of(cache, r, row.shape[1]) for r, row in enumerate(rows)]
    assert len({len(of_layer) % RATIO for of_row in kept for of_layer in of_row}) > 1
    later = random_ids(17, rows=2, seed=3)
    logits = torch.cat([forward(sparse, piece, cache) for piece in later.split(pieces, dim=1)], dim=1)
    for r, row in enumerate(rows):
        with explicit(plain_sparse, kept[r], row.shape[1]) as fresh:
            whole = torch.cat([row, later[r : r + 1]], 1)
            assert_same(logits[r : r + 1], forward(plain_sparse, whole, fresh)[:, row.shape[1] :])


def test_the_models_own_indexer_regroups_alike_under_a_mask(sparse, plain_sparse):
    """Its blocks are of the tokens that a query sees: the oracle of all other families serves this one too."""
    row, new = random_ids(CONTEXT), random_ids(6, seed=1)
    cache = compacted(sparse, row, kept_fraction=0.5)
    with Oracle(plain_sparse, evicted_of(cache, 0, CONTEXT)) as oracle:
        assert_same(forward(sparse, new, cache.fork()), oracle.logits(row, new))


@pytest.mark.parametrize("chunks", [[CONTEXT], [20, 22, 1]], ids=["at once", "chunks"])
def test_per_layer_embeddings_equal_the_oracle(chunks):
    options = {"indexer_budget": BUDGET, **PLE}
    model, row = tiny_model("qwen4_exp", **options), random_ids(CONTEXT)
    cache = compacted(model, row, chunks, kept_fraction=0.4)
    check_rows(model, eager(**options), cache, [row], questions_of(1, 6))
    check_rows(model, eager(**options), cache, [row], questions_of(1, 1))  # a second question finds the same states


@pytest.mark.parametrize("chunks", [[CONTEXT], [1] * CONTEXT], ids=["at once", "single tokens"])
def test_per_layer_embeddings_skip_pads(chunks):
    """Also those that come as the only new token, for which transformers builds no mask."""
    options = {"indexer_budget": BUDGET, **PLE}
    model, rows = tiny_model("qwen4_exp", **options), [row_of(length) for length in LENGTHS]
    ids, mask = left_padded(rows)
    cache = compacted(model, ids, chunks, mask, kept_fraction=0.5)
    check_rows(model, eager(**options), cache, rows, questions_of(3, 6))


def test_an_entry_has_the_best_score_of_any_head(sparse):
    whole = prefilled(sparse, random_ids(CONTEXT), allocation="flat")
    scores = [torch.rand(1, 2, CONTEXT, generator=torch.Generator().manual_seed(j)) for j in range(2)]
    child = whole.fork(scorer=Scores(scores), kept_fraction=0.25)
    child.compact()
    for of_layer, kept in zip(scores, kept_of(child, 0, CONTEXT), strict=True):
        assert kept == sorted(of_layer[0].amax(0).topk(len(kept)).indices.tolist())


@pytest.mark.parametrize("pads", [0, 4])
def test_utilities_are_those_of_the_entries_that_queries_attend_to(sparse, plain_sparse, pads):
    """From the attention weights of the model itself, which are 0 outside the selected blocks."""
    row, later = random_ids(CONTEXT), random_ids(6, seed=1)
    ids, mask = left_padded([row, random_ids(CONTEXT + pads)]) if pads else (row, torch.ones_like(row))
    cache = prefilled(sparse, ids[:1], mask=mask[:1], scorer=Recorder())
    found = continuation_utilities(sparse, cache.fork(), later, CONTEXT, 32**-0.5)
    held = DynamicCache(config=plain_sparse.config)
    weights = plain_sparse(torch.cat([row, later], 1), **cache_kwargs(plain_sparse, held), output_attentions=True)
    for utilities, attended, layer in zip(found, weights.attentions, (held.layers[3], held.layers[7]), strict=True):
        a, v = attended[0, :, -6:].double(), layer.values[0].double().repeat_interleave(3, dim=0)
        outputs, kept = a @ v, a[..., :CONTEXT]
        change = kept / (1 - kept) * torch.cdist(outputs, v[:, :CONTEXT])
        expected = change.unflatten(0, (2, 3)).square().sum(1).sqrt().amax(1).float()
        assert 0 < (expected == 0).sum() < expected.numel()
        assert torch.equal(utilities == 0, expected == 0)
        assert_same(utilities, expected)
