"""Many questions on one compacted document: batches of those of equal length beside a loop over single ones.

    python -m gatesight_eval.bench.questions --output eval/results/questions_cpu

The bundled model, whose answers are words, and the slice of Qwen3.8-27B of `cost`, narrower if asked. Answers of all
ways are compared before times are given: token by token, of the slice in float32.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from gatesight_hf import GateSightCache
from gatesight_hf.cache import prefill
from gatesight_hf.commands.quiet import quiet
from gatesight_hf.methods import KeyNorm
from gatesight_hf.reference import documents, load_model, load_tokenizer
from gatesight_hf.session.answering import answer_many

from ..reports.store import commit
from ..reports.tables import table_header, table_row
from .machine import clock, hardware
from .model import build_slice, model_name, random_ids

SEED = 0


def contests(args: argparse.Namespace) -> dict[str, tuple[Any, list[int], list[list[int]]]]:
    """By name: a model, ids of its document, and ids of its questions."""
    tokenizer = load_tokenizer()
    document = documents.needles(random.Random(SEED), min(args.length, 2048), args.questions, asked=args.questions)
    asked = [tokenizer(question.text).input_ids for question in document.questions]
    slice_ = build_slice(args.tiny, torch.float32, torch.device("cpu"), SEED, args.narrow)
    ids = random_ids(slice_, args.length, SEED)[0].tolist()
    random_questions = [random_ids(slice_, 32, SEED + 1 + i)[0].tolist() for i in range(args.questions)]
    name = model_name(args.tiny, args.narrow)
    return {
        "bundled model": (load_model(), tokenizer(document.text).input_ids, asked),
        name if args.tiny else f"slice of {name}": (slice_, ids, random_questions),
    }


def measure(model: Any, ids: list[int], questions: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each batch size, in turns; 1 is the loop."""
    cache = GateSightCache(KeyNorm(), model, args.kept_fraction, allocation="flat")
    prefill(model, torch.tensor([ids]), cache)
    cache.compact()
    limits = [args.new_tokens] * len(questions)
    seconds: dict[int, list[float]] = {size: [] for size in (1, *args.batch_sizes)}
    answers: dict[int, Any] = {}
    for _ in range(args.repeats):
        for size, passes in seconds.items():
            begun = clock(model.device)
            answers[size] = answer_many(model, cache, questions, limits, size, {})
            passes.append(clock(model.device) - begun)
    base = median(seconds[1])
    ways = [
        {
            "batch_size": size,
            "seconds": median(passes),
            "seconds_of_passes": passes,
            "speed_ratio": base / median(passes),
            "same_answers": answers[size] == answers[1],
        }
        for size, passes in seconds.items()
    ]
    lengths = sorted({len(question) for question in questions})
    return {"tokens": len(ids), "questions": len(questions), "question_tokens": lengths, "ways": ways}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Everything, as JSON values."""
    return {
        "what": "many questions in batches beside a loop",
        "asked": {name: value for name, value in vars(args).items() if name != "output"},
        "hardware": hardware(torch.device("cpu")),
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "commit": commit(),
        "seed": SEED,
        "models": {name: measure(*contest, args) for name, contest in contests(args).items()},
    }


def markdown(result: dict[str, Any]) -> str:
    """The result as a table."""
    lines = [table_header(["model", "document", "questions", "batch of", "seconds", "speed", "same answers"])]
    for name, found in result["models"].items():
        for way in found["ways"]:
            cells = [f"{found['tokens']:,} tokens", f"{found['questions']} of {found['question_tokens']} tokens"]
            cells += [str(way["batch_size"]), f"{way['seconds']:.3g}", f"{way['speed_ratio']:.2f}×"]
            lines.append(table_row([name, *cells, "yes" if way["same_answers"] else "no"]))
    asked, versions = result["asked"], ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return "\n\n".join([
        "# Many questions",
        "\n".join(lines),
        f"`Session.ask_many` beside a loop of `ask` (a batch of 1). {asked['new_tokens']} new tokens, kept fraction "
        f"{asked['kept_fraction']:g}, float32, medians of {asked['repeats']} passes in turns. {result['hardware']}, "
        f"{result['threads']} thread(s). {versions}. Commit {result['commit']}.",
    ]) + "\n"  # fmt: skip


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gatesight_eval.bench.questions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=4096, help="tokens of the slice's document; the model's: 2048")
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--new-tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--kept-fraction", type=float, default=0.1)
    parser.add_argument("--narrow", type=int, default=8, help="divide the slice's hidden and MLP sizes")
    parser.add_argument("--repeats", type=int, default=3, help="timed passes")
    parser.add_argument("--tiny", action="store_true", help="a very small model in place of the slice")
    parser.add_argument("--output", type=Path, metavar="PREFIX", help="write PREFIX.md and PREFIX.json")
    return parser.parse_args(argv)


@quiet()
def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    with torch.no_grad():
        result = run(args)
    text = markdown(result)
    print(text, end="")
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        args.output.with_suffix(".md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
