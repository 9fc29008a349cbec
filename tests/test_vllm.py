"""GateSight in vLLM: sessions on a tiny random model, against vLLM's own runs and against the transformers path.

Needs an environment of its own (`make test-vllm`); skipped where vLLM is not installed.
"""

import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="vLLM is not installed: see `make test-vllm`")

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1")

from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

import gatesight_hf.vllm as gatesight_vllm
from gatesight_hf import Estimator, GateSightCache
from gatesight_hf.scoring import Scores
from gatesight_hf.vllm.pages import Pages
from gatesight_hf.vllm.support import UnsupportedVLLMError, check_engine

from .conftest import FAMILIES, FAMILY_OPTIONS, random_estimator

#: One engine a process: `make test-vllm` runs one for each.
FAMILY = os.environ.get("GATESIGHT_TEST_FAMILY", "qwen3_5")

#: Tokens of a context, of a step, and of a cache block.
CONTEXT, STEP = 1024, 512
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1, detokenize=False)


def tiny() -> Any:
    """Head sizes that vLLM's CPU kernels know: 64; in bf16."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8}
    attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 8192}
    linear = {f"linear_num_{kind}_heads": n for kind, n in (("key", 2), ("value", 4))}
    linear |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4}
    model_class, config_class = FAMILIES[FAMILY]
    sizes |= FAMILY_OPTIONS[FAMILY]
    model = model_class(config_class(**sizes, **attention, **linear, tie_word_embeddings=False))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(4)  # unlike tokens, so that what is evicted matters
    return model.bfloat16().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny()


@pytest.fixture(scope="module")
def estimator(model: Any) -> Estimator:
    return random_estimator(model)


@pytest.fixture(scope="module")
def engine(model: Any, estimator: Estimator, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("vllm")
    model.save_pretrained(folder / "model")
    estimator.save_pretrained(folder / "estimator")
    # So few blocks that sessions make room and children are preempted.
    sizes = {"max_model_len": 2048, "max_num_seqs": 8, "max_num_batched_tokens": STEP, "num_gpu_blocks_override": 48}
    return gatesight_vllm.GateSightLLM(
        folder / "model", folder / "estimator", dtype="bfloat16", skip_tokenizer_init=True, **sizes
    )


def scheduler(engine: Any) -> Any:
    return engine.llm.llm_engine.engine_core.engine_core.scheduler


def free_blocks(engine: Any) -> int:
    return scheduler(engine).kv_cache_manager.block_pool.get_num_free_blocks()


def ids(length: int, seed: int) -> list[int]:
    return torch.randint(2, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


CONTEXT_IDS = ids(CONTEXT, 0)
QUESTIONS = [ids(5, 1), ids(17, 2), ids(40, 3)]


def answer(output: Any) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities."""
    tokens = list(output.outputs[0].token_ids)
    pairs = zip(tokens, output.outputs[0].logprobs, strict=True)
    return tokens, [found[token].logprob for token, found in pairs]


def teacher_forced(model: Any, cache: Any, question: list[int], tokens: list[int]) -> Tensor:
    """Log-probabilities `[n]` that transformers gives an answer, after the context that `cache` holds."""
    new = torch.tensor([question + tokens[:-1]])
    logits = model(new, past_key_values=cache).logits[0, len(question) - 1 :].float().log_softmax(-1)
    return logits[torch.arange(len(tokens)), torch.tensor(tokens)]


def prefilled(model: Any, scorer: Any, kept_fraction: float, **options: Any) -> GateSightCache:
    cache = GateSightCache(scorer, model, kept_fraction, **options)
    for start in range(0, CONTEXT, STEP):
        model(torch.tensor([CONTEXT_IDS[start : start + STEP]]), past_key_values=cache)
    return cache


