"""Scorers against a plain recomputation in float64, against hand-computed cases, and at the ends of their ranges."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gatesight_hf.compaction import select
from gatesight_hf.methods import (
    ExpectedAttention,
    KeyDiff,
    KeyNorm,
    KVzip,
    LagKV,
    OracleScorer,
    RandomScorer,
    SnapKV,
    StreamingLLM,
    TriAttention,
)
from gatesight_hf.methods.base import protect
from gatesight_hf.scoring import Prefill, Scorer

from ..helpers import methods_reference as reference
from ..helpers.methods_reference import Plain, check_scores, made_prefill, random_rows, recorded
from ..helpers.models import tiny_model
from ..helpers.oracle import assert_same, evicted_of
from ..helpers.running import compacted, left_padded, random_ids

pytestmark = pytest.mark.core

LENGTH = 17
#: 6 is the window of one SnapKV case and one more than that of another, 4 and 8 its sinks and lags' ends.
LENGTHS = (1, 2, 4, 5, 6, 8, LENGTH)
CASES: dict[str, tuple[Scorer, Callable[[Plain], Tensor]]] = {
    "snapkv": (SnapKV(window=5, kernel=3), lambda row: reference.snapkv(row, 5, 3)),
    "snapkv, max pool": (SnapKV(window=6, kernel=5, pool="max"), lambda row: reference.snapkv(row, 6, 5, "max")),
    "snapkv, no pool": (SnapKV(window=1, kernel=1), lambda row: reference.snapkv(row, 1, 1)),
    "snapkv, all but one": (SnapKV(window=64, kernel=7), lambda row: reference.snapkv(row, 64, 7)),
    "keydiff": (KeyDiff(), reference.keydiff),
    "keynorm": (KeyNorm(), reference.keynorm),
    "streaming": (StreamingLLM(sinks=4), lambda row: reference.streaming_llm(row, 4)),
    "streaming, no sinks": (StreamingLLM(sinks=0), lambda row: reference.streaming_llm(row, 0)),
    "lagkv": (LagKV(sinks=2, lag=3), lambda row: reference.lagkv(row, 2, 3)),
    "lagkv, no sinks": (LagKV(sinks=0, lag=4), lambda row: reference.lagkv(row, 0, 4)),
    "lagkv, one lag": (LagKV(), lambda row: reference.lagkv(row, 4, 128)),
    "expected attention": (ExpectedAttention(), lambda row: reference.expected_attention(row, 512)),
    "expected attention, epsilon": (
        ExpectedAttention(future=3, epsilon=1e-2),
        lambda row: reference.expected_attention(row, 3, 1e-2),
    ),
    "expected attention, no norm": (
        ExpectedAttention(future=1, value_norm=False, epsilon=1.0),
        lambda row: reference.expected_attention(row, 1, value_norm=False),
    ),
}
case = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module")
def contexts(dense: Any) -> dict[int, tuple[Prefill, list[list[Plain]]]]:
    """Of each length, as the tiny Qwen3.5 model computed it (8 of 32 channels turn, 3 query heads for a KV head)."""
    with torch.no_grad():
        return {length: recorded(dense, random_ids(length, seed=length)) for length in LENGTHS}


# -- against the formulas ----------------------------------------------------------------------------------------------


@case
@pytest.mark.parametrize("length", LENGTHS)
def test_scores_of_a_model_are_those_of_the_formula(contexts: Any, name: str, length: int) -> None:
    prefill, rows = contexts[length]
    scorer, formula = CASES[name]
    scores = scorer.score(prefill)
    assert len(scores) == len(rows) == 2
    for found, (row,) in zip(scores, rows, strict=True):
        assert (found.shape, found.dtype) == ((1, 2, length), torch.float32)
        check_scores(found[0], formula(row), 2e-5)


@case
@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_padding_is_never_read_and_scaled_rope_is_undone(name: str, scale: float) -> None:
    """Pads are NaN here, and the second row is shorter than windows, sinks and lags."""
    rows = random_rows([LENGTH, 3, 9], layers=2, scale=scale)
    scorer, formula = CASES[name]
    for found, layer in zip(scorer.score(made_prefill(rows, group=3)), rows, strict=True):
        for scores, row in zip(found, layer, strict=True):
            check_scores(scores[:, -row.length :], formula(row), 1e-5)


@case
def test_padded_rows_of_a_model_keep_what_each_keeps_alone(dense: Any, name: str) -> None:
    scorer, _ = CASES[name]
    rows = [random_ids(n, seed=n) for n in (LENGTH, 6, 1)]
    ids, mask = left_padded(rows)
    together = compacted(dense, ids, mask=mask, scorer=scorer, kept_fraction=0.4, allocation="flat")
    for r, row in enumerate(rows):
        alone = compacted(dense, row, scorer=scorer, kept_fraction=0.4, allocation="flat")
        pairs = zip(evicted_of(together, r, row.shape[1]), evicted_of(alone, 0, row.shape[1]), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@case
def test_chunked_prefills_give_the_same_scores(dense: Any, name: str) -> None:
    scorer, _ = CASES[name]
    ids = random_ids(LENGTH, rows=2)
    cuts = [compacted(dense, ids, chunks, scorer=scorer, kept_fraction=0.4) for chunks in ([LENGTH], [1, 9, 7])]
    for row in range(2):
        whole, parts = (evicted_of(cache, row, LENGTH) for cache in cuts)
        assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


@case
def test_bfloat16_entries_are_scored_in_float32(name: str) -> None:
    scorer, _ = CASES[name]
    narrow = made_prefill(random_rows([LENGTH, 7], layers=2), group=3, dtype=torch.bfloat16)
    wide = replace(narrow, **{f: [t.float() for t in getattr(narrow, f)] for f in ("keys", "values", "queries")})
    for found, expected in zip(scorer.score(narrow), scorer.score(wide), strict=True):
        assert found.dtype == torch.float32
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", [name for name in CASES if "lagkv" not in name])  # ranks of near scores change places
def test_a_bfloat16_model_scores_nearly_as_in_float32(contexts: Any, name: str) -> None:
    """kvpress issue 25: NaN in half precision."""
    scorer, _ = CASES[name]
    prefill, _ = recorded(_narrow_model(), random_ids(LENGTH, seed=LENGTH))
    for found, expected in zip(scorer.score(prefill), scorer.score(contexts[LENGTH][0]), strict=True):
        assert found.isfinite().all()
        free = expected < 1e30
        spread = (expected[free].max() - expected[free].min()) if free.any() else 1.0
        assert (found - expected)[free].abs().max() < 0.15 * spread


def _narrow_model(cached: list[Any] = []) -> Any:  # noqa: B006 - one model for all cases
    if not cached:
        cached.append(tiny_model().bfloat16())
    return cached[0]


# -- by hand -----------------------------------------------------------------------------------------------------------


def by_hand(keys: list[list[float]], queries: Tensor | None = None, values: Tensor | None = None) -> Prefill:
    """One layer, one KV head, no RoPE."""
    entries = torch.tensor(keys).unsqueeze(1)
    queries = torch.zeros_like(entries) if queries is None else queries
    row = Plain(queries, entries, entries if values is None else values, frequencies=[])
    return made_prefill([[row]], group=queries.shape[1])


def only(scorer: Scorer, prefill: Prefill) -> Tensor:
    ((scores,),) = scorer.score(prefill)[0]
    return scores


def test_keydiff_by_hand() -> None:
    """Two keys point east, one north: the anchor is (2, 1) / 3."""
    scores = only(KeyDiff(), by_hand([[1.0, 0.0], [9.0, 0.0], [0.0, 0.5]]))
    assert_same(scores, torch.tensor([-2.0, -2.0, -1.0]) / math.sqrt(5), 1e-6)


def test_keynorm_by_hand() -> None:
    assert only(KeyNorm(), by_hand([[3.0, 4.0], [0.0, 0.0], [0.0, -2.0]])).tolist() == [-5.0, 0.0, -2.0]


@pytest.mark.parametrize(
    ("pool", "expected"), [("mean", [9 / 60, 31 / 120, 11 / 60]), ("max", [9 / 40, 13 / 40, 13 / 40])]
)
def test_snapkv_by_hand(pool: str, expected: list[float]) -> None:
    """One query head pays 1/4 to each of four entries; the other pays 1/5, 1/5, 2/5 and 1/5 to the window."""
    keys = torch.zeros(4, 2)
    keys[2, 0] = math.log(2) * math.sqrt(2)
    queries = torch.tensor([[0.0, 0.0], [1.0, 0.0]]).expand(4, 2, 2)
    scores = only(SnapKV(window=1, kernel=3, pool=pool), by_hand(keys.tolist(), queries))
    assert_same(scores[:3], torch.tensor(expected), 1e-6)
    assert scores[3] >= 1e30


def test_expected_attention_by_hand() -> None:
    """Queries that are all zero expect the same of all entries: 1 / 2 each, weighed by the value's norm."""
    values = torch.tensor([[1.0, 0.0]] * 4 + [[3.0, 4.0], [0.0, 1.0]]).unsqueeze(1)
    prefill = by_hand(torch.randn(6, 2).tolist(), values=values)
    assert_same(only(ExpectedAttention(), prefill)[4:], torch.tensor([2.5, 0.5]))
    assert_same(only(ExpectedAttention(epsilon=0.5), prefill)[4:], torch.tensor([5.0, 1.0]))
    assert_same(only(ExpectedAttention(value_norm=False), prefill)[4:], torch.tensor([0.5, 0.5]))


