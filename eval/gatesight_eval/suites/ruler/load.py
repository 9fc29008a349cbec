"""Reads RULER data that others made, and writes generated items in the official form."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..items import Item, Question
from .sources import FilePath, read_text, sha256
from .templates import TASKS, Task, depth_of, find_task, gold_markers, split_prompt

KVPRESS_COLUMNS = ("context", "question", "answer_prefix", "answer", "task", "max_new_tokens")
#: How `datasets` names the builders of files by their ending.
BUILDERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}


def load_official(path: FilePath, task: str | None = None, subset: str = "validation") -> list[Item]:
    """Items of RULER's own files, as its `prepare.py` writes them with `--model_template_type base`.

    Both schemas are read: `answer_prefix` as a field (from 2025-05-30 on) or at the end of `input` (before). Lines are
    told apart by their number, since needle rows' `index` is a position in the text. Where rows were made is not
    written in them: name the commit, tokenizer and length in the result.

    Args:
        path: A `.jsonl` file, or a folder that holds `<task>/<subset>.jsonl` or `<subset>.jsonl`.
        task: Name of a file's task; by default that of its folder.
        subset: Name of the files in a folder.

    Raises:
        FileNotFoundError: Nothing to read there.
        ValueError: An unknown task, or a row that is none of it; names the file and the line.
    """
    path = Path(path)
    if path.is_dir():
        files = [file for file in (path / f"{subset}.jsonl", *sorted(path.glob(f"*/{subset}.jsonl"))) if file.is_file()]
    else:
        files = [path] if path.is_file() else []
    if not files:
        raise FileNotFoundError(f"{path}: neither a .jsonl file nor a folder with <task>/{subset}.jsonl.")
    if task is not None and len(files) > 1:
        raise ValueError(f"{path} holds {len(files)} tasks; name a task only for one file.")
    return [item for file in files for item in _official_file(file, task)]


def _official_file(file: Path, name: str | None) -> Iterator[Item]:
    name = name or file.resolve().parent.name
    if name not in TASKS:
        raise ValueError(f"{file}: its folder {name!r} is no RULER task; name one: load_official(path, task=…).")
    task, digest = TASKS[name], sha256(file)
    lines = read_text(file).split("\n")
    if not any(lines):
        raise ValueError(f"{file}: no rows in it.")
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield _official_row(task, number, json.loads(line), {"file": file.name, "sha256": digest})
            except json.JSONDecodeError as error:
                raise ValueError(f"{file}, line {number}: no JSON ({error.msg}).") from error
            except ValueError as error:
                raise ValueError(f"{file}, line {number}: {error}.") from error


def _official_row(task: Task, number: int, row: Any, source: dict[str, str]) -> Item:
    if not isinstance(row, dict) or not isinstance(row.get("input"), str):
        raise ValueError("not a row of RULER, which has the text `input`")
    references = _references(row.get("outputs"), "outputs")
    context, question, inside = split_prompt(task, row["input"])
    prefix = row.get("answer_prefix", inside)
    if not isinstance(prefix, str) or not prefix:
        raise ValueError("no answer prefix, neither as `answer_prefix` nor at the end of `input`")
    if inside and "answer_prefix" in row:
        raise ValueError("the answer prefix both as `answer_prefix` and at the end of `input`")
    return Item(
        id=f"{task.name}/{number}",
        benchmark="ruler",
        task=task.name,
        family=task.family,
        context=context,
        questions=(_question(task, context, question, prefix, references, task.max_new_tokens),),
        details={
            "leak": task.leak,
            "length": row.get("length"),
            "schema": "answer_prefix" if "answer_prefix" in row else "input",
            "sources": {"rows": source},
        },
    )


def _references(value: Any, name: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(answer, str) for answer in value):
        raise ValueError(f"`{name}` has to be a list of one or more texts, not {value!r}")
    return tuple(value)


def _question(
    task: Task, context: str, text: str, prefix: str, references: tuple[str, ...], max_new_tokens: int
) -> Question:
    return Question(
        text=text,
        references=references,
        max_new_tokens=max_new_tokens,
        metric=task.metric,
        answer_prefix=prefix,
        depth=depth_of(context, gold_markers(task, references)),
    )


def load_kvpress(
    source: FilePath,
    config: str | None = None,
    split: str = "test",
    revision: str | None = None,
    cache_dir: FilePath | None = None,
) -> list[Item]:
    """Items of a data set in kvpress' form, such as `simonjegou/ruler`, whose configs are lengths ("4096").

    That one stems from RULER's generator of November 2024 and Llama 3.1's tokenizer: its prompts are not those of
    `generate`. Rows that share a context become one item with several questions.

    Args:
        source: Name on the Hub, a folder that `datasets.load_dataset` reads, or a .parquet, .json, .jsonl or .csv file.
        config: Name of the configuration, none for a file.
        split: For a file, which has no splits, any.
        revision: Commit on the Hub; give it where results are to be compared.
        cache_dir: Where `datasets` puts what it prepares.

    Raises:
        ImportError: `datasets` is not installed.
        ValueError: A file of another kind, missing columns or a row of another form; names the row, from 0.
    """
    try:
        import datasets
    except ImportError as error:
        raise ImportError("Reading kvpress' data needs datasets: pip install 'gatesight-hf[eval]'") from error

    path, options = Path(source), {"cache_dir": None if cache_dir is None else str(cache_dir)}
    if path.is_file():
        if path.suffix not in BUILDERS:
            raise ValueError(f"{path}: none of {', '.join(BUILDERS)}.")
        rows = datasets.load_dataset(BUILDERS[path.suffix], data_files={split: str(path)}, split=split, **options)
    else:
        rows = datasets.load_dataset(str(source), config, split=split, revision=revision, **options)

    missing = [column for column in KVPRESS_COLUMNS if column not in rows.column_names]
    if missing:
        raise ValueError(f"{source}: no column {', '.join(missing)}; kvpress' are {', '.join(KVPRESS_COLUMNS)}.")
    details = {
        "source": path.name if path.exists() else str(source),
        "config": config,
        "split": split,
        "revision": revision,
        "sources": {"rows": {"file": path.name, "sha256": sha256(path)}} if path.is_file() else {},
    }
    return _grouped(source, rows, details)


def _grouped(source: FilePath, rows: Iterable[Mapping[str, Any]], details: dict[str, Any]) -> list[Item]:
    groups: dict[tuple[str, str], list[tuple[int, Question]]] = {}
    for number, row in enumerate(rows):
        try:
            task = find_task(row["task"])
            references = _references(row["answer"], "answer")
            if not all(isinstance(row[name], str) for name in ("context", "question", "answer_prefix")):
                raise ValueError("context, question and answer_prefix have to be texts")
        except ValueError as error:
            raise ValueError(f"{source}, row {number}: {error}") from error
        question = _question(
            task, row["context"], row["question"], row["answer_prefix"], references, int(row["max_new_tokens"])
        )
        groups.setdefault((task.name, row["context"]), []).append((number, question))
    return [
        Item(
            id=f"{name}/{numbered[0][0]}",
            benchmark="ruler",
            task=name,
            family=TASKS[name].family,
            context=context,
            questions=tuple(question for _, question in numbered),
            details={"leak": TASKS[name].leak, **details, "rows": [number for number, _ in numbered]},
        )
        for (name, context), numbered in groups.items()
    ]


def write_official(items: Iterable[Item], folder: FilePath, subset: str = "validation") -> list[Path]:
    """Writes items as `<folder>/<task>/<subset>.jsonl` in RULER's form, from which `load_official` reads them.

    Of the details only the length stays: keep `manifest(items)` beside the files.

    Returns:
        The files written, one for each task.

    Raises:
        ValueError: An item with several questions, which the form has no place for.
        FileExistsError: A file that is already there.
    """
    rows: dict[str, list[str]] = {}
    for item in items:
        if len(item.questions) != 1:
            raise ValueError(f"{item.id} has {len(item.questions)} questions; a row of RULER has one.")
        question, of_task = item.questions[0], rows.setdefault(item.task, [])
        row = {
            "index": len(of_task),
            "input": item.context + question.text,
            "outputs": list(question.references),
            "length": item.details.get("length"),
            "length_w_model_temp": item.details.get("length"),
            "answer_prefix": question.answer_prefix,
        }
        of_task.append(json.dumps(row) + "\n")
    files = {Path(folder) / task / f"{subset}.jsonl": lines for task, lines in rows.items()}
    for file in files:
        if file.exists():
            raise FileExistsError(f"{file} is already there; write to another folder or remove it.")
    for file, lines in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(lines), encoding="utf-8")
    return list(files)
