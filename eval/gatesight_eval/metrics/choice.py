"""Scorers of SCBench that look for a letter: `choice_eng` and `many_shot`."""

import re
from collections.abc import Sequence

from ..suites.items import Question
from .scores import Score, detail, plain, references

_LETTERS = "ABCD"
#: Phrases that the official scorer looks for, in its order.
_ANSWER_PHRASES = ("answer is:", "answer:", "answer is", "option is")


def choice_eng(prediction: str, question: Question) -> Score:
    """1 if the right one of four options is named, by letter or by text.

    Reads references (text of the right option, its letter) and details["options"], the four texts.
    Faults: any answer that begins with A, B, C or D is taken for that letter ("Based on …"), brackets and Markdown are
    not understood, an article "A" counts as an answer.
    """
    text, letter = references(question, 2)
    found = parse_choice(prediction, detail(question, "options"))
    return Score(float(official_choice(prediction, (text, letter))), float(found == letter), parsed=found is not None)


def official_choice(prediction: str, labels: tuple[str, str]) -> bool:
    """The official verdict on a prediction; `labels` are the right option's text and letter."""
    text = prediction.strip()
    if not text:
        return False
    if text[0] in _LETTERS:
        return text[0] in labels
    if text in labels:
        return True
    text = re.sub(r" {2,}", " ", re.sub(r"[\n\"'.,?!{}]", " ", text))
    for phrase in _ANSWER_PHRASES:
        at = text.find(phrase)
        if at >= 0:
            rest = text[at + len(phrase) + 1 :]
            return any(rest.startswith(label) for label in labels)
    # A substring test: "AB" and "BC" pass for letters too.
    first = next((word for word in text.split() if word in _LETTERS), None)
    return first in labels


def parse_choice(prediction: str, options: Sequence[str]) -> str | None:
    """The letter that a prediction names, or None.

    In this order: a letter alone at the start, the last letter after "answer", "option" or "choice", the text of one
    option in the first line, the only letter B to D that stands alone ("A" may be an article).
    """
    text = plain(prediction)
    start = re.match(r"\W*([A-D])(?=$|[\s.:),\]])", text)
    if start and not (start.group(1) == "A" and re.match(r"\s+[a-z]", text[start.end() :])):
        return start.group(1)
    named = re.findall(r"(?i:answer|option|choice)\W*(?:is)?\W*([A-D])\b", text)
    if named:
        return named[-1]
    by_text = _option_in(text.split("\n")[0], options)
    if by_text is not None:
        return by_text
    alone = set(re.findall(r"\b[B-D]\b", text))
    return alone.pop() if len(alone) == 1 else None


def _option_in(line: str, options: Sequence[str]) -> str | None:
    """Letter of the longest option that a line contains; None if others that are not part of it are there too."""
    line = line.casefold()
    texts = [plain(option).casefold() for option in options]
    found = [text for text in texts if text and text in line]
    longest = max(found, key=len, default="")
    if not longest or texts.count(longest) > 1 or not all(text in longest for text in found):
        return None
    return _LETTERS[texts.index(longest)]


def many_shot(prediction: str, question: Question) -> Score:
    """1 if the letter of the label is named.

    Fault: the letter is searched as a substring of the whole output in capitals, "A" in "NOT PLAUSIBLE". Revised: the
    first letter in brackets, else a letter alone at the start, else the last one after "answer", "option" or "choice".
    """
    (label,) = references(question, 1)
    official = label.upper() in prediction.upper()
    found = parse_letter(prediction)
    return Score(float(official), float(found == label.strip("() ")), parsed=found is not None)


def parse_letter(prediction: str) -> str | None:
    """The letter that a prediction names, or None; there may be more than four options."""
    text = plain(prediction)
    for pattern in (r"\(([A-Z])\)", r"^\W*([A-Z])(?=$|[\n.:),\]])", r"(?i:answer|option|choice)\W*(?:is)?\W*([A-Z])\b"):
        found = re.findall(pattern, text)
        if found:
            return found[-1] if pattern.startswith("(?i:") else found[0]
    return None
