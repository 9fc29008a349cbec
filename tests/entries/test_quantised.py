"""Caches with quantised entries: an oracle that holds what the codes say, bytes, forks, batches, files, failures."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import DynamicCache

from gatesight_hf import CacheStateError, GateSightCache, Session
from gatesight_hf.entries import GateSightAttentionLayer, LatentAttentionLayer
from gatesight_hf.errors import SessionFileError
from gatesight_hf.reference import ESTIMATOR_PATH

from ..helpers.contents import read
from ..helpers.models import tiny_model
from ..helpers.oracle import Oracle, assert_same, evicted_of
from ..helpers.running import compacted, forward, generate, left_padded, padded, prefilled, random_ids, steps
from ..helpers.saved_files import changed_cache

pytestmark = pytest.mark.core

CONTEXT = 43
INT8: dict[str, Any] = {"entries_dtype": "int8"}


# -- the oracle: a full cache with a mask, whose kept entries are what codes and scales say ----------------------------


def explicit(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Entries `[H, N, D]` of a row, and half a scale of each."""
    scale, zero = scales.double().unbind(-1)
    return (codes.double() * scale + zero).float(), (scale / 2).float().expand(codes.shape)


def replaced(plain: Any, context: Tensor, cache: GateSightCache, row: int) -> DynamicCache:
    """A full cache of one row's context, with the dequantised entries in place of those that were kept."""
    held, length = DynamicCache(config=plain.config), context.shape[1]
    forward(plain, context, held)
    for i, layer in zip(cache.spec.attention_layers, cache.attention_layers, strict=True):
        if layer.kept_length == 0:
            continue
        keys = values = explicit(layer.kept_keys[row], layer.key_scales[row])
        if isinstance(layer, LatentAttentionLayer):
            keys, values = zip(*(part.split([layer.rotary, 24], dim=-1)[::-1] for part in keys), strict=True)
        else:
            values = explicit(layer.kept_values[row], layer.value_scales[row])
        tokens = layer.kept_positions[row].long() - (layer.get_seq_length() - layer.tail_length - length)
        valid = torch.ones_like(tokens, dtype=torch.bool)
        if layer.kept_valid is not None:
            valid &= layer.kept_valid[row]
        for head in range(len(tokens)):
            places, real = tokens[head, valid[head]], valid[head]
            for (entries, half), full in ((keys, held.layers[i].keys), (values, held.layers[i].values)):
                assert ((entries[head, real] - full[0, head, places]).abs() <= half[head, real] + 1e-5).all()
                full[0, head, places] = entries[head, real]
    return held


def check(model: Any, plain: Any, cache: GateSightCache, context: Tensor, question: int) -> None:
    """One row's logits of a question, and tokens and logits of an answer."""
    new = random_ids(question, seed=9)
    whole = torch.cat([context, new], 1)
    found, (tokens, logits) = forward(model, new, cache.fork()), steps(model, whole, cache.fork())
    with Oracle(plain, evicted_of(cache, 0, context.shape[1])):
        assert_same(found, forward(plain, new, replaced(plain, context, cache, 0)))
        expected = steps(plain, whole, replaced(plain, context, cache, 0))
    assert torch.equal(tokens, expected[0])
    assert_same(logits, expected[1])


@pytest.mark.parametrize("allocation", ["gate", "global"])
@pytest.mark.filterwarnings("ignore:.*has no output gates")
def test_every_family_equals_the_oracle(any_model, any_plain, allocation):
    context = random_ids(CONTEXT)
    cache = compacted(any_model, context, kept_fraction=0.3, allocation=allocation, **INT8)
    # Competing layers may be left with nothing, which is nothing to quantise.
    held = [layer for layer in cache.attention_layers if layer.kept_length]
    assert all(layer.kept_keys.dtype == torch.int8 for layer in held) and len(held) > (allocation == "gate")
    check(any_model, any_plain, cache, context, question=6)
    # Far enough from unquantised entries for the tolerance to tell.
    other = compacted(any_model, context, kept_fraction=0.3, allocation=allocation)
    new = random_ids(6, seed=9)
    assert (forward(any_model, new, cache.fork()) - forward(any_model, new, other)).abs().max() > 1e-4


