"""Questions on one or two of many documents."""

import random
from collections.abc import Callable

from .sampling import Sample, Setting, compose, fit
from .sources import Sources, read_hotpotqa, read_squad
from .templates import Task

STEP = 10


def questions_on_documents(task: Task, setting: Setting, sources: Sources, count: int) -> Callable[[int], Sample]:
    """Samples of `qa_1` (SQuAD) and `qa_2` (HotpotQA); a unit is a document.

    Where there are fewer documents than fit, they are repeated. A sample's depth is that of its gold documents' begin.

    Raises:
        ValueError: Fewer questions in the file than `count`.
    """
    if task.name == "qa_1":
        data = read_squad(path := sources.path("squad", task.name))
    else:
        data = read_hotpotqa(path := sources.path("hotpotqa", task.name))
    if count > len(data.questions):
        raise ValueError(f"{path} has {len(data.questions)} answerable questions; ask for no more, not for {count}.")
    order = list(range(len(data.questions)))
    if "qa_sampled" in setting.variants:
        setting.shuffle(order)

    def draw(units: int, index: int) -> Sample:
        question = data.questions[order[index]]
        chosen = _choose(len(data.documents), question.given, question.related, units, setting.stream)
        if "qa_shuffled" in setting.variants:
            setting.own_random(index).shuffle(chosen)
        else:
            setting.shuffle(chosen)
        documents = [f"Document {i}:\n{data.documents[number]}" for i, number in enumerate(chosen, 1)]
        gold = tuple(documents[chosen.index(number)] for number in question.gold)
        return compose(task.wording, "\n\n".join(documents), question.answers, gold, query=question.text)

    needed = max(len(data.questions[number].given) for number in order[:count])
    return fit(setting, draw, STEP, minimum=needed)


def _choose(total: int, given: tuple[int, ...], related: tuple[int, ...], units: int, rng: random.Random) -> list[int]:
    """Numbers of `units` documents: the given ones, then related ones, then any; beyond the total all in turn."""
    if units >= total:
        return [number % total for number in range(units)]
    spare = units - len(given)
    if spare <= len(related):
        return [*given, *rng.sample(related, spare)]
    others = sorted(set(range(total)).difference(given, related))
    return [*given, *related, *rng.sample(others, spare - len(related))]
