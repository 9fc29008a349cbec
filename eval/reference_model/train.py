"""Train the small hybrid that the library is measured on, from scratch, on one or two CPU cores.

    python eval/reference_model/train.py --out runs/a --threads 2 --minutes 100
    python eval/reference_model/train.py --out runs/a --threads 2 --minutes 30      # goes on from the last checkpoint
    python eval/reference_model/train.py --out runs/b --start-from gatesight_hf/reference/model

The model is a plain `Qwen3_5ForCausalLM`. Three choices make it learn to retrieve from its KV cache instead of its GDN
states: a curriculum that starts with contexts of 24 tokens, many records a context once contexts are long, and a
penalty that keeps each GDN head's decay below a floor, so that its state forgets within some tens of tokens.
"""

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from fast_delta import fast_delta_rule
from torch import Tensor
from tqdm import tqdm
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from gatesight_hf.reference import documents, words

#: Context lengths of the curriculum, the number of needles in each, and whether they are in the short form.
LEVELS = [(24, 3, True), (48, 5, True), (96, 8, True), (192, 10, False), (384, 16, False), (768, 24, False),
          (1024, 24, False), (2048, 24, False)]  # fmt: skip
#: Level from which tasks other than needles are mixed in, and how often those are drawn from each level: they have to
#: be learned at short lengths first, as needles were.
MIXED_FROM = 3
MIXED_LEVELS = (6, 4, 4, 2, 1, 1, 1, 1)
#: In proportion to how hard they are to learn.
MIXED_TASKS = ("multi_query", *2 * ("multi_value",), *2 * ("vt",), *3 * ("lookup",), *4 * ("copy",))


def build_config(vocab_size: int, hidden_size: int) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=8,
        full_attention_interval=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=None,
    )


def initialise(model: Qwen3_5ForCausalLM, seed: int) -> None:
    """Embeddings N(0, 1/sqrt(d)), linears N(0, 0.8/sqrt(fan-in)), decays spread over the heads."""
    generator = torch.Generator().manual_seed(seed)
    layers = model.config.num_hidden_layers
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                parameter.normal_(0, model.config.hidden_size**-0.5, generator=generator)
            elif name.endswith("A_log"):
                parameter.copy_(torch.linspace(math.log(0.1), math.log(0.5), parameter.numel()))
            elif name.endswith("dt_bias"):
                parameter.fill_(1.0)
            elif parameter.ndim == 2:
                std = 0.8 * parameter.shape[1] ** -0.5
                if any(part in name for part in ("out_proj", "o_proj", "down_proj")):
                    std /= math.sqrt(2 * layers)
                parameter.normal_(0, std, generator=generator)


class DecayFloor:
    """Mean of relu(g + floor) over tokens and heads, summed over GDN layers: zero once every head forgets fast enough.

    Hooks on `in_proj_a` see the one input of g that a forward does not return.
    """

    def __init__(self, model: Qwen3_5ForCausalLM, floor: Tensor) -> None:
        self.total: Tensor | float = 0.0
        for module in model.modules():
            if hasattr(module, "in_proj_a"):
                module.in_proj_a.register_forward_hook(self._hook(module, floor))

    def _hook(self, layer: Any, floor: Tensor) -> Any:
        def hook(_module: Any, _args: Any, a: Tensor) -> None:
            g = -layer.A_log.exp() * F.softplus(a + layer.dt_bias)
            self.total = self.total + F.relu(g + floor).mean()

        return hook

    def take(self) -> Tensor | float:
        total, self.total = self.total, 0.0
        return total


