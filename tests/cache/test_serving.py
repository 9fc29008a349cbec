"""One compacted parent serves any number of questions, however they are put to `generate`."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gatesight_hf import GateSightCache

from ..helpers.contents import digest, tensors_of
from ..helpers.models import random_estimator
from ..helpers.oracle import Oracle, assert_same, evicted_of
from ..helpers.running import CONTEXT, compacted, forward, generate, left_padded, prefilled, random_ids, steps

pytestmark = pytest.mark.core

QUESTIONS = [random_ids(length, seed=20 + length) for length in (6, 1, 9)]
PAD, EOS = 0, 1


def full(question: Tensor, context: Tensor = CONTEXT) -> Tensor:
    return torch.cat([context.expand(len(question), -1), question], dim=1)


def ones(*ids: Tensor) -> Tensor:
    return torch.ones(len(ids[-1]), sum(part.shape[1] for part in ids), dtype=torch.long)


@contextmanager
def special_tokens(model: Any, pad: int | None, eos: int | None = None) -> Iterator[None]:
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = pad, eos
    yield
    model.generation_config.pad_token_id = model.generation_config.eos_token_id = None


# -- forks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: f"{q.shape[1]} tokens")
def test_a_child_equals_a_fresh_run_bit_for_bit(dense, attention, parent, question):
    for _ in range(2):
        fresh = compacted(dense, CONTEXT, kept_fraction=0.3)
        expected = steps(dense, full(question), fresh)
        for found, step in zip(steps(dense, full(question), parent.fork()), expected, strict=True):
            assert torch.equal(found, step)


def test_the_order_of_questions_does_not_matter(dense, parent):
    """kvpress issues 27, 30, 114."""
    forward_order = [generate(dense, full(q), parent.fork()) for q in QUESTIONS]
    backward = [generate(dense, full(q), parent.fork()) for q in reversed(QUESTIONS)]
    assert all(torch.equal(a, b) for a, b in zip(forward_order, reversed(backward), strict=True))


def test_children_interleave(dense, parent):
    children = [parent.fork() for _ in QUESTIONS]
    pieces = [question.split(1, dim=1) for question in QUESTIONS]
    found: list[list[Tensor]] = [[] for _ in QUESTIONS]
    for i in range(max(map(len, pieces))):
        for child, tokens, logits in zip(children, pieces, found, strict=True):
            if i < len(tokens):
                logits.append(forward(dense, tokens[i], child))
    for tokens, logits in zip(pieces, found, strict=True):
        alone = parent.fork()
        assert torch.equal(torch.cat(logits, 1), torch.cat([forward(dense, token, alone) for token in tokens], 1))


def test_the_parent_is_not_changed_by_its_children(dense, parent):
    before, places = digest(parent), [t.data_ptr() for t in tensors_of([vars(layer) for layer in parent.layers])]
    for question in QUESTIONS:
        generate(dense, full(question), parent.fork())
        generate(dense, question, parent.fork(), new=True, num_beams=3)
        forward(dense, question.expand(2, -1), parent.fork().fork())
    parent.fork().reset()
    assert digest(parent) == before
    assert [t.data_ptr() for t in tensors_of([vars(layer) for layer in parent.layers])] == places


def test_children_share_entries_and_own_their_states(dense, parent):
    child = parent.fork()
    for mine, theirs in zip(child.attention_layers, parent.attention_layers, strict=True):
        assert mine.kept_keys.data_ptr() == theirs.kept_keys.data_ptr()
        assert mine.kept_values.data_ptr() == theirs.kept_values.data_ptr()
    states = [{t.data_ptr() for layer in c.gdn_layers for t in tensors_of(vars(layer))} for c in (child, parent)]
    assert len(states[0]) == 12
    assert not states[0] & states[1]


def test_a_conversation_goes_on_in_a_child(dense, parent, oracle):
    """Second turn with everything said so far, and second turn as new tokens after it."""
    child, first = parent.fork(), full(QUESTIONS[0])
    said = torch.cat([first, generate(dense, first, child)], 1)
    twin = child.fork()
    second = torch.cat([said, QUESTIONS[2]], 1)
    expected, logits = oracle.steps(second)
    for ids, cache in ((second, child), (second[:, twin.get_seq_length() :], twin)):
        tokens, found = steps(dense, ids, cache, new=cache is twin)
        assert torch.equal(tokens, expected)
        assert_same(found, logits)


def test_an_uncompacted_cache_can_be_forked(dense):
    whole = prefilled(dense, CONTEXT, kept_fraction=0.3)
    before, child = digest(whole), whole.fork()
    child.compact()
    assert digest(whole) == before
    assert not whole.is_compacted
    question = QUESTIONS[0]
    expected = generate(dense, full(question), child.fork())
    forward(dense, question, whole.fork())
    whole.compact()
    assert torch.equal(generate(dense, full(question), whole), expected)


# -- ways to ask -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: f"{q.shape[1]} tokens")
def test_every_way_to_pass_a_question_is_the_same(dense, attention, parent, oracle, question):
    ways: dict[str, tuple[Tensor, dict[str, Any]]] = {
        "all ids": (full(question), {}),
        "all ids and mask": (full(question), {"attention_mask": ones(CONTEXT, question)}),
        "new ids, whole mask": (question, {"attention_mask": ones(CONTEXT, question)}),
    }
    tokens, logits = oracle.steps(full(question))
    for way, (ids, arguments) in ways.items():
        found, found_logits = steps(dense, ids, parent.fork(), **arguments)
        assert torch.equal(found, tokens), way
        assert_same(found_logits, logits)


def test_asking_does_not_compact_again(dense, parent):
    child = parent.fork()
    generate(dense, full(QUESTIONS[0]), child)
    assert child.report().kept_per_layer == parent.report().kept_per_layer
    assert [layer.tail_length for layer in child.attention_layers] == [QUESTIONS[0].shape[1] + 3] * 2


def test_an_uncompacted_cache_is_compacted_with_the_question(dense, plain):
    cache, ids = prefilled(dense, CONTEXT, kept_fraction=0.3), full(QUESTIONS[0])
    tokens, logits = steps(dense, ids, cache)
    with Oracle(plain, evicted_of(cache, 0, ids.shape[1])) as oracle:
        expected, expected_logits = oracle.steps(ids)
    assert torch.equal(tokens, expected)
    assert_same(logits, expected_logits)


@pytest.mark.parametrize("form", ["all", "new"])
def test_beams_equal_the_oracle(dense, attention, parent, oracle, form):
    """transformers issue 42257: beams need the states reordered too."""
    options = {"num_beams": 3, "num_return_sequences": 2, "tokens": 6}
    ids = full(QUESTIONS[0]) if form == "all" else QUESTIONS[0]
    found = generate(dense, ids, parent.fork(), new=form == "new", **options)
    assert found.shape == (2, 6)
    assert torch.equal(found, oracle.generate(full(QUESTIONS[0]), **options))


def test_beams_from_nothing_equal_the_oracle(dense, plain):
    cache = GateSightCache(random_estimator(dense), dense, kept_fraction=0.3)
    found = generate(dense, CONTEXT, cache, num_beams=3, tokens=6)
    with Oracle(plain, evicted_of(cache, 0, CONTEXT.shape[1])) as oracle:
        assert torch.equal(found, oracle.generate(CONTEXT, num_beams=3, tokens=6))


@pytest.mark.parametrize("sequences", [1, 3])
def test_sampling_with_a_seed_equals_the_oracle(dense, parent, oracle, sequences):
    def sample(run: Any, ids: Tensor, *cache: Any) -> Tensor:
        torch.manual_seed(5)
        return run(ids, *cache, do_sample=True, num_return_sequences=sequences, tokens=8)

    expected = sample(oracle.generate, full(QUESTIONS[0]))
    assert expected.shape == (sequences, 8)
    for ids, new in ((full(QUESTIONS[0]), False), (QUESTIONS[0], True)):
        assert torch.equal(sample(partial(generate, dense, new=new), ids, parent.fork()), expected)


# -- several questions at once -----------------------------------------------------------------------------------------


def answers(dense: Any, parent: GateSightCache, questions: list[Tensor]) -> Tensor:
    return torch.cat([generate(dense, full(question), parent.fork()) for question in questions])


@pytest.mark.parametrize("form", ["all", "new", "beams"])
def test_one_parent_answers_a_batch(dense, attention, parent, form):
    questions = [random_ids(6, seed=seed) for seed in range(3)]
    batch, options = torch.cat(questions), {"num_beams": 2} if form == "beams" else {}
    expected = torch.cat([generate(dense, full(question), parent.fork(), **options) for question in questions])
    found = generate(dense, full(batch) if form == "all" else batch, parent.fork(), new=form != "all", **options)
    assert torch.equal(found, expected)


def test_padded_questions_are_refused_and_named(dense, attention, parent):
    """A pad between context and question would decay GDN states and enter their convolutions."""
    ids, mask = left_padded(QUESTIONS)
    child, whole = parent.fork(), torch.cat([ones(CONTEXT).expand(3, -1), mask], 1)
    with pytest.raises(ValueError, match="separate forks"):
        generate(dense, ids, child, attention_mask=whole)
    assert torch.equal(generate(dense, QUESTIONS[0], child, new=True), answers(dense, parent, QUESTIONS[:1]))


def test_a_pad_token_that_also_ends_sequences_is_no_padding(dense, parent, oracle):
    """As in transformers: where both are one token, it cannot tell what is padding."""
    question = QUESTIONS[0].clone()
    question[0, 2] = EOS
    expected = oracle.generate(full(question))
    with special_tokens(dense, EOS, EOS):
        assert torch.equal(
            generate(dense, question, parent.fork(), new=True, min_new_tokens=4, eos_token_id=[EOS]), expected
        )


@pytest.mark.parametrize("form", ["all", "new"])
@pytest.mark.parametrize("per_row", [1, 2])
def test_a_ragged_parent_answers_for_each_row(dense, attention, form, per_row):
    rows = [random_ids(43, seed=1), random_ids(11, seed=2)]
    ids, mask = left_padded(rows)
    cache = GateSightCache(random_estimator(dense), dense, kept_fraction=0.3)
    dense(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0), past_key_values=cache)
    cache.compact()
    questions = [random_ids(6, seed=30 + i) for i in range(2 * per_row)]
    batch, repeated = torch.cat(questions), mask.repeat_interleave(per_row, 0)
    given: dict[str, Any] = {}
    if form == "all":
        given = {"attention_mask": F.pad(repeated, (0, 6), value=1)}
        batch = torch.cat([ids.repeat_interleave(per_row, 0), batch], 1)
    found = generate(dense, batch, cache.fork(), new=form == "new", **given)
    for i, question in enumerate(questions):
        row = rows[i // per_row]
        alone = compacted(dense, row, kept_fraction=0.3)
        assert torch.equal(found[i : i + 1], generate(dense, full(question, row), alone))


# -- reset -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [False, True])
def test_a_reset_cache_is_as_new(dense, parent, used):
    if used:
        generate(dense, QUESTIONS[0].expand(2, -1), parent, new=True)
    parent.reset()
    new = GateSightCache(random_estimator(dense), dense, kept_fraction=0.3)
    assert digest(parent) == digest(new)
    assert (parent.get_seq_length(), parent.batch_size, parent.is_compacted) == (0, -1, False)
    context = random_ids(31, seed=77)
    found, expected = (steps(dense, context, cache) for cache in (parent, new))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert parent.report().kept_per_layer == new.report().kept_per_layer
