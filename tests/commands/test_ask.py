"""`gatesight ask`: a document or a saved session in, answers out."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from gatesight_hf import Session
from gatesight_hf.commands.cli import main
from gatesight_hf.reference import ESTIMATOR_PATH, MODEL_PATH, documents, load_model, load_tokenizer

pytestmark = pytest.mark.quick

DOCUMENT = documents.needles(random.Random(5), 512, count=4, asked=2)
QUESTIONS = [argument for question in DOCUMENT.questions for argument in ("--question", question.text)]


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "document.txt"
    path.write_text(DOCUMENT.text, encoding="utf-8")
    return path


def printed(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert main(["ask", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_a_document_and_its_session_give_the_same_answers(document, tmp_path, capsys):
    options = [*QUESTIONS, "--max-new-tokens", 4]
    saved = tmp_path / "doc.gatesight"
    result = json.loads(
        printed(capsys, "--document", document, "--kept-fraction", 0.2, *options, "--save", saved, "--json")
    )
    assert [row["answer"] for row in result["answers"]] == [question.expected for question in DOCUMENT.questions]
    assert [row["question"] for row in result["answers"]] == [question.text for question in DOCUMENT.questions]
    assert result["report"]["kept_fraction"] == 0.2 and result["saved"] == str(saved)
    document.unlink()
    for model, estimator in (("reference", None), (MODEL_PATH, ESTIMATOR_PATH)):
        named = [] if estimator is None else ["--estimator", estimator]
        again = json.loads(printed(capsys, "--session", saved, "--model", model, *named, *options, "--json"))
        assert again == {**result, "saved": None}
    assert Session.load(saved, load_model(), load_tokenizer()).report().to_dict() == result["report"]


def test_people_get_lines(document, tmp_path, capsys):
    saved = tmp_path / "doc.gatesight"
    options = ["--kept-fraction", 0.2, "--protected-prefix", 3, "--allocation", "flat", "--prefill-chunk-size", 100]
    text = printed(capsys, "--document", document, *QUESTIONS, *options, "--max-new-tokens", 4, "--save", saved)
    for question in DOCUMENT.questions:
        assert f"{question.text}\n    {question.expected}\n" in text
    assert "512 tokens; KV cache 524,288 -> " in text and text.endswith(f"Saved in {saved}\n")
    used = Session.load(saved, load_model(), load_tokenizer()).cache.options
    assert (used.protected_prefix, used.allocation) == (3, "flat")


MISTAKES = {
    "--document {document}": "give a --question, or --save",
    "--document {folder}/nowhere --question x": "nowhere",
    "--document {binary} --question x": "not a text file in UTF-8",
    "--document {empty} --question x": "has no tokens",
    "--document {document} --question x --kept-fraction 2": "kept_fraction must be in",
    "--document {document} --question x --estimator {folder}": "no config.json",
    "--document {document} --question x --model {model}": "--estimator is needed",
    "--document {document} --question x --model ./nowhere --estimator {folder}": "--model ./nowhere: no such folder",
    "--document {document} --save {folder}/no/such": "--save: there is no folder",
    "--session {folder}/nowhere --question x": "no such file",
    "--session {document} --question x": "not a safetensors file",
    "--session {model}/model.safetensors --question x": "not one of a saved cache",
    "--session {document} --question x --kept-fraction 0.2 --allocation flat": "--kept-fraction, --allocation: a saved",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_mistakes_are_one_line(document, tmp_path, capsys, arguments):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "empty").write_text("")
    names = {"folder": tmp_path, "document": document, "binary": tmp_path / "binary", "empty": tmp_path / "empty"}
    assert main(["ask", *arguments.format(**names, model=MODEL_PATH).split()]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("gatesight: ")]
    assert MISTAKES[arguments] in line


@pytest.mark.parametrize("arguments", [[], ["--document", "a", "--session", "b"]])
def test_one_of_document_and_session_is_given(arguments, capsys):
    with pytest.raises(SystemExit):
        main(["ask", "--question", "x", *arguments])
    assert "--document" in capsys.readouterr().err
