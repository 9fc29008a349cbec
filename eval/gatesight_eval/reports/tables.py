"""The tables and plots of a report."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..backends.methods import EMPTY, FULL

CONTROLS = (FULL, EMPTY)
#: Of Okabe and Ito, told apart by colour-blind readers.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7")


def markdown(summary: dict[str, Any], against: str) -> str:
    """The whole report as Markdown, in the shape of the paper's tables: methods × kept fractions."""
    parts = [_gate(summary)]
    for name, group in summary["groups"].items():
        parts.append(_means(name, group))
    differences = summary["groups"]["gated mean"]["difference"]
    if differences:
        parts.append(_differences(differences, against))
    parts += [_by_task(summary, task) for task in summary["by_task"]]
    parts += [_depth(summary["by_depth"]), _budgets(summary), _costs(summary["costs"]), _provenance(summary)]
    return "\n\n".join(parts) + "\n"


def table_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def table_header(cells: Sequence[str]) -> str:
    return table_row(cells) + "\n" + "|---" * len(cells) + "|"


def _fractions(table: dict[str, dict[str, Any]]) -> list[str]:
    """Largest first."""
    found = {fraction for method, cells in table.items() if method not in CONTROLS for fraction in cells}
    return sorted(found, key=float, reverse=True)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _interval(value: dict[str, float] | None) -> str:
    return "" if value is None else f"{value['mean']:.3f} ±{(value['high'] - value['low']) / 2:.3f}"


def _gate(summary: dict[str, Any]) -> str:
    gate = summary["gate"]
    lines = [
        "## Which tasks measure the KV cache",
        "",
        f"A task counts in means if the full cache reaches {gate['least_full']:.2f} and the attention cache emptied, "
        f"GDN states kept, at most {gate['most_empty']:.2f}.",
        "",
        table_header(["task", "family", "contexts", "tokens", "full", "emptied", "counted"]),
    ]
    if any(task["leak"] for task in gate["tasks"]):
        lines[2] += " The contexts of tasks marked * say what will be asked, so that no method is query-agnostic there."
    for task in gate["tasks"]:
        counted = "yes" if task["passed"] else "no"
        numbers = [str(task["contexts"]), f"{task['tokens']:.0f}", _number(task["full"]), _number(task["empty"])]
        lines.append(table_row([task["task"] + "*" * task["leak"], task["family"], *numbers, counted]))
    return "\n".join(lines)


def _means(name: str, group: dict[str, Any]) -> str:
    title = "Gated mean" if name == "gated mean" else f"Family: {name}"
    if not group["tasks"]:
        return f"## {title}\n\nNo task counts, so there is no mean."
    return f"## {title}\n\n{group_means(group)}"


def group_means(group: dict[str, Any]) -> str:
    """Tasks, controls, and the table of a group's means: methods × kept fractions."""
    table = group["mean"]
    fractions = _fractions(table)
    lines = [f"Tasks: {', '.join(group['tasks'])}. "]
    lines[-1] += f"Full cache {_interval(table[FULL]['1'])}, emptied {_interval(table[EMPTY]['0'])}."
    lines += ["", table_header(["kept fraction", *fractions])]
    for method, cells in table.items():
        if method not in CONTROLS:
            lines.append(table_row([method, *(_interval(cells.get(fraction)) for fraction in fractions)]))
    return "\n".join(lines)


def _differences(table: dict[str, dict[str, Any]], against: str) -> str:
    fractions = _fractions(table)
    lines = [
        f"## {against} minus the others, paired",
        "",
        "Gated mean with 95 % interval; bold where the interval leaves out zero.",
        "",
        table_header(["kept fraction", *fractions]),
    ]
    for method, cells in table.items():
        if method in CONTROLS:
            continue
        row = []
        for fraction in fractions:
            cell = cells.get(fraction)
            text = "" if cell is None else f"{cell['mean']:+.3f} ({cell['low']:+.3f}…{cell['high']:+.3f})"
            row.append(f"**{text}**" if cell and (cell["low"] > 0 or cell["high"] < 0) else text)
        lines.append(table_row([method, *row]))
    return "\n".join(lines)


def _by_task(summary: dict[str, Any], task: str) -> str:
    table = summary["by_task"][task]
    fractions = _fractions(table)
    passed = next(gate["passed"] for gate in summary["gate"]["tasks"] if gate["task"] == task)
    lines = [
        f"### {task}{'' if passed else ' (not counted)'}",
        "",
        f"Full cache {_number(table[FULL]['1'])}, emptied {_number(table[EMPTY]['0'])}.",
        "",
        table_header(["kept fraction", *fractions]),
    ]
    for method, cells in table.items():
        if method not in CONTROLS:
            lines.append(table_row([method, *(_number(cells.get(fraction)) for fraction in fractions)]))
    return "\n".join(lines)


def _depth(by_depth: dict[str, Any]) -> str:
    fraction = f"{by_depth['fraction']:g}"
    lines = [
        f"## By depth of the answer, kept fraction {fraction}",
        "",
        table_header(["method", "first quarter", "second", "third", "last"]),
    ]
    for method, cells in by_depth["quartiles"].items():
        if fraction in cells:
            lines.append(table_row([method, *map(_number, cells[fraction])]))
    return "\n".join(lines)


