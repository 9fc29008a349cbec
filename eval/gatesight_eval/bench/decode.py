"""Speed of decoding with a full cache, a compacted one, and a frozen one, beside the bytes that each step reads.

    python -m gatesight_eval.bench.decode --output eval/results/decode_cpu

The model is the slice of Qwen3.8-27B of `cost`. Caches hold random entries in place of a prefill, which is as
good for times; every way is first compared with another, and no time is given of outputs that differ.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, StaticCache

from gatesight_hf import FrozenCache, GateSightCache
from gatesight_hf.cache.tokens import Tokens
from gatesight_hf.commands.quiet import quiet
from gatesight_hf.methods import KeyNorm
from gatesight_hf.models._compat import cache_argument

from ..reports.store import commit
from ..reports.tables import new_axis, save_figure, table_header, table_row
from .check import Check, DifferentOutputsError, relative_rms, require
from .machine import clock, hardware
from .model import build_slice, kv_bytes_per_token, model_name, random_ids
from .tables import COLOURS

SEED = 0
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
#: Largest relative RMS of logits between two ways to compute the same, of which the dtype's rounding is the reason.
BOUNDS = {torch.bfloat16: 3e-2, torch.float32: 1e-4}
#: Tokens that the model really sees, so that its GDN states are its own.
SEEN = 16
CHECKED_STEPS = 4
#: The ways, by name: whether entries were evicted, and whether the steps are compiled.
WAYS = {
    "full, DynamicCache": (False, False),
    "full, StaticCache": (False, False),
    "full, StaticCache, compiled": (False, True),
    "compacted": (True, False),
    "compacted, frozen": (True, False),
    "compacted, frozen, compiled": (True, True),
}
BASELINE = next(iter(WAYS))
NOTES = """\
A step reads the weights once for all rows, and each row's entries and GDN states. Speeds and inverse bytes are relative
to the first row of a table. Where a way copies entries besides reading them, as a dynamic cache does to append one, it
cannot reach its ratio of bytes. The slice is one of the sixteen equal parts of the whole model, so that ratios of bytes
are the whole model's but for embeddings, unless it was made narrower. Times are medians of passes that take turns."""


def _by_processor(device: torch.device) -> bool:
    """Whether times are those of the processor: one thread, which others may interrupt."""
    return device.type == "cpu" and torch.get_num_threads() == 1


def _now(device: torch.device) -> float:
    return time.process_time() if _by_processor(device) else clock(device)