@pytest.mark.parametrize("question", [1, 6])
@pytest.mark.parametrize(("fraction", "allocation"), [(1.0, "gate"), (0.5, "flat"), (0.3, "score"), (0.01, "pyramid")])
def test_fractions_and_allocations_equal_the_oracle(dense, plain, attention, fraction, allocation, question):
    context = random_ids(CONTEXT)
    cache = compacted(dense, context, [20, 20, 3], kept_fraction=fraction, allocation=allocation, **INT8)
    check(dense, plain, cache, context, question)


@pytest.mark.parametrize("allocation", ["gate", "global"])
@pytest.mark.parametrize("fraction", [1.0, 0.3, 0.05])
def test_ragged_rows_equal_the_oracle_row_by_row(dense, plain, attention, allocation, fraction):
    rows = [random_ids(n, seed=n) for n in (CONTEXT, 17, 5)]
    ids, mask = left_padded(rows)
    cache = compacted(dense, ids, mask=mask, kept_fraction=fraction, allocation=allocation, **INT8)
    new = random_ids(6, rows=3, seed=9)
    logits = forward(dense, new, cache.fork(), **padded(torch.cat([mask, torch.ones_like(new)], 1), 6))
    for r, row in enumerate(rows):
        with Oracle(plain, evicted_of(cache, r, row.shape[1])):
            assert_same(logits[r : r + 1], forward(plain, new[r : r + 1], replaced(plain, row, cache, r)))
        # What fills up shorter rows and heads has no part in their scales; without a real entry these are 0.
        alone = compacted(dense, row, kept_fraction=fraction, allocation=allocation, **INT8)
        for layer, other in zip(cache.attention_layers, alone.attention_layers, strict=True):
            if layer.key_scales is not None:
                expected = torch.zeros(1) if other.key_scales is None else other.key_scales[0]
                assert_same(layer.key_scales[r], expected.expand(layer.key_scales[r].shape))


def unquantised(model: Any, cache: GateSightCache) -> GateSightCache:
    """A cache of the same context that holds the entries of `cache` in the model's dtype."""
    twin = compacted(model, random_ids(CONTEXT), kept_fraction=0.3)
    for layer, other in zip(cache.attention_layers, twin.attention_layers, strict=True):
        for name, scales in (("kept_keys", layer.key_scales), ("kept_values", layer.value_scales)):
            values = getattr(layer, name).float() * scales[..., 0] + scales[..., 1]
            assert getattr(layer, name).dtype == torch.int8 and getattr(other, name).dtype == model.dtype
            setattr(other, name, values.to(model.dtype))
    return twin


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 4}], ids=str)
def test_beams_and_sequences_read_the_same_entries(dense, options):
    cache = compacted(dense, random_ids(CONTEXT), kept_fraction=0.3, **INT8)
    whole = torch.cat([random_ids(CONTEXT), random_ids(6, seed=9)], 1)
    expected = generate(dense, whole, unquantised(dense, cache), tokens=8, **options)
    assert torch.equal(generate(dense, whole, cache.fork(), tokens=8, **options), expected)


def test_a_batch_follows_its_rows(dense):
    rows = [random_ids(CONTEXT, seed=row) for row in range(3)]
    cache, new = compacted(dense, torch.cat(rows), kept_fraction=0.3, **INT8), random_ids(6, seed=9)
    alone = torch.cat([forward(dense, new, compacted(dense, row, kept_fraction=0.3, **INT8)) for row in rows])
    order = torch.tensor([2, 0, 2])
    for act, expected in (
        (lambda child: child.batch_repeat_interleave(2), alone.repeat_interleave(2, 0)),
        (lambda child: child.batch_select_indices(order), alone[order]),
        (lambda child: child.reorder_cache(order), alone[order]),
    ):
        child = cache.fork()
        act(child)
        assert_same(forward(dense, new.expand(len(expected), -1), child), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_reads_entries_in_its_own_dtype(dtype):
    model = tiny_model().to(dtype)
    cache = compacted(model, random_ids(CONTEXT), kept_fraction=0.3, **INT8)
    twin = unquantised(model, cache)
    new = random_ids(6, seed=9)
    assert torch.equal(forward(model, new, cache), forward(model, new, twin))
    assert all(layer.tail_keys.dtype == layer.keys.dtype == dtype for layer in cache.attention_layers)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.03, 0.3, 1.0])
