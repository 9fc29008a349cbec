"""The reference site builds without a warning, and has every public name."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gatesight_hf
import gatesight_kernels
from gatesight_hf import methods, vllm

from ..helpers.paths import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in ("material", "mkdocs", "mkdocstrings_handlers")),
        reason="needs the extra docs",
    ),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(ROOT / ".ci" / "pages.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_public_name_has_an_entry(site: Path) -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in (site / "reference").glob("*.html"))
    documented = {name.rpartition(".")[2] for name in re.findall(r'<h\d id="([\w.]+)"', pages)}
    public = {name for package in (gatesight_hf, methods, vllm, gatesight_kernels) for name in package.__all__}
    assert public - documented <= {"BACKENDS"}  # a constant, named in the text of `use_backend`


def test_docstrings_are_rendered_whole(site: Path) -> None:
    """No section of a docstring is left as text, and no backtick."""
    for path in (site / "reference").glob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not re.findall(r"<p>(?:Args|Attributes|Raises|Returns|Yields):", text), path.name
        assert not re.findall(r".{,40}`.{,40}", re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)), path.name


def test_nothing_is_asked_of_other_sites(site: Path) -> None:
    for path in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="(https?:[^"]+)"', path.read_text(encoding="utf-8"))
        assert not loaded, path.name


def test_pages_show_their_pictures(site: Path) -> None:
    for page in (site / "index.html", site / "gatesight_hf" / "index.html"):
        (picture,) = re.findall(r'<img[^>]+src="([^"]+)"', page.read_text(encoding="utf-8"))
        assert (page.parent / picture).is_file()