def test_lagkv_by_hand() -> None:
    """The second partition spans 0 … 2 and 0 … 4: (1, 1) becomes (1/2, 1/4), less spread than (2, 0) as (1, 0)."""
    keys = [[9.0, 9.0], [2.0, 0.0], [1.0, 1.0], [0.0, 4.0], [2.0, 0.0], [7.0, 7.0]]
    scores = only(LagKV(sinks=1, lag=2), by_hand(keys))
    assert scores[1:3].tolist() == [0.5, 0.0]
    order = scores.argsort(descending=True).tolist()
    assert order == [0, 5, 4, 3, 1, 2]  # sink, then the tail from its end, then the ranks


def test_lagkv_leaves_out_channels_that_the_next_partition_does_not_vary() -> None:
    """Where kvpress divides by zero. Alone in the other channel, (1, _) is less spread than (2, _)."""
    keys = [[2.0, 5.0], [1.0, -80.0], [0.0, 3.0], [2.0, 3.0]]
    assert only(LagKV(sinks=0, lag=2), by_hand(keys))[:2].tolist() == [0.5, 0.0]


# -- protected entries -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 5, 9])
@pytest.mark.parametrize(("first", "last"), [(0, 0), (3, 0), (0, 3), (2, 3), (9, 9), (100, 100)])
def test_protected_entries_rank_in_the_documented_order(length: int, first: int, last: int) -> None:
    """The first ones in order, then the last ones from the end, then the rest by its scores, whatever the budget."""
    scores = torch.stack([torch.randn(length), 1e9 * torch.randn(length)])
    before = scores.clone()
    found = protect(scores, first, last)
    assert torch.equal(scores, before)
    first = min(first, length)
    last = min(last, length - first)
    for head in range(2):
        rest = sorted(range(first, length - last), key=lambda i: -float(scores[head, i]))
        order = [*range(first), *range(length - 1, length - 1 - last, -1), *rest]
        for budget in range(length + 1):
            kept, _ = select(found[None], [budget], [length])
            assert kept[0, head].tolist() == sorted(order[:budget])
    assert torch.equal(found[:, first : length - last], before[:, first : length - last])


