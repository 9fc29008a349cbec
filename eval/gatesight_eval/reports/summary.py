"""From the results of runs to numbers: gate, means with intervals, families, depths, differences, costs."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..backends.methods import EMPTY, FULL
from .stats import ByTask, Interval, PairedBootstrap
from .store import COSTS, RESULTS, read_lines, read_manifest

#: A task measures the KV cache if the model solves it with the full cache and not with an empty one.
LEAST_FULL, MOST_EMPTY = 0.8, 0.1
QUARTILES = 4
#: What two runs' lines of one context must have in common for their methods to be joined.
JOINED = ("tokens", "protected_prefix", "kv_bytes", "questions")

Row = tuple[str, float]


@dataclass(frozen=True)
class Gate:
    """Whether a task is counted in means, and what says so; `leak` where contexts give the task away."""

    task: str
    family: str
    contexts: int
    tokens: float
    full: float
    empty: float
    passed: bool
    leak: bool


class Results:
    """Everything that was measured in one or several runs of the same items, or of different ones.

    Args:
        folders: Of runs. Where two runs hold the same context, their methods are joined.
        revised: Read the revised scores instead of the official ones.
        kept: Read these kept fractions only, those that all rows share, for example.

    Raises:
        ValueError: No contexts, contexts that not all methods answered, or runs that cannot be joined: of other models,
            or of other tokens or questions of a context.
    """

    def __init__(self, folders: Sequence[Path], revised: bool = False, kept: Sequence[float] | None = None) -> None:
        self.manifests = [read_manifest(folder) for folder in folders]
        if len({manifest["backend"].get("weights") for manifest in self.manifests}) > 1:
            raise ValueError(f"Not of one model: {', '.join(map(str, folders))}. Report each model by itself.")
        self.contexts: dict[str, dict[str, Any]] = {}
        self.costs: list[dict[str, Any]] = []
        #: Contexts of each run.
        self.finished: list[int] = []
        for folder in folders:
            lines = read_lines(folder / RESULTS)
            self.finished.append(len(lines))
            for line in lines:
                held = self.contexts.setdefault(line["item"], line)
                if held is not line:
                    different = [name for name in JOINED if held[name] != line[name]]
                    if different:
                        raise ValueError(
                            f"{folder} has the context {line['item']} as another run, but {', '.join(different)} "
                            "differ: such methods cannot be joined."
                        )
                    known = {(cell["method"], cell["kept_fraction"]): cell for cell in held["cells"]}
                    new = []
                    for cell in line["cells"]:
                        twin = known.get((cell["method"], cell["kept_fraction"]))
                        if twin is None:
                            new.append(cell)
                        elif twin != cell:
                            raise ValueError(
                                f"{folder} has other answers of {cell['method']} at {cell['kept_fraction']} to "
                                f"{line['item']} than another run: they differ in options or code. Report them apart."
                            )
                    sums = {name: held[name] + line[name] for name in ("identity_checked", "identity_held")}
                    self.contexts[line["item"]] = {**held, **sums, "cells": held["cells"] + new}
            self.costs += read_lines(folder / COSTS)
        if not self.contexts or not self.costs:
            raise ValueError(f"No finished contexts in {', '.join(map(str, folders))}.")
        self._score = "revised" if revised else "official"
        self.tasks = list(dict.fromkeys(context["task"] for context in self.contexts.values()))
        self.families = {context["task"]: context["family"] for context in self.contexts.values()}
        rows = [self._rows(context) for context in self.contexts.values()]
        self.rows = rows[0]
        for item, other in zip(self.contexts, rows, strict=True):
            if set(other) != set(self.rows):
                cells = ", ".join(f"{method} at {p:g}" for method, p in sorted(set(other) ^ set(self.rows)))
                raise ValueError(
                    f"{item} and {next(iter(self.contexts))} were not answered by the same methods at the same kept "
                    f"fractions: {cells}. Finish the runs, or leave one out."
                )
        #: Each context with the cell of a row.
        self._cells: dict[Row, list[tuple[dict[str, Any], dict[str, Any]]]] = {row: [] for row in self.rows}
        for context in self.contexts.values():
            for cell in context["cells"]:
                self._cells[cell["method"], cell["kept_fraction"]].append((context, cell))
        if kept is not None:
            missing = sorted(set(kept) - set(self.fractions))
            if missing:
                raise ValueError(f"--kept: no results at {missing}; there are {self.fractions}.")
            self.rows = [(name, p) for name, p in self.rows if p in kept or name in (FULL, EMPTY)]

    def cells(self, row: Row) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Each context with its cell of a row."""
        return self._cells[row]

    @staticmethod
    def _rows(context: dict[str, Any]) -> list[Row]:
        return [(cell["method"], cell["kept_fraction"]) for cell in context["cells"]]

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(method for method, _ in self.rows if method not in (FULL, EMPTY)))

    @property
    def fractions(self) -> list[float]:
        """Largest first."""
        return sorted({p for method, p in self.rows if method not in (FULL, EMPTY)}, reverse=True)

    def accuracies(
        self, row: Row, tasks: Sequence[str], keep: Callable[[dict[str, Any]], bool] = lambda question: True
    ) -> ByTask:
        """By task, the mean score of each context's questions that `keep` takes; contexts without any are left out."""
        found: dict[str, list[float]] = {task: [] for task in tasks}
        for context, cell in self.cells(row):
            if context["task"] not in found:
                continue
            pairs = zip(context["questions"], cell["answers"], strict=True)
            scores = [answer[self._score] for question, answer in pairs if keep(question)]
            if scores:
                found[context["task"]].append(sum(scores) / len(scores))
        return {task: np.array(values) for task, values in found.items() if values}

    def gates(self) -> list[Gate]:
        full, empty = (self.accuracies(row, self.tasks) for row in ((FULL, 1.0), (EMPTY, 0.0)))
        gates = []
        for task in self.tasks:
            contexts = [context for context in self.contexts.values() if context["task"] == task]
            tokens = [context["tokens"] for context in contexts]
            at_full, at_empty = float(full[task].mean()), float(empty[task].mean())
            gates.append(
                Gate(
                    task=task,
                    family=self.families[task],
                    contexts=len(tokens),
                    tokens=sum(tokens) / len(tokens),
                    full=at_full,
                    empty=at_empty,
                    passed=at_full >= LEAST_FULL and at_empty <= MOST_EMPTY,
                    leak=any(context["details"].get("leak", False) for context in contexts),
                )
            )
        return gates


