"""From the arguments of `gatesight evaluate` to items, and to what a result file records of their data."""

import argparse
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from .items import Item

Tasks = Sequence[str] | None
#: Items, and what a result file records of their data.
Loaded = tuple[list[Item], dict[str, Any]]


def load(args: argparse.Namespace, tokenizer: Any) -> Loaded:
    """The items of the suite that was asked for.

    Raises:
        ValueError: Arguments that do not go together, or no items.
    """
    tasks = args.tasks.split(",") if args.tasks else None
    if args.count < 0:
        raise ValueError(f"--count is a number of contexts, or 0 for all of a data set, got {args.count}.")
    if args.count == 0 and (args.suite == "toy" or (args.suite == "ruler" and not args.data)):
        raise ValueError("--count 0 takes all of a data set; a generator needs a number.")
    suites = {"toy": _toy, "scbench": _scbench, "scbench-kvzip": _scbench_kvzip, "ruler": _ruler}
    items, data = suites[args.suite](args, tasks, tokenizer)
    if not items:
        raise ValueError(f"No items: none of the tasks {args.tasks} is in {args.data}.")
    digest = hashlib.sha256()
    for item in items:
        digest.update(repr(item).encode())
    return items, {**data, "items": len(items), "items_sha256": digest.hexdigest()}


def _toy(args: argparse.Namespace, tasks: Tasks, tokenizer: Any) -> Loaded:
    from . import toy

    if args.data or _variants(args):
        raise ValueError("--data and --variants are for ruler and scbench; the toy suite is generated.")
    seeds = _seeds(args, default=0)
    return list(toy.suite(tasks or list(toy.TASKS), args.length, args.count, seeds)), {"generator": "toy"}


def _ruler(args: argparse.Namespace, tasks: Tasks, tokenizer: Any) -> Loaded:
    from . import ruler

    variants = _variants(args)
    if args.data and variants:
        raise ValueError("--variants belong to generated items; a data set is read as it is.")
    if args.data and Path(args.data).exists() and not args.data_config:
        items = _first(ruler.load_official(args.data), tasks, args.count)
    elif args.data:
        items = _first(ruler.load_kvpress(args.data, args.data_config, revision=args.revision), tasks, args.count)
    else:
        sources = ruler.Sources(haystack=args.haystack, squad=args.squad, hotpotqa=args.hotpotqa)
        seeds = _seeds(args, default=42)
        if len(seeds) > 1:
            raise ValueError("RULER is generated from one data seed (officially 42): give one to --seeds.")
        items = []
        for task in tasks or list(ruler.TASKS):
            try:
                generated = ruler.generate(task, tokenizer, args.length, args.count, seeds[0], sources, variants)
                items += islice(generated, args.count)
            except ValueError as error:
                raise ValueError(f"{error} (Files are given by --haystack, --squad, --hotpotqa.)") from error
    return items, ruler.manifest(items)


def _scbench(args: argparse.Namespace, tasks: Tasks, tokenizer: Any) -> Loaded:
    from . import scbench

    source, variants = args.data or "microsoft/SCBench", _variants(args)
    turns = scbench.OFFICIAL_MAX_TURNS if args.max_turns is None else args.max_turns
    chosen = tasks or list(scbench.TASKS)
    # The one variant there is concerns one task.
    if variants and (variants != ("neutral_prefix",) or "scbench_mf" not in chosen):
        raise ValueError(f"--variants {args.variants}: SCBench has neutral_prefix alone, and for scbench_mf alone.")
    items: list[Item] = []
    for task in chosen:
        variant = variants[0] if variants and task == "scbench_mf" else "official"
        items += scbench.load(
            task,
            source,
            revision=args.revision,
            max_turns=turns,
            limit=args.count or None,
            variant=variant,
        )
    return items, {"source": source, "revision": args.revision, "max_turns": turns}


def _scbench_kvzip(args: argparse.Namespace, tasks: Tasks, tokenizer: Any) -> Loaded:
    from . import scbench

    if not tasks or _variants(args):
        raise ValueError(
            "--suite scbench-kvzip has no variants and needs --tasks, such as scbench_kv_short,scbench_vt."
        )
    source, turns = args.data or "Jang-Hyun/SCBench-preprocessed", -1 if args.max_turns is None else args.max_turns
    items: list[Item] = []
    for task in tasks:
        items += scbench.load_kvzip(task, source, revision=args.revision, max_turns=turns, limit=args.count or None)
    return items, {"source": source, "revision": args.revision, "max_turns": turns}


def _variants(args: argparse.Namespace) -> tuple[str, ...]:
    return tuple(filter(None, args.variants.split(",")))


def _seeds(args: argparse.Namespace, default: int) -> list[int]:
    if args.seeds is None:
        return [default]
    try:
        return [int(seed) for seed in args.seeds.split(",")]
    except ValueError as error:
        raise ValueError(f"--seeds {args.seeds}: give whole numbers, with commas between them.") from error


def _first(items: Iterable[Item], tasks: Sequence[str] | None, count: int) -> list[Item]:
    """The first `count` items of each task, all for 0."""
    seen: Counter[str] = Counter()
    kept = []
    for item in items:
        if tasks is None or item.task in tasks:
            seen[item.task] += 1
            if not count or seen[item.task] <= count:
                kept.append(item)
    return kept
