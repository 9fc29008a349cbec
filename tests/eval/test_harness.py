"""The model of lm-evaluation-harness gives a session's answers, cuts prompts where it should, and refuses the rest."""

import importlib
import json
import logging
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gatesight_eval.suites.ruler.templates import CWE, FWE, NIAH, NIAH_SINGULAR, QA, VT, Wording
from gatesight_hf import Session
from gatesight_hf.reference import ESTIMATOR_PATH, MODEL_PATH, documents

pytest.importorskip("lm_eval")
harness = importlib.import_module("gatesight_eval.backends.harness")
evaluator = importlib.import_module("lm_eval.evaluator")
tasks = importlib.import_module("lm_eval.tasks")

TASK = """
task: needles
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}, cache_dir: "{cache}"}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{context}}}} {{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{do_sample: false, max_gen_toks: 6, until: []}}
metric_list: [{{metric: exact_match}}]
"""
#: `python -m gatesight_eval.backends.harness`, without half a minute for the index of the harness's thousands of tasks.
COMMAND = """
import functools, runpy, lm_eval.tasks
lm_eval.tasks.TaskManager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
runpy.run_module("gatesight_eval.backends.harness", run_name="__main__")
"""
CONTEXT_TOKENS = 300
HEADER, FOOTER = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
Row = dict[str, str]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Three questions on one context and two on another, in turns."""
    made = [documents.needles(random.Random(seed), CONTEXT_TOKENS, 4, asked=3) for seed in range(2)]
    of_each = [
        [{"context": made[i].text, "question": q.text, "answer": q.expected} for q in made[i].questions] for i in (0, 1)
    ]
    return [of_each[0][0], of_each[1][0], of_each[0][1], of_each[1][1], of_each[0][2]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, rows: list[Row]) -> Path:
    """A task as the harness reads it."""
    path = tmp_path_factory.mktemp("tasks")
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "needles.yaml").write_text(TASK.format(data=path / "rows.jsonl", cache=path / "cache"))
    return path


def make(bundled: tuple[Any, Any], **arguments: Any) -> Any:
    """The harness's model around the bundled one."""
    model, tokenizer = bundled
    return harness.GateSightLM(model, tokenizer=tokenizer, **{"estimator": str(ESTIMATOR_PATH), **arguments})


@pytest.fixture(scope="module")
def lm(bundled: tuple[Any, Any]) -> Any:
    return make(bundled)


def request(row: Row, doc: Row | None = None, **arguments: Any) -> Any:
    """A request as the harness makes it."""
    asked = {"do_sample": False, "max_gen_toks": 6, "until": [], **arguments}
    prompt = f"{row['context']} {row['question']}"
    return SimpleNamespace(args=(prompt, asked), doc=row if doc is None else doc, task_name="needles", doc_id=7)


def session_answers(bundled: tuple[Any, Any], rows: list[Row]) -> list[str]:
    sessions = {row["context"]: Session.open(*bundled, ESTIMATOR_PATH, row["context"]) for row in rows}
    return [sessions[row["context"]].ask(row["question"], max_new_tokens=6) for row in rows]


def forwards(model: Any, call: Any) -> tuple[Any, list[int]]:
    """What a call returns, and how many tokens each forward had."""
    lengths: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append((args[0] if args else kwargs["input_ids"]).shape[1]), with_kwargs=True
    )
    try:
        return call(), lengths
    finally:
        handle.remove()


# -- through the harness -----------------------------------------------------------------------------------------------


