"""A frozen cache answers as the compacted cache that it came from, with fixed shapes and in compiled programs."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import CompileConfig

from gatesight_hf import CacheStateError, FrozenCache, Session
from gatesight_hf.scoring import Recorder

from ..helpers.models import FAMILIES, FAMILY_OPTIONS, tiny_model
from ..helpers.oracle import assert_same
from ..helpers.running import (
    CONTEXT,
    cache_kwargs,
    compacted,
    forward,
    generate,
    left_padded,
    padded,
    prefilled,
    random_ids,
    steps,
)

QUESTIONS = [random_ids(length, seed=20 + length) for length in (6, 1, 9)]
ROOM = 32
FROZEN_FAMILIES = [name for name in FAMILIES if name not in ("lara_mini", "qwen4_exp")]


def full(question: Tensor, context: Tensor = CONTEXT) -> Tensor:
    return torch.cat([context.expand(len(question), -1), question], dim=1)


def small(family: str = "qwen3_5", *types: str) -> Any:
    """A model of few layers, which compiles sooner."""
    options: dict[str, Any] = {"num_hidden_layers": len(types), "layer_types": list(types)}
    if "mlp_layer_types" in FAMILY_OPTIONS[family]:
        options["mlp_layer_types"] = FAMILY_OPTIONS[family]["mlp_layer_types"][: len(types)]
    return tiny_model(family, **options)


@pytest.fixture(scope="module")
def compilable() -> Any:
    return small("qwen3_5", "linear_attention", "full_attention", "full_attention")


@pytest.fixture
def compiler() -> Iterator[Callable[..., Any]]:
    """Makes a compiled step of a model; a break of its graph is an error. Nothing was compiled before."""
    torch._dynamo.reset()
    counters.clear()
    yield lambda model, backend="eager": torch.compile(model.__call__, backend=backend, fullgraph=True)
    torch._dynamo.reset()


def graphs() -> int:
    """How many were compiled."""
    return counters["stats"]["unique_graphs"]


def decode(model: Any, step: Any, question: Tensor, cache: Any, tokens: int = 10, **arguments: Any) -> Tensor:
    """Logits `[B, tokens, vocab]` of greedy steps after the question, which runs as it is."""
    token, found = forward(model, question, cache, **arguments)[:, -1:].argmax(-1), []
    for _ in range(tokens):
        found.append(step(input_ids=token, **cache_kwargs(model, cache)).logits)
        token = found[-1].argmax(-1)
    return torch.cat(found, dim=1)


def tensors(cache: FrozenCache) -> dict[str, Tensor]:
    """Every tensor of the cache's layers by name."""
    found = {"ids.late": cache.context.late_ids}
    for i, layer in enumerate(cache.layers):
        for name, value in vars(layer).items():
            parts = value.items() if isinstance(value, dict) else [("", value)]
            found |= {f"{i}.{name}.{key}": part for key, part in parts}
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}


def places(cache: FrozenCache) -> dict[str, Any]:
    return {name: (tensor.data_ptr(), tensor.shape, tensor.stride()) for name, tensor in tensors(cache).items()}


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: f"{q.shape[1]} tokens")
def test_it_answers_as_a_fork_and_as_the_oracle(dense, attention, parent, oracle, question):
    expected, logits = oracle.steps(full(question), 8)
    for ids in (full(question), question):
        tokens, found = steps(dense, ids, FrozenCache(parent, ROOM), 8, new=ids is question)
        assert torch.equal(tokens, expected)
        assert_same(found, logits)
    tokens, found = steps(dense, question, parent.fork(), 8, new=True)
    assert torch.equal(tokens, expected)
    assert_same(found, logits)


