"""Interrupts at any moment of a session's calls: what was not finished was not begun."""

import random
import signal
import threading
from typing import Any

from gatesight_hf import Session

from ..helpers.chats import REASONING, TEXT, chat_tokenizer
from ..helpers.models import KeyNorm

QUESTIONS = ["Who?", "Why is it?", "What did it bring?"]
TRIALS = 60


def opened(model: Any) -> Session:
    return Session.open(model, chat_tokenizer(REASONING), KeyNorm(), TEXT, kept_fraction=0.4)


def test_random_interrupts_lose_nothing(model):
    session, other = opened(model), opened(model)
    expected = [other.chat(question, 6) for question in QUESTIONS]
    alone = other.ask("Who?", 6)
    calls = {
        "chat": lambda question: session.chat(question, 6),
        "stream": lambda question: "".join(session.stream(question, 6, chat=True)),
        "ask": lambda _: session.ask("Who?", 6),
        "ask_many": lambda _: session.ask_many(["Who?", "Who?"], 6),
    }
    armed = threading.Event()

    def interrupt(*_: Any) -> None:
        if armed.is_set():  # nothing but the call is interrupted
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    chance, interrupted = random.Random(0), 0
    try:
        for _ in range(TRIALS):
            if len(session.history) == 2 * len(QUESTIONS):
                session.reset_chat()
            turn, way = len(session.history) // 2, chance.choice(list(calls))
            answer: Any = None
            try:
                armed.set()
                signal.setitimer(signal.ITIMER_REAL, 0.002 + 0.15 * chance.random())
                answer = calls[way](QUESTIONS[turn])
                armed.clear()
            except KeyboardInterrupt:
                armed.clear()
                interrupted += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            if answer is not None:
                assert answer == {"ask": alone, "ask_many": [alone, alone]}.get(way, expected[turn])
            said = [message["content"] for message in session.history[1::2]]
            assert said == expected[: len(said)]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 5
    assert not [thread for thread in threading.enumerate() if thread.name == "gatesight-stream"]
    session.reset_chat()
    assert [session.chat(question, 6) for question in QUESTIONS] == expected