class Contest:
    """All ways for one context length and number of rows, in the same state."""

    def __init__(self, model: Any, compiled: Any, tokens: int, rows: int, kept_fraction: float, steps: int) -> None:
        self.model, self.compiled, self.tokens, self.rows, self.steps = model, compiled, tokens, rows, steps
        self.name = cache_argument(model)
        room = 1 + max(steps, CHECKED_STEPS)
        seen = random_ids(model, SEEN, SEED).expand(rows, -1)
        parent = GateSightCache(KeyNorm(), model, kept_fraction, allocation="flat")
        self._forward(model, seen, parent)
        generator = torch.Generator(model.device).manual_seed(SEED)
        scale = (kept_fraction * tokens) ** 0.5  # so that the mean over the kept values is of order 1
        layer: Any
        for layer in parent.attention_layers:
            shape = (rows, layer.tail_keys.shape[1], tokens - SEEN, layer.tail_keys.shape[3])

            def entries(size: float, shape: tuple[int, ...] = shape) -> Tensor:
                drawn = torch.empty(shape, dtype=model.dtype, device=model.device)
                return drawn.normal_(0.0, size, generator=generator)

            layer.tail_keys = torch.cat([entries(1.0), layer.tail_keys], dim=2)
            layer.tail_values = torch.cat([entries(scale), layer.tail_values], dim=2)
        parent.context.tokens = Tokens(tokens, random_ids(model, tokens, SEED).expand(rows, -1))
        static = StaticCache(model.config, max_cache_len=tokens + room)
        self._forward(model, seen, static)
        self.dynamic, self.static = parent.fork(), static
        parent.compact()
        self.parent, self.frozen = parent, FrozenCache(parent, room)
        self.kept = parent.report().physical_lengths[0]
        self.ids = random_ids(model, room, SEED + 1).expand(rows, -1)

    def _forward(self, step: Any, ids: Tensor, cache: Any) -> Tensor:
        return step(input_ids=ids, **{self.name: cache}).logits

    def cache(self, way: str) -> Any:
        """A cache of the way in the state after the context, made outside of what is timed."""
        if "frozen" in way:
            self.frozen.rewind()
            return self.frozen
        if way == "compacted":
            return self.parent.fork()
        source = self.dynamic.fork()
        plain: Any = self.static if "Static" in way else DynamicCache(config=self.model.config)
        theirs: Any
        for i, theirs in enumerate(source.layers):
            mine = plain.layers[i]
            if i in source.spec.attention_layers and "Static" in way:
                mine.keys[:, :, : self.tokens] = theirs.keys
                mine.values[:, :, : self.tokens] = theirs.values
                mine.cumulative_length.fill_(self.tokens)
            elif i in source.spec.attention_layers:
                mine.update(theirs.keys, theirs.values)
            else:
                mine.update_conv_state(theirs.conv_states[0])
                mine.conv_states[0].copy_(theirs.conv_states[0])
                mine.update_recurrent_state(theirs.recurrent_states[0])
        return plain

    def logits(self, way: str, steps: int) -> Tensor:
        step, cache = self.compiled if WAYS[way][1] else self.model, self.cache(way)
        return torch.cat([self._forward(step, self.ids[:, i : i + 1], cache) for i in range(steps)], dim=1).float()

    def check(self) -> list[Check]:
        """Every way against the first of its kind, and the compacted one against a mask on the evicted entries."""
        found = {way: self.logits(way, CHECKED_STEPS) for way in WAYS}
        masked = self._masked()
        bound, checks = BOUNDS[self.model.dtype], []
        for way, logits in found.items():
            exact = (masked if WAYS[way][0] else found[BASELINE]).double()
            checks.append(Check(f"{way}, {self.rows} row(s)", self.tokens, relative_rms(logits, exact), bound))
        # The checks say something only if evicted entries count.
        apart = relative_rms(found["compacted"], found[BASELINE].double())
        checks.append(
            Check(f"bound over distance to the full cache, {self.rows} row(s)", self.tokens, bound / apart, 0.5)
        )
        return require(checks)

    def _masked(self) -> Tensor:
        """Logits with the full cache and a mask that hides what the compacted one has evicted."""
        modules = [layer.self_attn for layer in self.model.model.layers if hasattr(layer, "self_attn")]
        layers: list[Any] = list(self.parent.attention_layers)
        handles = []
        group = self.parent.spec.num_attention_heads // self.parent.spec.num_key_value_heads
        for module, layer in zip(modules, layers, strict=True):
            shown = torch.zeros((*layer.kept_keys.shape[:2], self.tokens), dtype=torch.bool, device=self.model.device)
            shown.scatter_(2, layer.kept_positions.long(), True)

            def hide(_: Any, args: Any, kwargs: dict[str, Any], shown: Tensor = shown) -> Any:
                late = kwargs["cache" if "cache" in kwargs else self.name].get_seq_length() + 1 - self.tokens
                mask = torch.nn.functional.pad(shown, (0, late), value=True).repeat_interleave(group, dim=1)
                return args, {**kwargs, "attention_mask": mask.unsqueeze(2)}

            handles.append(module.register_forward_pre_hook(hide, with_kwargs=True))
        try:
            return self.logits(BASELINE, CHECKED_STEPS)
        finally:
            for handle in handles:
                handle.remove()

    def seconds(self, way: str) -> float:
        """Of one step, on the mean of a pass."""
        step, cache = self.compiled if WAYS[way][1] else self.model, self.cache(way)
        self._forward(step, self.ids[:, :1], cache)
        begun = _now(self.model.device)
        for i in range(self.steps):
            self._forward(step, self.ids[:, 1 + i : 2 + i], cache)
        return (_now(self.model.device) - begun) / self.steps

    def bytes_read(self, evicted: bool) -> dict[str, int]:
        """By one step: weights of all matrices, entries and GDN states."""
        entries = self.kept if evicted else self.tokens
        return {
            "weights": sum(p.nbytes for name, p in self.model.named_parameters() if "embed" not in name),
            "entries": self.rows * entries * kv_bytes_per_token(self.parent.spec, self.model.dtype.itemsize),
            "states": sum(layer.nbytes for layer in self.parent.gdn_layers),
        }


