"""Controls: what every method has to beat, and what none can."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gatesight_kernels.checks import check_whole_number, described

from ..checks import check_model
from ..models.hybrid import HybridSpec
from ..scoring.interface import Needs, Prefill, check_prefill
from ..scoring.utility import continuation_utilities, normalise


@dataclass(frozen=True)
class RandomScorer:
    """Uniform scores, drawn for each layer, head and entry; the same seed gives the same scores."""

    seed: int = 0
    needs: ClassVar[Needs] = Needs()

    def __post_init__(self) -> None:
        check_whole_number("seed", self.seed, least=None)

    def check(self, spec: HybridSpec) -> None:
        """Random eviction fits every model."""

    def score(self, prefill: Prefill) -> list[Tensor]:
        check_prefill(prefill)
        scores = []
        for ordinal, keys in enumerate(prefill.keys):
            drawn = self.seed * 1_000_003 + ordinal + 7919 * sum(prefill.before)  # others for later tokens
            generator = torch.Generator().manual_seed(drawn)
            scores.append(torch.rand(keys.shape[:3], generator=generator).to(keys.device))
        return scores


@dataclass(frozen=True)
class OracleScorer:
    """True utility of every entry for given continuations, such as questions with their answers: an upper bound.

    The training target (`scoring.utility`) for what will really come, which no query-agnostic method knows.

    Args:
        model: The model that the cache belongs to.
        continuations: Token ids that follow the context, each on a fork of its own; contexts of one row only.
    """

    model: Any = field(repr=False)
    continuations: tuple[tuple[int, ...], ...] = field(repr=False)
    needs: ClassVar[Needs] = Needs(whole=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> "OracleScorer":
        # It never changes, and a copied cache should not bring a copy of the model.
        return self

    def check(self, spec: HybridSpec) -> None:
        """Raises TypeError or ValueError unless there are a model and continuations of it."""
        check_model(self.model)
        given = self.continuations if isinstance(self.continuations, (list, tuple)) else ()
        if not given or not all(isinstance(of_one, (list, tuple)) and of_one for of_one in given):
            raise ValueError(
                "OracleScorer needs at least one continuation, and tokens in each: continuations must be a tuple of "
                f"tuples of ids, got {described(self.continuations)}."
            )
        for of_one in given:
            for token in of_one:
                check_whole_number("an id of continuations", token, least=0)

    def score(self, prefill: Prefill) -> list[Tensor]:
        check_prefill(prefill)
        if len(prefill.lengths) > 1 or prefill.fork is None:
            raise ValueError(f"OracleScorer rates one context at a time, got a batch of {len(prefill.lengths)} rows.")
        context = prefill.lengths[0]
        pads = prefill.keys[0].shape[2] - context
        best = [keys.new_zeros((keys.shape[1], context), dtype=torch.float32) for keys in prefill.keys]
        for continuation in self.continuations:
            ids = torch.tensor([continuation], device=prefill.keys[0].device)
            found = continuation_utilities(self.model, prefill.fork(), ids, context, prefill.spec.scale)
            best = [torch.maximum(held, new) for held, new in zip(best, found, strict=True)]
        return [F.pad(normalise(utilities), (pads, 0)).unsqueeze(0) for utilities in best]
