"""SCBench's rows become items with the official prompts, in every schema and from every source."""

import json
from typing import Any

import datasets
import pytest

from gatesight_eval.metrics import SCORERS, score
from gatesight_eval.suites.items import Item
from gatesight_eval.suites.scbench import TASKS, load, load_kvzip, reserved_tokens
from gatesight_eval.suites.scbench.kvzip import CONTEXT_PREFIX, items_from_kvzip_rows
from gatesight_eval.suites.scbench.loading import items_from_rows
from gatesight_eval.suites.scbench.tasks import MF_NEUTRAL_PREFIX

from ..helpers.paths import DATA

pytestmark = pytest.mark.quick

ROWS = DATA / "scbench"
KVZIP = {
    "scbench_choice_eng": {("kvzip_choice_eng", 96)},
    "scbench_kv_tiny": {("kvzip_include", 96)},
    "scbench_many_shot": {("kvzip_many_shot", 96)},
    "scbench_mf_short": {("kvzip_mf", 32)},
    "scbench_repoqa_and_kv_mid": {("kvzip_repoqa", 512), ("kvzip_include", 512)},
    "scbench_summary_with_needles": {("kvzip_summary", 256), ("kvzip_include", 256)},
    "scbench_vt": {("kvzip_vt", 96)},
}


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROWS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def edited(task: str, /, **turn: Any) -> list[dict[str, Any]]:
    """One row with its first turn changed."""
    (row, *_) = rows_of(task)
    return [{**row, "multi_turns": [{**row["multi_turns"][0], **turn}]}]


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("task", TASKS)
def test_a_folder_of_files_gives_items(task, tmp_path):
    items = load(task, ROWS, max_turns=-1, cache_dir=tmp_path)
    rows = rows_of(task)
    assert [item.id for item in items] == [f"{task}-0", f"{task}-1"]
    for item, row in zip(items, rows, strict=True):
        assert (item.benchmark, item.task, item.family) == ("scbench", task, TASKS[task].family)
        assert len(item.questions) == len(row["multi_turns"])
        assert item.details["leak"] == (task == "scbench_mf")
        assert item.details["source"] == str(ROWS)
        json.dumps([item.details, [question.details for question in item.questions]])
        for question, turn in zip(item.questions, row["multi_turns"], strict=True):
            kind = turn.get("task", task)
            answer = TASKS[task].answers[kind]
            assert (question.metric, question.max_new_tokens) == (answer.metric, answer.max_new_tokens)
            assert question.metric in SCORERS
            assert turn["input"] in question.text
            if kind != "scbench_repoqa":  # needs grammars
                right = " ".join(question.references) if kind == "scbench_vt" else question.references[-1]
                assert score(right, question).revised == 1
    assert items == items_from_rows(task, rows, max_turns=-1, origin={"source": str(ROWS), "revision": None})


def test_budgets_and_scorers_are_the_official_ones():
    found = {task: [(a.metric, a.max_new_tokens) for a in spec.answers.values()] for task, spec in TASKS.items()}
    assert found == {
        "scbench_kv": [("kv", 150)],
        "scbench_prefix_suffix": [("kv", 150)],
        "scbench_vt": [("vt", 30)],
        "scbench_repoqa": [("repoqa", 1024)],
        "scbench_qa_eng": [("qa_eng", 40)],
        "scbench_qa_chn": [("qa_chn", 40)],
        "scbench_choice_eng": [("choice_eng", 40)],
        "scbench_many_shot": [("many_shot", 10)],
        "scbench_mf": [("mf", 5)],
        "scbench_summary": [("summary", 200)],
        "scbench_summary_with_needles": [("summary", 800), ("passkey", 15)],
        "scbench_repoqa_and_kv": [("repoqa", 1024), ("kv_in_repoqa_and_kv", 80)],
    }
    assert 262_144 - reserved_tokens("scbench_kv", 5) == 260_394
    assert reserved_tokens("scbench_summary_with_needles", 5) == 815 * 5 // 2 + 1000
    assert items_from_rows("scbench_mf", rows_of("scbench_mf"))[0].details["reserved_tokens"] == 5 * 3 + 1000


def first(task: str, **options: Any) -> tuple[str, str]:
    """Context and first question of a task's first row."""
    item = items_from_rows(task, rows_of(task), **options)[0]
    return item.context, item.questions[0].text


