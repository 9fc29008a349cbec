"""Ages at lengths that an estimator was not trained at: three ways to scale them, side by side on the reference model.

    python -m gatesight_eval.observations.ages --data runs/estimator-data --out eval/results/ages

DATA is what `gatesight train --model reference --continuations 48 --hidden-states` collected, or is collected now;
longer documents come into folders beside it. Every way is fitted on the same documents with the same options.
"""

import argparse
import json
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import tqdm

import gatesight_hf
from gatesight_hf import Estimator, EstimatorConfig
from gatesight_hf.commands.cli import parser
from gatesight_hf.commands.quiet import quiet
from gatesight_hf.models.loading import REFERENCE, load_named
from gatesight_hf.reference import ESTIMATOR_PATH
from gatesight_hf.scoring.features import AGES, age_features, assemble
from gatesight_hf.training.collect import Shard, read_shards
from gatesight_hf.training.fit import FitOptions, InputFunction, evaluate, fit, mlp_scores
from gatesight_hf.training.metrics import overlap
from gatesight_hf.training.run import Collected, collect_from_arguments

from ..reports.store import commit
from ..reports.tables import table_header, table_row
from ..suites import toy

#: Ages `[stop - start, 3]` of the tokens `start … stop-1` of a context of a length.
Ages = Callable[[int, int, int], Tensor]


def constant_scale(start: int, stop: int, length: int) -> Tensor:
    """Format 1: age / length, and the logarithms of age and position over that of 2^20 tokens."""
    position = torch.arange(start, stop)
    age, scale = (length - 1 - position).float(), math.log1p(2**20)
    return torch.stack([age / max(1, length), age.log1p() / scale, position.float().log1p() / scale], dim=-1)


def shares(start: int, stop: int, length: int) -> Tensor:
    """Not taken: the age's share of the context, and logarithms of that and of the position's; alike at all lengths.

    At 1,024 tokens it is format 2.
    """
    position, oldest, steps = torch.arange(start, stop), max(1, length - 1), 1023
    age, position = (length - 1 - position).float() / oldest, position.float() / oldest
    return torch.stack([age, (steps * age).log1p(), (steps * position).log1p()], dim=-1) / torch.tensor(
        [1.0, math.log1p(steps), math.log1p(steps)]
    )


OLD, NEW, SHARES = "format 1", "format 2", "shares"
SCALES: dict[str, tuple[Ages, str]] = {
    OLD: (constant_scale, "logarithms of age and position over that of 2^20 tokens"),
    NEW: (age_features, "logarithms of age and position over that of the context's length"),
    SHARES: (shares, "not taken: logarithms of what share of the context age and position are"),
}


def _spread(ages: Ages, tokens: int, times: int) -> Tensor:
    length = times * tokens
    places = (torch.arange(tokens, dtype=torch.float64) * (length - 1) / max(1, tokens - 1)).round().long()
    return ages(0, length, length)[places]


#: Ages `[T, 3]` of a document's T tokens if they stood in a context so many times longer.
PLACES: dict[str, Callable[[Ages, int, int], Tensor]] = {
    "spread over it": _spread,
    "its beginning": lambda ages, tokens, times: ages(0, tokens, times * tokens),
    "its end": lambda ages, tokens, times: ages((times - 1) * tokens, times * tokens, times * tokens),
}
#: Tasks that the reference model solves at the lengths of its training.
RETRIEVAL = ("niah_single_2", "niah_multikey_1", "qa")
#: Lengths whose ages are set beside those of training.
LENGTHS = (1024, 32 * 1024, 256 * 1024)


def inputs_with(config: EstimatorConfig, ages: Ages) -> InputFunction:
    """The estimator's inputs with other ages."""

    def inputs(shard: Shard, ordinal: int) -> Tensor:
        signals = assemble([shard.signals[i] for i in config.gdn_windows[ordinal]])[:, : -len(AGES)]
        return torch.cat([signals, ages(0, shard.length, shard.length)], dim=-1)

    return inputs


def layers_of(estimator: Estimator) -> list[dict[str, Tensor]]:
    """Tensors of each attention layer, by their names in it."""
    layers: list[dict[str, Tensor]] = [{} for _ in estimator.config.gdn_windows]
    for full_name, tensor in estimator.tensors.items():
        _, j, name = full_name.split(".")
        layers[int(j)][name] = tensor
    return layers


