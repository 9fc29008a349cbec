"""The index of sparse attention in memory, forks, batches and failures; `test_sparse.py` has what it selects."""

import copy
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor

from gatesight_hf import CacheStateError, GateSightCache
from gatesight_hf.entries import SparseAttentionLayer
from gatesight_hf.models import attach

from ..helpers.models import random_estimator
from ..helpers.oracle import Oracle, assert_same, evicted_of
from ..helpers.running import compacted, forward, generate, left_padded, prefilled, random_ids
from ..helpers.sparse_oracle import CONTEXT, RATIO, ROTARY, WIDTH, explicit, row_of

pytestmark = pytest.mark.core


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.1])
def test_the_index_shrinks_to_a_quarter_of_the_kept_tokens(sparse, fraction):
    cache = prefilled(sparse, random_ids(CONTEXT), [20, 20, 3], kept_fraction=fraction)
    assert cache.report().index_bytes == 4 * CONTEXT * (2 * WIDTH + 2 * ROTARY)  # two layers, angles once
    report = cache.compact()
    blocks = [kept // RATIO for kept in report.kept_per_layer[0]]
    assert [layer.block_keys.shape for layer in cache.attention_layers] == [(1, n, WIDTH) for n in blocks]
    waiting = 2 * (RATIO - 1) * (WIDTH + 2 * ROTARY)
    assert report.index_bytes == 4 * (sum(blocks) * WIDTH + waiting)
    assert all(layer.positions is None for layer in cache.attention_layers)


def test_new_tokens_add_a_key_for_every_four(sparse):
    cache = compacted(sparse, random_ids(CONTEXT), kept_fraction=0.5)
    counts = cache.report().kept_per_layer[0]
    for asked in range(1, 10):
        forward(sparse, random_ids(1, seed=asked), cache)
        held = [layer.block_keys.shape[1] for layer in cache.attention_layers]
        assert held == [(kept + asked) // RATIO for kept in counts]
        assert {layer.raw_keys.shape[1] for layer in cache.attention_layers} == {RATIO - 1}
        assert all(layer.positions is None for layer in cache.attention_layers)


# -- forks, batches, failures ------------------------------------------------------------------------------------------


def index_of(cache: GateSightCache) -> list[Tensor]:
    return [tensor for layer in cache.attention_layers for tensor in layer.index_tensors]


def test_children_share_the_index_and_leave_it_alone(sparse):
    row, questions = random_ids(CONTEXT), [random_ids(n, seed=n) for n in (6, 1, 9)]
    parent = compacted(sparse, row, kept_fraction=0.5)
    before = [tensor.clone() for tensor in index_of(parent)]
    answers = [generate(sparse, torch.cat([row, q], 1), parent.fork()) for q in questions]
    generate(sparse, questions[0], parent.fork(), new=True, num_beams=3)
    forward(sparse, questions[0].expand(2, -1), parent.fork().fork())
    for mine, theirs in zip(parent.fork().attention_layers, parent.attention_layers, strict=True):
        assert mine.block_keys.data_ptr() == theirs.block_keys.data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(index_of(parent), before, strict=True))
    for q, answer in zip(questions, answers, strict=True):
        fresh = compacted(sparse, row, kept_fraction=0.5)
        assert torch.equal(generate(sparse, torch.cat([row, q], 1), fresh), answer)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}])
def test_beams_reorder_the_index(sparse, plain_sparse, options):
    row = random_ids(CONTEXT)
    cache = compacted(sparse, row, kept_fraction=0.5)
    whole = torch.cat([row, random_ids(6, seed=1)], 1)
    with Oracle(plain_sparse, evicted_of(cache, 0, CONTEXT)) as oracle:
        expected = oracle.generate(whole, tokens=9, **options)
    assert torch.equal(generate(sparse, whole, cache.fork(), tokens=9, **options), expected)


def test_questions_of_a_batch_equal_separate_forks(sparse):
    parent, questions = compacted(sparse, random_ids(CONTEXT), kept_fraction=0.5), random_ids(6, rows=3, seed=1)
    together = forward(sparse, questions, parent.fork())
    for r in range(3):
        assert_same(together[r : r + 1], forward(sparse, questions[r : r + 1], parent.fork()))