def test_prompts_are_word_for_word():
    row = {task: rows_of(task)[0] for task in TASKS}
    turn = {task: row[task]["multi_turns"][0] for task in TASKS}
    assert first("scbench_kv") == (
        "Extract the value corresponding to the specified key in the JSON object below.\n\n"
        + row["scbench_kv"]["context"],
        turn["scbench_kv"]["input"],
    )
    assert first("scbench_choice_eng") == (
        "Read the book and answer the question.\n\n" + row["scbench_choice_eng"]["context"],
        "Question: What did Mara keep?\nA. A harbour\nB. The lighthouse\nC. Nets\nD. Clocks\n\n"
        "The the correct answer is",
    )
    assert first("scbench_qa_eng") == (
        "Read the book and answer the question. Be very concise in your answer.\n\n" + row["scbench_qa_eng"]["context"],
        "Question: What was the ship called?\nAnswer:",
    )
    assert first("scbench_qa_chn") == (
        "阅读以下书籍然后回答问题。\n\n" + row["scbench_qa_chn"]["context"],
        "问题：守塔人叫什么名字？\n答案：",
    )
    assert first("scbench_repoqa") == (
        "Based on the function description and code context, please retrieve and repeat the exact described function "
        "from the code context in a code block wrapped by ```:\n\n" + row["scbench_repoqa"]["context"],
        turn["scbench_repoqa"]["input"],
    )
    numbers = "[" + ", ".join(map(str, row["scbench_mf"]["context"])) + "]"
    assert first("scbench_mf") == (
        turn["scbench_mf"]["input"] + "\n\n" + numbers,
        "What is the largest number of the list?\n\n" + turn["scbench_mf"]["input"],
    )
    assert first("scbench_vt") == (row["scbench_vt"]["input"], turn["scbench_vt"]["input"])
    plain = ("prefix_suffix", "many_shot", "summary", "summary_with_needles", "repoqa_and_kv")
    for task in (f"scbench_{name}" for name in plain):
        assert first(task) == (row[task]["context"], turn[task]["input"])


def test_the_neutral_variant_does_not_leak_the_question():
    official = items_from_rows("scbench_mf", rows_of("scbench_mf"))[0]
    neutral = items_from_rows("scbench_mf", rows_of("scbench_mf"), variant="neutral_prefix")[0]
    assert official.details["leak"]
    assert official.details["variant"] == "official"
    assert "largest" in official.context
    assert not neutral.details["leak"]
    assert neutral.details["variant"] == "neutral_prefix"
    assert neutral.context.startswith(MF_NEUTRAL_PREFIX + "\n\n[")
    assert not any(word in neutral.context for word in ("largest", "smallest"))
    assert neutral.id != official.id
    assert neutral.questions == official.questions


def test_the_number_of_turns():
    task = "scbench_repoqa_and_kv"
    asked = {n: len(items_from_rows(task, rows_of(task), max_turns=n)[0].questions) for n in (1, 5, -1)}
    assert asked == {1: 1, 5: 5, -1: 8}
    item = items_from_rows(task, rows_of(task))[0]
    assert (len(item.questions), item.details["max_turns"], item.details["turns"]) == (5, 5, 8)
    assert len(items_from_rows(task, rows_of(task), limit=1)) == 1


def needle_names(item: Item, which: str) -> list[str]:
    return [name for name, _ in item.questions[0].details[which]]


def test_needles_are_those_of_the_repository():
    items = items_from_rows("scbench_repoqa", rows_of("scbench_repoqa"), max_turns=2, limit=1)
    assert needle_names(items[0], "evaluated_needles") == ["clamp", "mean"]
    assert needle_names(items[0], "needles") == ["clamp", "mean", "chunks", "flatten", "count_words"]
    details = items[0].questions[1].details
    assert (details["lang"], details["repo"], details["name"]) == ("python", "example/tools", "mean")

    mixed = items_from_rows("scbench_repoqa_and_kv", rows_of("scbench_repoqa_and_kv"), limit=1)[0]
    assert needle_names(mixed, "evaluated_needles") == ["clamp", "mean", "chunks"]
    assert "needles" not in mixed.questions[1].details

    other = [{**row, "repo": f"example/{index}"} for index, row in enumerate(rows_of("scbench_repoqa"))]
    assert needle_names(items_from_rows("scbench_repoqa", other)[0], "needles") == ["clamp", "mean"]