def changed(estimator: Estimator, ages: Ages, paths: Sequence[Path], times: int) -> dict[str, float]:
    """Share of each document's best tenth by score that changes when only its context's length is said to be another.

    Args:
        estimator: Fitted with these ages.
        ages: How they are scaled.
        paths: Shards.
        times: How many times longer the context is said to be.

    Returns:
        By place of the document in the longer context, means over documents, attention layers and KV heads.
    """
    inputs_of, layers = inputs_with(estimator.config, ages), layers_of(estimator)
    found: dict[str, list[float]] = {place: [] for place in PLACES}
    for shard in read_shards(paths):
        for j, layer in enumerate(layers):
            inputs = inputs_of(shard, j)
            scores = mlp_scores(layer, inputs)
            for place, placed in PLACES.items():
                elsewhere = torch.cat([inputs[:, : -len(AGES)], placed(ages, shard.length, times)], dim=-1)
                found[place].append(1 - float(overlap(mlp_scores(layer, elsewhere), scores).mean()))
    return {place: sum(shares) / len(shares) for place, shares in found.items()}


def standardised(estimator: Estimator, ages: Ages, length: int) -> dict[str, list[float]]:
    """The lowest and the highest of each age in a context of `length` tokens, in deviations of its training."""
    layer = layers_of(estimator)[0]
    age = slice(-len(AGES), None)
    found = (ages(0, length, length) - layer["input_mean"][age]) / layer["input_std"][age]
    return {name: [float(column.min()), float(column.max())] for name, column in zip(AGES, found.T, strict=True)}


@torch.no_grad()
def retrieval(model: Any, tokenizer: Any, length: int, count: int) -> dict[str, float]:
    """Share of questions that the model answers with its full cache, by task, on `count` contexts each."""
    right: dict[str, list[bool]] = {task: [] for task in RETRIEVAL}
    items = list(toy.suite(RETRIEVAL, length, count, [0]))
    for item in tqdm(items, desc=f"retrieval at {length}", unit="context", disable=None):
        for question in item.questions:
            ids = tokenizer(f"{item.context} {question.text}", return_tensors="pt").input_ids
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=question.max_new_tokens,
                do_sample=False,
            )
            answer = tokenizer.decode(output[0, ids.shape[1] :]).split(tokenizer.eos_token)[0]
            right[item.task].append(answer.split() == question.references[0].split())
    return {task: sum(answers) / len(answers) for task, answers in right.items()}


