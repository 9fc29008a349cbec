"""The session that a command is about: of documents, or of a file that holds one."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ..files.tensor_files import check_target
from ..files.texts import read_documents
from ..models.loading import REFERENCE, load_named
from ..reference import ESTIMATOR_PATH
from ..session import Session

#: Options of opening a document, which a saved session has behind it.
OPENING_OPTIONS = (
    "kept_fraction", "protected_prefix", "allocation", "prefill_chunk_size", "system", "raw", "template_options",
)  # fmt: skip


def open_session(args: argparse.Namespace) -> Session:
    """A session as `--session`, or `--document` and its options, say.

    Raises:
        FileNotFoundError, ValueError: Arguments that do not fit together, or files that cannot be used.
    """
    given = {name: getattr(args, name) for name in OPENING_OPTIONS if getattr(args, name) not in (None, False)}
    if args.document is None:
        if given:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ValueError(
                f"{options}: a saved session is compacted already; prefill its --document anew to change it."
            )
        model, tokenizer = load_named(args.model)
        return Session.load(args.session, model, tokenizer, args.estimator)
    estimator = estimator_of(args)
    if estimator is None:
        raise ValueError("--estimator is needed for any model but 'reference'.")
    if "template_options" in given:
        given["template_options"] = _object(given["template_options"])
    if given.pop("raw", False):
        given["chat"] = False
    text = read_documents(args.document)
    if sys.stderr.isatty():  # a sign of life: a prefill on a CPU takes its time
        print(f"Reading {len(text):,} characters …", file=sys.stderr)
    model, tokenizer = load_named(args.model)
    return Session.open(model, tokenizer, estimator, text, **given)


def check_output(args: argparse.Namespace, path: Path, name: str) -> None:
    """Raises OSError unless a file can be written to `path`, and ValueError if that would take the place of an input.

    Args:
        args: With `document` and `session`.
        path: Where to.
        name: For messages, such as `--save`.
    """
    check_target(path, name)
    for given in [*(args.document or []), *([args.session] if name == "--out" and args.session else [])]:
        if path.exists() and given.expanduser().exists() and path.samefile(given.expanduser()):
            raise ValueError(f"{name} {path}: that is the document itself; name another file.")


def estimator_of(args: argparse.Namespace) -> str | Path | None:
    """What `--estimator` names, or for the reference model the bundled one."""
    return args.estimator or (ESTIMATOR_PATH if args.model == REFERENCE else None)


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--template-options {text}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f'--template-options {text}: a JSON object is needed, such as {{"enable_thinking": false}}.')
    return found


def add_source(verb: argparse.ArgumentParser, one_of_them: bool) -> None:
    """Options that say what a command is about; with `one_of_them` either documents or a file."""
    verb.add_argument("--model", default="reference", help="'reference' (bundled), or a folder or Hub id")
    verb.add_argument("--estimator", help="folder or Hub repo (default for the reference model: its own)")
    source: Any = verb.add_mutually_exclusive_group(required=True) if one_of_them else verb
    source.add_argument(
        "--document",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="text, Markdown, HTML or PDF to prefill, several as one; - is standard input",
    )
    source.add_argument(
        "--session",
        type=Path,
        metavar="FILE",
        help="file of a saved session: nothing is prefilled" + ("" if one_of_them else " if it is there"),
    )
    verb.add_argument("--system", help="text of a system message, which always stays; needs a chat template")
    verb.add_argument("--raw", action="store_true", help="leave the tokenizer's chat template out")
    verb.add_argument("--template-options", metavar="JSON", help='of the template: {"enable_thinking": false}')
    verb.add_argument("--kept-fraction", type=float, help="share of KV entries that stays, in (0, 1] (default: 0.1)")
    verb.add_argument("--protected-prefix", type=int, help="first tokens of the text that always stay (default: 0)")
    verb.add_argument("--allocation", help="how layers share the budget (default: gate)")
    verb.add_argument("--prefill-chunk-size", type=int, help="tokens per forward (default: all)")


def format_report(report: dict[str, Any]) -> str:
    """Sizes of a session, for people."""
    return (
        f"{report['logical_length']} tokens; KV cache {report['kv_bytes_before']:,} -> {report['kv_bytes']:,} bytes "
        f"(kept {report['achieved_fraction']:.3f}), GDN states {report['gdn_bytes']:,} bytes"
    )
