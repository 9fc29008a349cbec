"""Ctrl-C between any two modules leaves a cache as it was before, whatever is asked of it next."""

import copy
import gc
import pickle
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from gatesight_hf import CacheStateError, FrozenCache, GateSightCache
from gatesight_hf.entries import GDNStateLayer
from gatesight_hf.models import attach, listening

from ..helpers.models import random_estimator, tiny_model
from ..helpers.oracle import assert_same
from ..helpers.running import compacted, forward, generate, left_padded, padded, prefilled, random_ids

pytestmark = pytest.mark.core

ROWS = [random_ids(n, seed=n) for n in (43, 29)]
CONTEXTS, MASK = left_padded(ROWS)
QUESTION, CONTEXT_ROW = random_ids(6, rows=2, seed=9), ROWS[0]


@contextmanager
def interrupt(after: int, model: Any = None) -> Iterator[None]:
    """Ctrl-C before the module call number `after` (of `model` only, if given), once; the call is waited for."""
    count, parts = 0, None if model is None else set(model.modules())

    def stop(module: Any, *_: Any) -> None:
        nonlocal count
        if parts is None or module in parts:
            count += 1
            if count == after:
                raise KeyboardInterrupt

    handle = register_module_forward_pre_hook(stop)
    try:
        yield
    except KeyboardInterrupt:
        assert count == after
    finally:
        handle.remove()


def module_calls(act: Callable[[], Any]) -> int:
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    handle = register_module_forward_pre_hook(count)
    try:
        act()
    finally:
        handle.remove()
    return calls


def seen_by(cache: GateSightCache) -> dict[str, Any]:
    """Everything that can be asked of a cache without changing it."""
    tokens = cache.context.tokens
    return {
        "report": replace(cache.report(), seconds={}),
        "repr": repr(cache),
        "lengths": [layer.get_seq_length() for layer in cache.layers if not isinstance(layer, GDNStateLayer)],
        # Frozen layers write their convolution states anew at the start of every forward.
        "states": [
            state.clone()
            for layer in cache.gdn_layers
            for name, state in layer.state().items()
            if not (isinstance(cache, FrozenCache) and name.startswith("conv"))
        ],
        "ids": tokens.ids,
        "padding": tokens.padding,
        "batch": cache.batch_size,
    }


def assert_unchanged(cache: GateSightCache, before: dict[str, Any]) -> None:
    for name, value in seen_by(cache).items():
        expected = before[name]
        if isinstance(value, list) and value and isinstance(value[0], Tensor):
            assert all(torch.equal(a, b) for a, b in zip(value, expected, strict=True)), name
        elif isinstance(value, Tensor):
            assert torch.equal(value, expected), name
        else:
            assert value == expected, name


# -- one forward, stopped everywhere -----------------------------------------------------------------------------------

STATES: dict[str, Callable[[Any], GateSightCache]] = {
    "new": lambda m: GateSightCache(random_estimator(m), m),
    "prefilled": lambda m: prefilled(m, CONTEXTS, [20, 23], mask=MASK, kept_fraction=0.3),
    "compacted": lambda m: compacted(m, CONTEXTS, mask=MASK, kept_fraction=0.3),
    "growing": lambda m: compacted(m, CONTEXTS, mask=MASK, kept_fraction=0.3, recompact_every=5),
    "int8": lambda m: compacted(m, CONTEXTS, mask=MASK, kept_fraction=0.3, entries_dtype="int8"),
    "frozen": lambda m: FrozenCache(compacted(m, CONTEXTS, mask=MASK, kept_fraction=0.3), 20),
}


