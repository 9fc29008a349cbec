"""Budgets: exact totals, shares in proportion, caps, for awkward sizes too."""

import itertools
import math
import random
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gatesight_hf.compaction.budget import (
    PYRAMID_BETA,
    SHARED,
    allocate,
    check_kept_fraction,
    layer_weights,
    total_budget,
)

pytestmark = [pytest.mark.core, pytest.mark.quick]

LENGTHS = (0, 1, 2, 3, 5, 17, 100, 4096)
LAYERS = (1, 2, 3, 16)
FRACTIONS = (1e-9, 0.001, 0.01, 0.1, 0.25, 1 / 3, 0.35, 0.5, 0.9, 0.999, 1.0)


def random_gates(layers: int, seed: int) -> list[float]:
    """From nearly equal to three orders of magnitude apart."""
    generator = random.Random(seed)
    return [10 ** generator.uniform(-(seed % 4), 0) for _ in range(layers)]


def water_fill(total: Fraction, weights: list[float], length: int) -> list[Fraction]:
    """Proportional shares within [1, length] by trying every set of capped layers: exact, slow, independent."""
    exact = [Fraction(w) for w in weights]
    order = sorted(range(len(weights)), key=lambda j: weights[j])
    for low, high in itertools.product(range(len(weights) + 1), repeat=2):
        if low + high > len(weights):
            continue
        floor, middle, cap = order[:low], order[low : len(order) - high], order[len(order) - high :]
        left = total - len(floor) - length * len(cap)
        weight = sum(exact[j] for j in middle)
        if not middle and left != 0:
            continue
        scale = left / weight if middle else None
        shares = {j: Fraction(1) for j in floor} | {j: Fraction(length) for j in cap}
        shares |= {j: scale * exact[j] for j in middle}
        bounds = scale is None or (
            all(scale * exact[j] <= 1 for j in floor) and all(scale * exact[j] >= length for j in cap)
        )
        if bounds and all(1 <= share <= length for share in shares.values()):
            return [shares[j] for j in range(len(weights))]
    raise AssertionError("no solution")


@pytest.mark.parametrize("fraction", ["0.001", "0.05", "0.1", "0.15", "0.25", "0.35", "0.45", "0.5", "0.7", "0.9", "1"])
def test_the_total_is_the_fraction_rounded_half_up(fraction):
    for length, layers in itertools.product((1, 2, 5, 10, 50, 999, 4096, 262144), LAYERS):
        entries = length * layers
        expected = math.floor(Fraction(fraction) * entries + Fraction(1, 2))
        assert total_budget(float(fraction), length, layers) == min(entries, max(layers, expected))


@pytest.mark.parametrize("allocation", SHARED)
def test_layers_sum_to_the_total_and_stay_within_bounds(allocation):
    for length, layers, fraction, seed in itertools.product(LENGTHS, LAYERS, FRACTIONS, (1, 3)):
        kept = allocate(fraction, length, layers, allocation=allocation, gate_means=random_gates(layers, seed))
        assert len(kept) == layers
        assert sum(kept) == (total_budget(fraction, length, layers) if length else 0)
        assert all(min(1, length) <= k <= length for k in kept)


def test_every_allocation_keeps_the_same_number():
    for length, fraction in itertools.product(LENGTHS, FRACTIONS):
        totals = {sum(allocate(fraction, length, 3, allocation=a, gate_means=[0.9, 0.1, 0.4])) for a in SHARED}
        assert len(totals) == 1


def test_shares_follow_the_gates_with_caps_redistributed():
    for length, layers, fraction, seed in itertools.product((1, 2, 5, 37), (1, 2, 3, 5), FRACTIONS, range(4)):
        gates = random_gates(layers, seed)
        exact = water_fill(Fraction(total_budget(fraction, length, layers)), gates, length)
        kept = allocate(fraction, length, layers, gate_means=gates)
        assert all(abs(k - share) <= 1 + 1e-5 for k, share in zip(kept, exact, strict=True)), (kept, exact)


def test_a_larger_gate_never_keeps_less():
    for length, fraction, seed in itertools.product(LENGTHS, FRACTIONS, (1, 2, 3)):
        gates = sorted(random_gates(5, seed))
        kept = allocate(fraction, length, 5, gate_means=gates)
        assert kept == sorted(kept)


def test_only_ratios_of_gates_matter():
    for scale in (1e-30, 1e-3, 1e3):
        assert allocate(0.2, 1000, 3, gate_means=[0.2 * scale, 0.5 * scale, 0.3 * scale]) == [120, 300, 180]


def test_gates_far_apart_still_sum():
    for gates in ([1e-12, 1.0, 1.0], [1e-12, 1e-6, 1.0], [1.0] * 15 + [1e-9]):
        kept = allocate(0.3, 1000, len(gates), gate_means=gates)
        assert sum(kept) == 300 * len(gates)
        assert all(1 <= k <= 1000 for k in kept)


def test_flat_layers_differ_by_one_at_most_and_the_lower_one_gets_more():
    assert allocate(0.5, 5, 3, allocation="flat") == [3, 3, 2]
    for length, layers, fraction in itertools.product(LENGTHS, LAYERS, FRACTIONS):
        kept = allocate(fraction, length, layers, allocation="flat")
        assert max(kept) - min(kept) <= 1
        assert kept == sorted(kept, reverse=True)


