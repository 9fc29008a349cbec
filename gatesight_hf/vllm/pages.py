"""Entries of an attention layer in vLLM's pages on CPUs: read in order, packed to the front of a request's blocks."""

import torch
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from .support import UnsupportedVLLMError

#: Instruction sets of vLLM's CPU attention whose page layout is known: keys `[D, block]`, values `[block, D]` per head.
KNOWN_LAYOUTS = ("vec", "vec16")


def check_layout(cache: Tensor) -> None:
    """Raise UnsupportedVLLMError unless this processor's page layout is one that `Pages` reads."""
    instructions = _get_attn_isa(cache.dtype, cache.shape[2], cache.shape[3] // 2)
    if instructions not in KNOWN_LAYOUTS:
        raise UnsupportedVLLMError(f"GateSight has not been run with pages of vLLM's {instructions!r} CPU attention.")


class Pages:
    """Views of a layer's cache `[blocks, H, block_size, 2 * D]`."""

    def __init__(self, cache: Tensor) -> None:
        blocks, heads, self.block_size, double = cache.shape
        both = cache.view(blocks, heads, 2 * self.block_size, double // 2)
        keys, values = both.chunk(2, dim=2)
        #: `[blocks, H, D, block_size]` and `[blocks, H, block_size, D]`.
        self.keys = keys.view(blocks, heads, double // 2, self.block_size)
        self.values = values
        self.heads = heads

    def read(self, blocks: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[H, n, D]` of the logical slots `[H, n]` of a request with these blocks `[m]`, int64."""
        page, offset = blocks[slots // self.block_size], slots % self.block_size
        head = torch.arange(self.heads).unsqueeze(1)
        return self.keys[page, head, :, offset], self.values[page, head, offset]

    def compact(self, blocks: Tensor, kept: Tensor) -> None:
        """Move the ascending slots `kept` `[H, N]` to the front, a block at a time: no later one is overwritten."""
        for i, slots in enumerate(kept.split(self.block_size, dim=1)):
            keys, values = self.read(blocks, slots)
            self.keys[blocks[i], :, :, : slots.shape[1]] = keys.transpose(1, 2)
            self.values[blocks[i], :, : slots.shape[1]] = values
