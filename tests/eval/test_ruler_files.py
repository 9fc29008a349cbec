"""RULER's files: what is written loads again, both official schemas and kvpress rows are read, wrong ones are named."""

import hashlib
import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from gatesight_eval.suites.items import Item, Question
from gatesight_eval.suites.ruler import TASKS, load_kvpress, load_official, manifest, write_official

from ..helpers.ruler import OFFICIAL, make, prompt

pytestmark = pytest.mark.quick


def test_written_items_load_again(tmp_path: Path) -> None:
    items = [item for task in TASKS for item in make(task, count=2)]
    files = write_official(items, tmp_path)
    assert sorted(files) == sorted(tmp_path / task / "validation.jsonl" for task in TASKS)
    loaded = {item.id: item for item in load_official(tmp_path)}
    for item in items:
        again = loaded.pop(item.id.replace("/1024/42/", "/"))
        # Where documents hold the answer is not written in a row.
        expected = replace(item.questions[0], depth=None) if item.family == "qa" else item.questions[0]
        assert (again.context, again.questions, again.task, again.family) == (
            item.context,
            (expected,),
            item.task,
            item.family,
        )
        assert again.details["length"] == item.details["length"]
        assert again.details["leak"] == item.details["leak"]
    assert not loaded
    with pytest.raises(FileExistsError, match="already there"):
        write_official(items[:1], tmp_path)
    with pytest.raises(ValueError, match="has 2 questions"):
        write_official([replace(items[0], questions=items[0].questions * 2)], tmp_path / "other")


@pytest.mark.parametrize("task", TASKS)
def test_old_rows_have_the_prefix_inside(task: str, tmp_path: Path) -> None:
    (item,) = make(task, count=1)
    question = item.questions[0]
    # Older wording and a wrong `index`, as such files have.
    text = prompt(item).replace("are assigned the value", "are assgined the value") if task == "vt" else prompt(item)
    text = text.replace("Find all variables that are assgined", "Find all variables that are assigned")
    row = {"index": 731, "input": text, "outputs": list(question.references), "length": 9}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n\n" + json.dumps(row) + "\n")
    first, second = load_official(tmp_path / "rows.jsonl", task)
    assert (first.id, second.id) == (f"{task}/1", f"{task}/3")
    assert prompt(first) == text
    assert (first.context.replace("assgined", "assigned"), first.questions[0].text) == (item.context, question.text)
    assert first.questions[0].answer_prefix.replace("assgined", "assigned") == question.answer_prefix
    assert first.details["schema"] == "input"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": None}, "`input`"),
        ({"input": "What is this?"}, "holds no question of niah_single_1"),
        ({"outputs": []}, "`outputs` has to be a list"),
        ({"outputs": "4821"}, "`outputs` has to be a list"),
        ({"answer_prefix": ""}, "no answer prefix"),
    ],
)
def test_wrong_rows_are_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    (file,) = write_official(make("niah_single_1", count=2), tmp_path)
    good, second = file.read_text().splitlines()
    file.write_text(f"{good}\n{json.dumps(json.loads(second) | change)}\n")
    with pytest.raises(ValueError, match=r"validation\.jsonl, line 2: .*" + message):
        load_official(tmp_path)


def test_wrong_files_are_named(tmp_path: Path) -> None:
    (file,) = write_official(make("qa_1", count=1) + make("qa_1", count=1), tmp_path)
    good = file.read_text().splitlines()[0]
    row = json.loads(good)
    with pytest.raises(FileNotFoundError, match=r"<task>/test\.jsonl"):
        load_official(tmp_path, subset="test")
    (tmp_path / "rows.jsonl").write_text(good)
    with pytest.raises(ValueError, match="is no RULER task; name one"):
        load_official(tmp_path / "rows.jsonl")
    assert len(load_official(tmp_path / "rows.jsonl", "qa_1")) == 1
    file.write_text(good[:-5])
    with pytest.raises(ValueError, match="line 1: no JSON"):
        load_official(file)
    file.write_text("\n")
    with pytest.raises(ValueError, match="no rows"):
        load_official(file)
    file.write_text(json.dumps(row | {"input": row["input"] + row["answer_prefix"]}))
    with pytest.raises(ValueError, match="both as"):
        load_official(file)
    write_official(make("vt", count=1), tmp_path)
    chat = json.loads((tmp_path / "vt" / "validation.jsonl").read_text())
    (tmp_path / "vt" / "validation.jsonl").write_text(json.dumps(chat | {"input": chat["input"] + "<|im_end|>\n"}))
    with pytest.raises(ValueError, match="model_template_type base"):
        load_official(tmp_path / "vt")
    with pytest.raises(ValueError, match="holds 2 tasks"):
        load_official(tmp_path, task="vt")


