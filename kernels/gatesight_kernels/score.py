"""Predicted utility of KV entries: the small MLPs of all KV heads of an attention layer over streamed inputs."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .backend import runs_triton
from .checks import check_tensor, check_whole_number, described
from .packing import PackedMLP, age_features

#: Tokens that the twin works on at a time: bounds its scratch memory, whatever the context's length.
TOKENS_PER_TILE = 1024


def packed_dtype(inputs: Tensor) -> torch.dtype:
    """The dtype to pack MLPs in for these inputs: theirs for the Triton kernel, float32 for the twin."""
    check_tensor("inputs", inputs, "[T, F]")
    return inputs.dtype if runs_triton(inputs) else torch.float32


def score_entries(blocks: Sequence[Tensor], mlp: PackedMLP, first: int = 0) -> Tensor:
    """Scores of one row's entries for all KV heads: standardise, first layer, GELU, second layer.

    Args:
        blocks: The inputs of T tokens, side by side: `[T, F_i]` each, F in all, of any stride between tokens. Ages are
            computed from positions and are no part of them.
        mlp: The layer's MLPs, on the same device; its `weight` in the dtype of the blocks for the Triton kernel.
        first: Position of the first token: the context has `first + T` tokens, of which these are the last.

    Returns:
        `[H, T]`, float32.

    Raises:
        TypeError: `mlp` is not packed.
        ValueError: Blocks of different lengths, or not of F inputs, or a position below 0.
        RuntimeError: Triton is forced and cannot run.
    """
    if not isinstance(mlp, PackedMLP):
        raise TypeError(f"mlp must be what pack_mlp gives, got {described(mlp)}.")
    if not isinstance(blocks, (list, tuple)):
        raise ValueError(f"blocks must be a list of tensors [T, F], got {described(blocks)}.")
    for block in blocks:
        check_tensor("blocks", block, "[T, F]")
    check_whole_number("first", first, least=0)
    lengths, inputs = {len(block) for block in blocks}, sum(block.shape[1] for block in blocks)
    if len(lengths) != 1 or inputs != len(mlp.weight):
        shapes = [tuple(block.shape) for block in blocks]
        raise ValueError(f"The MLPs read {len(mlp.weight)} inputs of each token, got blocks of shapes {shapes}.")
    blocks = _merged(blocks)
    if runs_triton(*blocks, mlp.weight):
        from .triton_ops.score import score_entries_triton

        with torch.cuda.device_of(mlp.weight):
            return score_entries_triton(blocks, mlp, first)
    return score_entries_torch(blocks, mlp, first)


def score_entries_torch(blocks: Sequence[Tensor], mlp: PackedMLP, first: int = 0) -> Tensor:
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
            ages = age_features(first + start, first + stop, first + length, hidden.device)
            hidden = torch.addmm(hidden, ages, mlp.age_weight)
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
