"""GateSight in vLLM: sessions on tiny random models and the bundled one, against vLLM's own runs and transformers.

Needs an environment of its own (`make test-vllm`); skipped where vLLM is not installed.
"""

import math
import os
import random
import re
from dataclasses import replace
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="vLLM is not installed: see `make test-vllm`")

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1")

from vllm import SamplingParams
from vllm.config import CompilationMode
from vllm.distributed.kv_transfer import get_kv_transfer_group

import gatesight_hf.vllm as gatesight_vllm
from gatesight_eval.backends import TransformersBackend
from gatesight_eval.backends.methods import Method, ScorerFactory, cells_of
from gatesight_eval.backends.paged import VLLMBackend
from gatesight_eval.reports.store import RunFolder, read_lines
from gatesight_eval.run import evaluate
from gatesight_eval.suites import toy
from gatesight_eval.suites.prompting import Prompter
from gatesight_hf import Estimator, reference
from gatesight_hf.methods import KeyDiff
from gatesight_hf.reference import documents
from gatesight_hf.scoring import Scores
from gatesight_hf.vllm import pages, worker
from gatesight_hf.vllm.metrics import COUNTERS, GAUGES, SessionStats
from gatesight_hf.vllm.options import Asked, Limits, OpenOptions
from gatesight_hf.vllm.paged import GateSightAttentionManager
from gatesight_hf.vllm.pages import Pages
from gatesight_hf.vllm.support import UnsupportedVLLMError, check_engine

from ..helpers.models import random_estimator
from ..helpers.paths import ROOT
from ..helpers.vllm_runs import (
    CONTEXT,
    GREEDY,
    SIZES,
    against,
    answer,
    free_blocks,
    ids,
    ordinary,
    prefilled,
    scheduler,
    tiny,
)

#: One engine a process: `make test-vllm` runs three families with random weights, and the bundled model.
FAMILY = os.environ.get("GATESIGHT_TEST_FAMILY", "reference")
BUNDLED = FAMILY == "reference"
#: vLLM's Model Runner V2 in place of the first one, which it takes by itself where there is no GPU; see `conftest`.
RUNNER_V2 = os.environ.get("GATESIGHT_TEST_RUNNER") == "v2"
#: Options of the engine beside those that vLLM chooses by itself.
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "plain": {"enable_prefix_caching": False, "enforce_eager": True},
    "caching": {"enforce_eager": True},
    "compiled": {"enable_prefix_caching": False},
    "async": {"enforce_eager": True, "async_scheduling": True},
}
MODE = os.environ.get("GATESIGHT_TEST_MODE", "default")
CACHING = MODES[MODE].get("enable_prefix_caching", True)


@pytest.fixture(scope="module")
def model() -> Any:
    return reference.load_model(dtype=torch.bfloat16) if BUNDLED else tiny(FAMILY)


@pytest.fixture(scope="module")
def estimator(model: Any) -> Estimator:
    return Estimator.from_pretrained(reference.ESTIMATOR_PATH) if BUNDLED else random_estimator(model)


