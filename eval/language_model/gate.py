"""What the language model can do, and whether it needs its KV cache for it.

    python eval/language_model/gate.py --model eval/language_model/checkpoint --data runs/language-data \
        --out eval/results/language_gate

Loss on held-out documents by the length of the context that is seen; with the attention cache emptied or cut to the
last 256 entries while the GDN states stay; RULER's tasks with the full and the emptied cache; half-lives and the mean
output gate by layer. RULER's two question-answering tasks need files that no package ships: `qa` asks planted facts.
"""

import argparse
import json
import platform
import random
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import network
import planted
import tokens
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from tqdm import tqdm
from train import Text
from transformers import Qwen3_5ForCausalLM

from gatesight_eval.backends.controls import empty_attention_cache
from gatesight_eval.metrics.registry import SCORERS
from gatesight_eval.suites import ruler
from gatesight_eval.suites.items import Question
from gatesight_hf import GateSightCache
from gatesight_hf.cache import prefill
from gatesight_hf.methods import RandomScorer, StreamingLLM
from gatesight_hf.models._compat import cache_argument

#: Tokens whose loss is measured, and how many come before them.
TARGETS = 256
CONTEXTS = (0, 256, 768, 1792, 3840)
#: Tasks of the official generator; of items whose answers training may have planted, others are taken.
TASKS = tuple(name for name in ruler.TASKS if not name.startswith("qa"))
WINDOW = 256


def compacted(model: Any, context: Tensor, last: int | None = None) -> GateSightCache:
    """The context's cache with everything, or with its last entries alone."""
    scorer = RandomScorer() if last is None else StreamingLLM(sinks=0)
    kept = 1.0 if last is None else min(1.0, last / context.shape[1])
    cache = GateSightCache(scorer, model, kept_fraction=kept, allocation="flat")
    prefill(model, context, cache)
    cache.compact()
    return cache


def windows(data: Path, tokenizer: Any, count: int) -> dict[str, list[Tensor]]:
    """Held-out windows by kind, each from within one document of at least that length."""
    length = CONTEXTS[-1] + TARGETS
    found: dict[str, list[Tensor]] = {kind: [] for kind in tokens.KINDS if count}
    for document in tokens.read(data, "evaluation"):
        if len(found.get(document["kind"], ())) == count or len(document["text"]) < 2 * length:
            continue
        ids = tokenizer(document["text"], add_special_tokens=False).input_ids
        if len(ids) >= length:
            found[document["kind"]].append(torch.tensor(ids[:length])[None])
    return {kind: some for kind, some in found.items() if some}


@torch.no_grad()
def target_loss(model: Any, targets: Tensor, cache: GateSightCache | None) -> float:
    """Nats a token of `targets` `[1, T]` after the first, given a cache of what came before."""
    options = {} if cache is None else {cache_argument(model): cache}
    logits = model(targets[:, :-1], **options).logits[0].float()
    return float(F.cross_entropy(logits, targets[0, 1:]))


def losses(model: Any, data: Path, tokenizer: Any, count: int) -> dict[str, dict[str, float]]:
    """By kind: loss of the same last tokens by context length, and at the longest with less of the KV cache."""
    out = {}
    for kind, some in windows(data, tokenizer, count).items():
        sums: dict[str, list[float]] = {}
        for ids in tqdm(some, desc=f"loss, {kind}", unit="document"):
            context, targets = ids[:, :-TARGETS], ids[:, -TARGETS:]
            for length in CONTEXTS:
                cache = compacted(model, context[:, -length:]) if length else None
                sums.setdefault(str(length), []).append(target_loss(model, targets, cache))
            emptied = compacted(model, context)
            empty_attention_cache(emptied)
            sums.setdefault("emptied", []).append(target_loss(model, targets, emptied))
            cut = compacted(model, context, WINDOW)
            sums.setdefault(f"last {WINDOW}", []).append(target_loss(model, targets, cut))
        out[kind] = {"documents": len(some), **{name: round(statistics.mean(part), 4) for name, part in sums.items()}}
    return out


def items(task: str, tokenizer: Any, length: int, count: int, haystack: Path, filler: Any) -> Iterator[tuple[str, Any]]:
    """Contexts and questions whose answers training never planted."""
    if task == "qa":
        for i in range(count):
            draw = planted.Draw(random.Random(f"gate/qa/{length}/{i}"), training=False)
            document = planted.TASKS["qa"](draw, filler, length - 60)
            asked = document.questions[0]
            yield document.context, Question(asked.text, (asked.answer.strip(),), 8, "string_match_part")
        return
    sources = ruler.Sources(haystack=haystack)
    variants = [name for name in ("filled", "essay_offset") if task in ruler.VARIANTS[name]]
    found = 0
    for item in ruler.generate(task, tokenizer, length, 8 * count, sources=sources, variants=variants):
        if not task.startswith(("cwe",)) and any(map(planted.is_for_training, item.questions[0].references)):
            continue
        yield item.context, item.questions[0]
        found += 1
        if found == count:
            return


