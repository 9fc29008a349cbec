"""What every benchmark is made of: contexts with questions on them, in one form for all."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Question:
    """One question on a context; the context is compressed before the question is known.

    Attributes:
        text: What follows the context.
        references: Accepted or required answers, as the metric reads them.
        max_new_tokens: Budget of the answer.
        metric: Name of the scorer, a key of `metrics.SCORERS`.
        answer_prefix: Beginning of the answer that is given to the model; after the assistant's header where a chat
            template is used.
        depth: Where in the context the answer stands, 0 (begin) to 1 (end); None if nowhere in particular.
        details: What the metric or the report needs besides, JSON values only.
    """

    text: str
    references: tuple[str, ...]
    max_new_tokens: int
    metric: str
    answer_prefix: str = ""
    depth: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Item:
    """A context that is prefilled and scored once, with its questions.

    Attributes:
        id: Unique within the benchmark and stable over runs.
        benchmark: `ruler`, `scbench` or `toy`.
        task: For example `niah_multikey_1`.
        family: Group of tasks that are reported together, for example `sparse retrieval`.
        context: Text that is prefilled.
        questions: Each is answered from a fork of its own.
        details: Provenance and warnings, JSON values only: `leak` (the context gives the task away), `variant` and so
            on.
    """

    id: str
    benchmark: str
    task: str
    family: str
    context: str
    questions: tuple[Question, ...]
    details: Mapping[str, Any] = field(default_factory=dict)