@pytest.fixture(scope="module")
def engine(model: Any, estimator: Estimator, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("vllm")
    model.save_pretrained(folder / "model")
    if BUNDLED:
        reference.load_tokenizer().save_pretrained(folder / "model")
    estimator.save_pretrained(folder / "estimator")
    options = {"dtype": "bfloat16", "skip_tokenizer_init": not BUNDLED, **SIZES, **MODES[MODE]}
    return gatesight_vllm.GateSightLLM(folder / "model", folder / "estimator", **options)


def text_ids() -> tuple[list[int], list[list[int]]]:
    """A document of the bundled model's kind, and questions."""
    document, tokenizer = documents.needles(random.Random(0), CONTEXT, count=8, asked=3), reference.load_tokenizer()
    return tokenizer(document.text).input_ids[:CONTEXT], [tokenizer(q.text).input_ids for q in document.questions]


CONTEXT_IDS, QUESTIONS = text_ids() if BUNDLED else (ids(CONTEXT, 0), [ids(5, 1), ids(17, 2), ids(40, 3)])


def test_the_runner_is_the_one_that_was_asked_for(engine):
    executor = engine.llm.llm_engine.engine_core.engine_core.model_executor
    assert hasattr(executor.driver_worker.worker.model_runner, "input_batch") != RUNNER_V2


def test_the_engine_runs_as_was_asked_for(engine):
    config, given = engine.llm.llm_engine.vllm_config, MODES[MODE]
    assert config.cache_config.enable_prefix_caching == CACHING
    assert (config.compilation_config.mode == CompilationMode.NONE) == given.get("enforce_eager", False)
    assert config.scheduler_config.async_scheduling == given.get("async_scheduling", False)
    assert (engine.llm.llm_engine.engine_core.engine_core.batch_queue is not None) == (MODE == "async")


def test_children_of_a_parent_that_keeps_all_are_ordinary_runs(engine):
    """Prefilled in the same steps, so bit by bit."""
    expected = [answer(output) for output in ordinary(engine, CONTEXT_IDS, QUESTIONS)]
    session = engine.open(CONTEXT_IDS, kept_fraction=1.0)
    children = [answer(output) for output in engine.ask(session, QUESTIONS, GREEDY)]
    alone = [answer(engine.ask(session, [question], GREEDY)[0]) for question in QUESTIONS]
    assert alone == expected
    assert [tokens for tokens, _ in children] == [tokens for tokens, _ in expected]
    engine.drop(session)


@pytest.mark.skipif(not CACHING, reason="without prefix caching nothing is found")
def test_ordinary_requests_share_blocks_and_sessions_none(engine):
    """Whatever stands in the cache, each request is answered as one that finds nothing."""
    pool, connector = scheduler(engine).kv_cache_manager.block_pool, scheduler(engine).connector
    engine.llm.reset_prefix_cache()
    before = free_blocks(engine)

    def asked(question: list[int], **more: Any) -> tuple[Any, int]:
        (output,) = engine.llm.generate([{"prompt_token_ids": CONTEXT_IDS + question, **more}], GREEDY, use_tqdm=False)
        return answer(output), output.num_cached_tokens

    def children(session: Any) -> list[Any]:
        return [answer(engine.ask(session, [question], GREEDY)[0]) for question in QUESTIONS]

    def hashed() -> list[int]:
        return [block.block_id for block in pool.blocks if block.block_hash is not None]

    cold = [asked(question, cache_salt=str(i)) for i, question in enumerate(QUESTIONS)]
    assert [found for _, found in cold] == [0, 0, 0]
    engine.llm.reset_prefix_cache()
    session = engine.open(CONTEXT_IDS, "kept", kept_fraction=0.1)
    answers = children(session)
    assert not hashed()
    warm = [asked(question) for question in QUESTIONS]
    assert [found for _, found in warm] == [0, CONTEXT, CONTEXT]
    assert [one for one, _ in warm] == [one for one, _ in cold]
    held = {block.block_id for block in connector.book.sessions.get("kept").blocks}
    assert held.isdisjoint(hashed())

    assert [asked(question) for question in QUESTIONS] == [(one, CONTEXT) for one, _ in cold]
    assert children(session) == answers
    again = engine.open(CONTEXT_IDS, "again", kept_fraction=0.1)
    assert (again.kept, again.gate_means) == (session.kept, session.gate_means)
    assert children(again) == answers
    for question, ((tokens, logprobs), _) in zip(QUESTIONS, cold, strict=True):
        # Of what stands in the cache some blocks are gone, so that its steps may be others.
        found = asked(question)[0]
        assert (found[0][0], found[1][0]) == (tokens[0], pytest.approx(logprobs[0], abs=0.1))
    engine.drop(session)
    engine.drop(again)
    assert free_blocks(engine) == before


@pytest.mark.skipif(not CACHING, reason="states are in blocks only with prefix caching")
@pytest.mark.parametrize("length", [CONTEXT - 24, 100])
def test_children_begin_within_a_block(engine, length):
    """Of the same size as its parent's state, which others go on from: so it is a copy."""
    before = free_blocks(engine)
    session = engine.open(CONTEXT_IDS[:length], kept_fraction=1.0)
    children = [answer(engine.ask(session, [question], GREEDY)[0]) for question in QUESTIONS]
    assert [answer(engine.ask(session, [question], GREEDY)[0]) for question in QUESTIONS] == children
    for (tokens, found), question in zip(children, QUESTIONS, strict=True):
        # What vLLM itself says of the same tokens: its steps end elsewhere, so not bit by bit.
        prompt, forced = CONTEXT_IDS[:length] + question, GREEDY.clone()
        forced.prompt_logprobs, forced.max_tokens = 0, 1
        (output,) = engine.llm.generate([{"prompt_token_ids": prompt + tokens}], forced, use_tqdm=False)
        theirs = [one[token].logprob for one, token in zip(output.prompt_logprobs[len(prompt) :], tokens, strict=True)]
        assert (torch.tensor(theirs) - torch.tensor(found)).abs().mean() < 0.05
    engine.drop(session)
    assert free_blocks(engine) == before


CASES = [
    {"kept_fraction": 0.5},
    {"kept_fraction": 0.25, "protected_prefix": 10},
    {"kept_fraction": 0.25, "whole_blocks": False},
    {"kept_fraction": 0.1, "whole_blocks": False},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_what_stays_and_what_is_answered_are_those_of_transformers(engine, model, estimator, options, monkeypatch):
    positions: list[Tensor] = []
    rated: list[Tensor] = []
    plain, plain_scores = Pages.compact, worker.checked_scores

    def compact(self: Pages, blocks: Tensor, kept: Tensor) -> None:
        positions.append(kept)
        plain(self, blocks, kept)

    def scored(*args: Any) -> list[Tensor]:
        rated.extend(plain_scores(*args))
        return rated

    monkeypatch.setattr(Pages, "compact", compact)
    monkeypatch.setattr(worker, "checked_scores", scored)
    session = engine.open(CONTEXT_IDS, **options)
    kept_fraction, protected = options["kept_fraction"], options.get("protected_prefix", 0)
    block = scheduler(engine).connector.book.block_size if options.get("whole_blocks", True) else 1
    of_cache = {"block_size": block, "protected_prefix": protected}
    own = prefilled(model, CONTEXT_IDS, estimator, kept_fraction, **of_cache)
    assert session.gate_means == pytest.approx(own.report().gate_means[0], rel=1e-2)
    scores = own.score().of
    own.compact()
    assert session.kept == [layer.kept_length for layer in own.attention_layers]
    differ = 0
    for found, of_layer, theirs, layer in zip(positions, scores, rated, own.attention_layers, strict=True):
        # Noise of signals in bf16 from two implementations; a fault would be as large as the scores' own spread.
        noise = (theirs - of_layer)[0].abs()
        assert (noise.mean(-1) < 0.05 * of_layer[0].std(-1)).all()
        for head, (a, b) in enumerate(zip(found, layer.kept_positions[0], strict=True)):
            others = sorted(set(a.tolist()) ^ set(b.tolist()))
            differ += len(others)
            last = of_layer[0, head][b[protected:].long()].min()
            assert ((of_layer[0, head][others] - last).abs() <= 2 * noise[head].max()).all()
    assert differ <= 0.01 * len(positions) * len(positions[0]) * CONTEXT

    same_sets = [torch.zeros(1, 2, CONTEXT).scatter_(2, of_layer.unsqueeze(0), 1.0) for of_layer in positions]
    same = prefilled(model, CONTEXT_IDS, Scores(same_sets), kept_fraction, **of_cache)
    same.compact()
    whole = prefilled(model, CONTEXT_IDS, Scores(same_sets), 1.0)
    whole.compact()
    asked = list(zip(engine.ask(session, QUESTIONS, GREEDY), QUESTIONS, strict=True))
    engine.drop(session)
    prompts = [{"prompt_token_ids": CONTEXT_IDS + question} for question in QUESTIONS]
    served = engine.llm.generate(prompts, GREEDY, use_tqdm=False)
    noise = torch.cat([against(model, whole, output, q) for output, q in zip(served, QUESTIONS, strict=True)]).mean()
    errors = torch.cat([against(model, same, output, question) for output, question in asked]).mean()
    uncompacted = torch.cat([against(model, whole, output, question) for output, question in asked]).mean()
    # The bound: twice what the two differ by without any eviction, in the mean of |Δ log-probability|.
    bound = max(2 * noise, 0.01)
    print(f"{FAMILY} {options}: kept sets differ in {differ}; noise {noise:.4f}, {errors:.4f}, full {uncompacted:.4f}")
    assert errors <= bound
    assert BUNDLED or uncompacted > bound


def test_methods_that_read_entries_find_them_in_the_pages(engine, model, monkeypatch):
    rated: list[Tensor] = []
    plain = worker.checked_scores
    monkeypatch.setattr(worker, "checked_scores", lambda *args: rated.extend(plain(*args)) or rated)
    session = engine.open(CONTEXT_IDS, scorer="keydiff", kept_fraction=0.25, whole_blocks=False)
    theirs = prefilled(model, CONTEXT_IDS, KeyDiff(), 0.25).score()
    for ours, of_layer in zip(rated, theirs.of, strict=True):
        torch.testing.assert_close(ours, of_layer, rtol=0, atol=0.05)
    engine.drop(session)


def test_an_emptied_cache_leaves_the_states_alone(engine):
    before = free_blocks(engine)
    session = engine.open(CONTEXT_IDS, empty=True)
    assert session.kept == [0, 0] and session.kv_bytes == 0 and session.achieved_fraction == 0
    assert before - free_blocks(engine) == session.blocks == 6  # of the GDN layers
    answers = [answer(output) for output in engine.ask(session, QUESTIONS, GREEDY)]
    engine.drop(session)
    whole = engine.open(CONTEXT_IDS, kept_fraction=1.0)
    assert [answer(output) for output in engine.ask(whole, QUESTIONS, GREEDY)] != answers
    engine.drop(whole)
    assert free_blocks(engine) == before


def test_blocks_come_back(engine):
    before = free_blocks(engine)
    one, other = engine.open(CONTEXT_IDS, kept_fraction=0.25), engine.open(ids(700, 9), kept_fraction=0.5)
    block = scheduler(engine).connector.book.block_size
    for session in (one, other):
        assert session.blocks == 6 + sum(math.ceil(kept / block) for kept in session.kept)
        entries = 2 * math.ceil(session.tokens / block)
        # With prefix caching there may be the state that the last step began with, too.
        assert session.blocks_before - entries in ((6, 12) if CACHING else (6,))
        assert session.kv_bytes_before / session.kv_bytes == entries / (session.blocks - 6)
    assert before - free_blocks(engine) == one.blocks + other.blocks
    solo = [answer(engine.ask(one, [question], GREEDY)[0])[0] for question in QUESTIONS]
    again = engine.ask(one, QUESTIONS, GREEDY)
    assert [answer(output)[0] for output in again] == solo
    assert engine.drop(one)
    assert not engine.drop(one)
    engine.ask(other, QUESTIONS[:1], GREEDY)
    engine.drop(other)
    assert free_blocks(engine) == before
    with pytest.raises(RuntimeError, match="no such session"):
        engine.ask(one, QUESTIONS[:1], GREEDY)
    assert free_blocks(engine) == before


@pytest.mark.parametrize("protected", [0, 3, 200])
def test_a_protected_prefix_counts_into_the_blocks(engine, protected, monkeypatch):
    copies: list[tuple[int, int]] = []
    plain = GateSightAttentionManager.take_copies
    monkeypatch.setattr(GateSightAttentionManager, "take_copies", lambda m: copies.extend(found := plain(m)) or found)
    before, block = free_blocks(engine), scheduler(engine).connector.book.block_size
    options = {"kept_fraction": 0.2, "protected_prefix": protected}
    exact = engine.open(CONTEXT_IDS, **options, whole_blocks=False)
    engine.drop(exact)
    session = engine.open(CONTEXT_IDS, **options)
    blocks = [math.ceil(kept / block) for kept in exact.kept]
    assert session.kept == [n * block for n in blocks]
    assert before - free_blocks(engine) == session.blocks == exact.blocks == 6 + sum(blocks)
    engine.ask(session, QUESTIONS, GREEDY)
    assert not copies, "a child copied a block that was not full"
    engine.drop(session)
    if protected == 3:
        without = engine.open(CONTEXT_IDS, kept_fraction=0.2)
        assert session.kept == without.kept and session.blocks == without.blocks
        engine.drop(without)


def test_a_prompt_that_does_not_begin_as_its_session_is_refused(engine):
    before = free_blocks(engine)
    session = engine.open(CONTEXT_IDS)
    other = replace(session, token_ids=(*session.token_ids[:-1], session.token_ids[-1] ^ 1))
    for wrong in (other, replace(session, token_ids=session.token_ids[:5])):
        with pytest.raises(RuntimeError, match="the same 1024 tokens, and a question"):
            engine.ask(wrong, QUESTIONS[:1], GREEDY)
    engine.ask(session, QUESTIONS[:1], GREEDY)
    engine.drop(session)
    assert free_blocks(engine) == before


def test_a_compaction_that_fails_costs_its_session_only(engine, monkeypatch):
    before = free_blocks(engine)
    session = engine.open(CONTEXT_IDS)
    calls = []
    plain = Pages.compact

    def breaks(self: Pages, *args: Any) -> None:
        plain(self, *args)
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(Pages, "compact", breaks)
        with pytest.raises(RuntimeError, match=r"could not be served \(open\).*planted"):
            engine.open(ids(700, 5), "broken")
    with pytest.raises(RuntimeError, match=r"made room|no such session"):
        engine.ask(replace(session, session_id="broken"), QUESTIONS[:1], GREEDY)
    engine.ask(session, QUESTIONS, GREEDY)
    engine.drop(session)
    assert free_blocks(engine) == before
    assert not any(bool(table[1:].any()) for table in get_kv_transfer_group().evicted.values())


def under_way(engine: Any, request_id: str, prompt: list[int], sampling: SamplingParams, **about: Any) -> None:
    """Add a request without waiting for its end."""
    tagged = sampling.clone()
    tagged.extra_args = {"kv_transfer_params": about}
    engine.llm.llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, tagged)


def reasons(engine: Any, steps: int = 60) -> dict[str, Any]:
    """How all requests under way end, by id."""
    found: dict[str, Any] = {}
    inner = engine.llm.llm_engine
    while inner.has_unfinished_requests() and (steps := steps - 1):
        found |= {out.request_id: out.outputs[0].finish_reason for out in inner.step() if out.finished}
    assert steps, "requests wait for ever"
    return found


def test_log_probabilities_of_a_prompt_are_refused_where_it_is_not_run(engine):
    """vLLM would run the whole prompt into the few blocks of a child, and serve what was refused."""
    before = free_blocks(engine)
    session = engine.open(CONTEXT_IDS)
    sampling = GREEDY.clone()
    sampling.prompt_logprobs = 1
    with pytest.raises(RuntimeError, match="no log-probabilities of its prompt"):
        engine.ask(session, QUESTIONS[:1], sampling)
    engine.drop(session)
    with pytest.raises(RuntimeError, match="no such session"):
        engine.ask(session, QUESTIONS[:1], sampling)
    assert free_blocks(engine) == before


def test_a_refused_request_does_not_wait_for_blocks_of_idle_sessions(engine):
    connector, once = scheduler(engine).connector, SamplingParams(max_tokens=1)
    before, refusals = free_blocks(engine), connector.book.sessions.stats.data.get("refusals", 0)
    for i in range(5):
        under_way(engine, f"full-{i}", ids(20, i), once, gatesight="open", session=f"full-{i}")
        reasons(engine)
    managers = len(connector.book.managers())
    assert free_blocks(engine) < managers
    under_way(engine, "refused", CONTEXT_IDS, once, gatesight="ask", session="none")
    under_way(engine, "behind", ids(20, 9), once)
    assert reasons(engine) == {"refused": "error", "behind": "length"}
    assert connector.book.sessions.stats.data.get("refusals", 0) <= refusals + 1
    for i in range(5):
        connector.book.sessions.drop(f"full-{i}")
    assert free_blocks(engine) == before


@pytest.mark.parametrize(("names", "free", "ends"), [("ab", 9, ["length", "error"]), ("a", 7, ["error"])])
def test_children_do_not_wait_for_ever_for_blocks_of_their_own_sessions(engine, monkeypatch, names, free, ends):
    """One runs until it lacks a block that the other's session has; or its own session leaves it none."""
    connector, pool = scheduler(engine).connector, scheduler(engine).kv_cache_manager.block_pool
    before, length = free_blocks(engine), 3 * connector.book.block_size - 47
    sampling = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, detokenize=False)
    contexts = {name: ids(length, seed) for seed, name in enumerate(names)}
    for name, context in contexts.items():
        engine.open(context, name, kept_fraction=1.0)
    taken = pool.get_new_blocks(free_blocks(engine) - free)  # the pool of a smaller engine
    with monkeypatch.context() as patch:
        patch.setattr(pool, "num_gpu_blocks", pool.num_gpu_blocks - len(taken))
        for name, context in contexts.items():
            under_way(engine, name, context + ids(5, 7), sampling, gatesight="ask", session=name)
        assert reasons(engine, 400) == dict(zip(names, ends, strict=True))
    pool.free_blocks(taken)
    for name in names:
        connector.book.sessions.drop(name)
    assert free_blocks(engine) == before and not connector.book.sessions._leaving
    assert answer(engine.llm.generate([{"prompt_token_ids": ids(20, 1)}], GREEDY, use_tqdm=False)[0])
    assert not any(bool(table.any()) for table in get_kv_transfer_group().evicted.values())


