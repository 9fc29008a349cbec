"""The main job on the bundled model: prefill once, keep a tenth of the cache, ask many questions."""

import random
import textwrap
import time
from typing import Any

from tqdm import tqdm

from ..methods import RandomScorer
from ..reference import ESTIMATOR_PATH, documents, load_model, load_tokenizer
from ..session import Session

#: The longest context at which the reference model passes its gate (see its card).
LONGEST_GATED_LENGTH = 2048
NEEDLE_TOKENS = len(documents.needle("key", "1234"))
METHODS = ("full", "gatesight", "random")
#: Columns of what is printed.
WIDTH = 100
NEXT = (
    "Next: an estimator for your own model, which then reads your own documents.",
    "  gatesight train --model MODEL --documents texts/ --out my-estimator",
    '  gatesight ask --model MODEL --estimator my-estimator --document doc.txt --question "…"',
    "In Python: README.md and examples/1_quick_start.ipynb.",
)


def run_demo(
    kept_fraction: float = 0.1, length: int = LONGEST_GATED_LENGTH, needles: int = 8, seed: int = 0
) -> dict[str, Any]:
    """Ask for each of `needles` numbers in a document of `length` tokens: full cache, GateSight, random eviction.

    Returns:
        A JSON object: `accuracy` by method, `kept_fraction`, `achieved_fraction`, `kv_bytes_before`, `kv_bytes_after`,
        `gdn_bytes`, `seconds` (`prefill`, `score`, `compact`, `share_of_prefill`), `kept_per_layer` and `questions`
        with answers.
    """
    if needles < 1 or length < NEEDLE_TOKENS * needles + 64:
        raise ValueError(
            f"{needles} needles in {length} tokens: at least 1, and {NEEDLE_TOKENS} tokens for each and 64 more."
        )
    model, tokenizer = load_model(), load_tokenizer()
    document = documents.needles(random.Random(seed), length, needles, asked=needles)
    # The first call of a process pays for the warm-up of its libraries; timing should not.
    Session.open(model, tokenizer, ESTIMATOR_PATH, document.text[:200])

    begun = time.perf_counter()
    sessions = {
        "full": Session.open(model, tokenizer, ESTIMATOR_PATH, document.text, kept_fraction=1.0),
        "gatesight": Session.open(model, tokenizer, ESTIMATOR_PATH, document.text, kept_fraction=kept_fraction),
        "random": Session.open(model, tokenizer, RandomScorer(seed), document.text, kept_fraction=kept_fraction),
    }
    rows: list[dict[str, str]] = []
    for question in tqdm(document.questions, desc="questions", unit="question", leave=False, disable=None):
        row = {"question": question.text, "expected": question.expected}
        for name, session in sessions.items():
            row[name] = session.ask(question.text, max_new_tokens=len(question.answer) + 1)
        rows.append(row)
    report = sessions["gatesight"].report()
    spent = report.seconds["score"] + report.seconds["compact"]
    return {
        "accuracy": {name: sum(row[name] == row["expected"] for row in rows) / len(rows) for name in sessions},
        "kept_fraction": kept_fraction,
        "achieved_fraction": report.achieved_fraction,
        "tokens": report.logical_length,
        "kept_per_layer": report.kept_per_layer[0],
        "kv_bytes_before": report.kv_bytes_before,
        "kv_bytes_after": report.kv_bytes,
        "gdn_bytes": report.gdn_bytes,
        "seconds": {
            **{name: report.seconds[name] for name in ("prefill", "score", "compact")},
            "share_of_prefill": spent / report.seconds["prefill"],
            "total": time.perf_counter() - begun,
        },
        "excerpt": " ".join(document.words[max(0, document.planted[0] - 20) : document.planted[13] + 12]),
        "questions": rows,
    }


def format_demo(result: dict[str, Any]) -> str:
    """The result for people: a table and what to do next, in lines of at most `WIDTH` columns."""
    questions, accuracy, seconds = result["questions"], result["accuracy"], result["seconds"]
    head = f"Document of {result['tokens']} tokens with {len(questions)} numbers hidden in it, for example: … "
    asked = "the special magic number for …"
    lines = [
        *textwrap.wrap(f"{head}{result['excerpt']} …", WIDTH),
        f"Asked, one by one: {questions[0]['question']}",
        "",
        _row(asked, "expected", "  full cache", "  GateSight", "  random eviction"),
    ]
    for row in questions:
        key = row["question"].partition(" for ")[2].partition(" ?")[0]
        marks = (f"{'+' if row[name] == row['expected'] else '-'} {_cut(row[name])}" for name in METHODS)
        lines.append(_row(key, row["expected"], *marks))
    lines += [
        _row("answered correctly", "", *(f"  {accuracy[name]:.0%}" for name in METHODS)),
        "",
        f"KV cache     {result['kv_bytes_before']:,} -> {result['kv_bytes_after']:,} bytes "
        f"(kept {result['achieved_fraction']:.3f})",
        f"             entries per head in each layer: {', '.join(map(str, result['kept_per_layer']))}",
        f"GDN states   {result['gdn_bytes']:,} bytes, whatever the length",
        f"Prefill      {seconds['prefill']:.3f} s; scoring {seconds['score']:.4f} s and compaction "
        f"{seconds['compact']:.4f} s, {seconds['share_of_prefill']:.1%} of prefill",
        "",
        *NEXT,
    ]
    return "\n".join(lines)


def _row(asked: str, expected: str, *answers: str) -> str:
    return f"{asked:32} {expected:9} {' '.join(f'{answer:18}' for answer in answers)}".rstrip()


def _cut(answer: str, width: int = 16) -> str:
    return answer if len(answer) <= width else f"{answer[: width - 2]} …"
