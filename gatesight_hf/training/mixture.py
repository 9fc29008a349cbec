"""Several corpora in one training set: who gives how many documents, in which order, and where each came from.

The GateSight paper trains on a mix of corpora and does not say how it was drawn. Here each source gives a fixed share
of the documents, by weight, in an order drawn by seed; at least one to fit on and one to measure on.
"""

import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..compaction.budget import spread
from .documents import KINDS, dataset_texts, read_texts

_NAMED = re.compile(r"([A-Za-z0-9][\w.-]*)(?::([^=:/\\]*))?=(.+)", re.DOTALL)


@dataclass(frozen=True)
class Source:
    """One corpus.

    Attributes:
        name: In tables.
        weight: Its share of the documents, relative to other sources.
        place: What was given: a data set, or files and folders.
        files: The latter; empty for a data set.
    """

    name: str
    weight: float
    place: str
    files: tuple[Path, ...] = ()

    def texts(self, seed: int, split: str, column: str) -> Iterator[str]:
        """All of them, in an order drawn by `seed`; `split` and `column` are for data sets."""
        return read_texts(list(self.files), seed) if self.files else dataset_texts(self.place, split, column, seed)


def sources_of(documents: Sequence[str], datasets: Sequence[str]) -> list[Source]:
    """The corpora of `--documents` and `--dataset`.

    Each is `PLACE`, `NAME=PLACE` or `NAME:WEIGHT=PLACE`. A folder with a name is one corpus. Without one, each folder
    and each `.jsonl` file in it is, and so are its `.txt` files together.

    Raises:
        FileNotFoundError: No such file or folder.
        ValueError: A weight that is no number above 0, or a name given twice.
    """
    found: list[Source] = []
    for given in documents:
        name, weight, place = _parsed(given)
        path = Path(place)
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file or folder.")
        corpora = {name: (path,)} if name or not path.is_dir() else _corpora(path)
        found += [Source(of or path.resolve().stem, weight, place, files) for of, files in corpora.items()]
    for given in datasets:
        name, weight, place = _parsed(given)
        found.append(Source(name or place.rstrip("/").rpartition("/")[2], weight, place))
    names = [source.name for source in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"Two sources of documents are called {twice!r}: give them names, NAME=PLACE.")
    return found


def _parsed(given: str) -> tuple[str, float, str]:
    match = None if Path(given).exists() else _NAMED.fullmatch(given)
    if match is None:
        return "", 1.0, given
    try:
        weight = 1.0 if match[2] is None else float(match[2])
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise ValueError(f"{given}: the weight must be a number above 0, as in NAME:2=PLACE, got {match[2]!r}.")
    return match[1], weight, match[3]


def _corpora(folder: Path) -> dict[str, tuple[Path, ...]]:
    """By name, what in a folder is a corpus; the folder itself, under no name, if there is one at most."""
    inside = sorted(folder.iterdir())
    corpora = {
        path.stem if path.is_file() else path.name: (path,)
        for path in inside
        if path.suffix == ".jsonl" or (path.is_dir() and any(p.suffix in KINDS for p in path.rglob("*")))
    }
    loose = tuple(path for path in inside if path.is_file() and path.suffix == ".txt")
    if len(corpora) + bool(loose) < 2:
        return {"": (folder,)}
    return corpora | ({folder.resolve().name: loose} if loose else {})


def drawn_order(sources: Sequence[Source], count: int, seed: int) -> list[str]:
    """The name of the source of each of `count` documents: exact shares by weight, at least one each, shuffled.

    Raises:
        ValueError: Fewer documents than sources.
    """
    if count < len(sources):
        raise ValueError(
            f"{count} documents cannot come from {len(sources)} sources: ask for more (--train-documents, "
            "--eval-documents), or make one source of a folder by a name, --documents NAME=FOLDER."
        )
    shares = spread(count, [source.weight for source in sources], count)
    order = [source.name for source, share in zip(sources, shares, strict=True) for _ in range(share)]
    random.Random(seed).shuffle(order)
    return order


def mixed(
    streams: Mapping[str, Iterator[list[int]]], order: Sequence[str], least: int, kind: str
) -> Iterator[list[int]]:
    """The next document of each source in turn.

    Args:
        streams: Ids of documents by source.
        order: See `drawn_order`.
        least, kind: Shortest document and what they are for, for the message.

    Raises:
        ValueError: A source has too few documents.
    """
    for k, name in enumerate(order):
        ids = next(streams[name], None)
        if ids is None:
            raise ValueError(
                f"Only {order[:k].count(name)} different documents of at least {least} tokens were found in {name} "
                f"for {kind}, {order.count(name)} are asked for: give more or longer texts, lower --train-documents, "
                "--eval-documents or --length, or give this source a lower weight, NAME:WEIGHT=PLACE."
            )
        yield ids
