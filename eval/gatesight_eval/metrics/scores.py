"""What a scorer returns, and what scorers share."""

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..suites.items import Question

#: Markers such as `<|im_end|>` and `</s>`: SCBench's runners decode answers with them.
SPECIAL_TOKEN = re.compile(r"<\|[^<>|]{1,40}\|>|</?s>|<(?:bos|eos|pad|unk|start_of_turn|end_of_turn)>")


@dataclass(frozen=True)
class Score:
    """The score of one prediction, 0 to 1.

    Attributes:
        official: As the benchmark's own scorer gives it, faults included.
        revised: Without those faults; equal to `official` where none is known.
        parsed: Whether the revised scorer found an answer in the prediction. If not, `revised` is 0 or was computed
            from the whole prediction, as the scorer says.
    """

    official: float
    revised: float
    parsed: bool = True


Scorer = Callable[[str, Question], Score]


def equal(value: float, parsed: bool = True) -> Score:
    """A score without known faults."""
    return Score(float(value), float(value), parsed)


def references(question: Question, count: int | None = None) -> tuple[str, ...]:
    """The question's references.

    Raises:
        ValueError: There are none, or not `count` of them.
    """
    if not question.references or (count is not None and len(question.references) != count):
        wanted = "at least one reference" if count is None else f"{count} reference(s)"
        raise ValueError(f"Metric {question.metric!r} reads {wanted}, the question has {question.references!r}.")
    return question.references


def detail(question: Question, name: str) -> Any:
    """An entry of the question's details.

    Raises:
        ValueError: It is missing.
    """
    if name not in question.details:
        raise ValueError(f"Metric {question.metric!r} reads details[{name!r}], which the question does not have.")
    return question.details[name]


def plain(text: str) -> str:
    """Without special tokens, full-width forms (NFKC) and Markdown's `*`, `_` and backticks."""
    text = unicodedata.normalize("NFKC", SPECIAL_TOKEN.sub("", text))
    return re.sub(r"[*_`]", "", text).strip()