def test_rows_are_taken_out_and_repeated(sparse):
    rows, new = [row_of(length) for length in (CONTEXT, 17)], random_ids(6, rows=2, seed=1)
    ids, mask = left_padded(rows)
    whole = prefilled(sparse, ids, mask=mask, kept_fraction=0.5)
    expected = whole.fork()
    expected.compact()
    logits = forward(sparse, new, expected)
    for early in (True, False):
        cache = whole.fork()
        if early:
            cache.batch_select_indices(torch.tensor([1, 0]))
        cache.compact()
        if not early:
            cache.batch_select_indices(torch.tensor([1, 0]))
        cache.batch_repeat_interleave(2)
        assert_same(forward(sparse, new.flip(0).repeat_interleave(2, dim=0), cache)[::2].flip(0), logits)


def test_a_compaction_that_failed_half_way_goes_on(sparse, plain_sparse, monkeypatch):
    """Tokens that come in between see all of the layer that is not compacted, and enter the index of both."""
    row, between, new = (random_ids(n, rows=2, seed=n) for n in (CONTEXT, 5, 6))
    cache = prefilled(sparse, row, kept_fraction=0.5)
    settle, calls = SparseAttentionLayer._settle, []

    def fails_once(layer: SparseAttentionLayer, *args: Any) -> None:
        calls.append(layer)
        if len(calls) == 2:
            raise MemoryError
        settle(layer, *args)

    monkeypatch.setattr(SparseAttentionLayer, "_settle", fails_once)
    with pytest.raises(MemoryError):
        cache.compact()
    assert [layer.block_keys is None for layer in cache.attention_layers] == [False, True]
    logits = [*(forward(sparse, part, cache) for part in between.split([1, 4], dim=1))]
    cache.compact()
    logits += [*(forward(sparse, part, cache) for part in new.split([5, 1], dim=1))]
    found, asked = torch.cat(logits, 1), torch.cat([row, between, new], 1)
    for r in range(2):
        first, second = ((layer.kept_positions[r, 0]).tolist() for layer in cache.attention_layers)
        kept = [first, second + list(range(CONTEXT, CONTEXT + 5))]
        with explicit(plain_sparse, kept, CONTEXT, CONTEXT + 5) as fresh:
            assert_same(found[r : r + 1], forward(plain_sparse, asked[r : r + 1], fresh)[:, CONTEXT:])


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_that_fails_leaves_the_index_as_it_was(sparse, when):
    row, new = random_ids(CONTEXT), random_ids(6, seed=1)
    cache = (prefilled if when == "before" else compacted)(sparse, row, kept_fraction=0.5)
    expected = forward(sparse, new, cache.fork())

    def fail(*_: Any) -> None:
        raise MemoryError

    handle = sparse.model.layers[-1].mlp.register_forward_hook(fail)
    with handle, pytest.raises(MemoryError):
        forward(sparse, new, cache)
    assert torch.equal(forward(sparse, new, cache), expected)


def test_hooks_give_the_indexer_back(plain_sparse):
    model, ids = copy.deepcopy(plain_sparse), random_ids(CONTEXT)
    cache = compacted(model, ids, kept_fraction=0.5)
    indexer = model.model.layers[3].self_attn.indexer
    assert "forward" in vars(indexer)
    model.model._gatesight_hooks.remove()
    assert "forward" not in vars(indexer)
    with pytest.raises(CacheStateError, match="hooks"):
        forward(model, ids[:, :1], cache)


@pytest.mark.parametrize("first", ["offloaded", "hooked"])
def test_an_offloaded_model_answers_alike(plain_sparse, first):
    """Weights are there only inside their modules' own forwards; compaction needs those of the indexer's norm."""
    ids, new = random_ids(CONTEXT), random_ids(6, seed=1)
    estimator, model = random_estimator(plain_sparse), copy.deepcopy(plain_sparse)
    expected = forward(model, new, compacted(model, ids, kept_fraction=0.5, scorer=estimator))
    model = copy.deepcopy(plain_sparse)
    if first == "hooked":
        attach(model)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.model.layers[3].self_attn.indexer.k_layernorm.weight.device.type == "meta"
    assert torch.equal(forward(model, new, compacted(model, ids, kept_fraction=0.5, scorer=estimator)), expected)
