"""`gatesight report`: intervals that are right, means over tasks that pass the gate, and tables without holes."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gatesight_eval.reports.stats import ByTask, Interval, PairedBootstrap
from gatesight_eval.reports.summary import Results, summarise
from gatesight_eval.reports.tables import markdown
from gatesight_hf.commands.cli import main

# -- intervals ---------------------------------------------------------------------------------------------------------


def accuracies_of(counts: dict[str, int], seed: int = 0) -> ByTask:
    rng = np.random.default_rng(seed)
    return {task: rng.random(count) for task, count in counts.items()}


def test_bootstrap_is_that_of_a_direct_computation() -> None:
    counts = {"b": 7, "a": 4}
    one, other = accuracies_of(counts), accuracies_of(counts, seed=1)
    bootstrap = PairedBootstrap(counts, resamples=50, seed=3)
    rng = np.random.default_rng(3)
    draws = {
        task: [[int(i) for i in row] for row in rng.integers(0, counts[task], (50, counts[task]))] for task in "ab"
    }

    def direct(values: dict[str, list[float]]) -> Interval:
        means = []
        for resample in range(50):
            of_tasks = [sum(values[t][i] for i in draws[t][resample]) / counts[t] for t in counts]
            means.append(sum(of_tasks) / len(of_tasks))
        low, high = np.percentile(means, [2.5, 97.5])
        return Interval(sum(sum(values[t]) / counts[t] for t in counts) / len(counts), low, high)

    for found, values in (
        (bootstrap.mean(one), {t: list(one[t]) for t in counts}),
        (bootstrap.difference(one, other), {t: [a - b for a, b in zip(one[t], other[t], strict=True)] for t in counts}),
    ):
        expected = direct(values)
        assert vars(found) == pytest.approx(vars(expected))
        assert found.low < found.mean < found.high
    assert bootstrap.mean(one) == PairedBootstrap(counts, 50, 3).mean(one) != PairedBootstrap(counts, 50, 4).mean(one)


def test_paired_differences_are_narrower_where_contexts_agree() -> None:
    counts = {"a": 40, "b": 40}
    one = accuracies_of(counts)
    other = {task: np.clip(values - 0.05 + 0.02 * accuracies_of(counts, 1)[task], 0, 1) for task, values in one.items()}
    paired = PairedBootstrap(counts).difference(one, other)
    first, second = PairedBootstrap(counts, seed=1).mean(one), PairedBootstrap(counts, seed=2).mean(other)
    unpaired = np.hypot(first.high - first.low, second.high - second.low)
    assert paired.high - paired.low < 0.1 * unpaired
    assert paired.low > 0, "a difference that is the same everywhere is seen"


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    truth = {"easy": 0.9, "hard": 0.3}
    rng, covered = np.random.default_rng(8), 0
    for trial in range(300):
        values = {task: (rng.random(60) < p).astype(float) for task, p in truth.items()}
        interval = PairedBootstrap(dict.fromkeys(truth, 60), resamples=300, seed=trial).mean(values)
        covered += interval.low <= 0.6 <= interval.high
    assert 0.91 <= covered / 300 <= 0.985


def test_there_is_no_mean_of_nothing() -> None:
    with pytest.raises(ValueError, match="no tasks"):
        PairedBootstrap({})


# -- runs as evaluate writes them --------------------------------------------------------------------------------------

FULL, EMPTY = ("full", 1.0), ("empty", 0.0)
ROWS = [FULL, EMPTY, *((method, p) for method in ("gatesight", "snapkv") for p in (0.5, 0.1))]
Scores = Sequence[float]


def context(item: str, scores: dict[tuple[str, float], Scores], **fields: Any) -> dict[str, Any]:
    """A line of results.jsonl: scores of each row's answers."""
    depths = fields.pop("depths", [0.1] * len(scores[FULL]))
    revised = fields.pop("revised", 0.0)

    def cell(row: tuple[str, float]) -> dict[str, Any]:
        answers = [{"text": "", "tokens": 1, "stop": "length" if s < 0.5 else "end", "official": s,
                    "revised": s + revised, "parsed": s > 0} for s in scores[row]]  # fmt: skip
        return {"method": row[0], "kept_fraction": row[1], "achieved_fraction": row[1], "kept_per_layer": [1, 2],
                "kv_bytes": int(1000 * row[1]) * (2 if row[0] == "snapkv" else 1), "answers": answers}  # fmt: skip

    line = {"item": item, "benchmark": "toy", "task": "t", "family": "f", "details": {}, "tokens": 100,
            "tokens_before_truncation": 100, "truncated": False, "protected_prefix": 0, "kv_bytes": 1000,
            "gdn_bytes": 10, "identity_checked": 1, "identity_held": 1,
            "questions": [{"metric": "m", "references": ["x"], "depth": d, "details": {}} for d in depths]}  # fmt: skip
    return {**line, **fields, "cells": [cell(row) for row in scores]}


