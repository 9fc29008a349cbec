"""Arguments of the wrong type, rank, length or device: each an error of a sentence or two that names the argument."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gatesight_kernels as kernels
from gatesight_hf import Estimator, EstimatorConfig, FrozenCache, GateSightCache, Session, methods
from gatesight_hf.cache import prefill
from gatesight_hf.commands.publishing import prepare
from gatesight_hf.compaction import allocate, select, select_global
from gatesight_hf.files import hub
from gatesight_hf.models import HybridSpec, attach, loading
from gatesight_hf.reference import load_model, load_tokenizer
from gatesight_hf.scoring import Scores
from gatesight_hf.training.collect import Sampling, document_tensors
from gatesight_hf.training.documents import read_texts
from gatesight_hf.training.fit import FitOptions, fit

from ..helpers.models import random_config, random_estimator
from ..helpers.running import compacted, forward, generate, prefilled, random_ids

pytestmark = pytest.mark.quick

CONTEXT, QUESTION = random_ids(20), random_ids(4, seed=9)
FULL = torch.cat([CONTEXT, QUESTION], 1)
MASK, POSITIONS = torch.ones(1, 24), torch.arange(20, 24)
SCORES, ROWS = torch.zeros(2, 3, 5), torch.zeros(1, 2, 5, 4)
SLOTS = torch.zeros(1, 2, 1, dtype=torch.long)
MLP = {"weight_in": (2, 7, 5), "bias_in": (2, 5), "weight_out": (2, 5), "bias_out": (2,), "mean": (7,), "std": (7,)}
BOTH = (TypeError, ValueError)


@pytest.fixture(scope="module")
def parent(dense: Any) -> GateSightCache:
    return compacted(dense, CONTEXT, kept_fraction=0.3)


@pytest.fixture(scope="module")
def recorded(dense: Any) -> GateSightCache:
    return prefilled(dense, CONTEXT, kept_fraction=0.3)


@pytest.fixture(scope="module")
def expected(dense: Any, parent: GateSightCache) -> Tensor:
    with torch.no_grad():
        return generate(dense, FULL, parent.fork())


def feed(**arguments: Any) -> Callable[[Any, GateSightCache], Any]:
    return lambda m, c: m(**{"input_ids": QUESTION, "past_key_values": c, **arguments})


def ask(**arguments: Any) -> Callable[[Any, GateSightCache], Any]:
    return lambda m, c: m.generate(**{"inputs": FULL, "past_key_values": c, "max_new_tokens": 2, **arguments})


def rows(method: str, value: Any) -> Callable[[Any, GateSightCache], Any]:
    return lambda m, c: getattr(c, method)(value)


def tokens(text: str, **options: Any) -> Any:
    raise AssertionError("nothing was to be tokenized")


#: Calls with a model and a fork of a compacted cache, by the argument that the error must name.
OF_A_CACHE: list[tuple[str, Callable[[Any, GateSightCache], Any]]] = [
    *(("input_ids", feed(input_ids=ids)) for ids in (
        QUESTION.tolist(), QUESTION[0], QUESTION[None], QUESTION.float(), QUESTION > 3, QUESTION.to("meta"), "text",
        QUESTION[:0])),
    *(("input_ids", ask(inputs=ids)) for ids in (FULL.tolist(), FULL[0], FULL[None], FULL.float(), FULL.to("meta"))),
    *(("attention_mask", feed(attention_mask=mask)) for mask in (
        MASK.tolist(), MASK[0], MASK[None], MASK[:, :7], MASK.expand(2, -1), MASK * 2, MASK / 2, MASK * torch.nan,
        MASK.to("meta"), MASK[:, :4] * 0, "x")),
    *(("attention_mask", ask(attention_mask=mask)) for mask in (MASK.tolist(), MASK[0], MASK * 2, MASK.to("meta"), 1)),
    *(("position_ids", feed(position_ids=positions)) for positions in (
        POSITIONS, POSITIONS[None, :2], POSITIONS[None, None, None], POSITIONS[None].float(),
        POSITIONS[None].to("meta"),
        POSITIONS.tolist(), POSITIONS.expand(2, -1), POSITIONS[None] - 9, 3)),
    *(("position_ids", ask(position_ids=positions)) for positions in (POSITIONS.tolist(), POSITIONS, "x")),
    *(("inputs_embeds", feed(input_ids=None, inputs_embeds=embeds)) for embeds in (
        torch.zeros(4, 64), torch.zeros(1, 4, 5), torch.zeros(1, 4, 64).long(), torch.zeros(1, 4, 64).to("meta"),
        [1.0])),
    ("max_new_tokens", ask(max_new_tokens="a")), ("max_new_tokens", ask(max_new_tokens=1.5)),
    ("max_new_tokens", ask(max_new_tokens=0)), ("prefill_chunk_size", ask(prefill_chunk_size=0)),
    ("past_key_values", feed(past_key_values="x")), ("past_key_values", feed(past_key_values=GateSightCache)),
    ("past_key_values", lambda m, c: m(QUESTION, past_key_values=c, cache=c.fork())),
    ("past_key_values", lambda m, c: m.generate(FULL, past_key_values=[c])),
    *((name, rows(method, value)) for method, name in (
        ("batch_select_indices", "indices"), ("reorder_cache", "beam_idx")) for value in (
        [0], 0, None, torch.tensor([True]), torch.tensor([0.0]), torch.tensor([5]), torch.tensor([-1]), torch.tensor(0),
        torch.tensor([[0]]), torch.tensor([], dtype=torch.long), torch.tensor([0], device="meta"))),
    ("beam_idx", rows("reorder_cache", torch.tensor([0, 0]))),
    *(("repeats", rows("batch_repeat_interleave", value)) for value in (0, -1, 1.5, True, None, torch.tensor(2))),
    *(("path", rows("save", path)) for path in (None, 3, "", "no/such/folder")),
    ("tokenizer", lambda m, c: c.save("never", tokenizer=3)),
    ("model", lambda m, c: c.tie(None)),
    ("watcher", lambda m, c: c.watch_attention(3).__enter__()),
]  # fmt: skip

OTHERS: list[tuple[str, Callable[[Any, GateSightCache], Any]]] = [
    *(("model", lambda m, c, call=call: call("text")) for call in (
        attach, lambda v: GateSightCache(methods.KeyNorm(), v), lambda v: methods.TriAttention.calibrate(v, CONTEXT),
        lambda v: Session(v, tokens, None), lambda v: prefill(v, CONTEXT, None),
        lambda v: document_tensors(v, CONTEXT, Sampling(), 0))),
    ("scorer", lambda m, c: c.score(3)), ("scorer", lambda m, c: c.fork(scorer=3)),
    ("ratio", lambda m, c: c.fork(ratio=1)), ("growing", lambda m, c: c.fork(growing=1)),
    *((name, lambda m, c, given={name: value}: GateSightCache(random_estimator(m), m, **given)) for name, value in (
        ("kept_fraction", torch.ones(99)), ("allocation", []), ("entries_dtype", 8), ("recompact_every", 1.5),
        ("protected_prefix", "1"), ("gate_exponent", "1"), ("block_size", None))),
    ("source", lambda m, c: GateSightCache.from_pretrained(None, model=m)),
    ("source", lambda m, c: Estimator.from_pretrained(3)), ("source", lambda m, c: hub.open_source([])),
    ("config", lambda m, c: Estimator({}, {})), ("tensors", lambda m, c: Estimator(random_config(m), None)),
    ("tensors", lambda m, c: Estimator(random_config(m), dict.fromkeys(random_config(m).tensor_shapes(), 1))),
    ("path", lambda m, c: random_estimator(m).save_pretrained(None)),
    ("repo_id", lambda m, c: random_estimator(m).push_to_hub(3)), ("folder", lambda m, c: prepare(None)),
    ("prefill", lambda m, c: random_estimator(m).score(c)), ("prefill", lambda m, c: methods.KeyNorm().score(c)),
    ("spec", lambda m, c: random_estimator(m).check(m.config)),
    ("spec", lambda m, c: EstimatorConfig.for_model(m, "x")),
    ("window", lambda m, c: EstimatorConfig.for_model(c.spec, "x", window=1.5)),
    ("hidden_size", lambda m, c: EstimatorConfig.for_model(c.spec, "x", hidden_size=0)),
    ("data", lambda m, c: EstimatorConfig.from_dict([])),
    ("of", lambda m, c: Scores(None)), ("of", lambda m, c: Scores([SCORES[0]])),
    ("scores", lambda m, c: c.fork(scorer=Scores([torch.zeros(1, 2, 20).long()] * 2)).compact()),
    ("path", lambda m, c: GateSightCache.load(None, m)), ("parent", lambda m, c: FrozenCache(m, 4)),
    ("max_new_tokens", lambda m, c: FrozenCache(c, 1.5)),
    ("tokenizer", lambda m, c: Session(m, 3, c)), ("cache", lambda m, c: Session(m, tokens, m.config)),
    ("cache", lambda m, c: Session(m, tokens, c)), ("text", lambda m, c: Session.open(m, tokens, None, ["x"])),
    ("prefill_chunk_size", lambda m, c: Session.open(m, tokens, None, "x", prefill_chunk_size=0)),
    ("ids", lambda m, c: prefill(m, CONTEXT[0], c)), ("ids", lambda m, c: prefill(m, CONTEXT[:, :0], c)),
    ("cache", lambda m, c: prefill(m, CONTEXT, {})), ("chunk_size", lambda m, c: prefill(m, CONTEXT, c, 0)),
    ("seed", lambda m, c: methods.RandomScorer("a")),
    ("value_norm", lambda m, c: methods.ExpectedAttention(value_norm=1)),
    ("prompts", lambda m, c: methods.KVzip(m, tokens, prompts="ab")),
    ("continuations", lambda m, c: methods.OracleScorer(m, 3).check(c.spec)),
    ("ids", lambda m, c: methods.TriAttention.calibrate(m, CONTEXT.float())),
    ("statistics", lambda m, c: methods.TriAttention(None, "x")),
    ("path", lambda m, c: load_model(None)), ("path", lambda m, c: load_tokenizer("/no/such")),
    ("name", lambda m, c: loading.load_named(3)), ("dtype", lambda m, c: loading.named_dtype(3)),
    *((name, lambda m, c, given={name: value}: allocate(**{"kept_fraction": 0.1, "length": 9, "layers": 2, **given}))
        for name, value in (("length", 1.5), ("layers", None), ("block_size", "a"), ("protected", 1.5),
        ("gate_means", 3),
                            ("gate_exponent", "a"))),
    ("scores", lambda m, c: select(SCORES[0], [1, 1], [5, 5])), ("counts", lambda m, c: select(SCORES, [1], [5, 5])),
    ("lengths", lambda m, c: select(SCORES, [1, 1], [9, 5])),
    ("protected", lambda m, c: select(SCORES, [1, 1], [5, 5], 1)),
    ("scores", lambda m, c: select_global([], [1, 1], [5, 5])),
    ("totals", lambda m, c: select_global([SCORES], [1], [5, 5])),
    ("scores", lambda m, c: kernels.select_top(SCORES, 1)), ("count", lambda m, c: kernels.select_top(SCORES[0], 1.5)),
    ("rows", lambda m, c: kernels.compact_rows(ROWS[0], SLOTS)),
    ("indices", lambda m, c: kernels.compact_rows(ROWS, SLOTS.to("meta"))),
    ("gate", lambda m, c: kernels.gate_means(ROWS[0])), ("stop", lambda m, c: kernels.age_features(5, 3, 9)),
    ("blocks", lambda m, c: kernels.score_entries(ROWS, pack())),
    ("mlp", lambda m, c: kernels.score_entries([ROWS], {})),
    ("first", lambda m, c: kernels.score_entries([torch.zeros(3, 4)], pack(), -1)),
    *((name, lambda m, c, name=name: pack(**{name: torch.zeros(9)})) for name in MLP),
    ("weight", lambda m, c: kernels.gdn_signals(ROWS[0], ROWS[0], ROWS, ROWS, ROWS, None)),
    ("ids", lambda m, c: document_tensors(m, CONTEXT.expand(2, -1), Sampling(), 0)),
    ("continuations", lambda m, c: Sampling(continuations=0)), ("epochs", lambda m, c: FitOptions(epochs=1.5)),
    ("train", lambda m, c: fit(random_config(m), [], [], FitOptions())), ("paths", lambda m, c: list(read_texts("x"))),
]  # fmt: skip


def pack(**changed: Tensor) -> Any:
    tensors = {name: torch.ones(shape) for name, shape in MLP.items()}
    return kernels.pack_mlp(**{**tensors, **changed}, ages=True, dtype=torch.float32, device="cpu")


def assert_names(name: str, call: Callable[[], Any]) -> None:
    with pytest.raises((TypeError, ValueError, OSError, RuntimeError)) as caught:
        call()
    text = str(caught.value)
    assert name in text
    assert len(text) <= 400


@pytest.mark.parametrize("number", range(len(OF_A_CACHE)))
def test_a_wrong_argument_is_named_and_the_cache_answers(
    dense: Any, parent: Any, expected: Tensor, number: int
) -> None:
    name, call = OF_A_CACHE[number]
    child = parent.fork()
    assert_names(name, lambda: call(dense, child))
    assert torch.equal(generate(dense, FULL, child), expected)


@pytest.mark.parametrize("number", range(len(OTHERS)))
def test_a_wrong_argument_is_named(dense: Any, parent: Any, recorded: Any, number: int) -> None:
    name, call = OTHERS[number]
    cache = parent.fork() if "FrozenCache" in call.__code__.co_names else recorded.fork()
    assert_names(name, lambda: call(dense, cache))


@pytest.mark.parametrize("positions", [POSITIONS[None] - 9, POSITIONS[None].flip(1), POSITIONS[None] > 3])
def test_a_frozen_cache_refuses_positions_that_go_back(
    dense: Any, parent: Any, expected: Tensor, positions: Tensor
) -> None:
    frozen = FrozenCache(parent, 20)
    with pytest.raises(ValueError, match="position_ids"):
        forward(dense, QUESTION, frozen, position_ids=positions)
    assert torch.equal(generate(dense, FULL, frozen), expected)


def test_a_layout_is_read_of_a_model_alone(dense: Any) -> None:
    assert HybridSpec.of(dense) == HybridSpec.from_config(dense.config)
    with pytest.raises(TypeError, match="model must be"):
        HybridSpec.of(dense.config)