def _collect(args: argparse.Namespace, length: int) -> Collected:
    """Documents of the training length, or longer ones that are measured on only."""
    times = length // args.length
    longer = times > 1
    words = {
        "model": REFERENCE,
        "data": args.data.with_name(f"{args.data.name}-{length}") if longer else args.data,
        "length": length,
        "train-documents": 1 if longer else args.train_documents,
        "eval-documents": args.longer_documents if longer else args.eval_documents,
        "continuations": args.continuations,
        "epochs": args.epochs,
        # A seed of their own: generated documents of one seed may begin alike at all lengths.
        "seed": times if longer else 0,
    }
    options = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    return collect_from_arguments(parser().parse_args(["train", *options, "--hidden-states"]))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything, as the JSON holds it."""
    lengths = [args.length, *(times * args.length for times in args.longer)]
    collected = {length: _collect(args, length) for length in lengths}
    first = collected[args.length]
    config = EstimatorConfig.for_model(first.spec, first.name)
    bundled = Estimator.from_pretrained(ESTIMATOR_PATH)
    overlaps: dict[str, dict[str, dict[str, float]]] = {str(length): {} for length in lengths}
    change: dict[str, dict[str, dict[str, float]]] = {}
    inputs: dict[str, dict[str, dict[str, list[float]]]] = {}
    is_bundled = False
    for name, (ages, _) in SCALES.items():
        options = FitOptions(epochs=args.epochs)
        fitted = fit(config, first.train, first.held_out, options, inputs_of=inputs_with(config, ages))
        estimator = fitted.estimator
        for length, of_length in collected.items():
            found = fitted.metrics if length == args.length else evaluate(of_length.held_out, fitted.methods)
            overlaps[str(length)][name] = {method: row["overlap@10"] for method, row in found.items()}
        change[name] = {str(times): changed(estimator, ages, first.held_out, times) for times in args.times}
        inputs[name] = {str(length): standardised(estimator, ages, length) for length in LENGTHS}
        if name == NEW and config == bundled.config:
            # Processors round differently; whatever is trained otherwise is far off.
            pairs = [(bundled.tensors[key], tensor) for key, tensor in estimator.tensors.items()]
            is_bundled = all(torch.allclose(*pair, rtol=1e-3, atol=1e-4) for pair in pairs)
    model, tokenizer = load_named(REFERENCE, None)
    return {
        "model": first.name,
        "weights": first.settings["weights"],
        "scales": {name: text for name, (_, text) in SCALES.items()},
        "fitted_is_bundled": is_bundled,
        "documents": {"train": len(first.train), **{str(n): len(found.held_out) for n, found in collected.items()}},
        "length": args.length,
        "overlap@10": overlaps,
        "retrieval": {str(length): retrieval(model, tokenizer, length, args.contexts) for length in lengths},
        "contexts": args.contexts,
        "changed": change,
        "inputs": inputs,
        "sampling": first.settings["sampling"],
        "versions": {
            "gatesight_hf": gatesight_hf.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "commit": commit(),
    }


# -- tables ------------------------------------------------------------------------------------------------------------


def markdown(found: Mapping[str, Any]) -> str:
    """All tables."""
    names = list(found["scales"])
    lengths = list(found["overlap@10"])
    methods = list(next(iter(found["overlap@10"].values()))[names[0]])
    rows = [
        [method, name, *(f"{found['overlap@10'][length][name][method]:.3f}" for length in lengths)]
        for method in methods
        for name in names
        if name == names[0] or "signal" not in method  # a single signal has no ages
    ]
    parts = [
        "# Ages at lengths that were not trained at",
        "\n".join(f"- {name}: {text}" for name, text in found["scales"].items()),
        "## Overlap@10",
        f"Share of the true top tenth that the top tenth by score holds. Trained at {found['length']:,} tokens.",
        _table(["scores", "ages", *(f"{int(length):,} tokens" for length in lengths)], rows),
        "What the model itself still finds at these lengths: exact answers with the full cache, "
        f"{found['contexts']} contexts each.",
        _table(
            ["task", *(f"{int(length):,} tokens" for length in lengths)],
            [[task, *(f"{found['retrieval'][n][task]:.3f}" for n in lengths)] for task in RETRIEVAL],
        ),
        "## Share of the kept tenth that changes when only the length changes",
        "The same signals, ages as if the document's tokens were part of a context so many times longer. Spread over "
        "it, each token keeps its share of the context before and after it.",
        _table(
            ["the tokens are", "times longer", *names],
            [
                [place, times, *(f"{found['changed'][name][times][place]:.3f}" for name in names)]
                for place in PLACES
                for times in found["changed"][names[0]]
            ],
        ),
        "## Ages in deviations of the training's",
        "Lowest and highest of all tokens; the training saw what stands at its own length.",
        _table(
            ["context", "age", *names],
            [
                [f"{int(length):,} tokens", age, *(_range(found["inputs"][name][length][age]) for name in names)]
                for length in found["inputs"][names[0]]
                for age in AGES
            ],
        ),
        _provenance(found),
    ]
    return "\n\n".join(parts) + "\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([table_header(header), *map(table_row, rows)])


def _range(ends: Sequence[float]) -> str:
    return f"{ends[0]:.2f} … {ends[1]:.2f}"


def _provenance(found: Mapping[str, Any]) -> str:
    documents = {int(n): count for n, count in found["documents"].items() if n != "train"}
    measured = ", ".join(f"{count} of {length:,} tokens" for length, count in documents.items())
    bundled = "is" if found["fitted_is_bundled"] else "is not"
    return (
        f"{found['model']} (weights {found['weights']}): fitted on {found['documents']['train']} documents, measured "
        f"on others: {measured}. {found['sampling']['continuations']} continuations of {found['sampling']['tokens']} "
        f"tokens. What was fitted as {NEW} {bundled} the bundled estimator. "
        f"{', '.join(f'{name} {version}' for name, version in found['versions'].items())}. Commit {found['commit']}."
    )


@quiet(on_cpu=True)
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write OUT.json and OUT.md."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", type=Path, required=True, help="folder of collected documents")
    options.add_argument("--out", type=Path, required=True, help="OUT.json and OUT.md")
    options.add_argument("--length", type=int, default=1024, help="tokens of the documents that are fitted on")
    options.add_argument("--longer", type=int, nargs="*", default=[2, 4], help="times that longer ones have")
    options.add_argument("--train-documents", type=int, default=96)
    options.add_argument("--eval-documents", type=int, default=32)
    options.add_argument("--longer-documents", type=int, default=16)
    options.add_argument("--continuations", type=int, default=48)
    options.add_argument("--epochs", type=int, default=30)
    options.add_argument(
        "--contexts", type=int, default=20, help="of each task and length, to see what the model finds"
    )
    options.add_argument("--times", type=int, nargs="+", default=[4, 256], help="longer contexts that are only claimed")
    args = options.parse_args(arguments)
    found = measure(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    record = json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    args.out.with_name(args.out.name + ".json").write_text(record, encoding="utf-8")
    args.out.with_name(args.out.name + ".md").write_text(markdown(found), encoding="utf-8")
    print(markdown(found))


if __name__ == "__main__":
    main()