def test_pyramid_falls_evenly_to_the_mean_over_beta():
    kept = allocate(0.1, 20_000, 5, allocation="pyramid")
    assert sum(kept) == 10_000
    assert kept[-1] == 2000 // PYRAMID_BETA
    assert {a - b for a, b in itertools.pairwise(kept)} == {(kept[0] - kept[-1]) // 4}


def test_everything_is_kept_at_one():
    for allocation, length in itertools.product(SHARED, LENGTHS):
        assert allocate(1.0, length, 4, allocation=allocation, gate_means=[0.9, 0.01, 0.3, 0.3]) == [length] * 4


def test_a_budget_below_one_entry_per_layer_leaves_one():
    for allocation, length in itertools.product(SHARED, (1, 2, 5, 1000)):
        assert allocate(1e-9, length, 4, allocation=allocation, gate_means=[0.9, 0.01, 0.3, 0.3]) == [1] * 4


@given(
    fraction=st.sampled_from(FRACTIONS) | st.floats(1e-6, 1),
    context=st.integers(1, 40) | st.integers(1, 6000),
    protected=st.integers(0, 50) | st.integers(0, 6000),
    block=st.integers(1, 20) | st.sampled_from((128, 384, 784, 1056)),
    layers=st.integers(1, 8),
    allocation=st.sampled_from(SHARED),
    seed=st.integers(0, 20),
)
@example(0.1, 16_000, 3, 784, 16, "pyramid", 0)
@example(0.1, 500, 3, 784, 16, "gate", 3)  # a context shorter than a block
@example(0.1, 6000, 1000, 784, 16, "gate", 3)  # a prefix longer than a block
@example(0.1, 20, 20, 8, 3, "gate", 1)  # nothing to evict
@example(0.9, 21, 2, 8, 1, "flat", 0)  # the context's end within a block
@example(1.0, 6000, 3, 784, 16, "gate", 3)
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_every_layer_takes_the_fewest_whole_blocks_for_its_share_and_what_is_protected(
    fraction, context, protected, block, layers, allocation, seed
):
    protected = min(protected, context)
    length, of_layers = context - protected, {"allocation": allocation, "gate_means": random_gates(layers, seed)}
    shares = allocate(fraction, length, layers, **of_layers)
    kept = allocate(fraction, length, layers, **of_layers, block_size=block, protected=protected)
    without = allocate(fraction, context, layers, **of_layers)
    for share, k, k_without in zip(shares, kept, without, strict=True):
        assert share <= k <= length
        assert (protected + k) % block == 0 or k == length
        blocks = math.ceil((protected + k) / block)
        assert blocks == math.ceil((protected + share) / block)
        # Protected tokens cost no block where there is room for them, and for one entry that rounding may have moved.
        room = -k_without % block
        assert blocks <= math.ceil(k_without / block) or protected + 1 > room


@pytest.mark.parametrize(("context", "allocation", "blocks"), [(16_000, "pyramid", 40), (16_384, "flat", 48)])
def test_a_short_prefix_takes_no_blocks_of_its_own(context, allocation, blocks):
    """Rounded without the prefix, each of 16 layers had a last block with 3 entries: 56 blocks and 64."""
    for protected in (0, 3):
        kept = allocate(0.1, context - protected, 16, allocation=allocation, block_size=784, protected=protected)
        assert all((protected + k) % 784 == 0 for k in kept)
        assert sum(protected + k for k in kept) == 784 * blocks


@pytest.mark.parametrize("fraction", [0, -0.1, 1.0001, 1.5, 2, math.nan, math.inf, True, False, None, "0.1", [0.1]])
def test_a_kept_fraction_outside_its_range_is_refused(fraction):
    with pytest.raises(ValueError, match=r"kept_fraction must be in \(0, 1\]"):
        check_kept_fraction(fraction)
    with pytest.raises(ValueError, match=r"kept_fraction must be in \(0, 1\]"):
        allocate(fraction, 10, 2, allocation="flat")


def test_one_as_an_integer_is_a_fraction():
    assert check_kept_fraction(1) == 1.0
    assert isinstance(check_kept_fraction(1), float)


@pytest.mark.parametrize("gates", [None, [], [0.5], [0.5, 0.0], [0.5, -1.0], [0.5, math.nan], [0.5, math.inf]])
def test_gate_budgets_need_a_positive_gate_per_layer(gates):
    with pytest.raises(ValueError, match="allocation='flat'"):
        allocate(0.5, 10, 2, gate_means=gates)


def test_an_unknown_allocation_names_the_known_ones():
    with pytest.raises(ValueError, match="gate, flat, pyramid"):
        layer_weights("Gate", 2, [0.5, 0.5])


@pytest.mark.parametrize("sizes", [(-1, 2, 1, 0), (5, 0, 1, 0), (5, 2, 0, 0), (5, 2, 1, -1)])
def test_sizes_below_their_range_are_refused(sizes):
    length, layers, block, protected = sizes
    with pytest.raises(ValueError, match=r"whole number of \d or more"):
        allocate(0.5, length, layers, allocation="flat", block_size=block, protected=protected)
