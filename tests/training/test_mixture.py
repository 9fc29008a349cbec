"""Several corpora in one training set: shares, order, names, and a run on a folder of three."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gatesight_hf.commands import cli
from gatesight_hf.training.documents import read_texts
from gatesight_hf.training.mixture import Source, drawn_order, mixed, sources_of

pytestmark = pytest.mark.core

WORDS = {"a": "amber", "b": "birch", "c": "cedar"}


@pytest.fixture
def corpora(tmp_path: Path) -> Path:
    """Lines of `a.jsonl`, two folders; the first holds the most."""
    folder = tmp_path / "corpora"
    (folder / "b").mkdir(parents=True)
    (folder / "c" / "deep").mkdir(parents=True)
    text = {name: [f"{word} {i} " * 12 for i in range(40 if name == "a" else 12)] for name, word in WORDS.items()}
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in text["a"]))
    (folder / "c" / "deep" / "c.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in text["c"]))
    for i, t in enumerate(text["b"]):
        (folder / "b" / f"{i}.txt").write_text(t)
    return folder


def test_a_folder_of_three_corpora_is_three_sources(corpora: Path) -> None:
    assert [s.name for s in sources_of([str(corpora)], [])] == ["a", "b", "c"]
    (corpora / "loose.txt").write_text("x")
    found = sources_of([str(corpora)], [])
    assert [s.name for s in found] == ["a", "b", "c", "corpora"] and found[3].files == (corpora / "loose.txt",)
    assert [s.files for s in sources_of([f"all={corpora}"], [])] == [(corpora,)]
    assert [s.name for s in sources_of([str(corpora / "b")], [])] == ["b"]


def test_sources_have_names_and_weights(corpora: Path) -> None:
    found = sources_of([f"first:2.5={corpora / 'a.jsonl'}", str(corpora / "b")], ["owner/set:config", "web:3=o/w:en"])
    assert [(s.name, s.weight) for s in found] == [("first", 2.5), ("b", 1.0), ("set:config", 1.0), ("web", 3.0)]
    assert [s.place for s in found[2:]] == ["owner/set:config", "o/w:en"]
    odd = corpora / "x=y.txt"
    odd.write_text("text")
    assert sources_of([str(odd)], [])[0].files == (odd,)


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "many", ""])
def test_weights_are_numbers_above_0(corpora: Path, weight: str) -> None:
    with pytest.raises(ValueError, match="weight must be a number above 0"):
        sources_of([f"a:{weight}={corpora}"], [])


def test_a_name_stands_for_one_source(corpora: Path) -> None:
    with pytest.raises(ValueError, match="called 'b'"):
        sources_of([str(corpora / "b"), f"b={corpora / 'a.jsonl'}"], [])


def test_orders_have_exact_shares_and_depend_on_the_seed() -> None:
    sources = [Source("a", 3, ""), Source("b", 1, ""), Source("c", 0.001, "")]
    order = drawn_order(sources, 41, 0)
    assert Counter(order) == {"a": 30, "b": 10, "c": 1}
    assert order == drawn_order(sources, 41, 0) != drawn_order(sources, 41, 1)
    assert len(set(order[:12])) > 1
    with pytest.raises(ValueError, match="2 documents cannot come from 3 sources"):
        drawn_order(sources, 2, 0)


def test_a_source_that_runs_out_is_named() -> None:
    documents = mixed({"a": iter([[1], [2]]), "b": iter([[3]])}, ["a", "b", "a", "b"], 5, "eval")
    assert [next(documents) for _ in range(3)] == [[1], [3], [2]]
    with pytest.raises(ValueError, match="Only 1 different documents of at least 5 tokens were found in b for eval"):
        next(documents)


def test_texts_are_shuffled_by_seed_and_none_is_lost(corpora: Path) -> None:
    plain = list(read_texts([corpora]))
    shuffled = list(read_texts([corpora], seed=3))
    assert plain != shuffled == list(read_texts([corpora], seed=3)) != list(read_texts([corpora], seed=4))
    assert sorted(plain) == sorted(shuffled) and len(plain) == 64
    assert len({text.split()[0] for text in shuffled[:12]}) == 3


def test_a_run_on_three_corpora(corpora: Path, tmp_path: Path, capsys: Any) -> None:
    """Every source is fitted on and measured on; a second run collects nothing and writes the same bytes."""
    data = tmp_path / "data"
    arguments = ["train", "--model", "reference", "--data", str(data), "--train-documents", "7", "--length", "32"]
    arguments += ["--eval-documents", "4", "--continuations", "1", "--continuation-tokens", "2", "--epochs", "1"]
    arguments += ["--documents", f"a:3={corpora / 'a.jsonl'}", str(corpora / "b"), "--documents", str(corpora / "c")]
    assert cli.main([*arguments, "--json", "--out", str(tmp_path / "one")]) == 0
    found = json.loads(capsys.readouterr().out)
    counts = {name: row["documents"] for name, row in found["held_out_by_source"].items()}
    assert counts == {"a": 2, "b": 1, "c": 1}
    for method, row in found["held_out"].items():
        rows = found["held_out_by_source"].values()
        mean = sum(r["documents"] * r["metrics"][method]["overlap@10"] for r in rows) / 4
        assert row["overlap@10"] == pytest.approx(mean)
    made = {path: path.stat().st_mtime_ns for path in data.rglob("*.safetensors")}
    assert len(made) == 11
    assert cli.main([*arguments, "--out", str(tmp_path / "two")]) == 0
    assert "mlp on a" in capsys.readouterr().out
    assert made == {path: path.stat().st_mtime_ns for path in data.rglob("*.safetensors")}
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
    arguments[arguments.index(f"a:3={corpora / 'a.jsonl'}")] = f"a:2={corpora / 'a.jsonl'}"
    assert cli.main([*arguments, "--out", str(tmp_path / "three")]) != 0
    assert "other settings" in capsys.readouterr().err


def test_the_papers_recipe_and_what_overrides_it() -> None:
    def parsed(*given: str) -> Any:
        return cli.parser().parse_args(["train", "--model", "reference", *given])

    assert (parsed("--recipe", "paper").train_documents, parsed("--recipe", "paper").length) == (2428, 1024)
    for given in (["--recipe", "paper", "--train-documents", "7"], ["--train-documents", "7", "--recipe", "paper"]):
        assert parsed(*given).train_documents == 7