def kvpress_rows(items: list[Item]) -> list[dict[str, Any]]:
    return [
        {
            "context": item.context,
            "question": question.text,
            "answer_prefix": question.answer_prefix,
            "answer": list(question.references),
            "task": item.task,
            "max_new_tokens": question.max_new_tokens,
        }
        for item in items
        for question in item.questions
    ]


def test_kvpress_rows_of_one_context_are_one_item(tmp_path: Path) -> None:
    first, second = make("niah_multikey_2", count=2)
    other = Question("What is that?", ("1234567",), 64, "string_match_all", " It is")
    items = [replace(first, questions=(*first.questions, other)), second, *make("qa_2", count=1)]
    rows = kvpress_rows(items)
    rows.insert(2, rows.pop(1))  # no longer beside the first
    folder = tmp_path / "data" / "4096"
    folder.mkdir(parents=True)
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    configs = 'configs:\n- config_name: "4096"\n  data_files:\n  - split: test\n    path: 4096/test.jsonl\n'
    (tmp_path / "data" / "README.md").write_text(f"---\n{configs}---\n")

    by_file = load_kvpress(folder / "test.jsonl", cache_dir=tmp_path / "cache")
    by_folder = load_kvpress(tmp_path / "data", "4096", cache_dir=tmp_path / "cache")
    for loaded in (by_file, by_folder):
        assert [item.context for item in loaded] == [item.context for item in items]
        assert [len(item.questions) for item in loaded] == [2, 1, 1]
        assert loaded[0].questions == items[0].questions
        assert [item.details["rows"] for item in loaded] == [[0, 2], [1], [3]]
        assert [item.id for item in loaded] == ["niah_multikey_2/0", "niah_multikey_2/1", "qa_2/3"]
        assert [item.family for item in loaded] == ["dense retrieval", "dense retrieval", "qa"]
        assert loaded[2].questions[0].metric == "string_match_part"
    assert (by_folder[0].details["config"], by_folder[0].details["split"]) == ("4096", "test")
    digest = hashlib.sha256((folder / "test.jsonl").read_bytes()).hexdigest()
    assert by_file[0].details["sources"]["rows"]["sha256"] == digest


def test_wrong_kvpress_data_are_named(tmp_path: Path) -> None:
    rows = kvpress_rows(make("cwe", count=2))

    def load(rows: list[dict[str, Any]], name: str) -> list[Item]:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_kvpress(tmp_path / name, cache_dir=tmp_path / "cache")

    with pytest.raises(ValueError, match=r"a\.jsonl: no column answer_prefix, task"):
        load([{k: v for k, v in row.items() if k not in ("answer_prefix", "task")} for row in rows], "a.jsonl")
    with pytest.raises(ValueError, match=r"b\.jsonl, row 1: 'niah' is no RULER task"):
        load([rows[0], rows[1] | {"task": "niah"}], "b.jsonl")
    with pytest.raises(ValueError, match=r"c\.jsonl, row 1: `answer` has to be a list"):
        load([rows[0], rows[1] | {"answer": []}], "c.jsonl")
    with pytest.raises(ValueError, match=r"d\.jsonl, row 0: context, question and answer_prefix have to be texts"):
        load([rows[0] | {"question": None}, rows[1]], "d.jsonl")
    (tmp_path / "e.txt").write_text("no")
    with pytest.raises(ValueError, match=r"e\.txt: none of \.parquet"):
        load_kvpress(tmp_path / "e.txt")


def test_manifest() -> None:
    items = [*make("niah_single_2", count=2), *make("qa_1", 2048, 3, variants=["qa_shuffled"])]
    found = manifest(items)
    assert json.loads(json.dumps(found)) == found
    assert found == manifest(items)
    first, *others = items
    answer = replace(first.questions[0], references=("1",))
    changed = [others, [replace(first, questions=(answer,)), *others], [replace(first, id="1"), *others]]
    assert found["sha256"] not in [manifest(some)["sha256"] for some in changed]
    assert found["versions"]["wonderwords"] == version("wonderwords")
    assert found["ruler_commit"] == OFFICIAL["ruler_commit"]
    niah, qa = found["tasks"]["niah_single_2"], found["tasks"]["qa_1"]
    assert (niah["items"], niah["questions"], qa["items"]) == (2, 2, 3)
    assert niah["sources"][0]["haystack"]["file"] == "prose.txt"
    assert (niah["variants"], qa["variants"], qa["max_length"], qa["tokenizer"]) == (
        [[]],
        [["qa_shuffled"]],
        [2048],
        ["Words"],
    )
    lengths = [item.details["length"] for item in items[:2]]
    assert niah["length"] == {"mean": sum(lengths) / 2, "min": min(lengths), "max": max(lengths)}
    with pytest.raises(ValueError, match="No items"):
        manifest([])
