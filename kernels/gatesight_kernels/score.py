"""Predicted utility of KV entries: the small MLPs of all KV heads of an attention layer over streamed inputs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .backend import runs_triton

#: Tokens that the twin works on at a time: bounds its scratch memory, whatever the context's length.
TOKENS_PER_TILE = 1024

#: Ages are divided by the log of this length, so that inputs stay in [0, 1] up to a million tokens.
AGE_SCALE = math.log1p(2**20)
NUM_AGES = 3


def age_features(start: int, stop: int, length: int, device: torch.device | None = None) -> Tensor:
    """Ages of the tokens `start … stop-1` of a context of `length` tokens.

    Returns:
        `[stop - start, 3]`, float32: age / length, log(1 + age) and log(1 + position), both divided by log(1 + 2^20).
        The age of a token is the number of context tokens after it.
    """
    position = torch.arange(start, stop, device=device)
    age = (length - 1 - position).float()
    return torch.stack([age / max(1, length), age.log1p() / AGE_SCALE, position.float().log1p() / AGE_SCALE], dim=-1)


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
    """
    heads, size, width = weight_in.shape
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


def packed_dtype(inputs: Tensor) -> torch.dtype:
    """The dtype to pack MLPs in for these inputs: theirs for the Triton kernel, float32 for the twin."""
    return inputs.dtype if runs_triton(inputs) else torch.float32


def score_entries(blocks: Sequence[Tensor], mlp: PackedMLP) -> Tensor:
    """Scores of one row's entries for all KV heads: standardise, first layer, GELU, second layer.

    Args:
        blocks: The inputs of T tokens, side by side: `[T, F_i]` each, F in all, of any stride between tokens. Ages are
            computed from positions 0 … T-1 and are no part of them.
        mlp: The layer's MLPs, on the same device; its `weight` in the dtype of the blocks for the Triton kernel.

    Returns:
        `[H, T]`, float32.

    Raises:
        ValueError: Blocks of different lengths, or not of F inputs.
        RuntimeError: Triton is forced and cannot run.
    """
    lengths, inputs = {len(block) for block in blocks}, sum(block.shape[1] for block in blocks)
    if len(lengths) != 1 or inputs != len(mlp.weight):
        shapes = [tuple(block.shape) for block in blocks]
        raise ValueError(f"The MLPs read {len(mlp.weight)} inputs of each token, got blocks of shapes {shapes}.")
    blocks = _merged(blocks)
    if runs_triton(*blocks, mlp.weight):
        from .triton_ops.score import score_entries_triton

        with torch.cuda.device_of(mlp.weight):
            return score_entries_triton(blocks, mlp)
    return score_entries_torch(blocks, mlp)


def score_entries_torch(blocks: Sequence[Tensor], mlp: PackedMLP) -> Tensor:
    """The twin: see `score_entries`. 16-bit inputs are widened one tile at a time; nothing else is copied."""
    length = len(blocks[0])
    sizes = [block.shape[1] for block in blocks]
    weights = mlp.weight.float().split(sizes)
    statistics = [None] * len(sizes) if mlp.statistics is None else mlp.statistics.split(sizes, dim=1)
    heads, width = mlp.weight_out.shape
    scores = mlp.weight_out.new_empty((heads, length))
    for start in range(0, length, TOKENS_PER_TILE):
        stop = min(length, start + TOKENS_PER_TILE)
        hidden = mlp.bias.expand(stop - start, -1)
        if mlp.age_weight is not None:
            hidden = torch.addmm(hidden, age_features(start, stop, length, hidden.device), mlp.age_weight)
        for block, weight, of_block in zip(blocks, weights, statistics, strict=True):
            inputs = block[start:stop].float()
            if of_block is not None:
                inputs = (inputs - of_block[0]).mul_(of_block[1])
            hidden = torch.addmm(hidden, inputs, weight)
        products = F.gelu(hidden).mul_(mlp.weight_out.flatten()).unflatten(1, (heads, width))
        scores[:, start:stop] = products.sum(-1).t()
    return scores + mlp.bias_out.unsqueeze(1)


def _merged(blocks: Sequence[Tensor]) -> list[Tensor]:
    """Blocks that lie side by side in one storage become one block, without a copy."""
    merged = [blocks[0]]
    for block in blocks[1:]:
        last = merged[-1]
        end = last.data_ptr() + last.shape[1] * last.element_size()
        beside = block.data_ptr() == end and block.dtype == last.dtype and block.stride() == last.stride()
        same = block.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
        if beside and same and last.stride(1) == 1:
            merged[-1] = last.as_strided((len(last), last.shape[1] + block.shape[1]), last.stride())
        else:
            merged.append(block)
    return merged
