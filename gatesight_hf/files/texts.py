"""Documents that people have, as the text that a model is given: text, Markdown, HTML and PDF.

All are read as untrusted input: no more than a limit is read or made of them, nothing in them is run, and nothing that
they refer to is fetched.
"""

import importlib
import io
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gatesight_kernels.checks import described

from ..checks import check_path

#: Bytes of a file, pictures in it included.
FILE_LIMIT = 2**28
#: Bytes of an HTML file, whose tree takes many times as much.
HTML_LIMIT = 2**24
#: Characters of all documents together: far more than any model reads.
TEXT_LIMIT = 2**26
STANDARD_INPUT = Path("-")
#: By module, what is installed.
PIP_NAMES = {"bs4": "beautifulsoup4", "lxml": "lxml", "pypdf": "pypdf"}
PDF_MAGIC = b"%PDF-"

#: Elements that a browser does not show.
HIDDEN = frozenset("script style template noscript title svg math iframe object audio video canvas datalist".split())
#: Elements that stand on lines of their own; a blank line is around those in `PARAGRAPHS`.
HEADINGS = {f"h{level}": f"{'#' * level} " for level in range(1, 7)}
PARAGRAPHS = frozenset(
    "p div section article main header footer aside nav table ul ol dl pre blockquote figure form hr body".split()
) | frozenset(HEADINGS)
LINES = frozenset("li tr dt dd br caption figcaption option legend address summary details".split())
NOT_SHOWN = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden", re.IGNORECASE)


def read_documents(paths: Sequence[Path]) -> str:
    """The text of some files, one after another.

    Args:
        paths: Of text (`.txt` and any other ending: UTF-8, with or without a byte order mark), Markdown (as it is),
            HTML (`.html`, `.htm`: what a browser shows, headings and list items marked as in Markdown) or PDF (by its
            ending or first bytes: the text of all pages). `-` is text from standard input.

    Returns:
        The text; of several files each below a line `# name`.

    Raises:
        OSError: A file cannot be read.
        TypeError: `paths` is one path instead of several.
        ValueError: A file is not what it should be, holds no text, or is too large; standard input is named twice; or
            a library is missing, and the message names the extra to install.
    """
    if isinstance(paths, (str, Path)):
        raise TypeError(f"paths must be a list of paths, got {described(paths)}.")
    if not paths:
        raise ValueError("No document: name a file, or - for standard input.")
    for path in paths:
        check_path("path", path)
    given = [Path(path) for path in paths]
    if given.count(STANDARD_INPUT) > 1:
        raise ValueError("Standard input (-) can be read once only.")
    texts, length = [], 0
    for path in given:
        text = _read(path)
        length += len(text)
        if length > TEXT_LIMIT:
            raise ValueError(f"{_named(path)}: more than {TEXT_LIMIT:,} characters of text in all.")
        texts.append(text)
    if len(texts) == 1:
        return texts[0]
    names = [_shown(path.name) for path in given]
    headings = [
        _named(path, _shown(str(path)) if names.count(name) > 1 else name)
        for path, name in zip(given, names, strict=True)
    ]
    return "\n\n".join(f"# {heading}\n\n{text.strip()}" for heading, text in zip(headings, texts, strict=True))


def _named(path: Path, name: str | None = None) -> str:
    return "standard input" if path == STANDARD_INPUT else name or _shown(str(path))


def _shown(name: str) -> str:
    """A name with characters in place of bytes that are none."""
    return name.encode("utf-8", "replace").decode()


def _read(path: Path) -> str:
    data = _bytes(path)
    suffix = path.suffix.lower()
    if suffix == ".pdf" or data.startswith(PDF_MAGIC):
        text = _pdf_text(path, data)
    elif suffix in (".html", ".htm"):
        text = _html_text(path, data)
    else:
        text = _plain_text(path, data)
    if not text.strip():
        raise ValueError(f"{_named(path)} holds no text, and so has no tokens.")
    return text


def _bytes(path: Path) -> bytes:
    # Read and not measured before: a pipe has no size.
    if path == STANDARD_INPUT:
        if sys.stdin is None or sys.stdin.closed:
            raise ValueError("Standard input (-) is closed: name a file.")
        data = sys.stdin.buffer.read(FILE_LIMIT + 1)
    else:
        if path.expanduser().is_dir():
            raise IsADirectoryError(f"{path} is a folder; name the files in it.")
        if not path.expanduser().exists():
            raise FileNotFoundError(f"{path}: no such file.")
        with path.expanduser().open("rb") as file:
            data = file.read(FILE_LIMIT + 1)
    if len(data) > FILE_LIMIT:
        raise ValueError(f"{_named(path)} has more than {FILE_LIMIT:,} bytes, the most that is read of a document.")
    return data