def test_bytes_are_those_of_codes_and_scales(dense, fraction):
    cache = compacted(dense, random_ids(CONTEXT), [20, 20, 3], kept_fraction=fraction, **INT8)
    report, heads, width = cache.report(), 2, 32
    codes_and_scales = [heads * (2 * n * width + 8 * (n + width)) for n in report.kept_per_layer[0]]
    assert report.kv_bytes == sum(codes_and_scales)
    for n, layer in zip(report.kept_per_layer[0], cache.attention_layers, strict=True):
        assert layer.key_scales.shape == (1, heads, 1, width, 2)
        assert layer.value_scales.shape == (1, heads, n, 1, 2)
    assert report.kv_bytes_before == 2 * CONTEXT * heads * 2 * width * 4
    forward(dense, random_ids(5, seed=9), cache)
    assert cache.report().kv_bytes == sum(codes_and_scales) + 2 * 5 * heads * 2 * width * 4


@pytest.mark.filterwarnings("ignore:.*has no output gates")
def test_latents_are_counted_once():
    cache = compacted(tiny_model("kimi_linear"), random_ids(CONTEXT), kept_fraction=0.3, **INT8)
    report, width = cache.report(), 24 + 8
    assert report.kv_bytes == sum(n * width + 8 * width for n in report.kept_per_layer[0])


def test_the_memory_of_unquantised_entries_is_freed(dense, monkeypatch):
    kept: list[StorageWeakRef] = []
    original = GateSightAttentionLayer.quantise

    def watched(self: Any) -> None:
        assert all(ref.expired() for ref in kept), "before the next layer is compacted"
        kept.extend(StorageWeakRef(t.untyped_storage()) for t in (self.kept_keys, self.kept_values))
        original(self)

    monkeypatch.setattr(GateSightAttentionLayer, "quantise", watched)
    for fraction in (0.3, 1.0):
        compacted(dense, random_ids(CONTEXT), kept_fraction=fraction, **INT8)
        assert len(kept) == 4 and all(ref.expired() for ref in kept)
        kept.clear()


def test_children_share_codes_and_scales(dense):
    cache = compacted(dense, random_ids(CONTEXT), kept_fraction=0.3, **INT8)
    names = ("kept_keys", "kept_values", "key_scales", "value_scales")
    before = [getattr(layer, name).clone() for layer in cache.attention_layers for name in names]
    child = cache.fork().fork()
    generate(dense, random_ids(6, seed=9), child, new=True)
    for mine, theirs in zip(child.attention_layers, cache.attention_layers, strict=True):
        assert all(getattr(mine, name).data_ptr() == getattr(theirs, name).data_ptr() for name in names)
    after = [getattr(layer, name) for layer in cache.attention_layers for name in names]
    assert all(map(torch.equal, before, after))


# -- growing caches and files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allocation", ["flat", "global"])
def test_a_growing_cache_quantises_survivors_and_what_came_since(dense, allocation):
    cache = compacted(dense, random_ids(CONTEXT), kept_fraction=0.5, allocation=allocation, growing=True, **INT8)
    forward(dense, random_ids(12, seed=9), cache)
    before = [(layer.keys, layer.values, layer.held_slots()) for layer in cache.attention_layers]
    cache.compact()
    for layer, (keys, values, slots) in zip(cache.attention_layers, before, strict=True):
        assert layer.tail_length == 0 and (layer.kept_positions >= CONTEXT).any()
        same = layer.kept_positions.unsqueeze(-1) == slots.unsqueeze(2)
        valid = same.any(-1) if layer.kept_valid is None else layer.kept_valid.expand(1, 2, -1)
        assert same.sum(-1)[valid].eq(1).all()
        places = same.byte().argmax(-1, keepdim=True)
        for held, codes, scales in (
            (keys, layer.kept_keys, layer.key_scales),
            (values, layer.kept_values, layer.value_scales),
        ):
            error = (read(codes, scales) - held.gather(2, places.expand(-1, -1, -1, 32))).abs()
            assert (error <= 0.501 * scales[..., 0] + 1e-6)[valid].all()


