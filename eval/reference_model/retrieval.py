"""How much of the reference model's accuracy is left at each kept fraction: GateSight, its allocations, and random.

    python eval/reference_model/retrieval.py --out eval/results/reference_retrieval

One prefill per document serves all methods and fractions: an uncompacted parent is forked, and each fork compacted on
its own. One question per document, exact match, greedy. Writes OUT.json, OUT.md and OUT.png.
"""

import argparse
import json
import platform
import random
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from gatesight_hf import Estimator, GateSightCache, Session
from gatesight_hf._compat import cache_argument
from gatesight_hf.methods import RandomScorer
from gatesight_hf.reference import ESTIMATOR_PATH, MODEL_PATH, documents, load_model, load_tokenizer

FRACTIONS = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
METHODS: dict[str, dict[str, Any]] = {
    "gatesight": {"allocation": "gate"},
    "gatesight, flat": {"allocation": "flat"},
    "gatesight, pyramid": {"allocation": "pyramid"},
    "random": {"allocation": "gate"},
}


def measure(
    model: Any, tokenizer: Any, estimator: Estimator, document: documents.Document, seed: int
) -> dict[str, bool]:
    """Whether each `method@fraction` answers the document's question."""
    question = document.questions[0]
    parent = GateSightCache(estimator, model, kept_fraction=1.0)
    ids = tokenizer(document.text, return_tensors="pt").input_ids
    with torch.no_grad():
        model(ids, **{cache_argument(model): parent}, logits_to_keep=1)
    right = {}
    for fraction in (1.0, *FRACTIONS):
        for method, options in METHODS.items() if fraction < 1 else [("full", {})]:
            scorer = RandomScorer(seed) if method == "random" else estimator
            child = parent.fork(scorer=scorer, kept_fraction=fraction, **options)
            child.compact()
            answer = Session(model, tokenizer, child).ask(question.text, max_new_tokens=len(question.answer) + 1)
            right[f"{method}@{fraction}"] = answer == question.expected
    return right


def table(result: dict[str, Any]) -> str:
    """Accuracy by method and kept fraction for every task, as Markdown."""
    lines = []
    for task, cells in result["accuracy"].items():
        lines += [f"**{task}**, full cache {cells['full@1.0']:.3f}", ""]
        lines += ["| kept fraction | " + " | ".join(map(str, FRACTIONS)) + " |", "|---" * (len(FRACTIONS) + 1) + "|"]
        for method in METHODS:
            lines.append(f"| {method} | " + " | ".join(f"{cells[f'{method}@{p}']:.3f}" for p in FRACTIONS) + " |")
        lines.append("")
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tasks = result["accuracy"]
    figure, axes = plt.subplots(1, len(tasks), figsize=(3 * len(tasks), 3), sharey=True, squeeze=False)
    for axis, (task, cells) in zip(axes[0], tasks.items(), strict=True):
        for method in METHODS:
            axis.plot(FRACTIONS, [cells[f"{method}@{p}"] for p in FRACTIONS], marker="o", label=method)
        axis.axhline(cells["full@1.0"], color="grey", linestyle=":", label="full cache")
        axis.set(title=task, xlabel="kept fraction", xscale="log", ylim=(-0.03, 1.03))
        axis.set_xticks(FRACTIONS, [str(p) for p in FRACTIONS], fontsize=7)
        axis.minorticks_off()
    axes[0][0].set_ylabel("exact match")
    axes[0][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL_PATH)
    parser.add_argument("--estimator", type=Path, default=ESTIMATOR_PATH)
    parser.add_argument("--out", type=Path, required=True, help="path of the result, without suffix")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--items", type=int, default=50, help="documents per task")
    parser.add_argument("--tasks", nargs="+", default=["niah_single_2", "niah_multikey", "niah_multiquery"])
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()

    model, tokenizer = load_model(args.model), load_tokenizer()
    estimator = Estimator.from_pretrained(args.estimator)
    accuracy: dict[str, dict[str, float]] = {}
    bar = tqdm(total=len(args.tasks) * args.items, unit="document")
    for task in args.tasks:
        rng = random.Random(f"retrieval-{task}-{args.length}-{args.seed}")
        rows = []
        for item in range(args.items):
            document = documents.TASKS[task](rng, args.length)
            rows.append(measure(model, tokenizer, estimator, document, args.seed + item))
            bar.update()
        accuracy[task] = {cell: sum(row[cell] for row in rows) / len(rows) for cell in rows[0]}
    bar.close()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    result = {
        "what": "exact match of the reference model, one question per document",
        "length": args.length,
        "items": args.items,
        "accuracy": accuracy,
        "seed": args.seed,
        "commit": commit.stdout.strip() or None,
        "hardware": f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    args.out.with_suffix(".md").write_text(table(result) + "\n")
    plot(result, args.out.with_suffix(".png"))
    print(table(result))


if __name__ == "__main__":
    main()