@pytest.mark.parametrize("new", [1, 6])
@pytest.mark.parametrize("state", STATES)
def test_a_forward_stopped_at_any_module_has_not_been(dense, state, new):
    make, ids = STATES[state], QUESTION[:, :new]
    cache, expected, logits = make(dense), make(dense), []
    calls = module_calls(lambda: logits.append(forward(dense, ids, expected)))
    before = seen_by(cache)
    for at in (*range(1, calls, 5), calls):  # the last one is behind the decoder
        with interrupt(at):
            forward(dense, ids, cache)
        assert_unchanged(cache, before)
    assert torch.equal(forward(dense, ids, cache), logits[0])
    assert replace(cache.report(), seconds={}) == replace(expected.report(), seconds={})


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
@pytest.mark.parametrize("state", STATES)
def test_what_fails_after_the_decoder_undoes_the_forward(dense, state, error):
    cache = STATES[state](dense)
    before, expected = seen_by(cache), forward(dense, QUESTION, STATES[state](dense))

    def fail(*_: Any) -> None:
        raise error

    for part in (dense.lm_head, dense.model):  # after the decoder, and a hook of the caller's on it
        handle = part.register_forward_hook(fail)
        with pytest.raises(error):
            forward(dense, QUESTION, cache)
        handle.remove()
        assert_unchanged(cache, before)
    assert torch.equal(forward(dense, QUESTION, cache), expected)


def test_a_second_interrupt_waits_for_what_the_first_takes_back(dense, monkeypatch):
    cache = compacted(dense, CONTEXT_ROW, kept_fraction=0.3)
    before, restore, calls = seen_by(cache), type(cache.layers[4]).restore, []

    def impatient(self: Any, state: Any) -> None:
        calls.append(self)
        if len(calls) == 3:
            raise KeyboardInterrupt
        restore(self, state)

    monkeypatch.setattr(type(cache.layers[4]), "restore", impatient)
    with interrupt(70, dense):
        forward(dense, QUESTION[:1], cache)
    assert len(calls) > 3
    assert_unchanged(cache, before)


def test_a_compaction_of_a_growing_cache_that_stops_at_its_end_has_not_been(dense, monkeypatch):
    cache = compacted(dense, CONTEXT_ROW, kept_fraction=0.3, growing=True)
    forward(dense, QUESTION[:1], cache)
    before, twin = seen_by(cache), cache.fork()

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(GDNStateLayer, "detach", stop)
    with pytest.raises(KeyboardInterrupt):
        cache.compact()
    monkeypatch.undo()
    assert_unchanged(cache, before)
    assert replace(cache.compact(), seconds={}) == replace(twin.compact(), seconds={})
    assert torch.equal(forward(dense, QUESTION[:1], cache), forward(dense, QUESTION[:1], twin))


def test_a_frozen_cache_that_was_interrupted_while_it_was_written_to_says_so(dense, monkeypatch):
    cache = STATES["frozen"](dense)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(cache.layers[4]), "commit", stop)
    with pytest.raises(KeyboardInterrupt):
        forward(dense, QUESTION, cache)
    monkeypatch.undo()
    with pytest.raises(CacheStateError, match="freeze its parent again"):
        forward(dense, QUESTION, cache)


def test_a_forward_that_was_wrapped_after_the_hooks_is_followed_once(dense):
    model = tiny_model()
    parent = compacted(model, CONTEXT_ROW, kept_fraction=0.3)
    expected = forward(model, QUESTION[:1], parent.fork())
    inner = model.model.forward
    model.model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    again = compacted(model, CONTEXT_ROW, kept_fraction=0.3)
    for cache in (parent, again, FrozenCache(parent, 10), FrozenCache(again, 10)):
        for child in (cache.fork(), cache):
            assert_same(forward(model, QUESTION[:1], child), expected)


@pytest.fixture
def stopped(dense: Any) -> GateSightCache:
    cache = compacted(dense, CONTEXTS, mask=MASK, kept_fraction=0.3)
    with interrupt(70):
        forward(dense, QUESTION, cache)
    return cache


NEXT: dict[str, Callable[[GateSightCache], GateSightCache]] = {
    "reorder_cache": lambda c: (c.reorder_cache(torch.tensor([1, 0])), c)[1],
    "batch_select_indices": lambda c: (c.batch_select_indices(torch.tensor([1])), c)[1],
    "batch_repeat_interleave": lambda c: (c.batch_repeat_interleave(2), c)[1],
    "fork": lambda c: c.fork(),
    "deepcopy": copy.deepcopy,
    "freeze": lambda c: FrozenCache(c, 8),
}