def measure(contest: Contest, repeats: int) -> dict[str, Any]:
    """Seconds of every way, in turns."""
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way, seconds in found.items():
            seconds.append(contest.seconds(way))
    base, of_base = median(found[BASELINE]), sum(contest.bytes_read(False).values())
    ways = {}
    for way, seconds in found.items():
        read = contest.bytes_read(WAYS[way][0])
        ways[way] = {
            "ms": median(seconds) * 1e3,
            "ms_of_passes": [value * 1e3 for value in seconds],
            "tokens_per_s": contest.rows / median(seconds),
            "speed_ratio": base / median(seconds),
            "bytes": read,
            "bytes_ratio": of_base / sum(read.values()),
        }
    return {"tokens": contest.tokens, "rows": contest.rows, "kept_per_head": contest.kept, "ways": ways}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Everything, as JSON values; without any time if outputs differ."""
    model = build_slice(args.tiny, DTYPES[args.dtype], torch.device(args.device), SEED, args.narrow)
    model.set_attn_implementation("sdpa")
    compiled = torch.compile(model.__call__, backend=args.backend, fullgraph=True, dynamic=False)
    result: dict[str, Any] = {
        "what": "decoding with full, compacted and frozen caches",
        "asked": {name: value for name, value in vars(args).items() if name != "output"},
        "model": model_name(args.tiny, args.narrow),
        "hardware": hardware(torch.device(args.device)),
        "threads": torch.get_num_threads(),
        "clock": "processor" if _by_processor(torch.device(args.device)) else "wall",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "commit": commit(),
        "seed": SEED,
    }
    checks: list[Check] = []
    settings = []
    for tokens in args.lengths:
        for rows in args.rows:
            contest = Contest(model, compiled, tokens, rows, args.kept_fraction, args.steps)
            try:
                checks += contest.check()
            except DifferentOutputsError as error:
                found = [check.to_dict() for check in [*checks, *error.checks]]
                return {**result, "outputs_differ": str(error), "checks": found}
            settings.append(measure(contest, args.repeats))
            del contest
    return {**result, "settings": settings, "checks": [check.to_dict() for check in checks]}


def markdown(result: dict[str, Any]) -> str:
    """The result as tables; only what differs, if outputs do."""
    parts = ["# Decoding" if "settings" in result else "# Outputs differ, so no times are given"]
    for setting in result.get("settings", ()):
        lines = [table_header(["cache", "ms a step", "tokens/s", "speed", "bytes read, inverse", "entries read"])]
        for way, found in setting["ways"].items():
            cells = [f"{found['ms']:.4g}", f"{found['tokens_per_s']:.3g}", f"{found['speed_ratio']:.2f}×"]
            cells += [f"{found['bytes_ratio']:.2f}×", f"{found['bytes']['entries'] / 2**20:.4g} MiB"]
            lines.append(table_row([way, *cells]))
        title = f"## {setting['tokens']:,} tokens, {setting['rows']} row(s), {setting['kept_per_head']:,} kept per head"
        parts += [title, "\n".join(lines)]
    if "settings" in result:
        parts.append(NOTES)
    lines = [table_header(["checked before timing", "tokens", "error", "bound"])]
    lines += [table_row([c["what"], f"{c['tokens']:,}", f"{c['error']:.2g}", f"{c['bound']:.2g}"])
              for c in result["checks"]]  # fmt: skip
    asked, versions = result["asked"], ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    parts += ["\n".join(lines), (
        f"{result['model']}, random weights (seed {result['seed']}), {asked['dtype']}, sdpa, {asked['backend']}, "
        f"kept fraction {asked['kept_fraction']:g}, {asked['repeats']} passes of {asked['steps']} steps. "
        f"{result['hardware']}, {result['threads']} thread(s), {result['clock']} time. {versions}. "
        f"Commit {result['commit']}."
    )]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def plot(result: dict[str, Any], path: Path) -> None:
    """Speed of each way, and what its bytes allow as a line over its bar."""
    settings = result["settings"]
    width, ways = 0.8 / len(settings), list(WAYS)
    axis, figure = new_axis((8.0, 3.5))
    for i, setting in enumerate(settings):
        at = [x + (i - (len(settings) - 1) / 2) * width for x in range(len(ways))]
        label = f"{setting['tokens']:,} tokens, {setting['rows']} row(s)"
        speeds, allowed = ([setting["ways"][way][name] for way in ways] for name in ("speed_ratio", "bytes_ratio"))
        axis.bar(at, speeds, width=0.9 * width, color=COLOURS[i % len(COLOURS)], label=label)
        axis.hlines(allowed, [x - 0.45 * width for x in at], [x + 0.45 * width for x in at], color="black")
    axis.set(ylabel=f"speed; line: inverse bytes read\n({BASELINE} = 1)")
    axis.set_xticks(range(len(ways)), [way.replace(", ", "\n") for way in ways], fontsize=7)
    axis.legend(fontsize=8)
    save_figure(figure, path)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gatesight_eval.bench.decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=_numbers, default=[16384], help="tokens, comma-separated")
    parser.add_argument("--rows", type=_numbers, default=[1, 4], help="sessions that decode together, comma-separated")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument(
        "--narrow", type=int, default=1, help="divide hidden and MLP sizes, so that weights weigh less beside entries"
    )
    parser.add_argument("--kept-fraction", type=float, default=0.1)
    parser.add_argument("--repeats", type=int, default=5, help="timed passes")
    parser.add_argument("--steps", type=int, default=4, help="of a pass")
    parser.add_argument("--tiny", action="store_true", help="a very small model, to try the benchmark itself")
    parser.add_argument("--threads", type=int, help="of torch on the CPU")
    parser.add_argument("--output", type=Path, metavar="PREFIX", help="write PREFIX.md, PREFIX.json and PREFIX.png")
    args = parser.parse_args(argv)
    if not 0 < args.kept_fraction < 1:
        parser.error("--kept-fraction must be above 0 and below 1")
    if min(args.lengths) <= SEEN or min(*args.rows, args.repeats, args.steps, args.narrow) < 1:
        parser.error(f"--lengths must be above {SEEN}; --rows, --repeats, --steps and --narrow 1 or more")
    return args


@quiet()
def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    output, args.output = args.output, None
    with torch.no_grad():
        result = run(args)
    text = markdown(result)
    print(text, end="")
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        record = json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        output.with_name(output.name + ".json").write_text(record, encoding="utf-8")
        output.with_name(output.name + ".md").write_text(text, encoding="utf-8")
        if "settings" in result:
            plot(result, output.with_name(output.name + ".png"))
    if "outputs_differ" in result:
        print(f"error: {result['outputs_differ']}", file=sys.stderr)
    return 1 if "outputs_differ" in result else 0


if __name__ == "__main__":
    raise SystemExit(main())
