"""The page as text: what it holds, and what it can never hold or load."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from gatesight_hf.view import FRACTIONS, render

from ..helpers.views import HOSTILE, held, hostile, synthetic

pytestmark = pytest.mark.quick


class Elements(HTMLParser):
    """Tags with their attributes, and the texts of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline: dict[str, str] = {}
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        tag, attributes = self.tags[-1] if self.tags else ("", {})
        if tag in ("script", "style") and data.strip():
            name = attributes.get("id") or tag
            self.inline[name] = self.inline.get(name, "") + data


def test_texts_and_numbers_come_back_as_they_were() -> None:
    view = synthetic(["the", " sailor", "\n", "é", "号"] * 20)
    data = held(render(view))
    assert data["about"]["tokens"] == list(view.tokens)
    assert data["about"]["fractions"] == list(FRACTIONS)
    for method, arrays in zip(view.methods, data["arrays"], strict=True):
        assert arrays["levels"] == method.levels.numpy().tobytes()
        assert arrays["percentiles"] == method.percentiles.numpy().tobytes()
        assert (np.frombuffer(arrays["kept"], "<i4") == method.kept.flatten().numpy()).all()


def test_no_text_is_markup() -> None:
    page = render(hostile())
    plain = render(synthetic(["a"]))
    assert Elements(page).tags == Elements(plain).tags
    assert not [text for text in HOSTILE if text in page]
    assert held(page)["about"]["tokens"][: len(HOSTILE)] == list(HOSTILE)
    assert {one["question"] for one in held(page)["about"]["answered"]} == set(HOSTILE)
    page.encode()  # a lone surrogate too


def test_nothing_is_loaded_and_only_its_own_script_runs() -> None:
    page = render(synthetic(["a", "b"]))
    elements = Elements(page)
    assert not [tag for tag, attributes in elements.tags if {"src", "href", "style", "onclick"} & set(attributes)]
    assert not re.search(r"https?:|url\(|@import|innerHTML|insertAdjacent|document\.write|\beval\b", page)
    (policy,) = [a["content"] for _, a in elements.tags if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in str(policy).split(";"))
    assert rules["default-src"] == "'none'"
    for tag in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(elements.inline[tag].encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"


def test_a_long_document_makes_a_page_of_a_few_bytes_per_entry() -> None:
    view = synthetic([f"word-{i % 5000}" for i in range(100_000)])
    page = render(view)
    entries = sum(method.levels.numel() for method in view.methods)
    assert len(page) < 2.5 * entries + 8 * len(view.tokens)


def test_only_views_are_rendered() -> None:
    with pytest.raises(TypeError, match="view must be a View"):
        render("text")  # type: ignore[arg-type]
