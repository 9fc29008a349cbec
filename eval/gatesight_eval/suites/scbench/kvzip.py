"""SCBench as KVzip (arXiv 2505.23416) prepared it: eleven tasks with finished prompts, some in shortened forms."""

import re
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from ..items import Item, Question
from .loading import require
from .reading import check_limits, read_rows
from .tasks import TASKS, check_task

#: Begins every context; KVzip keeps it and the template's header from eviction.
CONTEXT_PREFIX = "Given the context, answer to the following question or request without explanation.\n\n"
#: Shortened contexts of about 8, 20 and 60 thousand tokens.
SIZES = ("tiny", "short", "mid")

_METRICS = {
    "scbench_choice_eng": "kvzip_choice_eng",
    "scbench_many_shot": "kvzip_many_shot",
    "scbench_mf": "kvzip_mf",
    "scbench_qa_eng": "kvzip_qa_eng",
    "scbench_repoqa": "kvzip_repoqa",
    "scbench_summary": "kvzip_summary",
    "scbench_vt": "kvzip_vt",
}


def load_kvzip(
    task: str,
    source: str | Path = "Jang-Hyun/SCBench-preprocessed",
    *,
    revision: str | None = None,
    max_turns: int = -1,
    limit: int | None = None,
    cache_dir: str | Path | None = None,
) -> list[Item]:
    """The items of a task in KVzip's form, with its prompts, answer lengths and scorers.

    Args:
        task: For example `scbench_kv` or `scbench_kv_short`; there is no `scbench_qa_chn`.
        source, revision, limit, cache_dir: See `load`.
        max_turns: Questions per row; -1 is all, as KVzip asks them.

    Raises:
        ValueError: No such task, or rows of another form.
        FileNotFoundError: A local source is not there.
    """
    base_task(task)
    check_limits(max_turns, limit)
    rows = read_rows(source, task, revision=revision, cache_dir=cache_dir, by_file=True)
    origin = {"source": str(source), "revision": revision}
    return items_from_kvzip_rows(task, rows, max_turns=max_turns, limit=limit, origin=origin)


def items_from_kvzip_rows(
    task: str,
    rows: Iterable[Mapping[str, Any]],
    *,
    max_turns: int = -1,
    limit: int | None = None,
    origin: Mapping[str, Any] | None = None,
) -> list[Item]:
    """As `load_kvzip`, of rows in memory. `origin` is put into the items' details."""
    base = base_task(task)
    check_limits(max_turns, limit)
    items = []
    for index, row in enumerate(islice(rows, limit)):
        where = f"row {index} of {task}"
        require(row, ("prompts", "ground_truth"), where)
        labels = list(row["ground_truth"])
        given = len(row["prompts"])
        if not labels or given != len(labels) + 1:
            raise ValueError(f"{where} has {given} prompts, the context among them, and {len(labels)} answers.")
        context, *prompts = row["prompts"]
        turns = len(prompts) if max_turns == -1 else max_turns
        questions = tuple(
            _question(base, row, turn, prompt, label, where)
            for turn, (prompt, label) in islice(enumerate(zip(prompts, labels, strict=True)), turns)
        )
        details = {
            **(origin or {}),
            "form": "kvzip",
            "leak": base == "scbench_mf",  # prepared from the official prompts
            "max_turns": max_turns,
            "row": index,
            "turns": len(prompts),
            "variant": "kvzip",
        }
        item_id, text = f"kvzip-{task}-{index}", CONTEXT_PREFIX + context
        items.append(Item(item_id, "scbench", task, TASKS[base].family, text, questions, details))
    return items


def base_task(task: str) -> str:
    """The task without its size.

    Raises:
        ValueError: KVzip has no such task.
    """
    base = re.sub(rf"_(?:{'|'.join(SIZES)})$", "", task)
    check_task(base)
    if base == "scbench_qa_chn":
        raise ValueError("KVzip's form has no scbench_qa_chn; use `load`.")
    return base


def _question(base: str, row: Mapping[str, Any], turn: int, prompt: str, label: Any, where: str) -> Question:
    where = f"Question {turn} of {where}"
    kind = base
    if len(TASKS[base].answers) > 1:
        require(row, ["task"], where)
        kind = row["task"][turn]
    details: dict[str, Any] = {"task": kind}
    references = tuple(str(one) for one in label) if isinstance(label, list) else (str(label),)
    if kind == "scbench_many_shot":
        references = (_option(prompt, references[0], where),)
    elif kind == "scbench_repoqa":
        require(row, ("lang", "repo", "func_name"), where)
        needles = [[name, code] for name, code in zip(row["func_name"], row["ground_truth"], strict=True) if name]
        details |= {"lang": row["lang"], "repo": row["repo"], "name": row["func_name"][turn]}
        details |= {"needles": needles, "evaluated_needles": needles}
    metric = _METRICS.get(kind, "kvzip_include")
    return Question(f"\n\nQ: {prompt.rstrip()}", references, _max_new_tokens(base), metric, details=details)


def _option(prompt: str, letter: str, where: str) -> str:
    """The line of a question that gives the option "(letter) text"."""
    lines = [line.strip() for line in prompt.split("\n") if f"({letter})" in line]
    if not lines:
        raise ValueError(f"{where} has the answer {letter!r} and no line with ({letter}).")
    return lines[0]


def _max_new_tokens(base: str) -> int:
    if base == "scbench_mf":
        return 32
    if "summary" in base:
        return 256
    return 512 if "repoqa" in base else 96