def test_children_of_a_parent_that_keeps_all_are_ordinary_runs(engine):
    """Prefilled in the same steps, so bit by bit."""
    session = engine.open(CONTEXT_IDS, kept_fraction=1.0)
    children = [answer(output) for output in engine.ask(session, QUESTIONS, GREEDY)]
    alone = [answer(engine.ask(session, [question], GREEDY)[0]) for question in QUESTIONS]
    prompts = [{"prompt_token_ids": CONTEXT_IDS + question} for question in QUESTIONS]
    ordinary = [answer(engine.llm.generate([prompt], GREEDY, use_tqdm=False)[0]) for prompt in prompts]
    assert alone == ordinary
    assert [tokens for tokens, _ in children] == [tokens for tokens, _ in ordinary]
    engine.drop(session)


@pytest.mark.parametrize(("kept_fraction", "protected"), [(0.5, 0), (0.25, 0), (0.25, 10)])
def test_what_stays_and_what_is_answered_are_those_of_transformers(
    engine, model, estimator, kept_fraction, protected, monkeypatch
):
    positions: list[Tensor] = []
    plain = Pages.compact

    def compact(self: Pages, blocks: Tensor, kept: Tensor) -> None:
        positions.append(kept)
        plain(self, blocks, kept)

    monkeypatch.setattr(Pages, "compact", compact)
    session = engine.open(CONTEXT_IDS, kept_fraction=kept_fraction, protected_prefix=protected)
    block = scheduler(engine).connector._block_size
    options = {"block_size": block, "protected_prefix": protected}
    own = prefilled(model, estimator, kept_fraction, **options)
    means = own.report().gate_means[0]
    assert session.gate_means == pytest.approx(means, rel=1e-2)
    scores = own.score().of
    own.compact()
    same_entries = 0
    for found, of_layer, layer, kept in zip(positions, scores, own.attention_layers, session.kept, strict=True):
        assert layer.kept_length == kept and (kept - protected) % block == 0
        for a, b, of_head in zip(found, layer.kept_positions[0], of_layer[0], strict=True):
            differ = sorted(set(a.tolist()) ^ set(b.tolist()))
            same_entries += kept - len(differ) // 2
            # Where signals in bf16 choose otherwise, the scores are within noise of the last one that stays.
            assert ((of_head[differ] - of_head[b[protected:].long()].min()).abs() < 0.1 * of_head.std()).all()
    assert same_entries >= 0.985 * 2 * sum(session.kept)

    rated = [torch.zeros(1, 2, CONTEXT).scatter_(2, of_layer.unsqueeze(0), 1.0) for of_layer in positions]
    same = prefilled(model, Scores(rated), kept_fraction, **options)
    same.compact()
    whole = prefilled(model, Scores(rated), 1.0)
    whole.compact()
    errors, noise = [], []
    for output, question in zip(engine.ask(session, QUESTIONS, GREEDY), QUESTIONS, strict=True):
        tokens, logprobs = answer(output)
        errors.append((teacher_forced(model, same.fork(), question, tokens) - torch.tensor(logprobs)).abs())
        noise.append((teacher_forced(model, whole.fork(), question, tokens) - torch.tensor(logprobs)).abs())
    # bf16 noise of two implementations, and what the entries that are gone change.
    assert torch.cat(errors).mean() < 0.05 < torch.cat(noise).mean()
    engine.drop(session)


def test_blocks_come_back(engine):
    before = free_blocks(engine)
    one, other = engine.open(CONTEXT_IDS, kept_fraction=0.25), engine.open(ids(700, 9), kept_fraction=0.5)
    connector = scheduler(engine).connector
    held = sum(len(connector._sessions.get(session.session_id).blocks) for session in (one, other))
    assert before - free_blocks(engine) == held
    solo = [answer(engine.ask(one, [question], GREEDY)[0])[0] for question in QUESTIONS]
    again = engine.ask(one, QUESTIONS, GREEDY)
    assert [answer(output)[0] for output in again] == solo
    engine.drop(one)
    engine.ask(other, QUESTIONS[:1], GREEDY)
    engine.drop(other)
    assert free_blocks(engine) == before
    with pytest.raises(RuntimeError, match="could not be served"):
        engine.ask(one, QUESTIONS[:1], GREEDY)
    assert free_blocks(engine) == before