def test_gauges_follow_the_last_child_of_a_dropped_session(engine, monkeypatch):
    connector, told = scheduler(engine).connector, []
    plain = connector.get_kv_connector_stats
    monkeypatch.setattr(connector, "get_kv_connector_stats", lambda: told.append(plain()) or told[-1])
    session = engine.open(CONTEXT_IDS)
    about = {"gatesight": "ask", "session": session.session_id}
    under_way(engine, "last", CONTEXT_IDS + QUESTIONS[0], GREEDY, **about)
    for _ in range(3):
        engine.llm.llm_engine.step()
    connector.book.sessions.drop(session.session_id)
    assert reasons(engine) == {"last": "length"}
    engine.llm.generate([{"prompt_token_ids": ids(20, 1)}], GREEDY, use_tqdm=False)
    levels = [stats.data for stats in told if stats is not None]
    assert [at["session_blocks"] for at in levels if at["sessions"] == 0][-2:] == [session.blocks, 0]


def test_options_of_a_scorer_go_with_it():
    options = OpenOptions(scorer="random", scorer_options={"seed": 1})
    assert options.updated({"kept_fraction": 0.5}).scorer_options == {"seed": 1}
    assert options.updated({"scorer": "keydiff"}).scorer_options == {}
    assert options.updated({"scorer": "streaming_llm", "scorer_options": {"sinks": 2}}).scorer_options == {"sinks": 2}


