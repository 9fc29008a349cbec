"""Build the reference site: the repository's own Markdown files at their paths, and a reference from docstrings.

    python .ci/pages.py site

Any warning is an error: a link to nothing, a docstring that names what is not there.
"""

import argparse
import logging
import os
import posixpath
import re
import shutil
import sys
import tempfile
from pathlib import Path

from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort, MkDocsException

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "eval/README.md",
    "eval/language_model/README.md",
    "eval/reference_model/README.md",
    "eval/results/*.md",
    "examples/*.md",
    "gatesight_hf/README.md",
    "gatesight_hf/*/README.md",
    "gatesight_hf/reference/*/README.md",
    "hub_cards/README.md",
    "kernels/README.md",
)
PICTURES = ("eval/results/*.png", "eval/results/*.svg")
#: Pages of the reference: title, and what is on it. A module stands for all that its `__all__` or its body has.
REFERENCE: dict[str, tuple[str, tuple[str, ...]]] = {
    "caches": (
        "Caches and sessions",
        ("gatesight_hf.GateSightCache", "gatesight_hf.FrozenCache", "gatesight_hf.Session"),
    ),
    "estimators": ("Estimators", ("gatesight_hf.Estimator", "gatesight_hf.EstimatorConfig")),
    "scoring": ("Scoring interface", ("gatesight_hf.scoring.interface",)),
    "methods": ("Methods", ("gatesight_hf.methods",)),
    "reports": ("Reports", ("gatesight_hf.CacheReport",)),
    "views": ("Views", ("gatesight_hf.view",)),
    "errors": ("Errors", ("gatesight_hf.errors",)),
    "families": (
        "Models and families",
        ("gatesight_hf.models.hybrid", "gatesight_hf.models.families", "gatesight_hf.models.hooks"),
    ),
    "training": (
        "Training",
        ("gatesight_hf.scoring.utility", "gatesight_hf.training.collect", "gatesight_hf.training.fit",
         "gatesight_hf.training.metrics", "gatesight_hf.training.plan", "gatesight_hf.training.run"),
    ),
    "hub": (
        "Files and the Hub",
        ("gatesight_hf.scoring.mlp", "gatesight_hf.files.hub", "gatesight_hf.commands.publishing",
         "gatesight_hf.cache.storage"),
    ),
    "vllm": (
        "vLLM",
        ("gatesight_hf.vllm.register", "gatesight_hf.vllm.llm", "gatesight_hf.vllm.messages.OpenOptions",
         "gatesight_hf.vllm.server", "gatesight_hf.vllm.support"),
    ),
    "kernels": ("Kernels", ("gatesight_kernels",)),
}  # fmt: skip
#: Wide enough for lines of code, and names in tables whole.
STYLE = ".md-grid { max-width: 84rem; }\n.md-typeset td code { white-space: nowrap; }\n"
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")


def gather(folder: Path) -> None:
    """Write all pages, and the pictures that they show, into a folder."""
    pages = _matching(PAGES)
    for name in _matching(PICTURES):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for name in pages:
        text = (ROOT / name).read_text(encoding="utf-8")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(_relinked(text, name, pages), encoding="utf-8")
    (folder / "style.css").write_text(STYLE, encoding="utf-8")
    (folder / "reference").mkdir()
    for name, (title, objects) in REFERENCE.items():
        text = "\n\n".join([f"# {title}", *(f"::: {path}" for path in objects)])
        (folder / "reference" / f"{name}.md").write_text(text + "\n", encoding="utf-8")


def _matching(patterns: tuple[str, ...]) -> set[str]:
    return {path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern)}


def _relinked(text: str, page: str, pages: set[str]) -> str:
    """Links to folders lead to their README; of links to files that the site does not have the text stays."""

    def mended(match: re.Match[str]) -> str:
        picture, label, target, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{page} links to {target}, which does not exist.")
        if f"{path}/README.md" in pages:
            target = f"{target.rstrip('/')}/README.md"
        elif path not in pages and not picture:
            return f"`{path}`" if label == target else label
        return f"{picture}[{label}]({target}{anchor or ''})"

    return LINK.sub(mended, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("site", type=Path, help="folder for the site; what was there is replaced")
    site = parser.parse_args().site.resolve()
    os.chdir(ROOT)
    logging.basicConfig(format="%(message)s")
    with tempfile.TemporaryDirectory() as pages:
        try:
            gather(Path(pages))
            build(load_config("mkdocs.yml", docs_dir=pages, site_dir=str(site), strict=True))
        except (Abort, MkDocsException, FileNotFoundError) as error:
            print(f"The site was not built: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
