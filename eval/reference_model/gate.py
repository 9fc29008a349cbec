"""Does the reference model retrieve, and from its KV cache? Exact match with the full cache and with it emptied.

    python eval/reference_model/gate.py --out eval/results/reference_gate

Gate: full cache >= 95 % on single needles and >= 90 % on 4-key needles at each length; with the context's attention
cache emptied and the GDN states kept, at most 35 % of that. Also measured: the other tasks, and bfloat16.
"""

import argparse
import json
import platform
import random
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from gatesight_eval.backends.controls import empty_attention_cache
from gatesight_hf import GateSightCache
from gatesight_hf.cache import prefill
from gatesight_hf.methods import RandomScorer
from gatesight_hf.models._compat import cache_argument
from gatesight_hf.reference import MODEL_PATH, documents, load_model, load_tokenizer

GATES = {"niah_single_1": 0.95, "niah_single_2": 0.95, "niah_multikey": 0.90}
EMPTIED_SHARE = 0.35
ROWS_PER_BATCH = 10
#: Length of the passages that the model is asked to repeat.
REPEATED_WORDS = 64


def exact_matches(model: Any, tokenizer: Any, items: list[documents.Document]) -> tuple[int, int]:
    """Documents answered right with the full cache, and with it emptied; documents and questions of one length each."""
    context = tokenizer([item.text for item in items], return_tensors="pt").input_ids
    full = GateSightCache(RandomScorer(), model, kept_fraction=1.0)
    prefill(model, context, full)
    full.compact()
    emptied = full.fork()
    empty_attention_cache(emptied)

    question = tokenizer([item.questions[0].text for item in items], return_tensors="pt").input_ids
    longest = max(len(item.questions[0].answer) for item in items)
    right = []
    for cache in (full, emptied):
        output = model.generate(
            question,
            attention_mask=torch.ones((len(items), context.shape[1] + question.shape[1]), dtype=torch.long),
            max_new_tokens=longest + 1,
            do_sample=False,
            **{cache_argument(model): cache},
        )
        answers = tokenizer.batch_decode(output[:, question.shape[1] :])
        ended = [answer.split(tokenizer.eos_token)[0].split() for answer in answers]
        right.append(sum(words == item.questions[0].answer for words, item in zip(ended, items, strict=True)))
    return right[0], right[1]


def accuracies(model: Any, tokenizer: Any, task: str, length: int, count: int, seed: int) -> tuple[float, float]:
    """Exact match with the full cache, and with the context's attention cache emptied."""
    rng = random.Random(f"gate-{task}-{length}-{seed}")
    items = [documents.TASKS[task](rng, length) for _ in range(count)]
    sizes: dict[tuple[int, int], list[documents.Document]] = {}
    for item in items:
        sizes.setdefault((len(item.words), len(item.questions[0].words)), []).append(item)
    right = [
        exact_matches(model, tokenizer, group[start : start + ROWS_PER_BATCH])
        for group in sizes.values()
        for start in range(0, len(group), ROWS_PER_BATCH)
    ]
    return sum(full for full, _ in right) / count, sum(emptied for _, emptied in right) / count


def repeated_words(model: Any, tokenizer: Any, length: int, count: int, seed: int) -> float:
    """Share of the words of a passage that the model predicts when asked to repeat it and fed what came before."""
    rng = random.Random(f"gate-repeat-{length}-{seed}")
    right = words = 0
    for _ in range(count):
        document = documents.copy_context(rng, length, span=REPEATED_WORDS)
        ids = tokenizer(" ".join(documents.training_words(document)[0]), return_tensors="pt").input_ids
        with torch.no_grad():
            predicted = model(ids, use_cache=False).logits[0].argmax(-1)
        # The sequence ends with the answer and an end mark.
        right += int((predicted[-REPEATED_WORDS - 2 : -2] == ids[0, -REPEATED_WORDS - 1 : -1]).sum())
        words += REPEATED_WORDS
    return right / words


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        "| task | tokens | full cache | full cache, bfloat16 | attention cache emptied | gate |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        gate = "" if "gate" not in row else f"≥ {row['gate']:.2f}: {'passed' if row['passed'] else 'failed'}"
        lines.append(
            f"| {row['task']} | {row['length']} | {row['full']:.3f} | {row['full_bfloat16']:.3f} "
            f"| {row['emptied']:.3f} | {gate} |"
        )
    return "\n".join(lines)


