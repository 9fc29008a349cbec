"""`gatesight train`: documents in, an estimator folder ready for the Hub out."""

import argparse
import hashlib
import json
import platform
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers

from .. import __version__
from ..cards import estimator_card
from ..estimator import EstimatorConfig
from ..hybrid import HybridSpec
from ..identity import weights_digest
from ..loading import REFERENCE, load_named
from ..methods.hidden import HIDDEN_STATES_FOLDER, HiddenStateConfig
from ..reference import documents as reference_documents
from .collect import Sampling, collect
from .fit import FitOptions, fit

#: The shortest text worth a document, as a share of the asked length.
SHORTEST_SHARE = 0.25
#: Options that count something.
POSITIVE_OPTIONS = (
    "train_documents",
    "eval_documents",
    "length",
    "continuations",
    "continuation_tokens",
    "epochs",
    "window",
    "hidden_size",
)


def read_texts(paths: Sequence[Path]) -> Iterator[str]:
    """Texts of `.txt` files (one each) and `.jsonl` files (key `text` of each line); folders are searched for both.

    Raises:
        FileNotFoundError: A path does not exist.
        ValueError: A file of another kind, or a line without `text`.
    """
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file or folder.")
        if path.is_dir():
            yield from read_texts(sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".jsonl")))
            continue
        if path.suffix not in (".txt", ".jsonl"):
            raise ValueError(f"{path}: documents are .txt or .jsonl files, or folders of them.")
        number = 0
        try:
            with path.open(encoding="utf-8") as lines:
                if path.suffix == ".txt":
                    yield lines.read()
                    continue
                for number, line in enumerate(lines, 1):  # noqa: B007 - named in the error
                    row = json.loads(line)
                    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                        raise ValueError("expected an object with a string 'text'")
                    yield row["text"]
        except ValueError as error:
            where = f"{path}, line {number}" if number else str(path)
            raise ValueError(f"{where}: {error}.") from error


def reference_texts(length: int, seed: int) -> Iterator[str]:
    """Endless documents of the reference model's tasks, `length` tokens each: few facts, many, or nothing else."""
    rng = random.Random(f"estimator-documents-{seed}")
    while True:
        kind = rng.random()
        if kind < 0.6:
            document = reference_documents.needles(
                rng, length, rng.choice([1, 2, 4, 8, 16, 24]), short=rng.random() < 0.2, repeated=rng.random() < 0.15
            )
        elif kind < 0.75:
            document = reference_documents.needles(rng, length, length // reference_documents.SHORT_NEEDLE, short=True)
        else:
            task = rng.choice(["niah_multivalue", "vt", "qa"])
            document = reference_documents.TASKS[task](rng, length)
        yield document.text


def tokenized(texts: Iterator[str], tokenizer: Any, length: int) -> Iterator[list[int]]:
    """Ids of each text, cut to `length`; too short ones and repeated ones are left out."""
    seen: set[bytes] = set()
    for text in texts:
        ids = tokenizer(text).input_ids[:length]
        digest = hashlib.sha256(str(ids).encode()).digest()
        if len(ids) >= SHORTEST_SHARE * length and digest not in seen:
            seen.add(digest)
            yield ids


def claim_folder(folder: Path, settings: dict[str, Any]) -> None:
    """Make sure that shards in `folder` come from the same settings.

    Raises:
        ValueError: They come from others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "collection.json"
    text = json.dumps(settings, indent=2, sort_keys=True)
    if record.exists() and record.read_text() != text:
        raise ValueError(
            f"{folder} holds data collected with other settings (see {record.name} in it). Give another --data "
            "folder, or remove this one."
        )
    record.write_text(text)


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
    """

    model: Any
    name: str
    spec: HybridSpec
    settings: dict[str, Any]
    train: list[Path]
    held_out: list[Path]
    longer: list[Path]


def collect_from_arguments(args: argparse.Namespace, longer_documents: int = 0, longer_length: int = 0) -> Collected:
    """Load the model, read or make the documents, and collect their shards.

    Args:
        args: As `gatesight train` has them.
        longer_documents, longer_length: How many longer documents to collect besides, and of how many tokens.

    Raises:
        ValueError: Options out of range, too few documents, or data of other settings in the folder.
    """
    for option in POSITIVE_OPTIONS:
        if hasattr(args, option) and getattr(args, option) < 1:
            raise ValueError(f"--{option.replace('_', '-')} must be at least 1, got {getattr(args, option)}.")
    is_reference = args.model == REFERENCE
    if not is_reference and not args.documents:
        raise ValueError("--documents is needed for any model but 'reference'.")
    model, tokenizer = load_named(args.model)
    name = "gatesight-reference" if is_reference else args.model
    prompts = args.prompt or (["question :"] if is_reference else [""])
    sampling = Sampling(
        continuations=args.continuations,
        tokens=args.continuation_tokens,
        prompts=tuple(tuple(tokenizer(p, add_special_tokens=False).input_ids) if p else () for p in prompts),
        seed=args.seed,
    )
    data = args.data or args.out.with_name(args.out.name + "-data")
    settings = {
        "model": name,
        "weights": weights_digest(model),
        "sampling": asdict(sampling) | {"prompts": prompts},
        "document_tokens": args.length,
        "train_documents": args.train_documents,
        "hidden_states": args.hidden_states,
    }
    claim_folder(data, settings)

    used: set[tuple[int, ...]] = set()

    def documents_of(length: int, seed: int) -> Iterator[list[int]]:
        """Those that do not begin as one that was given before, which are `args.length` tokens long."""
        texts = read_texts(args.documents) if args.documents else reference_texts(length, seed)
        for ids in tokenized(texts, tokenizer, length):
            beginning = tuple(ids[: args.length])
            if beginning not in used:
                used.add(beginning)
                yield ids

    def gather(kind: str, documents: Iterator[list[int]], count: int, length: int, seed: int) -> list[Path]:
        chosen, sampled = islice(documents, count), replace(sampling, seed=seed)
        shards = collect(model, chosen, data / kind, sampled, f"{kind} documents", count, args.hidden_states)
        if len(shards) < count:
            raise ValueError(
                f"Only {len(shards)} different documents of at least {int(SHORTEST_SHARE * length)} tokens were found "
                f"for {kind}, {count} are asked for: give more or longer texts, or lower --train-documents, "
                "--eval-documents or --length."
            )
        return shards

    # One stream of different documents feeds both, so that they are disjoint; only one is in memory at a time.
    documents, seed = documents_of(args.length, args.seed), args.seed
    train = gather("train", documents, args.train_documents, args.length, seed)
    held_out = gather("eval", documents, args.eval_documents, args.length, seed + 1_000_000)
    longer = []
    if longer_documents:
        documents = documents_of(longer_length, seed + 2_000_000)
        longer = gather("longer", documents, longer_documents, longer_length, seed + 2_000_000)
    return Collected(model, name, HybridSpec.from_config(model.config), settings, train, held_out, longer)


def train_from_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Collect, fit, measure and write. Returns what `metrics.json` holds."""
    collected = collect_from_arguments(args)
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
    return "\n".join(lines)
