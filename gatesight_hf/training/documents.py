"""Texts to collect on, from files, from `datasets`, or generated for the reference model; one in memory at a time."""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gatesight_kernels.checks import described

from ..reference import documents as reference_documents

#: The shortest text worth a document, as a share of the asked length.
SHORTEST_SHARE = 0.25
#: Files that hold documents.
KINDS = (".txt", ".jsonl")
#: Rows that a streamed data set is shuffled within.
SHUFFLED_ROWS = 10_000
#: What `datasets` reads files of these kinds with.
BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}


def read_texts(paths: Sequence[Path], seed: int | None = None) -> Iterator[str]:
    """Texts of `.txt` files (one each) and `.jsonl` files (key `text` of each line); folders are searched for both.

    Args:
        paths: Files and folders.
        seed: Of their order, drawn over all texts, of which only the places are in memory; None is that of the files.

    Raises:
        FileNotFoundError: A path does not exist.
        ValueError: A file of another kind, or a line without `text`.
    """
    if not isinstance(paths, (list, tuple)):
        raise ValueError(f"paths must be a list of paths, got {described(paths)}.")
    places: Iterable[tuple[Path, int, int]] = (place for path in map(Path, paths) for place in _places(path))
    if seed is not None:
        found = list(places)
        places = random.Random(seed).sample(found, len(found))
    for path, number, offset in places:
        try:
            if number:
                with path.open("rb") as lines:
                    lines.seek(offset)
                    yield _text(lines.readline())
            else:
                yield path.read_text(encoding="utf-8")
        except ValueError as error:
            where = f"{path}, line {number}" if number else str(path)
            raise ValueError(f"{where}: {error}.") from error


def _places(path: Path) -> Iterator[tuple[Path, int, int]]:
    """File, line (0 for the whole file) and offset of each text."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder.")
    if path.is_dir():
        for inside in sorted(p for p in path.rglob("*") if p.suffix in KINDS):
            yield from _places(inside)
    elif path.suffix == ".txt":
        yield path, 0, 0
    elif path.suffix == ".jsonl":
        with path.open("rb") as lines:
            offset = 0
            for number, line in enumerate(lines, 1):
                yield path, number, offset
                offset += len(line)
    else:
        raise ValueError(f"{path}: documents are .txt or .jsonl files, or folders of them.")


def _text(line: bytes) -> str:
    row = json.loads(line.decode("utf-8"))
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise ValueError("expected an object with a string 'text'")
    return row["text"]


def dataset_texts(source: str, split: str = "train", column: str = "text", seed: int | None = None) -> Iterator[str]:
    """Texts of a data set, streamed: nothing is downloaded ahead, and no copy is made.

    Args:
        source: `NAME` or `NAME:CONFIG` on the Hub; or a folder, or a JSON, Parquet, Arrow or CSV file, of this machine.
        split: Of the data set.
        column: That holds the texts.
        seed: Of their order; where rows are streamed, they are drawn from the next `SHUFFLED_ROWS`. None is the set's.

    Raises:
        RuntimeError: The package `datasets` is missing.
        FileNotFoundError: No such data set.
        ValueError: No such configuration, split or column, a file of another kind, or a column that holds no texts.
    """
    rows = _rows(source, split)
    if seed is not None:
        streamed = not hasattr(rows, "__len__")
        rows = rows.shuffle(seed=seed, **({"buffer_size": SHUFFLED_ROWS} if streamed else {}))
    for number, row in enumerate(rows):
        if column not in row:
            raise ValueError(f"--dataset {source}: no column {column!r}; there are {', '.join(map(repr, row))}.")
        if not isinstance(row[column], str):
            kind = type(row[column]).__name__
            raise ValueError(f"--dataset {source}: row {number} of column {column!r} holds no text but {kind}.")
        yield row[column]


def _rows(source: str, split: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise RuntimeError('--dataset needs the package datasets: pip install "gatesight-hf[train]".') from error
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix not in BUILDERS:
            raise ValueError(f"--dataset {source}: files are {', '.join(BUILDERS)}; texts are for --documents.")
        return datasets.load_dataset(BUILDERS[path.suffix], data_files={split: str(path)}, split=split, streaming=True)
    if path.is_dir() and any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
        # As `save_to_disk` leaves it; mapped into memory.
        saved = datasets.load_from_disk(str(path))
        if isinstance(saved, datasets.Dataset):
            return saved
        if split not in saved:
            raise ValueError(f"--dataset {source}: no split {split!r}; there are {', '.join(map(repr, saved))}.")
        return saved[split]
    name, _, config = (str(path), "", "") if path.is_dir() else source.partition(":")
    return datasets.load_dataset(name, config or None, split=split, streaming=True)


def reference_texts(length: int, seed: int) -> Iterator[str]:
    """Endless documents of the reference model's tasks, `length` tokens each: few facts, many, or nothing else."""
    rng = random.Random(f"estimator-documents-{seed}")
    while True:
        kind = rng.random()
        if kind < 0.6:
            document = reference_documents.needles(
                rng, length, rng.choice([1, 2, 4, 8, 16, 24]), short=rng.random() < 0.2, repeated=rng.random() < 0.15
            )
        elif kind < 0.75:
            document = reference_documents.needles(rng, length, length // reference_documents.SHORT_NEEDLE, short=True)
        else:
            task = rng.choice(["niah_multivalue", "vt", "qa"])
            document = reference_documents.TASKS[task](rng, length)
        yield document.text


def tokenized(texts: Iterator[str], tokenizer: Any, length: int) -> Iterator[list[int]]:
    """Ids of each text, cut to `length`; too short ones and repeated ones are left out."""
    seen: set[bytes] = set()
    for text in texts:
        ids = tokenizer(text).input_ids[:length]
        digest = hashlib.sha256(str(ids).encode()).digest()
        if len(ids) >= SHORTEST_SHARE * length and digest not in seen:
            seen.add(digest)
            yield ids
