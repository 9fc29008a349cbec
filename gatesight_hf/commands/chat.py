"""`gatesight chat`: a conversation about a document, in the terminal."""

import argparse
import contextlib
import io
import re
import sys
from pathlib import Path

from ..session import Session
from .opening import check_output, format_report, open_session

HELP = """\
/report        lengths and bytes of the document's cache
/history       the conversation so far
/save [FILE]   keep document and conversation; later: gatesight chat --session FILE
/forget        begin a new conversation about the document
/exit          end, as Ctrl-D does; Ctrl-C ends an answer"""
_COMMAND = re.compile(r"/(?P<name>[a-z]+)(?:\s+(?P<rest>.*))?\s*")


def chat_from_arguments(args: argparse.Namespace) -> None:
    """Open or load a session and talk until the user ends it.

    Raises:
        FileNotFoundError, ValueError: Arguments that do not fit together, or files that cannot be used.
    """
    saved = args.session is not None and args.session.exists()
    if args.document is None and not saved:
        raise ValueError("Give --document, or the --session of one that was saved.")
    if saved and args.document is not None:
        raise ValueError(
            f"{args.session} is there already: leave --document out to go on with it, or name another file."
        )
    session = open_session(args)
    if args.document is not None and any(str(path) == "-" for path in args.document):
        _listen_to_terminal()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a byte that is no character ends no conversation
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() its line editing
    options = {"max_new_tokens": args.max_new_tokens, **({"do_sample": True} if args.sample else {})}
    print(format_report(session.report().to_dict()))
    if session.history:
        print("The conversation goes on; /history shows it.")
    print("Ask, or /help.")
    _Talk(session, args, options).go()


def _listen_to_terminal() -> None:
    """Standard input was the document; questions come from the terminal."""
    try:
        sys.stdin = open("/dev/tty", encoding="utf-8")  # noqa: SIM115 - to the end of the process
    except OSError as error:
        raise ValueError("The document was read from standard input, and there is no terminal to ask from.") from error


class _Talk:
    """Reads lines and prints answers.

    Args:
        session: What it is about.
        args: Of the command; `/save` without a file keeps it in its `session`.
        options: Of `Session.stream`.
    """

    def __init__(self, session: Session, args: argparse.Namespace, options: dict[str, object]) -> None:
        self.session = session
        self.args = args
        self.path: Path | None = args.session
        self.options = options
        self.saved = True

    def go(self) -> None:
        """Until `/exit` or the end of the input."""
        while True:
            try:
                line = input("> ").strip()
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /exit ends the conversation.)")
                continue
            except EOFError:
                print()
                break
            command = _COMMAND.fullmatch(line)
            if command and command["name"] in ("exit", "quit") and not command["rest"]:
                break
            if command:
                self._obey(command["name"], command["rest"])
            elif line:
                self._answer(line)
        if not self.saved and self.path is not None:
            print(f"What came since was not saved in {self.path}; /save would have.")

    def _answer(self, question: str) -> None:
        try:
            with contextlib.closing(self.session.stream(question, chat=True, **self.options)) as pieces:  # type: ignore[arg-type, type-var]
                for piece in pieces:
                    print(piece, end="", flush=True)
            print()
            self.saved = False
        except KeyboardInterrupt:
            print("\n(Stopped. This question and its answer are not part of the conversation.)")
        except (ValueError, RuntimeError) as error:  # of this question; the session is as it was
            print(f"\ngatesight: {error}", file=sys.stderr)

    def _obey(self, name: str, rest: str | None) -> None:
        if name == "report":
            print(format_report(self.session.report().to_dict()))
        elif name == "history":
            if not self.session.history:
                print("Nothing yet.")
            for message in self.session.history:
                print(f"{'>' if message['role'] == 'user' else ' '} {message['content']}")
        elif name == "forget":
            self.session.reset_chat()
            print("A new conversation about the same document.")
        elif name == "save":
            self._save(Path(rest).expanduser() if rest else self.path)
        else:
            said = f"/{name} {rest}" if rest else f"/{name}"
            print(HELP if name == "help" else f"There is no {said}.\n{HELP}")

    def _save(self, path: Path | None) -> None:
        if path is None:
            print("Where to? /save FILE")
            return
        try:
            check_output(self.args, path, "/save")
            self.session.save(path)
        except (OSError, ValueError, RuntimeError) as error:
            print(f"gatesight: {error}", file=sys.stderr)
        else:
            self.path, self.saved = path, True
            print(f"Saved in {path}")