def test_an_evaluation_gives_the_answers_of_sessions(bundled, rows, folder):
    arguments = {"pretrained": bundled[0], "tokenizer": bundled[1], "estimator": str(ESTIMATOR_PATH)}
    manager = tasks.TaskManager(include_path=str(folder), include_defaults=False)
    results, lengths = forwards(
        bundled[0],
        lambda: evaluator.simple_evaluate("gatesight", arguments, ["needles"], task_manager=manager, bootstrap_iters=0),
    )
    expected = session_answers(bundled, rows)
    samples = sorted(results["samples"]["needles"], key=lambda sample: sample["doc_id"])
    assert [sample["resps"][0][0].strip() for sample in samples] == expected
    right = sum(answer == row["answer"] for answer, row in zip(expected, rows, strict=True))
    assert results["results"]["needles"]["exact_match,none"] == right / len(rows)
    assert right  # or equal answers would say little
    assert sum(length > CONTEXT_TOKENS // 2 for length in lengths) == 2
    about = results["config"]["gatesight"]
    assert (about["method"], about["kept_fraction"], about["contexts"], about["truncated"]) == ("gatesight", 0.1, 2, 0)
    assert about["achieved_fraction"] == pytest.approx(0.1, abs=0.01)


def test_the_command_knows_the_model(bundled, rows, folder, tmp_path):
    model = f"pretrained={MODEL_PATH},estimator={ESTIMATOR_PATH},method=gatesight,kept_fraction=0.1"
    command = [sys.executable, "-c", COMMAND, "--model", "gatesight", "--model_args", model]
    command += ["--tasks", "needles", "--include_path", str(folder), "--device", "cpu", "--log_samples"]
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"), "1")
    done = subprocess.run(
        [*command, "--output_path", str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, **offline},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "needles: the context ends with" in done.stderr
    (path,) = tmp_path.rglob("samples_needles_*.jsonl")
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    answers = [sample["resps"][0][0].strip() for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
    assert answers == session_answers(bundled, rows)
    (path,) = tmp_path.rglob("results_*.json")
    assert json.loads(path.read_text())["config"]["gatesight"]["contexts"] == 2


def test_answers_are_cached_with_their_requests(lm, rows, monkeypatch):
    kept = []
    monkeypatch.setattr(lm, "cache_hook", SimpleNamespace(add_partial=lambda *entry: kept.append(entry)))
    requests = [request(row) for row in rows]
    answers = lm.generate_until(requests, disable_tqdm=True)
    entries = [("generate_until", one.args, answer) for one, answer in zip(requests, answers, strict=True)]
    assert sorted(kept, key=str) == sorted(entries, key=str)


# -- decoding ----------------------------------------------------------------------------------------------------------


def test_answers_end_at_stop_sequences_and_lengths(bundled, lm, rows):
    (whole,) = lm.generate_until([request(rows[0])], disable_tqdm=True)
    words = whole.split()
    assert len(set(words[:3])) == 3
    stopped, lengths = forwards(
        bundled[0], lambda: lm.generate_until([request(rows[0], until=words[2])], disable_tqdm=True)
    )
    assert stopped[0].split() == words[:2]
    assert len(lengths) == 2 + 2  # context, question, and the tokens up to the stop sequence
    for name in ("max_gen_toks", "max_new_tokens"):
        asked = request(rows[0], **{"max_gen_toks": None, name: 2})
        assert lm.generate_until([asked], disable_tqdm=True)[0].split() == words[:2]


@pytest.mark.parametrize("whole_prompt", [False, True])
def test_a_full_cache_gives_what_hf_gives(bundled, rows, whole_prompt):
    requests = [request(row) for row in rows[:2]]
    found = make(bundled, method="full", whole_prompt=whole_prompt).generate_until(requests, disable_tqdm=True)
    stock = importlib.import_module("lm_eval.models.huggingface").HFLM(bundled[0], tokenizer=bundled[1])
    assert found == stock.generate_until(requests, disable_tqdm=True)


@pytest.mark.parametrize("method", ["empty", "random", "snapkv@flat", "kvzip@global", "keydiff+int8"])
def test_other_methods_by_name(bundled, rows, method):
    lm = make(bundled, estimator=None, method=method, kept_fraction=0.2, protected_prefix=3, prefill_chunk_size=128)
    requests = [request(row) for row in rows[:2]]
    assert lm.generate_until(requests, disable_tqdm=True) == lm.generate_until(requests, disable_tqdm=True)
    achieved = lm.get_model_info()["gatesight"]["achieved_fraction"]
    assert achieved == pytest.approx(0.0 if method == "empty" else 0.2, abs=0.02)


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_prompts_that_cannot_be_cut(bundled, lm, rows):
    row = {"text": rows[0]["context"]}
    with pytest.raises(ValueError, match=r"needles, document 7: .* cannot be cut .* RULER.* whole_prompt=True"):
        lm.generate_until([request(rows[0], doc=row)], disable_tqdm=True)
    whole = make(bundled, whole_prompt=True)
    _, lengths = forwards(bundled[0], lambda: whole.generate_until([request(rows[0], doc=row)], disable_tqdm=True))
    assert lengths[0] > CONTEXT_TOKENS
    assert lengths[1] == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"do_sample": True}, "do_sample"),
        ({"do_sample": None, "temperature": 0.7}, "temperature"),
        ({"num_beams": 4}, "num_beams"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ],
)
def test_only_greedy_answers(lm, rows, arguments, named):
    with pytest.raises(ValueError, match=f"needles, document 7: answers are greedy.*{named}"):
        lm.generate_until([request(rows[0], **arguments)], disable_tqdm=True)


