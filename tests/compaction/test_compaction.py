"""Compaction: exact totals, bytes to the last one, memory really freed."""

import itertools
import math
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gatesight_hf import GateSightCache
from gatesight_hf.compaction.budget import SHARED
from gatesight_hf.entries import GateSightAttentionLayer

from ..helpers.models import random_estimator
from ..helpers.oracle import evicted_of
from ..helpers.running import cache_kwargs, compacted, forward, left_padded, prefilled, random_ids

pytestmark = pytest.mark.core

CONTEXT = 43


# -- budgets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 5, CONTEXT])
@pytest.mark.parametrize(("prefix", "suffix"), [(0, 0), (1, 0), (4, 0), (100, 0), (0, 3), (2, 2), (4, 100)])
def test_kept_totals_are_exact(dense, length, prefix, suffix):
    whole = prefilled(dense, random_ids(length), protected_prefix=prefix, protected_suffix=suffix)
    for fraction, allocation in itertools.product((1e-6, 0.1, 0.5, 0.9, 1.0), SHARED):
        cache = whole.fork()
        cache.context.options = replace(cache.options, kept_fraction=fraction, allocation=allocation)
        report = cache.compact()
        always = min(prefix + suffix, length)
        total = max(2, math.floor(fraction * 2 * (length - always) + 0.5)) if always < length else 0
        assert sum(report.kept_per_layer[0]) == sum(report.physical_lengths) == total + 2 * always
        assert report.achieved_fraction == (total / (2 * (length - always)) if always < length else 1.0)
        for gone in evicted_of(cache, 0, length):
            assert not gone[:, :prefix].any() and not gone[:, max(0, length - suffix) :].any()
            assert (~gone).sum(-1).min() >= 1
        assert report.logical_length == length
        assert forward(dense, random_ids(2, seed=1), cache).isfinite().all()


def test_the_budget_has_an_effect(dense):
    """triattention issue 24."""
    whole = prefilled(dense, random_ids(CONTEXT), allocation="flat")
    for fraction, expected in ((0.1, [5, 4]), (0.5, [22, 21]), (0.9, [39, 38])):
        cache = whole.fork()
        cache.context.options = replace(cache.options, kept_fraction=fraction)
        assert cache.compact().physical_lengths == expected


def test_blocks_round_every_layer_up(dense):
    report = compacted(dense, random_ids(CONTEXT), kept_fraction=0.3, block_size=8).report()
    assert all(kept % 8 == 0 for kept in report.physical_lengths)
    assert sum(report.physical_lengths) >= math.floor(0.3 * 2 * CONTEXT)


@pytest.mark.parametrize("allocation", [*SHARED, "score"])
@pytest.mark.parametrize("protected", [0, 3, 11])
def test_protected_entries_count_into_the_blocks_of_every_row(dense, allocation, protected):
    """Rows of five blocks and a part, of two and a part, and shorter than a block."""
    lengths = (CONTEXT, 17, 5)
    batch, mask = left_padded([random_ids(n, seed=n) for n in lengths])
    whole = prefilled(dense, batch, mask=mask, allocation=allocation, protected_prefix=protected)
    for fraction in (0.05, 0.3, 0.8, 1.0):
        exact, blocks = whole.fork(kept_fraction=fraction), whole.fork(kept_fraction=fraction, block_size=8)
        shares = exact.compact().kept_per_layer
        expected = [[min(n, math.ceil(k / 8) * 8) for k in row] for n, row in zip(lengths, shares, strict=True)]
        assert blocks.compact().kept_per_layer == expected
        assert blocks.report().physical_lengths == [max(of_layer) for of_layer in zip(*expected, strict=True)]


# -- memory ------------------------------------------------------------------------------------------------------------


def held(cache: GateSightCache) -> list[Tensor]:
    """Every key and value tensor that the attention layers hold, under whatever name."""
    values = [value for layer in cache.attention_layers for value in vars(layer).values()]
    return [v for v in values if isinstance(v, Tensor) and v.ndim == 4]


