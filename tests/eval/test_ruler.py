"""RULER: prompts are those of its own scripts, cut where the question begins; loaders read what others made."""

import gzip
import hashlib
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from gatesight_eval.suites.items import Item
from gatesight_eval.suites.ruler import TASKS, Sources, generate, load_kvpress
from gatesight_eval.suites.ruler.sources import CompoundWords, read_haystack, word_list

from ..helpers.ruler import OFFICIAL, RULER, SOURCES, WORDS, make, prompt

NEEDLE_TASKS = [name for name in TASKS if name.startswith("niah")]
ESSAY_TASKS = [name for name in NEEDLE_TASKS if name not in ("niah_single_1", "niah_multikey_2", "niah_multikey_3")]
#: Least of 512, 1,024 and so on that a task can do with.
LEAST = dict.fromkeys(TASKS, 512) | {"vt": 1024, "cwe": 1024}


@pytest.mark.skipif(version("wonderwords") != OFFICIAL["wonderwords"], reason="other lists of words")
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [1536, 4096])
def test_rows_are_those_of_rulers_scripts(task: str, length: int) -> None:
    expected = OFFICIAL["rows"][str(length)][task]
    rows = []
    for item in make(task, length, len(expected)):
        question = item.questions[0]
        row = [item.context + question.text, question.answer_prefix, question.references, item.details["length"]]
        rows.append(hashlib.sha256(json.dumps(row).encode()).hexdigest())
    assert rows == expected


@pytest.mark.parametrize("task", TASKS)
def test_lengths_are_filled_and_kept(task: str) -> None:
    for length in {LEAST[task], 1024, 2048, 4096}:
        for variants in ([], ["filled"]):
            lengths = []
            for item in make(task, length, 6, variants=variants):
                lengths.append(len(WORDS.encode(prompt(item))) + item.questions[0].max_new_tokens)
                assert lengths[-1] == item.details["length"] <= length
            assert max(lengths) > 0.8 * length
            assert not variants or min(lengths) > 0.8 * length, "documents are the coarsest unit"


def test_rulers_own_items_lose_much_when_a_little_too_long() -> None:
    lengths = [item.details["length"] for item in make("niah_multikey_1", 2048, 12)]
    assert min(lengths) < 2048 - 400 < max(lengths)


@pytest.mark.parametrize("task", ["niah_single_3", "niah_multikey_1", "niah_multikey_3", "vt", "cwe", "fwe", "qa_1"])
def test_any_tokenizer(task: str, subwords: Tokenizer) -> None:
    def plain(text: str) -> list[int]:
        ids: list[int] = subwords.encode(text, add_special_tokens=False).ids
        return ids

    fast = PreTrainedTokenizerFast(tokenizer_object=subwords, bos_token="<s>")

    class Callable:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": plain(text)}

    by_encode, by_fast, by_call = (
        list(generate(task, tokenizer, 2048, 2, sources=SOURCES)) for tokenizer in (subwords, fast, Callable())
    )
    for item in by_encode:
        tokens = len(plain(prompt(item))) + item.questions[0].max_new_tokens
        assert tokens == item.details["length"], "special tokens do not count"
        assert 1000 < tokens <= 2048
    assert [prompt(item) for item in by_encode] == [prompt(item) for item in by_fast]
    assert [prompt(item) for item in by_encode] == [prompt(item) for item in by_call]
    assert prompt(by_encode[0]) != prompt(make(task, 2048, 1)[0])