def _plain_text(path: Path, data: bytes) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{_named(path)} is not a text file in UTF-8: {error}") from error
    if "\0" in text:
        raise ValueError(f"{_named(path)} is not a text file in UTF-8: there are zero bytes in it.")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _library(name: str, path: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f'{_named(path)} needs {name}, which the extra "documents" brings: pip install {PIP_NAMES[name]}'
        ) from error


# -- PDF ---------------------------------------------------------------------------------------------------------------


def _pdf_text(path: Path, data: bytes) -> str:
    pypdf = _library("pypdf", path)
    try:
        pages = _pdf_pages(pypdf, path, data)
    except _UnreadableError:
        raise
    except Exception as error:  # of a damaged file, almost any: those of pypdf are the fewest
        raise ValueError(
            f"{path} is not a PDF that can be read, or damaged: {error or type(error).__name__}"
        ) from error
    empty = sum(not page for page in pages)
    if empty == len(pages):
        raise ValueError(
            f"{path}: none of its {len(pages)} pages holds text. If it was scanned, run a text recognition (OCR) on it."
        )
    if empty:
        warnings.warn(f"{path}: {empty} of {len(pages)} pages hold no text: blank, or scanned.", stacklevel=4)
    return "\n\n".join(page for page in pages if page)


class _UnreadableError(ValueError):
    """What is wrong with a PDF is known, and said."""


def _pdf_pages(pypdf: Any, path: Path, data: bytes) -> list[str]:
    """The text of each page."""
    reader = pypdf.PdfReader(io.BytesIO(data))
    if reader.is_encrypted:
        try:
            opened = bool(reader.decrypt(""))  # a password for changes alone leaves reading open
        except pypdf.errors.DependencyError:
            opened = False
        if not opened:
            raise _UnreadableError(f"{path} is an encrypted PDF: save a copy without a password, and give that.")
    pages, length = [], 0
    for page in reader.pages:
        # Surrogates, which a broken table of characters gives, are no text that a tokenizer takes.
        text = page.extract_text().encode("utf-8", "replace").decode("utf-8").replace("\0", "").strip()
        length += len(text)
        if length > TEXT_LIMIT:
            raise _UnreadableError(f"{path} has more than {TEXT_LIMIT:,} characters of text.")
        pages.append(text)
    return pages


# -- HTML --------------------------------------------------------------------------------------------------------------


def _html_text(path: Path, data: bytes) -> str:
    if len(data) > HTML_LIMIT:
        raise ValueError(f"{path} has more than {HTML_LIMIT:,} bytes, the most that is read of an HTML file.")
    bs4, _ = _library("bs4", path), _library("lxml", path)
    try:
        # Of lxml, which loads nothing that a page refers to: the time of Python's own parser grows with the square of
        # what is left open. A declared encoding is believed.
        soup = bs4.BeautifulSoup(data, "lxml")
    except (RecursionError, bs4.exceptions.ParserRejectedMarkup) as error:
        raise ValueError(f"{path} is not HTML that can be read: {error}") from error
    text = "".join(_html_parts(bs4, soup))
    lines = (line.rstrip() for line in text.replace("\0", "").split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _html_parts(bs4: Any, soup: Any) -> Iterator[str]:
    """Pieces of the shown text, with the breaks between them. On a stack of its own: a page may nest without end."""
    after = marks = ""  # white space, and the mark of a heading or list item, that are due before the next text
    preformatted = cells = 0
    stack: list[Any] = [soup]
    while stack:
        node = stack.pop()
        if isinstance(node, _End):
            preformatted -= node.name == "pre"
            marks = "" if node.name in (*HEADINGS, "li") else marks
            after = _broken(after, node.name)
        elif isinstance(node, bs4.Tag):
            name = node.name.lower()
            if _is_hidden(node, name):
                continue
            after = _broken(after, name)
            marks = HEADINGS.get(name, "- " if name == "li" else marks)
            preformatted += name == "pre"
            cells = 0 if name == "tr" else cells + (name in ("td", "th"))
            if name in ("td", "th") and cells > 1 and "\n" not in after:
                after = " | "
            stack += [_End(name), *reversed(node.contents)]
        elif type(node) is bs4.NavigableString:  # comments and declarations are subclasses of it
            text, end = str(node), ""
            if not preformatted:
                after = after or " " * text[:1].isspace()
                text, end = " ".join(text.split()), " " * text[-1:].isspace()
            if text:
                yield f"{after}{marks}{text}"
                after, marks = end, ""


@dataclass(frozen=True)
class _End:
    """Where an element ends."""

    name: str


def _is_hidden(tag: Any, name: str) -> bool:
    attributes = tag.attrs or {}
    return name in HIDDEN or "hidden" in attributes or bool(NOT_SHOWN.search(str(attributes.get("style", ""))))


def _broken(after: str, name: str) -> str:
    """White space that is due where an element begins or ends, added to what was."""
    wanted = "\n\n" if name in PARAGRAPHS else "\n" if name in LINES else ""
    return wanted if len(wanted) > after.count("\n") else after
