"""`gatesight chat`: a conversation in a terminal, typed in by a test."""

import io
import os
import pty
import random
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gatesight_hf import Session
from gatesight_hf.commands.cli import main
from gatesight_hf.reference import documents, load_model, load_tokenizer

DOCUMENT = documents.needles(random.Random(5), 512, count=4, asked=3)
FIRST, SECOND, THIRD = (question.text for question in DOCUMENT.questions)


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "document.txt"
    path.write_text(DOCUMENT.text, encoding="utf-8")
    return path


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    given = iter(lines)

    def read(prompt: str = "") -> str:
        try:
            line = next(given)
        except StopIteration:
            raise EOFError from None
        if line == "^C":
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr("builtins.input", read)


def chat(*arguments: Any) -> int:
    return main(["chat", *map(str, arguments), "--max-new-tokens", "4"])


@pytest.mark.quick
def test_a_conversation_is_kept_and_goes_on(document, tmp_path, monkeypatch, capsys):
    saved = tmp_path / "doc.gatesight"
    typed(monkeypatch, FIRST, "", "^C", "/history", "/report", "/help", "/nope", "/save", SECOND)
    assert chat("--document", document, "--session", saved, "--kept-fraction", 0.2) == 0
    out = capsys.readouterr().out
    first, second, third = (question.expected for question in DOCUMENT.questions)
    assert f"{first}\n" in out and f"> {FIRST}\n  {first}\n" in out and f"\n{second}\n" in out
    assert out.count("512 tokens; KV cache 524,288 -> ") == 2 and "There is no /nope" in out
    assert f"Saved in {saved}" in out and "/exit ends the conversation" in out
    assert out.rstrip().endswith(f"What came since was not saved in {saved}; /save would have.")

    loaded = Session.load(saved, load_model(), load_tokenizer())
    assert [message["content"] for message in loaded.history] == [FIRST, first]
    document.unlink()
    typed(monkeypatch, THIRD, "/forget", "/history", f"/save {tmp_path / 'other'}", "/exit", "never read")
    assert chat("--session", saved) == 0
    out = capsys.readouterr().out
    assert "The conversation goes on" in out and f"\n{third}\n" in out and "not saved" not in out
    assert Session.load(tmp_path / "other", load_model(), load_tokenizer()).history == []


@pytest.mark.quick
def test_what_fails_ends_a_turn_and_not_the_conversation(document, tmp_path, monkeypatch, capsys):
    typed(monkeypatch, "/save", f"/save {tmp_path}/no/such", FIRST, "/history")
    monkeypatch.setattr(Session, "stream", lambda *_, **__: iter([1 / 0]) if False else _failing())
    assert chat("--document", document) == 0
    out, err = capsys.readouterr()
    assert "Where to? /save FILE" in out and "there is no folder" in err and "gatesight: no room" in err
    assert FIRST not in out


@pytest.mark.quick
@pytest.mark.parametrize("strict", [False, True])
def test_bytes_that_are_no_characters_are_read_as_such(document, tmp_path, monkeypatch, capsys, strict):
    given = io.TextIOWrapper(
        io.BytesIO(b"hi \xff there\n/history\n"), "utf-8", "strict" if strict else "surrogateescape"
    )
    monkeypatch.setattr("sys.stdin", given)
    assert chat("--document", document, "--session", tmp_path / "doc.gatesight") == 0
    assert "hi \ufffd there" in capsys.readouterr().out


@pytest.mark.quick
def test_no_command_writes_over_its_document(document, tmp_path, monkeypatch, capsys):
    link = tmp_path / "link.txt"
    link.symlink_to(document)
    typed(monkeypatch, f"/save {link}", "/exit now", "/exit")
    assert chat("--document", document) == 0
    out, err = capsys.readouterr()
    assert "that is the document itself" in err and "There is no /exit now" in out
    for verb, option in (("ask", "--save"), ("view", "--out")):
        assert main([verb, "--document", str(document), option, str(link)]) == 1
        assert f"{option} {link}: that is the document itself" in capsys.readouterr().err
    assert document.read_text(encoding="utf-8") == DOCUMENT.text


def _failing() -> Iterator[str]:
    yield "7"
    raise RuntimeError("no room")


MISTAKES = {
    "": "Give --document",
    "--session {folder}/nowhere": "Give --document",
    "--document {document} --session {document}": "is there already",
    "--document {document} --template-options x": "--template-options x: not JSON",
    "--document {document} --template-options [1]": "a JSON object is needed",
    "--document {document} --raw --system x": "raw text has no chat template",
    "--session {document} --system x --raw": "--system, --raw: a saved session",
}


@pytest.mark.quick
@pytest.mark.parametrize("arguments", MISTAKES)
def test_mistakes_are_one_line(document, tmp_path, capsys, arguments):
    given = [part.format(folder=tmp_path, document=document) for part in arguments.split()]
    assert chat(*given) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("gatesight: ")]
    assert MISTAKES[arguments] in line


#: The command, on a bundled model that never ends an answer by itself, and takes its time.
TALKATIVE = """
import time
from gatesight_hf import reference
load = reference.load_model
def load_model(**options):
    model = load(**options)
    model.generation_config.eos_token_id = None
    model.lm_head.register_forward_hook(lambda *_: time.sleep(0.02))
    return model
reference.load_model = load_model
from gatesight_hf.commands.cli import main
raise SystemExit(main())
"""


class Terminal:
    """A pseudo-terminal in which the command runs."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.main, self.other = pty.openpty()
        command = [sys.executable, "-c", TALKATIVE]
        self.process = subprocess.Popen(
            [*command, *map(str, arguments)], stdin=self.other, stdout=self.other, stderr=self.other,
            start_new_session=True, preexec_fn=_own_terminal, **options,
        )  # fmt: skip
        self.seen = ""

    def wait_for(self, pattern: str, seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not re.search(pattern, self.seen):
            assert time.monotonic() < end, repr(self.seen)
            if select.select([self.main], [], [], 0.2)[0]:
                self.seen += os.read(self.main, 4096).decode(errors="replace")

    def type(self, text: str) -> None:
        self.seen = ""
        os.write(self.main, text.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.main)
        os.close(self.other)


def _own_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_ctrl_c_ends_an_answer_and_not_the_session(document):
    terminal = Terminal("chat", "--document", document, "--max-new-tokens", 3000)
    try:
        terminal.wait_for(r"Ask, or /help\.\s+> ")
        terminal.type("the sky is\n")
        terminal.wait_for(r"is\r\n(\S+ ){8}")
        terminal.type("\x03")
        terminal.wait_for(r"(?s)Stopped\. .*> $")
        terminal.type("/history\n")
        terminal.wait_for(r"(?s)history\r\n.*> $")
        assert "sky" not in terminal.seen
        time.sleep(1.0)  # Python sees no signal that comes just before its wait for a key begins
        terminal.type("\x03")
        terminal.wait_for(r"ends the conversation")
        terminal.type("/exit\n")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.close()
