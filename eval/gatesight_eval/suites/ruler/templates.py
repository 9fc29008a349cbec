"""RULER's 13 tasks: wording, sizes and where a prompt is cut into context, question and answer prefix.

Source: RULER (arXiv 2404.06654), NVIDIA/RULER at c3f5e3b (2026-07-22), `synthetic.yaml` and `constants.py`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

#: What every needle looks like; `{kind}` is always a plural.
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
#: A line of the `noise` haystack.
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@dataclass(frozen=True)
class Wording:
    """One script's prompt: `lead`, the data, `question`, `answer_prefix`, one after the other.

    `question` follows the context, which ends with the data and `after_data`: the cut that makes RULER query-agnostic
    (as in kvpress). Placeholders are those of `str.format`.

    Attributes:
        begins: Pattern of the question's begin; the last match in a prompt counts.
        whole: Pattern of question and answer prefix, the latter as group `prefix`, tolerant of older wordings.
    """

    lead: str
    after_data: str
    question: str
    answer_prefix: str
    begins: str
    whole: str


NIAH = Wording(
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n",
    "\n",
    "What are all the special magic {kind} for {query} mentioned in the provided text?",
    " The special magic {kind} for {query} mentioned in the provided text are",
    r"What (?:is|are all) the special magic",
    r"What (?:is|are all) the special magic .+? mentioned in the provided text\?"
    r"(?P<prefix>\s*The special magic .+ (?:is|are))?",
)
#: The same for one value of one key.
NIAH_SINGULAR = Wording(
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n",
    "\n",
    "What is the special magic {kind} for {query} mentioned in the provided text?",
    " The special magic {kind} for {query} mentioned in the provided text is",
    NIAH.begins,
    NIAH.whole,
)
VT = Wording(
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n",
    "\n",
    "Question: Find all variables that are assigned the value {query} in the text above.",
    " Answer: According to the chain(s) of variable assignment in the text above, "
    "{count} variables are assigned the value {query}, they are: ",
    r"Question: Find all variables that are assigned the value",
    r"Question: Find all variables that are assigned the value \d+ in the text above\."
    r"(?P<prefix>\s*Answer: According to the chain\(s\) .+ they are:\s*)?",
)
CWE = Wording(
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n",
    "\n",
    "Question: What are the 10 most common words in the above list?",
    " Answer: The top 10 words that appear most often in the list are:",
    r"Question: What are the 10 most common words in the above list\?",
    r"Question: What are the 10 most common words in the above list\?(?P<prefix>\s*Answer: The top 10 words .+ are:)?",
)
FWE = Wording(
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. ",
    "\n",
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?",
    " Answer: According to the coded text above, the three most frequently appeared words are:",
    r"Question: Do not provide any explanation\.",
    r"Question: Do not provide any explanation\. .+ in the above coded text\?"
    r"(?P<prefix>\s*Answer: According to .+ are:)?",
)
QA = Wording(
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n",
    "\n\n",
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "Question: {query}",
    " Answer:",
    r"Answer the question based on the given documents\.",
    r"Answer the question based on the given documents\. .+?Question: .+?(?P<prefix>\s*Answer:)?",
)


@dataclass(frozen=True)
class Needles:
    """A needle task: `haystack` is `noise`, `essay` or `needle`; types are `words`, `numbers` or `uuids`."""

    haystack: str
    key_type: str = "words"
    value_type: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


@dataclass(frozen=True)
class Task:
    """One of the 13.

    Attributes:
        max_new_tokens: Tokens to generate, part of a prompt's length.
        leak: Whether the context gives the task away (instruction, or one-shot example with the question).
        needles: Settings of a needle task, None for the others.
    """

    name: str
    family: str
    wording: Wording
    max_new_tokens: int
    metric: str = "string_match_all"
    leak: bool = False
    needles: Needles | None = None


def _needle_task(name: str, family: str, needles: Needles) -> Task:
    wording = NIAH_SINGULAR if needles.values * needles.queries == 1 else NIAH
    return Task(name, family, wording, 128, needles=needles)


TASKS = {
    task.name: task
    for task in (
        _needle_task("niah_single_1", "sparse retrieval", Needles("noise")),
        _needle_task("niah_single_2", "sparse retrieval", Needles("essay")),
        _needle_task("niah_single_3", "sparse retrieval", Needles("essay", value_type="uuids")),
        _needle_task("niah_multikey_1", "sparse retrieval", Needles("essay", keys=4)),
        _needle_task("niah_multikey_2", "dense retrieval", Needles("needle")),
        _needle_task("niah_multikey_3", "dense retrieval", Needles("needle", key_type="uuids", value_type="uuids")),
        _needle_task("niah_multivalue", "multi-needle", Needles("essay", values=4)),
        _needle_task("niah_multiquery", "multi-needle", Needles("essay", keys=4, queries=4)),
        Task("vt", "multi-hop", VT, 30, leak=True),
        Task("cwe", "aggregation", CWE, 120, leak=True),
        Task("fwe", "aggregation", FWE, 50, leak=True),
        Task("qa_1", "qa", QA, 32, "string_match_part"),
        Task("qa_2", "qa", QA, 32, "string_match_part"),
    )
}


def find_task(name: str) -> Task:
    """The task of that name.

    Raises:
        ValueError: No such task.
    """
    if name not in TASKS:
        raise ValueError(f"{name!r} is no RULER task; take one of {', '.join(TASKS)}.")
    return TASKS[name]


def split_prompt(task: Task, prompt: str) -> tuple[str, str, str]:
    """Cuts a prompt, with or without its answer prefix, into context, question and answer prefix.

    Joined they give the prompt byte for byte; the prefix is "" where it has none.

    Raises:
        ValueError: The task's question is missing, or is not the prompt's end.
    """
    starts = [match.start() for match in re.finditer(task.wording.begins, prompt)]
    if not starts:
        raise ValueError(f"the prompt holds no question of {task.name} ({task.wording.begins!r})")
    tail = prompt[starts[-1] :]
    match = re.fullmatch(task.wording.whole, tail, re.DOTALL)
    if match is None:
        raise ValueError(
            f"the prompt goes on after the question of {task.name}: {tail[-60:]!r}; "
            "make the data with RULER's --model_template_type base"
        )
    prefix = match["prefix"] or ""
    return prompt[: starts[-1]], tail[: len(tail) - len(prefix)], prefix


def depth_of(context: str, markers: Iterable[str]) -> float | None:
    """Mean relative position, 0 to 1 in characters, of the markers' first occurrences; None if one is missing."""
    positions = [context.find(marker) for marker in markers]
    if not positions or min(positions) < 0:
        return None
    return sum(positions) / len(positions) / len(context)


def gold_markers(task: Task, references: Iterable[str]) -> list[str]:
    """Strings that stand in a context right where a needle task or `vt` hides its answers; none for other tasks."""
    if task.needles is not None:
        return [f" is: {value}." for value in references]
    return [f"VAR {name} = " for name in references] if task.wording is VT else []
