"""A question in the prompt: what `generate` of context and question loses if the question is evicted with the context.

    python -m gatesight_eval.observations.one_shot --out eval/results/one_shot

The reference model reads context and question in one prompt, which is compacted as a whole, and goes on: as `generate`
does with a cache. Beside it the context compacted alone, as `Session` does it. Contexts and tasks are the toy suite's.
"""

import argparse
import json
import platform
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from tqdm import tqdm

import gatesight_hf
from gatesight_hf import Estimator, GateSightCache
from gatesight_hf.cache import prefill
from gatesight_hf.commands.quiet import quiet
from gatesight_hf.models.loading import REFERENCE, load_named
from gatesight_hf.reference import ESTIMATOR_PATH

from ..metrics.registry import score
from ..reports.stats import PairedBootstrap
from ..reports.store import commit
from ..reports.tables import table_header, table_row
from ..suites import toy
from ..suites.items import Item

#: Those that the reference model answers with its full cache, of one question to a prompt.
TASKS = ("niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multikey_2", "niah_multiquery", "qa", "shared_kv")
FRACTIONS = (0.1, 0.05)
FULL, ALONE, QUESTION = "full cache", "context alone", "question's length"


def suffixes(question: int, constants: list[int]) -> dict[str, int]:
    """What is protected at the prompt's end, by name."""
    return {"0": 0, **{str(n): n for n in constants}, QUESTION: question}


def answers(
    model: Any, cache: GateSightCache, ids: Tensor, question: int, constants: list[int], limit: int
) -> Iterator[tuple[str, float, list[int]]]:
    """A greedy answer from each way of compacting: its name, the kept fraction, tokens.

    Args:
        cache: New.
        ids: `[1, T]`, the prompt.
        question: How many of its last tokens are the question.
        constants: Protected suffixes to try besides none and the question.
        limit: Tokens of an answer.
    """
    context = ids.shape[1] - question
    prefill(model, ids[:, :context], cache)
    alone = cache.fork()
    logits = model(ids[:, context:], past_key_values=cache, logits_to_keep=1).logits[0, -1]
    yield FULL, 1.0, _greedy(model, cache.fork(), logits, limit)
    for fraction in FRACTIONS:
        parent = alone.fork(kept_fraction=fraction)
        parent.compact()
        first = model(ids[:, context:], past_key_values=parent, logits_to_keep=1).logits[0, -1]
        yield ALONE, fraction, _greedy(model, parent, first, limit)
        for name, suffix in suffixes(question, constants).items():
            child = cache.fork(kept_fraction=fraction, protected_suffix=suffix)
            child.compact()
            yield name, fraction, _greedy(model, child, logits, limit)


def _greedy(model: Any, cache: GateSightCache, logits: Tensor, limit: int) -> list[int]:
    said: list[int] = []
    for _ in range(limit):
        token = int(logits.argmax())
        if token == model.generation_config.eos_token_id:
            break
        said.append(token)
        logits = model(torch.tensor([[token]], device=logits.device), past_key_values=cache).logits[0, -1]
    return said


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Accuracy by way and kept fraction: of every task, and the mean over tasks with an interval over contexts."""
    model, tokenizer = load_named(REFERENCE)
    scorer = Estimator.from_pretrained(ESTIMATOR_PATH)
    items: list[Item] = list(toy.suite(TASKS, args.length, args.contexts, args.seeds))
    found: dict[tuple[str, float], dict[str, list[float]]] = {}
    lengths = []
    for item in tqdm(items, desc="prompts", unit="prompt", disable=None):
        question = item.questions[0]
        context = tokenizer(item.context, return_tensors="pt").input_ids
        asked = tokenizer(question.text, return_tensors="pt", add_special_tokens=False).input_ids
        lengths.append(asked.shape[1])
        ids, cache = torch.cat([context, asked], 1), GateSightCache(scorer, model)
        with torch.no_grad():
            for name, fraction, said in answers(
                model, cache, ids, asked.shape[1], args.suffixes, question.max_new_tokens
            ):
                text = tokenizer.decode(said, skip_special_tokens=True).strip()
                by_task = found.setdefault((name, fraction), {task: [] for task in TASKS})
                by_task[item.task].append(score(text, question).revised)
    bootstrap = PairedBootstrap(dict.fromkeys(TASKS, len(items) // len(TASKS)))
    rows: list[dict[str, Any]] = []
    for (name, fraction), by_task in found.items():
        scores = {task: np.array(values) for task, values in by_task.items()}
        mean = bootstrap.mean(scores)
        tasks = {task: float(values.mean()) for task, values in scores.items()}
        rows.append({"protected": name, "kept_fraction": fraction, **asdict(mean), "tasks": tasks})
    return {
        "contexts": len(items),
        "tokens": args.length,
        "question_tokens": [min(lengths), max(lengths)],
        "seeds": args.seeds,
        "rows": rows,
        "commit": commit(),
        "versions": {"gatesight_hf": gatesight_hf.__version__, "torch": torch.__version__,
                     "transformers": transformers.__version__, "python": platform.python_version()},
    }  # fmt: skip


def as_markdown(result: dict[str, Any]) -> str:
    short, long = result["question_tokens"]
    lines = [
        "# A question in the prompt",
        "",
        f"Mean accuracy over {len(TASKS)} tasks of the toy suite ({result['contexts']} prompts of {result['tokens']} "
        f"tokens and a question of {short} to {long}, data seeds {', '.join(map(str, result['seeds']))}), ± half the "
        "95 % bootstrap interval. The prompt is compacted as a whole, with so many of its last tokens protected; "
        f"`{ALONE}` is compacted before the question comes, as in a session. The first token of an answer comes from "
        "the prefill, and so from the full cache, in all rows but those.",
        "",
        table_header(["protected suffix", "kept fraction", "mean", *TASKS]),
    ]
    for row in result["rows"]:
        cells = [
            f"{row['mean']:.3f} ±{(row['high'] - row['low']) / 2:.3f}",
            *(f"{row['tasks'][task]:.2f}" for task in TASKS),
        ]
        lines.append(table_row([row["protected"], f"{row['kept_fraction']:g}", *cells]))
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return "\n".join([*lines, "", f"Commit {result['commit']}; {versions}.", ""])


@quiet(on_cpu=True)
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="results go to OUT.json and OUT.md")
    parser.add_argument("--contexts", type=int, default=10, help="of each task and data seed (default: 10)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a context (default: 1024)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="data seeds (default: 0 1 2)")
    parser.add_argument("--suffixes", type=int, nargs="*", default=[8, 32, 64], help="to try (default: 8 32 64)")
    args = parser.parse_args()
    result = measure(args)
    args.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    args.out.with_suffix(".md").write_text(as_markdown(result), encoding="utf-8")
    print(as_markdown(result))


if __name__ == "__main__":
    main()
