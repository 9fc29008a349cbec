"""Estimator inputs from GDN signals and ages. Pure tensor functions; the order of features is part of the file format.

One input vector per token and attention layer: for each GDN layer of the window, in ascending order, the blocks
β, g, ‖v‖ of HV numbers each, then three numbers of the entry's age.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

#: Order of the three signals in a recorded tensor `[B, T, 3, HV]` and in the input vector.
SIGNALS = ("write_gate", "log_decay", "write_magnitude")
AGES = ("relative_age", "log_age", "log_position")

#: Ages are divided by the log of this length, so that inputs stay in [0, 1] up to a million tokens.
_LOG_SCALE = math.log1p(2**20)


def feature_names(num_value_heads: int, layers: int) -> list[str]:
    """Names in input order; GDN layers are counted from the nearest one below the attention layer (1) upwards."""
    names = [
        f"{signal}.layer_{layers - i}_below.head_{head}"
        for i in range(layers)
        for signal in SIGNALS
        for head in range(num_value_heads)
    ]
    return [*names, *AGES]


def age_features(start: int, stop: int, length: int, device: torch.device | None = None) -> Tensor:
    """Ages of the tokens `start … stop-1` of a context of `length` tokens.

    Returns:
        `[stop - start, 3]`, float32: age / length, log(1 + age) and log(1 + position), both divided by log(1 + 2^20).
        The age of a token is the number of context tokens after it.
    """
    position = torch.arange(start, stop, device=device, dtype=torch.float32)
    age = length - 1 - position
    return torch.stack([age / max(1, length), age.log1p() / _LOG_SCALE, position.log1p() / _LOG_SCALE], dim=-1)


def assemble(signals: Sequence[Tensor], start: int, stop: int, pads: int, length: int) -> Tensor:
    """Inputs of the tokens `start … stop-1` of one row.

    Args:
        signals: One tensor `[T, 3, HV]` per GDN layer of the window, any float dtype, left pads included.
        start: First token, padding not counted.
        stop: One past the last token.
        pads: Left-padding slots of the row.
        length: Tokens of the row.

    Returns:
        `[stop - start, len(signals) * 3 * HV + 3]`, float32.
    """
    blocks = [signal[pads + start : pads + stop].flatten(1).float() for signal in signals]
    return torch.cat([*blocks, age_features(start, stop, length, signals[0].device)], dim=-1)
