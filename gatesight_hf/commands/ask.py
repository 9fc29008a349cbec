"""`gatesight ask`: questions to a document, or to a session that was saved of one."""

import argparse
from typing import Any

from .opening import check_output, format_report, open_session


def ask_from_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Open or load a session, ask all questions, and save the session if asked to.

    Returns:
        A JSON object: `answers` (`question` and `answer` each), `report` (`CacheReport`) and `saved` (a path or None).

    Raises:
        FileNotFoundError, ValueError: Arguments that do not fit together, or files that cannot be used.
    """
    if not args.question and args.save is None:
        raise ValueError("Nothing to do: give a --question, or --save to keep the session.")
    if args.save is not None:
        check_output(args, args.save, "--save")
    session = open_session(args)
    if args.save is not None:
        session.save(args.save)
    found = session.ask_many(args.question, max_new_tokens=args.max_new_tokens, batch_size=args.batch_size)
    answers = [{"question": question, "answer": text} for question, text in zip(args.question, found, strict=True)]
    saved = None if args.save is None else str(args.save)
    return {"answers": answers, "report": session.report().to_dict(), "saved": saved}


def format_answers(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [f"{row['question']}\n    {row['answer']}" for row in result["answers"]]
    lines.append(format_report(result["report"]))
    if result["saved"] is not None:
        lines.append(f"Saved in {result['saved']}")
    return "\n".join(lines)
