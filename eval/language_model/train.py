r"""Train the language model: retrieval in the attention layers first, then slow heads and longer text.

    python eval/language_model/train.py --data runs/language-data --out runs/language --phase 1
    python eval/language_model/train.py --data runs/language-data --out runs/language               # goes on
    python eval/language_model/train.py --data runs/language-data --out runs/language --phase 2     # slow heads let in
    python eval/language_model/train.py --data runs/language-data --out runs/language --decay-steps 400
    python eval/language_model/train.py --data runs/language-data --out runs/b \
        --start-from eval/language_model/checkpoint

Every step is a batch of planted documents and a batch of real text, both drawn by seed and step alone, so that a run
goes on after a kill as if nothing had been. The learning rate is constant after its warm-up; `--decay-steps` ends a run
by letting it fall to zero. Checkpoints are whole or absent.
"""

import argparse
import json
import random
import signal
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import network
import numpy as np
import planted
import tokens
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3_5ForCausalLM

from gatesight_eval.backends.controls import empty_attention_cache
from gatesight_hf import GateSightCache
from gatesight_hf.cache import prefill
from gatesight_hf.methods import RandomScorer
from gatesight_hf.models._compat import cache_argument

#: Shares of real text.
KIND_SHARES = {"documentation": 0.55, "book": 0.25, "code": 0.20}
#: Loss weights by mark: context, question, answer. Planted contexts teach no language; text has its own batch.
WEIGHTS = (0.0, 0.2, 1.0)
#: What each phase trains on: tokens a step of planted documents and of text, and lengths of text with their weights.
PHASES: dict[int, dict[str, Any]] = {
    1: {"planted": 1024, "text": 384, "lengths": {128: 1, 256: 1}},
    2: {"planted": 1024, "text": 3072, "lengths": {256: 1, 512: 1, 1024: 2, 2048: 1, 3072: 1}},
}
#: Levels of the curriculum that planted documents keep coming from, as weights by distance to the current one.
EASIER = (0.6, 0.2, 0.1, 0.06, 0.04)


class Text:
    """Tokens of one split by kind, and random windows of them."""

    def __init__(self, data: Path, split: str) -> None:
        self._tokens = {
            kind: np.memmap(path, dtype=np.uint16, mode="r")
            for kind in KIND_SHARES
            if (path := data / f"{split}.{kind}.bin").exists() and path.stat().st_size
        }
        self.kinds = list(self._tokens)
        self.total = sum(len(part) for part in self._tokens.values())

    def window(self, rng: random.Random, length: int, kind: str | None = None) -> list[int]:
        kinds = list(self._tokens)
        kind = kind or rng.choices(kinds, [KIND_SHARES[name] for name in kinds])[0]
        part = self._tokens[kind]
        length = min(length, len(part) - 1)
        start = rng.randrange(len(part) - length)
        return part[start : start + length].tolist()


