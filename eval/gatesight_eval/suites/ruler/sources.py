"""What generated prompts are made of: prose, question sets and word lists, read from files of the user."""

import gzip
import hashlib
import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

FilePath = str | os.PathLike[str]


def split_sentences(text: str) -> list[str]:
    """Sentences by their final `.`, `!` or `?` and the white space after it. Needs no data and is the same anywhere."""
    return re.split(r"(?<=[.!?])\s+", text)


@dataclass(frozen=True)
class Sources:
    """Files to generate from; each task asks only for what it needs. Nothing is downloaded.

    Attributes:
        haystack: Prose for the essay tasks: `.txt`, RULER's `PaulGrahamEssays.json` (`{"text": …}`), or either with
            `.gz`. The essays have no open licence; English prose in the public domain is, for example, the Jargon File
            of Debian's `jargon-text`: `apt-get download jargon-text && dpkg-deb -x jargon-text_*.deb .`, then
            `usr/share/doc/jargon-text/jargon.txt.gz`.
        squad: SQuAD v2 JSON (`dev-v2.0.json`), for `qa_1`.
        hotpotqa: HotpotQA distractor JSON (`hotpot_dev_distractor_v1.json`), for `qa_2`.
        english_words: More words for `cwe` beyond wonderwords' 8,166, from about 128K tokens on: RULER's
            `english_words.json`, or text with one word per line.
        sentences: Splits prose where needles may go. RULER uses NLTK's `sent_tokenize` with Punkt: give that for the
            official bytes.
    """

    haystack: FilePath | None = None
    squad: FilePath | None = None
    hotpotqa: FilePath | None = None
    english_words: FilePath | None = None
    sentences: Callable[[str], list[str]] = split_sentences

    def path(self, name: str, task: str) -> Path:
        """The file of that field.

        Raises:
            ValueError: It is not given.
            FileNotFoundError: It does not exist.
        """
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"{task} needs Sources({name}=<file>); see the docstring of Sources for where to get it.")
        path = Path(value)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: Sources.{name} of {task} is no file.")
        return path


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_text(path: Path) -> str:
    """A file's UTF-8 text, unpacked where its name ends in `.gz`.

    Raises:
        ValueError: It is not UTF-8.
    """
    raw = path.read_bytes()
    try:
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error}).") from error


def read_json(path: Path) -> Any:
    """A file's JSON.

    Raises:
        ValueError: It is none; names the file and the line.
    """
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: no JSON ({error.msg}).") from error


def read_haystack(path: Path) -> list[str]:
    """Words of a prose file.

    Raises:
        ValueError: A JSON file without `text`, or no prose in it.
    """
    if ".json" in path.suffixes:
        data = read_json(path)
        if not isinstance(data, dict) or not isinstance(data.get("text"), str):
            raise ValueError(f'{path}: expected {{"text": "…"}}, as RULER\'s PaulGrahamEssays.json has.')
        text = data["text"]
    else:
        text = read_text(path)
    if not text.strip():
        raise ValueError(f"{path}: no prose in it.")
    return re.sub(r"\s+", " ", text).split(" ")


@dataclass(frozen=True)
class QuestionOnDocuments:
    """A question; documents by their index: `given` always come with it, `related` first of the others."""

    text: str
    answers: tuple[str, ...]
    given: tuple[int, ...]
    related: tuple[int, ...]
    gold: tuple[int, ...]


@dataclass(frozen=True)
class QuestionSet:
    documents: list[str]
    questions: list[QuestionOnDocuments]


def read_squad(path: Path) -> QuestionSet:
    """Answerable questions of a SQuAD v2 file, in its order, and all of its paragraphs, sorted.

    Raises:
        ValueError: Not that schema.
    """
    data = read_json(path)
    try:
        articles = [article["paragraphs"] for article in data["data"]]
        documents = sorted({paragraph["context"] for article in articles for paragraph in article})
        index = {document: i for i, document in enumerate(documents)}
        questions = []
        for article in articles:
            numbers = [index[paragraph["context"]] for paragraph in article]
            for paragraph, own in zip(article, numbers, strict=True):
                related = tuple(number for number in numbers if number != own)
                for qa in paragraph["qas"]:
                    if not qa["is_impossible"]:
                        answers = tuple(answer["text"] for answer in qa["answers"])
                        questions.append(QuestionOnDocuments(qa["question"], answers, (own,), related, (own,)))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: not in SQuAD v2's schema, {error!r}; `qa_1` reads dev-v2.0.json.") from error
    return _checked(path, QuestionSet(documents, questions))


