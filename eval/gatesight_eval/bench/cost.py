"""What GateSight costs: signals, scores and compaction against the prefill itself, at Qwen3.8-27B's layer dimensions.

    python -m gatesight_eval.bench.cost --output eval/results/cost

Times a slice of three GDN layers and one attention layer with random weights, all in one run: the prefill with a plain
`DynamicCache`, and for each eviction method what it records within the prefill, its scores and the compaction. Beside
each phase stand the least bytes and FLOPs and the time they take at this machine's ceilings. Exits with 1, and gives no
share or ratio, if the outputs whose cost is measured differ from a float64 reference.
"""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from gatesight_hf.commands.quiet import quiet
from gatesight_hf.compaction.budget import check_kept_fraction, total_budget
from gatesight_hf.models import HybridSpec

from ..backends import TransformersBackend
from ..backends.methods import ScorerFactory
from ..reports.store import commit
from . import ops as bench_ops
from . import tables as bench_tables
from .check import Check, DifferentOutputsError, check_recording, require
from .machine import PeakMeter, ceilings, hardware, name_of
from .model import (
    CALIBRATION_TOKENS,
    SLICE_LAYERS,
    WHOLE_LAYERS,
    build_slice,
    config,
    kv_bytes_per_token,
    random_ids,
    signal_bytes_per_token,
    slice_estimator,
    word_tokenizer,
)
from .phases import CHUNK, GATESIGHT, KVZIP, PHASES, PREFILL, SEED, Bench

METHODS = (GATESIGHT, "snapkv", "keydiff", "triattention", "expected_attention", KVZIP)
DTYPES = {name_of(dtype): dtype for dtype in (torch.bfloat16, torch.float32)}
LENGTHS = {"cpu": (1024, 2048, 4096), "cuda": (4096, 16384, 65536, 262144)}
TINY_LENGTHS = (96, 192)
#: Recording is checked against float64 over the longest context, and over one of this many tokens in two chunks.
CHECKED_TOKENS = 512
#: Shorter contexts leave nothing to evict between windows and sinks.
LEAST_TOKENS = 16
#: What is to be reached.
MOST_SHARE, MOST_MS, MOST_MS_AT, MOST_SIGNAL_BYTES = 0.005, 10.0, 262144, 0.22


# -- what follows from the measurements --------------------------------------------------------------------------------