@pytest.mark.parametrize("session", [None, 0, ["a"], {"a": 1}], ids=str)
def test_an_id_is_text(session):
    assert Asked.of({"gatesight": "open", "session": session}).session_id == ""


def test_what_happens_is_counted(engine, monkeypatch):
    counted = SessionStats()
    connector = scheduler(engine).connector
    plain = connector.get_kv_connector_stats

    def counting() -> Any:
        stats = plain()
        if stats is not None:
            counted.aggregate(stats)
        return stats

    counting()
    counted.reset()
    monkeypatch.setattr(connector, "get_kv_connector_stats", counting)
    session = engine.open(CONTEXT_IDS, kept_fraction=0.25)
    assert counted.data["sessions"] == 1 and counted.data["session_blocks"] == session.blocks
    engine.ask(session, QUESTIONS, GREEDY)
    engine.drop(session)
    with pytest.raises(RuntimeError):
        engine.ask(session, QUESTIONS[:1], GREEDY)
    found = counted.data
    assert (found["compactions"], found["children"], found["refusals"], found["sessions_dropped"]) == (1, 3, 1, 1)
    assert found["entries_kept"] == 2 * sum(session.kept)
    assert found["entries_kept"] + found["entries_evicted"] == 2 * 2 * CONTEXT
    assert (
        found["blocks_kept"] == session.blocks and found["blocks_kept"] + found["blocks_freed"] == session.blocks_before
    )
    assert found["bytes_freed"] == session.kv_bytes_before - session.kv_bytes
    assert all(found[f"{name}_seconds"] == pytest.approx(session.seconds[name]) for name in session.seconds)
    assert found["sessions"] == found["session_blocks"] == 0
    assert set(found) <= {*COUNTERS, *GAUGES}


