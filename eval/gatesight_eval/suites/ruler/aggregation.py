"""Common words and frequent coded words: the answer stands nowhere in particular, it is counted."""

import math
import string
from collections.abc import Callable
from dataclasses import replace

from .sampling import Sample, Setting, compose, fit
from .sources import Sources, common_words, read_english_words
from .templates import Task

COMMON = 10
#: Size of the sample that estimates tokens per word.
ESTIMATE_WORDS = 4096
CODE_LENGTH = 6


def common_words_extraction(task: Task, setting: Setting, sources: Sources) -> Callable[[int], Sample]:
    """Samples of `cwe`; a unit is a different word of the list, 10 of which are common.

    Times a common and another word occur: 30 and 3, in the one-shot example (40 words) 10 and 3; below a length of
    4,096 tokens 6 and 1, in the example (20 words) 3 and 1.
    """
    words = common_words()
    setting.shuffle(words)
    more_words = read_english_words(sources.path("english_words", "cwe")) if sources.english_words is not None else []
    long = setting.length >= 4096
    repeats, example_words, example_repeats = ((30, 3), 40, (10, 3)) if long else ((6, 1), 20, (3, 1))

    def draw_list(units: int, repeats: tuple[int, int]) -> Sample:
        pool = words if units <= len(words) else more_words
        if units > len(pool):
            raise ValueError(
                f"cwe at a length of {setting.length} tokens may need {units} different words, and wonderwords has "
                f"{len(words)}; give Sources(english_words=<file>) with at least {units}."
            )
        drawn = setting.stream.sample(pool, units)
        common, others = drawn[:COMMON], drawn[COMMON:]
        listed = common * repeats[0] + others * repeats[1]
        setting.shuffle(listed)
        return compose(task.wording, _numbered(listed), common)

    def draw(units: int, index: int) -> Sample:
        if "task_hidden" in setting.variants:
            return replace(draw_list(units, repeats), lead="")
        example = draw_list(example_words, example_repeats)
        drawn = draw_list(units, repeats)
        return replace(drawn, lead=f"{example.prompt} {_numbered(example.answers)}\n{drawn.lead}")

    per_word = setting.count_tokens(draw(ESTIMATE_WORDS, 0).prompt) / ESTIMATE_WORDS
    most = int(setting.length // per_word) * 2
    return fit(setting, draw, step=10, minimum=COMMON + 1, most=most)


def _numbered(words: list[str] | tuple[str, ...]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def frequent_words_extraction(task: Task, setting: Setting, sources: Sources) -> Callable[[int], Sample]:
    """Samples of `fwe`: random words of 6 letters, how often each comes falling with the square of its rank.

    The most frequent is replaced by dots as noise; the next three are the answer.

    Raises:
        ValueError: Too short for the third and fourth word to differ in number.
    """
    limit = setting.length - setting.max_new_tokens
    step, ranks = limit // 32, limit // 50
    if ranks < 4:
        raise setting.too_short("no room for four different words")

    def draw_words() -> list[str]:
        codes = [_code(setting) for _ in range(ranks)]
        while len(set(codes)) < ranks:
            codes.append(_code(setting))
        words = sorted(set(codes))
        setting.shuffle(words)
        return ["...", *words[1:]]

    def text(words: list[str], total: int) -> Sample:
        listed = [word for rank, word in enumerate(words, 1) for _ in range(_times(rank, total))]
        setting.shuffle(listed)
        sample = compose(task.wording, " ".join(listed), words[1:4])
        return replace(sample, lead="") if "task_hidden" in setting.variants else sample

    total, words = limit // CODE_LENGTH, draw_words()
    while setting.count_tokens(text(words, total).prompt) < limit:
        total += step
    total -= step

    def sample(index: int) -> Sample:
        words, size = draw_words(), total
        while _times(4, size) > _times(5, size):
            drawn = text(words, size)
            if setting.count_tokens(drawn.prompt) <= limit:
                return drawn
            size -= step
        raise setting.too_short("the answers would be no more frequent than other words")

    return sample


def _code(setting: Setting) -> str:
    return "".join(setting.stream.choices(string.ascii_lowercase, k=CODE_LENGTH))


def _times(rank: int, total: int) -> int:
    """How often the word of that rank comes among `total`: Zipf's law with exponent 2, whose sum is π²/6."""
    return int(total * rank**-2.0 / (math.pi**2 / 6))
