"""From a prefill to the entries that stay: scores, budgets and selection of all layers, before anything is moved."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .budget import allocate, check_allocation, check_kept_fraction
from .scoring import Prefill, Scorer
from .selection import select


@dataclass(frozen=True)
class CompactionOptions:
    """How much of a context stays. `GateSightCache` says what each option means.

    Raises:
        ValueError: Kept fraction outside (0, 1], negative prefix, unknown allocation, block size below 1.
    """

    kept_fraction: float
    protected_prefix: int = 0
    allocation: str = "gate"
    block_size: int = 1

    def __post_init__(self) -> None:
        check_kept_fraction(self.kept_fraction)
        check_allocation(self.allocation)
        for name, least in (("protected_prefix", 0), ("block_size", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is a whole number >= {least}, got {value!r}.")


@dataclass(frozen=True)
class LayerPlan:
    """What one attention layer keeps: slots `[B, H, N]`, or None for everything; `valid` marks real entries.

    `valid` is `[B, N]`, or `[B, T]` where everything stays and only pads are not real.
    """

    indices: Tensor | None
    valid: Tensor


@dataclass(frozen=True)
class Plan:
    """A decided compaction.

    Attributes:
        layers: By attention ordinal; dropped once carried out.
        context: Slots of the context.
        kept: Per row and attention layer, entries kept per head, protected prefix included.
        achieved_fraction: Kept share of the evictable entries.
        gate_means: Per row and attention layer.
        kv_bytes_before: Attention cache when the plan was made.
    """

    layers: list[LayerPlan]
    context: int
    kept: list[list[int]]
    achieved_fraction: float
    gate_means: list[list[float]]
    kv_bytes_before: int

    def carried_out(self) -> "Plan":
        return replace(self, layers=[])

    def map_rows(self, function: Callable[[list[Any]], list[Any]]) -> "Plan":
        """Carry a change of the batch dimension through what is kept per row."""
        return replace(self, kept=function(self.kept), gate_means=function(self.gate_means))


def plan_compaction(
    prefill: Prefill,
    scorer: Scorer,
    gate_means: list[list[float]],
    options: CompactionOptions,
    kv_bytes_before: int,
) -> Plan:
    """Decide what every attention layer keeps; layers that keep everything are not scored.

    Args:
        prefill: What was recorded of the context.
        scorer: Rates its entries.
        gate_means: Per row and attention layer; may be empty unless `allocation` is `gate`.
        options: Kept fraction, protection, allocation.
        kv_bytes_before: For the report.

    Raises:
        ValueError: The scorer gave NaN or a wrong shape, gate means are missing, or a row is all padding.
    """
    lengths, count = prefill.lengths, prefill.spec.num_attention_layers
    if min(lengths) == 0:
        raise ValueError(f"Row {lengths.index(0)} of the context has no tokens, only padding.")
    protected = [min(options.protected_prefix, length) for length in lengths]
    counts = [
        allocate(
            options.kept_fraction,
            length - first,
            count,
            allocation=options.allocation,
            gate_means=gate_means[row] if gate_means else None,
            block_size=options.block_size,
        )
        for row, (length, first) in enumerate(zip(lengths, protected, strict=True))
    ]
    layers = []
    for j, keys in enumerate(prefill.keys):
        of_layer = [row[j] for row in counts]
        if all(k + p == n for k, p, n in zip(of_layer, protected, lengths, strict=True)):
            slots = keys.shape[2]
            first_slot = torch.tensor([slots - n for n in lengths], device=keys.device)
            layers.append(LayerPlan(None, torch.arange(slots, device=keys.device) >= first_slot.unsqueeze(1)))
            continue
        scores = scorer.score(prefill, j)
        if scores.shape != keys.shape[:3]:
            raise ValueError(
                f"{scorer} gave scores of shape {tuple(scores.shape)} for entries of shape {tuple(keys.shape[:3])}."
            )
        layers.append(LayerPlan(*select(scores.to(keys.device), of_layer, lengths, options.protected_prefix)))
    evictable = count * sum(n - p for n, p in zip(lengths, protected, strict=True))
    return Plan(
        layers=layers,
        context=prefill.keys[0].shape[2],
        kept=[[k + protected[row] for k in counts[row]] for row in range(len(lengths))],
        achieved_fraction=sum(map(sum, counts)) / evictable if evictable else 1.0,
        gate_means=gate_means,
        kv_bytes_before=kv_bytes_before,
    )