def test_a_session_makes_room_for_newer_ones(engine):
    before = free_blocks(engine)
    sessions = scheduler(engine).connector._sessions
    old, new = engine.open(CONTEXT_IDS, "old"), engine.open(CONTEXT_IDS, "new")
    engine.ask(old, QUESTIONS[:1], GREEDY)
    sessions.make_room(free_blocks(engine) + 1)
    assert sessions.get("new") is None and sessions.get("old") is not None
    with pytest.raises(RuntimeError, match="session 'new' could not be served"):
        engine.ask(new, QUESTIONS[:1], GREEDY)
    engine.drop(old)
    assert free_blocks(engine) == before


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_blocks_come_back_after_any_order_of_events(engine, seed):
    """Parents in several steps beside children and ordinary requests, some of them cancelled half-way."""
    before, choose = free_blocks(engine), random.Random(seed)
    inner, sessions = engine.llm.llm_engine, scheduler(engine).connector._sessions
    names, under_way = [f"s{i}" for i in range(3)], []
    for i in range(60):
        event = choose.choice(["open", "ask", "plain", "step", "step", "step", "cancel", "drop"])
        name, sampling = choose.choice(names), GREEDY.clone()
        prompt = ids(choose.randrange(2, 900), 7)
        if event in ("open", "ask", "plain"):
            if event == "open":
                sampling.max_tokens = 1
            elif event == "ask" and (session := sessions.get(name)) is not None:
                prompt = ids(session.tokens, 7) + ids(choose.randrange(2, 30), i)
            if event != "plain":
                sampling.extra_args = {"kv_transfer_params": {"gatesight": event, "session": name}}
            inner.add_request(f"{seed}-{i}", {"prompt_token_ids": prompt}, sampling)
            under_way.append(f"{seed}-{i}")
        elif event == "cancel" and under_way:
            inner.abort_request([under_way.pop(choose.randrange(len(under_way)))])
        elif event == "drop":
            sessions.drop(name)
        elif inner.has_unfinished_requests():
            inner.step()
    while inner.has_unfinished_requests():
        inner.step()
    for name in names:
        sessions.drop(name)
    assert free_blocks(engine) == before and not sessions._leaving
    engine.llm.generate([{"prompt_token_ids": ids(20, 1)}], GREEDY, use_tqdm=False)
    # No row is taken for a child's that is none.
    assert not any(bool(table.any()) for table in get_kv_transfer_group().evicted.values())


@pytest.mark.parametrize(
    ("part", "option", "value", "message"),
    [
        ("cache_config", "enable_prefix_caching", True, "prefix caching"),
        ("cache_config", "cache_dtype", "fp8", "quantised KV cache"),
        ("parallel_config", "tensor_parallel_size", 2, "tensor_parallel_size=2"),
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline_parallel_size=2"),
        ("scheduler_config", "async_scheduling", True, "async scheduling"),
        ("model_config", "enforce_eager", False, "compiled models"),
        ("device_config", "device_type", "cuda", "device 'cuda'"),
    ],
)
def test_modes_that_were_not_run_are_refused_by_name(engine, part, option, value, message):
    plain = engine.llm.llm_engine.vllm_config
    check_engine(plain)
    names = ("cache_config", "parallel_config", "scheduler_config", "model_config", "device_config")
    config = {name: SimpleNamespace(**vars(getattr(plain, name))) for name in names}
    setattr(config[part], option, value)
    with pytest.raises(UnsupportedVLLMError, match=message):
        check_engine(SimpleNamespace(**config, speculative_config=None))


def test_options_are_checked(engine):
    with pytest.raises(ValueError, match="heads of a layer, which share"):
        engine.open(CONTEXT_IDS, allocation="global")
    with pytest.raises(ValueError, match="kept_fraction"):
        engine.open(CONTEXT_IDS, kept_fraction=0)
    with pytest.raises(ValueError, match="no options"):
        engine.open(CONTEXT_IDS, block_size=4)
