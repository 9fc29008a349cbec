"""The page in a real browser: what a reader sees and does."""

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gatesight_hf import Estimator, GateSightCache
from gatesight_hf.cache import prefill
from gatesight_hf.methods import KeyDiff
from gatesight_hf.reference import ESTIMATOR_PATH, documents
from gatesight_hf.scoring import Scorer
from gatesight_hf.view import FRACTIONS, Answered, View, collect, render

from ..helpers.models import KeyNorm, tiny_model
from ..helpers.running import CONTEXT
from ..helpers.views import HOSTILE, hostile, synthetic

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver on the PATH"
)
selenium = pytest.importorskip("selenium.webdriver", reason="needs selenium, of the extra dev")

ARGUMENTS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync --disable-dev-shm-usage"
).split()
ALLOCATIONS = {"gatesight": "gate", "keydiff": "global"}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = selenium.ChromeOptions()
    for argument in (*ARGUMENTS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(argument)
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = selenium.Chrome(service=selenium.ChromeService(DRIVER), options=options)
    yield driver
    driver.quit()


class Reader:
    """What is done with a page and seen on it."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def wait(self, script: str) -> Any:
        """Until a script gives something true; drawing follows keys by a frame."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.browser, 20, 0.05).until(lambda driver: driver.execute_script(f"return {script}"))

    def find(self, selector: str) -> Any:
        return self.browser.find_element("css selector", selector)

    def press(self, selector: str, *keys: str) -> None:
        """Focus an element and press keys, by their names in selenium, or held together if joined by +."""
        from selenium.webdriver.common.keys import Keys

        self.run("document.querySelector(arguments[0]).focus()", selector)
        names = [[getattr(Keys, name, name) for name in key.split("+")] for key in keys]
        self.find(selector).send_keys(
            *("".join(together) + (Keys.NULL if len(together) > 1 else "") for together in names)
        )
        self.run("return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def widen(self, width: int, height: int = 900) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.run("return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def numbers(self, selector: str) -> list[float]:
        texts = self.run("return Array.from(document.querySelectorAll(arguments[0]), (e) => e.textContent)", selector)
        return [float(text.replace(",", "")) for text in texts]

    def status(self) -> str:
        return self.find("#status").text

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.browser.get_log("browser")]


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Callable[[View], Reader]:
    """Opens the page of a view."""

    def opened(view: View) -> Reader:
        path, reader = tmp_path / "page.html", Reader(browser)
        path.write_text(render(view), encoding="utf-8")
        reader.widen(1000)
        browser.get(path.as_uri())
        reader.wait("!document.querySelector('main').hidden && document.querySelectorAll('.row').length > 0")
        return reader

    return opened


@pytest.fixture(scope="module")
def collected(bundled: tuple[Any, Any]) -> tuple[View, GateSightCache, dict[str, Scorer]]:
    """Of the bundled model: a view, the uncompacted cache, and scorers."""
    model, tokenizer = bundled
    document = documents.needles(random.Random(0), 300, 2, asked=2)
    ids = tokenizer(document.text).input_ids
    scorers: dict[str, Scorer] = {"gatesight": Estimator.from_pretrained(ESTIMATOR_PATH), "keydiff": KeyDiff()}
    texts = [tokenizer.decode([i]) for i in ids]
    view = collect(model, ids, scorers, tokens=texts, allocation=ALLOCATIONS, protected_prefix=4)
    answered = tuple(Answered(q.text, {"full": q.expected, "kept": q.expected}) for q in document.questions)
    parent = GateSightCache(scorers["gatesight"], model, protected_prefix=4)
    prefill(model, torch.tensor([ids]), parent)
    return replace(view, answered=answered, answered_at=0.3), parent, scorers


def test_the_slider_shows_what_a_compaction_would_keep(show: Any, collected: Any) -> None:
    view, parent, scorers = collected
    reader = show(view)
    assert reader.find("#fraction-shown").text == "0.30"  # where the questions were answered
    seen = []
    for keys, step in ((("ARROW_RIGHT",), 30), (("ARROW_LEFT",) * 21, 9), (("HOME",), 0), (("END",), 99)):
        reader.press("#fraction", *keys)
        assert reader.find("#fraction-shown").text == f"{FRACTIONS[step]:.2f}"
        reports = [
            parent.fork(scorer=scorer, kept_fraction=FRACTIONS[step], allocation=ALLOCATIONS[name]).compact()
            for name, scorer in scorers.items()
        ]
        by_row = zip(*(report.kept_per_layer[0] for report in reports), strict=True)
        assert reader.numbers(".kept") == [count for row in by_row for count in row]
        shown = reader.numbers(".achieved")
        assert shown == pytest.approx([report.achieved_fraction for report in reports], abs=5e-5)
        seen.append(reader.run("return document.querySelectorAll('.text .k0').length"))
    assert seen[2] > seen[1] > seen[0] > seen[3] == 0
    assert reader.errors() == []


def test_one_head_shows_its_own_entries(show: Any, collected: Any) -> None:
    view, *_ = collected
    reader = show(view)
    reader.widen(1000, 3000)  # all tokens are drawn
    reader.press("#layer", "ARROW_DOWN", "ARROW_DOWN")
    reader.press("#head", "ARROW_DOWN")
    for i, method in enumerate(view.methods):
        reader.wait(f"document.getElementById('token-{i}-0')")
        kept = reader.run(
            "return Array.from(document.querySelectorAll(arguments[0]), (e) => [e.dataset.token, e.className])",
            f"[id^=token-{i}-]",
        )
        mask = method.mask(29)[1, 0]
        for token, name in kept:
            assert f"k{4 if mask[int(token)] else 0}" in name.split()
            assert ("p" in name.split()) == (int(token) < 4)
        assert len(kept) > 100


def test_sets_that_shrink_while_the_fraction_grows_are_shown_as_they_are(show: Any) -> None:
    model, ids = tiny_model(num_hidden_layers=16), CONTEXT[0, :16].tolist()
    view = collect(model, ids, {"norm": KeyNorm()}, tokens=[str(i) for i in ids], allocation="pyramid")
    (method,) = view.methods
    assert (method.kept.diff(dim=0) < 0).any()
    reader, (step, layer, _) = show(view), (method.kept.diff(dim=0) < 0).nonzero()[0].tolist()
    reader.press("#layer", *["ARROW_DOWN"] * (layer + 1))
    for near in range(step - 1, step + 3):
        reader.run("document.getElementById('fraction').value = arguments[0]", near)
        reader.run("document.getElementById('fraction').dispatchEvent(new Event('input'))")
        reader.wait(f"document.querySelector('#fraction-shown').textContent === '{FRACTIONS[near]:.2f}'")
        names = reader.run("return Array.from(document.querySelectorAll('.text .t'), (e) => e.classList[2])")
        assert names == [f"k{2 * n}" for n in method.mask(near)[layer].int().sum(0).tolist()]  # quarters, of two heads


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_colour_of_the_ramp_carries_text_and_differs_in_grey(show: Any, scheme: str) -> None:
    reader = show(synthetic(["a", "b"]))
    chosen = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    reader.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", chosen)
    colours = reader.run(
        "const paint = document.createElement('canvas').getContext('2d', { willReadFrequently: true });"
        "const rgb = (c) => { paint.fillStyle = c; paint.fillRect(0, 0, 1, 1);"
        " return [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3); };"
        "const root = getComputedStyle(document.documentElement);"
        "const names = ['--text', ...Array.from({ length: 10 }, (_, i) => `--r${i}`)];"
        "return names.map((name) => rgb(root.getPropertyValue(name)))"
    )
    text, *ramp = (luminance(colour) for colour in colours)
    assert min((max(text, one) + 0.05) / (min(text, one) + 0.05) for one in ramp) >= 4.5
    assert ramp == sorted(ramp, reverse=scheme == "light")
    assert len({round(one, 3) for one in ramp}) == 10


def luminance(colour: list[int]) -> float:
    """Of sRGB bytes, as WCAG defines it."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (byte / 255 for byte in colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_cursor_goes_by_keys(show: Any, collected: Any) -> None:
    view, *_ = collected
    reader, last = show(view), len(view.tokens)
    assert reader.status().startswith(f"Token 1 of {last}: “{view.tokens[0]}”, protected")
    reader.press(".text", "ARROW_RIGHT", "ARROW_RIGHT", "ARROW_RIGHT", "ARROW_RIGHT", "ARROW_RIGHT", "ARROW_LEFT")
    first, *by_method = reader.status().splitlines()
    assert first == f"Token 5 of {last}: “{view.tokens[4]}”"
    for method, line in zip(view.methods, by_method, strict=True):
        kept = method.mask(29)[:, :, 4]
        percentile = method.percentiles[:, :, 4].float().mean()
        assert line.startswith(f"{method.name}: score percentile {int(percentile + 0.5)}, ")
        expected = {0: "evicted in all heads", 4: "kept in all heads"}
        assert expected.get(int(kept.sum()), f"kept in {int(kept.sum())} of 4 heads") in line
    assert reader.find(".text").get_attribute("aria-activedescendant") == "token-0-4"
    assert reader.find(".cursor").get_attribute("aria-selected") == "true"
    reader.press(".text", "ARROW_DOWN", "ARROW_UP")
    assert reader.status().startswith("Token 5 of")
    reader.press(".text", "PAGE_DOWN")
    assert not reader.status().startswith("Token 5 of")
    reader.press(".text", "CONTROL+END")
    assert reader.status().startswith(f"Token {last} of")
    reader.press("#goto", "7", "ENTER")
    assert reader.status().startswith("Token 7 of")


def test_everything_can_be_reached_by_the_tab_key(show: Any, collected: Any) -> None:
    view, *_ = collected
    reader, reached = show(view), []
    for _ in range(9):
        from selenium.webdriver.common.keys import Keys

        selenium.ActionChains(reader.browser).send_keys(Keys.TAB).perform()
        reached.append(reader.run("const e = document.activeElement; return e.id || e.className"))
    assert reached == ["fraction", "layer", "head", "goto", "text", "text", "wide", "answered-at", *reached[8:]]
    unnamed = reader.run(
        "return Array.from(document.querySelectorAll('input, select, [role=listbox], [role=region]'))"
        ".filter((e) => !(e.labels && e.labels.length) && !e.ariaLabel && !e.getAttribute('aria-labelledby')).length"
    )
    assert unnamed == 0


def test_texts_stay_texts(show: Any) -> None:
    from selenium.common.exceptions import NoAlertPresentException

    reader = show(hostile())
    with pytest.raises(NoAlertPresentException):
        _ = reader.browser.switch_to.alert
    assert reader.browser.title == HOSTILE[0]
    assert reader.run("return document.querySelectorAll('img, script:not([type]), b:not(.strip b)').length") == 1
    assert reader.find("#token-0-0").text == HOSTILE[0]
    assert reader.find("#token-0-3").text == HOSTILE[3]
    assert reader.find("#token-0-4").text == "⏎⏎"
    assert reader.find("#questions dd").text == HOSTILE[0]
    assert reader.find(".panel h2").text == HOSTILE[0]
    assert reader.errors() == []


def test_the_page_may_ask_nothing_of_a_network(show: Any) -> None:
    reader = show(synthetic(["a", "b"]))
    asked = "return fetch('data:text/plain,a').then(() => 'loaded', () => 'refused')"
    assert reader.run(asked) == "refused"
    assert "Content Security Policy" in "".join(reader.errors())


def test_a_long_document_is_drawn_where_it_is_read(show: Any) -> None:
    length = 100_000
    reader = show(synthetic([f"word-{i % 5000}" if i % 7 else "\n" for i in range(length)]))
    reader.run("document.querySelector('.text').scrollTop = 5e5")
    reader.wait("document.querySelector('.text .t').dataset.token > 1000")
    tops = reader.run("return Array.from(document.querySelectorAll('.text'), (e) => e.scrollTop)")
    assert tops == [5e5, 5e5]
    reader.press(".text", "CONTROL+END")
    assert reader.wait(f"document.getElementById('token-1-{length - 1}')").text == f"word-{(length - 1) % 5000}"
    assert reader.status().startswith("Token 100,000 of 100,000")
    assert reader.run("return document.querySelectorAll('.t').length") < 5000
    reader.press("#fraction", "END")
    assert reader.numbers(".kept") == [length] * 4


@pytest.mark.parametrize("width", [400, 800, 1600])
def test_the_page_is_never_wider_than_the_window(show: Any, width: int) -> None:
    view = synthetic(["a" * 300, "word", "\n", "号" * 200] * 200, names=("a-long-name" * 20, "b", "c", "d"))
    view = replace(view, title="t" * 300, answered=(Answered("q" * 300, {"n" * 200: "a" * 300}),), answered_at=0.1)
    reader = show(view)
    reader.widen(width)
    assert reader.run(
        "return [innerWidth, document.documentElement.scrollWidth - document.documentElement.clientWidth]"
    ) == [width, 0]
    for text in reader.browser.find_elements("css selector", ".text"):
        assert reader.run("return arguments[0].scrollWidth - arguments[0].clientWidth", text) == 0