def test_answers_of_every_type():
    def references(name: str, answer: Any) -> tuple[str, ...]:
        return items_from_rows(name, edited(name, answer=answer))[0].questions[0].references

    assert references("scbench_mf", 7) == ("7",)
    assert references("scbench_mf", 7.5) == ("7.5",)
    assert references("scbench_mf", [7, 8]) == ("7", "8")
    assert references("scbench_mf", -7) == ("-7",)
    assert references("scbench_vt", ["A", "B"]) == ("A", "B")
    assert references("scbench_qa_eng", "No") == ("No",)
    assert references("scbench_choice_eng", "Nets") == ("Nets", "C")


def test_both_names_of_the_context_are_read():
    (row, *_) = rows_of("scbench_vt")
    renamed = {"context": row["input"], "multi_turns": row["multi_turns"]}
    assert items_from_rows("scbench_vt", [renamed])[0].context == row["input"]


def test_depth_of_answers_that_stand_in_the_context():
    (row, *_) = rows_of("scbench_prefix_suffix")
    item = items_from_rows("scbench_prefix_suffix", [row])[0]
    for question in item.questions:
        assert question.depth is not None
        assert item.context[round(question.depth * len(item.context)) :].startswith(question.references[0])
    assert (
        items_from_rows("scbench_prefix_suffix", edited("scbench_prefix_suffix", answer="?"))[0].questions[0].depth
        is None
    )
    assert items_from_rows("scbench_summary", rows_of("scbench_summary"))[0].questions[0].depth is None


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_file_is_read(suffix, tmp_path):
    path = ROWS / "scbench_mf.jsonl"
    if suffix == ".parquet":
        path = tmp_path / "any name.parquet"
        datasets.Dataset.from_list(rows_of("scbench_mf")).to_parquet(path)
    items = load("scbench_mf", path, cache_dir=tmp_path)
    assert [item.context for item in items] == [i.context for i in items_from_rows("scbench_mf", rows_of("scbench_mf"))]


@pytest.mark.parametrize(
    ("configuration", "splits", "expected"),
    [
        ("scbench_kv", ("test", "train"), "test"),
        ("scbench_kv", ("train",), "train"),
        ("multi_turn_kv", ("train",), "train"),
    ],
)
def test_a_repository_with_configurations(configuration, splits, expected, tmp_path):
    lines = ["---", "configs:", f"- config_name: {configuration}", "  data_files:"]
    for index, split in enumerate(splits):
        datasets.Dataset.from_list([rows_of("scbench_kv")[index]]).to_parquet(tmp_path / f"{split}.parquet")
        lines += [f"  - split: {split}", f"    path: {split}.parquet"]
    (tmp_path / "README.md").write_text("\n".join([*lines, "---", ""]))
    (item,) = load("scbench_kv", tmp_path, cache_dir=tmp_path / "cache")
    assert item.details["row_id"] == splits.index(expected)


def test_splits_without_test_are_not_guessed(tmp_path):
    lines = ["---", "configs:", "- config_name: scbench_kv", "  data_files:"]
    for split in ("train", "validation"):
        datasets.Dataset.from_list(rows_of("scbench_kv")).to_parquet(tmp_path / f"{split}.parquet")
        lines += [f"  - split: {split}", f"    path: {split}.parquet"]
    (tmp_path / "README.md").write_text("\n".join([*lines, "---", ""]))
    with pytest.raises(ValueError, match="train, validation"):
        load("scbench_kv", tmp_path, cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match=r"no configuration 'scbench_mf'; it has scbench_kv"):
        load("scbench_mf", tmp_path, cache_dir=tmp_path / "cache")


