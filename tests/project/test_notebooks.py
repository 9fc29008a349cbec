"""The notebooks run: every code cell, in a process of its own, prints what is stored beside it."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from ..helpers.paths import ROOT

EXAMPLES = ROOT / "examples"
#: What must hold in a notebook's names after its last cell.
CHECKS = {
    "1_quick_start": """
assert answer == full_answer == document.questions[0].expected
assert right["GateSight"] == len(document.questions) > right["random"]
assert report.kv_bytes < 0.12 * report.kv_bytes_before and share > 0.8  # a tenth, and the question
""",
    "2_one_document_many_questions": """
expected = [question.expected for question in document.questions]
assert sum(a == e for a, e in zip(answers, expected)) >= 6 and backwards == answers
assert ask_all(loaded, document.questions) == answers and not file.exists()
assert chat_answers == [question.expected for question in asked]
assert turns == chat_answers and chat.history[-1]["content"] == turns[-1]
""",
    "3_compare_methods": """
assert texts == [question.expected for question in document.questions] and agreement["gatesight", 0.2] == 1
assert all(log_prob["gatesight", p] >= max(log_prob[name, p] for name in methods) - 0.05 for p in KEPT_FRACTIONS)
assert log_prob["random", 0.5] > log_prob["random", 0.05]
""",
    "4_train_an_estimator": """
assert status == 0 and best["mlp"]["overlap@10"] > 2 * best["age only"]["overlap@10"]
assert right["bundled"] >= right["this run"] > right["random"]
""",
    "5_why_it_works": """
scores = {name: row["overlap@10"] for name, row in found["scores"].items()}
assert min(scores["mlp"], scores["ridge"]) > scores["best single signal"] > scores["age only"]
assert lives["rank_agreement"] > 0.9
""",
    "6_serve_with_vllm": """
assert answers == [question.expected for question in document.questions] == served
assert session.blocks < session.blocks_before
""",
}
NEEDS_VLLM = "6_serve_with_vllm"

#: Runs cells as a kernel would, without one: each notebook in a fork of a process that has imported what they all need.
#: It gets files of cells with a check, writes what each cell printed, and what failed.
RUNNER = """
import contextlib, io, json, os, sys, traceback
exec(sys.argv[1])
for job in sys.argv[2:]:
    child = os.fork()
    if child == 0:
        cells, check, out = json.load(open(job, encoding="utf-8"))
        os.chdir(os.path.dirname(job))
        names, printed = {"__name__": "__main__"}, []
        try:
            for number, source in enumerate(cells):
                with contextlib.redirect_stdout(io.StringIO()) as text:
                    exec(compile(source, f"cell {number}", "exec"), names)
                printed.append(text.getvalue())
            exec(compile(check, "check", "exec"), names)
            failed = ""
        except BaseException:
            failed = traceback.format_exc()
        with open(out, "w", encoding="utf-8") as file:
            json.dump([printed, failed], file)
        os._exit(0)
    os.waitpid(child, 0)
"""
#: What notebooks import that takes long.
SHARED = "import matplotlib.pyplot, gatesight_hf, transformers.models.qwen3_5.modeling_qwen3_5"


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))
    return found


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source_of(cell: dict[str, Any]) -> str:
    """Its code, without the kernel's own commands."""
    return re.sub(r"^%.*$", "", "".join(cell["source"]), flags=re.MULTILINE)


def without_numbers(text: str) -> list[str]:
    """Words alone: numbers and digests may differ between machines, and what matters of them is in `CHECKS`."""
    return re.sub(r"[0-9a-f]{64}|-?\d[\d,.]*", "", text).split()


def test_every_notebook_is_checked() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.ipynb")) == sorted(CHECKS)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """By notebook, what its cells printed and what failed."""
    with_vllm, jobs = find_spec("vllm") is not None, {}
    if not with_vllm:
        pytest.importorskip("matplotlib")
    for name in CHECKS:
        if (name == NEEDS_VLLM) == with_vllm:
            jobs[name] = tmp_path_factory.mktemp(name) / "job.json"
            sources = [source_of(cell) for cell in code_cells(read(name))]
            job = [sources, CHECKS[name], str(jobs[name].with_name("printed.json"))]
            jobs[name].write_text(json.dumps(job), encoding="utf-8")
    environment = {**os.environ, "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
    # vLLM makes processes of its own, and wants to be imported by its notebook.
    command = [sys.executable, "-c", RUNNER, "" if with_vllm else SHARED, *map(str, jobs.values())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: json.loads(job.with_name("printed.json").read_text(encoding="utf-8")) for name, job in jobs.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_cells_run_and_print_what_is_stored(name: str, request: pytest.FixtureRequest) -> None:
    if name == NEEDS_VLLM:
        pytest.importorskip("vllm", reason="vLLM is not installed: see `make test-vllm`")
    elif find_spec("vllm") is not None:
        pytest.skip("it is run where vLLM is not installed")
    printed, failed = request.getfixturevalue("found")[name]
    assert not failed, failed[-4000:]
    for cell, text in zip(code_cells(read(name)), printed, strict=True):
        stored = "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")
        assert without_numbers(text) == without_numbers(stored), "run the notebook again, and store its outputs"


@pytest.mark.parametrize("name", CHECKS)
def test_a_notebook_is_whole(name: str) -> None:
    """It was run from top to bottom, without errors, and holds nothing of the machine that ran it."""
    notebook = read(name)
    assert notebook["nbformat"] == 4 and notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert len(notebook["cells"]) <= 15 and notebook["cells"][0]["cell_type"] == "markdown"
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert not [cell for cell in notebook["cells"] if cell["metadata"]]
    texts = [text for output in outputs for text in output.get("text", output.get("data", {}).get("text/plain", []))]
    assert outputs and not re.search(r"(?:^|\s)/\w+/|warning|\bhost", "".join(texts), re.IGNORECASE)


@pytest.mark.parametrize("name", CHECKS)
def test_code_compiles_and_what_it_imports_of_us_exists(name: str) -> None:
    for cell in code_cells(read(name)):
        for node in ast.walk(ast.parse(source_of(cell))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("gatesight_"):
                module = importlib.import_module(node.module)
                names = {*dir(module), *getattr(module, "__all__", ())}  # some are imported when they are asked for
                for alias in node.names:
                    inside = f"{node.module}.{alias.name}"
                    assert alias.name in names or find_spec(inside) is not None, inside
