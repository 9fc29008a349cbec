"""Tables and plots (`matplotlib` figures) of `gatesight analyze`."""

from typing import Any

from ..reports.tables import new_axis, table_header, table_row

#: The paper's own numbers on Qwen3.8-27B, where this measures the same thing.
PAPER = {"mlp": 0.410, "ridge": 0.386, "age only": 0.179}
#: Of Okabe and Ito, told apart by colour-blind readers.
COLOURS = ("#0072B2", "#E69F00")
KINDS = {"write": "effective write β‖v‖", "forgetting": "forgetting 1 − exp(g)"}


def markdown(found: dict[str, Any], prefix: str) -> str:
    """All observations; `prefix` is what the plots' names begin with."""
    parts = [_scores(found), _half_lives(found["half_lives"]), _cells(found["cells"]), _provenance(found)]
    plots = [f"![{title}]({prefix}-{name}.png)" for name, title in PLOTS.items()]
    return "\n\n".join([parts[0], plots[0], parts[1], plots[1], parts[2], plots[2], plots[3], parts[3]]) + "\n"


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _scores(found: dict[str, Any]) -> str:
    longer = found["longer"] or {}
    lengths = found["tokens"]
    lines = [
        "## How well scores find the entries of high utility",
        "",
        "Overlap@10: share of the true top tenth that the top tenth by score holds. Means over documents, attention "
        "layers and KV heads.",
        "",
        table_header(
            ["scores", "overlap@10", "utility mass in the top 10 %", "Spearman"]
            + ([f"overlap@10 at {lengths['longer']:,} tokens"] if longer else [])
            + ["overlap@10 in the paper (27B)"]
        ),
    ]
    for name, row in sorted(found["scores"].items(), key=lambda pair: -pair[1]["overlap@10"]):
        cells = [name, *(_number(row[metric]) for metric in ("overlap@10", "mass@10", "spearman"))]
        cells += [_number(longer[name]["overlap@10"])] if longer else []
        lines.append(table_row([*cells, _number(PAPER.get(name))]))
    return "\n".join(lines)


