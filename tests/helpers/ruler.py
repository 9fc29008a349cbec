"""RULER's items from small sources, counted in words and punctuation marks."""

import json
import re
from typing import Any

from gatesight_eval.suites.items import Item
from gatesight_eval.suites.ruler import Sources, generate

from .paths import DATA

RULER = DATA / "ruler"
SOURCES = Sources(haystack=RULER / "prose.txt", squad=RULER / "squad.json", hotpotqa=RULER / "hotpotqa.json")
OFFICIAL = json.loads((RULER / "official.json").read_text())


class Words:
    """Words and punctuation marks, as the rows of official.json were counted."""

    def encode(self, text: str) -> list[str]:
        return re.findall(r"\w+|[^\w\s]", text)


WORDS = Words()


def make(task: str, length: int = 1024, count: int = 3, **options: Any) -> list[Item]:
    return list(generate(task, WORDS, length, count, **{"sources": SOURCES, **options}))


def prompt(item: Item) -> str:
    (question,) = item.questions
    return item.context + question.text + question.answer_prefix
