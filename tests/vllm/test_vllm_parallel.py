"""Two workers that share the heads of a model, each in a process of its own: against transformers and against vLLM."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="vLLM is not installed: see `make test-vllm`")

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1")
# Otherwise vLLM looks for as many NUMA nodes; and functions go to workers as pickles.
os.environ.update(VLLM_CPU_OMP_THREADS_BIND="0|1", VLLM_ALLOW_INSECURE_SERIALIZATION="1")

from gatesight_hf.methods import KeyDiff
from gatesight_hf.scoring import Scores
from gatesight_hf.vllm import GateSightLLM

from ..helpers.models import random_estimator
from ..helpers.vllm_runs import CONTEXT, GREEDY, SIZES, against, answer, free_blocks, ids, ordinary, prefilled, tiny

CONTEXT_IDS, QUESTIONS = ids(CONTEXT, 0), [ids(5, 1), ids(17, 2), ids(40, 3)]
#: With one KV head each worker has a copy of it.
MODELS = [("qwen3_5", 2), ("qwen3_next", 1)]


class Run:
    """An engine of two workers, and its model in transformers."""

    def __init__(self, folder: Any, family: str, kv_heads: int) -> None:
        self.model = tiny(family, kv_heads)
        self.estimator = random_estimator(self.model)
        self.model.save_pretrained(folder / "model")
        self.estimator.save_pretrained(folder / "estimator")
        options = {"dtype": "bfloat16", "skip_tokenizer_init": True, "enforce_eager": True, **SIZES}
        self.engine = GateSightLLM(folder / "model", folder / "estimator", tensor_parallel_size=2, **options)
        self.kv_heads = kv_heads

        def watch(worker: Any) -> None:
            """Notes what is compacted, and fails where it is told to."""
            from gatesight_hf.vllm.pages import Pages

            worker.compacted, worker.fails, plain = [], False, Pages.compact

            def compact(pages: Any, blocks: Any, kept: Any) -> None:
                plain(pages, blocks, kept)
                worker.compacted.append(kept.tolist())
                if worker.fails:
                    raise RuntimeError("planted")

            Pages.compact = compact  # type: ignore[method-assign]

        self.engine.llm.collective_rpc(watch)

    def kept(self) -> list[Tensor]:
        """Kept positions `[H, n]` of each layer, of the last session."""

        def take(worker: Any) -> list[Any]:
            found: list[Any] = worker.compacted
            worker.compacted = []
            return found

        by_worker = self.engine.llm.collective_rpc(take)
        layers = [[torch.tensor(kept) for kept in of_layer] for of_layer in zip(*by_worker, strict=True)]
        if self.kv_heads == 1:
            assert all(torch.equal(one, other) for one, other in layers)
            return [one for one, _ in layers]
        return [torch.cat(of_layer) for of_layer in layers]

    def plant(self, rank: int | None) -> None:
        """Have the compactions of one worker fail, or of none."""

        def tell(worker: Any) -> None:
            worker.fails = worker.rank == rank

        self.engine.llm.collective_rpc(tell)


@pytest.fixture(scope="module", params=MODELS, ids=str)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    running = Run(tmp_path_factory.mktemp("vllm"), *request.param)
    yield running
    running.engine.llm.llm_engine.engine_core.shutdown()


def test_children_of_a_parent_that_keeps_all_are_ordinary_runs(run):
    engine, before = run.engine, free_blocks(run.engine)
    expected = [answer(output) for output in ordinary(engine, CONTEXT_IDS, QUESTIONS)]
    session = engine.open(CONTEXT_IDS, kept_fraction=1.0)
    assert [answer(engine.ask(session, [question], GREEDY)[0]) for question in QUESTIONS] == expected
    engine.drop(session)
    assert free_blocks(engine) == before


@pytest.mark.parametrize("name", ["gatesight", "keydiff"])
def test_what_stays_and_what_is_answered_are_those_of_transformers(run, name):
    """With few differences, as bf16 has noise and each worker sums in its own order."""
    engine, model, scorer = run.engine, run.model, run.estimator if name == "gatesight" else KeyDiff()
    run.kept()
    session = engine.open(CONTEXT_IDS, kept_fraction=0.25, whole_blocks=False, scorer=name)
    own = prefilled(model, CONTEXT_IDS, scorer, 0.25)
    own.compact()
    assert session.gate_means == pytest.approx(own.report().gate_means[0], rel=1e-2)
    lengths = [layer.kept_length for layer in own.attention_layers]
    assert all(abs(kept - length) <= 1 for kept, length in zip(session.kept, lengths, strict=True))
    found = run.kept()
    differ = 0
    for kept, layer in zip(found, own.attention_layers, strict=True):
        for head, theirs in zip(kept, layer.kept_positions[0], strict=True):
            differ += len(set(head.tolist()) ^ set(theirs.tolist()))
    print(f"{name}: kept sets differ in {differ} of {2 * run.kv_heads * CONTEXT} entries")
    assert differ <= 0.01 * 2 * run.kv_heads * CONTEXT

    sets = [torch.zeros(1, run.kv_heads, CONTEXT).scatter_(2, kept.unsqueeze(0), 1.0) for kept in found]
    same = prefilled(model, CONTEXT_IDS, Scores(sets), 0.25)
    same.compact()
    whole = prefilled(model, CONTEXT_IDS, Scores(sets), 1.0)
    whole.compact()
    asked = list(zip(engine.ask(session, QUESTIONS, GREEDY), QUESTIONS, strict=True))
    engine.drop(session)
    prompts = [{"prompt_token_ids": CONTEXT_IDS + question} for question in QUESTIONS]
    plain = list(zip(engine.llm.generate(prompts, GREEDY, use_tqdm=False), QUESTIONS, strict=True))
    noise = torch.cat([against(model, whole, output, question) for output, question in plain]).mean()
    errors = torch.cat([against(model, same, output, question) for output, question in asked]).mean()
    uncompacted = torch.cat([against(model, whole, output, question) for output, question in asked]).mean()
    bound = max(2 * noise, 0.01)
    print(f"{name}: noise {noise:.4f}, {errors:.4f}, full {uncompacted:.4f}")
    assert errors <= bound < uncompacted


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_fails_alone_costs_its_session_only(run, rank):
    engine, before = run.engine, free_blocks(run.engine)
    session = engine.open(CONTEXT_IDS, kept_fraction=0.5)
    answers = [answer(output) for output in engine.ask(session, QUESTIONS, GREEDY)]
    run.plant(rank)
    with pytest.raises(RuntimeError, match=r"could not be served \(open\).*planted"):
        engine.open(ids(700, 5), "broken")
    run.plant(None)
    assert [answer(output) for output in engine.ask(session, QUESTIONS, GREEDY)] == answers
    engine.drop(session)
    assert free_blocks(engine) == before
