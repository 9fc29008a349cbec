"""The tasks of SCBench: prompts word for word (with the double "the"), budgets and scorers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Questions of a row that the official runner asks unless told otherwise (`--max_turns`); -1 asks all.
OFFICIAL_MAX_TURNS = 5
#: What the official runner leaves free for a question in this mode.
QUESTION_TOKENS = 1000
#: Begins the context of `scbench_mf` in the variant `neutral_prefix`; the official context begins with a question.
MF_NEUTRAL_PREFIX = "Memorize the list of numbers below. I will quiz you about it afterwards."

_KV_PROMPT = "Extract the value corresponding to the specified key in the JSON object below.\n\n{context}"
_REPOQA_PROMPT = (
    "Based on the function description and code context, please retrieve and repeat the exact described function from "
    "the code context in a code block wrapped by ```:\n\n{context}"
)


@dataclass(frozen=True)
class Answer:
    """How a turn is answered: its scorer, and the length of the answer in tokens."""

    metric: str
    max_new_tokens: int


@dataclass(frozen=True)
class Task:
    """One of the twelve configurations.

    Attributes:
        family: Category.
        answers: By the `task` of a turn; tasks that do not mix have one, under their own name.
        context: Template of what is prefilled.
        row_fields, turn_fields: Fields that rows and turns have besides the common ones.
    """

    family: str
    answers: Mapping[str, Answer]
    context: str = "{context}"
    row_fields: tuple[str, ...] = ()
    turn_fields: tuple[str, ...] = ()


TASKS: dict[str, Task] = {
    "scbench_kv": Task("string retrieval, verbatim", {"scbench_kv": Answer("kv", 150)}, _KV_PROMPT),
    "scbench_prefix_suffix": Task("string retrieval, verbatim", {"scbench_prefix_suffix": Answer("kv", 150)}),
    "scbench_vt": Task("string retrieval, multi-hop", {"scbench_vt": Answer("vt", 30)}),
    "scbench_repoqa": Task(
        "semantic retrieval, verbatim code",
        {"scbench_repoqa": Answer("repoqa", 1024)},
        _REPOQA_PROMPT,
        row_fields=("lang", "repo"),
        turn_fields=("name",),
    ),
    "scbench_qa_eng": Task(
        "semantic",
        {"scbench_qa_eng": Answer("qa_eng", 40)},
        "Read the book and answer the question. Be very concise in your answer.\n\n{context}",
    ),
    "scbench_qa_chn": Task(
        "semantic", {"scbench_qa_chn": Answer("qa_chn", 40)}, "阅读以下书籍然后回答问题。\n\n{context}"
    ),
    "scbench_choice_eng": Task(
        "semantic, MC",
        {"scbench_choice_eng": Answer("choice_eng", 40)},
        "Read the book and answer the question.\n\n{context}",
        turn_fields=("options",),
    ),
    "scbench_many_shot": Task("global, ICL", {"scbench_many_shot": Answer("many_shot", 10)}),
    "scbench_mf": Task("global", {"scbench_mf": Answer("mf", 5)}, "{prefix}\n\n{context}"),
    "scbench_summary": Task("global", {"scbench_summary": Answer("summary", 200)}),
    "scbench_summary_with_needles": Task(
        "multi-task",
        {"scbench_summary": Answer("summary", 800), "scbench_passkey": Answer("passkey", 15)},
        turn_fields=("task",),
    ),
    "scbench_repoqa_and_kv": Task(
        "multi-task, verbatim",
        {"scbench_repoqa": Answer("repoqa", 1024), "scbench_kv": Answer("kv_in_repoqa_and_kv", 80)},
        row_fields=("lang", "repo"),
        turn_fields=("task",),
    ),
}


def check_task(name: str) -> Task:
    """The task of that name.

    Raises:
        ValueError: There is none.
    """
    if name not in TASKS:
        raise ValueError(f"SCBench has no task {name!r}; its tasks are {', '.join(TASKS)}.")
    return TASKS[name]


def reserved_tokens(name: str, turns: int) -> int:
    """Tokens of `max_seq_length` that the official runner keeps free of context.

    Room for the answers of all turns (half of the turns for each kind of a task that mixes two) and for a question.
    """
    answers = [answer.max_new_tokens for answer in check_task(name).answers.values()]
    return sum(answers) * turns // len(answers) + QUESTION_TOKENS


def question_text(name: str, turn: Mapping[str, Any]) -> str:
    """The prompt of one turn.

    Raises:
        ValueError: A turn of `scbench_mf` does not say "The … is".
    """
    text = str(turn["input"])
    if name == "scbench_choice_eng":
        options = "\n".join(f"{letter}. {option}" for letter, option in zip("ABCD", turn["options"], strict=True))
        return f"Question: {text}\n{options}\n\nThe the correct answer is"
    if name == "scbench_qa_eng":
        return f"Question: {text}\nAnswer:"
    if name == "scbench_qa_chn":
        return f"问题：{text}\n答案："
    if name == "scbench_mf":
        target = re.search("(The .+) is", text)
        if target is None:
            raise ValueError(f'A turn of scbench_mf says what it asks for as "The … is", this one does not: {text!r}.')
        return f"What is {target.group(1).lower()}?\n\n{text}"
    return text