def summarise(results: Results, against: str, depth_fraction: float, resamples: int = 1000) -> dict[str, Any]:
    """All numbers of a report, as JSON values.

    Args:
        results: What was measured.
        against: The method that others are compared with, such as `gatesight`.
        depth_fraction: Kept fraction at which results by depth are given.
        resamples: Of the bootstrap.

    Raises:
        ValueError: `against` or `depth_fraction` was not measured.
    """
    if against not in results.methods:
        raise ValueError(f"--against {against}: not among the measured methods, {', '.join(results.methods)}.")
    if depth_fraction not in results.fractions:
        measured = ", ".join(f"{fraction:g}" for fraction in results.fractions)
        raise ValueError(f"--depth-fraction {depth_fraction:g}: not among the measured kept fractions, {measured}.")
    gates = results.gates()
    gated = [gate.task for gate in gates if gate.passed]
    groups = {"gated mean": gated}
    for family in dict.fromkeys(gate.family for gate in gates if gate.passed):
        groups[family] = [gate.task for gate in gates if gate.passed and gate.family == family]
    means: dict[str, dict[str, Any]] = {}
    for name, tasks in groups.items():
        if not tasks:
            means[name] = {"tasks": [], "mean": {}, "difference": {}}
            continue
        by_row = {row: results.accuracies(row, tasks) for row in results.rows}
        bootstrap = PairedBootstrap({task: len(values) for task, values in by_row[results.rows[0]].items()}, resamples)
        means[name] = {
            "tasks": tasks,
            "mean": _table(results, lambda row, b=bootstrap, a=by_row: b.mean(a[row])),  # type: ignore[misc]
            "difference": _differences(results, against, by_row, bootstrap),
        }
    checked = sum(context["identity_checked"] for context in results.contexts.values())
    held = sum(context["identity_held"] for context in results.contexts.values())
    return {
        "runs": results.manifests,
        "contexts": len(results.contexts),
        "questions": sum(len(context["questions"]) for context in results.contexts.values()),
        "unfinished_runs": [
            f"{done} of {manifest['data']['items']}"
            for done, manifest in zip(results.finished, results.manifests, strict=True)
            if done < manifest["data"]["items"]
        ],
        "truncated_contexts": sum(context["truncated"] for context in results.contexts.values()),
        "gate": {"least_full": LEAST_FULL, "most_empty": MOST_EMPTY, "tasks": [asdict(gate) for gate in gates]},
        "groups": means,
        "by_task": {
            task: _table(results, lambda row, t=task: float(results.accuracies(row, [t])[t].mean()))  # type: ignore[misc]
            for task in results.tasks
        },
        "by_depth": _by_depth(results, gated, depth_fraction),
        "achieved": _table(results, lambda row: _mean_of_cells(results, row, "achieved_fraction")),
        "kv_share": _table(results, lambda row: _kv_share(results, row)),
        "unparsed": _table(results, lambda row: _share_of_answers(results, row, lambda answer: not answer["parsed"])),
        "cut_answers": _table(
            results, lambda row: _share_of_answers(results, row, lambda answer: answer["stop"] == "length")
        ),
        "identity": {"checked": checked, "held": held},
        "costs": _costs(results),
    }