@pytest.mark.core
@pytest.mark.parametrize("allocation", ["gate", "head", "global"])
def test_ragged_rows_and_ragged_heads(dense, attention, allocation):
    rows = [random_ids(43, seed=1), random_ids(11, seed=2)]
    ids, mask = left_padded(rows)
    cache = compacted(dense, ids, mask=mask, kept_fraction=0.3, allocation=allocation)
    question = random_ids(5, rows=2, seed=3)
    given = {"attention_mask": F.pad(mask, (0, 5), value=1)}
    expected, logits = steps(dense, question, cache.fork(), 6, new=True, **given)
    frozen = FrozenCache(cache, ROOM)
    tokens, found = steps(dense, question, frozen, 6, new=True, **given)
    assert torch.equal(tokens, expected)
    assert_same(found, logits)
    assert frozen.report().to_dict()["physical_lengths"] == [n + 10 for n in cache.report().physical_lengths]
    for i, row in enumerate(rows):
        alone = compacted(dense, row, kept_fraction=0.3, allocation=allocation)
        assert torch.equal(
            generate(dense, question[i : i + 1], FrozenCache(alone, ROOM), 6, new=True), expected[i : i + 1]
        )


@pytest.mark.core
@pytest.mark.parametrize("family", FROZEN_FAMILIES)
def test_families(family):
    model = tiny_model(family)
    cache = compacted(model, CONTEXT, kept_fraction=0.3)
    for question in QUESTIONS[:2]:
        expected, logits = steps(model, question, cache.fork(), 5, new=True)
        tokens, found = steps(model, question, FrozenCache(cache, ROOM), 5, new=True)
        assert torch.equal(tokens, expected)
        assert_same(found, logits)


@pytest.mark.core
def test_tokens_since_compaction_and_chunks(dense, parent):
    """The parent may have a tail of its own, and a question may come in parts."""
    forward(dense, QUESTIONS[0], parent)
    frozen, fork = FrozenCache(parent, ROOM), parent.fork()
    for part in QUESTIONS[2].split([4, 1, 4], dim=1):
        assert_same(forward(dense, part, frozen), forward(dense, part, fork))
    assert frozen.get_seq_length() == fork.get_seq_length() == 43 + 6 + 9
    assert frozen.report().physical_lengths == fork.report().physical_lengths
    conv, recurrent = (sum(state.nbytes for layer in fork.gdn_layers for state in getattr(layer, name).values())
                       for name in ("conv_states", "recurrent_states"))  # fmt: skip
    assert frozen.report().gdn_bytes == 3 * conv + 2 * recurrent
    slots = [layer.kept_length + 6 + ROOM for layer in parent.attention_layers]
    assert frozen.report().kv_bytes == sum(slots) * 2 * 2 * 32 * 4
    for mine, theirs in zip(frozen.attention_layers, fork.attention_layers, strict=True):
        assert_same(mine.keys, theirs.keys)
        assert_same(mine.values, theirs.values)


@pytest.mark.core
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}])
def test_beams(dense, parent, options):
    frozen, ids = FrozenCache(parent, ROOM), full(QUESTIONS[0])
    assert torch.equal(generate(dense, ids, frozen, 6, **options), generate(dense, ids, parent.fork(), 6, **options))


@pytest.mark.core
def test_one_cache_answers_a_batch_and_samples(dense, parent):
    batch = random_ids(6, rows=3, seed=9)
    assert torch.equal(
        *(generate(dense, batch, cache, 6, new=True) for cache in (FrozenCache(parent, ROOM), parent.fork()))
    )
    drawn = []
    for cache in (FrozenCache(parent, ROOM), parent.fork()):
        torch.manual_seed(5)
        drawn.append(generate(dense, QUESTIONS[0], cache, 6, new=True, do_sample=True, num_return_sequences=3))
    assert torch.equal(*drawn)


@pytest.mark.core
def test_a_conversation_goes_on_and_rewinds(dense, parent):
    frozen, fork, first = FrozenCache(parent, ROOM), parent.fork(), full(QUESTIONS[0])
    said = torch.cat([first, generate(dense, first, frozen)], 1)
    assert torch.equal(said, torch.cat([first, generate(dense, first, fork)], 1))
    second = torch.cat([said, QUESTIONS[2]], 1)
    assert torch.equal(generate(dense, second, frozen), generate(dense, second, fork))
    before = places(frozen)
    frozen.rewind()
    assert frozen.get_seq_length() == 43
    assert frozen.room == ROOM
    assert torch.equal(generate(dense, first, frozen), said[:, -4:])
    assert places(frozen) == before


