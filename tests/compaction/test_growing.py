"""Growing caches: every compaction evicts what the policy says, from its time on, and nothing else changes."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gatesight_hf import CacheStateError, Estimator, GateSightCache, Session
from gatesight_hf.entries import GateSightAttentionLayer
from gatesight_hf.entries.view import apply_rotary
from gatesight_hf.methods import (
    HiddenStateScorer,
    KeyDiff,
    KeyNorm,
    KVzip,
    LagKV,
    OracleScorer,
    RandomScorer,
    SnapKV,
    StreamingLLM,
    TriAttention,
)
from gatesight_hf.methods.hidden import HiddenStateConfig
from gatesight_hf.models import HybridSpec
from gatesight_hf.reference import ESTIMATOR_PATH
from gatesight_hf.scoring import Needs, Recorder, Recording, Scores

from ..helpers.contents import digest
from ..helpers.growing_oracle import Row, Talk, hiding
from ..helpers.models import FAMILIES, random_estimator, random_tensors, tiny_model
from ..helpers.oracle import assert_same
from ..helpers.running import compacted, forward, generate, prefilled, random_ids

pytestmark = pytest.mark.core

CONTEXT = 43
LENGTHS = (CONTEXT, 17, 5)
#: What comes after a compaction, in three turns: chunks of several tokens, single ones, and both.
TURNS = ([9, 3], [1, 1, 1, 1], [6, 1])


def contexts_of(lengths: tuple[int, ...]) -> list[Tensor]:
    return [random_ids(length, seed=length) for length in lengths]


def three_turns(talk: Talk) -> None:
    talk.cache.compact()
    for i, turn in enumerate(TURNS):
        for k, length in enumerate(turn):
            talk.feed(random_ids(length, rows=len(talk.rows), seed=50 + 10 * i + k))
        talk.cache.compact()
    talk.feed(random_ids(5, rows=len(talk.rows), seed=99))


@pytest.mark.parametrize("lengths", [(CONTEXT,), LENGTHS], ids=["one row", "ragged"])
@pytest.mark.parametrize("chunks", [None, [20, 1, 22]], ids=["at once", "chunks"])
def test_three_compactions_equal_the_oracle(dense, plain, attention, lengths, chunks):
    talk = Talk.begin(dense, contexts_of(lengths), chunks)
    three_turns(talk)
    assert [length for length, _ in talk.rows[0].compactions] == [43, 55, 59, 66]
    talk.check(plain)


@pytest.mark.parametrize("allocation", ["flat", "pyramid", "head", "global"])
@pytest.mark.parametrize(("prefix", "suffix"), [(0, 0), (9, 0), (3, 4), (0, 14)])
def test_allocations_and_protection(dense, plain, allocation, prefix, suffix):
    options = {"allocation": allocation, "protected_prefix": prefix, "protected_suffix": suffix}
    talk = Talk.begin(dense, contexts_of(LENGTHS), **options)
    three_turns(talk)
    talk.check(plain)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen4_exp"])
def test_every_family(family):
    model, twin = tiny_model(family), tiny_model(family)
    twin.set_attn_implementation("eager")
    talk = Talk.begin(model, contexts_of((CONTEXT, 17)))
    three_turns(talk)
    talk.check(twin)


def test_a_cache_with_an_index_does_not_grow():
    model = tiny_model("qwen4_exp")
    with pytest.raises(ValueError, match="has an index over its entries"):
        GateSightCache(random_estimator(model), model, growing=True)


def test_hidden_states_of_new_tokens(dense, plain):
    config = HiddenStateConfig.for_model(HybridSpec.from_config(dense.config), "tiny", 64, 16)
    talk = Talk.begin(dense, contexts_of(LENGTHS), scorer=HiddenStateScorer(config, random_tensors(config)))
    three_turns(talk)
    talk.check(plain)


@pytest.mark.parametrize("lengths", [(CONTEXT,), LENGTHS], ids=["one row", "ragged"])
@pytest.mark.parametrize("every", [1, 4])
def test_a_cache_that_compacts_by_itself_within_generate(dense, plain, lengths, every):
    talk = Talk.begin(dense, contexts_of(lengths), growing=False, recompact_every=every)
    assert not talk.cache.is_compacted, "the first compaction is not its own"
    talk.cache.compact()
    talk.ask(random_ids(6, rows=len(lengths), seed=9), tokens=10)
    times = [length for length, _ in talk.rows[0].compactions]
    assert times == [CONTEXT, CONTEXT + 6, *range(CONTEXT + 6 + every, CONTEXT + 16, every)]
    talk.feed(random_ids(2, rows=len(lengths), seed=10))
    talk.check(plain)


def test_generate_from_nothing_compacts_its_prompt_and_then_its_tokens(dense, plain):
    talk = Talk.begin(dense, [random_ids(1)], recompact_every=3)
    talk.cache.reset()
    talk.rows = [Row(random_ids(0))]
    talk.ask(random_ids(CONTEXT, seed=4), tokens=9)
    assert [length for length, _ in talk.rows[0].compactions] == [43, 46, 49]
    talk.check(plain)


def test_the_oracle_can_tell(dense, plain):
    """The time of an eviction matters by far more than the tolerance."""
    talk = Talk.begin(dense, contexts_of((CONTEXT,)))
    three_turns(talk)
    (row,) = talk.rows
    for wrong in (row.compactions[:1], row.compactions[-1:], ()):
        with hiding(plain, replace(row, compactions=wrong).evicted_at(2)):
            expected = plain(row.ids, use_cache=False).logits[0]
        assert max(float((found - expected[s : s + len(found)]).abs().max()) for s, found in row.logits) > 1e-2


# -- budgets -----------------------------------------------------------------------------------------------------------


def test_the_budget_counts_everything_seen(dense):
    cache = compacted(dense, random_ids(40), kept_fraction=0.25, allocation="flat", protected_prefix=4, growing=True)
    assert cache.report().physical_lengths == [4 + 9, 4 + 9]
    for new, expected in ((20, [4 + 14, 4 + 14]), (1, [4 + 15, 4 + 14]), (7, [4 + 16, 4 + 16])):
        forward(dense, random_ids(new, seed=new), cache)
        report = cache.compact()
        assert report.physical_lengths == report.kept_per_layer[0] == expected
        assert [layer.evicted for layer in cache.attention_layers] == [report.logical_length - k for k in expected]
    assert report.achieved_fraction == pytest.approx(32 / (2 * 64))
    assert cache.compact() == report, "nothing new, nothing done"


def test_growing_layers_fill_whole_blocks_or_keep_all_they_have(dense):
    options = {"kept_fraction": 0.25, "allocation": "flat", "protected_prefix": 4, "block_size": 8, "growing": True}
    cache = compacted(dense, random_ids(40), **options)
    assert cache.report().physical_lengths == [16, 16]  # 4 + 9
    for new, expected in ((20, [24, 24]), (4, [24, 24]), (60, [40, 40])):  # 4 + 14, 4 + 15, 4 + 30
        forward(dense, random_ids(new, seed=new), cache)
        assert cache.compact().physical_lengths == expected
    cache.context.options = replace(cache.options, kept_fraction=1.0)
    forward(dense, random_ids(3, seed=3), cache)
    assert cache.compact().physical_lengths == [43, 43], "what was evicted is gone, and the last block is not full"


def test_a_layer_cannot_get_back_what_it_evicted(dense, monkeypatch):
    """Its share grew, but all it has is what it held and what is new."""
    cache = prefilled(dense, random_ids(40), kept_fraction=0.5, growing=True)
    monkeypatch.setattr(Recording, "gate_means", [[9.0, 1.0]])
    assert cache.compact().kept_per_layer == [[36, 4]]
    forward(dense, random_ids(4, seed=1), cache)
    monkeypatch.setattr(Recording, "gate_means", [[1.0, 9.0]])
    assert cache.compact().kept_per_layer == [[4, 4 + 4]]


def test_keeping_all_changes_nothing(dense):
    cache, whole = (prefilled(dense, random_ids(CONTEXT), kept_fraction=1.0, growing=True) for _ in range(2))
    for i in range(3):
        cache.compact()
        ids = random_ids(5, seed=i)
        assert torch.equal(forward(dense, ids, cache), forward(dense, ids, whole))


def test_what_a_growing_cache_holds(dense):
    cache = compacted(dense, random_ids(CONTEXT), kept_fraction=0.3, growing=True)
    (kept,) = cache.report().kept_per_layer
    assert cache.report().signal_bytes == 4 * 2 * sum(kept), "one float32 score for each entry and head"
    for i in range(70):
        forward(dense, random_ids(1, seed=i), cache)
    of_token = 6 * 3 * 4 * 4
    assert cache.report().signal_bytes == 4 * 2 * sum(kept) + 70 * of_token
    assert max(map(len, cache.context.recording._signals)) == 3, "64 + 4 + 2 tokens"
    cache.compact()
    assert cache.report().signal_bytes == 4 * 2 * sum(cache.report().kept_per_layer[0])
    fixed = compacted(dense, random_ids(CONTEXT), kept_fraction=0.3)
    forward(dense, random_ids(1), fixed)
    assert fixed.report().signal_bytes == 0, "recording goes on only where it was asked for"


# -- forks, rows, and many caches at once ------------------------------------------------------------------------------


def test_children_compact_on_their_own(dense, plain):
    parent = Talk.begin(dense, contexts_of(LENGTHS))
    parent.cache.compact()
    parent.feed(random_ids(3, rows=3, seed=1))
    before, children = digest(parent.cache), [parent.fork() for _ in range(2)]
    for i, child in enumerate(children):
        child.feed(random_ids(4 + i, rows=3, seed=i))
        child.cache.compact()
        child.feed(random_ids(2, rows=3, seed=10 + i))
    assert digest(parent.cache) == before
    grandchild = children[0].fork()
    grandchild.cache.compact()
    for talk in (grandchild, *children, parent):
        talk.feed(random_ids(2, rows=3, seed=20))
        talk.cache.compact()
        talk.feed(random_ids(2, rows=3, seed=21))
        talk.check(plain)


def test_one_parent_grows_into_a_batch(dense, plain):
    """Its row is repeated for the questions, and with it what was recorded and scored."""
    talk = Talk.begin(dense, contexts_of((CONTEXT,)), recompact_every=6)
    talk.cache.compact()
    talk.feed(random_ids(4, seed=1))
    talk.rows, talk.pads = talk.rows * 3, talk.pads * 3
    talk.feed(random_ids(3, rows=3, seed=2))
    talk.ask(random_ids(2, rows=3, seed=3), tokens=7)
    assert [length for length, _ in talk.rows[2].compactions] == [43, 50, 56]
    talk.check(plain)


def test_beams_are_compacted_by_their_own_signals(dense):
    """The score of the best sequence is that of its tokens in a cache that saw nothing else."""
    parent = compacted(dense, random_ids(CONTEXT), kept_fraction=0.3, recompact_every=2)
    question, single = random_ids(6, seed=9), parent.fork()
    output = dense.generate(
        question, attention_mask=torch.ones(1, CONTEXT + 6, dtype=torch.long), past_key_values=parent.fork(),
        num_beams=4, max_new_tokens=9, do_sample=False, length_penalty=0.0, return_dict_in_generate=True,
        output_scores=True)  # fmt: skip
    answer, total, logits = output.sequences[:, 6:], 0.0, forward(dense, question, single)[:, -1]
    for token in answer[0]:
        total += float(logits.log_softmax(-1)[0, token])
        logits = forward(dense, token.view(1, 1), single)[:, -1]
    assert float(output.sequences_scores[0]) == pytest.approx(total, abs=1e-4)
    greedy = generate(dense, question, parent.fork(), tokens=9, new=True)
    assert not torch.equal(greedy, answer), "beams that never cross prove nothing"


OPERATIONS = ("feed", "feed", "ask", "compact", "fork", "select")


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(
    lengths=st.lists(st.lists(st.integers(2, 30), min_size=1, max_size=3), min_size=2, max_size=2),
    every=st.sampled_from([None, 1, 5]),
    script=st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from(OPERATIONS), st.integers(1, 7)), min_size=4, max_size=10
    ),
)
def test_any_interleaving_equals_the_oracle(dense, plain, lengths, every, script):
    """Prefill chunks, compactions, forks, questions and changes of rows, on two caches of one model and their forks."""
    with torch.no_grad():
        options = ({"allocation": "gate", "recompact_every": every}, {"allocation": "global", "protected_prefix": 3})
        talks = [
            Talk.begin(dense, [random_ids(n, seed=n) for n in of_cache], **option)
            for of_cache, option in zip(lengths, options, strict=True)
        ]
        for i, (which, operation, size) in enumerate(script):
            talk = talks[which % len(talks)]
            ids = random_ids(size, rows=len(talk.rows), seed=1000 + i)
            if operation == "feed":
                talk.feed(ids)
            elif operation == "ask":
                talk.ask(ids, tokens=1 + size % 4)
            elif operation == "compact":
                talk.cache.compact()
            elif operation == "fork" and len(talks) < 4:
                talks.append(talk.fork())
            elif operation == "select":
                count = len(talk.rows)
                talk.select([(size * k + i) % count for k in range(1 + size % 3)])
        for talk in talks:
            talk.cache.compact()
            talk.feed(random_ids(2, rows=len(talk.rows), seed=7))
            talk.check(plain)


# -- failures ----------------------------------------------------------------------------------------------------------


class BoomError(Exception):
    """Raised by the tests only."""


def broken_scorer(monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    def score(self: Any, prefill: Any) -> Any:
        raise BoomError

    monkeypatch.setattr(Estimator, "score", score)
    return BoomError


def no_memory(monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    compact, calls = GateSightAttentionLayer.compact, []

    def second_fails(self: Any, *args: Any) -> None:
        calls.append(self)
        if len(calls) == 2:
            raise torch.OutOfMemoryError
        compact(self, *args)

    monkeypatch.setattr(GateSightAttentionLayer, "compact", second_fails)
    return torch.OutOfMemoryError


def interrupted(monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    no_memory(monkeypatch)
    monkeypatch.setattr(torch, "OutOfMemoryError", KeyboardInterrupt)
    return KeyboardInterrupt


FAILURES = [broken_scorer, no_memory, interrupted]


def hooks_of(model: Any) -> list[list[Any]]:
    return [[*m._forward_hooks.values(), *m._forward_pre_hooks.values()] for m in model.modules()]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_compaction_that_fails_changes_nothing(dense, plain, monkeypatch, failure, times):
    talk = Talk.begin(dense, contexts_of((CONTEXT, 17)))
    for i in range(times):
        talk.cache.compact()
        talk.feed(random_ids(5, rows=2, seed=i))
    before, hooks = digest(talk.cache), hooks_of(dense)
    with monkeypatch.context() as patch, pytest.raises(failure(patch)):
        talk.cache.compact()
    assert digest(talk.cache) == before
    assert all(a == b for a, b in zip(hooks, hooks_of(dense), strict=True))
    talk.feed(random_ids(3, rows=2, seed=8))
    talk.cache.compact()
    talk.feed(random_ids(2, rows=2, seed=9))
    talk.check(plain)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda f: f.__name__)
def test_a_forward_whose_compaction_fails_can_be_repeated(dense, plain, monkeypatch, failure):
    talk = Talk.begin(dense, contexts_of((CONTEXT, 17)), recompact_every=4)
    talk.cache.compact()
    talk.feed(random_ids(3, rows=2, seed=1))
    before, rows = digest(talk.cache), talk.rows
    with monkeypatch.context() as patch, pytest.raises(failure(patch)):
        forward(dense, random_ids(2, rows=2, seed=2), talk.cache)
    assert digest(talk.cache) == before
    talk.rows = rows
    talk.feed(random_ids(2, rows=2, seed=2))
    talk.feed(random_ids(2, rows=2, seed=3))
    talk.check(plain)


def test_a_question_that_fails_loses_nothing_recorded(dense, plain):
    talk = Talk.begin(dense, contexts_of((CONTEXT,)))
    talk.cache.compact()
    talk.feed(random_ids(3, seed=1))

    def fail(*_: object) -> None:
        raise BoomError

    handle = dense.model.layers[-2].mlp.register_forward_pre_hook(fail)
    with handle, pytest.raises(BoomError):
        forward(dense, random_ids(4, seed=2), talk.cache)
    talk.feed(random_ids(4, seed=3))
    talk.cache.compact()
    talk.feed(random_ids(1, seed=4))
    talk.check(plain)


# -- which scorers can -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scorer", [
    SnapKV(), LagKV(), OracleScorer(None, ((1,),)), KVzip(None, None), Scores([]), Recorder(Needs(query_moments=True)),
], ids=lambda s: type(s).__name__)  # fmt: skip
def test_scorers_of_whole_contexts_are_refused(dense, scorer, monkeypatch):
    monkeypatch.setattr(type(scorer), "check", lambda self, spec: None)
    for options in ({"growing": True}, {"recompact_every": 8}):
        with pytest.raises(ValueError, match=f"{type(scorer).__name__}.* cannot rate what comes after a compaction"):
            GateSightCache(scorer, dense, **options)
    parent = GateSightCache(Recorder(scorer.needs), dense)
    forward(dense, random_ids(5), parent)
    with pytest.raises(ValueError, match="cannot rate"):
        parent.fork(scorer=scorer, growing=True)


@pytest.mark.parametrize(
    "scorer", [KeyNorm(), KeyDiff(), RandomScorer(), StreamingLLM()], ids=lambda s: type(s).__name__
)
def test_scorers_of_single_keys_rate_what_is_new(dense, plain, scorer):
    talk = Talk.begin(dense, contexts_of(LENGTHS), scorer=scorer)
    three_turns(talk)
    talk.check(plain)


def test_positions_go_on(dense):
    """The first tokens and the latest ones, whatever the turns."""
    cache = compacted(dense, random_ids(3), scorer=StreamingLLM(sinks=4), allocation="flat", kept_fraction=0.5,
                      growing=True)  # fmt: skip
    for length in (17, 1, 1, 18):
        forward(dense, random_ids(length, seed=length), cache)
        cache.compact()
    # Of the first three tokens one layer could keep two and the other one.
    for layer, kept in zip(cache.attention_layers, ([0, 1, 3, *range(23, 40)], [0, 3, *range(22, 40)]), strict=True):
        assert layer.kept_positions[0].tolist() == [kept] * 2


def test_the_end_that_triattention_looks_back_from_moves_on(dense):
    """A score depends on distances alone: new keys rate as if they, turned back, stood at the start."""
    scorer = TriAttention.calibrate(dense, random_ids(30, seed=5))
    cache = compacted(dense, random_ids(CONTEXT), scorer=scorer, growing=True)
    forward(dense, random_ids(20, seed=6), cache)
    late = cache.prefill()
    assert late.before == [CONTEXT] and late.lengths == [20]
    cos, sin = late.rotary(torch.tensor([CONTEXT]))
    early = replace(late, before=[], keys=[apply_rotary(keys, cos, -sin) for keys in late.keys])
    unmoved = scorer.score(replace(late, before=[]))
    for found, expected, wrong in zip(scorer.score(late), scorer.score(early), unmoved, strict=True):
        assert_same(found, expected, 1e-4)
        assert (found - wrong).abs().max() > 1e-2


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4"])
def test_intervals_that_make_no_sense(dense, value):
    with pytest.raises(ValueError, match="recompact_every"):
        GateSightCache(random_estimator(dense), dense, recompact_every=value)
    with pytest.raises(ValueError, match="growing"):
        GateSightCache(random_estimator(dense), dense, growing=value if value is not True else None)


def test_a_cache_that_does_not_grow_says_how_to_make_one(dense):
    cache = compacted(dense, random_ids(CONTEXT))
    forward(dense, random_ids(4), cache)
    with pytest.raises(CacheStateError, match=r"compacted already.*growing=True or recompact_every=N"):
        cache.compact()
    grown = compacted(dense, random_ids(CONTEXT), growing=True)
    for act in (grown.score, lambda: grown.fork(kept_fraction=0.5), lambda: cache.fork(growing=True)):
        with pytest.raises(CacheStateError, match=r"compacted"):
            act()


def test_an_uncompacted_cache_can_be_forked_into_one_that_grows(dense, plain):
    parent = prefilled(dense, random_ids(CONTEXT), kept_fraction=0.3)
    child = parent.fork(recompact_every=4)
    child.compact()
    forward(dense, random_ids(5, seed=1), child)
    assert child.attention_layers[0].tail_length == 0
    parent.compact()
    with pytest.raises(CacheStateError, match="already"):
        parent.compact()


# -- sessions ----------------------------------------------------------------------------------------------------------


FACT = "One of the special magic numbers for {} is: {}. The sky is blue. "
QUESTION = "Question: what is the special magic number for {}? Answer:"


def test_a_session_remembers_what_it_kept(bundled):
    model, tokenizer = bundled
    session = Session.open(model, tokenizer, ESTIMATOR_PATH, FACT.format("amber-river", 4821) * 3, kept_fraction=0.5,
                           recompact_every=20)  # fmt: skip
    seen = session.report().logical_length
    plain = session.ask(QUESTION.format("amber-river"), max_new_tokens=4)
    assert plain == "4 8 2 1" and session.report().logical_length == seen, "only what is kept stays"
    session.add(FACT.format("silver-meadow", 7350) * 3)
    assert session.ask(QUESTION.format("silver-meadow"), max_new_tokens=4) == "7 3 5 0"
    added = session.report()
    assert added.achieved_fraction == pytest.approx(0.5, abs=0.02) and added.physical_lengths[0] < seen * 2
    for options in ({}, {"num_beams": 3}):
        assert session.chat(QUESTION.format("amber-river"), max_new_tokens=4, **options) == plain
        assert session.report() == added, "a conversation leaves the document as it is"


def test_a_session_that_fails_is_as_before(bundled, monkeypatch):
    model, tokenizer = bundled
    session = Session.open(model, tokenizer, RandomScorer(), FACT.format("amber-river", 4821), recompact_every=8)
    before = digest(session.cache)
    with pytest.raises(ValueError, match="text has no tokens"):
        session.add("")
    with pytest.raises(ValueError, match="one answer"):
        session.chat("the sky", 2, do_sample=True, num_return_sequences=2)
    with monkeypatch.context() as patch:
        monkeypatch.setattr(RandomScorer, "score", lambda self, prefill: [])
        for act in (lambda: session.add(FACT.format("a", 1)), lambda: session.chat("the sky", 9)):
            with pytest.raises(ValueError, match="gave scores of 0"):
                act()
        patch.undo()
    assert digest(session.cache) == before and session.history == []


def test_generating_with_a_growing_cache_warns_of_nothing(dense):
    parent = compacted(dense, random_ids(CONTEXT), kept_fraction=0.3, growing=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(dense, random_ids(5, seed=1), parent, tokens=3, new=True)