def _budgets(summary: dict[str, Any]) -> str:
    achieved, share = summary["achieved"], summary["kv_share"]
    fractions = _fractions(achieved)
    lines = [
        "## Kept entries, and bytes of the attention cache",
        "",
        "Achieved kept fraction / bytes held over bytes of the full cache.",
        "",
        table_header(["kept fraction", *fractions]),
    ]
    for method in achieved:
        if method not in CONTROLS:
            of_method = achieved[method]
            cells = [f"{of_method[p]:.3f} / {share[method][p]:.3f}" if p in of_method else "" for p in fractions]
            lines.append(table_row([method, *cells]))
    return "\n".join(lines)


def _costs(costs: dict[str, Any]) -> str:
    lines = [
        "## Cost of scoring",
        "",
        f"Median share of the prefill of the same context (median prefill {costs['prefill_seconds']:.3f} s).",
        "",
        table_header(["scorer", "share of prefill"]),
    ]
    for name, value in sorted(costs["score_share_of_prefill"].items(), key=lambda pair: pair[1]):
        lines.append(table_row([name, f"{value:.2%}"]))
    return "\n".join(lines)


def _provenance(summary: dict[str, Any]) -> str:
    identity = summary["identity"]
    run = summary["runs"][0]
    backend = run["backend"]
    commits = ", ".join(dict.fromkeys(str(manifest["commit"]) for manifest in summary["runs"]))
    hardware = ", ".join(dict.fromkeys(manifest["backend"]["hardware"] for manifest in summary["runs"]))
    versions = ", ".join(f"{name} {version}" for name, version in backend["versions"].items())
    weights = f" (weights {backend['weights']})" if "weights" in backend else ""
    missing = summary["unfinished_runs"]
    unfinished = [f"Not finished: {', '.join(missing)} contexts.", ""] if missing else []
    return "\n".join(
        [
            "## Provenance",
            "",
            f"{summary['contexts']} contexts ({summary['truncated_contexts']} truncated), {summary['questions']} "
            f"questions. {identity['held']} of {identity['checked']} answers checked against a fresh prefill, "
            "compaction and question had the same tokens.",
            "",
            *unfinished,
            f"Model {backend['model']}{weights} in {backend['backend']}, {backend['dtype']}, {backend['attention']} "
            f"attention, {hardware}, {backend['threads']} thread(s). {versions}. Commit {commits}.",
        ]
    )


def plot_curves(summary: dict[str, Any], group: str, path: Path) -> None:
    """Accuracy over kept fraction with intervals, of the methods that were measured at every fraction."""
    axis, figure = new_axis((7, 4.5))
    table = summary["groups"][group]["mean"]
    fractions = _fractions(table)
    shown = [name for name, cells in table.items() if name not in CONTROLS and len(cells) == len(fractions)]
    for number, method in enumerate(shown):
        cells = table[method]
        points = [(float(p), cells[p]) for p in fractions if p in cells]
        x = [p for p, _ in points]
        # Told apart by colour, line and mark: no palette has so many colours for colour-blind readers.
        turn, colour = number // len(COLOURS), COLOURS[number % len(COLOURS)]
        style = {"linestyle": ("-", "--", ":")[turn % 3], "linewidth": 2.5 if method == "gatesight" else 1.2}
        style |= {"marker": "os^Dv"[turn % 5], "markersize": 3}
        axis.plot(x, [c["mean"] for _, c in points], label=method, color=colour, **style)
        axis.fill_between(x, [c["low"] for _, c in points], [c["high"] for _, c in points], alpha=0.12, color=colour)
    axis.axhline(table[FULL]["1"]["mean"], color="grey", linewidth=0.8, label="full cache")
    axis.set(title=group, xlabel="kept fraction", ylabel="accuracy", xscale="log", ylim=(-0.03, 1.03))
    axis.set_xticks([float(p) for p in fractions], fractions, fontsize=7)
    axis.minorticks_off()
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    save_figure(figure, path)


def plot_depths(summary: dict[str, Any], method: str, path: Path) -> None:
    """Needle depth × kept fraction as a heat map."""
    axis, figure = new_axis((6, 3))
    cells = summary["by_depth"]["quartiles"][method]
    fractions = sorted(cells, key=float)
    values = [[float("nan") if v is None else v for v in cells[p]] for p in fractions]
    image = axis.imshow([list(column) for column in zip(*values, strict=True)], vmin=0, vmax=1, aspect="auto")
    axis.set(
        title=f"{method}: accuracy by depth of the answer", xlabel="kept fraction", ylabel="quarter of the context"
    )
    axis.set_xticks(range(len(fractions)), fractions, fontsize=7)
    axis.set_yticks(range(4), ["first", "second", "third", "last"], fontsize=7)
    figure.colorbar(image)
    save_figure(figure, path)


def plot_costs(summary: dict[str, Any], path: Path) -> None:
    """Cost of scoring as bars, as a share of prefill."""
    axis, figure = new_axis((6, 3.5))
    shares = dict(sorted(summary["costs"]["score_share_of_prefill"].items(), key=lambda pair: pair[1]))
    axis.barh(list(shares), [100 * value for value in shares.values()])
    axis.set(xlabel="scoring, % of prefill", xscale="log")
    save_figure(figure, path)


def require_matplotlib() -> None:
    """Raise RuntimeError, which says what to install, where plots cannot be drawn: before long work, not after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise RuntimeError('Plots need matplotlib: pip install "gatesight-hf[eval]", or -e ".[eval]" in a clone.')


def new_axis(size: tuple[float, float]) -> tuple[Any, Any]:
    """An axis and its figure, of its own: pyplot, whose backend a notebook has chosen, is left alone."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size)
    return figure.subplots(), figure


def save_figure(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=120, bbox_inches="tight")