@pytest.mark.core
def test_rows_that_change_places_rewind_to_their_own_state(dense):
    ids, mask = left_padded([CONTEXT, random_ids(21, seed=2)])
    parent = compacted(dense, ids, mask=mask)
    frozen, fork, order = FrozenCache(parent, ROOM), parent.fork(), torch.tensor([1, 0])
    child, question = frozen.fork(), random_ids(5, rows=2, seed=3)
    forward(dense, question, frozen)
    for cache in (frozen, fork):
        cache.reorder_cache(order)
    frozen.rewind()
    assert_same(forward(dense, question, frozen), forward(dense, question, fork))
    child.rewind()
    assert_same(forward(dense, question, child), forward(dense, question, parent.fork()))


@pytest.mark.core
def test_forks_copy_and_the_parent_stays(dense, parent):
    before = [t.clone() for layer in parent.attention_layers for t in (layer.kept_keys, layer.kept_values)]
    expected = [generate(dense, question, parent.fork(), new=True) for question in QUESTIONS]
    frozen = FrozenCache(parent, ROOM)
    forward(dense, QUESTIONS[0][:, :3], frozen)
    child = frozen.fork()
    mine, theirs = ({p: name for name, (p, *_) in places(c).items()} for c in (child, frozen))
    assert {mine[place].split(".")[1] for place in mine.keys() & theirs.keys()} == {"kept_positions"}
    forward(dense, QUESTIONS[2], frozen)
    assert torch.equal(generate(dense, QUESTIONS[0][:, 3:], child, new=True), expected[0])
    child.rewind()
    assert torch.equal(generate(dense, QUESTIONS[2], child, new=True), expected[2])
    assert [torch.equal(a, b) for a, b in zip(
        before, [t for layer in parent.attention_layers for t in (layer.kept_keys, layer.kept_values)], strict=True
    )] == [True] * 4  # fmt: skip


@pytest.mark.core
def test_nothing_moves_and_nothing_grows(dense, attention, parent):
    frozen = FrozenCache(parent, ROOM)
    before = places(frozen)
    for question in QUESTIONS:
        forward(dense, question, frozen)
    generate(dense, random_ids(2, seed=1), frozen, 8, new=True)
    assert places(frozen) == before
    held = frozen.attention_layers[0]
    assert held.stored_keys.shape[2] == parent.attention_layers[0].kept_length + ROOM


def test_it_serves_a_session(dense, parent):
    class Tokenizer:
        def __call__(self, text: str, **kwargs: Any) -> Any:
            return {"input_ids": [int(word) for word in text.split()]}

        def decode(self, ids: Any, **kwargs: Any) -> str:
            return " ".join(str(int(i)) for i in ids)

    text = " ".join(str(int(i)) for i in QUESTIONS[0][0])
    answers = [Session(dense, Tokenizer(), cache).ask(text, max_new_tokens=5) for cache in
               (parent, FrozenCache(parent, ROOM))]  # fmt: skip
    assert answers[0] == answers[1]


# -- compiled programs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_ten_steps_of_many_children_are_one_graph(compilable, compiler, implementation):
    compilable.set_attn_implementation(implementation)
    cache, step = compacted(compilable, CONTEXT, kept_fraction=0.3), compiler(compilable)
    expected = [decode(compilable, compilable, question, cache.fork()) for question in QUESTIONS]
    frozen = FrozenCache(cache, ROOM)
    before = places(frozen)
    assert_same(decode(compilable, step, QUESTIONS[0], frozen), expected[0])
    assert places(frozen) == before
    frozen.rewind()
    assert_same(decode(compilable, step, QUESTIONS[1], frozen), expected[1])
    assert_same(decode(compilable, step, QUESTIONS[2], FrozenCache(cache, ROOM)), expected[2])
    frozen.rewind()
    forward(compilable, QUESTIONS[0][:, :2], frozen)
    assert_same(decode(compilable, step, QUESTIONS[0][:, 2:], frozen.fork()), expected[0])
    assert graphs() == 1
    compilable.set_attn_implementation("sdpa")


