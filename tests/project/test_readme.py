"""What README and the other pages say can be done is done here: snippets run, commands parse, files exist."""

import argparse
import ast
import inspect
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomllib

from gatesight_hf import GateSightCache, methods
from gatesight_hf.commands.cli import parser
from gatesight_hf.models.families import ADAPTERS

from ..helpers.paths import ROOT

RESULTS = ROOT / "eval" / "results"
README = (ROOT / "README.md").read_text(encoding="utf-8")
#: Pages with commands and links. Cards of Hub repos are rendered, and have tests of their own.
PAGES = sorted(
    path
    for pattern in (
        "*.md",
        "eval/README.md",
        "eval/*/README.md",
        "examples/*.md",
        "gatesight_hf/README.md",
        "gatesight_hf/*/README.md",
        "hub_cards/README.md",
        "kernels/README.md",
    )
    for path in ROOT.glob(pattern)
)
page = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def of_room(name: str) -> str:
    return (ROOT / "gatesight_hf" / name / "README.md").read_text(encoding="utf-8")


def table(text: str, title: str) -> list[list[str]]:
    """Rows of a page's table that has `title` in the head of its first column, without the head."""
    rows = text.split(f"| {title} |", 1)[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]


# -- Python ------------------------------------------------------------------------------------------------------------


def run_blocks(text: str) -> dict[str, Any]:
    """What a page's blocks of Python leave, run one after the other as a reader does."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, names)
    return names


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    monkeypatch.chdir(tmp_path)  # some save files
    return lambda: capsys.readouterr().out


def test_the_three_snippets_run_one_after_the_other(printed: Callable[[], str]) -> None:
    assert README.count("```python") == 3
    names = run_blocks(README)
    assert names["tokenizer"].decode(names["output"][0, -4:]) == "4 8 2 1"
    assert printed().splitlines() == [f"{q.text} {q.expected}" for q in names["document"].questions]
    assert names["report"].achieved_fraction == pytest.approx(0.1, abs=0.01)


def test_snippets_on_caches_run(printed: Callable[[], str]) -> None:
    names = run_blocks(of_room("cache"))
    expected = [question.expected for question in names["document"].questions]
    assert names["answers"] == expected  # of a batch
    assert names["tokenizer"].decode(names["output"][0, -4:]) == expected[-1]  # of the frozen cache


def test_snippets_on_sessions_run(printed: Callable[[], str], tmp_path: Path) -> None:
    names = run_blocks(of_room("session"))
    texts, expected = names["questions"], [question.expected for question in names["document"].questions]
    one, many, streamed_and_history = printed().split("\n", 2)
    assert [one, many] == [expected[0], str(expected)]
    assert streamed_and_history.startswith(expected[0]) and texts[1] in streamed_and_history
    before, after = ([names[name].ask(text, max_new_tokens=4) for text in texts] for name in ("session", "loaded"))
    assert before == after == expected
    grown = names["growing"].report()
    assert grown.logical_length == 1280 > sum(grown.physical_lengths)  # what was added is compacted too
    assert (tmp_path / "kept.html").stat().st_size > 10_000


def test_snippets_on_methods_run(printed: Callable[[], str]) -> None:
    names = run_blocks(of_room("methods"))
    assert [line.split()[0] for line in printed().splitlines()] == ["snapkv", "keydiff"]
    assert 0 < sum(map(sum, names["kept"])) <= 0.11 * 512 * names["child"].spec.num_attention_layers


def test_all_blocks_of_python_are_run_or_need_vllm() -> None:
    run = {
        ROOT / "README.md",
        *(ROOT / "gatesight_hf" / room / "README.md" for room in ("cache", "methods", "session")),
    }
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        assert path in run or "```python" not in text, path
        for block in re.findall(r"```py\n(.*?)```", text, re.DOTALL):
            ast.parse(block)
            assert path.parent.name in ("vllm", "examples")  # test_quick_start.py runs those of the latter


def test_options_are_those_of_the_cache_with_their_defaults() -> None:
    options = list(inspect.signature(GateSightCache).parameters.values())[2:]
    assert [row[:2] for row in table(of_room("cache"), "option")] == [
        [option.name, str(option.default)] for option in options
    ]


def test_methods_are_those_of_the_evaluator() -> None:
    from gatesight_eval.backends.methods import ScorerFactory

    rows = {name: scorer for name, scorer, *_ in table(of_room("methods"), "`--method`")}
    assert set(rows) == set(ScorerFactory(None, None, {}).names)
    assert set(rows.values()) <= set(methods.__all__)


def test_every_family_has_its_row() -> None:
    known = {name for adapter in ADAPTERS for name in adapter.model_types + adapter.multimodal_types}
    assert {name.strip(" `") for row in table(README, "family") for name in row[1].split(",")} == known


# -- commands ----------------------------------------------------------------------------------------------------------


def shell_lines(text: str) -> list[str]:
    """Lines of a page's shell code, fenced or indented, as a shell joins them; variables that it sets are put in."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    fenced = [block for language, block in fences if language == "bash"]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    indented = [re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in re.findall(r"(?:^    .*\n)+", prose, re.M)]
    lines = []
    for block in (*fenced, *indented):
        joined = block.replace("\\\n", "")
        for name, value in re.findall(r'^(\w+)="(.*)"$', joined, re.MULTILINE) + re.findall(
            r"\bfor (\w+) in (\S+)", joined
        ):
            joined = joined.replace(f"${name}", value)
        lines += joined.splitlines()
    return lines


