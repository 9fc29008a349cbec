"""Scorers of RULER (arXiv 2404.06654, `scripts/eval/synthetic/constants.py`) and of the toy suite."""

import re

from ..suites.items import Question
from .scores import Score, equal, references


def exact_match(prediction: str, question: Question) -> Score:
    """1 if the prediction is one of the references, but for white space; of the toy suite."""
    return equal(" ".join(prediction.split()) in {" ".join(reference.split()) for reference in references(question)})


def string_match_all(prediction: str, question: Question) -> Score:
    """Fraction of the references that occur in the prediction, in any case."""
    return equal(matched_fraction(_cleaned(prediction), references(question)))


def string_match_part(prediction: str, question: Question) -> Score:
    """1 if any of the references occurs in the prediction, in any case."""
    return equal(matched_fraction(_cleaned(prediction), references(question)) > 0)


def matched_fraction(text: str, parts: tuple[str, ...]) -> float:
    """Fraction of `parts` that are substrings of `text`, in any case."""
    text = text.lower()
    return sum(part.lower() in text for part in parts) / len(parts)


def _cleaned(prediction: str) -> str:
    """RULER's post-processing: control characters become line breaks."""
    return re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip()