def test_every_metric_is_on_the_page():
    page = (ROOT / "gatesight_hf" / "vllm" / "README.md").read_text(encoding="utf-8")
    for name, what in {**{f"{name}_total": what for name, what in COUNTERS.items()}, **GAUGES}.items():
        assert f"| `vllm:gatesight_{name}` | {what} |" in page


def test_a_new_session_stays_though_all_others_are_in_use(engine, monkeypatch):
    sessions = scheduler(engine).connector.book.sessions
    monkeypatch.setattr(sessions, "_limits", Limits(max_sessions=1))
    old = engine.open(CONTEXT_IDS, "old")
    sessions.get("old").users.add("somebody")
    new = engine.open(ids(700, 9), "new")
    sessions.release("somebody")
    newer = engine.open(ids(600, 9), "newer")
    assert [name for name in ("old", "new", "newer") if sessions.get(name)] == ["newer"]
    assert not engine.drop(old) and not engine.drop(new) and engine.drop(newer)


def test_a_session_makes_room_for_newer_ones(engine):
    before = free_blocks(engine)
    sessions = scheduler(engine).connector.book.sessions
    old, new = engine.open(CONTEXT_IDS, "old"), engine.open(CONTEXT_IDS, "new")
    engine.ask(old, QUESTIONS[:1], GREEDY)
    sessions.make_room(free_blocks(engine) + 1)
    assert sessions.get("new") is None and sessions.get("old") is not None
    with pytest.raises(RuntimeError, match=r"session 'new' could not be served.*made room for others"):
        engine.ask(new, QUESTIONS[:1], GREEDY)
    engine.drop(old)
    assert free_blocks(engine) == before


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_blocks_come_back_after_any_order_of_events(engine, seed):
    """Parents in several steps beside children and ordinary requests, some of them cancelled half-way."""
    before, choose = free_blocks(engine), random.Random(seed)
    inner, sessions = engine.llm.llm_engine, scheduler(engine).connector.book.sessions
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
        assert not any(block.block_hash for one in sessions.all for block in one.blocks)
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
        ("cache_config", "cache_dtype", "fp8", "quantised KV cache"),
        ("parallel_config", "enable_expert_parallel", True, "expert parallelism"),
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline_parallel_size=2"),
        ("device_config", "device_type", "cuda", "device 'cuda'"),
    ],
)
def test_modes_that_were_not_run_are_refused_by_name(engine, part, option, value, message):
    plain = engine.llm.llm_engine.vllm_config
    check_engine(plain)
    names = ("cache_config", "parallel_config", "device_config")
    config = {name: SimpleNamespace(**vars(getattr(plain, name))) for name in names}
    setattr(config[part], option, value)
    with pytest.raises(UnsupportedVLLMError, match=message):
        check_engine(SimpleNamespace(**config, speculative_config=None))


