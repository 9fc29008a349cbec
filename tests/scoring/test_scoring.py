"""One scoring for many forks, one prefill for many scorers, and the budget that all heads of all layers share."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from gatesight_hf import CacheStateError, GateSightCache
from gatesight_hf.compaction import ALLOCATIONS, total_budget
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
from gatesight_hf.models import HybridSpec
from gatesight_hf.scoring import Needs, Prefill, Recorder, Scorer, Scores

from ..helpers.models import random_estimator
from ..helpers.oracle import Oracle, assert_same, evicted_of
from ..helpers.replays import CONTINUATIONS, tokenizer
from ..helpers.running import compacted, forward, generate, left_padded, padded, prefilled, random_ids, steps

pytestmark = pytest.mark.core

LENGTH = 17


def same_eviction(found: GateSightCache, expected: GateSightCache, length: int = LENGTH, row: int = 0) -> bool:
    pairs = zip(evicted_of(found, row, length), evicted_of(expected, row, length), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


# -- allocation="global" in a cache ------------------------------------------------------------------------------------


@dataclass
class Given:
    """Scores by hand, for tests."""

    of: list[Tensor]
    needs: ClassVar[Needs] = Needs()

    def check(self, spec: HybridSpec) -> None:
        pass

    def score(self, prefill: Prefill) -> list[Tensor]:
        return self.of


def with_an_empty_head(rows: int = 1, length: int = LENGTH) -> Given:
    """The second head of the first layer rates lowest by far; all others compete."""
    scores = [torch.randn(rows, 2, length, generator=torch.Generator().manual_seed(j)) for j in range(2)]
    scores[0][:, 1] -= 100.0
    return Given(scores)


def kept_of_heads(cache: GateSightCache, row: int = 0, length: int = LENGTH) -> list[list[int]]:
    return [(~evicted).sum(-1).tolist() for evicted in evicted_of(cache, row, length)]


@pytest.mark.parametrize("protected", [0, 3, LENGTH])
@pytest.mark.parametrize("fraction", [1e-6, 0.3, 0.7, 1.0])
def test_global_totals_are_exact_and_each_head_keeps_its_own_best(dense: Any, fraction: float, protected: int) -> None:
    scorer = KeyDiff()
    cache = prefilled(
        dense,
        random_ids(LENGTH),
        scorer=scorer,
        kept_fraction=fraction,
        allocation="global",
        protected_prefix=protected,
    )
    scores, report = cache.score().of, cache.compact()
    counts = kept_of_heads(cache)
    total = 2 * total_budget(fraction, LENGTH - protected, 2)
    assert sum(map(sum, counts)) == total + 4 * protected
    assert report.kept_per_layer == [[max(heads) for heads in counts]] == [report.physical_lengths]
    room = 4 * (LENGTH - protected)
    assert report.achieved_fraction == (total / room if room else 1.0)
    if 0 < total < room:
        assert len({count for heads in counts for count in heads}) > 1, "heads keep different numbers"
    best_gone, worst_kept = -torch.inf, torch.inf
    for of_layer, evicted in zip(scores, evicted_of(cache, 0, LENGTH), strict=True):
        assert not evicted[:, :protected].any()
        free, gone = of_layer[0, :, protected:], evicted[:, protected:]
        best_gone = max([best_gone, *free[gone].tolist()])
        worst_kept = min([worst_kept, *free[~gone].tolist()])
    assert best_gone <= worst_kept


def test_bytes_of_global_are_those_of_the_fullest_heads(dense: Any) -> None:
    cache = compacted(dense, random_ids(LENGTH), scorer=with_an_empty_head(), kept_fraction=0.4, allocation="global")
    report = cache.report()
    entry = 2 * 2 * 32 * 4  # KV heads, keys and values, channels, bytes
    assert report.kv_bytes == sum(report.physical_lengths) * entry
    assert report.kv_bytes_before == 2 * LENGTH * entry
    held = sum(map(sum, kept_of_heads(cache)))
    assert sum(report.physical_lengths) * 2 > held, "filled-up places are counted too"


@pytest.mark.parametrize("question", [1, 5])
def test_a_head_that_keeps_nothing_still_decodes(dense: Any, plain: Any, attention: str, question: int) -> None:
    ids, new = random_ids(LENGTH), random_ids(question, seed=1)
    cache = compacted(dense, ids, scorer=with_an_empty_head(), kept_fraction=0.4, allocation="global")
    assert kept_of_heads(cache)[0][1] == 0
    assert min(kept_of_heads(cache)[0][0], *kept_of_heads(cache)[1]) > 0
    logits = forward(dense, new, cache.fork())
    tokens, step_logits = steps(dense, torch.cat([ids, new], 1), cache)
    with Oracle(plain, evicted_of(cache, 0, LENGTH)) as oracle:
        assert_same(logits, oracle.logits(ids, new))
        expected_tokens, expected_logits = oracle.steps(torch.cat([ids, new], 1))
    assert_same(step_logits, expected_logits)
    assert torch.equal(tokens, expected_tokens)


def test_a_layer_that_keeps_nothing_still_decodes(dense: Any, plain: Any, attention: str) -> None:
    ids, new = random_ids(LENGTH), random_ids(5, seed=1)
    scorer = Given([torch.zeros(1, 2, LENGTH), torch.ones(1, 2, LENGTH) + torch.rand(1, 2, LENGTH)])
    cache = compacted(dense, ids, scorer=scorer, kept_fraction=0.3, allocation="global")
    assert kept_of_heads(cache)[0] == [0, 0]
    assert cache.report().physical_lengths[0] == 0
    assert cache.get_seq_length() == LENGTH
    logits = forward(dense, new, cache.fork())
    tokens, step_logits = steps(dense, torch.cat([ids, new], 1), cache)
    with Oracle(plain, evicted_of(cache, 0, LENGTH)) as oracle:
        assert_same(logits, oracle.logits(ids, new))
        expected_tokens, expected_logits = oracle.steps(torch.cat([ids, new], 1))
    assert_same(step_logits, expected_logits)
    assert torch.equal(tokens, expected_tokens)


def test_ragged_heads_of_padded_rows_equal_the_oracle(dense: Any, plain: Any, attention: str) -> None:
    """Rows, heads and layers all keep different numbers; in one row a head keeps nothing."""
    rows = [random_ids(LENGTH), random_ids(6, seed=6)]
    ids, mask = left_padded(rows)
    cache = compacted(
        dense, ids, mask=mask, scorer=with_an_empty_head(2), kept_fraction=0.5, allocation="global", protected_prefix=1
    )
    new = random_ids(4, rows=2, seed=3)
    full_mask = torch.nn.functional.pad(mask, (0, 4), value=1)
    logits = forward(dense, new, cache.fork(), **padded(full_mask, 4))
    tokens, step_logits = steps(dense, torch.cat([ids, new], 1), cache.fork(), attention_mask=full_mask)
    for r, row in enumerate(rows):
        assert kept_of_heads(cache, r, row.shape[1])[0][1] == 1, "the protected one alone"
        with Oracle(plain, evicted_of(cache, r, row.shape[1])) as oracle:
            assert_same(logits[r : r + 1], oracle.logits(row, new[r : r + 1]))
            expected_tokens, expected_logits = oracle.steps(torch.cat([row, new[r : r + 1]], 1))
        assert_same(step_logits[r : r + 1], expected_logits)
        assert torch.equal(tokens[r : r + 1], expected_tokens)


def test_ragged_heads_follow_forks_repeats_selections_and_reorders(dense: Any, plain: Any) -> None:
    rows = [random_ids(LENGTH), random_ids(LENGTH, seed=1)]
    scorer = with_an_empty_head(2)
    cache = compacted(dense, torch.cat(rows), scorer=scorer, kept_fraction=0.4, allocation="global")
    new = random_ids(5, rows=4, seed=3)

    def check(changed: GateSightCache, sources: list[int]) -> None:
        logits = forward(dense, new[: len(sources)], changed)
        for r, source in enumerate(sources):
            with Oracle(plain, evicted_of(cache, source, LENGTH)) as oracle:
                assert_same(logits[r : r + 1], oracle.logits(rows[source], new[r : r + 1]))

    check(cache.fork(), [0, 1])
    check(cache.fork(), [0, 0, 1, 1])  # more rows of input repeat the cache's own
    repeated, selected, reordered = (cache.fork() for _ in range(3))
    repeated.batch_repeat_interleave(2)
    check(repeated, [0, 0, 1, 1])
    selected.batch_select_indices(torch.tensor([1]))
    check(selected, [1])
    reordered.reorder_cache(torch.tensor([1, 1]))
    check(reordered, [1, 1])
    check(cache, [0, 1])


def test_beams_over_ragged_heads_equal_the_oracle(dense: Any, plain: Any) -> None:
    row, question = random_ids(LENGTH), random_ids(5, seed=1)
    cache = compacted(dense, row, scorer=with_an_empty_head(), kept_fraction=0.4, allocation="global")
    full, options = torch.cat([row, question], 1), {"num_beams": 3, "num_return_sequences": 3}
    found = generate(dense, full, cache.fork(), **options)
    with Oracle(plain, evicted_of(cache, 0, LENGTH)) as oracle:
        assert torch.equal(found, oracle.generate(full, **options))


# -- one scoring, many forks -------------------------------------------------------------------------------------------

METHODS: list[Scorer] = [
    SnapKV(window=5),
    KeyDiff(),
    KeyNorm(),
    LagKV(lag=4),
    StreamingLLM(),
    ExpectedAttention(),
    RandomScorer(),
]


def methods_of(model: Any) -> list[Scorer]:
    """Each method that there is."""
    of_model = [KVzip(model, tokenizer, chunk=9), OracleScorer(model, CONTINUATIONS), random_estimator(model)]
    return [*METHODS, *of_model, TriAttention.calibrate(model, random_ids(40, seed=9))]


def union(scorers: list[Scorer]) -> Needs:
    needs = Needs()
    for scorer in scorers:
        needs |= scorer.needs
    return needs


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_one_recorded_prefill_serves_all_scorers_and_fractions(dense: Any, allocation: str) -> None:
    """Each fork keeps what a cache keeps that had the scorer from the start; the parent stays as it was."""
    ids, scorers = random_ids(LENGTH), methods_of(dense)
    parent = prefilled(dense, ids, scorer=Recorder(union(scorers)), allocation=allocation)
    for scorer in scorers:
        scores, again = parent.score(scorer), parent.score(scorer)
        assert all(torch.equal(a, b) for a, b in zip(scores.of, again.of, strict=True))
        for fraction in (0.2, 0.6):
            expected = compacted(dense, ids, scorer=scorer, kept_fraction=fraction, allocation=allocation)
            for given in (scores, scorer):
                fork = parent.fork(scorer=given, kept_fraction=fraction)
                assert fork.compact().achieved_fraction == expected.report().achieved_fraction
                assert same_eviction(fork, expected), scorer
    assert not parent.is_compacted
    assert parent.score(KeyDiff()).of[0].shape == (1, 2, LENGTH)


def test_scores_of_a_padded_batch_serve_forks_that_decode(dense: Any, plain: Any) -> None:
    rows = [random_ids(LENGTH), random_ids(6, seed=6)]
    ids, mask = left_padded(rows)
    parent = prefilled(dense, ids, mask=mask, scorer=SnapKV(window=4))
    scores, new = parent.score(), random_ids(3, rows=2, seed=3)
    for fraction in (0.3, 0.8):
        fork = parent.fork(scorer=scores, kept_fraction=fraction)
        fork.compact()
        logits = forward(dense, new, fork.fork(), **padded(torch.nn.functional.pad(mask, (0, 3), value=1), 3))
        for r, row in enumerate(rows):
            with Oracle(plain, evicted_of(fork, r, row.shape[1])) as oracle:
                assert_same(logits[r : r + 1], oracle.logits(row, new[r : r + 1]))


def test_a_fork_goes_on_recording_for_its_own_scorer(dense: Any) -> None:
    """Half of the context comes to the parent, half to the child."""
    ids, scorer = random_ids(LENGTH), SnapKV(window=12)
    child = prefilled(dense, ids[:, :9], scorer=Recorder(Needs(queries=40, signals=True))).fork(scorer=scorer)
    forward(dense, ids[:, 9:], child)
    assert [queries.shape[1] for queries in child.prefill().queries] == [12, 12], "no more than the child needs"
    for found, expected in zip(child.score().of, prefilled(dense, ids, scorer=scorer).score().of, strict=True):
        free = expected < 1e30
        assert_same(found[free], expected[free])


def test_what_was_not_recorded_is_named(dense: Any) -> None:
    ids = random_ids(LENGTH)
    parent = prefilled(dense, ids, scorer=Recorder(Needs(queries=8)))
    cases = {
        SnapKV(window=9): "queries",
        ExpectedAttention(): "query_moments",
        random_estimator(dense): "signals",
        Recorder(Needs(hidden=True, signals=True)): "signals and hidden",
    }
    for scorer, names in cases.items():
        for use in (parent.score, lambda scorer: parent.fork(scorer=scorer)):
            with pytest.raises(CacheStateError, match=rf"needs {names}, which Recorder\(.*Recorder\(needs\)"):
                use(scorer)
    parent.score(SnapKV(window=8))
    assert GateSightCache(Recorder(), dense).fork(scorer=SnapKV()).scorer == SnapKV(), "nothing is missing of nothing"


def test_a_recorder_says_that_it_gives_no_scores(dense: Any) -> None:
    parent = prefilled(dense, random_ids(LENGTH), scorer=Recorder(), kept_fraction=0.5)
    for use in (parent.score, parent.compact):
        with pytest.raises(TypeError, match=r"A Recorder gives no scores.*fork\(scorer="):
            use()
    assert parent.fork(scorer=KeyDiff()).compact().achieved_fraction == 0.5
    assert parent.fork(kept_fraction=1.0).compact().achieved_fraction == 1.0


def test_scores_of_another_context_are_refused_in_few_words(dense: Any) -> None:
    scores = prefilled(dense, random_ids(LENGTH), scorer=KeyDiff()).score()
    other = prefilled(dense, random_ids(LENGTH - 1), scorer=scores, kept_fraction=0.5)
    with pytest.raises(ValueError, match=r"scores of shape \(1, 2, 17\) for entries of shape \(1, 2, 16\)") as caught:
        other.compact()
    assert len(str(caught.value)) < 200
    with pytest.raises(ValueError, match="Scores of 1 attention layers for a model of 2"):
        GateSightCache(Scores(scores.of[:1]), dense)


@pytest.mark.parametrize("allocation", ["gate", "global"])
def test_nan_scores_are_refused_when_they_are_used_and_only_there(dense: Any, allocation: str) -> None:
    parent = prefilled(dense, random_ids(LENGTH), scorer=KeyDiff(), kept_fraction=0.5, allocation=allocation)
    scores = parent.score()
    scores.of[1][0, 0, 3] = torch.nan
    fork = parent.fork(scorer=scores)
    with pytest.raises(ValueError, match="NaN"):
        fork.compact()
    assert not fork.is_compacted
    protected = parent.fork(scorer=scores, protected_prefix=4)
    assert protected.compact().achieved_fraction == 0.5


def test_a_compacted_cache_has_nothing_to_score(dense: Any) -> None:
    cache = compacted(dense, random_ids(LENGTH), scorer=KeyDiff())
    with pytest.raises(CacheStateError, match="compacted already"):
        cache.score()
    with pytest.raises(CacheStateError, match="run the model on the context"):
        GateSightCache(KeyDiff(), dense).score()


# -- the exponent of gates ---------------------------------------------------------------------------------------------


def test_the_gate_exponent_sharpens_the_shares_of_layers(dense: Any) -> None:
    parent = prefilled(dense, random_ids(40), scorer=KeyDiff(), kept_fraction=0.3)

    def kept(**options: Any) -> list[int]:
        return parent.fork(**options).compact().kept_per_layer[0]

    flat, default, sharp = kept(allocation="flat"), kept(), kept(gate_exponent=2.0)
    assert kept(gate_exponent=0.0) == flat == [12, 12]
    assert kept(gate_exponent=1.0) == default
    assert sharp[0] < default[0] < 12 < default[1] < sharp[1]
    low, high = parent.report().gate_means[0]
    assert sharp[0] == pytest.approx(24 * low**2 / (low**2 + high**2), abs=0.5)
    assert sum(default) == sum(sharp) == 24


@pytest.mark.parametrize("exponent", [-1.0, float("nan"), float("inf"), "2", True])
def test_gate_exponents_that_are_no_power_are_refused(dense: Any, exponent: Any) -> None:
    with pytest.raises(ValueError, match="gate_exponent"):
        GateSightCache(KeyDiff(), dense, gate_exponent=exponent)