def test_many_protected_entries_stay_apart() -> None:
    """In float32, at windows far beyond any default."""
    ranks = protect(torch.zeros(1, 200_000), 100_000, 90_000)[0]
    assert (ranks[:100_000].diff() < 0).all()
    assert (ranks[-90_000:].diff() > 0).all()
    assert ranks[-1] < ranks[99_999]
    assert ranks[-90_000] > 1e30
    assert ranks.isfinite().all()


@pytest.mark.parametrize(
    ("scorer", "order"),
    [
        (StreamingLLM(sinks=2), [0, 1, 8, 7, 6, 5, 4, 3, 2]),
        (StreamingLLM(sinks=50), list(range(9))),
        (LagKV(sinks=2), [0, 1, 8, 7, 6, 5, 4, 3, 2]),
        (SnapKV(window=3), [8, 7, 6]),
        (SnapKV(window=50), [8, 7, 6, 5, 4, 3, 2, 1]),
        (ExpectedAttention(), [0, 1, 2, 3]),
    ],
)
def test_budgets_below_the_protected_entries(scorer: Scorer, order: list[int]) -> None:
    for of_layer in scorer.score(made_prefill(random_rows([9]), group=3)):
        for scores in of_layer[0]:
            assert scores.argsort(descending=True)[: len(order)].tolist() == order