def _shares(shares: dict[int, float]) -> str:
    return " and ".join(f"{share:.3f} of the words of passages in {length}" for length, share in shares.items())


def card(result: dict[str, Any], parameters: int) -> str:
    """The model's card, from the result alone."""
    return f"""---
library_name: transformers
license: apache-2.0
pipeline_tag: text-generation
tags:
- gated-deltanet
- synthetic
---

# GateSight reference model

A `Qwen3_5ForCausalLM` of {parameters:,} parameters with a closed vocabulary, trained from scratch on generated
documents with planted facts (`eval/reference_model/train.py`). On it KV eviction can be measured honestly on a laptop:
its attention layers are needed for recall, since every GDN head was trained to forget within some
tens of tokens. It knows nothing else and is of no other use.

Exact match, one question per document, {result["rows"][0]["items"]} documents per cell, seed {result["seed"]}:

{table(result)}

"Attention cache emptied": the context's KV entries are all dropped and its GDN states kept. A task without a gate is
reported as it is; where the full cache does not solve it, it measures nothing. `copy` is all or nothing over 24 words.
Word for word, fed what came before, the model repeats {_shares(result["repeated_words"])} tokens.
Versions: {", ".join(f"{name} {version}" for name, version in result["versions"].items())}.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL_PATH)
    parser.add_argument("--tokenizer", type=Path, default=MODEL_PATH)
    parser.add_argument("--out", type=Path, help="path of the result, without suffix: OUT.json and OUT.md")
    parser.add_argument("--card", type=Path, help="model card to write")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--tasks", nargs="+", default=list(documents.TASKS), choices=list(documents.TASKS))
    parser.add_argument("--items", type=int, default=100)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()

    tokenizer = load_tokenizer(args.tokenizer)
    models = {"float32": load_model(args.model), "bfloat16": load_model(args.model, torch.bfloat16)}
    rows: list[dict[str, Any]] = []
    cells = [(task, length) for task in args.tasks for length in args.lengths]
    for task, length in tqdm(cells, desc="gate", unit="cell"):
        row: dict[str, Any] = {"task": task, "length": length, "items": args.items}
        row["full"], row["emptied"] = accuracies(models["float32"], tokenizer, task, length, args.items, args.seed)
        row["full_bfloat16"], _ = accuracies(models["bfloat16"], tokenizer, task, length, args.items, args.seed)
        if task in GATES:
            row["gate"] = GATES[task]
            row["passed"] = row["full"] >= GATES[task] and row["emptied"] <= EMPTIED_SHARE * row["full"]
        rows.append(row)
        verdict = {True: "passed", False: "FAILED"}.get(row.get("passed"), "")
        tqdm.write(
            f"{task:16} {length:5}  full {row['full']:.3f}  emptied {row['emptied']:.3f}  "
            f"bf16 {row['full_bfloat16']:.3f}  {verdict}"
        )
    gated = [row for row in rows if "passed" in row]
    result = {
        "what": "exact match of the reference model, one question per document",
        "passed": all(row["passed"] for row in gated),
        "rows": rows,
        "repeated_words": {
            length: repeated_words(models["float32"], tokenizer, length, args.items, args.seed)
            for length in args.lengths
        },
        "seed": args.seed,
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
        args.out.with_suffix(".md").write_text(table(result) + "\n")
    if args.card:
        args.card.write_text(card(result, models["float32"].num_parameters()))
    print("gate passed" if result["passed"] else "gate FAILED")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