def test_unknown_page_layouts_are_refused(monkeypatch):
    monkeypatch.setattr(pages, "_get_attn_isa", lambda *args: "amx")
    with pytest.raises(UnsupportedVLLMError, match="'amx' CPU attention"):
        pages.check_layout(torch.zeros(1, 2, 32, 128, dtype=torch.bfloat16))


def test_options_are_checked(engine):
    with pytest.raises(RuntimeError, match="No scorer 'snapkv'; this engine has gatesight, key_norm"):
        engine.open(CONTEXT_IDS, scorer="snapkv")
    with pytest.raises(ValueError, match="scorer_options of 'random'"):
        engine.open(CONTEXT_IDS, scorer="random", scorer_options={"window": 3})
    with pytest.raises(ValueError, match="scorer 'gatesight' has no options"):
        engine.open(CONTEXT_IDS, scorer_options={"window": 3})
    with pytest.raises(ValueError, match="max_sessions"):
        gatesight_vllm.options.engine_settings("estimator", max_sessions=0)

    with pytest.raises(ValueError, match="heads of a layer, which share"):
        engine.open(CONTEXT_IDS, allocation="global")
    with pytest.raises(ValueError, match="kept_fraction"):
        engine.open(CONTEXT_IDS, kept_fraction=0)
    with pytest.raises(ValueError, match="no options"):
        engine.open(CONTEXT_IDS, block_size=4)


