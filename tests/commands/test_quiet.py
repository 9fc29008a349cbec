"""Commands show what they were asked for: no bars in a pipe, no talk of other libraries, JSON alone with `--json`."""

import io
import json
import logging
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
from huggingface_hub.utils import are_progress_bars_disabled
from transformers.utils import logging as transformers_logging

from gatesight_hf.commands import cli
from gatesight_hf.commands.quiet import FALLBACK, quiet
from gatesight_hf.reference import ESTIMATOR_PATH, documents

PROGRAM = "import sys; from gatesight_hf.commands.cli import main; sys.exit(main(sys.argv[1:]))"
DEMO = ("demo", "--length", "256", "--needles", "2")
FELL_BACK = f"`a` is {FALLBACK} because `b` is not installed."


def piped(*arguments: Any, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_VERBOSITY"}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


# -- whole commands ----------------------------------------------------------------------------------------------------


def test_the_demo_is_a_table_and_what_to_do_next() -> None:
    done = piped(*DEMO)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 100 and "\r" not in done.stdout
    assert "answered correctly" in done.stdout
    assert any(line.lstrip().startswith("gatesight ask ") for line in lines[-5:]) and "README.md" in lines[-1]


@pytest.mark.parametrize("verb", ["ask", "train", "inspect", "push"])
def test_json_is_all_that_is_printed(verb: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    document = documents.needles(random.Random(0), 128, count=1, asked=1)
    (tmp_path / "document.txt").write_text(document.text, encoding="utf-8")
    training = "--train-documents 2 --eval-documents 1 --length 64 --continuations 1 --continuation-tokens 2 --epochs 1"
    arguments = {
        "ask": ("--document", tmp_path / "document.txt", "--question", document.questions[0].text),
        "train": ("--model", "reference", *training.split(), "--out", tmp_path / "estimator"),
        "inspect": (ESTIMATOR_PATH,),
        "push": (ESTIMATOR_PATH, "owner/name", "--dry-run"),
    }[verb]
    assert cli.main([verb, *map(str, arguments), "--json"]) == 0
    out, err = capfd.readouterr()
    assert isinstance(json.loads(out), dict) and not err


def test_transformers_says_what_it_is_asked_to_beside_the_json() -> None:
    """A new wording of its message is noticed here."""
    done = piped(*DEMO, "--json", TRANSFORMERS_VERBOSITY="warning")
    assert FALLBACK in done.stderr and "\r" not in done.stderr
    assert json.loads(done.stdout)


# -- what is left alone ------------------------------------------------------------------------------------------------


def shown(monkeypatch: pytest.MonkeyPatch, message: str) -> bool:
    """Whether a warning of transformers comes out."""
    handler, stream = transformers_logging._default_handler, io.StringIO()
    assert isinstance(handler, logging.StreamHandler)
    monkeypatch.setattr(handler, "stream", stream)
    monkeypatch.setattr(handler, "flush", stream.flush)
    logging.getLogger("transformers.some.module").warning(message)
    return message in stream.getvalue()


@pytest.mark.parametrize(("on_cpu", "gpu", "hidden"), [(0, 0, True), (1, 0, True), (1, 1, True), (0, 1, False)])
def test_only_what_a_cpu_cannot_use_is_hidden(
    monkeypatch: pytest.MonkeyPatch, on_cpu: bool, gpu: bool, hidden: bool
) -> None:
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    with quiet(on_cpu=bool(on_cpu)):
        assert shown(monkeypatch, FELL_BACK) is not hidden
        assert shown(monkeypatch, "Some weights were newly initialized.")
    assert shown(monkeypatch, FELL_BACK)


@pytest.mark.parametrize("fails", [False, True])
def test_afterwards_all_is_as_before(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    def state() -> tuple[Any, ...]:
        handler = transformers_logging._default_handler
        assert handler is not None
        return (
            transformers_logging._tqdm_hook,
            list(handler.filters),
            logging.getLogger("transformers").level,
            are_progress_bars_disabled(),
            datasets.is_progress_bar_enabled(),
        )

    def run(args: Any) -> None:
        assert state() != before and are_progress_bars_disabled() and not datasets.is_progress_bar_enabled()
        if fails:
            raise ValueError("it")

    monkeypatch.setattr(cli, "_train", run)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    before = state()
    assert cli.main(["train", "--model", "m", "--dataset", "d", "--out", "o"]) == int(fails)
    assert state() == before


def test_a_terminal_has_bars_that_last(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with quiet(data_sets=True):
        assert not are_progress_bars_disabled() and datasets.is_progress_bar_enabled()
        assert list(transformers_logging.tqdm(range(3), desc="Loading weights")) == [0, 1, 2]
        assert not terminal.getvalue()  # over before it is worth a bar
        assert list(transformers_logging.tqdm(range(3), desc="Loading weights", delay=0)) == [0, 1, 2]
        assert "Loading weights" in terminal.getvalue()


def test_bars_of_ours_are_for_terminals() -> None:
    """Every bar of the packages asks the terminal: `disable=None`, alone or after a reason of its own."""
    root = Path(cli.__file__).parents[2]
    for folder in (root / "gatesight_hf", root / "eval" / "gatesight_eval"):
        for path in folder.rglob("*.py"):
            for call in path.read_text(encoding="utf-8").split("tqdm(")[1:]:
                assert "disable=None" in call[:200] or "or None" in call[:200], path
