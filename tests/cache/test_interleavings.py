"""Any order of what a user does with caches that do not grow, files among it, against the oracle of conversations."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ..helpers.growing_oracle import Talk, Watched
from ..helpers.running import random_ids

pytestmark = pytest.mark.core

OPERATIONS = ("feed", "feed", "ask", "compact", "fork", "select", "file", "file")


def through_a_file(talk: Talk) -> None:
    """Go on from what a file holds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.gatesight"
        talk.cache.save(path)
        talk.cache = Watched.load(path, talk.model, scorer=talk.cache.scorer)  # type: ignore[assignment]
    talk.cache.talk = talk


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(
    lengths=st.lists(st.lists(st.integers(2, 30), min_size=1, max_size=3), min_size=2, max_size=2),
    script=st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from(OPERATIONS), st.integers(1, 7)), min_size=5, max_size=12
    ),
)
def test_any_interleaving_equals_the_oracle(dense, plain, lengths, script):
    """Prefill chunks, compaction, forks, questions, changes of rows and files, on two caches of one model."""
    with torch.no_grad():
        options = ({"allocation": "gate"}, {"allocation": "global", "protected_prefix": 3})
        talks = [
            Talk.begin(dense, [random_ids(n, seed=n) for n in of_cache], growing=False, **option)
            for of_cache, option in zip(lengths, options, strict=True)
        ]
        for i, (which, operation, size) in enumerate(script):
            talk = talks[which % len(talks)]
            ids = random_ids(size, rows=len(talk.rows), seed=1000 + i)
            if operation == "feed":
                talk.feed(ids)
            elif operation == "ask":
                talk.ask(ids, tokens=1 + size % 4)
            elif operation == "compact" and not talk.cache.is_compacted:
                talk.cache.compact()
            elif operation == "file" and talk.cache.is_compacted:
                through_a_file(talk)
            elif operation == "fork" and len(talks) < 4:
                talks.append(talk.fork())
            elif operation == "select":
                count = len(talk.rows)
                talk.select([(size * k + i) % count for k in range(1 + size % 3)])
        for talk in talks:
            if not talk.cache.is_compacted:
                talk.cache.compact()
            through_a_file(talk)
            talk.feed(random_ids(2, rows=len(talk.rows), seed=7))
            talk.check(plain)
