"""`gatesight view` and `session.view()`: the page of a session."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from gatesight_hf import CacheStateError, Session
from gatesight_hf.commands.cli import main
from gatesight_hf.methods import KeyDiff
from gatesight_hf.reference import ESTIMATOR_PATH, documents
from gatesight_hf.view import FRACTIONS

from ..helpers import chats
from ..helpers.chats import chat_tokenizer
from ..helpers.models import KeyNorm, tiny_model

pytestmark = pytest.mark.quick

DOCUMENT = documents.needles(random.Random(5), 512, count=4, asked=2)
QUESTIONS = [question.text for question in DOCUMENT.questions]


def test_a_page_shows_what_the_session_keeps(bundled: Any, tmp_path: Path) -> None:
    session = Session.open(*bundled, ESTIMATOR_PATH, DOCUMENT.text, kept_fraction=0.2, protected_prefix=5)
    page = session.view(QUESTIONS, {"keydiff": KeyDiff()}, 4)
    view = page.view
    assert [method.name for method in view.methods] == ["gatesight", "keydiff"] and len(view.tokens) == 512
    step = FRACTIONS.index(0.2)
    assert view.methods[0].kept_per_layer(step) == session.report().kept_per_layer[0]
    for j, layer in enumerate(session.cache.attention_layers):
        kept = layer.kept_positions[0]
        for head, positions in enumerate(kept):
            assert view.methods[0].mask(step)[j, head].nonzero().flatten().tolist() == positions.tolist()
    assert "".join(view.tokens).split() == DOCUMENT.text.lower().split()
    expected = [question.expected for question in DOCUMENT.questions]
    assert [row.question for row in view.answered] == QUESTIONS and view.answered_at == 0.2
    assert [row.answers["full"] for row in view.answered] == [row.answers["kept"] for row in view.answered] == expected
    assert [row.answers["random"] for row in view.answered] != expected
    page.save(tmp_path / "kept.html")
    assert (tmp_path / "kept.html").read_text(encoding="utf-8") == page.html
    assert [path.name for path in tmp_path.iterdir()] == ["kept.html"]
    frame = page._repr_html_()
    assert frame.startswith('<iframe sandbox="allow-scripts"') and "<script" not in frame


def test_texts_of_tokens_are_the_documents() -> None:
    tokenizer = chat_tokenizer()
    model = tiny_model(vocab_size=chats.VOCAB)
    text = chats.TEXT + "  東京 naïve <b>&amp;</b>\n\n\n  end"
    session = Session.open(model, tokenizer, KeyNorm(), text, system="Be brief.")
    view = session.view().view
    assert view.answered == () and [method.name for method in view.methods] == ["gatesight", "random"]
    shown = "".join(view.tokens)
    assert chats.TEXT in shown and "Be brief." in shown and "<b>&" in shown
    assert view.protected_prefix == session.cache.options.protected_prefix > 0


def test_a_session_without_its_estimator_says_so(bundled: Any, tmp_path: Path) -> None:
    path = tmp_path / "doc.gatesight"
    Session.open(*bundled, ESTIMATOR_PATH, DOCUMENT.text, kept_fraction=0.2).save(path)
    with pytest.raises(CacheStateError, match="without its estimator"):
        Session.load(path, *bundled).view()
    assert Session.load(path, *bundled, ESTIMATOR_PATH).view().view.methods[0].name == "gatesight"


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document, out = tmp_path / "a.txt", tmp_path / "kept.html"
    document.write_text(DOCUMENT.text, encoding="utf-8")
    arguments = ["view", "--document", str(document), "--out", str(out), "--method", "random,snapkv"]
    arguments += ["--kept-fraction", "0.25", "--question", QUESTIONS[0], "--max-new-tokens", "4"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 512 and found["kept_fraction"] == 0.25
    assert list(found["methods"]) == ["gatesight", "random", "snapkv"] and "a.txt" not in out.read_text()
    assert all(of["achieved_fraction"] == pytest.approx(0.25, abs=0.01) for of in found["methods"].values())
    assert main([*arguments[:-4], "--method", "snapkv,nonsense"]) == 1
    assert "there is no nonsense here" in capsys.readouterr().err
    assert main(arguments) == 0
    assert f"Written: {out}" in capsys.readouterr().out


def test_a_place_that_is_not_there_is_said_before_anything_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", "--document", "nowhere", "--out", "/no/such/kept.html"]) == 1
    assert "--out: there is no folder /no/such for kept.html" in capsys.readouterr().err
