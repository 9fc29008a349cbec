"""Scorers that KVzip (arXiv 2505.23416, `results/metric.py`) uses on its own form of SCBench.

They reproduce what peers report, so official and revised scores are the same except where a docstring names a fault.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

from ..suites.items import Question
from .repoqa import repoqa
from .scores import Score, equal, references

_DIGITS = {word: str(n) for n, word in enumerate("zero one two three four five six seven eight nine".split())}


def include(prediction: str, question: Question) -> Score:
    """1 if the normalised label is a substring of the normalised prediction; of kv, prefix_suffix and passkeys."""
    (label,) = references(question, 1)
    text = _cleaned(prediction)
    return equal(bool(text) and normalized(label) in normalized(text))


def vt(prediction: str, question: Question) -> Score:
    """Fraction of the labels that occur, in their own case."""
    labels = references(question)
    return equal(sum(label in _cleaned(prediction) for label in labels) / len(labels))


def mf(prediction: str, question: Question) -> Score:
    """1 if the prediction is the label. Fault: white space around it counts."""
    (label,) = references(question, 1)
    text = _cleaned(prediction)
    return Score(float(text == label), float(text.strip() == label.strip()))


def many_shot(prediction: str, question: Question) -> Score:
    """1 if the letters in the first brackets agree, or without brackets if the label's text occurs.

    The label is "(A) text", or text alone.
    """
    (label,) = references(question, 1)
    text = _cleaned(prediction)
    if "(" in text and "(" in label:
        return equal(_in_brackets(text) == _in_brackets(label))
    answer = label.split(")")[1] if label.startswith("(") else label
    return equal(bool(text) and normalized(answer) in normalized(text))


def qa_eng(prediction: str, question: Question) -> Score:
    """F1 of words, or 1 if the label is a substring; both normalised."""
    (label,) = references(question, 1)
    text, label = normalized(_cleaned(prediction)), normalized(label)
    if not text:
        return equal(0.0)
    return equal(max(_word_f1(text, label), float(label in text)))


def choice_eng(prediction: str, question: Question) -> Score:
    """1 if the text of the right option occurs in the first line, normalised. Only the first reference is read."""
    label = references(question)[0]
    text = _cleaned(prediction)
    return equal(bool(text) and normalized(label) in normalized(text.split("\n")[0]))


def summary(prediction: str, question: Question) -> Score:
    """F measure of ROUGE-L as the PyPI package `rouge` 1.0.1 counts it: sets of words, sentences end at points."""
    (label,) = references(question, 1)
    return equal(_rouge_l(_sentences(_cleaned(prediction)), _sentences(label)))


def repoqa_scorer(prediction: str, question: Question) -> Score:
    """As `repoqa`; KVzip's needles are those of the row. Fault: it leaves empty answers out of the mean, here 0."""
    return repoqa(_cleaned(prediction), question) if _cleaned(prediction) else Score(0.0, 0.0, parsed=False)


def normalized(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces, number words up to nine as digits."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    text = " ".join(re.sub(r"\b(?:a|an|the)\b", " ", text).split())
    return re.sub(rf"\b(?:{'|'.join(_DIGITS)})\b", lambda match: _DIGITS[match.group()], text)


def _cleaned(prediction: str) -> str:
    """Without the end-of-sequence token; empty if there is only white space."""
    text = prediction.removesuffix("</s>")
    return text if text.strip() else ""


def _in_brackets(text: str) -> str:
    return text.split("(")[1].split(")")[0]


def _word_f1(prediction: str, label: str) -> float:
    words, wanted = prediction.split(), label.split()
    common = (Counter(words) & Counter(wanted)).total()
    return 2 * common / (len(words) + len(wanted)) if common else 0.0


def _sentences(text: str) -> list[list[str]]:
    # Not split(): between two points the package sees one empty word.
    return [" ".join(sentence.split()).split(" ") for sentence in text.split(".") if sentence]


def _rouge_l(predicted: Sequence[list[str]], reference: Sequence[list[str]]) -> float:
    """Words of any sentence pair's longest common subsequence, counted once each, against the distinct words."""
    predicted_words, reference_words = (
        {word for sentence in text for word in sentence} for text in (predicted, reference)
    )
    if not predicted_words or not reference_words:
        return 0.0
    common: set[str] = set()
    for wanted in reference:
        for sentence in predicted:
            common |= _longest_common_words(wanted, sentence)
    precision, recall = len(common) / len(predicted_words), len(common) / len(reference_words)
    return 2 * precision * recall / (precision + recall + 1e-8)


def _longest_common_words(first: list[str], second: list[str]) -> set[str]:
    """Words of one longest common subsequence."""
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, a in enumerate(first, 1):
        for j, b in enumerate(second, 1):
            table[i][j] = table[i - 1][j - 1] + 1 if a == b else max(table[i - 1][j], table[i][j - 1])
    i, j = len(first), len(second)
    words = set()
    while i and j:
        if first[i - 1] == second[j - 1]:
            words.add(first[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words
