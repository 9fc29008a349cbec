"""Controls: what every method has to beat."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..hybrid import HybridSpec
from ..scoring import Prefill


@dataclass(frozen=True)
class RandomScorer:
    """Uniform scores, drawn for each layer, head and entry; the same seed gives the same scores."""

    seed: int = 0
    needs_signals: bool = False

    def check(self, spec: HybridSpec) -> None:
        """Random eviction fits every model."""

    def score(self, prefill: Prefill, ordinal: int) -> Tensor:
        keys = prefill.keys[ordinal]
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + ordinal)
        return torch.rand(keys.shape[:3], generator=generator).to(keys.device)
