"""What a result has to say about its data, so that they can be told apart and made again."""

import hashlib
import json
import platform
from collections.abc import Iterable
from dataclasses import asdict
from statistics import mean
from typing import Any

from ..items import Item
from .generate import installed_version

#: RULER's commit that wording and sizes are taken from.
RULER_COMMIT = "c3f5e3b4f87f97e048793bb510a3a6b19a46bf3a"
SHARED = ("max_length", "seed", "tokenizer", "wonderwords", "sentences", "variants", "leak", "config", "revision")


def manifest(items: Iterable[Item]) -> dict[str, Any]:
    """What these items are and come from, JSON values only.

    Returns:
        `ruler_commit` that the generator follows, `versions` of packages, `sha256` of all items' texts and references,
        and `tasks`: for each the number of `items` and `questions`, `length` (mean, min and max in tokens, None where
        rows do not say), `sources` (files with their SHA-256) and, each as a list of the values that occur, the
        details for tokenizer, seed, variants and so on.

    Raises:
        ValueError: No items.
    """
    by_task: dict[str, list[Item]] = {}
    digest = hashlib.sha256()
    for item in items:
        by_task.setdefault(item.task, []).append(item)
        parts = [item.id, item.context, [asdict(question) for question in item.questions]]
        digest.update(json.dumps(parts, sort_keys=True).encode() + b"\n")
    if not by_task:
        raise ValueError("No items to describe.")
    return {
        "benchmark": "ruler",
        "ruler_commit": RULER_COMMIT,
        "sha256": digest.hexdigest(),
        "versions": {
            "python": platform.python_version(),
            **{name: installed_version(name) for name in ("gatesight-hf", "numpy", "wonderwords", "datasets")},
        },
        "tasks": {task: _task(of_task) for task, of_task in by_task.items()},
    }


def _task(items: list[Item]) -> dict[str, Any]:
    lengths = [item.details["length"] for item in items if item.details.get("length") is not None]
    sources: list[Any] = []
    shared: dict[str, list[Any]] = {}
    for item in items:
        _add(sources, item.details.get("sources", {}))
        for name in SHARED:
            if name in item.details:
                _add(shared.setdefault(name, []), item.details[name])
    return {
        "items": len(items),
        "questions": sum(len(item.questions) for item in items),
        "length": {"mean": mean(lengths), "min": min(lengths), "max": max(lengths)} if lengths else None,
        "sources": sources,
        **shared,
    }


def _add(values: list[Any], value: Any) -> None:
    if value not in values:
        values.append(value)