def test_a_growing_cache_that_fails_is_as_before(dense, monkeypatch):
    cache = compacted(dense, random_ids(CONTEXT), kept_fraction=0.5, growing=True, **INT8)
    forward(dense, random_ids(12, seed=9), cache)
    new = random_ids(6, seed=8)
    expected, bytes_before = forward(dense, new, cache.fork()), cache.report().kv_bytes
    original, calls = GateSightAttentionLayer.quantise, []

    def flaky(self: Any) -> None:
        calls.append(self)
        if len(calls) == 2:
            raise MemoryError
        original(self)

    monkeypatch.setattr(GateSightAttentionLayer, "quantise", flaky)
    with pytest.raises(MemoryError):
        cache.compact()
    assert cache.report().kv_bytes == bytes_before
    assert torch.equal(forward(dense, new, cache.fork()), expected)
    cache.compact()
    assert all(layer.kept_keys.dtype == torch.int8 and not layer.tail_length for layer in cache.attention_layers)


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
@pytest.mark.parametrize("allocation", ["flat", "global"])
def test_a_saved_cache_answers_alike(tmp_path, family, allocation):
    model, new = tiny_model(family), random_ids(6, rows=2, seed=9)
    ids, mask = left_padded([random_ids(CONTEXT), random_ids(17)])
    cache = compacted(model, ids, mask=mask, kept_fraction=0.3, allocation=allocation, **INT8)
    cache.save(tmp_path / "cache.safetensors")
    loaded = GateSightCache.load(tmp_path / "cache.safetensors", model)
    assert loaded.options.entries_dtype == "int8"
    assert loaded.report().kv_bytes == cache.report().kv_bytes
    given = padded(torch.cat([mask, torch.ones_like(new)], 1), 6)
    assert torch.equal(forward(model, new, loaded, **given), forward(model, new, cache, **given))