def answers(full: float, empty: float = 0.0, ours: float = 0.5, other: float = 0.25) -> dict[tuple[str, float], Scores]:
    """One question, answered at 0.1 half as well as at 0.5."""
    return dict(zip(ROWS, ([full], [empty], [ours], [ours / 2], [other], [other / 2]), strict=True))


def run_of(folder: Path, lines: Iterable[dict[str, Any]], weights: str = "w", missing: int = 0) -> Path:
    folder.mkdir()
    lines = list(lines)
    backend = {"backend": "transformers", "model": "m", "weights": weights, "dtype": "float32", "attention": "sdpa",
               "hardware": "CPU", "threads": 1, "versions": {"torch": "2"}}  # fmt: skip
    (folder / "run.json").write_text(
        json.dumps({"asked": {}, "backend": backend, "commit": "c", "data": {"items": len(lines) + missing}})
    )
    costs = []
    with (folder / "results.jsonl").open("w") as file:
        for n, line in enumerate(lines):
            file.write(json.dumps(line) + "\n")
            costs.append({"item": line["item"], "prefill_seconds": 2.0 + n, "compaction_seconds": {},
                          "score_seconds": {"gatesight": 0.02, "snapkv": 0.1 * (2 + n)}})  # fmt: skip
    (folder / "costs.jsonl").write_text("".join(json.dumps(cost) + "\n" for cost in costs))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Tasks that pass the gate (`needle`, `pair` just so), that fail it for either reason, over two families."""
    lines = []
    for n in range(10):
        lines += [
            context(f"needle/{n}", answers(1.0, 0.0, 0.8, 0.4), task="needle", family="sparse"),
            context(f"pair/{n}", answers(float(n > 0), float(n == 9), 0.6, 0.2), task="pair", family="dense"),
            context(f"lost/{n}", answers(0.79, 0.0, 0.1, 0.1), task="lost", family="sparse"),
            context(f"told/{n}", answers(1.0, 0.11, 1.0, 1.0), task="told", family="told"),
        ]
    return run_of(tmp_path / "run", lines)


def test_means_are_over_tasks_that_pass_the_gate(run: Path) -> None:
    summary = summarise(Results([run]), "gatesight", 0.5)
    gates = {gate["task"]: gate for gate in summary["gate"]["tasks"]}
    assert {task: gate["passed"] for task, gate in gates.items()} == {
        "needle": True, "pair": True, "lost": False, "told": False,
    }  # fmt: skip
    assert (gates["pair"]["full"], gates["pair"]["empty"], gates["pair"]["contexts"]) == (0.9, 0.1, 10)
    groups = summary["groups"]
    assert {name: group["tasks"] for name, group in groups.items()} == {
        "gated mean": ["needle", "pair"], "sparse": ["needle"], "dense": ["pair"],
    }  # fmt: skip
    for name, ours, other in (("gated mean", 0.7, 0.3), ("sparse", 0.8, 0.4), ("dense", 0.6, 0.2)):
        means, difference = groups[name]["mean"], groups[name]["difference"]
        assert [means[m][p]["mean"] for m in ("gatesight", "snapkv") for p in ("0.5", "0.1")] == pytest.approx(
            [ours, ours / 2, other, other / 2]
        )
        assert {p: cell["mean"] for p, cell in difference["snapkv"].items()} == pytest.approx({"0.5": 0.4, "0.1": 0.2})
        assert list(difference) == ["snapkv"]
    assert groups["gated mean"]["mean"]["full"]["1"]["mean"] == pytest.approx(0.95)
    assert summary["by_task"]["told"]["snapkv"] == {"0.5": 1.0, "0.1": 0.5}
    assert (summary["contexts"], summary["questions"], summary["truncated_contexts"]) == (40, 40, 0)
    assert summary["identity"] == {"checked": 40, "held": 40}


def test_budgets_answers_and_costs_are_counted(tmp_path: Path) -> None:
    rows = dict(zip(ROWS, ([1.0, 0.7], [0.0, 0.0], [1.0, 0.0], [0.2, 0.0], [0.9, 0.9], [0.9, 0.0]), strict=True))
    lines = [context(f"t/{n}", rows, truncated=n == 1, identity_held=n) for n in range(2)]
    summary = summarise(Results([run_of(tmp_path / "run", lines)]), "gatesight", 0.1)
    assert summary["achieved"]["gatesight"] == {"0.5": 0.5, "0.1": 0.1}
    assert summary["kv_share"]["snapkv"] == {"0.5": 1.0, "0.1": 0.2} and summary["kv_share"]["empty"] == {"0": 0.0}
    assert summary["unparsed"]["gatesight"] == {"0.5": 0.5, "0.1": 0.5} and summary["unparsed"]["empty"] == {"0": 1.0}
    assert summary["cut_answers"]["gatesight"] == {"0.5": 0.5, "0.1": 1.0}
    assert (summary["truncated_contexts"], summary["identity"]) == (1, {"checked": 2, "held": 1})
    shares = summary["costs"]["score_share_of_prefill"]
    assert summary["costs"]["prefill_seconds"] == 2.5
    assert shares == pytest.approx({"gatesight": (0.02 / 2 + 0.02 / 3) / 2, "snapkv": 0.1})


def test_depths_are_quarters_of_the_context(tmp_path: Path) -> None:
    depths = [0.0, 0.249, 0.25, 0.5, 0.76, 1.0, None]
    scores = [1.0, 0.5, 0.25, 0.0, 1.0, 0.0, 1.0]
    rows = dict.fromkeys(ROWS, [1.0] * 7) | {EMPTY: [0.0] * 7, ("gatesight", 0.1): scores}
    summary = summarise(Results([run_of(tmp_path / "run", [context("t/0", rows, depths=depths)])]), "gatesight", 0.1)
    assert summary["by_depth"]["quartiles"]["gatesight"]["0.1"] == [0.75, 0.25, 0.0, 0.5]
    assert "| gatesight | 0.750 | 0.250 | 0.000 | 0.500 |" in markdown(summary, "gatesight")


def test_official_and_revised_scores_are_told_apart(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", [context("t/0", answers(0.5, 0.0, 0.2, 0.1), revised=0.4)])
    tasks = [summarise(Results([run], revised), "gatesight", 0.5)["by_task"]["t"] for revised in (False, True)]
    assert [task["full"]["1"] for task in tasks] == [0.5, 0.9]
    assert [task["gatesight"]["0.5"] for task in tasks] == pytest.approx([0.2, 0.6])


# -- several runs ------------------------------------------------------------------------------------------------------


def only(rows: dict[tuple[str, float], Scores], *methods: str) -> dict[tuple[str, float], Scores]:
    return {row: scores for row, scores in rows.items() if row[0] in ("full", "empty", *methods)}


def test_methods_of_two_runs_on_the_same_items_are_joined(tmp_path: Path) -> None:
    ours = [context(f"t/{n}", only(answers(1.0), "gatesight")) for n in range(3)]
    # In another order: contexts are matched by their ids.
    other = [context(f"t/{n}", only(answers(1.0, other=0.1 * n), "snapkv")) for n in (2, 0, 1)]
    folders = [run_of(tmp_path / name, lines) for name, lines in (("ours", ours), ("other", other))]
    summary = summarise(Results(folders), "gatesight", 0.5)
    assert summary["contexts"] == 3 and len(summary["runs"]) == 2
    assert summary["identity"] == {"checked": 6, "held": 6}
    assert summary["groups"]["gated mean"]["difference"]["snapkv"]["0.5"]["mean"] == pytest.approx(0.5 - 0.1)
    whole = [context(f"t/{n}", answers(1.0, other=0.1 * n)) for n in range(3)]
    alone = summarise(Results([run_of(tmp_path / "whole", whole)]), "gatesight", 0.5)
    assert summary["groups"] == alone["groups"]


def test_tasks_of_two_runs_are_put_together(tmp_path: Path) -> None:
    folders = [run_of(tmp_path / t, [context(f"{t}/0", answers(1.0), task=t)]) for t in ("a", "b")]
    assert summarise(Results(folders), "gatesight", 0.5)["groups"]["gated mean"]["tasks"] == ["a", "b"]


def test_runs_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    first = run_of(tmp_path / "first", [context(f"t/{n}", only(answers(1.0), "gatesight")) for n in range(2)])
    snapkv = only(answers(1.0), "snapkv")
    others = {
        "part": ([context("t/0", snapkv)], "w", r"t/1 and t/0 were not .* snapkv at 0\.1, snapkv at 0\.5\. Finish"),
        "model": ([context(f"t/{n}", snapkv) for n in range(2)], "v", "Not of one model: .*first, .*model"),
        "tokens": (
            [context(f"t/{n}", snapkv, tokens=99) for n in range(2)],
            "w",
            "the context t/0 .* but tokens differ",
        ),
        "questions": ([context("t/0", snapkv, depths=[0.7])], "w", "the context t/0 .* but questions differ"),
    }
    for name, (lines, weights, message) in others.items():
        with pytest.raises(ValueError, match=message):
            Results([first, run_of(tmp_path / name, lines, weights)])


def test_a_run_without_finished_contexts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No finished contexts"):
        Results([run_of(tmp_path / "run", [])])


# -- what is written ---------------------------------------------------------------------------------------------------


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def tables_of(text: str) -> dict[str, list[list[str]]]:
    """Cells of each table by its heading."""
    tables: dict[str, list[list[str]]] = {}
    heading = ""
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.strip("# ")
        elif line.startswith("|") and not line.startswith("|--"):
            tables.setdefault(heading, []).append([cell.strip() for cell in line.strip("|").split("|")])
    return tables


def test_every_table_has_every_method_and_fraction(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--depth-fraction", "0.5"]) == 0
    text = (run / "report.md").read_text()
    assert capsys.readouterr().out.strip() == text.strip()
    assert not re.search(r"\b(nan|inf|none)\b", text, re.IGNORECASE)
    tables = tables_of(text)
    for heading in ("Gated mean", "Family: sparse", "Family: dense", "Kept entries, and bytes of the attention cache",
                    "needle", "pair", "lost (not counted)", "told (not counted)"):  # fmt: skip
        head, *rows = tables[heading]
        assert head == ["kept fraction", "0.5", "0.1"]
        assert [row[0] for row in rows] == ["gatesight", "snapkv"] and all(len(row) == 3 and all(row) for row in rows)
    assert tables["gatesight minus the others, paired"][1][1].startswith("**+0.400")
    assert [row[0] for row in tables["By depth of the answer, kept fraction 0.5"]] == ["method", "gatesight", "snapkv"]
    assert len(tables["Which tasks measure the KV cache"]) == 5 and len(tables["Cost of scoring"]) == 3
    for rows in tables.values():
        assert len({len(row) for row in rows}) == 1
    assert strict((run / "report.json").read_text())["contexts"] == 40
    for name in ("curves", "costs", "depths"):
        assert (run / f"report-{name}.png").read_bytes().startswith(b"\x89PNG")


def test_methods_at_other_fractions_leave_their_cells_blank(tmp_path: Path) -> None:
    rows = {row: scores for row, scores in answers(1.0).items() if row not in (("snapkv", 0.5), ("gatesight", 0.1))}
    text = markdown(
        summarise(Results([run_of(tmp_path / "run", [context("t/0", rows)])]), "gatesight", 0.5), "gatesight"
    )
    tables = tables_of(text)
    for heading in ("Gated mean", "t", "Kept entries, and bytes of the attention cache"):
        ours, other = tables[heading][1:]
        assert ours[1] and not ours[2] and other[2] and not other[1], heading


def test_no_task_that_counts_is_said_and_not_averaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "run", [context("t/0", answers(0.2))])
    assert main(["report", str(run), "--depth-fraction", "0.5", "--json"]) == 0
    summary = strict(capsys.readouterr().out)
    assert summary["groups"] == {"gated mean": {"tasks": [], "mean": {}, "difference": {}}}
    assert summary["by_task"]["t"]["full"] == {"1": 0.2}
    text = (run / "report.md").read_text()
    assert "No task counts, so there is no mean." in text and "t (not counted)" in text
    assert not re.search(r"\bnan\b", text)


def test_names_with_dots_are_kept_whole(run: Path, tmp_path: Path) -> None:
    assert main(["report", str(run), "--out", str(tmp_path / "new" / "v0.1"), "--depth-fraction", "0.5"]) == 0
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names == {"v0.1.json", "v0.1.md", "v0.1-curves.png", "v0.1-costs.png", "v0.1-depths.png"}


@pytest.mark.parametrize(
    ("arguments", "mend"),
    [
        (["nowhere"], "nowhere holds no run.json: it is no folder that `gatesight evaluate --out` made"),
        (["run", "nowhere"], "nowhere holds no run.json"),
        (["run", "--against", "kvzip"], "--against kvzip: not among the measured methods, gatesight, snapkv."),
        (["run", "--depth-fraction", "0.3"], "--depth-fraction 0.3: not among the measured kept fractions, 0.5, 0.1."),
    ],
)
def test_errors_are_one_line(
    run: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], mend: str
) -> None:
    monkeypatch.chdir(run.parent)
    assert main(["report", *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gatesight: ") and mend in line
    assert not (run / "report.md").exists()


def test_from_the_model_to_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "--suite toy --tasks niah_single_2,shared_kv --length 256 --count 1 --kept 0.5,0.2 --threads 1"
    for name, methods in (("ours", "gatesight,random"), ("other", "keydiff@flat")):
        folder = str(tmp_path / name)
        assert main(["evaluate", *command.split(), "--method", methods, "--out", folder]) == 0
    capsys.readouterr()
    folders = [str(tmp_path / name) for name in ("ours", "other")]
    assert main(["report", *folders, "--depth-fraction", "0.2", "--out", str(tmp_path / "all"), "--json"]) == 0
    summary = strict(capsys.readouterr().out)
    assert list(summary["by_task"]) == ["niah_single_2", "shared_kv"]
    assert list(summary["achieved"]) == ["full", "empty", "gatesight", "random", "keydiff@flat"]
    assert all(found == pytest.approx(float(p), abs=0.01)
               for cells in summary["achieved"].values() for p, found in cells.items())  # fmt: skip
    assert summary["by_task"]["niah_single_2"]["gatesight"]["0.5"] == 1.0
    assert summary["identity"]["held"] == summary["identity"]["checked"] > 0


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    rows = dict(zip(ROWS, ([1.0], [0.0], [1.0], [0.2], [0.9], [0.9]), strict=True))
    folder = run_of(tmp_path / "run", [context("t/0", rows)], missing=2)
    summary = summarise(Results([folder]), "gatesight", 0.1)
    assert summary["unfinished_runs"] == ["1 of 3"]
    assert "Not finished: 1 of 3 contexts." in markdown(summary, "gatesight")


def test_runs_that_disagree_on_a_method_are_not_joined(tmp_path: Path) -> None:
    """The same items and method with other options, for example: neither result may be dropped in silence."""
    rows = dict(zip(ROWS, ([1.0], [0.0], [1.0], [0.2], [0.9], [0.9]), strict=True))
    other = dict(zip(ROWS, ([1.0], [0.0], [1.0], [0.2], [0.1], [0.9]), strict=True))
    first, second = (run_of(tmp_path / name, [context("t/0", r)]) for name, r in (("a", rows), ("b", other)))
    with pytest.raises(ValueError, match="other answers of snapkv"):
        Results([first, second])


def test_a_report_can_be_of_some_fractions_only(run: Path) -> None:
    summary = summarise(Results([run], kept=[0.5]), "gatesight", 0.5)
    assert {p for cells in summary["achieved"].values() for p in cells} == {"0.5", "1", "0"}
    with pytest.raises(ValueError, match=r"no results at \[0.3\]"):
        Results([run], kept=[0.5, 0.3])


@pytest.mark.parametrize("line", ["{}", "[]", '{"item": "a", "cells": 3}'])
def test_a_folder_of_other_content_is_one_line(run: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "results.jsonl").write_text(line + "\n")
    assert main(["report", str(run)]) == 1
    assert "not results as" in capsys.readouterr().err
