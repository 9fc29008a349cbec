"""The benchmark of many questions: a run on very small models."""

import json
from pathlib import Path

from gatesight_eval.bench import questions


def test_batches_answer_as_the_loop_does(tmp_path: Path) -> None:
    prefix = tmp_path / "runs" / "questions"
    arguments = ["--tiny", "--length", "256", "--questions", "5", "--batch-sizes", "3", "--repeats", "1"]
    assert questions.main([*arguments, "--new-tokens", "2", "--output", str(prefix)]) == 0
    result = json.loads(prefix.with_suffix(".json").read_text(encoding="utf-8"))
    assert len(result["models"]) == 2
    for found in result["models"].values():
        assert [way["batch_size"] for way in found["ways"]] == [1, 3] and found["questions"] == 5
        assert all(way["same_answers"] and way["seconds"] > 0 for way in found["ways"])
        assert found["ways"][0]["speed_ratio"] == 1
    text = prefix.with_suffix(".md").read_text(encoding="utf-8")
    assert text.count("| yes |") == 4
