"""Does the reference model retrieve, and from its KV cache? Exact match with the full cache and with it emptied.

    python eval/reference_model/gate.py --model gatesight_hf/reference/model --out eval/results/reference_model.json

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

from gatesight_hf import GateSightCache
from gatesight_hf.methods import RandomScorer
from gatesight_hf.reference import documents, load_model, load_tokenizer

GATES = {"niah_single_1": 0.95, "niah_single_2": 0.95, "niah_multikey": 0.90}
EMPTIED_SHARE = 0.35


def exact_matches(model: Any, tokenizer: Any, items: list[documents.Document], emptied: bool) -> list[bool]:
    """One question per document, batched over documents of one length and questions of any length."""
    context = tokenizer([item.text for item in items], return_tensors="pt", padding=True)
    cache = GateSightCache(RandomScorer(), model, kept_fraction=1.0)
    inputs = {"input_ids": context.input_ids, "attention_mask": context.attention_mask}
    with torch.no_grad():
        model(**inputs, past_key_values=cache, logits_to_keep=1)
    cache.compact()
    if emptied:
        for layer in cache.attention_layers:
            rows, heads = layer.kept_keys.shape[:2]
            layer.tail_keys, layer.tail_values = layer.kept_keys, layer.kept_values
            layer.kept_keys = layer.kept_values = None
            layer.evicted = 0
            layer.compact(torch.zeros(rows, heads, 0, dtype=torch.long), torch.ones(rows, 0, dtype=torch.bool))
    question = tokenizer([item.questions[0].text for item in items], return_tensors="pt", padding=True)
    longest = max(len(item.questions[0].answer) for item in items)
    output = model.generate(
        question.input_ids,
        attention_mask=torch.cat([context.attention_mask, question.attention_mask], dim=1),
        past_key_values=cache,
        max_new_tokens=longest + 1,
        do_sample=False,
    )
    answers = tokenizer.batch_decode(output[:, question.input_ids.shape[1] :])
    ended = [answer.split(tokenizer.eos_token)[0].split() for answer in answers]
    return [words == item.questions[0].answer for words, item in zip(ended, items, strict=True)]


def accuracy(
    model: Any, tokenizer: Any, task: str, length: int, count: int, seed: int, emptied: bool = False, batch: int = 10
) -> float:
    rng = random.Random(f"gate-{task}-{length}-{seed}")
    items = [documents.TASKS[task](rng, length) for _ in range(count)]
    right: list[bool] = []
    for start in range(0, count, batch):
        right += exact_matches(model, tokenizer, items[start : start + batch], emptied)
    return sum(right) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer, if not the model's")
    parser.add_argument("--out", type=Path, help="JSON file of the result")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--tasks", nargs="+", default=list(documents.TASKS), choices=list(documents.TASKS))
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()

    tokenizer = load_tokenizer(args.tokenizer or args.model)
    models = {"float32": load_model(args.model), "bfloat16": load_model(args.model, torch.bfloat16)}
    rows: list[dict[str, Any]] = []
    cells = [(task, length) for task in args.tasks for length in args.lengths]
    for task, length in tqdm(cells, desc="gate", unit="cell"):
        row: dict[str, Any] = {"task": task, "length": length, "items": args.items}
        row["full"] = accuracy(models["float32"], tokenizer, task, length, args.items, args.seed)
        row["emptied"] = accuracy(models["float32"], tokenizer, task, length, args.items, args.seed, emptied=True)
        row["full_bfloat16"] = accuracy(models["bfloat16"], tokenizer, task, length, args.items, args.seed)
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
        "seed": args.seed,
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    print("gate passed" if result["passed"] else "gate FAILED")


if __name__ == "__main__":
    main()