@pytest.mark.parametrize("family", [name for name in FROZEN_FAMILIES if name != "qwen3_5"])
def test_families_compile_into_one_graph(compiler, family):
    model = small(family, "linear_attention", "full_attention")
    cache, step = compacted(model, CONTEXT, kept_fraction=0.3), compiler(model)
    expected = decode(model, model, QUESTIONS[0], cache.fork(), 4)
    assert_same(decode(model, step, QUESTIONS[0], FrozenCache(cache, ROOM), 4), expected)
    assert graphs() == 1


def test_ragged_rows_compiled_with_aot(compilable, compiler):
    """Functionalised graphs, as inductor has them: every write in place must come out of them again."""
    rows = [random_ids(43, seed=1), random_ids(11, seed=2)]
    ids, mask = left_padded(rows)
    cache = compacted(compilable, ids, mask=mask, kept_fraction=0.3)
    given = padded(F.pad(mask, (0, 5), value=1), 5)
    question, step = random_ids(5, rows=2, seed=3), compiler(compilable, "aot_eager")
    expected = decode(compilable, compilable, question, cache.fork(), **given)
    frozen = FrozenCache(cache, ROOM)
    assert_same(decode(compilable, step, question, frozen, **given), expected)
    assert graphs() == 1
    assert frozen.get_seq_length() == 43 + 5 + 10
    # What compiled steps have seen is known afterwards.
    said = torch.cat([question, expected[:, :-1].argmax(-1)], 1)
    assert torch.equal(frozen.context.late_ids[:, 6:15], said[:, 5:])
    frozen.context.catch_up()
    assert frozen.context.tokens.ids.shape[1] == frozen.context.tokens.padding.shape[1] == 58


def test_generate_compiles_by_its_own_rule(compilable, compiler):
    config = CompileConfig(backend="eager", fullgraph=True, mode=None)
    config._compile_all_devices = True
    cache = compacted(compilable, CONTEXT, kept_fraction=0.3)
    question = QUESTIONS[0]
    expected = generate(compilable, question, cache.fork(), 8, new=True)
    assert graphs() == 0
    frozen = FrozenCache(cache, ROOM)
    assert torch.equal(generate(compilable, full(question), frozen, 8, compile_config=config), expected)
    assert graphs() == 1
    assert (frozen.get_seq_length(), frozen.room) == (43 + 6 + 7, ROOM - 13)
    again = torch.cat([full(question), expected, random_ids(2, seed=8)], 1)
    fork = cache.fork()
    generate(compilable, question, fork, 8, new=True)
    assert torch.equal(generate(compilable, again, frozen, 8, compile_config=config),
                       generate(compilable, again, fork, 8))  # fmt: skip
    assert graphs() == 1
    # A cache that is not frozen is not compiled.
    assert torch.equal(generate(compilable, question, cache.fork(), 8, new=True, compile_config=config), expected)
    assert graphs() == 1


# -- failures ----------------------------------------------------------------------------------------------------------


class InterruptedForwardError(Exception):
    pass


@pytest.mark.core
@pytest.mark.parametrize("layer", [0, 3, 7])
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_failed_forward_leaves_no_trace(dense, parent, layer, tokens):
    question, frozen = QUESTIONS[0], FrozenCache(parent, ROOM)
    expected = forward(dense, question, parent.fork())
    forward(dense, question[:, :2], frozen)
    before = places(frozen)

    def fail(*_: Any) -> None:
        raise InterruptedForwardError

    handle = dense.model.layers[layer].mlp.register_forward_hook(fail)
    try:
        with pytest.raises(InterruptedForwardError):
            forward(dense, random_ids(tokens, seed=4), frozen)
        with pytest.raises(InterruptedForwardError):
            forward(dense, random_ids(tokens, rows=2, seed=4), frozen)
    finally:
        handle.remove()
    assert (frozen.batch_size, frozen.get_seq_length(), frozen.room) == (1, 45, ROOM - 2)
    assert places(frozen) == before
    assert_same(forward(dense, question[:, 2:], frozen), expected[:, 2:])


