"""Signals equal an independent recomputation for any chunks and padding; other caches and decoding cost nothing."""

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor, nn
from transformers import DynamicCache

from gatesight_hf import GateSightCache
from gatesight_hf.cache.calls import CallFollower
from gatesight_hf.models import HybridSpec, adapter_for, attach, find_modules, listening
from gatesight_hf.scoring import Needs, Recording

from ..helpers.models import KeyNorm, random_estimator, tiny_model
from ..helpers.recomputed_signals import hidden_states, recomputed, recomputed_gate
from ..helpers.running import compacted, forward, generate, left_padded, prefilled, random_ids

pytestmark = pytest.mark.core

LENGTH = 21
CHUNKS = {
    "at once": [21],
    "uneven": [2, 3, 5, 7, 4],
    "last token alone": [20, 1],
    "first token alone": [1, 20],
    "single tokens": [1] * 21,
}
#: Between forwards of different shapes the model's own rounding differs and grows from layer to layer.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_signals_and_gates_equal_a_recomputation(any_model, chunks):
    modules = find_modules(any_model, HybridSpec.from_config(any_model.config))
    with hidden_states([*modules.gdn, *modules.attention]) as seen:
        cache = prefilled(any_model, random_ids(LENGTH, rows=2), chunks)
    hidden = [torch.cat(parts, dim=1) for parts in seen]
    recorded = cache.prefill().signals
    assert len(recorded) == len(modules.gdn) == 6
    for layer, inputs, found in zip(modules.gdn, hidden, recorded, strict=False):
        torch.testing.assert_close(found.double(), recomputed(layer, inputs), rtol=2e-6, atol=2e-6)
        assert (found.std(dim=1) > 0.01 * found.mean(dim=1).abs()).all(), "a constant signal shows nothing"
    gates = [recomputed_gate(a, h) for a, h in zip(modules.attention, hidden[6:], strict=True)]
    if adapter_for(any_model.config).has_output_gate:
        means = torch.stack([gate.mean(1) for gate in gates], 1)
        torch.testing.assert_close(torch.tensor(cache.report().gate_means), means, rtol=1e-6, atol=1e-6)
    else:
        assert gates == [None, None]
        assert cache.report().gate_means == []


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_chunks_do_not_matter(any_model, chunks):
    one, many = (prefilled(any_model, random_ids(LENGTH), c) for c in ([LENGTH], chunks))
    for a, b in zip(one.prefill().signals, many.prefill().signals, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    torch.testing.assert_close(torch.tensor(one.report().gate_means), torch.tensor(many.report().gate_means), **CLOSE)


def check_padded_rows(model: Any, chunks: list[int]) -> None:
    rows = [random_ids(length, seed=length) for length in (LENGTH, 13, 5, 1)]
    ids, mask = left_padded(rows)
    batch = prefilled(model, ids, chunks, mask)
    assert batch.prefill().lengths == [row.shape[1] for row in rows]
    for r, row in enumerate(rows):
        alone = prefilled(model, row)
        for a, b in zip(alone.prefill().signals, batch.prefill().signals, strict=True):
            torch.testing.assert_close(b[r, -row.shape[1] :], a[0], **CLOSE)
        expected, found = alone.report().gate_means, batch.report().gate_means
        assert bool(found) == adapter_for(model.config).has_output_gate
        torch.testing.assert_close(torch.tensor(found[r : r + 1]), torch.tensor(expected), **CLOSE)


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_left_padded_rows_equal_rows_alone(dense, chunks):
    check_padded_rows(dense, chunks)


def test_left_padded_rows_equal_rows_alone_in_every_family(any_model):
    check_padded_rows(any_model, [20, 1])


def test_signals_keep_the_dtype_of_the_model():
    model = tiny_model().bfloat16()
    cache = prefilled(model, random_ids(LENGTH), scorer=random_estimator(model))
    assert {signal.dtype for signal in cache.prefill().signals} == {torch.bfloat16}
    expected = 6 * LENGTH * 3 * 4 * 2
    assert cache.report().signal_bytes == expected


def test_layers_of_a_run_lie_side_by_side_and_forks_share_them(dense):
    parent = prefilled(dense, random_ids(LENGTH), [8, 8, 5])
    children = [parent.fork() for _ in range(3)]
    recorded = [cache.prefill().signals for cache in (parent, *children)]
    for run in (range(3), range(3, 6)):
        assert len({signals[i].untyped_storage().data_ptr() for signals in recorded for i in run}) == 1
        assert recorded[0][run[0]].untyped_storage().nbytes() == 3 * LENGTH * 3 * 4 * 4


def test_a_child_that_goes_on_does_not_change_what_its_parent_recorded(dense):
    ids = random_ids(LENGTH)
    expected = prefilled(dense, ids, [LENGTH]).prefill().signals
    parent = prefilled(dense, ids[:, :8], [8])
    for _ in range(2):
        child = parent.fork()
        dense(ids[:, 8:], past_key_values=child)
        found = child.prefill().signals
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True))
        assert {signal.shape[1] for signal in parent.prefill().signals} == {8}


@pytest.mark.parametrize("odd", [0, 1])
def test_signals_of_another_dtype_keep_it(dense, odd):
    """As under autocast: one layer of a run in bf16, or one chunk, beside float32."""
    recording = Recording(HybridSpec.from_config(dense.config), Needs(signals=True))
    given = [[torch.randn(1, 4, 3, 4), torch.randn(1, 2, 3, 4)] for _ in range(6)]
    given[odd][odd] = given[odd][odd].bfloat16()
    for gdn, chunks in enumerate(given):
        for chunk in chunks:
            recording.add_signals(gdn, chunk)
    for found, chunks in zip(recording.signals, given, strict=True):
        assert torch.equal(found, torch.cat(chunks, dim=1)) and found.dtype == torch.float32