@pytest.fixture(scope="module")
def subwords() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    tokenizer.train([str(RULER / "prose.txt")], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


@pytest.mark.parametrize("task", TASKS)
def test_a_run_is_the_begin_of_a_longer_one(task: str) -> None:
    long = make(task, count=5)
    assert make(task, count=2) == long[:2]
    assert len({item.id for item in long}) == 5
    assert len({item.context + item.questions[0].text for item in long}) == 5
    assert [prompt(item) for item in make(task, count=5, seed=7)] != [prompt(item) for item in long]


@pytest.mark.parametrize("task", TASKS)
def test_items_say_what_they_are(task: str) -> None:
    (item,) = make(task, count=1)
    spec, question = TASKS[task], item.questions[0]
    assert (item.benchmark, item.task, item.family) == ("ruler", task, spec.family)
    assert (question.metric, question.max_new_tokens) == (spec.metric, spec.max_new_tokens)
    assert item.details["leak"] is (task in ("vt", "cwe", "fwe"))
    assert item.details["variants"] == []
    assert (item.details["seed"], item.details["max_length"], item.details["tokenizer"]) == (42, 1024, "Words")
    files = {"qa_1": "squad.json", "qa_2": "hotpotqa.json"} | dict.fromkeys(ESSAY_TASKS, "prose.txt")
    hashes = {
        entry["file"]: entry["sha256"] == hashlib.sha256((RULER / entry["file"]).read_bytes()).hexdigest()
        for entry in item.details["sources"].values()
    }
    assert hashes == ({files[task]: True} if task in files else {})
    assert ("wonderwords" in item.details) == (task in NEEDLE_TASKS or task == "cwe")
    assert json.loads(json.dumps(dict(item.details))) == item.details


@pytest.mark.parametrize("task", NEEDLE_TASKS)
def test_needles(task: str) -> None:
    settings = TASKS[task].needles
    assert settings is not None
    value = {"numbers": r"\d{7}", "uuids": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}"}
    for item in make(task):
        question = item.questions[0]
        preamble = item.context.splitlines()[0]
        needles = re.findall(r"One of the special magic (\w+) for ([^:]+) is: (\S+)\.(?=\s)", item.context)
        assert {kind for kind, _, _ in needles} == {settings.value_type}
        asked = [key for _, key, found in needles if found in question.references]
        assert len(set(asked)) == settings.queries
        assert Counter(asked) == dict.fromkeys(asked, settings.values)
        assert len(question.references) == settings.queries * settings.values
        assert all(re.fullmatch(value[settings.value_type], reference) for reference in question.references)
        for key in set(asked):
            assert key in question.text
            assert key in question.answer_prefix
            assert key not in preamble
        keys = {key for _, key, _ in needles}
        if settings.haystack == "needle":
            assert len(keys) == len(needles) > 10
        else:
            assert len(keys) == settings.keys
            assert len(needles) == settings.keys * settings.values
        places = [item.context.index(reference) / len(item.context) for reference in question.references]
        assert question.depth == pytest.approx(sum(places) / len(places), abs=0.01)


def test_needle_wordings_are_singular_for_one_answer() -> None:
    single, several = make("niah_single_3")[0], make("niah_multiquery")[0]
    assert single.context.startswith("A special magic uuid is hidden within the following text. Make sure to memorize")
    assert re.fullmatch(
        r"What is the special magic uuid for \S+ mentioned in the provided text\?", single.questions[0].text
    )
    assert re.fullmatch(r" The special magic uuid for \S+ mentioned .* text is", single.questions[0].answer_prefix)
    assert several.context.startswith("Some special magic numbers are hidden within the following text.")
    keys = r"\S+, \S+, \S+, and \S+"
    assert re.search(f"What are all the special magic numbers for {keys} mentioned", several.questions[0].text)


def test_variable_tracking() -> None:
    items = make("vt", 2048, 4)
    shown = set()
    for item in items:
        question = item.questions[0]
        names = question.references
        example, main = item.context.split("\n\n\n", 1) if "\n\n\n" in item.context else item.context.rsplit("\n\nM", 1)
        (given,) = re.findall(r"value (\d+) in", question.text)
        lines = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", main)
        assert lines == [(names[0], given), *((new, old) for old, new in pairwise(names))]
        assert all(len(name) == 5 for name in names)
        assert question.answer_prefix.endswith(f"5 variables are assigned the value {given}, they are: ")

        (example_value,) = re.findall(r"assigned the value (\d+) in the text above", example)
        answer = example.split("they are: ")[1].split()
        assert example_value != given
        assert [new for new, _ in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", example)] == answer
        assert len(answer) == 5
        shown.add(example)
        places = [item.context.index(f"VAR {name} = ") / len(item.context) for name in names]
        assert question.depth == pytest.approx(sum(places) / 5, abs=1e-9)
    assert len(shown) == len(items)


@pytest.mark.parametrize(("length", "repeats"), [(2048, (6, 1, 3, 1)), (4096, (30, 3, 10, 3))])
def test_common_words(length: int, repeats: tuple[int, int, int, int]) -> None:
    for item in make("cwe", length, 2):
        example, main = item.context.split("Below is a numbered list of words.")[1:]
        for text, answers, common, other in (
            (main, item.questions[0].references, *repeats[:2]),
            (
                example.split("Question:")[0],
                re.findall(r"\d+\. (.+?)(?= \d+\.|\n)", example.split("are:")[1]),
                *repeats[2:],
            ),
        ):
            assert len(answers) == 10
            counts = Counter(re.findall(r"\d+\. (.+?)(?= \d+\.|\n)", text.split("most often.\n")[1]))
            assert {counts.pop(word) for word in answers} == {common}
            assert set(counts.values()) == {other}
        assert item.questions[0].depth is None


def test_frequent_words() -> None:
    for item in make("fwe", 2048, 3):
        counts = Counter(item.context.split("coded words. ")[1].split())
        (dots, _), *ranked = counts.most_common()
        assert dots == "..."
        assert tuple(word for word, _ in ranked[:3]) == item.questions[0].references
        assert ranked[2][1] > ranked[3][1]
        assert ranked[0][1] == pytest.approx(counts["..."] / 4, abs=1)
        assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked)


def test_questions_on_documents() -> None:
    squad = json.loads((RULER / "squad.json").read_text())["data"]
    paragraph = {qa["question"]: p["context"] for article in squad for p in article["paragraphs"] for qa in p["qas"]}
    hotpotqa = json.loads((RULER / "hotpotqa.json").read_text())
    titles = {row["question"]: [f"{title}\n" for title, _ in row["supporting_facts"]] for row in hotpotqa}
    for item in make("qa_1", 1024, 6) + make("qa_2", 1024, 6):
        question, context = item.questions[0], item.context
        instruction, text = question.text.split("\n\nQuestion: ")
        assert instruction.startswith("Answer the question based on the given documents.")
        numbers = [int(number) for number in re.findall(r"^Document (\d+):$", context, re.MULTILINE)]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) >= 10
        gold = [paragraph[text]] if item.task == "qa_1" else titles[text]
        places = [context.index(f":\n{begin}") / len(context) for begin in gold]
        assert question.depth == pytest.approx(sum(places) / len(places), abs=0.005)
        assert question.references[0] in context or question.references[0] in ("yes", "no")


