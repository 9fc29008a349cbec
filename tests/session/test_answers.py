"""Streams of an answer, and many questions at once."""

import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from gatesight_hf import Session
from gatesight_hf.session.answering import answer, answer_many

from ..helpers.chats import TEXT, chat_tokenizer
from ..helpers.models import KeyNorm
from ..helpers.paths import ROOT
from ..helpers.running import CONTEXT, LENGTH, compacted, random_ids

pytestmark = pytest.mark.core

QUESTIONS = ["Who?", "What did it bring?", "Why?", "Is it 412?", "Who keeps it?", "7?", "Who?", "Where is the ledger?"]


@pytest.fixture
def session(model: Any) -> Session:
    return Session.open(model, chat_tokenizer(), KeyNorm(), TEXT * 3, kept_fraction=0.4)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "gatesight-stream"]


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", QUESTIONS[:2])
def test_pieces_are_the_answer(session, question):
    pieces = list(session.stream(question, 24))
    assert "".join(pieces) == session.ask(question, 24)
    assert not threads() and session.history == []


def test_pieces_of_a_turn_are_kept(session):
    other = Session(session.model, session.tokenizer, session._document)
    assert "".join(session.stream("Who?", 9, chat=True)) == other.chat("Who?", 9)
    assert session.history == other.history and session.chat("Why?", 9) == other.chat("Why?", 9)


def test_pieces_come_before_the_end(session):
    seen, steps = [], []
    handle = session.model.lm_head.register_forward_hook(lambda *_: steps.append(len(seen)) or time.sleep(0.02))
    try:
        for piece in session.stream("Who?", 24):
            seen.append(piece)
    finally:
        handle.remove()
    assert steps[-1] > 0, "the reader had pieces while the model was at work"


@pytest.mark.parametrize("chat", [False, True])
def test_leaving_ends_the_generation_and_leaves_the_session_as_it_was(session, chat):
    steps = []
    handle = session.model.lm_head.register_forward_hook(lambda *_: steps.append(0) or time.sleep(0.01))
    before = session.cache.get_seq_length()
    try:
        for _ in session.stream("Who?", 200, chat=chat):
            break
        assert not threads() and len(steps) < 100
        pieces = session.stream("Who?", 200, chat=chat)
        next(pieces)
        with pytest.raises(KeyboardInterrupt):
            pieces.throw(KeyboardInterrupt)  # as Ctrl-C while the reader waits
    finally:
        handle.remove()
    assert not threads() and session.history == [] and session.cache.get_seq_length() == before
    assert "".join(session.stream("Who?", 9)) == session.ask("Who?", 9)


def test_an_error_of_the_model_reaches_the_reader(session, monkeypatch):
    calls = []
    forward = session.model.lm_head.forward

    def failing(*args: Any) -> Any:
        calls.append(0)
        return forward(*args) if len(calls) < 6 else 1 / 0

    monkeypatch.setattr(session.model.lm_head, "forward", failing)
    pieces: list[str] = []
    with pytest.raises(ZeroDivisionError):
        pieces.extend(session.stream("Who?", 30))
    assert not threads() and len(calls) == 6
    monkeypatch.undo()
    assert session.ask("Who?", 30).startswith("".join(pieces))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_beams": 2}, ValueError),
        ({"do_sample": True, "num_return_sequences": 2}, ValueError),
        ({"streamer": object()}, TypeError),
        ({"attention_mask": torch.ones((1, 1))}, TypeError),
        ({"chat": 1}, ValueError),
        ({"max_new_tokens": 0}, ValueError),
    ],
)
def test_options_that_a_stream_cannot_have(session, options, error):
    with pytest.raises(error):
        list(session.stream("Who?", **{"max_new_tokens": 3, **options}))
    assert not threads()


def test_a_callers_stopping_criteria_hold(session):
    whole = session.ask("Who?", 24)
    cut = "".join(session.stream("Who?", 24, stopping_criteria=[lambda ids, _: torch.tensor([ids.shape[1] >= 20])]))
    assert whole.startswith(cut) and len(cut) < len(whole)


