"""Estimator inputs from GDN signals and ages. Pure tensor functions; the order of features is part of the file format.

One input vector per token and attention layer: for each GDN layer of the window, in ascending order, the blocks
β, g, ‖v‖ of HV numbers each, then three numbers of the entry's age.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gatesight_kernels import age_features

#: Order of the three signals in a recorded tensor `[B, T, 3, HV]` and in the input vector.
SIGNALS = ("write_gate", "log_decay", "write_magnitude")
#: What `age_features` gives, in its order.
AGES = ("relative_age", "log_age", "log_position")


def feature_names(num_value_heads: int, layers: int) -> list[str]:
    """Names in input order; GDN layers are counted from the nearest one below the attention layer (1) upwards."""
    names = [
        f"{signal}.layer_{layers - i}_below.head_{head}"
        for i in range(layers)
        for signal in SIGNALS
        for head in range(num_value_heads)
    ]
    return [*names, *AGES]


def assemble(signals: Sequence[Tensor]) -> Tensor:
    """All inputs of one context, ages included: what training reads. Scoring never builds this matrix.

    Args:
        signals: One tensor `[T, 3, HV]` per GDN layer of the window, any float dtype.

    Returns:
        `[T, len(signals) * 3 * HV + 3]`, float32.
    """
    length = len(signals[0])
    blocks = [signal.flatten(1).float() for signal in signals]
    return torch.cat([*blocks, age_features(0, length, length, signals[0].device)], dim=-1)