@pytest.mark.parametrize("act", NEXT)
def test_whatever_is_asked_next(dense, stopped, act):
    undisturbed = compacted(dense, CONTEXTS, mask=MASK, kept_fraction=0.3)
    found, expected = NEXT[act](stopped), NEXT[act](undisturbed)
    assert found.batch_size == expected.batch_size
    ids = random_ids(4, rows=expected.batch_size, seed=3)
    assert torch.equal(forward(dense, ids, found), forward(dense, ids, expected))


def test_files_and_pickles_after_an_interrupt(dense, stopped, tmp_path):
    undisturbed = compacted(dense, CONTEXTS, mask=MASK, kept_fraction=0.3)
    stopped.save(tmp_path / "a.gatesight")
    loaded = GateSightCache.load(tmp_path / "a.gatesight", dense)
    unpickled = pickle.loads(pickle.dumps(stopped))
    unpickled.tie(dense)
    expected = forward(dense, QUESTION, undisturbed)
    for cache in (loaded, unpickled, stopped):
        assert torch.equal(forward(dense, QUESTION, cache), expected)


def test_reset_after_an_interrupt(dense, stopped):
    stopped.reset()
    forward(dense, ROWS[0], stopped)
    stopped.compact()
    again = compacted(dense, ROWS[0], kept_fraction=0.3)
    assert torch.equal(forward(dense, QUESTION[:1], stopped), forward(dense, QUESTION[:1], again))


@pytest.mark.parametrize("change", ["reorder_cache", "batch_select_indices", "batch_repeat_interleave"])
def test_a_change_of_rows_that_stops_half_way_has_not_been(dense, monkeypatch, change):
    cache = compacted(dense, CONTEXTS, mask=MASK, kept_fraction=0.3)
    before, argument = seen_by(cache), 2 if change == "batch_repeat_interleave" else torch.tensor([1, 0])

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cache.layers[5], change, stop)
    with pytest.raises(KeyboardInterrupt):
        getattr(cache, change)(argument)
    monkeypatch.undo()
    assert_unchanged(cache, before)


# -- a forward counts only if every layer saw it -----------------------------------------------------------------------


