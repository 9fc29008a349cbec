"""The wheel holds all of the packages that it should, and nothing else of the repository."""

import email
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import gatesight_hf

from ..helpers.paths import ROOT

#: What a wheel is built from. The build sees a copy of only this, so that it leaves nothing in the repository.
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "gatesight_hf", "kernels", "eval")
PACKAGES = {
    "gatesight_hf": ROOT / "gatesight_hf",
    "gatesight_kernels": ROOT / "kernels" / "gatesight_kernels",
    "gatesight_eval": ROOT / "eval" / "gatesight_eval",
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a wheel that is built without the network, with the setuptools of this environment."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def dist_info(wheel: dict[str, bytes], file: str) -> str:
    return wheel[f"gatesight_hf-{gatesight_hf.__version__}.dist-info/{file}"].decode()


@pytest.fixture(scope="module")
def metadata(wheel: dict[str, bytes]) -> Message:
    return email.message_from_string(dist_info(wheel, "METADATA"))


def test_code_is_exactly_that_of_the_packages(wheel):
    expected = {
        str(Path(package) / path.relative_to(folder))
        for package, folder in PACKAGES.items()
        for path in folder.rglob("*.py")
    }
    assert {name for name in wheel if name.endswith(".py")} == expected


def test_nothing_lies_outside_the_packages(wheel):
    tops = {name.split("/")[0] for name in wheel}
    assert tops <= {*PACKAGES, f"gatesight_hf-{gatesight_hf.__version__}.dist-info"}


def test_the_types_are_marked(wheel):
    marked = {package for package, folder in PACKAGES.items() if folder.is_dir()}
    assert {f"{package}/py.typed" for package in marked} <= set(wheel)


@pytest.mark.parametrize("folder", ["model", "estimator"])
def test_the_bundled_files_are_there(wheel, folder):
    for path in (ROOT / "gatesight_hf" / "reference" / folder).rglob("*"):
        if path.is_file():
            assert wheel[str(path.relative_to(ROOT))] == path.read_bytes()


def test_the_parts_of_pages_are_there(wheel):
    for kind in ("html", "css", "js"):
        name = f"gatesight_hf/view/page.{kind}"
        assert wheel[name] == (ROOT / name).read_bytes()


def test_metadata(wheel, metadata):
    assert metadata["Name"] == "gatesight-hf"
    assert metadata["Version"] == gatesight_hf.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert dist_info(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "gatesight = gatesight_hf.commands.cli:main" in dist_info(wheel, "entry_points.txt")
