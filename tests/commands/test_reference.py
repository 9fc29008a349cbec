"""The bundled model retrieves from its KV cache, and the demo shows it."""

import json
import random
from typing import Any

import pytest
import torch

from gatesight_hf import GateSightCache, Session
from gatesight_hf.commands.cli import main
from gatesight_hf.methods import RandomScorer
from gatesight_hf.reference import ESTIMATOR_PATH, MODEL_PATH, documents, load_model
from gatesight_hf.reference.words import SPECIAL_TOKENS, vocabulary


@pytest.fixture
def model(bundled: tuple[Any, Any]) -> Any:
    return bundled[0]


@pytest.fixture
def tokenizer(bundled: tuple[Any, Any]) -> Any:
    return bundled[1]


@pytest.mark.parametrize("task", list(documents.TASKS))
@pytest.mark.parametrize("length", [96, 300])
def test_documents_have_the_length_asked_for_and_hold_their_answers(task: str, length: int, tokenizer: Any) -> None:
    for seed in range(5):
        document = documents.TASKS[task](random.Random(seed), length)
        assert abs(len(document.words) - length) <= 16
        assert tokenizer(document.text).input_ids == [tokenizer.vocab[word] for word in document.words]
        for question in document.questions:
            assert set(question.answer) - {","} <= set(document.words)
            assert tokenizer.unk_token_id not in tokenizer(question.text + " " + question.expected).input_ids


def test_planted_positions_are_the_facts() -> None:
    document = documents.needles(random.Random(1), 200, 3)
    planted = " ".join(document.words[i] for i in document.planted)
    assert planted.count("one of the special magic numbers for") == 3 and len(document.planted) == 3 * 15


def test_tokenizer_reads_what_people_write(tokenizer: Any) -> None:
    ids = tokenizer("What is the special magic number for amber-river? Answer: 4821").input_ids
    assert tokenizer.decode(ids) == "what is the special magic number for amber-river ? answer : 4 8 2 1"
    assert tokenizer("zyzzyva").input_ids == [tokenizer.unk_token_id]
    assert len(vocabulary()) == len(set(vocabulary())) == len(tokenizer)
    assert vocabulary()[: len(SPECIAL_TOKENS)] == SPECIAL_TOKENS
    assert tokenizer.padding_side == "left"


def test_the_model_has_the_layout_it_must_have(model: Any) -> None:
    types = model.config.layer_types
    attention = [i for i, kind in enumerate(types) if kind == "full_attention"]
    assert len(attention) >= 2 and attention[0] >= 3 and types[: attention[-1]].count("linear_attention") >= 6
    assert model.config.linear_key_head_dim == model.config.linear_value_head_dim == 64
    assert model.config.linear_num_value_heads >= 4 and model.config.head_dim in (32, 64)
    assert model.config.num_attention_heads > model.config.num_key_value_heads
    assert (MODEL_PATH / "model.safetensors").stat().st_size <= 8_000_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_found_with_a_tenth_of_the_cache_and_not_by_chance(dtype: torch.dtype, tokenizer: Any) -> None:
    model = load_model(dtype=dtype)
    right = {"gatesight": 0, "random": 0}
    for seed in range(3):
        document = documents.needles(random.Random(100 + seed), 1024, 4, asked=4)
        for name, scorer in (("gatesight", str(ESTIMATOR_PATH)), ("random", RandomScorer(seed))):
            session = Session.open(model, tokenizer, scorer, document.text, kept_fraction=0.1)
            right[name] += sum(session.ask(q.text, max_new_tokens=5) == q.expected for q in document.questions)
    assert right["gatesight"] >= 10 and right["random"] <= 3


def test_the_answer_is_in_the_attention_cache_not_in_the_gdn_states(model: Any, tokenizer: Any) -> None:
    """Keeping one entry per head leaves the GDN states alone with the question."""
    document = documents.needles(random.Random(7), 1024, 4, asked=4)
    session = Session.open(model, tokenizer, RandomScorer(), document.text, kept_fraction=1e-6)
    assert session.report().physical_lengths == [1, 1]
    assert sum(session.ask(q.text, max_new_tokens=5) == q.expected for q in document.questions) == 0


def test_order_and_number_of_questions_do_not_matter(model: Any, tokenizer: Any) -> None:
    document = documents.needles(random.Random(8), 400, 4, asked=4)
    session = Session.open(model, tokenizer, ESTIMATOR_PATH, document.text, kept_fraction=0.2, prefill_chunk_size=97)
    questions = [question.text for question in document.questions]
    forward = {q: session.ask(q, max_new_tokens=5) for q in questions}
    assert {q: session.ask(q, max_new_tokens=5) for q in reversed(questions)} == forward
    assert session.report().logical_length == 400


def test_snippet_of_generate(model: Any, tokenizer: Any) -> None:
    document = documents.needles(random.Random(9), 512, 2)
    question = document.questions[0]
    inputs = tokenizer(document.text + " " + question.text, return_tensors="pt")
    cache = GateSightCache.from_pretrained(ESTIMATOR_PATH, model=model, kept_fraction=0.2)
    output = model.generate(**inputs, past_key_values=cache, max_new_tokens=4)
    assert tokenizer.decode(output[0, inputs.input_ids.shape[1] :]) == question.expected
    assert cache.report().achieved_fraction == pytest.approx(0.2, abs=1e-3)


def test_demo_prints_json_with_the_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--length", "1024", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["accuracy"]) == {"full", "gatesight", "random"} and len(result["questions"]) == 8
    assert result["accuracy"]["full"] >= 0.875 and result["accuracy"]["gatesight"] >= 0.875
    assert result["accuracy"]["random"] <= 0.25
    assert result["kv_bytes_after"] == pytest.approx(result["kv_bytes_before"] * result["achieved_fraction"], abs=1)
    assert result["kept_fraction"] == 0.1 and result["achieved_fraction"] == pytest.approx(0.1, abs=1e-3)
    assert {"prefill", "score", "compact"} <= set(result["seconds"])


def test_demo_table_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--length", "256", "--needles", "2"]) == 0
    text = capsys.readouterr().out
    assert "answered correctly" in text and "GDN states" in text and text.count("magic number for") >= 2
    assert main(["demo", "--kept-fraction", "1.5"]) == 1
    assert "kept_fraction must be in (0, 1]" in capsys.readouterr().err