# -- ties and constants ------------------------------------------------------------------------------------------------


@case
def test_identical_tokens_are_scored_without_nan_and_the_budget_stays_exact(dense: Any, name: str) -> None:
    ids = torch.full((1, LENGTH), 5)
    cache = compacted(dense, ids, scorer=CASES[name][0], kept_fraction=0.4, allocation="flat")
    assert cache.report().physical_lengths == [7, 7]
    assert [(~gone).sum(-1).tolist() for gone in evicted_of(cache, 0, LENGTH)] == [[7, 7]] * 2


@case
def test_constant_entries_are_scored_without_nan(name: str) -> None:
    for value in (1.0, 0.0):
        entries = torch.full((LENGTH, 2, 8), value)
        prefill = made_prefill([[Plain(entries.repeat(1, 3, 1), entries, entries, frequencies=[])]], group=3)
        (scores,), (again,) = (CASES[name][0].score(prefill) for _ in range(2))
        assert scores.isfinite().all()
        assert torch.equal(scores, again)


def test_lagkv_ranks_ties_by_position() -> None:
    assert only(LagKV(sinks=0, lag=3), by_hand([[1.0, 2.0]] * 6))[:3].tolist() == pytest.approx([0, 1 / 3, 2 / 3])


# -- controls ----------------------------------------------------------------------------------------------------------


def test_random_scores_depend_on_the_seed_alone(contexts: Any) -> None:
    prefill, _ = contexts[LENGTH]
    first, again, other = (RandomScorer(seed).score(prefill) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    drawn = [*first, *other]
    heads = [scores[0, head] for scores in drawn for head in range(2)]
    assert len({tuple(head.tolist()) for head in heads}) == len(heads), "layers, heads and seeds draw apart"
    assert all(((head >= 0) & (head < 1)).all() for head in heads)


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (SnapKV, {"window": 0}, "window"),
        (SnapKV, {"window": 2.0}, "window"),
        (SnapKV, {"window": True}, "window"),
        (SnapKV, {"kernel": 4}, "odd"),
        (SnapKV, {"kernel": 0}, "kernel"),
        (SnapKV, {"pool": "sum"}, "mean or max"),
        (LagKV, {"sinks": -1}, "sinks"),
        (LagKV, {"lag": 0}, "lag"),
        (StreamingLLM, {"sinks": -1}, "sinks"),
        (StreamingLLM, {"sinks": 1.5}, "sinks"),
        (ExpectedAttention, {"future": 0}, "future"),
        (ExpectedAttention, {"epsilon": -0.1}, "epsilon"),
        (ExpectedAttention, {"epsilon": math.nan}, "epsilon"),
        (ExpectedAttention, {"epsilon": "0.1"}, "epsilon"),
        (KVzip, {"chunk": 0}, "chunk"),
        (KVzip, {"sinks": -1}, "sinks"),
        (TriAttention, {"nope": "all"}, "none, mean, full"),
        (TriAttention, {"mode": "union"}, "per_layer_head, per_head"),
        (TriAttention, {"aggregation": "sum"}, "mean, max"),
    ],
)
def test_invalid_options_are_refused(method: Any, options: dict[str, Any], message: str) -> None:
    required = {KVzip: (None, None), TriAttention: ([], "")}.get(method, ())
    with pytest.raises(ValueError, match=message):
        method(*required, **options)


def test_every_method_is_a_scorer(dense: Any) -> None:
    scorers = [scorer for scorer, _ in CASES.values()]
    scorers += [RandomScorer(), KVzip(dense, None), OracleScorer(dense, ((1,),)), TriAttention([], "")]
    assert all(isinstance(scorer, Scorer) for scorer in scorers)