def test_mistakes_are_named(tmp_path):
    with pytest.raises(ValueError, match="no task 'kv'"):
        load("kv", ROWS)
    with pytest.raises(FileNotFoundError, match="owner/name"):
        load("scbench_kv", tmp_path / "missing")
    with pytest.raises(ValueError, match=r"none of \.parquet"):
        load("scbench_kv", ROWS / "README.md")
    for options in ({"max_turns": 0}, {"limit": 0}):
        with pytest.raises(ValueError, match=">= 1"):
            load("scbench_kv", ROWS, **options)
    with pytest.raises(ValueError, match="neutral_prefix"):
        load("scbench_kv", ROWS, variant="neutral_prefix")
    (row, *_) = rows_of("scbench_kv")
    for broken, message in (
        ({**row, "multi_turns": []}, "no turns"),
        ({"context": "text"}, "lacks multi_turns"),
        ({**row, "context": ""}, "no context"),
        ({**row, "multi_turns": [{"input": "Key?"}]}, "lacks answer"),
    ):
        with pytest.raises(ValueError, match=message):
            items_from_rows("scbench_kv", [broken])
    for name, turn, message in (
        ("scbench_choice_eng", {"answer": "Elsewhere"}, "not one of four options"),
        ("scbench_mf", {"input": "largest?"}, "The … is"),
        ("scbench_summary_with_needles", {"task": "scbench_kv"}, "'scbench_kv', not one of"),
        ("scbench_repoqa", {"name": None}, "lacks name"),
    ):
        with pytest.raises(ValueError, match=message):
            items_from_rows(name, edited(name, **turn))


@pytest.mark.parametrize(("task", "answers"), KVZIP.items())
def test_kvzip_form(task, answers, tmp_path):
    items = load_kvzip(task, ROWS / "kvzip", cache_dir=tmp_path)
    rows = rows_of(f"kvzip/{task}")
    for index, (item, row) in enumerate(zip(items, rows, strict=True)):
        assert item.id == f"kvzip-{task}-{index}"
        assert item.context == CONTEXT_PREFIX + row["prompts"][0]
        assert [q.text for q in item.questions] == [f"\n\nQ: {prompt.rstrip()}" for prompt in row["prompts"][1:]]
        assert {(q.metric, q.max_new_tokens) for q in item.questions} == answers
        assert item.details["leak"] == (task == "scbench_mf_short")
        json.dumps([item.details, [question.details for question in item.questions]])
        for question in item.questions:
            if question.metric != "kvzip_repoqa":  # needs grammars
                assert score(", ".join(question.references), question).official == pytest.approx(1)
    assert {item.family for item in items} < {spec.family for spec in TASKS.values()}
    assert [len(item.questions) for item in load_kvzip(task, ROWS / "kvzip", max_turns=1, cache_dir=tmp_path)] == [1, 1]


def test_kvzip_labels():
    many_shot = items_from_kvzip_rows("scbench_many_shot", rows_of("kvzip/scbench_many_shot"))[0]
    assert [q.references for q in many_shot.questions] == [("(A) plausible",), ("(B) not plausible",)]
    mixed = items_from_kvzip_rows("scbench_repoqa_and_kv_mid", rows_of("kvzip/scbench_repoqa_and_kv_mid"))[0]
    repoqa = mixed.questions[2].details
    assert (repoqa["name"], repoqa["lang"]) == ("mean", "python")
    assert [name for name, _ in repoqa["needles"]] == ["clamp", "mean", "chunks", "flatten"]


def test_kvzip_mistakes_are_named(tmp_path):
    with pytest.raises(ValueError, match="no scbench_qa_chn"):
        load_kvzip("scbench_qa_chn", ROWS)
    with pytest.raises(ValueError, match="no task 'scbench_kv_large'"):
        load_kvzip("scbench_kv_large", ROWS)
    with pytest.raises(FileNotFoundError, match=r"no scbench_kv_mid\.parquet"):
        load_kvzip("scbench_kv_mid", ROWS / "kvzip", cache_dir=tmp_path)
    (row, *_) = rows_of("kvzip/scbench_many_shot")
    with pytest.raises(ValueError, match="3 prompts, the context among them, and 1 answers"):
        items_from_kvzip_rows("scbench_many_shot", [{**row, "ground_truth": ["A"]}])
    with pytest.raises(ValueError, match=r"no line with \(Z\)"):
        items_from_kvzip_rows("scbench_many_shot", [{**row, "ground_truth": ["Z", "A"]}])
    with pytest.raises(ValueError, match="0 prompts"):
        items_from_kvzip_rows("scbench_many_shot", [{**row, "prompts": []}])
    with pytest.raises(ValueError, match="lacks prompts"):
        items_from_kvzip_rows("scbench_kv", rows_of("scbench_kv"))
