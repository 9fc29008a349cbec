"""Documents with planted facts, and questions on them, for the reference model.

The texts follow RULER's templates (needles in noise, variable tracking; arXiv 2404.06654) in the closed vocabulary of
`words`, so that people can read what the cache has to remember. A document is a list of words; one word is one token.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from .words import (
    CITIES,
    DIGITS,
    END,
    FILLER_ADJECTIVES,
    FILLER_NOUNS,
    FILLER_PLACES,
    FILLER_TIMES,
    FILLER_VERBS,
    MAGIC_WORDS,
    NAMES,
    VARIABLES,
)

NOISE = "the grass is green . the sky is blue . the sun is yellow . here we go . there and back again .".split()


@dataclass(frozen=True)
class Question:
    """One question: `words` end where the answer begins; `answer` is what the model must write before `<eos>`."""

    words: list[str]
    answer: list[str]

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def expected(self) -> str:
        return " ".join(self.answer)


@dataclass(frozen=True)
class Document:
    """A context with its questions.

    Attributes:
        words (`list[str]`): The context, one word a token.
        questions (`list[Question]`): Questions whose answers stand in the context.
        planted (`list[int]`): Positions of the words of planted facts (not of the noise), ascending.
    """

    words: list[str]
    questions: list[Question]
    planted: list[int] = field(default_factory=list)

    @property
    def text(self) -> str:
        return " ".join(self.words)


# -- noise -------------------------------------------------------------------------------------------------------------


def _sentence(rng: random.Random) -> list[str]:
    """One sentence of noise, 4 to 12 words."""
    noun, adjective, verb = rng.choice(FILLER_NOUNS), rng.choice(FILLER_ADJECTIVES), rng.choice(FILLER_VERBS)
    kind = rng.randrange(5)
    if kind == 0:
        return ["the", noun, "is", adjective, "."]
    if kind == 1:
        return ["the", adjective, noun, verb, "the", rng.choice(FILLER_NOUNS), "."]
    if kind == 2:
        place = [rng.choice(FILLER_PLACES), "the", rng.choice(FILLER_NOUNS)]
        return ["the", noun, verb, "a", adjective, rng.choice(FILLER_NOUNS), *place, "."]
    if kind == 3:
        return [rng.choice(FILLER_TIMES), "the", noun, verb, "the", rng.choice(FILLER_NOUNS), "."]
    return ["the", noun, "and", "the", rng.choice(FILLER_NOUNS), "are", adjective, rng.choice(FILLER_TIMES), "."]


def noise(rng: random.Random, length: int, repeated: bool = False) -> list[list[str]]:
    """Sentences of exactly `length` words in all; `repeated` uses RULER's one fixed noise text."""
    if repeated:
        words = (NOISE * (length // len(NOISE) + 1))[:length]
        ends = [i + 1 for i, word in enumerate(words) if word == "."]
        starts = [0, *ends]
        return [words[a:b] for a, b in zip(starts, [*ends, length], strict=True) if a < b]
    sentences: list[list[str]] = []
    left = length
    while left > 0:
        sentence = _sentence(rng)[-left:]
        sentences.append(sentence)
        left -= len(sentence)
    return sentences


def _scatter(
    rng: random.Random, facts: Sequence[list[str]], length: int, repeated: bool, in_order: bool = False
) -> tuple[list[str], list[int]]:
    """Put facts between sentences of noise, at uniform depths; exactly `length` words where the facts leave room."""
    sentences = noise(rng, max(0, length - sum(map(len, facts))), repeated)
    slots = sorted(rng.randint(0, len(sentences)) for _ in facts)
    order = list(facts) if in_order else rng.sample(list(facts), len(facts))
    words: list[str] = []
    planted: list[int] = []
    done = 0
    for slot, fact in zip(slots, order, strict=True):
        for sentence in sentences[done:slot]:
            words += sentence
        done = slot
        planted += range(len(words), len(words) + len(fact))
        words += fact
    for sentence in sentences[done:]:
        words += sentence
    return words, planted


# -- facts -------------------------------------------------------------------------------------------------------------


def _number(rng: random.Random, digits: int = 4) -> list[str]:
    return [rng.choice(DIGITS) for _ in range(digits)]


def needle(key: str, number: Sequence[str], short: bool = False) -> list[str]:
    """RULER's needle sentence; `short` is the bare form "amber-river is : 4 8 2 1 ." of dense tables."""
    head = [] if short else "one of the special magic numbers for".split()
    return [*head, key, "is", ":", *number, "."]


#: Words of the bare form, which fills dense contexts from end to end.
SHORT_NEEDLE = len(needle("key", "1234", short=True))


def ask_number(key: str, short: bool = False) -> list[str]:
    head = ["question", ":"] if short else "question : what is the special magic number for".split()
    return [*head, key, "?", "answer", ":"]


def _joined(parts: Sequence[Sequence[str]]) -> list[str]:
    joined = list(parts[0])
    for part in parts[1:]:
        joined += [",", *part]
    return joined


# -- tasks -------------------------------------------------------------------------------------------------------------


def needles(
    rng: random.Random, length: int, count: int, *, asked: int = 1, short: bool = False, repeated: bool = False
) -> Document:
    """Keys with one number each (RULER niah_single for 1, niah_multikey for more); `asked` of them asked.

    At most as many keys as there are words for them.
    """
    keys = rng.sample(MAGIC_WORDS, min(count, len(MAGIC_WORDS)))
    numbers = {key: _number(rng) for key in keys}
    words, planted = _scatter(rng, [needle(key, numbers[key], short) for key in keys], length, repeated)
    questions = [Question(ask_number(key, short), numbers[key]) for key in rng.sample(keys, min(asked, len(keys)))]
    return Document(words, questions, planted)


def multi_value(rng: random.Random, length: int, values: int = 4, distractors: int = 2) -> Document:
    """One key with several numbers, all asked, in the order of the text (RULER niah_multivalue)."""
    key, *others = rng.sample(MAGIC_WORDS, 1 + distractors)
    facts = [needle(key, _number(rng)) for _ in range(values)] + [needle(other, _number(rng)) for other in others]
    words, planted = _scatter(rng, facts, length, repeated=False)
    found = [words[i + 3 : i + 7] for i in planted if words[i] == key]
    ask = ["question", ":", *"what are all the special magic numbers for".split(), key, "?", "answer", ":"]
    return Document(words, [Question(ask, _joined(found))], planted)


def multi_query(rng: random.Random, length: int, count: int = 4, asked: int = 2) -> Document:
    """Several keys in one question, numbers in the order asked (RULER niah_multiquery)."""
    keys = rng.sample(MAGIC_WORDS, count)
    numbers = {key: _number(rng) for key in keys}
    words, planted = _scatter(rng, [needle(key, numbers[key]) for key in keys], length, repeated=False)
    chosen = rng.sample(keys, min(asked, count))
    head = ["question", ":", *"what are the special magic numbers for".split()]
    ask = [*head, *_joined([[key] for key in chosen]), "?", "answer", ":"]
    return Document(words, [Question(ask, _joined([numbers[key] for key in chosen]))], planted)


def variable_tracking(rng: random.Random, length: int, hops: int = 2, chains: int = 2) -> Document:
    """A value handed on through `hops` assignments; all its variables are asked (RULER vt)."""
    names = rng.sample(VARIABLES, chains * (hops + 1))
    values = rng.sample([[a, b] for a in DIGITS for b in DIGITS], chains)
    per_chain, answers = [], []
    for chain, value in enumerate(values):
        members = names[chain * (hops + 1) : (chain + 1) * (hops + 1)]
        facts = [["var", members[0], "=", *value, "."]]
        facts += [["var", later, "=", "var", earlier, "."] for earlier, later in pairwise(members)]
        per_chain.append(facts)
        answers.append(members)
    merged: list[list[str]] = []
    queues = [list(facts) for facts in per_chain]
    while any(queues):
        merged.append(rng.choice([queue for queue in queues if queue]).pop(0))
    words, planted = _scatter(rng, merged, length, repeated=False, in_order=True)
    questions = [
        Question(
            ["question", ":", *"find all variables that are assigned the value".split(), *value, "?", "answer", ":"],
            members,
        )
        for value, members in zip(values, answers, strict=True)
    ]
    return Document(words, rng.sample(questions, 1), planted)


def lookup(rng: random.Random, length: int, count: int = 4, asked: int = 1) -> Document:
    """Facts "alice lives in paris ." and questions on them (RULER's qa in one hop)."""
    people = rng.sample(NAMES, min(count, len(NAMES)))
    homes = {name: rng.choice(CITIES) for name in people}
    words, planted = _scatter(rng, [[name, "lives", "in", homes[name], "."] for name in people], length, False)
    questions = [
        Question(["question", ":", "where", "is", name, "?", "answer", ":"], [homes[name]])
        for name in rng.sample(people, min(asked, len(people)))
    ]
    return Document(words, questions, planted)


def copy_context(
    rng: random.Random, length: int, span: int = 24, start: int | None = None, shuffled: bool = False
) -> Document:
    """Repeat a span of the context verbatim: what KVzip's replay asks of a model (arXiv 2505.23416).

    `shuffled` puts the words out of order, so that nothing but the context tells what comes next.
    """
    facts = [needle(key, _number(rng)) for key in rng.sample(MAGIC_WORDS, max(1, length // 96))]
    words, planted = _scatter(rng, facts, length, repeated=False)
    if shuffled:
        rng.shuffle(words)
        planted = []
    start = rng.randrange(0, max(1, len(words) - span - 8)) if start is None else start
    if start == 0:
        return Document(words, [Question("repeat the previous context exactly .".split(), words[:span])], planted)
    ask = ["repeat", *"the part of the previous context exactly , starting with".split(), *words[start : start + 8]]
    return Document(words, [Question(ask, words[start + 8 : start + 8 + span])], planted)


#: Tasks by the name of their RULER twin, each `(rng, length) -> Document` with one question.
TASKS: dict[str, Callable[[random.Random, int], Document]] = {
    "niah_single_1": lambda rng, length: needles(rng, length, 1, repeated=True),
    "niah_single_2": lambda rng, length: needles(rng, length, 1),
    "niah_multikey": lambda rng, length: needles(rng, length, 4),
    "niah_multivalue": multi_value,
    "niah_multiquery": multi_query,
    "vt": variable_tracking,
    "qa": lookup,
    "copy": copy_context,
}


def training_words(document: Document) -> tuple[list[str], list[bool]]:
    """A training sequence: context, then every question with its answer; the flags mark words of answers."""
    words = list(document.words)
    is_answer = [False] * len(words)
    for question in document.questions:
        words += [*question.words, *question.answer, END]
        is_answer += [False] * len(question.words) + [True] * (len(question.answer) + 1)
    return words, is_answer
