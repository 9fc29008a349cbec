"""Estimator layers made ready for `score_entries`, and the ages that it computes."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import check_bool, check_tensor, check_whole_number, described

NUM_AGES = 3


def age_scales(length: int) -> tuple[int, float]:
    """What ages are divided by in a context of `length` tokens: the largest age, and log(1 + it). Never zero."""
    oldest = max(1, length - 1)
    return oldest, math.log1p(oldest)


def age_features(start: int, stop: int, length: int, device: torch.device | None = None) -> Tensor:
    """Ages of the tokens `start … stop-1` of a context of `length` tokens.

    The age of a token is the number of context tokens after it. All three numbers are scaled by the context's own
    length, so that none leaves at a longer one what an estimator was trained on. Part of the file format.

    Returns:
        `[stop - start, 3]`, float32, each in [0, 1]: age / (length - 1), and log(1 + age) and log(1 + position), both
        divided by log(length). They are 0 in a context of one token.

    Raises:
        ValueError: Not 0 <= start <= stop <= length.
    """
    for name, value, least in (("start", start, 0), ("stop", stop, start), ("length", length, stop)):
        check_whole_number(name, value, least)
    position = torch.arange(start, stop, device=device)
    age, position = (length - 1 - position).float(), position.float()
    oldest, log_oldest = age_scales(length)
    ages = torch.stack([age / oldest, age.log1p() / log_oldest, position.log1p() / log_oldest], dim=-1)
    return ages.clamp_max_(1)  # logarithms are rounded


@dataclass(frozen=True)
class PackedMLP:
    """The MLPs of one attention layer, made ready by `pack_mlp`. H heads of W hidden units, F inputs besides ages.

    Attributes:
        weight: First layer, `[F, H · W]`; in bfloat16 the standardisation of the inputs is folded in.
        statistics: Mean and 1 / std of the inputs in other dtypes, `[2, F]`, float32; None in bfloat16.
        bias: `[H · W]`, float32, with what is folded in.
        age_weight: `[3, H · W]`, float32, the ages' standardisation folded in; None where ages are no inputs.
        weight_out: Second layer, `[H, W]`, float32.
        bias_out: `[H]`, float32.
    """

    weight: Tensor
    statistics: Tensor | None
    bias: Tensor
    age_weight: Tensor | None
    weight_out: Tensor
    bias_out: Tensor


@torch.no_grad()
def pack_mlp(
    weight_in: Tensor,
    bias_in: Tensor,
    weight_out: Tensor,
    bias_out: Tensor,
    mean: Tensor,
    std: Tensor,
    *,
    ages: bool,
    dtype: torch.dtype,
    device: torch.device | str,
) -> PackedMLP:
    """Round the first layer to `dtype`; in bfloat16 fold the standardisation of the inputs into it.

    What a rounded weight does to an input's mean is taken back by the bias, so that rounding costs no more than if
    standardised inputs were multiplied: (x - mean) · round(w / std). float16 has not the range for w / std, and float32
    would lose digits where a mean is far larger than its std: there inputs are standardised when they are read.

    Args:
        weight_in: `[H, F, W]`; with `ages` the last 3 inputs are those of `age_features`.
        bias_in: `[H, W]`.
        weight_out: `[H, W]`.
        bias_out: `[H]`.
        mean, std: Of the inputs, `[F]`.
        ages: Whether ages are inputs.
        dtype: Of the first layer, see `packed_dtype`.
        device: Of the result.

    Raises:
        ValueError: Shapes that do not belong together.
    """
    check_tensor("weight_in", weight_in, "[H, F, W]")
    heads, size, width = weight_in.shape
    others: dict[str, tuple[Tensor, tuple[int, ...]]] = {
        "bias_in": (bias_in, (heads, width)),
        "weight_out": (weight_out, (heads, width)),
    }
    others |= {"bias_out": (bias_out, (heads,)), "mean": (mean, (size,)), "std": (std, (size,))}
    for name, (tensor, shape) in others.items():
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} must have shape {shape}, as weight_in has {tuple(weight_in.shape)}, got {described(tensor)}."
            )
    check_bool("ages", ages)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point one, got {dtype}.")
    first = weight_in.double().transpose(0, 1).reshape(size, heads * width)
    mean, inverse_std = mean.double(), 1 / std.double()
    folded = first * inverse_std.unsqueeze(1)
    inputs = size - NUM_AGES if ages else size
    if dtype == torch.bfloat16:
        weight, statistics = folded[:inputs].to(dtype), None
        of_means = mean @ torch.cat([weight.double(), folded[inputs:]])
    else:
        weight, statistics = first[:inputs].to(dtype), torch.stack([mean[:inputs], inverse_std[:inputs]])
        of_means = mean[inputs:] @ folded[inputs:]
    return PackedMLP(
        # The kernel counts on rows side by side, which `reshape` leaves apart where it need not copy.
        weight=weight.to(device).contiguous(),
        statistics=None if statistics is None else statistics.float().to(device),
        bias=(bias_in.double().flatten() - of_means).float().to(device),
        age_weight=folded[inputs:].float().to(device).contiguous() if ages else None,
        weight_out=weight_out.float().to(device).contiguous(),
        bias_out=bias_out.float().to(device).contiguous(),
    )
