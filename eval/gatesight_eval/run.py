"""The protocol: every context is prefilled and scored once, and every method answers the same questions from forks."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from .backends import Backend, ContextResult, Request
from .backends.methods import Cell
from .metrics import score
from .reports.store import RunFolder
from .suites.items import Item
from .suites.prompting import PreparedContext, Prompter


def evaluate(
    items: Sequence[Item],
    backend: Backend,
    prompter: Prompter,
    cells: Sequence[Cell],
    folder: RunFolder,
    check_every: int = 10,
) -> None:
    """Run all items that are not in the folder yet.

    Args:
        items: Contexts with questions.
        backend: Runs the model.
        prompter: Turns items into tokens.
        cells: Methods and kept fractions, the same for all items.
        folder: Receives one result per context.
        check_every: Every so many contexts, one cell is checked against a fresh run.
    """
    backend.check(cells)
    twice = [name for name, count in Counter(item.id for item in items).items() if count > 1]
    if twice:
        raise ValueError(f"Items of one id: {', '.join(twice[:3])}. Is a task, a seed or a data set given twice?")
    for number, item in enumerate(tqdm(items, desc="contexts", unit="context", disable=None)):
        if item.id in folder.done:
            continue
        context = prompter.context_ids(item)
        request = Request(
            context=context,
            questions=[prompter.question_ids(question) for question in item.questions],
            max_new_tokens=[question.max_new_tokens for question in item.questions],
            answers=[prompter.answer_ids(question) for question in item.questions],
            seed=int.from_bytes(hashlib.sha256(item.id.encode()).digest()[:4], "big"),
        )
        result = backend.run(request, cells, check_identity=number % check_every == 0)
        folder.add(_result_line(item, context, result), _cost_line(item, result))


def _result_line(item: Item, context: PreparedContext, result: ContextResult) -> dict[str, Any]:
    return {
        "item": item.id,
        "benchmark": item.benchmark,
        "task": item.task,
        "family": item.family,
        "details": dict(item.details),
        "tokens": len(context.ids),
        "tokens_before_truncation": context.tokens_before,
        "truncated": context.truncated,
        "protected_prefix": context.protected_prefix,
        "kv_bytes": result.kv_bytes,
        "gdn_bytes": result.gdn_bytes,
        "identity_checked": result.identity_checked,
        "identity_held": result.identity_held,
        "questions": [
            {"metric": q.metric, "references": list(q.references), "depth": q.depth, "details": dict(q.details)}
            for q in item.questions
        ],
        "cells": [
            {
                "method": cell.cell.method.label,
                "kept_fraction": cell.cell.kept_fraction,
                "achieved_fraction": cell.achieved_fraction,
                "kept_per_layer": cell.kept_per_layer,
                "kv_bytes": cell.kv_bytes,
                "answers": [
                    {
                        "text": answer.text,
                        "tokens": len(answer.ids),
                        "stop": answer.stop,
                        **vars(score(answer.text, question)),
                    }
                    for answer, question in zip(cell.answers, item.questions, strict=True)
                ],
            }
            for cell in result.cells
        ],
    }


def _cost_line(item: Item, result: ContextResult) -> dict[str, Any]:
    return {
        "item": item.id,
        "prefill_seconds": result.prefill_seconds,
        "score_seconds": result.score_seconds,
        "compaction_seconds": {f"{c.cell.method.label}@{c.cell.kept_fraction}": c.seconds for c in result.cells},
    }