def read_hotpotqa(path: Path) -> QuestionSet:
    """Questions of a HotpotQA distractor file and all of its paragraphs, sorted, each below its title.

    Raises:
        ValueError: Not that schema.
    """
    data = read_json(path)
    try:
        paragraphs = [[(title, f"{title}\n{''.join(parts)}") for title, parts in row["context"]] for row in data]
        documents = sorted({document for row in paragraphs for _, document in row})
        index = {document: i for i, document in enumerate(documents)}
        questions = []
        for row, own in zip(data, paragraphs, strict=True):
            gold_titles = {title for title, _ in row["supporting_facts"]}
            given = tuple(index[document] for _, document in own)
            gold = tuple(index[document] for title, document in own if title in gold_titles)
            questions.append(QuestionOnDocuments(row["question"], (row["answer"],), given, (), gold))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: not in HotpotQA's schema, {error!r}; `qa_2` reads hotpot_dev_distractor_v1.json."
        ) from error
    return _checked(path, QuestionSet(documents, questions))


def _checked(path: Path, questions: QuestionSet) -> QuestionSet:
    if not questions.questions:
        raise ValueError(f"{path}: no answerable question in it.")
    return questions


@cache
def word_list(name: str) -> tuple[str, ...]:
    """Wonderwords' `noun`, `adjective` or `verb` list, in its order.

    Raises:
        ImportError: wonderwords is missing, or keeps its lists elsewhere than version 3 does.
    """
    try:
        text = (resources.files("wonderwords") / "assets" / f"{name}list.txt").read_text(encoding="utf-8")
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise ImportError(
            "RULER draws its keys and word lists from wonderwords 3: pip install 'gatesight-hf[eval]'"
        ) from error
    return tuple(line.rstrip() for line in text.splitlines())


def common_words() -> list[str]:
    """All of wonderwords, sorted, each word once."""
    return sorted({word for name in ("noun", "adjective", "verb") for word in word_list(name)})


def read_english_words(path: Path) -> list[str]:
    """Words of `english_words.json` (the values of its object) or of a text file with one per line."""
    if ".json" in path.suffixes:
        return list(read_json(path).values())
    return [word for line in read_text(path).splitlines() if (word := line.strip())]


class CompoundWords:
    """`sorted({f"{adjective}-{noun}" …})` without its six million strings: a compound is built when it is asked for.

    Compounds of one adjective stand together, except where its `adjective-` begins another's ("old", "old-fashioned"):
    such adjectives share a block that is written out and sorted.
    """

    def __init__(self, adjectives: Sequence[str], nouns: Sequence[str]) -> None:
        self._nouns = sorted(set(nouns))
        groups: list[list[str]] = []
        for prefix in sorted({f"{adjective}-" for adjective in adjectives}):
            if groups and prefix.startswith(groups[-1][0]):
                groups[-1].append(prefix)
            else:
                groups.append([prefix])
        self._blocks: list[tuple[int, str, list[str]]] = []
        self._length = 0
        for group in groups:
            head, tails = (group[0], self._nouns) if len(group) == 1 else ("", self._written_out(group))
            self._blocks.append((self._length, head, tails))
            self._length += len(tails)

    def _written_out(self, prefixes: list[str]) -> list[str]:
        return sorted({prefix + noun for prefix in prefixes for noun in self._nouns})

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> str:
        index = range(self._length)[index]
        start, head, tails = self._blocks[bisect_right(self._blocks, index, key=lambda block: block[0]) - 1]
        return head + tails[index - start]


@cache
def compound_words() -> CompoundWords:
    """The adjective-noun compounds that needle keys are drawn from."""
    return CompoundWords(word_list("adjective"), word_list("noun"))
