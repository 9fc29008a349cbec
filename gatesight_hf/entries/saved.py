"""What a file must hold of an attention layer's entries."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..files.tensor_files import TensorInfo
from .held import Extent
from .quantised import scales_shape


def expected_entries(
    tails: Mapping[str, Tensor], extent: Extent, found: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """Dtypes and shapes of a compacted layer's tensors, by name.

    Args:
        tails: `key` and `value` `[B, H, 1, D]` of a layer of the model that has seen one token.
        extent: Sizes of the saved cache.
        found: What the file declares for the layer. Only how many entries are kept, whether they are quantised, and
            whether and for what `kept_valid` is there, is taken from it.
    """
    heads, shape = tails["key"].shape[1], found["kept_positions"].shape if "kept_positions" in found else ()
    kept = min(shape[2], extent.context) if len(shape) == 3 else 0
    slots = (extent.rows, heads, kept)
    expected = {"kept_positions": TensorInfo(torch.int32, slots)}
    for part, dim in (("key", -2), ("value", -1)):
        entries = tails[part]
        shape, dtype = (*slots, entries.shape[-1]), entries.dtype
        expected[f"tail_{part}s"] = TensorInfo(dtype, (extent.rows, heads, extent.tail, entries.shape[-1]))
        if f"{part}_scales" in found:
            dtype = torch.int8
            expected[f"{part}_scales"] = TensorInfo(torch.float32, scales_shape(shape, dim))
        expected[f"kept_{part}s"] = TensorInfo(dtype, shape)
    if "kept_valid" in found:
        ragged = len(found["kept_valid"].shape) == 3
        expected["kept_valid"] = TensorInfo(torch.bool, slots if ragged else (extent.rows, kept))
    return expected