def _table(results: Results, value: Callable[[Row], Any]) -> dict[str, dict[str, Any]]:
    """By method and kept fraction."""
    table: dict[str, dict[str, Any]] = {}
    for method, fraction in results.rows:
        found = value((method, fraction))
        found = asdict(found) if isinstance(found, Interval) else found
        table.setdefault(method, {})[f"{fraction:g}"] = found
    return table


def _differences(
    results: Results, against: str, by_row: dict[Row, ByTask], bootstrap: PairedBootstrap
) -> dict[str, dict[str, Any]]:
    """`against` minus each other method at the same kept fraction."""

    def value(row: Row) -> Interval | None:
        own = (against, row[1])
        return bootstrap.difference(by_row[own], by_row[row]) if own in by_row and row != own else None

    table = _table(results, value)
    return {method: cells for method, cells in table.items() if any(cells.values())}


def _by_depth(results: Results, tasks: Sequence[str], fraction: float) -> dict[str, Any]:
    """Mean over tasks by quartile of where the answer stands, at one kept fraction; and for all of them, by method."""

    def at(row: Row) -> list[float | None]:
        quartiles: list[float | None] = []
        for quartile in range(QUARTILES):

            def inside(question: dict[str, Any], quartile: int = quartile) -> bool:
                depth = question["depth"]
                return depth is not None and min(QUARTILES - 1, int(depth * QUARTILES)) == quartile

            found = [float(values.mean()) for values in results.accuracies(row, tasks, inside).values()]
            quartiles.append(sum(found) / len(found) if found else None)
        return quartiles

    table = _table(results, at)
    return {"fraction": fraction, "quartiles": table}


def _mean_of_cells(results: Results, row: Row, name: str) -> float:
    found = [cell[name] for _, cell in results.cells(row)]
    return float(sum(found) / len(found))


def _kv_share(results: Results, row: Row) -> float:
    """Bytes of the compacted attention cache over those of the full one."""
    kept = sum(cell["kv_bytes"] for _, cell in results.cells(row))
    return float(kept / sum(context["kv_bytes"] for context, _ in results.cells(row)))


def _share_of_answers(results: Results, row: Row, counts: Callable[[dict[str, Any]], bool]) -> float:
    answers = [answer for _, cell in results.cells(row) for answer in cell["answers"]]
    return sum(map(counts, answers)) / len(answers)


def _costs(results: Results) -> dict[str, Any]:
    """Median seconds of prefill, and of each scorer as a share of the prefill of its own context."""
    prefill = float(np.median([line["prefill_seconds"] for line in results.costs]))
    shares: dict[str, list[float]] = {}
    for line in results.costs:
        for name, seconds in line["score_seconds"].items():
            shares.setdefault(name, []).append(seconds / line["prefill_seconds"])
    return {
        "prefill_seconds": prefill,
        "score_share_of_prefill": {name: float(np.median(values)) for name, values in shares.items()},
    }