@pytest.mark.skipif(not BUNDLED, reason="the bundled model was trained for this")
def test_the_toy_suite_is_answered_as_in_transformers(engine, model, tmp_path):
    """Accuracy in the mean over tasks; single answers may differ, since two implementations of bf16 do."""
    tokenizer = reference.load_tokenizer()
    cells = cells_of([Method("gatesight"), Method("keydiff")], [0.25])
    scorers = ScorerFactory(model, tokenizer, {"gatesight": reference.ESTIMATOR_PATH})
    backends = {
        "transformers": TransformersBackend(model, tokenizer, scorers, "reference", rows=4),
        "vllm": VLLMBackend(engine, "reference", {}),
    }
    items = list(toy.suite(("niah_single_1", "niah_multiquery", "qa"), CONTEXT, 2, [0]))
    means = {}
    for name, backend in backends.items():
        folder = RunFolder(tmp_path / name, backend.describe())
        evaluate(items, backend, Prompter(tokenizer, False), cells, folder, check_every=2)
        lines = read_lines(tmp_path / name / "results.jsonl")
        assert all(line["identity_held"] == line["identity_checked"] for line in lines)
        rows = [[mean(a["official"] for a in cell["answers"]) for cell in line["cells"]] for line in lines]
        means[name] = [mean(of_cell) for of_cell in zip(*rows, strict=True)]
        kept = [cell["kept_per_layer"] for line in lines for cell in line["cells"] if cell["method"] != "empty"]
        assert kept and read_lines(tmp_path / name / "costs.jsonl")[0]["prefill_seconds"] > 0
    assert means["vllm"] == pytest.approx(means["transformers"], abs=0.1)
    assert means["vllm"][0] > 0.8 > 0.2 > means["vllm"][1]  # full, empty
    for label in ("snapkv", "gatesight+int8"):
        with pytest.raises(ValueError, match=rf"does not run {re.escape(label)}.*--backend transformers"):
            backends["vllm"].check(cells_of([Method.parse(label)], [0.1]))