def test_an_offloaded_model_gives_the_same_signals(dense):
    """transformers PR 46831: weights of an offloaded layer are there only inside its own forward."""
    model = tiny_model()
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.model.layers[0].linear_attn.conv1d.weight.is_meta
    for chunks in ([LENGTH], [20, 1]):
        found, expected = (prefilled(m, random_ids(LENGTH), chunks).prefill().signals for m in (model, dense))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# -- nothing for others ------------------------------------------------------------------------------------------------


@pytest.fixture
def recording_is_an_error(dense: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attach(dense)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a signal was computed")

    monkeypatch.setattr(listening, "gdn_signals", fail)
    monkeypatch.setattr(CallFollower, "record_signals", fail)
    monkeypatch.setattr(CallFollower, "record_attention", fail)


@pytest.mark.usefixtures("recording_is_an_error")
def test_other_caches_cost_nothing(dense):
    ids = random_ids(LENGTH)
    forward(dense, ids, DynamicCache(config=dense.config))
    generate(dense, ids, DynamicCache(config=dense.config))
    dense(ids, use_cache=False)
    dense.generate(ids, max_new_tokens=2, do_sample=False)
    assert not listening._calls.by_key


def test_decoding_costs_nothing(dense, request):
    cache = compacted(dense, random_ids(LENGTH))
    assert cache.report().signal_bytes == 0
    request.getfixturevalue("recording_is_an_error")
    child = cache.fork()
    generate(dense, random_ids(LENGTH + 4), child, **{"attention_mask": torch.ones(1, 2 * LENGTH + 4)})
    forward(dense, random_ids(3), child)
    assert child.report().signal_bytes == 0
    assert not listening._calls.by_key


def test_a_scorer_that_needs_no_signals_records_none(dense):
    for chunks in ([LENGTH], [20, 1]):
        cache = prefilled(dense, random_ids(LENGTH), chunks, scorer=KeyNorm(), allocation="flat")
        assert cache.prefill().signals == []
        assert cache.report().signal_bytes == 0
        assert cache.report().gate_means == []
        assert cache.compact().achieved_fraction == pytest.approx(0.1, abs=0.02)


# -- hooks -------------------------------------------------------------------------------------------------------------


def traces(model: nn.Module) -> list[tuple[set[str], int]]:
    """Attributes and numbers of hooks of every module."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
             "_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks")  # fmt: skip
    return [(set(vars(m)), sum(len(getattr(m, kind)) for kind in kinds)) for m in model.modules()]


def test_hooks_can_be_taken_off_without_a_trace():
    model = tiny_model()
    before = traces(model)
    hooks = attach(model)
    assert traces(model) != before
    hooks.remove()
    hooks.remove()
    assert traces(model) == before
    with attach(model):
        assert compacted(model, random_ids(LENGTH)).is_compacted
    assert traces(model) == before


def test_an_own_generate_of_the_model_comes_back():
    model = tiny_model()
    own = lambda *args, **kwargs: "own"  # noqa: E731
    model.generate = own
    hooks = attach(model)
    assert model.generate(random_ids(3)) == "own"
    hooks.remove()
    assert model.generate is own


def test_attaching_twice_changes_nothing():
    model = tiny_model()
    hooks = attach(model)
    once = traces(model)
    GateSightCache(random_estimator(model), model)
    assert attach(model) is hooks
    assert traces(model) == once


def test_a_copied_model_has_working_hooks_of_its_own(dense):
    expected = prefilled(dense, random_ids(LENGTH)).prefill().signals
    model = tiny_model()
    bare = traces(model)
    attach(model)
    twin = copy.deepcopy(model)
    assert traces(twin) == traces(model)
    attach(model).remove()
    assert traces(model) == bare
    found = prefilled(twin, random_ids(LENGTH), [20, 1]).prefill().signals
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    assert torch.equal(generate(twin, random_ids(9), None), generate(dense, random_ids(9), None))
    attach(twin).remove()
    assert traces(twin) == bare


def test_a_hooked_model_can_be_pickled(dense):
    model = tiny_model()
    attach(model)
    twin = pickle.loads(pickle.dumps(model))
    ids = random_ids(LENGTH)
    expected, found = (generate(m, ids, GateSightCache(random_estimator(m), m)) for m in (dense, twin))
    assert torch.equal(found, expected)


def test_caches_interleave_on_one_model(dense):
    contexts = [random_ids(LENGTH, seed=1), random_ids(LENGTH, seed=2)]
    alone = [prefilled(dense, ids, [8, 8, 5]).prefill().signals for ids in contexts]
    caches = [GateSightCache(random_estimator(dense), dense) for _ in contexts]
    other = DynamicCache(config=dense.config)
    for start, stop in ((0, 8), (8, 16), (16, LENGTH)):
        for ids, cache in zip(contexts, caches, strict=True):
            forward(dense, ids[:, start:stop], cache)
            forward(dense, ids[:, start:stop], other)
    for cache, expected in zip(caches, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(cache.prefill().signals, expected, strict=True))


def test_threads_do_not_mix(dense):
    contexts = [random_ids(LENGTH, seed=seed) for seed in range(4)]
    alone = [prefilled(dense, ids).prefill().signals for ids in contexts]
    found: dict[int, list[Tensor]] = {}

    def work(i: int) -> None:
        with torch.no_grad():
            found[i] = prefilled(dense, contexts[i]).prefill().signals

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, expected in enumerate(alone):
        assert all(torch.equal(a, b) for a, b in zip(found[i], expected, strict=True))