def test_shuffled_documents_put_the_gold_one_anywhere() -> None:
    def places(**options: Any) -> dict[int, set[int]]:
        """Number of documents to the places of the gold one."""
        found: dict[int, set[int]] = {}
        for item in make("qa_1", 1024, 20, **options):
            depth = item.questions[0].depth
            assert depth is not None
            place = item.context[: int(depth * len(item.context) + 0.5)].count("\nDocument ")
            found.setdefault(item.context.count("\nDocument "), set()).add(place)
        return found

    assert {len(found) for found in places().values()} == {1}, "RULER's order depends on the number of documents alone"
    assert max(len(found) for found in places(variants=["qa_shuffled"]).values()) > 5
    item, usual = make("qa_1", variants=["qa_shuffled"])[0], make("qa_1")[0]
    assert item.details["variants"] == ["qa_shuffled"]
    assert item.questions[0].text == usual.questions[0].text


def test_sampled_questions_come_from_all_articles() -> None:
    data = json.loads((RULER / "squad.json").read_text())["data"]
    article = {q["question"]: entry["title"] for entry in data for p in entry["paragraphs"] for q in p["qas"]}

    def articles(items: list[Item]) -> set[str]:
        return {article[item.questions[0].text.split("Question: ")[1]] for item in items}

    assert len(articles(make("qa_1", 1024, 12))) == 2
    assert len(articles(make("qa_1", 1024, 12, variants=["qa_sampled"]))) > 4


