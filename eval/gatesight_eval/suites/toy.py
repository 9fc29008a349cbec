"""The suite of the bundled reference model: twins of RULER's tasks in its closed vocabulary, and shared contexts."""

import random
from collections.abc import Callable, Iterator, Sequence

from gatesight_hf.reference import documents
from gatesight_hf.reference.documents import Document, Question

from . import items

#: Tasks by name: family and generator. `sparse`: nearly everything is noise and may go. `dense`: every word belongs to
#: a record that may be asked for, so that no record can be told to be superfluous. (Parts of records can: a model may
#: read an answer from the entries of its digits in one layer alone.)
TASKS: dict[str, tuple[str, Callable[[random.Random, int], Document]]] = {
    "niah_single_1": ("sparse", documents.TASKS["niah_single_1"]),
    "niah_single_2": ("sparse", documents.TASKS["niah_single_2"]),
    "niah_multikey_1": ("sparse", documents.TASKS["niah_multikey"]),
    "niah_multikey_2": (
        "dense",
        lambda rng, n: documents.needles(rng, n, n // documents.SHORT_NEEDLE, asked=4, short=True),
    ),
    "niah_multivalue": ("several answers", documents.TASKS["niah_multivalue"]),
    "niah_multiquery": ("several answers", documents.TASKS["niah_multiquery"]),
    "vt": ("multi-hop", documents.TASKS["vt"]),
    "qa": ("sparse", documents.TASKS["qa"]),
    "shared_kv": ("many questions", lambda rng, n: documents.needles(rng, n, 24, asked=4)),
    "copy": ("verbatim", documents.TASKS["copy"]),
}
#: Tasks whose answers count one by one, as RULER scores them; the model need not give them in the text's order.
ANY_ORDER = ("niah_multivalue",)


def suite(tasks: Sequence[str], length: int, count: int, seeds: Sequence[int]) -> Iterator[items.Item]:
    """`count` contexts of `length` tokens for each task and data seed.

    Raises:
        ValueError: An unknown task, or a length too short for the facts.
    """
    unknown = sorted(set(tasks) - set(TASKS))
    if unknown:
        raise ValueError(f"No toy tasks {unknown}; there are {', '.join(TASKS)}.")
    if length < 256:
        raise ValueError(f"The toy suite needs contexts of at least 256 tokens, got {length}.")
    for task in tasks:
        family, make = TASKS[task]
        for seed in seeds:
            rng = random.Random(f"toy-{task}-{length}-{seed}")
            for number in range(count):
                document = make(rng, length)
                yield items.Item(
                    id=f"toy/{task}/{length}/{seed}/{number}",
                    benchmark="toy",
                    task=task,
                    family=family,
                    context=document.text,
                    questions=tuple(_question(task, document, question) for question in document.questions),
                    details={"seed": seed},
                )


def _question(task: str, document: Document, question: Question) -> items.Question:
    in_any_order = task in ANY_ORDER
    return items.Question(
        text=question.text,
        references=tuple(question.expected.split(" , ")) if in_any_order else (question.expected,),
        max_new_tokens=len(question.answer) + 1,
        metric="string_match_all" if in_any_order else "exact_match",
        depth=_depth(document, question),
    )


def _depth(document: Document, question: Question) -> float | None:
    """Where the words of the first part of the answer stand in the document for the first time."""
    first = question.answer[: question.answer.index(",")] if "," in question.answer else question.answer
    for start in range(len(document.words) - len(first) + 1):
        if document.words[start : start + len(first)] == first:
            return start / len(document.words)
    return None