def test_long_prompts_are_refused_or_truncated_audibly(bundled, rows, caplog, monkeypatch):
    with pytest.raises(ValueError, match=r"needles, document 7: context \d+, .* more than max_length=200"):
        make(bundled, max_length=200).generate_until([request(rows[0])], disable_tqdm=True)
    lm = make(bundled, max_length=200, truncation=True)
    monkeypatch.setattr(logging.getLogger("lm_eval"), "propagate", True)  # lm_eval may have turned it off
    _, lengths = forwards(bundled[0], lambda: lm.generate_until([request(row) for row in rows], disable_tqdm=True))
    assert lm.get_model_info()["gatesight"]["truncated"] == 2
    assert "2 of 2 contexts lost their middle" in caplog.text
    reserved = 6 + max(len(bundled[1](row["question"]).input_ids) for row in rows[::2])
    assert lengths[0] == (200 - reserved) // 2 * 2
    with pytest.raises(ValueError, match="leaves no room"):
        make(bundled, max_length=20, truncation=True).generate_until([request(rows[0])], disable_tqdm=True)


def test_likelihoods_are_refused(lm, rows):
    for method in (lm.loglikelihood, lm.loglikelihood_rolling):
        with pytest.raises(NotImplementedError, match=r"needles asks for likelihoods.*--model hf"):
            method([request(rows[0])])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"estimator": None}, "estimator=FOLDER"),
        ({"method": "snapvk"}, "No method 'snapvk'"),
        ({"method": "oracle"}, "oracle needs"),
        ({"method": "hidden_states"}, "needs a trained scorer"),
        ({"kept_fraction": 10}, "10"),
        ({"prefill_chunk_size": 0}, "prefill_chunk_size"),
        ({"mixed_precision_dtype": "float16"}, "mixed_precision_dtype"),
    ],
)
def test_wrong_arguments_are_told_at_once(bundled, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(bundled, **arguments)


# -- where prompts are cut ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wording", [NIAH, NIAH_SINGULAR, VT, CWE, FWE, QA])
@pytest.mark.parametrize("chat", [False, True])
def test_prompts_in_rulers_wording(wording: Wording, chat: bool):
    fields = {"kind": "numbers", "query": "12345", "count": 5}
    lead, question, prefix = (part.format(**fields) for part in (wording.lead, wording.question, wording.answer_prefix))
    context = lead + "the data" + wording.after_data
    if wording is VT:
        context = lead + "one shot\n" + question + prefix + "A B\n\n" + context
    if chat:
        context, question = HEADER + context, question + FOOTER
    prompt = context + question + prefix
    # The harness's documents hold the prompt in a field that BABILong uses for the context.
    assert harness.find_cut(prompt, {"input": prompt.removesuffix(prefix), "outputs": ["x"]}) == len(context)


def test_prompts_of_documents_with_fields():
    cut = harness.find_cut
    prompt = "Read this.\nthe text\n\nQuestion: why?\nAnswer:"
    border = len("Read this.\nthe text")
    assert cut(prompt, {"context": "the text\n", "question": "why?"}) == border
    assert cut(prompt, {"context": "the text", "input": "why?"}) == border
    assert cut(prompt, {"input": "the text", "question": "why?"}) == border
    assert cut(prompt, {"context": "the text"}) == border
    # The question is not behind the context, the rest is blank, or the field may hold the question as well.
    assert cut(prompt, {"context": "the text", "question": "when?"}) is None
    assert cut("why?\nthe text\n", {"context": "the text", "question": "why?"}) is None
    assert cut("the text\n", {"context": "the text"}) is None
    assert cut(prompt, {"input": "the text"}) is None
    assert cut(prompt, {"context": 3, "question": None}) is None
    assert cut(QA.question.format(query="why?") + "\nthe text", {}) is None