def answers(model: Any, tokenizer: Any, context: str, question: Any) -> list[float]:
    """Scores with the full and the emptied cache."""
    full = compacted(model, tokenizer(context, return_tensors="pt", add_special_tokens=False).input_ids)
    emptied = full.fork()
    empty_attention_cache(emptied)
    text = question.text + (question.answer_prefix or "").rstrip()
    asked = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    longest = max(len(tokenizer(" ".join(question.references)).input_ids) + 12, 8)
    scores = []
    for cache in (full, emptied):
        output = model.generate(
            asked,
            attention_mask=torch.ones(1, cache.get_seq_length() + asked.shape[1], dtype=torch.long),
            max_new_tokens=min(question.max_new_tokens, longest),
            do_sample=False,
            **{cache_argument(model): cache},
        )
        prediction = tokenizer.decode(output[0, asked.shape[1] :], skip_special_tokens=True)
        scores.append(SCORERS[question.metric](prediction, question).revised)
    return scores


@torch.no_grad()
def output_gates(model: Any, ids: Tensor) -> list[float]:
    """Mean output gate of each attention layer over tokens and channels."""
    means: list[float] = []

    def hook(module: Any, _args: Any, out: Tensor) -> None:
        gate = out.view(*out.shape[:2], -1, 2, model.config.head_dim)[..., 1, :]
        means.append(round(float(gate.sigmoid().mean()), 4))

    handles = [m.q_proj.register_forward_hook(hook) for m in model.modules() if hasattr(m, "q_proj")]
    model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return means


def measured_half_lives(model: Any, ids: Tensor) -> list[list[float]]:
    """Of each GDN layer's value heads: ln 2 over the mean decay a token on real text."""
    found: list[list[float]] = []

    def hook(layer: Any) -> Any:
        def measure(_module: Any, _args: Any, a: Tensor) -> None:
            rate = layer.A_log.exp() * F.softplus(a.float() + layer.dt_bias)
            found.append([round(x, 1) for x in (0.6931472 / rate.mean((0, 1))).tolist()])

        return measure

    handles = [layer.in_proj_a.register_forward_hook(hook(layer)) for layer in network.gdn_layers(model)]
    with torch.no_grad():
        model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    names = [str(length) for length in CONTEXTS] + ["emptied", f"last {WINDOW}"]
    lines = [
        f"Nats a token on the last {TARGETS} of {CONTEXTS[-1] + TARGETS} tokens of held-out documents, by the number "
        "of tokens seen before; and with all of them seen, the attention cache emptied or cut to its last entries:", "",
        "| kind | documents | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names),
    ]  # fmt: skip
    for kind, row in result["loss"].items():
        lines.append(f"| {kind} | {row['documents']} | " + " | ".join(f"{row[name]:.3f}" for name in names) + " |")
    lengths = sorted({row["length"] for row in result["tasks"]})
    lines += ["", "RULER, share right with the full cache / with the attention cache emptied:", ""]
    lines += ["| task | " + " | ".join(map(str, lengths)) + " |", "|---|" + "---|" * len(lengths)]
    for task in dict.fromkeys(row["task"] for row in result["tasks"]):
        cells = {
            row["length"]: f"{row['full']:.2f} / {row['emptied']:.2f}" for row in result["tasks"] if row["task"] == task
        }
        lines.append(f"| {task} | " + " | ".join(cells.get(length, "") for length in lengths) + " |")
    lines += [
        "",
        "Half-lives in tokens of each GDN layer's heads, on text; mean output gate of each attention layer:",
        "",
    ]
    lines += [f"- GDN {i}: {', '.join(map(str, row))}" for i, row in enumerate(result["half_lives"])]
    lines += [f"- attention {i}: {gate:.3f}" for i, gate in enumerate(result["output_gates"])]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder of the corpus")
    parser.add_argument("--out", type=Path, help="path of the result, without suffix: OUT.json and OUT.md")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--tasks", nargs="*", default=[*TASKS, "qa"])
    parser.add_argument("--items", type=int, default=25)
    parser.add_argument("--documents", type=int, default=10, help="held-out documents of each kind")
    parser.add_argument("--haystack", type=Path, help="prose of the needle tasks (default: held-out books)")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    tokenizer = tokens.load(args.model)
    model = Qwen3_5ForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    text = Text(args.data, "evaluation")
    filler = planted.Filler(text.window, tokenizer)
    haystack = args.haystack or args.data / "haystack.txt"
    if not haystack.exists():
        books = [d["text"] for d in tokens.read(args.data, "evaluation") if d["kind"] == "book"]
        haystack.write_text("\n".join(books), encoding="utf-8")
    result: dict[str, Any] = {"loss": losses(model, args.data, tokenizer, args.documents), "tasks": []}
    ids = torch.tensor([text.window(random.Random(i), 1024, "documentation") for i in range(4)])
    result["output_gates"], result["half_lives"] = output_gates(model, ids), measured_half_lives(model, ids)
    for task, length in tqdm([(t, n) for t in args.tasks for n in args.lengths], desc="tasks", unit="cell"):
        try:
            some = list(items(task, tokenizer, length, args.items, haystack, filler))
        except ValueError as error:  # a task that does not fit into so few tokens
            tqdm.write(str(error))
            continue
        scores = [answers(model, tokenizer, context, question) for context, question in some]
        full, emptied = (round(statistics.mean(column), 4) for column in zip(*scores, strict=True))
        row = {"task": task, "length": length, "items": len(scores), "full": full, "emptied": emptied}
        result["tasks"].append(row)
        tqdm.write(json.dumps(row))
    result["versions"] = {
        "torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version(),
    }  # fmt: skip
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    main()