def gatesight_commands(text: str) -> list[list[str]]:
    """Arguments of every `gatesight` command in a page's shell code."""
    parts = [part for line in shell_lines(text) for part in re.split(r"; (?:do )?| && ", line)]
    found = [re.match(r"(?:\w+=\S+ +)*gatesight (.*)", part.strip()) for part in parts]
    return [shlex.split(match[1], comments=True) for match in found if match]


COMMANDS = {
    f"{path.parent.name}: {' '.join(words)[:60]}": words
    for path in PAGES
    for words in gatesight_commands(path.read_text(encoding="utf-8"))
}


def test_commands_are_read_as_a_shell_reads_them() -> None:
    fenced = "```python\na\n```\n\n```bash\nA=1 gatesight a \\\n  --x 1  # no\n```\n\n"
    text = fenced + '    n="-k 2"\n    gatesight b $n; gatesight c d,\\\n    e\n'
    assert gatesight_commands(text) == [["a", "--x", "1"], ["b", "-k", "2"], ["c", "d,e"]]


def verbs() -> dict[str, argparse.ArgumentParser]:
    return next(dict(action.choices or {}) for action in parser()._actions if action.metavar == "VERB")


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_commands_parse(words: list[str]) -> None:
    own = words[: words.index("--")] if "--" in words else words
    args = parser().parse_args(own)
    assert own == words or args.takes_more
    # argparse also takes what an option begins with.
    assert {word for word in own if word.startswith("--")} <= set(verbs()[own[0]]._option_string_actions)
    if words[0] == "evaluate":
        from gatesight_eval.backends.methods import Method
        from gatesight_eval.cli import _fractions

        assert _fractions(args.kept)
        assert all(Method.parse(label) for label in (args.method or "full").split(","))


def test_every_verb_has_its_line() -> None:
    assert {words[0] for words in gatesight_commands(of_room("commands"))} == set(verbs())
    for path in PAGES:
        assert set(re.findall(r"`gatesight (\w+)", path.read_text(encoding="utf-8"))) <= set(verbs())


def test_what_has_no_json_is_said() -> None:
    without = {name for name, verb in verbs().items() if "--json" not in verb._option_string_actions}
    (said,) = re.findall(r"all but (\w+), (\w+) and (\w+) have --json", of_room("commands"))
    assert set(said) == without


@page
def test_targets_extras_and_paths_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^|    )make ([a-z]+(?:-[a-z]+)?)", text, re.MULTILINE)) <= targets
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {extra for group in re.findall(r'"\.\[([\w,]+)\]"', text) for extra in group.split(",")} <= set(extras)
    for path in re.findall(r"\b(?:tests|examples|eval|gatesight_hf|kernels)/[\w/.-]+\.(?:py|md|json)\b", text):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"python -m\s(gatesight_eval[\w.]*)", text):
        assert (ROOT / "eval" / f"{module.replace('.', '/')}.py").exists(), module
    for link in re.findall(r"\]\(([\w/.-]+)\)", text):
        assert (page.parent / link).exists(), link


def test_every_room_has_its_row() -> None:
    for folder in (ROOT / "gatesight_hf", ROOT / "eval" / "gatesight_eval"):
        prefix = "" if folder.parent == ROOT else f"{folder.name}/"
        page = (folder if not prefix else folder.parent) / "README.md"
        rows = table(page.read_text(encoding="utf-8"), "room")
        names = [name for row in rows for name in re.findall(r"[\w/.]+", row[0])]
        named = [name.removeprefix(prefix).rstrip("/") for name in names]
        rooms = {
            path.name
            for path in folder.iterdir()
            if (path.suffix == ".py" and path.name != "__init__.py") or (path / "__init__.py").exists()
        }
        assert sorted(named) == sorted(rooms)


def test_files_of_the_house_exist() -> None:
    for name in re.findall(r"`([\w/]+\.py)`", of_room("")):
        assert (ROOT / "gatesight_hf" / name).exists(), name


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 200


# -- figures -----------------------------------------------------------------------------------------------------------


def lines_of(*paths: Path) -> set[str]:
    return {line for path in paths for line in path.read_text(encoding="utf-8").splitlines()}


def test_measured_figures_are_those_of_the_committed_results() -> None:
    section = README.split("## Measured")[1].split("\n## ")[0]
    tables = [line for line in section.splitlines() if line.startswith("|")]
    assert len(tables) > 8 and set(tables) <= lines_of(RESULTS / "toy_ablations.md")
    means = (RESULTS / "toy.md").read_text(encoding="utf-8").split("## Gated mean")[1].split("|")[0]
    assert re.findall(r"0\.\d{3}", section.split("|")[0]) == re.findall(r"(0\.\d{3}) ±", means)
    costs = (RESULTS / "cost_cpu.md").read_text(encoding="utf-8")
    share, held = re.findall(r"([\d.]+) %", section.split("Recording, scoring")[1])
    assert f"{held} % at 4,096 tokens" in costs
    assert f"| {share} % |" in costs.split("## 4,096 tokens")[1].split("\n## ")[0]


def test_figures_of_both_engines_are_those_of_the_committed_results() -> None:
    text = (ROOT / "gatesight_hf" / "vllm" / "README.md").read_text(encoding="utf-8")
    for engine, name in (("vLLM", "toy_vllm.md"), ("transformers", "toy_bf16.md")):
        rows = [line.replace(f", {engine}", "") for line in text.splitlines() if f", {engine} |" in line]
        assert len(rows) == 2 and set(rows) <= lines_of(RESULTS / name)
