"""Estimator inputs: order and ages."""

import itertools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gatesight_hf.scoring.features import AGES, SIGNALS, assemble, feature_names
from gatesight_kernels import age_features

pytestmark = [pytest.mark.core, pytest.mark.quick]


def test_the_order_of_inputs_is_fixed():
    """It is part of the file format: changing it breaks every estimator."""
    assert SIGNALS == ("write_gate", "log_decay", "write_magnitude")
    assert AGES == ("relative_age", "log_age", "log_position")
    assert feature_names(2, 2) == [
        "write_gate.layer_2_below.head_0",
        "write_gate.layer_2_below.head_1",
        "log_decay.layer_2_below.head_0",
        "log_decay.layer_2_below.head_1",
        "write_magnitude.layer_2_below.head_0",
        "write_magnitude.layer_2_below.head_1",
        "write_gate.layer_1_below.head_0",
        "write_gate.layer_1_below.head_1",
        "log_decay.layer_1_below.head_0",
        "log_decay.layer_1_below.head_1",
        "write_magnitude.layer_1_below.head_0",
        "write_magnitude.layer_1_below.head_1",
        "relative_age",
        "log_age",
        "log_position",
    ]


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (3, 48), (6, 48)])
def test_names_are_unique_and_as_many_as_inputs(layers, heads):
    names = feature_names(heads, layers)
    assert len(names) == len(set(names)) == layers * 3 * heads + 3
    inputs = assemble([torch.zeros(5, 3, heads)] * layers)
    assert inputs.shape == (5, len(names))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_input_stands_where_its_name_says(dtype):
    layers, heads, length = 2, 3, 6
    signals = [torch.randn(length, 3, heads).to(dtype) for _ in range(layers)]
    inputs = assemble(signals)
    assert inputs.dtype == torch.float32
    names = feature_names(heads, layers)
    for layer, kind, head in itertools.product(range(layers), range(3), range(heads)):
        column = inputs[:, names.index(f"{SIGNALS[kind]}.layer_{layers - layer}_below.head_{head}")]
        assert torch.equal(column, signals[layer][:, kind, head].float())


@pytest.mark.parametrize("length", [2, 3, 5, 1000, 5000])
def test_ages_count_from_both_ends(length):
    scale, last = math.log(length), length - 1
    rows = [[(last - i) / last, math.log(length - i) / scale, math.log(1 + i) / scale] for i in range(length)]
    torch.testing.assert_close(age_features(0, length, length), torch.tensor(rows), rtol=1e-6, atol=1e-7)


@given(first=st.integers(0, 2**24), tokens=st.integers(1, 3000))
@example(first=0, tokens=1)
@example(first=1, tokens=1)
@example(first=2**24, tokens=1)
@settings(deadline=None)
def test_ages_lie_between_zero_and_one_and_fall_with_position(first, tokens):
    """Any tokens at the end of what was seen: what a growing cache rates."""
    length = first + tokens
    ages = age_features(first, length, length)
    assert ages.shape == (tokens, 3)
    assert ages.dtype == torch.float32
    assert ages.min() >= 0
    assert ages.max() <= 1
    assert ages[-1, :2].tolist() == [0, 0], "the last token has age 0"
    assert ages[-1, 2] == (0 if length == 1 else 1)
    assert (ages.diff(dim=0)[:, :2] <= 0).all()
    assert (ages.diff(dim=0)[:, 2] >= 0).all()


@given(start=st.integers(0, 2**20), tokens=st.integers(0, 300), more=st.integers(0, 2**20))
@settings(deadline=None)
def test_ages_of_any_tokens_of_any_context(start, tokens, more):
    """What comes after them counts: `more` tokens."""
    ages = age_features(start, start + tokens, start + tokens + more)
    assert bool(((ages >= 0) & (ages <= 1)).all())
    whole = age_features(0, start + tokens + more, start + tokens + more)
    assert torch.equal(ages, whole[start : start + tokens])


@pytest.mark.parametrize("length", [2, 3, 1000, 2**15, 2**18, 2**20])
def test_both_ends_have_the_same_ages_at_any_length(length):
    """So that no length leaves what an estimator was trained on."""
    assert age_features(0, 1, length).tolist() == [[1, 1, 0]]
    assert age_features(length - 1, length, length).tolist() == [[0, 0, 1]]


def test_ages_of_a_million_tokens_stay_within_one_and_tell_neighbours_apart():
    length = 2**20
    ages = age_features(length - 3, length, length)
    assert ages.min() >= 0
    assert ages.max() <= 1
    assert ages[:, 1].tolist() == sorted(ages[:, 1].tolist(), reverse=True)
    assert len(set(ages[:, 1].tolist())) == 3
    assert age_features(0, 1, length).isfinite().all()


def test_a_context_of_one_token_is_its_own_start_and_end():
    assert age_features(0, 1, 1).tolist() == [[0, 0, 0]]


def test_an_empty_context_has_no_ages():
    assert age_features(0, 0, 0).shape == (0, 3)
