"""The tables and the plot of `cost`."""

from pathlib import Path
from typing import Any

from ..reports.tables import new_axis, save_figure, table_header, table_row

#: What the phases are, in the order of bars.
NAMES = {
    "signals": "GDN signals",
    "attention": "output gates, and what a method reads of queries",
    "scoring": "scores and selection",
    "compaction": "compaction",
}
#: Of lengths in the plot; of Okabe and Ito, told apart by colour-blind readers.
COLOURS = ("#0072B2", "#56B4E9", "#E69F00", "#009E73")

NOTES = """\
Signals, and what is taken of attention layers, are timed where they happen, within the prefill; after it, chunks are
joined, entries scored and selected, and moved. Times are medians; KVzip, whose scores take another prefill,
runs once. Shares are of the prefill of the same length in the same run, of the model alone with a `DynamicCache`. A
phase cannot take less than its floor, what its bytes or its FLOPs take at the ceilings above, whichever is longer; a
prefill far above its own floor makes shares look small. An MLP has {inputs} inputs, as inner layers of the whole model
have, though the slice has three GDN layers: each is read twice. Peak memory is what a phase takes beyond what was held
before it ({how}), from a pass of its own in which the outputs are checked."""


def markdown(result: dict[str, Any]) -> str:
    """The whole result; only what differs, if outputs do."""
    if "outputs_differ" in result:
        parts = ["## Outputs differ, so no times are given", _checks(result["checks"]), _provenance(result)]
        return "\n\n".join(parts) + "\n"
    parts = [
        _verdicts(result["verdicts"]),
        _ceilings(result["ceilings"]),
        NOTES.format(inputs=result["inputs"], how=result["peaks"]),
    ]
    for length in result["lengths"]:
        parts.append(_length(length))
    parts += [_growth(result["growth"]), _memory(result["memory"]), _implementations(result["implementations"])]
    parts += ["## Checks before timing", _checks(result["checks"]), _provenance(result)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{value:.2g} %" if value < 1 else f"{value:.1f} %"


def _size(value: float | None) -> str:
    return (
        "not available"
        if value is None
        else f"{value / 2**20:,.3g} MiB"
        if value < 2**30
        else f"{value / 2**30:,.2f} GiB"
    )


def _verdicts(verdicts: list[dict[str, Any]]) -> str:
    lines = ["## Goals", "", table_header(["goal", "measured", "verdict"])]
    return "\n".join([*lines, *(table_row([v["goal"], v["measured"] or "", v["verdict"]]) for v in verdicts)])


def _ceilings(ceilings: dict[str, float]) -> str:
    found = [f"streaming copy {ceilings['copy_bytes_per_s'] / 1e9:.1f} GB/s (read and written)"]
    for name, value in ceilings.items():
        if name.startswith("gemm_"):
            dtype = name.removeprefix("gemm_").removesuffix("_flop_per_s")
            found.append(f"matrix products in {dtype} {value / 1e9:,.0f} GFLOP/s")
    return f"Ceilings of this machine, in this run: {', '.join(found)}."


def _length(length: dict[str, Any]) -> str:
    tokens, prefill = length["tokens"], length["prefill"]
    dtypes = list(prefill["flop_ms"])
    lines = [
        f"## {tokens:,} tokens",
        "",
        table_header(
            ["phase", "ms", "ms per 1K tokens", "of prefill", "bytes at least", "FLOPs at least", "ms for the bytes"]
            + [f"ms for the FLOPs in {dtype}" for dtype in dtypes]
            + ["floor, ms", "peak memory"]
        ),
    ]

    def line(name: str, phase: dict[str, Any], share: str) -> str:
        cells = [name, _ms(phase["ms"]), _ms(phase["ms_per_1k_tokens"]), share]
        if "floor_ms" in phase:
            flops = [_ms(phase["flop_ms"][dtype]) for dtype in dtypes]
            cells += [
                _size(phase["bytes"]),
                f"{phase['flop']:.3g}",
                _ms(phase["bytes_ms"]),
                *flops,
                _ms(phase["floor_ms"]),
            ]
        else:
            cells += [""] * (4 + len(dtypes))
        return table_row([*cells, _size(phase["peak_bytes"])])

    lines.append(line("prefill", prefill, ""))
    methods = length["methods"]
    for phase, found in methods["gatesight"]["phases"].items() if "gatesight" in methods else ():
        lines.append(line(f"gatesight: {NAMES[phase]}", found, _percent(found["percent_of_prefill"])))
    lines += [
        "",
        table_header(
            ["method, ms", *NAMES.values(), "all", "of prefill", "peak memory", "prefill with it", "its peak memory"]
        ),
    ]
    for name, method in methods.items():
        phases = [_ms(phase["ms"]) for phase in method["phases"].values()]
        whole = [_ms(method["ms"]), _percent(method["percent_of_prefill"])]
        recorded = [_ms(method["recorded_prefill_ms"]), _size(method["recorded_prefill_peak_bytes"])]
        peaks = [phase["peak_bytes"] for phase in method["phases"].values() if phase["peak_bytes"] is not None]
        lines.append(table_row([name, *phases, *whole, _size(max(peaks, default=None)), *recorded]))
    return "\n".join(lines)


def _growth(growth: dict[str, dict[str, float | None]]) -> str:
    if growth["prefill"]["prefill"] is None:
        return ""
    lines = [
        "## Growth with the length",
        "",
        "Exponent of tokens in the time, by least squares of the logarithms over the lengths above. It describes these "
        f"lengths and no others. Prefill: {growth['prefill']['prefill']:.2f}.",
        "",
        table_header(["method", *NAMES.values(), "all"]),
    ]
    for name, exponents in growth.items():
        if name != "prefill":
            lines.append(table_row([name, *("" if value is None else f"{value:.2f}" for value in exponents.values())]))
    return "\n".join(lines)


def _memory(memory: dict[str, Any] | None) -> str:
    if memory is None:
        return ""
    return (
        "## Memory of the signals\n\n"
        f"Held until compaction at {memory['tokens']:,} tokens: {_size(memory['signal_bytes'])} of signals beside "
        f"{_size(memory['kv_bytes'])} of keys and values, {memory['ratio']:.1%}. The slice has three GDN layers to an "
        f"attention layer as the whole model has, which takes {memory['whole_model_signal_bytes_per_token']:,} and "
        f"{memory['whole_model_kv_bytes_per_token']:,} bytes a token, {memory['whole_model_ratio']:.1%}."
    )


def _implementations(contests: list[dict[str, Any]]) -> str:
    lines = [
        "## Implementations side by side",
        "",
        "The same inputs in the same run. Ratio: how many times faster the second is. Error: largest difference from "
        "float64 as a share of the largest value.",
        "",
        table_header(["operation", "tokens", "first", "ms", "error", "second", "ms", "error", "ratio"]),
    ]
    for found in contests:
        cells = [found["operation"], f"{found['tokens']:,}"]
        for way, seconds, error in zip(found["ways"], found["seconds"], found["errors"], strict=True):
            cells += [way, _ms(1e3 * seconds), f"{error:.1e}"]
        lines.append(table_row([*cells, f"{found['ratio']:.2f}"]))
    return "\n".join(lines)


def _checks(checks: list[dict[str, Any]]) -> str:
    lines = [
        "Error: relative RMS against float64, unless said otherwise. Bound: twice the error of the same maths in plain "
        "torch in the dtype of the signals, or a quarter of a rounding step, if that is more.",
        "",
        table_header(["output", "tokens", "error", "bound", "same"]),
    ]
    for check in checks:
        error = "not finite" if check["error"] is None else f"{check['error']:.2g}"
        same = "yes" if check["passed"] else "no"
        lines.append(table_row([check["what"], f"{check['tokens']:,}", error, f"{check['bound']:.2g}", same]))
    return "\n".join(lines)


def _provenance(result: dict[str, Any]) -> str:
    backend, asked = result["backend"], result["asked"]
    versions = ", ".join(f"{name} {version}" for name, version in backend["versions"].items())
    return (
        "## Provenance\n\n"
        f"{backend['model']} (weights {backend['weights']}, seed {result['seed']}), {backend['dtype']}, "
        f"{backend['attention']} attention, kept fraction {asked['kept_fraction']:g}, {asked['repeats']} timed passes, "
        f"forwards of at most {backend['prefill_chunk_size']:,} tokens. {backend['hardware']}, {backend['threads']} "
        f"thread(s). {versions}; packages of kernels: {', '.join(backend['kernel_packages']) or 'none'}. "
        f"Commit {result['commit']}."
    )


def plot(result: dict[str, Any], path: Path) -> None:
    """Share of prefill as bars for each method and length, on a logarithmic axis, since KVzip's dwarfs all others."""
    lengths, methods = result["lengths"], list(result["lengths"][0]["methods"])
    width = 0.8 / len(lengths)
    axis, figure = new_axis((max(5.0, 1.3 * len(methods)), 3.5))
    for i, length in enumerate(lengths):
        shares = [length["methods"][name]["percent_of_prefill"] for name in methods]
        at = [x + (i - (len(lengths) - 1) / 2) * width for x in range(len(methods))]
        axis.bar(at, shares, width=0.9 * width, color=COLOURS[i % len(COLOURS)], label=f"{length['tokens']:,} tokens")
    axis.axhline(100, color="black", linewidth=0.8, linestyle=":")
    axis.set(ylabel="share of prefill (%), logarithmic", yscale="log")
    axis.set_xticks(range(len(methods)), methods, rotation=20, ha="right")
    axis.legend(fontsize=8)
    save_figure(figure, path)
