"""Heads of a model that several workers share: each gathers what all have seen, and compacts the entries of its own.

All workers score and plan alike, from the same numbers, so that nothing but signals, gates and entries is sent. What
may fail comes after what is sent: a worker that fails alone leaves no other waiting.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.distributed import get_tp_group, tensor_model_parallel_all_gather


@dataclass(frozen=True)
class Ranks:
    """This worker among those that share the model's heads, which each have as many, in order.

    Attributes:
        rank: Its number.
        size: Of all.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def here(cls) -> "Ranks":
        group = get_tp_group()
        return cls(group.rank_in_group, group.world_size)

    def gathered(self, own: Tensor, dim: int) -> Tensor:
        """With the heads of all workers in `dim`, `own` being of this one's."""
        return own if self.size == 1 else tensor_model_parallel_all_gather(own.contiguous(), dim=dim)

    def mean(self, own: Sequence[float]) -> list[float]:
        """Over workers, each number by itself."""
        if self.size == 1:
            return list(own)
        # Gathering on CPUs knows no float64.
        rows = self.gathered(torch.tensor([own], dtype=torch.float32), dim=0)
        return rows.double().mean(dim=0).tolist()

    def gathered_kv(self, own: Tensor, heads: int) -> Tensor:
        """Of `[1, H of this worker, …]` those of all KV heads, of which workers beyond their number have copies."""
        gathered = self.gathered(own, dim=1)
        return gathered[:, :: max(1, self.size // heads)]

    def own_kv(self, of_all: Tensor) -> Tensor:
        """Of `[H, …]` this worker's."""
        heads = len(of_all)
        first = self.rank * heads // self.size
        return of_all[first : first + max(1, heads // self.size)]