def test_a_compiled_step_without_room_leaves_no_trace(compilable, compiler):
    cache, question = compacted(compilable, CONTEXT, kept_fraction=0.3), QUESTIONS[0]
    step, frozen = compiler(compilable, "aot_eager"), FrozenCache(cache, 8)
    expected = forward(compilable, question, cache.fork())
    decode(compilable, step, question, frozen, 2)
    for _ in range(2):
        with pytest.raises(IndexError):
            step(input_ids=question[:, :1], **cache_kwargs(compilable, frozen))
    assert (frozen.get_seq_length(), frozen.room) == (43 + 8, 0)
    frozen.rewind()
    assert_same(forward(compilable, question, frozen), expected)


@pytest.mark.core
def test_too_little_room_is_refused_before_anything_runs(dense, parent):
    frozen = FrozenCache(parent, 9)
    with pytest.raises(CacheStateError, match=r"10 more tokens do not fit .* room for 9 .* larger number"):
        forward(dense, random_ids(10), frozen)
    with pytest.raises(CacheStateError, match="10 more tokens of question and answer"):
        generate(dense, QUESTIONS[0], frozen, 5, new=True)
    with pytest.raises(CacheStateError, match="10 more tokens of question and answer"):
        generate(dense, full(QUESTIONS[0]), frozen, 5)
    assert frozen.get_seq_length() == 43
    assert torch.equal(
        generate(dense, QUESTIONS[0], frozen, 4, new=True), generate(dense, QUESTIONS[0], parent.fork(), 4, new=True)
    )
    assert frozen.room == 0
    with pytest.raises(CacheStateError, match="rewind"):
        forward(dense, random_ids(1), frozen)


@pytest.mark.core
def test_what_cannot_be_frozen_says_so(dense, parent):
    for family, word in (("lara_mini", "sliding"), ("qwen4_exp", "indexer")):
        if family in FAMILIES:
            with pytest.raises(CacheStateError, match=word):
                FrozenCache(compacted(tiny_model(family), CONTEXT, kept_fraction=0.3), ROOM)
    with pytest.raises(CacheStateError, match="compact"):
        FrozenCache(prefilled(dense, CONTEXT), ROOM)
    with pytest.raises(CacheStateError, match="growing"):
        FrozenCache(compacted(dense, CONTEXT, growing=True), ROOM)
    with pytest.raises(CacheStateError, match="already"):
        FrozenCache(FrozenCache(parent, ROOM), ROOM)
    with pytest.raises(TypeError, match="GateSightCache"):
        FrozenCache(dense, ROOM)
    for room in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="max_new_tokens"):
            FrozenCache(parent, room)
    quantised = compacted(dense, random_ids(12), entries_dtype="int8")
    with pytest.raises(CacheStateError, match="quantised entries cannot be frozen"):
        FrozenCache(quantised, 8)


@pytest.mark.core
def test_what_a_frozen_cache_does_not_do_says_so(dense, parent, tmp_path):
    frozen = FrozenCache(parent, ROOM)
    for change in (frozen.compact, frozen.reset, lambda: frozen.fork(kept_fraction=0.1),
                   lambda: frozen.fork(scorer=Recorder()), lambda: frozen.save(tmp_path / "cache"),
                   lambda: FrozenCache.load(tmp_path / "cache", dense)):  # fmt: skip
        with pytest.raises(CacheStateError):
            change()
    ids, mask = left_padded([random_ids(3), random_ids(5)])
    with pytest.raises(ValueError, match="separate forks"):
        generate(dense, ids, frozen, attention_mask=F.pad(mask, (43, 0), value=1))
    with pytest.raises(ValueError, match="attention_mask"):
        forward(dense, QUESTIONS[0], frozen, attention_mask=torch.ones(1, 3))
    dense.requires_grad_(True)
    with torch.enable_grad(), pytest.raises(CacheStateError, match="no_grad"):
        forward(dense, QUESTIONS[0], frozen)
    dense.requires_grad_(False)
    dense.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="sdpa"):
        forward(dense, QUESTIONS[0], frozen, attention_mask=torch.ones(1, 49))
    dense.config._attn_implementation = "sdpa"
    assert torch.equal(
        generate(dense, QUESTIONS[0], frozen, new=True), generate(dense, QUESTIONS[0], parent.fork(), new=True)
    )