def test_essays_begin_anywhere_with_an_offset() -> None:
    usual = make("niah_multivalue", 1024, 6)
    moved = make("niah_multivalue", 1024, 6, variants=["essay_offset", "qa_shuffled"])
    # A needle may come first, so that the prose's begin is what stands behind it.
    begins = [re.sub(r"One of the special .+? is: \d+\. ", "", item.context).split("\n")[1][:40] for item in moved]
    assert len(set(begins)) == 6
    assert moved[0].details["variants"] == ["essay_offset"], "those of other tasks are not applied, nor named"
    assert {re.sub(r"One of the special .+? is: \d+\. ", "", i.context).split("\n")[1].strip()[:40] for i in usual} == {
        "There are some standard methods of jargo"
    }


@pytest.mark.parametrize("task", ["vt", "cwe", "fwe"])
def test_a_hidden_task_leaves_only_data_in_the_context(task: str) -> None:
    for item in make(task, 2048, variants=["task_hidden"]):
        assert not re.search("Question|Memorize|frequency|common", item.context)
        assert item.details["leak"] is False
        assert item.details["variants"] == ["task_hidden"]
        assert 1500 < item.details["length"] <= 2048
        assert all(reference in item.context for reference in item.questions[0].references)


def test_prose_files(tmp_path: Path) -> None:
    text = "One two.\n\n  Three four."
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.json").write_text(json.dumps({"text": text}))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(text.encode()))
    assert [read_haystack(tmp_path / name) for name in ("a.txt", "b.json", "c.txt.gz")] == [
        ["One", "two.", "Three", "four."]
    ] * 3
    short = replace(SOURCES, haystack=tmp_path / "a.txt")
    assert make("niah_single_2", 1024, 1, sources=short)[0].context.count("Three four. One two.") > 50


def test_compounds_are_the_sorted_pairs() -> None:
    adjectives, nouns = ["old", "old-fashioned", "ad hoc", "red", "red"], ["zebra", "fashioned-hat", "ex-wife", "axe"]
    compounds = CompoundWords(adjectives, nouns)
    assert list(compounds) == sorted({f"{adjective}-{noun}" for adjective in adjectives for noun in nouns})
    assert len(compounds) == 16
    assert compounds[-1] == "red-zebra"
    assert len(word_list("noun")) > 1000


def test_own_sentence_splitter_is_used_and_named() -> None:
    def whole(text: str) -> list[str]:
        return [text]

    (item,) = make("niah_single_2", count=1, sources=replace(SOURCES, sentences=whole))
    assert item.questions[0].depth is not None
    assert item.questions[0].depth < 0.15 or item.questions[0].depth > 0.95
    assert item.details["sentences"].endswith("whole")


