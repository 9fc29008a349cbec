"""Budgets that read scores: `score` shares between layers, and competition of a layer's heads, or of all heads."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gatesight_hf import CacheStateError, GateSightCache
from gatesight_hf.compaction.budget import spread
from gatesight_hf.compaction.selection import Protected, best_of_all, select_global
from gatesight_hf.scoring import Needs, Recorder, Scores

from ..helpers.models import KeyNorm, tiny_model
from ..helpers.oracle import Oracle, assert_same, evicted_of
from ..helpers.running import forward, prefilled, random_ids

pytestmark = [pytest.mark.core, pytest.mark.quick]

LENGTH = 40


def two_layers(first: float, second: float) -> list[Tensor]:
    """Scores `[1, 2, LENGTH]` of two layers, uniform in (0, first) and (0, second)."""
    generator = torch.Generator().manual_seed(0)
    return [scale * torch.rand(1, 2, LENGTH, generator=generator) for scale in (first, second)]


def cache_with(model: Any, scores: list[Tensor], **options: Any) -> GateSightCache:
    cache = prefilled(model, random_ids(LENGTH)).fork(scorer=Scores(scores), **options)
    cache.compact()
    return cache


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.5, 0.9])
def test_score_shares_are_those_of_the_global_best(dense: Any, fraction: float) -> None:
    """A layer keeps as many entries as are among the best of all, the same number in each of its heads."""
    scores = two_layers(1.0, 0.7)
    report = cache_with(dense, scores, allocation="score", kept_fraction=fraction).report()
    total = round(fraction * 2 * LENGTH)
    best = torch.cat([layer.flatten() for layer in scores]).topk(2 * total).indices
    expected = min(total - 1, int((best < 2 * LENGTH).sum()) / 2)  # the other layer keeps one entry at least
    first, second = report.kept_per_layer[0]
    assert first + second == total
    assert abs(first - expected) <= 0.5
    assert report.physical_lengths == [first, second]


def test_equal_layers_share_equally_and_a_worthless_one_keeps_an_entry(dense: Any) -> None:
    assert cache_with(dense, two_layers(1.0, 1e-9), allocation="score", kept_fraction=0.1).report().kept_per_layer == [
        [7, 1]
    ]
    same = two_layers(1.0, 1.0)[0]
    assert cache_with(dense, [same, same], allocation="score", kept_fraction=0.5).report().kept_per_layer == [[20, 20]]
    assert spread(10, [0.0, 0.0, 5.0], 20) == [1, 1, 8]
    assert spread(40, [0.0, 1.0], 20) == [20, 20]


def test_score_shares_go_with_blocks_and_a_protected_prefix(dense: Any) -> None:
    cache = cache_with(
        dense, two_layers(1.0, 0.5), allocation="score", kept_fraction=0.25, block_size=4, protected_prefix=3
    )
    kept = cache.report().kept_per_layer[0]
    assert all(n % 4 == 0 for n in kept)
    assert sum(kept) in (28, 32)  # round(0.25 * 2 * 37) + 2 * 3 = 25, each layer rounded up to blocks
    for evicted in evicted_of(cache, 0, LENGTH):
        assert not evicted[:, :3].any()


def test_gates_that_were_not_recorded(dense: Any) -> None:
    parent = prefilled(dense, random_ids(LENGTH), allocation="flat")
    with pytest.raises(CacheStateError, match="does not record"):
        parent.fork(allocation="gate")
    recorded = prefilled(
        dense, random_ids(LENGTH), scorer=Recorder(Needs(signals=True, hidden=True)), allocation="flat"
    )
    recorded.fork(scorer=Scores(two_layers(1, 1)), allocation="gate").compact()


def test_gates_of_a_part_are_not_enough(dense: Any) -> None:
    """A child with another allocation goes on without recording them."""
    child = prefilled(dense, random_ids(20)).fork(allocation="flat")
    child.fork(allocation="gate").compact()
    forward(dense, random_ids(LENGTH - 20, seed=1), child)
    with pytest.raises(CacheStateError, match="does not record"):
        child.fork(allocation="gate")


@pytest.mark.parametrize("allocation", ["head", "global"])
def test_blocks_of_heads_are_refused(dense: Any, allocation: str) -> None:
    with pytest.raises(ValueError, match="no blocks"):
        prefilled(dense, random_ids(LENGTH)).fork(allocation=allocation, block_size=4)


@pytest.mark.parametrize("fraction", [0.1, 0.35, 0.9])
def test_heads_compete_for_their_layers_share(dense: Any, fraction: float) -> None:
    """A layer keeps, over its heads, what `gate` gives it; the best of its own entries, whatever other layers rate."""
    scores = [torch.rand(1, 2, LENGTH, generator=torch.Generator().manual_seed(j)) for j in range(2)]
    scores[0][:, 1] += 0.8
    scores[1] += 7
    options = {"kept_fraction": fraction, "protected_prefix": 3, "protected_suffix": 2}
    shares = cache_with(dense, scores, allocation="gate", **options).report().kept_per_layer[0]
    cache = cache_with(dense, scores, allocation="head", **options)
    report = cache.report()
    for j, (share, evicted) in enumerate(zip(shares, evicted_of(cache, 0, LENGTH), strict=True)):
        best = scores[j][0, :, 3 : LENGTH - 2].flatten().topk(2 * (share - 5)).indices
        expected = torch.zeros(2 * (LENGTH - 5), dtype=torch.bool).scatter(0, best, True).view(2, -1)
        assert torch.equal(~evicted[:, 3 : LENGTH - 2], expected)
        assert not evicted[:, :3].any() and not evicted[:, LENGTH - 2 :].any()
        assert report.kept_per_layer[0][j] == int((~evicted).sum(-1).max())
    assert fraction > 0.8 or report.kept_per_layer[0][0] > shares[0], "heads keep different numbers"
    assert report.achieved_fraction == pytest.approx((sum(shares) - 10) / (2 * (LENGTH - 5)))


def test_heads_without_gates_have_equal_layers() -> None:
    model = tiny_model("olmo_hybrid")
    with pytest.warns(UserWarning, match="share it equally"):
        whole = prefilled(model, random_ids(LENGTH), scorer=KeyNorm(), allocation="head", kept_fraction=0.25)
    assert whole.compact().achieved_fraction == pytest.approx(0.25, abs=0.02)
    keeps = [int(layer.kept_valid.sum()) for layer in whole.attention_layers]
    assert len(keeps) > 1 and max(keeps) - min(keeps) <= whole.spec.num_key_value_heads


def test_the_best_of_all_do_not_count_what_is_protected() -> None:
    scores = two_layers(1.0, 1.0)
    scores[0][..., :5] = 9.0
    best = best_of_all(scores, [12], [LENGTH], Protected(5))
    assert sum(int(layer.sum()) for layer in best) == 12
    assert not best[0][..., :5].any()
    chosen = select_global(scores, [12], [LENGTH], Protected(5))
    assert sum(int(valid.sum()) for _, valid in chosen) == 12 + 4 * 5


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_head_that_keeps_nothing_equals_the_oracle(dense: Any, plain: Any, implementation: str) -> None:
    scores = two_layers(1.0, 1.0)
    scores[1][:, 0] = -5.0
    dense.set_attn_implementation(implementation)
    try:
        cache = cache_with(dense, scores, allocation="global", kept_fraction=0.2)
        evicted = evicted_of(cache, 0, LENGTH)
        assert evicted[1][0].all() and not evicted[1][1].all()
        question = random_ids(6, seed=1)
        with Oracle(plain, evicted) as oracle:
            assert_same(forward(dense, question, cache.fork()), oracle.logits(random_ids(LENGTH), question))
    finally:
        dense.set_attn_implementation("sdpa")


def test_gates_are_means_of_the_tokens_they_were_seen_of(dense: Any) -> None:
    """A fork that reads on without gates and is then forked for `gate` does not divide old sums by the new length."""
    parent = prefilled(dense, random_ids(LENGTH))
    before = parent.report().gate_means
    reader = parent.fork(allocation="flat")
    forward(dense, random_ids(20, seed=5), reader)
    assert reader.report().gate_means == before
