"""The interface of backends."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..suites.prompting import PreparedContext
from .methods import Cell


@dataclass(frozen=True)
class Request:
    """A context with its questions, as tokens.

    Attributes:
        context: What is prefilled once.
        questions: Ids of each question.
        max_new_tokens: Of each answer.
        answers: Ids of a right answer to each question, for the oracle.
        seed: Of what is random in this context.
    """

    context: PreparedContext
    questions: Sequence[Sequence[int]]
    max_new_tokens: Sequence[int]
    answers: Sequence[Sequence[int]]
    seed: int


@dataclass(frozen=True)
class Answer:
    """A greedy continuation of context and question.

    Attributes:
        ids: New tokens, the one that ends a sequence not among them.
        text: Decoded, special tokens left out.
        stop: `end` or `length`.
    """

    ids: tuple[int, ...]
    text: str
    stop: str


@dataclass(frozen=True)
class CellResult:
    """One method at one kept fraction on one context.

    Attributes:
        cell: Which.
        answers: One per question.
        achieved_fraction: Kept share of the entries outside the protected prefix.
        kept_per_layer: Entries that each layer holds per head after compaction.
        kv_bytes: Of the compacted attention cache.
        seconds: Of budget, selection and compaction.
    """

    cell: Cell
    answers: list[Answer]
    achieved_fraction: float
    kept_per_layer: list[int]
    kv_bytes: int
    seconds: float


@dataclass(frozen=True)
class ContextResult:
    """All cells of one context.

    Attributes:
        cells: In the order asked for.
        kv_bytes: Of the attention cache before compaction.
        gdn_bytes: Of the GDN states.
        prefill_seconds: Of the one prefill, recording for all methods included.
        score_seconds: By name of the scorer.
        identity_checked, identity_held: Answers that were made again by a fresh prefill, compaction and question, and
            how many of them had the same tokens.
    """

    cells: list[CellResult]
    kv_bytes: int
    gdn_bytes: int
    prefill_seconds: float
    score_seconds: dict[str, float]
    identity_checked: int
    identity_held: int


class Backend(ABC):
    """An engine with a model.

    Attributes:
        tokenizer: Of the model.
    """

    tokenizer: Any

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Name, versions, hardware and model, for the result file; JSON values."""

    @abstractmethod
    def check(self, cells: Sequence[Cell]) -> None:
        """Raise an error that says the mend if a method cannot run on this model, before long work begins."""

    @abstractmethod
    def run(self, request: Request, cells: Sequence[Cell], check_identity: bool) -> ContextResult:
        """Prefill once, score once per method, and answer every question in every cell, each from its own fork.

        Args:
            request: Context and questions.
            cells: Methods and kept fractions.
            check_identity: Make one answer of this context again from a fresh prefill.
        """


def check_length(request: Request, longest: int | None) -> None:
    """Raise ValueError if a context with its longest question and answer has more tokens than the model positions for.

    Args:
        request: Context and questions.
        longest: Of the model or engine; None if any length goes.
    """
    pairs = zip(request.questions, request.max_new_tokens, strict=True)
    length = len(request.context.ids) + max((len(ids) + new for ids, new in pairs), default=0)
    if longest is not None and length > longest:
        raise ValueError(
            f"A context with its question and answer has {length} tokens, and the model positions for {longest}: "
            f"give --max-length {longest} to cut the middle out of contexts."
        )