@pytest.mark.parametrize(
    ("task", "length", "message"),
    [
        ("niah_single_1", 100, "has to exceed the 128"),
        ("niah_single_1", 190, "niah_single_1 does not fit into a length of 190"),
        ("niah_single_2", 190, "niah_single_2 does not fit"),
        ("vt", 512, "vt does not fit into a length of 512"),
        ("cwe", 400, "cwe does not fit"),
        ("fwe", 200, "no room for four"),
        ("qa_1", 120, "qa_1 does not fit"),
        ("qa_2", 300, "qa_2 does not fit"),
    ],
)
def test_too_short_lengths_end_with_an_error(task: str, length: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(task, length)


def test_tokenizers_of_short_tokens_end_with_an_error() -> None:
    class Characters:
        def encode(self, text: str) -> list[str]:
            return list(text)

    with pytest.raises(ValueError, match="one-shot example of vt"):
        generate("vt", Characters(), 8192, 1)
    with pytest.raises(ValueError, match="no more frequent"):
        next(generate("fwe", Characters(), 650, 1))
    assert next(generate("fwe", Characters(), 1200, 1)).details["length"] > 1100


def test_misuse_ends_at_the_call(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'niah' is no RULER task; take one of niah_single_1"):
        generate("niah", WORDS, 1024, 1)
    with pytest.raises(ValueError, match="No RULER variant 'shuffled'"):
        generate("qa_1", WORDS, 1024, 1, sources=SOURCES, variants=["shuffled"])
    with pytest.raises(ValueError, match="count is 0"):
        generate("vt", WORDS, 2048, 0)
    with pytest.raises(ValueError, match=r"niah_single_2 needs Sources\(haystack=<file>\)"):
        generate("niah_single_2", WORDS, 1024, 1)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        generate("qa_1", WORDS, 1024, 1, sources=Sources(squad=tmp_path / "nowhere.json"))
    with pytest.raises(ValueError, match="60 answerable questions"):
        generate("qa_1", WORDS, 1024, 61, sources=SOURCES)
    with pytest.raises(ValueError, match="SQuAD v2's schema"):
        generate("qa_1", WORDS, 1024, 1, sources=Sources(squad=RULER / "hotpotqa.json"))
    with pytest.raises(ValueError, match="HotpotQA's schema"):
        generate("qa_2", WORDS, 1024, 1, sources=Sources(hotpotqa=RULER / "squad.json"))
    with pytest.raises(TypeError, match="int is no tokenizer"):
        generate("vt", 3, 2048, 1)
    (tmp_path / "broken.json").write_text('{"text":\n oh}')
    with pytest.raises(ValueError, match=r"broken\.json, line 2: no JSON"):
        generate("niah_single_2", WORDS, 1024, 1, sources=Sources(haystack=tmp_path / "broken.json"))
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match="PaulGrahamEssays"):
        generate("niah_single_2", WORDS, 1024, 1, sources=Sources(haystack=tmp_path / "list.json"))
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ValueError, match="no prose"):
        generate("niah_single_2", WORDS, 1024, 1, sources=Sources(haystack=tmp_path / "empty.txt"))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match="not UTF-8"):
        generate("niah_single_2", WORDS, 1024, 1, sources=Sources(haystack=tmp_path / "latin.txt"))


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    word_list.cache_clear()
    with pytest.raises(ImportError, match=r"wonderwords 3: pip install 'gatesight-hf\[eval\]'"):
        generate("cwe", WORDS, 2048, 1)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"needs datasets: pip install 'gatesight-hf\[eval\]'"):
        load_kvpress("rows.jsonl")


def test_long_word_lists_need_more_words(tmp_path: Path) -> None:
    class Coarse:
        def encode(self, text: str) -> range:
            return range(len(text) // 60)

    with pytest.raises(ValueError, match="english_words"):
        generate("cwe", Coarse(), 4000, 1)
    words = [f"w{i}" for i in range(50_000)]
    (tmp_path / "words.txt").write_text("\n".join(words))
    (tmp_path / "words.json").write_text(json.dumps(dict(enumerate(words))))
    contexts = [
        next(generate("cwe", Coarse(), 4000, 1, sources=Sources(english_words=tmp_path / name))).context
        for name in ("words.txt", "words.json")
    ]
    assert contexts[0] == contexts[1]
    assert len(set(re.findall(r"w\d+", contexts[0]))) > 8166