@pytest.mark.parametrize("within", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_a_stream_runs_in_its_readers_modes(session, within):
    seen = []
    modes = lambda *_: seen.append((torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")))  # noqa: E731
    handle = session.model.lm_head.register_forward_hook(modes)
    try:
        with within():
            expected = session.ask("Who?", 6)
            of_ask = len(seen)
            assert "".join(session.stream("Who?", 6)) == expected
    finally:
        handle.remove()
    assert set(seen[of_ask:]) == set(seen[:of_ask]) != {(False, False)}


def test_a_program_may_end_within_a_stream():
    program = """
from gatesight_hf import Session
from tests.helpers.chats import TEXT, chat_tokenizer
from tests.helpers.models import KeyNorm
from tests.session.conftest import chat_model
session = Session.open(chat_model(), chat_tokenizer(), KeyNorm(), TEXT, kept_fraction=0.4)
pieces = session.stream("Who?", 1_000_000, eos_token_id=[])
print(bool(next(pieces)))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert (run.returncode, run.stdout.strip()) == (0, "True"), run.stderr[-2000:]


def test_a_generation_config_says_how(session):
    config = GenerationConfig(do_sample=True, temperature=9.0)
    assert len({session.ask("Who?", 6, generation_config=config) for _ in range(5)}) > 1
    assert session.ask("Who?", 6, generation_config=GenerationConfig()) == session.ask("Who?", 6)


# -- many questions ----------------------------------------------------------------------------------------------------


def test_many_answers_are_those_of_one_by_one(any_model):
    cache = compacted(any_model, CONTEXT, scorer=KeyNorm(), kept_fraction=0.4, allocation="flat")
    questions = [random_ids(length, seed=seed)[0].tolist() for seed, length in enumerate((4, 7, 4, 4, 5))]
    limits = [4, 4, 4, 4, 2]
    asked = zip(questions, limits, strict=True)
    expected = [answer(any_model, cache.fork(), ids, limit, {}) for ids, limit in asked]
    assert len(set(map(tuple, expected))) > 2 and len(expected[-1]) == 2
    for batch_size in (2, 16):
        assert answer_many(any_model, cache, questions, limits, batch_size, {}) == [expected]


def test_rows_of_a_cache_are_answered_each(model):
    rows = [compacted(model, random_ids(LENGTH, seed=seed), scorer=KeyNorm(), kept_fraction=0.4) for seed in (3, 4)]
    both = compacted(
        model, torch.cat([random_ids(LENGTH, seed=seed) for seed in (3, 4)]), scorer=KeyNorm(), kept_fraction=0.4
    )
    questions = [random_ids(length, seed=seed)[0].tolist() for seed, length in enumerate((4, 7, 4, 4))]
    expected = [[answer(model, row.fork(), ids, 5, {}) for ids in questions] for row in rows]
    assert answer_many(model, both, questions, [5] * 4, 4, {}) == expected != expected[::-1]


def test_questions_of_equal_length_share_a_forward(session, monkeypatch):
    rows, forward = [], session.model.lm_head.forward
    monkeypatch.setattr(session.model.lm_head, "forward", lambda x: rows.append(len(x)) or forward(x))
    session.ask_many(["Who?", "Why?", "Who?", "Who keeps the ledger?"], 1)
    assert sorted(rows) == [1, 3]


def test_answers_that_end_early_are_cut_in_their_row(model):
    tokenizer = chat_tokenizer()
    session = Session.open(model, tokenizer, KeyNorm(), TEXT * 3, kept_fraction=0.4)
    asked = [f"{a}{b}?" for a in "0123" for b in "012"]
    prompt = session._document.prompt
    found = [answer(model, session.cache.fork(), prompt.turn((), text), 9, {}) for text in asked]
    # End tokens that the model does choose, but not at once: rows of one batch end at different steps.
    ends = sorted({ids[5] for ids in found if len(ids) > 6} - {token for ids in found for token in ids[:3]})
    expected = [session.ask(question, 9, eos_token_id=ends) for question in asked]
    assert len({len(text) for text in expected}) > 2
    for pad in ({}, {"pad_token_id": None}):
        assert session.ask_many(asked, 9, eos_token_id=ends, **pad) == expected


@pytest.mark.parametrize("end", [{}, {"eos_token_id": None}])
@pytest.mark.parametrize("kind", ["none", "strings", "criteria", "config"])
def test_answers_that_end_otherwise_are_those_of_one_by_one(session, kind, end, monkeypatch):
    asked = [f"{a}{b}?" for a in "0123" for b in "012"]
    monkeypatch.setattr(session.model.generation_config, "eos_token_id", session.tokenizer(" Santos").input_ids[-1])
    strings = {"stop_strings": ["s", "e"]}
    options: dict[str, Any] = {
        "none": {},
        "strings": {**strings, "tokenizer": session.tokenizer},
        "criteria": {"stopping_criteria": [lambda ids, _: ids[:, -1] % 3 == 0]},
        "config": {"generation_config": GenerationConfig(**strings), "tokenizer": session.tokenizer},
    }[kind]
    expected = [session.ask(question, 12, **options, **end) for question in asked]
    assert len({len(text) for text in expected}) > 2
    assert session.ask_many(asked, 12, **options, **end) == expected


@pytest.mark.parametrize(
    ("questions", "options", "error", "message"),
    [
        ("Who?", {}, TypeError, "a list of strings"),
        (["Who?", 3], {}, TypeError, "one string"),
        (["Who?", " "], {}, ValueError, "no tokens"),
        (["Who?"], {"batch_size": 0}, ValueError, "batch_size"),
        (["Who?"], {"num_return_sequences": 2, "do_sample": True}, ValueError, "one answer"),
        (["Who?"], {"streamer": 1}, TypeError, "streamer"),
    ],
)
def test_wrong_questions_are_errors_before_anything_is_answered(session, questions, options, error, message):
    with pytest.raises(error, match=message):
        session.ask_many(questions, 2, **options)


def test_no_questions_have_no_answers(session):
    assert session.ask_many([]) == []
