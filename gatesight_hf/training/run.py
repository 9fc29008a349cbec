"""`gatesight train`: documents in, an estimator folder ready for the Hub out."""

import argparse
import json
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from .. import __version__
from ..cache.identity import weights_digest
from ..files.cards import estimator_card
from ..methods.hidden import HIDDEN_STATES_FOLDER, HiddenStateConfig
from ..models.hybrid import HybridSpec
from ..models.loading import REFERENCE, load_named
from ..scoring.estimator import EstimatorConfig
from .collect import Sampling, collect, partial_of
from .documents import SHORTEST_SHARE, reference_texts, tokenized
from .fit import FitOptions, evaluate, fit
from .mixture import Source, drawn_order, mixed, sources_of
from .plan import prompts_of
from .processes import all_processes

#: Options that count something.
POSITIVE_OPTIONS = (
    "train_documents",
    "eval_documents",
    "length",
    "continuations",
    "continuation_tokens",
    "rows",
    "epochs",
    "window",
    "hidden_size",
)


def claim_folder(folder: Path, settings: dict[str, Any]) -> None:
    """Make sure that shards in `folder` come from the same settings.

    Raises:
        ValueError: They come from others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "collection.json"
    text = json.dumps(settings, indent=2, sort_keys=True)
    if not record.exists():
        # Whole at once: other processes of the run claim the folder too.
        partial = partial_of(record)
        partial.write_text(text)
        partial.replace(record)
    if record.read_text() != text:
        raise ValueError(
            f"{folder} holds data collected with other settings (see {record.name} in it). Give another --data "
            "folder, or remove this one."
        )


@dataclass(frozen=True)
class Collected:
    """Documents of a model, ready to fit on.

    Attributes:
        model: The model; `name` on cards and in files.
        spec: Its layout.
        settings: Of the collection.
        train: Shards of the documents to fit on.
        held_out: Shards of other documents.
        longer: Shards of longer documents; empty unless asked for.
        is_main: Whether this process is the one of the run that goes on; the others are done.
        by_source: `held_out` by the name of the source.
    """

    model: Any
    name: str
    spec: HybridSpec
    settings: dict[str, Any]
    train: list[Path]
    held_out: list[Path]
    longer: list[Path]
    is_main: bool
    by_source: dict[str, list[Path]]


def collect_from_arguments(args: argparse.Namespace, longer_documents: int = 0, longer_length: int = 0) -> Collected:
    """Load the model, read or make the documents, and collect their shards.

    Several processes share the documents; each returns when all are collected.

    Args:
        args: As `gatesight train` has them.
        longer_documents, longer_length: How many longer documents to collect besides, and of how many tokens.

    Raises:
        ValueError: Options out of range, too few documents, or data of other settings in the folder.
    """
    for option in POSITIVE_OPTIONS:
        value = getattr(args, option, None)
        if value is not None and value < 1:
            raise ValueError(f"--{option.replace('_', '-')} must be at least 1, got {value}.")
    is_reference = args.model == REFERENCE
    if not (is_reference or args.documents or args.dataset):
        raise ValueError("--documents or --dataset is needed for any model but 'reference'.")
    given = sources_of(args.documents or [], args.dataset or [])
    sources = given or [Source(REFERENCE, 1.0, REFERENCE)]
    for count in (args.train_documents, args.eval_documents, longer_documents or len(sources)):
        drawn_order(sources, count, args.seed)  # refused before a model is loaded
    run = all_processes()
    # Several processes have a device each; one alone has them all.
    device_map = args.device_map or ({"": run.device} if run.num_processes > 1 else None)
    model, tokenizer = load_named(args.model, args.dtype, device_map)
    name = "gatesight-reference" if is_reference else args.model
    prompts = prompts_of(args)
    sampling = Sampling(
        continuations=args.continuations,
        tokens=args.continuation_tokens,
        prompts=tuple(tuple(tokenizer(p, add_special_tokens=False).input_ids) if p else () for p in prompts),
        seed=args.seed,
        rows=args.rows,
    )
    data = args.data or args.out.with_name(args.out.name + "-data")
    settings = {
        "model": name,
        "weights": weights_digest(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "sampling": asdict(sampling) | {"prompts": prompts},
        "document_tokens": args.length,
        "train_documents": args.train_documents,
        "hidden_states": args.hidden_states,
    }
    if given:
        of_sets = {"split": args.split, "column": args.text_column} if args.dataset else {}
        settings["sources"] = [{"name": s.name, "weight": s.weight, "place": s.place} | of_sets for s in given]
        if len(given) > 1:
            # The order of sources depends on it.
            settings["eval_documents"] = args.eval_documents
    claim_folder(data, settings)

    used: set[tuple[int, ...]] = set()

    def documents_of(length: int, seed: int) -> dict[str, Iterator[list[int]]]:
        """By source, those that do not begin as one that was given before, which are `args.length` tokens long."""

        def unused(texts: Iterator[str]) -> Iterator[list[int]]:
            for ids in tokenized(texts, tokenizer, length):
                beginning = tuple(ids[: args.length])
                if beginning not in used:
                    used.add(beginning)
                    yield ids

        if not given:
            return {REFERENCE: unused(reference_texts(length, seed))}
        return {source.name: unused(source.texts(seed, args.split, args.text_column)) for source in given}

    def gather(
        kind: str, documents: dict[str, Iterator[list[int]]], count: int, length: int, seed: int
    ) -> tuple[list[Path], list[str]]:
        order = drawn_order(sources, count, seed)
        chosen, sampled = mixed(documents, order, int(SHORTEST_SHARE * length), kind), replace(sampling, seed=seed)
        share = run.process_index, run.num_processes
        shards = collect(model, chosen, data / kind, sampled, f"{kind} documents", count, args.hidden_states, share)
        return shards, order

    # One stream of each source feeds both, so that they are disjoint; only one document is in memory at a time.
    documents, seed = documents_of(args.length, args.seed), args.seed
    train, _ = gather("train", documents, args.train_documents, args.length, seed)
    held_out, came_from = gather("eval", documents, args.eval_documents, args.length, seed + 1_000_000)
    longer: list[Path] = []
    if longer_documents:
        documents = documents_of(longer_length, seed + 2_000_000)
        longer, _ = gather("longer", documents, longer_documents, longer_length, seed + 2_000_000)
    run.wait_for_everyone()
    spec = HybridSpec.of(model)
    by_source: dict[str, list[Path]] = {source.name: [] for source in sources}
    for shard, source_name in zip(held_out, came_from, strict=True):
        by_source[source_name].append(shard)
    return Collected(model, name, spec, settings, train, held_out, longer, run.is_main_process, by_source)


def train_from_arguments(args: argparse.Namespace) -> dict[str, Any] | None:
    """Collect, fit, measure and write. Returns what `metrics.json` holds; None in all processes but the main one."""
    if args.out is None:
        raise ValueError("--out is needed: the folder of the estimator.")
    collected = collect_from_arguments(args)
    if not collected.is_main:
        return None
    model, name, spec, settings = collected.model, collected.name, collected.spec, collected.settings
    train, held_out = collected.train, collected.held_out
    config = EstimatorConfig.for_model(spec, name, args.window, args.hidden_size)
    hidden_config = None
    if args.hidden_states:
        hidden_config = HiddenStateConfig.for_model(spec, name, model.config.hidden_size, args.hidden_size)
    fitted = fit(config, train, held_out, FitOptions(epochs=args.epochs, seed=args.seed), hidden_config)
    metrics = {
        "base_model": name,
        "fingerprint": spec.fingerprint,
        "parameters": fitted.estimator.num_parameters,
        "held_out": fitted.metrics,
        "best_single_signals": fitted.best_single_signals,
        "train_documents": len(train),
        "eval_documents": len(held_out),
        "document_tokens": args.length,
        "sampling": settings["sampling"],
        "seed": args.seed,
        "versions": {
            "gatesight_hf": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }
    if len(collected.by_source) > 1:
        metrics["sources"] = settings["sources"]
        metrics["held_out_by_source"] = {
            source: {"documents": len(shards), "metrics": evaluate(shards, fitted.methods)}
            for source, shards in collected.by_source.items()
        }
    fitted.estimator.save_pretrained(args.out)
    if fitted.hidden_states is not None:
        fitted.hidden_states.save_pretrained(args.out / HIDDEN_STATES_FOLDER)
    (args.out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    (args.out / "README.md").write_text(estimator_card(metrics), encoding="utf-8")
    return metrics


def format_metrics(metrics: dict[str, Any]) -> str:
    """The table of held-out metrics."""
    lines = [f"{'':20} overlap@10  mass@10  Spearman   ({metrics['eval_documents']} held-out documents)"]
    for name, row in metrics["held_out"].items():
        lines.append(f"{name:20} {row['overlap@10']:10.3f} {row['mass@10']:8.3f} {row['spearman']:9.3f}")
    for source, found in metrics.get("held_out_by_source", {}).items():
        row = found["metrics"]["mlp"]
        values = f"{row['overlap@10']:10.3f} {row['mass@10']:8.3f} {row['spearman']:9.3f}"
        lines.append(f"{'mlp on ' + source:20} {values}   ({found['documents']})")
    return "\n".join(lines)
