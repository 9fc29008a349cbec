"""A sample of a task, and how its size is fitted to a length in tokens.

Every draw takes from one stream of random numbers, in RULER's order: the probes of the search for a size, then the
items, each drawn again while it is too long. Hence the tokenizer decides not only on sizes but on keys and values too.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .templates import Wording, depth_of


@dataclass(frozen=True)
class Sample:
    """A prompt in parts. `gold` are strings at whose first occurrences the answer stands; none where that is anywhere.

    `lead`, `data` and `question` joined are RULER's `input`.
    """

    lead: str
    data: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    gold: tuple[str, ...] = ()

    @property
    def context(self) -> str:
        return self.lead + self.data

    @property
    def prompt(self) -> str:
        return self.context + self.question + self.answer_prefix

    @property
    def depth(self) -> float | None:
        return depth_of(self.context, self.gold)


def compose(
    wording: Wording,
    data: str,
    answers: list[str] | tuple[str, ...],
    gold: tuple[str, ...] = (),
    **values: str,
) -> Sample:
    """The sample of these data; `values` fill the wording's placeholders."""
    return Sample(
        lead=wording.lead.format(**values),
        data=data + wording.after_data,
        question=wording.question.format(**values),
        answer_prefix=wording.answer_prefix.format(**values),
        answers=tuple(answers),
        gold=gold,
    )


@dataclass(frozen=True)
class Setting:
    """What the draws of one run share.

    Attributes:
        length: Most tokens of a prompt together with `max_new_tokens` to generate.
        count_tokens: Tokens of a text, special tokens left out.
        stream: The random numbers of the run.
        seed: Also of the shuffles, which RULER seeds anew for each item.
        variants: Names of the variants that this task applies.
    """

    task: str
    length: int
    max_new_tokens: int
    count_tokens: Callable[[str], int]
    stream: random.Random
    seed: int
    variants: tuple[str, ...] = ()

    def shuffle(self, items: list[Any]) -> None:
        """In place, by the seed alone: lists of one length are always permuted alike."""
        random.Random(self.seed).shuffle(items)

    def own_random(self, index: int) -> random.Random:
        """A stream of this item's own, for variants: the run's stream stays as it is."""
        return random.Random(f"{self.seed}/{index}")

    def too_short(self, why: str) -> ValueError:
        return ValueError(
            f"{self.task} does not fit into a length of {self.length} tokens ({why}); "
            "take a larger length, or a tokenizer with longer tokens."
        )


#: From units (lines, words, documents) and the item's index to a sample.
Draw = Callable[[int, int], Sample]


def fit(
    setting: Setting,
    draw: Draw,
    step: int,
    minimum: int = 1,
    most: int | None = None,
    search: Draw | None = None,
    reserve: int = 0,
) -> Callable[[int], Sample]:
    """Finds how many units fill the length, and gives the function from an item's index to its sample.

    Args:
        step: Least size that is searched first, and units that a too long item loses at once; a fiftieth of it
            with the variant `filled`.
        minimum: Least units that make a sample at all; RULER itself goes on for ever below `step`.
        most: Upper end of the search; None for three times what a sample of `step` units promises.
        search: What the search draws instead of `draw`, with `reserve` tokens added to it.

    Raises:
        ValueError: Not even `minimum` units fit, at once or, from the function, for an item.
    """
    search = search or draw

    def tokens(units: int) -> int:
        return setting.count_tokens(search(units, 0).prompt)

    def fits(units: int) -> bool:
        return tokens(units) + reserve + setting.max_new_tokens <= setting.length

    if most is None:
        most = int(setting.length / (tokens(step) / step) * 3)
    size = _largest(fits, step, max(most, 2 * step)) or _largest(fits, minimum, step - 1)
    if size is None:
        raise setting.too_short("fewer units of text than the task can do with")

    def sample(index: int) -> Sample:
        units = size
        while True:
            drawn = draw(units, index)
            if setting.count_tokens(drawn.prompt) + setting.max_new_tokens <= setting.length:
                return drawn
            if units <= minimum:
                raise setting.too_short(f"item {index} at its smallest")
            loss = step if units > step and "filled" not in setting.variants else max(1, step // 50)
            units = max(units - loss, minimum)

    return sample


def _largest(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """The greatest number from low to high that fits, found by halving; None if none was found."""
    best = None
    while low <= high:
        middle = (low + high) // 2
        if fits(middle):
            best, low = middle, middle + 1
        else:
            high = middle - 1
    return best