def without_cache(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, {name: value for name, value in kwargs.items() if not isinstance(value, GateSightCache)}


@pytest.mark.parametrize("layer", range(8))
def test_a_layer_that_did_not_take_the_tokens_undoes_the_forward(layer):
    model = tiny_model()
    cache = compacted(model, ROWS[0], kept_fraction=0.3)
    before = seen_by(cache)
    handle = model.model.layers[layer].register_forward_pre_hook(without_cache, with_kwargs=True)
    for ids in (QUESTION[:1], QUESTION[:1, :1]):
        # The mask of an attention layer is too long then, which sdpa notices first.
        several = layer in (3, 7) and ids.shape[1] > 1
        with pytest.raises(RuntimeError, match="size" if several else f"1 of 8 layers .*layer {layer}"):
            forward(model, ids, cache)
        assert_unchanged(cache, before)
    handle.remove()
    expected = forward(model, QUESTION[:1], compacted(model, ROWS[0], kept_fraction=0.3))
    assert torch.equal(forward(model, QUESTION[:1], cache), expected)


@pytest.mark.parametrize("layer", [1, 3])
def test_a_layer_that_runs_twice_undoes_the_forward(layer):
    model = tiny_model()
    cache = prefilled(model, ROWS[0], kept_fraction=0.3)
    before = seen_by(cache)

    def again(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        handle.remove()
        module(*args, **kwargs)

    handle = model.model.layers[layer].register_forward_hook(again, with_kwargs=True)
    with pytest.raises(RuntimeError, match="ran twice" if layer == 1 else "size"):
        forward(model, QUESTION[:1], cache)
    assert_unchanged(cache, before)


@pytest.mark.parametrize("compact", [False, True])
def test_gradient_checkpointing_is_named(compact):
    model = tiny_model()
    cache = prefilled(model, ROWS[0], kept_fraction=0.3)
    if compact:
        cache.compact()
    before = seen_by(cache)
    model.model.gradient_checkpointing = True
    for layer in model.model.layers:
        layer.gradient_checkpointing = True
    model.train()
    with torch.enable_grad(), pytest.raises(CacheStateError, match=r"Gradient checkpointing.*model\.eval"):
        forward(model, QUESTION[:1], cache)
    assert_unchanged(cache, before)
    model.eval()
    assert forward(model, QUESTION[:1], cache).shape[1] == 6


def test_signals_that_are_not_recorded_undo_the_forward():
    model = tiny_model()
    cache = prefilled(model, ROWS[0], kept_fraction=0.3)
    before, old = seen_by(cache), model.model.layers[1].linear_attn.out_proj
    model.model.layers[1].linear_attn.out_proj = copy.deepcopy(old)
    model.model.layers[1].linear_attn.out_proj._forward_pre_hooks.clear()
    with pytest.raises(CacheStateError, match=r"not recorded.*attach"):
        forward(model, QUESTION[:1], cache)
    assert_unchanged(cache, before)
    attach(model)
    forward(model, QUESTION[:1], cache)
    assert cache.compact().logical_length == 43 + 6


# -- nothing stays alive -----------------------------------------------------------------------------------------------


def stopped_and_gone(model: Any, at: int) -> list[weakref.ref[Tensor]]:
    """Tensors of a cache whose forward was stopped, and which nobody holds any more."""
    cache = prefilled(model, ROWS[0], kept_fraction=0.3)
    with interrupt(at, model):
        forward(model, QUESTION[:1], cache)
    tensors = [t for layer in cache.layers for t in layer.state().values()]
    return [weakref.ref(tensor) for tensor in tensors]


@pytest.mark.parametrize("at", [3, 7, 12, 30, 33, 60, 90])
def test_an_interrupted_cache_is_freed(at):
    model = tiny_model()
    gc.disable()
    try:
        assert all(reference() is None for reference in stopped_and_gone(model, at))
    finally:
        gc.enable()
    assert not listening._calls.by_key


def test_interrupted_caches_of_two_threads_are_freed():
    models, found = [tiny_model(), tiny_model()], {}

    def run(i: int) -> None:
        with torch.no_grad():
            found[i] = [stopped_and_gone(models[i], 33), dict(listening._calls.by_key)]

    # One after the other: the hook that interrupts is the process's.
    for i in (0, 1):
        thread = threading.Thread(target=run, args=(i,))
        thread.start()
        thread.join()
    gc.collect()
    for references, calls in found.values():
        assert all(reference() is None for reference in references)
        assert not calls


# -- whose a cache is --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hooked", [True, False])
@pytest.mark.parametrize("state", ["new", "prefilled", "compacted", "frozen"])
@pytest.mark.parametrize("new", [1, 6])
def test_another_model_is_refused_before_anything_is_appended(dense, state, hooked, new):
    cache, other = STATES[state](dense), tiny_model()
    before, ids = seen_by(cache), QUESTION[:, :new]
    if hooked:
        attach(other)
    with pytest.raises(CacheStateError, match="another model object" if hooked else "belongs to another object"):
        forward(other, ids, cache)
    assert_unchanged(cache, before)
    if hooked and state != "new":
        with pytest.raises(CacheStateError, match="another model object"):
            generate(other, torch.cat([CONTEXTS, ids], 1), cache)
    assert_unchanged(cache, before)
    forward(dense, ids, cache)


def test_a_cache_is_tied_to_its_model_again(dense):
    twin, other = copy.deepcopy(dense), tiny_model("qwen3_5")
    other.model.layers[0].mlp.up_proj.weight.mul_(1.01)
    cache = compacted(dense, CONTEXTS, mask=MASK, kept_fraction=0.3)
    expected = forward(dense, QUESTION, cache.fork())
    for copied in (copy.deepcopy(cache), cache.fork()):
        assert torch.equal(forward(dense, QUESTION, copied.fork()), expected)
        with pytest.raises(ValueError, match="weights"):
            copied.tie(other)
        copied.tie(twin)
        with pytest.raises(CacheStateError, match="another model object"):
            forward(dense, QUESTION, copied)
        assert torch.equal(forward(twin, QUESTION, copied), expected)
    pickled = pickle.loads(pickle.dumps(cache))
    for ask in (lambda: forward(dense, QUESTION, pickled), lambda: pickled.save("never.gatesight")):
        with pytest.raises(CacheStateError, match=r"pickled.*cache\.tie\(model\)"):
            ask()
    with pytest.raises(ValueError, match="weights"):
        pickled.tie(other)
    pickled.tie(dense)
    assert torch.equal(forward(dense, QUESTION, pickled), expected)


@pytest.mark.parametrize("how", ["alive", "gone"])
def test_another_model_is_not_tied_to(dense, how):
    model = tiny_model()
    cache = compacted(model, CONTEXTS, mask=MASK, kept_fraction=0.3)
    expected, twin = forward(model, QUESTION, cache.fork()), copy.deepcopy(model)
    if how == "gone":
        del model
        gc.collect()
        with pytest.raises(CacheStateError, match=r"lost its model object.*cache\.tie\(model\)"):
            forward(twin, QUESTION, cache)
    others = [tiny_model("qwen3_next"), tiny_model(num_hidden_layers=12), tiny_model(rms_norm_eps=1e-3)]
    others += [copy.deepcopy(twin).to(torch.bfloat16), copy.deepcopy(twin)]
    others[-1].model.layers[3].mlp.up_proj.weight.mul_(1.01)
    for other in others:
        with pytest.raises(ValueError, match="another model"):
            cache.tie(other)
    cache.tie(twin)
    assert torch.equal(forward(twin, QUESTION, cache), expected)


# -- anything, on two caches of two models -----------------------------------------------------------------------------


@dataclass
class Spoken:
    """A cache of one model, and the tokens that each of its rows should have seen."""

    model: Any
    cache: GateSightCache
    rows: list[Tensor]


MODELS: list[Any] = []


class Interrupted(RuleBasedStateMachine):
    """Nothing is evicted (p = 1), so that a plain model on each row's own tokens says what is right."""

    @initialize(lengths=st.lists(st.integers(3, 20), min_size=1, max_size=2))
    def begin(self, lengths: list[int]) -> None:
        if not MODELS:
            MODELS.extend([tiny_model(), tiny_model("qwen3_next"), tiny_model(), tiny_model("qwen3_next")])
        self.talks = []
        self.count = 0
        for model in MODELS[:2]:
            cache = GateSightCache(random_estimator(model), model, kept_fraction=1.0)
            rows = [random_ids(n, seed=n + i) for i, n in enumerate(lengths)]
            ids, mask = left_padded(rows)
            with torch.no_grad():
                forward(model, ids, cache, **padded(mask, ids.shape[1]))
            self.talks.append(Spoken(model, cache, rows))

    def fresh(self, talk: Spoken, length: int) -> Tensor:
        self.count += 1
        return random_ids(length, rows=len(talk.rows), seed=1000 + self.count)

    @rule(which=st.integers(0, 1), length=st.integers(1, 5))
    def feed(self, which: int, length: int) -> None:
        talk = self.talks[which]
        ids = self.fresh(talk, length)
        with torch.no_grad():
            logits = forward(talk.model, ids, talk.cache)
        talk.rows = [torch.cat([row, ids[i : i + 1]], 1) for i, row in enumerate(talk.rows)]
        self.check_logits(which, logits[:, -1])

    def check_logits(self, which: int, logits: Tensor) -> None:
        for row, found in zip(self.talks[which].rows, logits, strict=True):
            with torch.no_grad():
                assert_same(found, MODELS[2 + which](row, use_cache=False).logits[0, -1])

    @rule(which=st.integers(0, 1), length=st.integers(1, 5), at=st.integers(1, 140))
    def stopped_forward(self, which: int, length: int, at: int) -> None:
        talk = self.talks[which]
        ids, done = self.fresh(talk, length), False
        with interrupt(at, talk.model), torch.no_grad():
            forward(talk.model, ids, talk.cache)
            done = True
        if done:
            talk.rows = [torch.cat([row, ids[i : i + 1]], 1) for i, row in enumerate(talk.rows)]

    @rule(which=st.integers(0, 1), at=st.integers(1, 400))
    def stopped_generate(self, which: int, at: int) -> None:
        """What whole forwards have taken stays: they are the first tokens of what was to be said."""
        talk = self.talks[which]
        new = self.fresh(talk, 2)
        rows, mask = left_padded([torch.cat([row, new[i : i + 1]], 1) for i, row in enumerate(talk.rows)])
        plain = [MODELS[2 + which].generate(row, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
                 for row in (torch.cat([row, new[i : i + 1]], 1) for i, row in enumerate(talk.rows))]  # fmt: skip
        with interrupt(at, talk.model), torch.no_grad():
            generate(talk.model, rows, talk.cache, attention_mask=mask, eos_token_id=None, pad_token_id=0)
        seen = talk.cache.context.tokens.lengths(len(talk.rows))
        talk.rows = [said[:, :count] for said, count in zip(plain, seen, strict=True)]

    @precondition(lambda self: any(not talk.cache.is_compacted for talk in self.talks))
    @rule(which=st.integers(0, 1))
    def compact(self, which: int) -> None:
        with suppress(CacheStateError):
            self.talks[which].cache.compact()

    @rule(which=st.integers(0, 1), order=st.lists(st.integers(0, 5), min_size=1, max_size=3))
    def select(self, which: int, order: list[int]) -> None:
        talk = self.talks[which]
        chosen = [i % len(talk.rows) for i in order]
        talk.cache.batch_select_indices(torch.tensor(chosen))
        talk.rows = [talk.rows[i] for i in chosen]

    @rule(which=st.integers(0, 1))
    def reverse(self, which: int) -> None:
        talk = self.talks[which]
        talk.cache.reorder_cache(torch.arange(len(talk.rows)).flip(0))
        talk.rows = talk.rows[::-1]

    @rule(which=st.integers(0, 1), at=st.integers(1, 140))
    def with_the_other_cache(self, which: int, at: int) -> None:
        """The model of one is given the cache of the other, and interrupted as well."""
        with interrupt(at), torch.no_grad(), pytest.raises(CacheStateError):
            forward(self.talks[1 - which].model, self.fresh(self.talks[which], 2), self.talks[which].cache)

    @precondition(lambda self: any(talk.cache.is_compacted for talk in self.talks))
    @rule(which=st.integers(0, 1))
    def file(self, which: int) -> None:
        talk = self.talks[which]
        if talk.cache.is_compacted:
            with tempfile.TemporaryDirectory() as folder:
                talk.cache.save(Path(folder) / "a.gatesight")
                talk.cache = GateSightCache.load(Path(folder) / "a.gatesight", talk.model)

    @rule(which=st.integers(0, 1))
    def pickled(self, which: int) -> None:
        talk = self.talks[which]
        talk.cache = pickle.loads(pickle.dumps(talk.cache))
        talk.cache.tie(talk.model)

    @invariant()
    def lengths_are_those_of_the_tokens(self) -> None:
        for talk in getattr(self, "talks", []):
            assert talk.cache.context.tokens.lengths(len(talk.rows)) == [row.shape[1] for row in talk.rows]
            assert talk.cache.report().logical_length == talk.cache.get_seq_length() == talk.cache.context.tokens.count

    def teardown(self) -> None:
        for which, talk in enumerate(getattr(self, "talks", [])):
            with torch.no_grad():
                ids = self.fresh(talk, 3)
                logits = forward(talk.model, ids, talk.cache)
                talk.rows = [torch.cat([row, ids[i : i + 1]], 1) for i, row in enumerate(talk.rows)]
            self.check_logits(which, logits[:, -1])


TestInterrupted = Interrupted.TestCase
TestInterrupted.settings = settings(
    max_examples=25, stateful_step_count=12, deadline=None, derandomize=True, database=None
)