def sample_document(rng: random.Random, level: int, task: str) -> documents.Document:
    length, most, short = LEVELS[level]
    if task == "multi_value":
        return documents.multi_value(rng, length, values=rng.randint(2, 4), distractors=rng.randint(0, length // 64))
    if task == "multi_query":
        return documents.multi_query(rng, length, count=rng.randint(2, 4 + length // 128), asked=rng.randint(2, 4))
    if task == "vt":
        return documents.variable_tracking(rng, length, hops=rng.randint(1, 1 + min(2, length // 64)), chains=2)
    if task == "lookup":
        return documents.lookup(rng, length, count=min(24, max(2, length // 8)), asked=24)
    if task == "copy":
        start = None if rng.random() < 0.7 else 0
        return documents.copy_context(rng, length, min(96, length // 2), start, shuffled=rng.random() < 0.5)
    # Mostly as many records as fit: dense supervision, and more than the GDN states can hold.
    count = most if rng.random() < 0.7 else rng.randint(1, most)
    repeated = level >= MIXED_FROM and rng.random() < 0.15
    use_short = short or rng.random() < 0.2
    if use_short and not short and rng.random() < 0.5:
        count = length // documents.SHORT_NEEDLE
    return documents.needles(rng, length, count, asked=24, short=use_short, repeated=repeated)


def sample_batch(
    rng: random.Random, level: int, task: str, index: dict[str, int], tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Right-padded ids, targets, answer flags and question flags, all `[B, T]`, about `tokens` tokens in all."""
    count = max(1, tokens // int(LEVELS[level][0] * 1.6))
    drawn = [sample_document(rng, level, task) for _ in range(count)]
    rows = [documents.training_words(document) for document in drawn]
    length = max(len(row) for row, _ in rows)
    ids = torch.zeros(count, length, dtype=torch.long)
    answer = torch.zeros(count, length, dtype=torch.bool)
    question = torch.zeros(count, length, dtype=torch.bool)
    for i, (row, flags) in enumerate(rows):
        ids[i, : len(row)] = torch.tensor([index[word] for word in row])
        answer[i, : len(row)] = torch.tensor(flags)
        question[i, len(drawn[i].words) : len(row)] = True
    return ids[:, :-1], ids[:, 1:], answer[:, 1:], (question & ~answer)[:, 1:]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="run folder: checkpoint, log, final model")
    parser.add_argument("--start-from", type=Path, help="model folder whose weights to begin with, at the last level")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--final-lr-fraction", type=float, default=0.05)
    parser.add_argument("--minutes", type=float, default=60.0, help="wall time of this call; a later call goes on")
    parser.add_argument("--total-minutes", type=float, help="wall time of the cosine schedule (default: --minutes)")
    parser.add_argument(
        "--floor", type=float, default=0.1, help="decay floor in nats a token (0.1: half-life 7 tokens)"
    )
    parser.add_argument("--slow-floor", type=float, default=0.04, help="floor of the last value head of each layer")
    parser.add_argument("--floor-weight", type=float, default=5.0)
    parser.add_argument("--context-weight", type=float, default=0.1, help="loss weight of the context's own words")
    parser.add_argument("--question-weight", type=float, default=0.5, help="loss weight of the words of questions")
    parser.add_argument("--easier", type=float, default=0.4, help="share of steps on easier levels")
    parser.add_argument("--mix", type=float, default=0.6, help="share of steps on tasks other than needles")
    parser.add_argument(
        "--mixed-tasks", nargs="+", default=MIXED_TASKS, help="those tasks; repeat one for a larger share"
    )
    parser.add_argument(
        "--mixed-levels", type=int, nargs="+", default=MIXED_LEVELS, help="how often they are drawn from each level"
    )
    parser.add_argument("--advance-at", type=float, default=0.95, help="answer-token accuracy that ends a level")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--checkpoint-seconds", type=float, default=60.0, help="seconds between checkpoints")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    vocabulary = words.vocabulary()
    index = {word: i for i, word in enumerate(vocabulary)}
    model = Qwen3_5ForCausalLM(build_config(len(vocabulary), args.hidden_size))
    initialise(model, args.seed)
    decay_parameters = [p for p in model.parameters() if p.ndim == 2]
    other_parameters = [p for p in model.parameters() if p.ndim != 2]
    optimiser = torch.optim.AdamW(
        [{"params": decay_parameters, "weight_decay": 0.02}, {"params": other_parameters, "weight_decay": 0.0}],
        lr=args.learning_rate,
        betas=(0.9, 0.95),
    )
    floor = torch.full((model.config.linear_num_value_heads,), args.floor)
    floor[-1] = args.slow_floor
    penalty = DecayFloor(model, floor)
    rng = random.Random(args.seed)
    state = {"step": 0, "tokens": 0, "level": 0, "accuracy": 0.0, "seconds": 0.0, "level_step": 0}

    if args.start_from:
        model.load_state_dict(Qwen3_5ForCausalLM.from_pretrained(args.start_from).state_dict())
        state["level"] = len(LEVELS) - 1
    checkpoint = args.out / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
        state = saved["state"]
        rng.seed(args.seed * 1_000_003 + state["step"])

    def save() -> None:
        partial = checkpoint.with_suffix(".partial")
        torch.save({"model": model.state_dict(), "optimiser": optimiser.state_dict(), "state": state}, partial)
        partial.replace(checkpoint)
        model.save_pretrained(args.out / "model")

    total_seconds = 60 * (args.total_minutes or args.minutes)
    begun, before = time.monotonic(), state["seconds"]
    saved_at = begun
    log = (args.out / "log.jsonl").open("a")
    bar = tqdm(total=int(60 * args.minutes), unit="s", dynamic_ncols=True)
    sums = {"loss": 0.0, "answers": 0, "right": 0, "penalty": 0.0, "steps": 0}
    by_task: dict[str, list[int]] = {}
    with fast_delta_rule():
        while (now := time.monotonic()) - begun < 60 * args.minutes:
            state["seconds"] = before + now - begun
            warm = min(1.0, (state["step"] + 1) / 50)
            done = min(1.0, state["seconds"] / total_seconds)
            cosine = args.final_lr_fraction + (1 - args.final_lr_fraction) * 0.5 * (1 + math.cos(math.pi * done))
            for group in optimiser.param_groups:
                group["lr"] = args.learning_rate * warm * cosine

            # Some steps stay on easier levels, so that nothing learned is lost.
            current = state["level"]
            level = current if current == 0 or rng.random() > args.easier else rng.randrange(current)
            task = "needles"
            if current >= MIXED_FROM and rng.random() < args.mix:
                task = rng.choice(args.mixed_tasks)
                weights = args.mixed_levels[: current + 1]
                level = rng.choices(range(len(weights)), weights)[0]
            ids, targets, is_answer, is_question = sample_batch(rng, level, task, index, args.tokens_per_step)
            logits = model(input_ids=ids, use_cache=False).logits
            losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
            is_context = (targets != 0) & ~is_answer & ~is_question
            # Answers are few in long contexts with one needle: a floor under their number keeps such steps calm.
            loss = (losses * is_answer).sum() / is_answer.sum().clamp(min=32)
            for part, weight in ((is_context, args.context_weight), (is_question, args.question_weight)):
                loss = loss + weight * (losses * part).sum() / part.sum()
            extra = penalty.take()
            (loss + args.floor_weight * extra).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad()

            right = int(((logits.argmax(-1) == targets) & is_answer).sum())
            answers = int(is_answer.sum())
            task_sums = by_task.setdefault(task, [0, 0])
            task_sums[0] += right
            task_sums[1] += answers
            state["step"] += 1
            state["tokens"] += ids.numel()
            sums["loss"] += float(loss)
            sums["penalty"] += float(extra)
            sums["steps"] += 1
            if level == current and task == "needles":
                sums["right"] += right
                sums["answers"] += answers
                share = right / max(1, answers)
                state["accuracy"] = 0.95 * state["accuracy"] + 0.05 * share
                state["level_step"] += 1
            if state["accuracy"] > args.advance_at and state["level_step"] > 40 and current + 1 < len(LEVELS):
                state.update(level=current + 1, accuracy=0.0, level_step=0)
            if sums["steps"] == 50 or state["level"] != current:
                line = {
                    **{k: round(v, 4) for k, v in state.items()},
                    "loss": round(sums["loss"] / sums["steps"], 4),
                    "penalty": round(sums["penalty"] / sums["steps"], 5),
                    "answer_accuracy": round(sums["right"] / max(1, sums["answers"]), 4),
                    "length": LEVELS[current][0],
                    "by_task": {name: round(n / max(1, of), 3) for name, (n, of) in sorted(by_task.items())},
                }
                log.write(json.dumps(line) + "\n")
                log.flush()
                sums, by_task = dict.fromkeys(sums, 0), {}
            bar.n = int(time.monotonic() - begun)
            bar.set_postfix(level=LEVELS[state["level"]][0], acc=f"{state['accuracy']:.3f}", step=state["step"])
            if time.monotonic() - saved_at > args.checkpoint_seconds:
                save()
                saved_at = time.monotonic()
    save()


if __name__ == "__main__":
    main()
