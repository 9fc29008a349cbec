"""`gatesight ask`: questions to a document, or to a session that was saved of one."""

import argparse
from typing import Any

from ..files.texts import read_documents
from ..models.loading import REFERENCE, load_named
from ..reference import ESTIMATOR_PATH
from ..session import Session

#: Options of a compaction, which a saved session has behind it.
COMPACTION_OPTIONS = ("kept_fraction", "protected_prefix", "allocation", "prefill_chunk_size")


def ask_from_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Open or load a session, ask all questions, and save the session if asked to.

    Returns:
        A JSON object: `answers` (`question` and `answer` each), `report` (`CacheReport`) and `saved` (a path or None).

    Raises:
        FileNotFoundError, ValueError: Arguments that do not fit together, or files that cannot be used.
    """
    given = {name: getattr(args, name) for name in COMPACTION_OPTIONS if getattr(args, name) is not None}
    if args.session is not None and given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"{options}: a saved session is compacted already; prefill its --document anew to change it.")
    if not args.question and args.save is None:
        raise ValueError("Nothing to do: give a --question, or --save to keep the session.")
    if args.document is not None:
        estimator = args.estimator or (ESTIMATOR_PATH if args.model == REFERENCE else None)
        if estimator is None:
            raise ValueError("--estimator is needed for any model but 'reference'.")
        text = read_documents([args.document])
        model, tokenizer = load_named(args.model)
        session = Session.open(model, tokenizer, estimator, text, **given)
    else:
        model, tokenizer = load_named(args.model)
        session = Session.load(args.session, model, tokenizer, args.estimator)
    if args.save is not None:
        session.save(args.save)
    answers = [
        {"question": question, "answer": session.ask(question, max_new_tokens=args.max_new_tokens)}
        for question in args.question
    ]
    saved = None if args.save is None else str(args.save)
    return {"answers": answers, "report": session.report().to_dict(), "saved": saved}


def format_answers(result: dict[str, Any]) -> str:
    """The result for people."""
    report = result["report"]
    lines = [f"{row['question']}\n    {row['answer']}" for row in result["answers"]]
    lines.append(
        f"{report['logical_length']} tokens; KV cache {report['kv_bytes_before']:,} -> {report['kv_bytes']:,} bytes "
        f"(kept {report['achieved_fraction']:.3f}), GDN states {report['gdn_bytes']:,} bytes"
    )
    if result["saved"] is not None:
        lines.append(f"Saved in {result['saved']}")
    return "\n".join(lines)