def bytes_of(tensors: list[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("fraction", [0.03, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("chunks", [[CONTEXT], [20, 20, 3]], ids=["at once", "chunks"])
def test_bytes_after_are_the_kept_share_exactly(dense, fraction, chunks):
    cache = prefilled(dense, random_ids(CONTEXT), chunks, kept_fraction=fraction)
    before, entries = bytes_of(held(cache)), 2 * CONTEXT
    assert before == entries * 2 * 2 * 32 * 4  # KV heads, keys and values, channels, bytes
    report = cache.compact()
    kept = sum(report.kept_per_layer[0])
    assert bytes_of(held(cache)) * entries == before * kept
    assert (report.kv_bytes_before, report.kv_bytes) == (before, bytes_of(held(cache)))


def test_bytes_of_ragged_rows_are_those_of_the_longest(dense):
    ids, mask = left_padded([random_ids(n) for n in (CONTEXT, 17, 5)])
    cache = compacted(dense, ids, mask=mask, kept_fraction=0.3)
    longest = [max(row[j] for row in cache.report().kept_per_layer) for j in range(2)]
    assert cache.report().physical_lengths == longest
    assert cache.report().kv_bytes == bytes_of(held(cache)) == 3 * sum(longest) * 2 * 2 * 32 * 4


def test_the_memory_of_evicted_entries_and_signals_is_freed(dense):
    cache = prefilled(dense, random_ids(CONTEXT), [20, 20, 3], kept_fraction=0.3)
    signals = [chunk for chunk in cache.context.recording.tensors if chunk is not None]
    tensors = [weakref.ref(tensor) for tensor in [*held(cache), *signals]]
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in [*held(cache), *signals]]
    del signals
    cache.compact()
    assert not [ref for ref in tensors if ref() is not None]
    assert all(ref.expired() for ref in storages)


def test_each_layer_is_freed_before_the_next_is_compacted(dense, monkeypatch):
    """Else the peak would hold the full cache and all kept entries."""
    cache = prefilled(dense, random_ids(CONTEXT), kept_fraction=0.3)
    first = [StorageWeakRef(t.untyped_storage()) for t in held(cache)[:2]]
    compact, alive = GateSightAttentionLayer.compact, []

    def watched(self: Any, *args: Any) -> None:
        alive.append([not ref.expired() for ref in first])
        compact(self, *args)

    monkeypatch.setattr(GateSightAttentionLayer, "compact", watched)
    cache.compact()
    assert alive == [[True, True], [False, False]]


def test_the_report_counts_both_kinds_of_memory(dense):
    """GDN states are not part of the KV bytes, and signals only exist before compaction."""
    cache = prefilled(dense, random_ids(CONTEXT))
    before = cache.report()
    conv, recurrent = (2 * 2 * 16 + 4 * 16) * 4, 4 * 16 * 16
    assert before.gdn_bytes == 6 * (conv + recurrent) * 4
    assert before.signal_bytes == 6 * CONTEXT * 3 * 4 * 4
    assert (before.kept_per_layer, before.achieved_fraction, before.kv_bytes_before) == ([], None, None)
    after = cache.compact()
    assert (after.gdn_bytes, after.signal_bytes, after.logical_length) == (before.gdn_bytes, 0, CONTEXT)
    assert set(after.to_dict()["seconds"]) == {"prefill", "score", "compact"}
    assert all(seconds > 0 for seconds in after.seconds.values())


def test_compaction_lets_go_of_the_autograd_graph(dense) -> None:
    cache = GateSightCache(random_estimator(dense), dense, kept_fraction=0.3)
    embeds = dense.get_input_embeddings()(random_ids(20)).requires_grad_()
    with torch.enable_grad():
        dense(inputs_embeds=embeds, **cache_kwargs(dense, cache))
    assert any(state.requires_grad for layer in cache.gdn_layers for state in layer.recurrent_states.values())
    cache.compact()
    held = [t for layer in cache.attention_layers for t in layer.state().values()]
    held += [s for layer in cache.gdn_layers for s in (*layer.conv_states.values(), *layer.recurrent_states.values())]
    assert not any(tensor.requires_grad for tensor in held)
