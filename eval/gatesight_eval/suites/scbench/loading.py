"""SCBench's official rows as items."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ..items import Item, Question
from .reading import check_limits, read_rows
from .tasks import MF_NEUTRAL_PREFIX, OFFICIAL_MAX_TURNS, Task, check_task, question_text, reserved_tokens

#: The official contexts, or `scbench_mf` without a question in its context.
VARIANTS = ("official", "neutral_prefix")
#: Scorers whose answer stands in the context word for word.
_VERBATIM = ("kv", "kv_in_repoqa_and_kv", "repoqa")


def load(
    task: str,
    source: str | Path = "microsoft/SCBench",
    *,
    revision: str | None = None,
    max_turns: int = OFFICIAL_MAX_TURNS,
    limit: int | None = None,
    variant: str = "official",
    cache_dir: str | Path | None = None,
) -> list[Item]:
    """The items of a task.

    Args:
        task: For example `scbench_kv`.
        source: Repository on the Hub, its local copy, a folder of `<task>.parquet` or `<task>.jsonl`, or such a file.
        revision: Commit of the repository; pin it, configurations and splits were renamed. The split is `test`, or else
            the only one.
        max_turns: Questions per row; -1 is all. Official scores of tasks with more than 5 depend on it.
        limit: Rows to use; all if None.
        variant: `neutral_prefix` is for `scbench_mf` alone: its official context begins with the first question, which
            tells a method what to keep (details["leak"]); this variant begins with a sentence that does not.
        cache_dir: Where `datasets` keeps its tables.

    Raises:
        ValueError: No such task or variant, or rows that are not SCBench's.
        FileNotFoundError: A local source is not there.
    """
    check_task(task)
    check_limits(max_turns, limit)
    _check_variant(task, variant)
    rows = read_rows(source, task, revision=revision, cache_dir=cache_dir)
    origin = {"source": str(source), "revision": revision}
    return items_from_rows(task, rows, max_turns=max_turns, limit=limit, variant=variant, origin=origin)


def items_from_rows(
    task: str,
    rows: Iterable[Mapping[str, Any]],
    *,
    max_turns: int = OFFICIAL_MAX_TURNS,
    limit: int | None = None,
    variant: str = "official",
    origin: Mapping[str, Any] | None = None,
) -> list[Item]:
    """As `load`, of rows in memory; they are gone through more than once, so no iterator.

    `origin` is put into the items' details.
    """
    spec = check_task(task)
    check_limits(max_turns, limit)
    _check_variant(task, variant)
    used = islice(rows, limit)
    needles = evaluated = {}
    if "scbench_repoqa" in spec.answers:
        needles = _needles(task, rows, turns=-1)
        evaluated = _needles(task, islice(rows, limit), max_turns)
    items = []
    for index, row in enumerate(used):
        where = f"row {index} of {task}"
        turns = _turns(row, where, max_turns)
        require(row, spec.row_fields, where)
        context = _context_text(task, spec, row, turns, variant, where)
        repository = {}
        if "scbench_repoqa" in spec.answers:
            repository = {"lang": row["lang"], "repo": row["repo"]}
            repository |= {"needles": needles[row["repo"]], "evaluated_needles": evaluated[row["repo"]]}
        questions = tuple(_question(task, spec, turn, context, repository, where) for turn in turns)
        details = {
            **(origin or {}),
            "form": "official",
            "leak": task == "scbench_mf" and variant == "official",
            "max_turns": max_turns,
            "reserved_tokens": reserved_tokens(task, len(turns)),
            "row": index,
            "row_id": row.get("id"),
            "turns": len(row["multi_turns"]),
            "variant": variant,
        }
        if task == "scbench_many_shot":
            details["row_task"] = row.get("task")
        suffix = "" if variant == "official" else f"-{variant}"
        items.append(Item(f"{task}-{index}{suffix}", "scbench", task, spec.family, context, questions, details))
    return items


def require(row: Mapping[str, Any], fields: Iterable[str], where: str) -> None:
    """Raise ValueError if a row or turn lacks a field or has None in it."""
    missing = [name for name in fields if row.get(name) is None]
    if missing:
        raise ValueError(
            f"{where} lacks {', '.join(missing)}; it has {', '.join(row)}. See `load` for the schemas read."
        )


def _check_variant(task: str, variant: str) -> None:
    if variant not in VARIANTS or (variant != "official" and task != "scbench_mf"):
        raise ValueError(f"variant is 'official', or 'neutral_prefix' for scbench_mf; got {variant!r} for {task}.")


def _turns(row: Mapping[str, Any], where: str, max_turns: int) -> list[Mapping[str, Any]]:
    require(row, ["multi_turns"], where)
    turns = list(row["multi_turns"])
    if not turns:
        raise ValueError(f"{where} has no turns.")
    return turns if max_turns == -1 else turns[:max_turns]


def _context_text(
    task: str, spec: Task, row: Mapping[str, Any], turns: Sequence[Mapping[str, Any]], variant: str, where: str
) -> str:
    """What is prefilled. Early rows of `scbench_vt` have the context as `input`; that of `scbench_mf` is a list."""
    context = row.get("context")
    if context is None:
        context = row.get("input")
    if context is None or len(context) == 0:
        raise ValueError(f"{where} has no context: neither `context` nor `input` holds anything.")
    if not isinstance(context, str):
        context = str(list(context))
    prefix = MF_NEUTRAL_PREFIX if variant == "neutral_prefix" else turns[0]["input"]
    return spec.context.format(prefix=prefix, context=context)


def _needles(task: str, rows: Iterable[Mapping[str, Any]], turns: int) -> dict[str, list[list[str]]]:
    """Per repository [name, code] of the functions asked for."""
    needles: dict[str, list[list[str]]] = defaultdict(list)
    for index, row in enumerate(rows):
        where = f"row {index} of {task}"
        require(row, ["repo"], where)
        needles[row["repo"]] += [
            [turn["name"], turn["answer"]]
            for turn in _turns(row, where, turns)
            if turn.get("task") in (None, "scbench_repoqa")
        ]
    return needles


def _question(
    task: str, spec: Task, turn: Mapping[str, Any], context: str, repository: Mapping[str, Any], where: str
) -> Question:
    where = f"A turn of {where}"
    require(turn, ("input", "answer", *spec.turn_fields), where)
    kind = turn["task"] if "task" in spec.turn_fields else task
    if kind not in spec.answers:
        raise ValueError(f"{where} is of task {kind!r}, not one of {', '.join(spec.answers)}.")
    answer = spec.answers[kind]
    labels = turn["answer"] if isinstance(turn["answer"], list) else [turn["answer"]]
    references = tuple(str(label) for label in labels)
    details: dict[str, Any] = {"task": kind}
    if kind == "scbench_choice_eng":
        options = list(turn["options"])
        if references[0] not in options or len(options) != 4:
            raise ValueError(f"{where} has the answer {references[0]!r}, which is not one of four options {options!r}.")
        references = (references[0], "ABCD"[options.index(references[0])])
        details["options"] = options
    elif kind == "scbench_repoqa":
        require(turn, ["name"], where)
        details |= {**repository, "name": turn["name"]}
    at = context.find(references[0]) if answer.metric in _VERBATIM else -1
    depth = at / len(context) if at >= 0 else None
    return Question(
        question_text(task, turn), references, answer.max_new_tokens, answer.metric, depth=depth, details=details
    )