def growth(lengths: list[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Exponents of the time over the context's length, by least squares of the logarithms; None where nothing grows."""

    def exponent(times: list[float]) -> float | None:
        if len(times) < 2 or min(times) <= 0:
            return None
        return float(np.polyfit(np.log([length["tokens"] for length in lengths]), np.log(times), 1)[0])

    found: dict[str, dict[str, float | None]] = {
        PREFILL: {PREFILL: exponent([length[PREFILL]["ms"] for length in lengths])}
    }
    for name in lengths[0]["methods"]:
        of_method = [length["methods"][name] for length in lengths]
        found[name] = {phase: exponent([m["phases"][phase]["ms"] for m in of_method]) for phase in PHASES}
        found[name]["all"] = exponent([m["ms"] for m in of_method])
    return found


def memory(lengths: list[dict[str, Any]], itemsize: int, tiny: bool) -> dict[str, Any] | None:
    """Bytes of the signals against those of the attention cache: held by the slice, and of the whole model."""
    measured = lengths[-1]["methods"].get(GATESIGHT)
    if measured is None:
        return None
    whole = HybridSpec.from_config(config(WHOLE_LAYERS, tiny))
    per_token = [signal_bytes_per_token(whole, itemsize), kv_bytes_per_token(whole, itemsize)]
    return {
        "tokens": lengths[-1]["tokens"],
        "signal_bytes": measured["signal_bytes"],
        "kv_bytes": measured["kv_bytes"],
        "ratio": measured["signal_bytes"] / measured["kv_bytes"],
        "whole_model_signal_bytes_per_token": per_token[0],
        "whole_model_kv_bytes_per_token": per_token[1],
        "whole_model_ratio": per_token[0] / per_token[1],
    }


def verdicts(result: dict[str, Any], device: torch.device, tiny: bool) -> list[dict[str, Any]]:
    """Goals, each met, missed or not measured, from measured numbers alone."""
    lengths = [length for length in result["lengths"] if GATESIGHT in length["methods"]]
    shares = {length["tokens"]: length["methods"][GATESIGHT]["percent_of_prefill"] / 100 for length in lengths}
    found = []

    def judge(goal: str, measured: str | None, value: float, most: float) -> None:
        verdict = "not measured" if measured is None or tiny else "met" if value <= most else "missed"
        found.append(
            {"goal": goal, "measured": measured, "value": None if measured is None else value, "verdict": verdict}
        )

    on_cpu = device.type == "cpu" and bool(shares)
    worst = max(shares, key=lambda tokens: shares[tokens]) if shares else 0
    judge(
        f"signals, gates, scores and compaction at most {100 * MOST_SHARE:g} % of prefill on a CPU, at every length",
        f"{100 * shares[worst]:.2f} % at {worst:,} tokens" if on_cpu else None,
        shares.get(worst, 0.0),
        MOST_SHARE,
    )
    layers = WHOLE_LAYERS // SLICE_LAYERS
    on_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    at_length = next((m for m in lengths if m["tokens"] == MOST_MS_AT and on_hopper), None)
    for what, phases in (("scores and compaction", PHASES[2:]), ("signals, gates, scores and compaction", PHASES)):
        ms = (
            layers * sum(at_length["methods"][GATESIGHT]["phases"][name]["ms"] for name in phases) if at_length else 0.0
        )
        judge(
            f"{what} at most {MOST_MS:g} ms on a Hopper GPU at {MOST_MS_AT:,} tokens, 48 GDN and 16 attention layers",
            f"{ms:.2f} ms ({layers} times the slice)" if at_length else None,
            ms,
            MOST_MS,
        )
    held = result["memory"]
    judge(
        f"signals at most {100 * MOST_SIGNAL_BYTES:g} % of the attention cache's bytes",
        f"{100 * held['ratio']:.1f} % at {held['tokens']:,} tokens" if held else None,
        held["ratio"] if held else 0.0,
        MOST_SIGNAL_BYTES,
    )
    return found


# -- command -----------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Everything, as JSON values; without any time if outputs differ."""
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    model = build_slice(args.tiny, dtype, device, SEED)
    estimator = slice_estimator(model, SEED)
    # Statistics of TriAttention are gathered when it is made; nothing of that is timed.
    factory = ScorerFactory(model, word_tokenizer, {}, calibration=random_ids(model, CALIBRATION_TOKENS, SEED + 1))
    scorers = {name: estimator if name == GATESIGHT else factory.make(name, SEED) for name in args.methods}
    layers = f"{SLICE_LAYERS} of {WHOLE_LAYERS} layers"
    name = f"very small random model, {layers}" if args.tiny else f"Qwen3.8-27B, {layers}, random weights"
    backend = TransformersBackend(model, word_tokenizer, factory, name, CHUNK).describe()
    result: dict[str, Any] = {
        "what": "cost of recording, scoring and compaction against prefill",
        "asked": {name: value for name, value in vars(args).items() if name not in ("output", "json")},
        "backend": {**backend, "hardware": hardware(device), "kernel_packages": _installed()},
        "commit": commit(),
        "seed": SEED,
    }
    checks: list[Check] = []
    try:
        for tokens, chunk in ((min(CHECKED_TOKENS, *args.lengths), CHECKED_TOKENS // 2), (max(args.lengths), CHUNK)):
            checks += require(check_recording(model, estimator, random_ids(model, tokens, SEED), chunk))
        result["ceilings"] = ceilings(device, dtype, args.tiny)
        bench = Bench(model, scorers, args.kept_fraction, args.repeats, result["ceilings"])
        lengths = []
        with tqdm(total=bench.passes() * len(args.lengths), desc="cost", unit="prefill", disable=None) as progress:
            for tokens in args.lengths:
                found, of_length = bench.measure(tokens, progress.update)
                lengths.append(found)
                checks += of_length
        longest = random_ids(model, max(args.lengths), SEED)
        contests = bench_ops.compare(model, estimator, longest, CHUNK, args.kept_fraction, args.repeats)
    except DifferentOutputsError as difference:
        return {**result, "outputs_differ": str(difference), "checks": _dicts([*checks, *difference.checks])}
    result |= {
        "inputs": estimator.config.input_size(0),
        "peaks": PeakMeter(device).how,
        "lengths": lengths,
        "growth": growth(lengths),
        "memory": memory(lengths, dtype.itemsize, args.tiny),
        "implementations": _dicts(contests),
        "checks": _dicts(checks),
    }
    return {**result, "verdicts": verdicts(result, device, args.tiny)}


def _dicts(found: Sequence[Any]) -> list[dict[str, Any]]:
    return [one.to_dict() for one in found]


def _installed() -> list[str]:
    """Packages that decide which kernels run."""
    names = ("gatesight_kernels", "triton", "fla", "causal_conv1d", "flash_attn", "kernels")
    found = {name: importlib.util.find_spec(name) for name in names}
    return [name for name, spec in found.items() if spec is not None and spec.origin]  # a folder is no package


def _listed(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _lengths(text: str) -> list[int]:
    try:
        found = sorted({int(part) for part in _listed(text)})
    except ValueError:
        found = []
    if not found or found[0] < LEAST_TOKENS:
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers of tokens >= {LEAST_TOKENS}, such as 1024,2048")
    return found


def _methods(text: str) -> list[str]:
    found = _listed(text)
    unknown = [name for name in found if name not in METHODS]
    if unknown or not found:
        raise argparse.ArgumentTypeError(f"{text!r}: no methods {unknown}; there are {', '.join(METHODS)}")
    return found


def _fraction(text: str) -> float:
    try:
        found = check_kept_fraction(float(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if found == 1:
        raise argparse.ArgumentTypeError("1: a cache that keeps everything scores and moves nothing")
    return found


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number >= 1")
    return int(text)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gatesight_eval.bench.cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=_lengths, help=f"tokens, comma-separated (default: {LENGTHS})")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--device", choices=tuple(LENGTHS), default="cpu")
    parser.add_argument("--kept-fraction", type=_fraction, default=0.1)
    parser.add_argument(
        "--repeats", type=_count, default=3, help="timed passes; KVzip runs once (default: %(default)s)"
    )
    parser.add_argument("--methods", type=_methods, default=list(METHODS), help=f"of {','.join(METHODS)}")
    parser.add_argument("--tiny", action="store_true", help="a very small model, to try the benchmark itself")
    parser.add_argument("--threads", type=_count, help="of torch on the CPU")
    parser.add_argument("--json", metavar="FILE", help="JSON into a file, or - for nothing but JSON on stdout")
    parser.add_argument("--output", type=Path, metavar="PREFIX", help="write PREFIX.md, PREFIX.json and PREFIX.png")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    args.lengths = args.lengths or list(TINY_LENGTHS if args.tiny else LENGTHS[args.device])
    if total_budget(args.kept_fraction, args.lengths[0], 1) == args.lengths[0]:
        parser.error(f"--kept-fraction {args.kept_fraction:g} keeps all of {args.lengths[0]} tokens")
    for path in (args.output, None if args.json in (None, "-") else Path(args.json)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(path.parent, os.W_OK) or path.is_dir():
                parser.error(f"cannot write {str(path)!r}")
    return args


@quiet()
def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    with torch.no_grad():
        result = run(args)
    text = bench_tables.markdown(result)
    record = json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    print(record if args.json == "-" else text, end="")
    if args.json not in (None, "-"):
        Path(args.json).write_text(record, encoding="utf-8")
    if args.output:
        for suffix, content in ((".json", record), (".md", text)):
            args.output.with_name(args.output.name + suffix).write_text(content, encoding="utf-8")
        if "lengths" in result:
            bench_tables.plot(result, args.output.with_name(args.output.name + ".png"))
    if "outputs_differ" in result:
        print(f"error: {result['outputs_differ']}", file=sys.stderr)
    return 1 if "outputs_differ" in result else 0


if __name__ == "__main__":
    raise SystemExit(main())
