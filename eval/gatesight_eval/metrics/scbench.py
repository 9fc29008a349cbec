"""Scorers of SCBench (arXiv 2412.10319, `scbench/compute_scores.py` of microsoft/MInference), except those that parse
choices (`choice`) and code (`repoqa`).

Faults of the official scorers are kept in `Score.official` and mended in `Score.revised`; each docstring names them.
"""

import re
import string
import unicodedata
from collections import Counter
from decimal import Decimal

from ..suites.items import Question
from .ruler import matched_fraction
from .scores import SPECIAL_TOKEN, Score, equal, references

#: What the official Chinese normalisation drops besides ASCII punctuation. It lacks some marks, 《 among them.
_CHINESE_PUNCTUATION = {
    chr(code)
    for first, last in (
        (0x2013, 0x2014), (0x2018, 0x2019), (0x201B, 0x201F), (0x2026, 0x2027), (0x3001, 0x3003), (0x300B, 0x3011),
        (0x3014, 0x3015), (0x3016, 0x301F), (0x3030, 0x3030), (0x303E, 0x303F), (0xFE4F, 0xFE4F), (0xFF01, 0xFF0D),
        (0xFF0F, 0xFF0F), (0xFF1A, 0xFF20), (0xFF3B, 0xFF40), (0xFF5B, 0xFF64),
    )
    for code in range(first, last + 1)
}  # fmt: skip
_DROPPED = _CHINESE_PUNCTUATION | set(string.punctuation)


def kv(prediction: str, question: Question) -> Score:
    """1 if the label is a substring, in its own case; of `kv` and `prefix_suffix`."""
    (label,) = references(question, 1)
    return equal(label in prediction)


def kv_in_repoqa_and_kv(prediction: str, question: Question) -> Score:
    """As `kv`. Fault: for these turns the official scorer searches the keys of a dict instead of the text: always 0."""
    return Score(0.0, kv(prediction, question).revised)


def vt(prediction: str, question: Question) -> Score:
    """Fraction of the labels that occur, in any case. Fault: rounded to two digits per question."""
    fraction = matched_fraction(prediction, references(question))
    return Score(round(fraction, 2), fraction)


def qa_eng(prediction: str, question: Question) -> Score:
    """1 if a label occurs, in any case. Fault: also inside of words, "No" in "Nowhere"."""
    labels = references(question)
    text = SPECIAL_TOKEN.sub("", prediction)
    found = any(re.search(rf"(?<!\w){re.escape(label.strip())}(?!\w)", text, re.IGNORECASE) for label in labels)
    return Score(float(any(label.upper() in prediction.upper() for label in labels)), float(found))


def qa_chn(prediction: str, question: Question) -> Score:
    """F1 of characters.

    Fault: the label is taken as a list of accepted answers of one character each, so that one right character scores 1
    and the right answer does not. Revised: against the whole label, of the first line without a leading 答案是.
    """
    (label,) = references(question, 1)
    official = max((_f1(_official_characters(prediction), _official_characters(one)) for one in label), default=0.0)
    answer = re.sub(r"^答案[是为]?[:：]?\s*", "", SPECIAL_TOKEN.sub("", prediction).strip()).split("\n")[0]
    return Score(official, character_f1(answer, label), parsed=bool(answer))


def character_f1(prediction: str, label: str) -> float:
    """F1 of the characters of two texts as multisets, without white space, punctuation, symbols and case."""
    return _f1(_characters(prediction), _characters(label))


def mf(prediction: str, question: Question) -> Score:
    """1 if the first number is the label: an integer, or a float if the reference has a point or an exponent.

    Faults: the sign is not read; a float is cut to an integer where the label is one. Of several labels the first
    counts, in both.
    """
    label = references(question)[0]
    unsigned = re.search(r"\d+(?:\.\d+)?", prediction, re.ASCII)
    signed = re.search(r"(?:(?<![\w.])[-\u2212])?\d+(?:\.\d+)?", prediction, re.ASCII)
    if unsigned is None or signed is None:
        return Score(0.0, 0.0, parsed=False)
    number = Decimal(unsigned.group())
    if re.fullmatch(r"[+-]?\d+", label):
        number = number.to_integral_value("ROUND_DOWN")
    revised = float(signed.group().replace("\u2212", "-")) == float(label)
    return Score(float(float(number) == float(label)), float(revised))


def passkey(prediction: str, question: Question) -> Score:
    """1 if the first run of digits is the label."""
    label = references(question)[0]
    first = re.search(r"[0-9]+", prediction)
    return equal(first is not None and first.group() == label, parsed=first is not None)


def summary(prediction: str, question: Question) -> Score:
    """F measure of ROUGE-Lsum without stemming; sentences are lines.

    Raises:
        RuntimeError: `rouge_score` is not installed.
    """
    (label,) = references(question, 1)
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise RuntimeError("ROUGE needs the package rouge_score: pip install 'gatesight-hf[eval]'.") from error
    scorer = RougeScorer(["rougeLsum"], use_stemmer=False)
    return equal(scorer.score(label, prediction)["rougeLsum"].fmeasure)


def _f1(prediction: str, label: str) -> float:
    common = (Counter(prediction) & Counter(label)).total()
    return 2 * common / (len(prediction) + len(label)) if common else 0.0


def _official_characters(text: str) -> str:
    return "".join(c for c in "".join(text.lower().split()) if c not in _DROPPED)


def _characters(text: str) -> str:
    text = SPECIAL_TOKEN.sub("", text).lower()
    return "".join(c for c in "".join(text.split()) if unicodedata.category(c)[0] not in "PS")