def text_batch(rng: random.Random, text: Text, count: int, lengths: dict[int, float]) -> Tensor:
    """About `count` tokens in windows of one length, `[B, T + 1]`."""
    length = min(rng.choices(list(lengths), list(lengths.values()))[0], count)
    return torch.tensor([text.window(rng, length + 1) for _ in range(max(1, count // length))])


def pad(rows: Sequence[Sequence[int]]) -> Tensor:
    out = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row)
    return out


@dataclass
class Planted:
    """Planted documents of like lengths: ids and marks `[B, T]`, and the family of each."""

    ids: Tensor
    marks: Tensor
    families: list[str]


def planted_batches(
    rng: random.Random, filler: planted.Filler, tokenizer: Any, level: int, count: int
) -> tuple[list[Planted], int]:
    """About `count` tokens of one level, in at most three batches so that little is padding; and that level."""
    drawn = level - min(rng.choices(range(len(EASIER)), EASIER)[0], level)
    rows: list[tuple[list[int], list[int], str]] = []
    used = 0
    while used < count:
        family, document = planted.for_training(rng, filler, drawn)
        ids, marks = planted.encode(document, tokenizer, chat=drawn >= 2 and rng.random() < 0.15)
        if rows and used + len(ids) > 1.1 * count:
            break
        rows.append((ids[: 2 * count], marks[: 2 * count], family))
        used += len(rows[-1][0])
    rows.sort(key=lambda row: len(row[0]))
    share = -(-len(rows) // (3 if count > 800 else 2))
    parts = [rows[start : start + share] for start in range(0, len(rows), share)]
    return [Planted(pad([r[0] for r in p]), pad([r[1] for r in p]), [r[2] for r in p]) for p in parts], drawn


# -- checks ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def retrieval(model: Any, tokenizer: Any, filler: planted.Filler, task: str, length: int, count: int, seed: int) -> Any:
    """Shares of answers that are right token for token: full cache, attention cache emptied. One question each."""
    rng = random.Random(f"check/{task}/{length}/{seed}")
    right = [0, 0]
    for _ in range(count):
        document = (
            planted.records(planted.Draw(rng, False), filler, length, 1000, plain=True, asked=1)
            if task == "plain"
            else planted.TASKS[task](planted.Draw(rng, False), filler, length)
        )
        context = tokenizer(document.context, return_tensors="pt", add_special_tokens=False).input_ids
        question = document.questions[0]
        asked, answer = tokenizer([question.text, question.answer], add_special_tokens=False).input_ids
        full = GateSightCache(RandomScorer(), model, kept_fraction=1.0)
        prefill(model, context, full)
        full.compact()
        emptied = full.fork()
        empty_attention_cache(emptied)
        for i, cache in enumerate((full, emptied)):
            ids = torch.tensor([asked + answer])
            logits = model(ids, **{cache_argument(model): cache}).logits[0, len(asked) - 1 : -1]
            right[i] += int((logits.argmax(-1) == ids[0, len(asked) :]).all())
    return round(right[0] / count, 3), round(right[1] / count, 3)


@torch.no_grad()
def held_out_loss(model: Any, text: Text, length: int, windows: int) -> dict[str, float]:
    """Nats a token on windows of each kind that do not change."""
    losses = {}
    for kind in text.kinds:
        rng = random.Random(f"held-out/{kind}/{length}")
        ids = torch.tensor([text.window(rng, length + 1, kind) for _ in range(windows)])
        logits = model(ids[:, :-1], use_cache=False).logits
        losses[kind] = round(float(F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())), 4)
    return losses


def check(model: Any, tokenizer: Any, filler: planted.Filler, text: Text, level: int, phase: int) -> dict[str, Any]:
    """Held-out loss, and retrieval at the current and the last level with the full and the emptied cache."""
    model.eval()
    out: dict[str, Any] = {"held_out": held_out_loss(model, text, 256 if phase == 1 else 1024, 8 if phase == 1 else 3)}
    for at in sorted({level, max(0, level - 1)}):
        length = planted.LEVELS[at][0]
        tasks = ("plain",) if length < 80 else ("plain", "records", "niah_multikey_2", "niah_single_2", "repeat")
        for task in tasks:
            out[f"{task}_{length}"] = retrieval(model, tokenizer, filler, task, length, 24, seed=1)
    model.train()
    return out


# -- training ----------------------------------------------------------------------------------------------------------


class Trainer:
    """A run: everything that a checkpoint holds, and one step of it."""

    def __init__(self, args: argparse.Namespace, model: Qwen3_5ForCausalLM, tokenizer: Any, text: Text) -> None:
        self.args, self.model, self.tokenizer, self.text = args, model, tokenizer, text
        self.filler = planted.Filler(text.window, tokenizer)
        self.state: dict[str, Any] = {
            "step": 0, "tokens": 0, "text_tokens": 0, "level": args.level, "accuracy": 0.0, "level_steps": 0,
            "phase": args.phase or 1, "phase_step": 0, "seconds": 0.0, "decay_from": None,
            "hidden_size": model.config.hidden_size, "layers": model.config.num_hidden_layers,
        }  # fmt: skip
        self._optimise()

    def _optimise(self) -> None:
        groups = network.parameter_groups(self.model, self.args.learning_rate, self.args.decay_factor)
        on_gpu = next(self.model.parameters()).is_cuda
        self.optimiser = torch.optim.AdamW(groups, lr=self.args.learning_rate, betas=(0.9, 0.95), fused=not on_gpu)

    def save(self, path: Path) -> None:
        partial = path.with_suffix(".partial")
        saved = {"model": self.model.state_dict(), "optimiser": self.optimiser.state_dict(), "state": self.state}
        torch.save(saved, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Goes on from a checkpoint, whose phase's model this trainer has to have."""
        saved = torch.load(path, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.state = {**self.state, **saved["state"]}
        self.optimiser.load_state_dict(saved["optimiser"])

    def begin_phase(self, phase: int) -> None:
        """A new phase begins with fresh moments, and the second with the slow heads."""
        if self.state["phase"] == 1 and phase > 1:
            size = network.size_options(self.state["hidden_size"], self.state["layers"])
            wide = network.build(self.model.config.vocab_size, phase, self.args.seed, **size)
            network.let_in_slow_heads(self.model, wide)
            self.model = wide.to(self.model.device)
        self.state.update(phase=phase, phase_step=0)
        self._optimise()

    def rate(self) -> float:
        """Share of the learning rate: warm-up, then constant, then to zero once a decay was asked for."""
        share = min(1.0, (self.state["phase_step"] + 1) / self.args.warm_up)
        if self.state["decay_from"] is not None:
            share *= max(0.0, 1 - (self.state["step"] - self.state["decay_from"]) / self.args.decay_steps)
        return share

    def step(self) -> dict[str, Any]:
        """One step; returns losses and answers right by family."""
        state, settings = self.state, PHASES[self.state["phase"]]
        rng = random.Random(f"{self.args.seed}/{state['step']}")
        device = self.model.device
        for group in self.optimiser.param_groups:
            group["lr"] = self.args.learning_rate * self.rate() * group["factor"]
        scale = self.args.batch_factor
        batches, level = planted_batches(
            rng, self.filler, self.tokenizer, state["level"], int(settings["planted"] * scale)
        )
        window = text_batch(rng, self.text, int(settings["text"] * scale), settings["lengths"]).to(device)

        by_mark = torch.tensor(WEIGHTS)
        total = sum(float(by_mark[batch.marks[:, 1:]].sum()) for batch in batches)
        line: dict[str, Any] = {"planted_loss": 0.0, "answer_loss": 0.0, "right": defaultdict(int)}
        answers: dict[str, int] = defaultdict(int)
        for batch in batches:
            ids, marks = batch.ids.to(device), batch.marks.to(device)
            wanted = marks[:, 1:] > 0  # logits of supervised positions only
            targets, mark = ids[:, 1:][wanted], marks[:, 1:][wanted]
            with torch.autocast(device.type, torch.bfloat16, enabled=self.args.bfloat16):
                hidden = self.model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
                logits = self.model.lm_head(hidden[wanted])
            losses = F.cross_entropy(logits.float(), targets, reduction="none")
            loss = (losses * by_mark.to(device)[mark]).sum() / max(total, 32.0)
            (self.args.planted_weight * loss).backward()
            line["planted_loss"] += loss.item()
            line["answer_loss"] += losses[mark == 2].sum().item()
            rows = wanted.nonzero()[:, 0][mark == 2].tolist()
            hits = (logits.argmax(-1) == targets)[mark == 2].tolist()
            for row, hit in zip(rows, hits, strict=True):
                line["right"][batch.families[row]] += hit
                answers[batch.families[row]] += 1
            state["tokens"] += ids.numel()
        line["answer_loss"] /= max(1, sum(answers.values()))
        with torch.autocast(device.type, torch.bfloat16, enabled=self.args.bfloat16):
            text_logits = self.model(input_ids=window[:, :-1], use_cache=False).logits
        text_loss = F.cross_entropy(text_logits.flatten(0, 1).float(), window[:, 1:].flatten())
        text_loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)

        self._advance(line["right"]["records"], answers["records"], level)
        state["tokens"] += window.numel()
        state["text_tokens"] += window.numel()
        return {**line, "answers": answers, "text_loss": text_loss.item(), "norm": norm.item()}

    def _advance(self, right: int, answers: int, level: int) -> None:
        state = self.state
        state["step"] += 1
        state["phase_step"] += 1
        if level == state["level"] and answers:
            state["level_steps"] += 1
            state["accuracy"] += 0.1 * (right / answers - state["accuracy"])
        enough = state["accuracy"] > self.args.advance_at and state["level_steps"] >= 20
        if enough and state["level"] + 1 < min(len(planted.LEVELS), self.args.levels):
            state.update(level=state["level"] + 1, accuracy=0.0, level_steps=0)


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the corpus's tokens")
    parser.add_argument("--out", type=Path, required=True, help="run folder: checkpoint.pt, log.jsonl")
    parser.add_argument("--start-from", type=Path, help="model folder whose weights to begin with")
    parser.add_argument("--phase", type=int, choices=sorted(PHASES), help="phase to begin now (default: go on)")
    parser.add_argument("--level", type=int, default=0, help="level of the curriculum that a new run begins at")
    parser.add_argument("--levels", type=int, default=len(planted.LEVELS), help="number of levels that are used")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden-size", type=int, default=256, help="of a new run")
    parser.add_argument("--layers", type=int, default=16, help="of a new run")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--decay-factor", type=float, default=1.0, help="learning rate of the GDN decays, as a factor")
    parser.add_argument("--warm-up", type=int, default=20, help="steps of warm-up at the begin of a phase")
    parser.add_argument("--decay-steps", type=int, help="end the run: learning rate to zero in so many steps from now")
    parser.add_argument("--planted-weight", type=float, default=1.0, help="weight of the planted documents' loss")
    parser.add_argument("--batch-factor", type=float, default=1.0, help="tokens a step, as a factor")
    parser.add_argument("--advance-at", type=float, default=0.93, help="share of answer tokens right that ends a level")
    parser.add_argument("--steps", type=int, help="steps of this call (default: until it is stopped)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bfloat16", action="store_true", help="autocast, where the processor has it")
    parser.add_argument("--checkpoint-seconds", type=float, default=300.0)
    parser.add_argument("--check-seconds", type=float, default=900.0, help="seconds between checks")
    parser.add_argument("--log-steps", type=int, default=10)
    return parser.parse_args(arguments)


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Means of steps, and answer tokens right by family."""
    out = {
        key: round(sum(line[key] for line in lines) / len(lines), 4)
        for key in ("planted_loss", "answer_loss", "text_loss", "norm", "cpu_seconds")
    }
    right: dict[str, int] = defaultdict(int)
    answers: dict[str, int] = defaultdict(int)
    for line in lines:
        for family, count in line["answers"].items():
            answers[family] += count
            right[family] += line["right"].get(family, 0)
    return {
        **out,
        "by_family": {name: round(right[name] / answers[name], 3) for name in sorted(answers) if answers[name]},
    }


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)  # products of fast decays underflow
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = tokens.load()
    text, held_out = Text(args.data, "training"), Text(args.data, "evaluation")
    checkpoint = args.out / "checkpoint.pt"
    begun_from: dict[str, Any] = {}
    if checkpoint.exists():
        begun_from = torch.load(checkpoint, weights_only=True)["state"]
    elif args.start_from:
        begun_from = json.loads((args.start_from / "state.json").read_text())
    phase = begun_from.get("phase", args.phase or 1)
    size = (begun_from.get("hidden_size", args.hidden_size), begun_from.get("layers", args.layers))
    model = network.build(len(tokenizer), phase, args.seed, **network.size_options(*size))
    if args.start_from and not checkpoint.exists():
        model.load_state_dict(Qwen3_5ForCausalLM.from_pretrained(args.start_from, dtype=torch.float32).state_dict())
    trainer = Trainer(args, model.to(args.device), tokenizer, text)
    trainer.state["phase"] = phase
    if checkpoint.exists():
        trainer.load(checkpoint)
    else:
        trainer.state.update({**begun_from, "phase_step": 0, "decay_from": None})
    state = trainer.state
    if args.phase and args.phase != state["phase"]:
        trainer.begin_phase(args.phase)
        state = trainer.state
    if args.decay_steps and state["decay_from"] is None:
        state["decay_from"] = state["step"]
    checks = planted.Filler(held_out.window, tokenizer)

    begun, before = time.monotonic(), state["seconds"]
    saved_at = checked_at = begun
    first_step = state["step"]
    lines: list[dict[str, Any]] = []
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    with (args.out / "log.jsonl").open("a") as log:

        def write(**entries: Any) -> None:
            shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in state.items() if v is not None}
            log.write(json.dumps({**shown, **entries}) + "\n")
            log.flush()

        write(event="begins", options={k: str(v) for k, v in vars(args).items()})
        while not stopped and (args.steps is None or state["step"] < first_step + args.steps):
            level = state["level"]
            started = time.process_time()
            with network.fast_delta_rule():
                lines.append(trainer.step())
            lines[-1]["cpu_seconds"] = time.process_time() - started
            now = time.monotonic()
            state["seconds"] = before + now - begun
            if len(lines) == args.log_steps or state["level"] != level:
                write(length=planted.LEVELS[level][0], **summary(lines))
                lines = []
            ended = state["decay_from"] is not None and state["step"] >= state["decay_from"] + args.decay_steps
            if now - saved_at > args.checkpoint_seconds or ended:
                trainer.save(checkpoint)
                saved_at = now
            if now - checked_at > args.check_seconds or state["level"] != level or ended:
                write(check=check(trainer.model, tokenizer, checks, held_out, level, state["phase"]))
                checked_at = time.monotonic()
            if ended:
                break
    trainer.save(checkpoint)


if __name__ == "__main__":
    main()
