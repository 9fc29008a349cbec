"""Estimator inputs: order and ages."""

import itertools
import math

import pytest
import torch

from gatesight_hf.features import AGES, SIGNALS, assemble, feature_names
from gatesight_kernels import age_features

pytestmark = pytest.mark.core


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


@pytest.mark.parametrize("length", [1, 2, 5, 1000])
def test_ages_count_from_both_ends(length):
    scale = math.log(1 + 2**20)
    rows = [[(length - 1 - i) / length, math.log(length - i) / scale, math.log(1 + i) / scale] for i in range(length)]
    torch.testing.assert_close(age_features(0, length, length), torch.tensor(rows), rtol=1e-6, atol=1e-7)


def test_ages_of_a_million_tokens_stay_within_one_and_tell_neighbours_apart():
    length = 2**20
    ages = age_features(length - 3, length, length)
    assert ages.min() >= 0
    assert ages.max() <= 1
    assert ages[:, 1].tolist() == sorted(ages[:, 1].tolist(), reverse=True)
    assert len(set(ages[:, 1].tolist())) == 3
    assert age_features(0, 1, length).isfinite().all()


def test_an_empty_context_has_no_ages():
    assert age_features(0, 0, 0).shape == (0, 3)
