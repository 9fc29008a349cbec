"""What the README says can be done is done here: its snippets run, its files and targets exist."""

import re
from pathlib import Path
from typing import Any

import pytest

from gatesight_hf.families import ADAPTERS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_snippets_run_one_after_the_other(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # one saves a file
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 6
    for block in blocks:
        exec(block, names)
    assert names["tokenizer"].decode(names["output"][0, -4:]) == "4 8 2 1"
    printed = capsys.readouterr().out.splitlines()
    questions = [f"{q.text} {q.expected}" for q in names["document"].questions]
    assert printed[: len(questions)] == questions
    compared = [line.split()[:2] for line in printed[len(questions) :]]
    assert compared == [[name, p] for name in ("snapkv", "keydiff") for p in ("0.5", "0.1")]
    assert names["report"].achieved_fraction == pytest.approx(0.1, abs=0.01)


def test_files_and_targets_exist() -> None:
    tree = re.search(r"```\n(gatesight_hf/.*?)```", README, re.DOTALL)
    assert tree is not None
    for line in tree[1].splitlines():
        folder = ROOT / "gatesight_hf" if line.startswith("  ") else ROOT
        for name in re.findall(r"[\w/]+(?:\.py|/)", line.split("   ")[0]):
            assert (folder / name).exists(), name
    listed = {path.name for path in (ROOT / "gatesight_hf").glob("*.py")} - {"__init__.py"}
    assert all(name in tree[1] for name in listed)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z]+(?:-[a-z]+)?)", README, re.MULTILINE)) <= targets
    for link in re.findall(r"\]\(([\w/.-]+)\)", README):
        assert (ROOT / link).exists(), link


def test_every_family_has_its_row() -> None:
    for adapter in ADAPTERS:
        for model_type in adapter.model_types:
            assert f"`{model_type}`" in README


def test_measured_figures_are_those_of_the_committed_results() -> None:
    section = README.split("## Measured")[1].split("\n## ")[0]
    sources = [*(ROOT / "eval" / "results").glob("*.md"), *(ROOT / "gatesight_hf" / "reference").glob("*/README.md")]
    known = {line for source in sources for line in source.read_text(encoding="utf-8").splitlines()}
    tables = [line for line in section.splitlines() if line.startswith("|")]
    assert len(tables) > 10 and set(tables) <= known