def _half_lives(lives: dict[str, Any]) -> str:
    lines = [
        "## Half-lives of GDN heads",
        "",
        "Tokens after which a head's state has decayed to one half: medians over documents of ln 2 / mean(−g).",
    ]
    agreement = lives["rank_agreement"]
    if agreement is not None:
        lines[-1] += (
            f" Heads keep their order from document to document: Spearman {agreement:.3f} in the mean over pairs."
        )
    if lives["checkpoint_agreement"] is not None:
        lines[-1] += (
            f" What the parameters alone say, ln 2 / (exp(A_log)·softplus(dt_bias)), goes with it at Spearman "
            f"{lives['checkpoint_agreement']:.3f}."
        )
    lines += ["", table_header(["GDN layer", "shortest", "median", "longest"])]
    for i, row in enumerate(lives["median"]):
        ordered = sorted(row)
        lines.append(
            table_row([str(i), *(f"{value:,.1f}" for value in (ordered[0], ordered[len(row) // 2], ordered[-1]))])
        )
    return "\n".join(lines)


def _cells(cells: list[dict[str, Any]]) -> str:
    lines = [
        "## Signals of single heads and utility",
        "",
        "Spearman correlation of a GDN head's signal with the utility of the entries of an attention layer, mean over "
        "documents and KV heads; and how much more utility the highest tenth of the entries by the strongest head's "
        "signal has than the mean (the lowest tenth where the correlation is negative).",
        "",
        table_header(
            ["attention layer", "signal", "heads", "lowest", "highest", "strongest head", "lift of its best tenth"]
        ),
    ]
    for j, cell in enumerate(cells):
        for kind, name in KINDS.items():
            values = [value for row in cell["correlation"][kind] for value in row]
            lift = cell["lift"][kind]
            best = f"GDN layer {lift['gdn']}, head {lift['head']}"
            top = lift["by_decile"][-1] if max(values, key=abs) > 0 else lift["by_decile"][0]
            lines.append(
                table_row(
                    [str(j), name, str(len(values)), _number(min(values)), _number(max(values)), best, f"{top:.2f} x"]
                )
            )
    return "\n".join(lines)


def _provenance(found: dict[str, Any]) -> str:
    counts, tokens, versions = found["documents"], found["tokens"], found["versions"]
    longer = f"; {counts['longer']} longer ones of {tokens['longer']:,}" if counts["longer"] else ""
    return "\n".join(
        [
            "## Provenance",
            "",
            f"{found['model']} (weights {found['weights']}): fitted on {counts['train']} documents, measured on "
            f"{counts['held_out']} others, of {tokens['held_out']:,} tokens{longer}. "
            f"{found['sampling']['continuations']} continuations of {found['sampling']['tokens']} tokens for each "
            f"prompt; seed {found['seed']}. {', '.join(f'{name} {version}' for name, version in versions.items())}. "
            f"Commit {found['commit']}.",
        ]
    )


def plot_scores(found: dict[str, Any]) -> Any:
    """Overlap@10 as bars, on held-out and on longer documents."""
    axis, figure = new_axis((7, 3.5))
    rows = sorted(found["scores"].items(), key=lambda pair: pair[1]["overlap@10"])
    names, height = [name for name, _ in rows], 0.4 if found["longer"] else 0.8
    tokens = found["tokens"]
    axis.barh(
        [i + (height / 2 if found["longer"] else 0) for i in range(len(rows))],
        [row["overlap@10"] for _, row in rows],
        height,
        color=COLOURS[0],
        label=f"{tokens['held_out']:,} tokens",
    )
    if found["longer"]:
        longer = [found["longer"][name]["overlap@10"] for name in names]
        positions = [i - height / 2 for i in range(len(rows))]
        axis.barh(positions, longer, height, color=COLOURS[1], label=f"{tokens['longer']:,} tokens")
        axis.legend(fontsize=8)
    axis.axvline(0.1, color="grey", linewidth=0.8, linestyle=":")
    axis.set_yticks(range(len(rows)), names)
    axis.set(xlabel="overlap@10 (dotted: chance)", xlim=(0, None))
    return figure


def plot_half_lives(found: dict[str, Any]) -> Any:
    """Each head's median with its range over documents, heads in order, by GDN layer."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis, figure = new_axis((7, 3.5))
    lives = found["half_lives"]
    place = 0
    ticks, labels = [], []
    for i, medians in enumerate(lives["median"]):
        order = sorted(range(len(medians)), key=medians.__getitem__)
        x = [place + k for k in range(len(order))]
        middle = [medians[h] for h in order]
        below = [max(0.0, medians[h] - lives["least"][i][h]) for h in order]
        above = [max(0.0, lives["most"][i][h] - medians[h]) for h in order]
        axis.errorbar(x, middle, [below, above], fmt="o", markersize=4, color=COLOURS[0], capsize=2, linewidth=1)
        if lives["checkpoint"] is not None:
            axis.plot(
                x, [lives["checkpoint"][i][h] for h in order], "_", color=COLOURS[1], markersize=9, markeredgewidth=2
            )
        ticks.append(place + (len(order) - 1) / 2)
        labels.append(str(i))
        place += len(order) + 1
    axis.plot([], [], "o", color=COLOURS[0], label="from signals, range over documents")
    if lives["checkpoint"] is not None:
        axis.plot([], [], "_", color=COLOURS[1], label="from parameters alone")
    axis.legend(fontsize=8, loc="lower right")
    axis.set(xlabel="GDN layer (its heads by half-life)", ylabel="half-life, tokens", yscale="log")
    # Also where a range spans no power of ten.
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xticks(ticks, labels)
    return figure


def plot_cells(found: dict[str, Any]) -> Any:
    """Heat maps of correlations, attention layer by signal."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    cells = found["cells"]
    figure = Figure(figsize=(7, 0.6 + 1.5 * len(cells)), layout="constrained")
    axes = figure.subplots(len(cells), 2, squeeze=False)
    largest = max(abs(v) for cell in cells for rows in cell["correlation"].values() for row in rows for v in row)
    for j, cell in enumerate(cells):
        for axis, (kind, name) in zip(axes[j], KINDS.items(), strict=True):
            image = axis.imshow(cell["correlation"][kind], cmap="PuOr", vmin=-largest, vmax=largest, aspect="auto")
            axis.set_title(f"attention layer {j}: {name}", fontsize=8)
            axis.set_yticks(range(len(cell["gdn"])), cell["gdn"], fontsize=7)
            axis.set_ylabel("GDN layer", fontsize=7)
            axis.set_xlabel("head", fontsize=7)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.tick_params(labelsize=7)
    figure.colorbar(image, ax=axes, label="Spearman with utility")
    return figure


def plot_lift(found: dict[str, Any]) -> Any:
    """Mean utility by tenths of entries, of the strongest head for each attention layer and signal."""
    axis, figure = new_axis((7, 3.5))
    styles = ("-", "--", ":", "-.")
    for j, cell in enumerate(found["cells"]):
        for colour, (kind, name) in zip(COLOURS, KINDS.items(), strict=True):
            lift = cell["lift"][kind]["by_decile"]
            label = f"attention layer {j}, {name}"
            axis.plot(range(1, len(lift) + 1), lift, marker=".", color=colour, linestyle=styles[j % 4], label=label)
    axis.axhline(1, color="grey", linewidth=0.8)
    axis.set(xlabel="tenth of the entries by signal (10: highest)", ylabel="mean utility / mean of all")
    if len(found["cells"]) <= 4:
        axis.legend(fontsize=7)
    return figure


PLOTS = {
    "scores": "How well scores find the entries of high utility",
    "half-lives": "Half-lives of GDN heads",
    "cells": "Correlation of single heads' signals with utility",
    "lift": "Utility by tenths of a signal",
}
#: Each gives a figure of what `observe` found.
PLOTTERS = {"scores": plot_scores, "half-lives": plot_half_lives, "cells": plot_cells, "lift": plot_lift}
