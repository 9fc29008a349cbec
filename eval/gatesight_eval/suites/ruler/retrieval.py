"""Needles in a haystack (8 tasks) and variable tracking."""

import random
import string
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from uuid import UUID

import numpy as np

from .sampling import Sample, Setting, compose, fit
from .sources import Sources, compound_words, read_haystack
from .templates import NEEDLE, NOISE, Needles, Task, gold_markers

#: Depths in percent at which needles enter prose, drawn without replacement.
DEPTHS = [round(100 * i / 39) for i in range(40)]
HOPS = 4
#: RULER gives variable tracking's one-shot example 500 tokens, the answer left out.
EXAMPLE_LENGTH = 500
EXAMPLE_VALUE = "12345"


def _draw_string(kind: str, rng: random.Random) -> str:
    """A random key or value: `words` (adjective-noun), `numbers` (7 digits) or `uuids` (version 4)."""
    if kind == "words":
        return rng.choice(compound_words())
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    return str(UUID(int=rng.getrandbits(128), version=4))


class _Prose:
    """Sentences of the haystack's first words, or of those from an offset of the item's own."""

    def __init__(self, setting: Setting, sources: Sources) -> None:
        self._words = read_haystack(sources.path("haystack", setting.task))
        self._starts = [0] + [i + 1 for i, word in enumerate(self._words[:-1]) if word.endswith((".", "!", "?"))]
        self._setting, self._split = setting, sources.sentences

    def sentences(self, units: int, index: int) -> list[str]:
        start = 0
        if "essay_offset" in self._setting.variants:
            start = self._setting.own_random(index).choice(self._starts)
        repeats = -(-(start + units) // len(self._words))
        return self._split(" ".join((self._words * repeats)[start : start + units]).strip())


def niah(task: Task, setting: Setting, sources: Sources) -> Callable[[int], Sample]:
    """Samples of a needle task; a unit is a word of prose, or a line of noise or of further needles."""
    settings = task.needles
    assert settings is not None
    prose = _Prose(setting, sources) if settings.haystack == "essay" else None

    def draw(units: int, index: int) -> Sample:
        rng = setting.stream
        pairs = []
        for _ in range(settings.keys):
            key = _draw_string(settings.key_type, rng)
            pairs.append((key, [_draw_string(settings.value_type, rng) for _ in range(settings.values)]))
        needles = [
            NEEDLE.format(kind=settings.value_type, key=key, value=value) for key, values in pairs for value in values
        ]
        setting.shuffle(needles)
        if prose is not None:
            data = _into_prose(needles, prose.sentences(units, index), rng)
        else:
            data = _into_lines(needles, _lines(settings, units, rng), rng)

        asked = [pairs[i] for i in rng.sample(range(settings.keys), settings.queries)]
        answers = [value for _, values in asked for value in values]
        kind = settings.value_type if settings.values * settings.queries > 1 else settings.value_type[:-1]
        query = _enumerated([key for key, _ in asked])
        return compose(task.wording, data, answers, tuple(gold_markers(task, answers)), kind=kind, query=query)

    return fit(setting, draw, step=500 if prose is not None else _line_step(setting, 25))


def _line_step(setting: Setting, usual: int) -> int:
    return usual if setting.length >= 4096 else 5


def _lines(settings: Needles, units: int, rng: random.Random) -> list[str]:
    if settings.haystack == "noise":
        return [NOISE] * units
    return [
        NEEDLE.format(
            kind=settings.value_type,
            key=_draw_string(settings.key_type, rng),
            value=_draw_string(settings.value_type, rng),
        )
        for _ in range(units)
    ]


def _into_lines(needles: list[str], lines: list[str], rng: random.Random) -> str:
    places = sorted(rng.sample(range(len(lines)), len(needles)), reverse=True)
    for place, needle in zip(places, needles, strict=True):
        lines.insert(place, needle)
    return "\n".join(lines)


def _into_prose(needles: list[str], sentences: list[str], rng: random.Random) -> str:
    places = sorted(int(len(sentences) * (depth / 100)) for depth in rng.sample(DEPTHS, len(needles)))
    parts, start = [], 0
    for place, needle in zip(places, needles, strict=True):
        # An empty stretch stays as an empty part: RULER's text then has two spaces, or begins with one.
        parts += [" ".join(sentences[start:place]), needle]
        start = place
    return " ".join([*parts, " ".join(sentences[start:])])


def _enumerated(keys: list[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"


def variable_tracking(task: Task, setting: Setting, sources: Sources) -> Callable[[int], Sample]:
    """Samples of `vt`, one chain of 5 variables among noise; a unit is a line of noise.

    The one-shot example before it is made once and its names and value are drawn again for each item.
    """
    # RULER draws values with NumPy, whose stream is not Python's.
    values = np.random.RandomState(setting.seed)

    def draw_value() -> str:
        return str(values.randint(10000, 99999))

    def draw(units: int, index: int) -> Sample:
        return _chain(task, setting.stream, units, 5, draw_value())

    step = _line_step(setting, 10)
    if "task_hidden" in setting.variants:
        return fit(setting, lambda units, index: replace(draw(units, index), lead=""), step, minimum=HOPS + 1)

    short = replace(setting, task="the one-shot example of vt", length=EXAMPLE_LENGTH, max_new_tokens=0)

    def draw_example(units: int, index: int) -> Sample:
        return _chain(task, setting.stream, units, 3, EXAMPLE_VALUE)

    example = fit(short, draw_example, step=5, minimum=HOPS + 1)(0)
    example_text = f"{example.prompt} {' '.join(example.answers)}\n"

    def draw_with_example(units: int, index: int) -> Sample:
        drawn = draw(units, index)
        shown = example_text
        for name in example.answers:
            shown = shown.replace(name, _name(setting.stream, len(name)))
        shown = shown.replace(EXAMPLE_VALUE, draw_value())
        return replace(drawn, lead=f"{shown}\n{drawn.lead}")

    reserve = setting.count_tokens(example_text)
    return fit(setting, draw_with_example, step, minimum=HOPS + 1, search=draw, reserve=reserve)


def _name(rng: random.Random, length: int) -> str:
    return "".join(rng.choices(string.ascii_uppercase, k=length))


def _chain(task: Task, rng: random.Random, units: int, name_length: int, value: str) -> Sample:
    """`VAR A = value`, `VAR B = VAR A` and so on, in order at random places among `units` lines of noise."""
    names: list[str] = []
    while len(set(names)) <= HOPS:
        names = [_name(rng, name_length) for _ in range(HOPS + 1)]
    first = f"VAR {names[0]} = {value}"
    # The space at the end is RULER's.
    chain = [first, *(f"VAR {name} = VAR {before} " for before, name in pairwise(names))]
    lines = [NOISE] * units
    for i, (place, assignment) in enumerate(zip(sorted(rng.sample(range(units), len(chain))), chain, strict=True)):
        lines.insert(place + i, assignment)
    gold = tuple(gold_markers(task, names))
    return compose(task.wording, "\n".join(lines), names, gold, query=value, count=str(HOPS + 1))