WRONG = {
    "no scales": lambda tensors, _: tensors.pop("layers.3.key_scales"),
    "scales of others": lambda tensors, _: tensors.update({"layers.3.key_scales": tensors["layers.7.value_scales"]}),
    "half scales": lambda tensors, _: tensors.update({"layers.3.key_scales": tensors["layers.3.key_scales"].half()}),
    "scales that are no numbers": lambda tensors, _: tensors["layers.3.value_scales"].fill_(torch.nan),
    "scales of entries that are not quantised": lambda tensors, _: tensors.update(
        {"layers.3.kept_keys": tensors["layers.3.kept_keys"].float()}
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_file_with_wrong_scales_is_refused(dense, tmp_path, wrong):
    compacted(dense, random_ids(CONTEXT), kept_fraction=0.3, **INT8).save(tmp_path / "right.safetensors")
    changed_cache(tmp_path / "right.safetensors", tmp_path / "wrong.safetensors", WRONG[wrong])
    with pytest.raises(SessionFileError, match=r"layers\.3\."):
        GateSightCache.load(tmp_path / "wrong.safetensors", dense)


# -- options and failures ----------------------------------------------------------------------------------------------


def test_forks_choose_how_entries_are_held(dense):
    """One prefill serves both; a compacted cache cannot change."""
    parent, new = prefilled(dense, random_ids(CONTEXT), kept_fraction=0.3), random_ids(6, seed=9)
    for options in (INT8, {}):
        child = parent.fork(**options)
        child.compact()
        expected = compacted(dense, random_ids(CONTEXT), kept_fraction=0.3, **options)
        assert child.report().kv_bytes == expected.report().kv_bytes
        assert torch.equal(forward(dense, new, child.fork()), forward(dense, new, expected))
        with pytest.raises(CacheStateError, match="cannot be compacted otherwise"):
            child.fork(**INT8)


def test_a_session_takes_the_option(bundled):
    model, tokenizer = bundled
    text = "One of the special magic numbers for amber-river is: 4821. The sky is blue. " * 3
    session = Session.open(model, tokenizer, ESTIMATOR_PATH, text, kept_fraction=0.5, **INT8)
    assert all(layer.kept_keys.dtype == torch.int8 for layer in session.cache.attention_layers)
    question = "Question: what is the special magic number for amber-river? Answer:"
    assert session.ask(question, max_new_tokens=4) == "4 8 2 1"


@pytest.mark.parametrize("wrong", ["int4", "INT8", torch.int8, 8])
def test_other_dtypes_are_refused(dense, wrong):
    with pytest.raises(ValueError, match="entries_dtype is 'int8', or None"):
        prefilled(dense, random_ids(CONTEXT), entries_dtype=wrong)
    with pytest.raises(ValueError, match="entries_dtype is 'int8', or None"):
        prefilled(dense, random_ids(CONTEXT)).fork(entries_dtype=wrong)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["tail_keys", "tail_values"])
def test_layers_with_entries_that_are_not_finite_stay_as_they_are(dense, wrong, name):
    cache = prefilled(dense, random_ids(CONTEXT), kept_fraction=1.0, **INT8)
    broken = cache.attention_layers[0]
    entries = getattr(broken, name).clone()
    entries[0, 1, 20, 3] = wrong
    setattr(broken, name, entries)
    cache.compact()
    torch.testing.assert_close(getattr(broken, name.replace("tail", "kept")), entries, rtol=0, atol=0, equal_nan=True)
    assert broken.key_scales is None and broken.value_scales is None
    assert cache.attention_layers[1].kept_keys.dtype == torch.int8
    before = 2 * 2 * CONTEXT * 32 * 4
    assert cache.report().kv_bytes == before + 2 * (2 * CONTEXT * 32 + 8 * (CONTEXT + 32))


@pytest.mark.parametrize("completed", [False, True])
def test_a_failure_half_way_leaves_a_cache_that_answers_and_can_be_completed(dense, monkeypatch, completed):
    """The second layer's entries are kept, but not quantised yet."""
    cache, new = prefilled(dense, random_ids(CONTEXT), kept_fraction=0.3, **INT8), random_ids(6, seed=9)
    original, calls = GateSightAttentionLayer.quantise, []

    def flaky(self: Any) -> None:
        calls.append(self)
        if len(calls) == 2:
            raise MemoryError
        original(self)

    monkeypatch.setattr(GateSightAttentionLayer, "quantise", flaky)
    with pytest.raises(MemoryError):
        cache.compact()
    assert not cache.is_compacted
    first, second = cache.attention_layers
    assert (first.kept_keys.dtype, second.kept_keys.dtype) == (torch.int8, torch.float32)
    whole = compacted(dense, random_ids(CONTEXT), kept_fraction=0.3, **INT8)
    if completed:
        report = cache.compact()
        assert report.kv_bytes == whole.report().kv_bytes
    else:
        exact = compacted(dense, random_ids(CONTEXT), kept_fraction=0.3).attention_layers[1]
        whole.layers[whole.spec.attention_layers[1]] = exact
    assert torch.equal(forward(dense, new, cache.fork()), forward(dense, new, whole))


def test_a_question_that_fails_can_be_repeated(dense):
    cache, new = compacted(dense, random_ids(CONTEXT), kept_fraction=0.3, **INT8), random_ids(6, seed=9)

    def fail(*args: Any) -> None:
        raise MemoryError

    handle = dense.model.layers[-2].mlp.register_forward_pre_hook(fail)
    child = cache.fork()
    with handle, pytest.raises(MemoryError):
        forward(dense, new.expand(3, -1), child)
    assert torch.equal(forward(dense, new, child), forward(dense, new, cache.fork()))
