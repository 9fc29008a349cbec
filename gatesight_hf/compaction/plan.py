"""From a prefill to the entries that stay: scores, budgets and selection of all layers, before anything is moved."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gatesight_kernels.checks import check_bool, check_whole_number

from ..entries.quantised import check_entries_dtype
from ..scoring.interface import Prefill, Scorer, Scores, checked_scores
from .budget import (
    BY_HEADS,
    check_allocation,
    check_gate_exponent,
    check_kept_fraction,
    layer_weights,
    spread,
    total_budget,
)
from .selection import Protected, best_of_all, select, select_global


@dataclass(frozen=True)
class CompactionOptions:
    """How much of a context stays. `GateSightCache` says what each option means.

    Raises:
        ValueError: Kept fraction outside (0, 1], negative prefix or suffix, unknown allocation or `entries_dtype`,
            block size below 1 or, where heads keep different numbers, above it, gate exponent that is negative or not
            finite, `recompact_every` below 1.
    """

    kept_fraction: float
    protected_prefix: int = 0
    allocation: str = "gate"
    block_size: int = 1
    gate_exponent: float = 1.0
    growing: bool = False
    recompact_every: int | None = None
    entries_dtype: str | None = None
    protected_suffix: int = 0

    def __post_init__(self) -> None:
        check_kept_fraction(self.kept_fraction)
        check_allocation(self.allocation)
        check_gate_exponent(self.gate_exponent)
        check_entries_dtype(self.entries_dtype)
        for name, least in (("protected_prefix", 0), ("protected_suffix", 0), ("block_size", 1)):
            check_whole_number(name, getattr(self, name), least)
        check_bool("growing", self.growing)
        check_whole_number("recompact_every", self.recompact_every, or_none=True)
        if self.allocation in BY_HEADS and self.block_size > 1:
            raise ValueError(
                f"allocation={self.allocation!r} has no blocks, since every head keeps a number of its own: leave "
                "block_size at 1."
            )

    @property
    def protected(self) -> Protected:
        """Tokens that always stay and are not counted."""
        return Protected(self.protected_prefix, self.protected_suffix)

    @property
    def grows(self) -> bool:
        """Whether tokens after a compaction are recorded, to be compacted too."""
        return self.growing or self.recompact_every is not None


@dataclass(frozen=True)
class LayerPlan:
    """What one attention layer keeps: slots `[B, H, N]`, or None for everything; `valid` marks real entries.

    `valid` is `[B, N]`, or `[B, T]` where everything stays and only pads are not real, or `[B, H, N]` where heads keep
    different numbers.
    """

    indices: Tensor | None
    valid: Tensor

    def with_rows(self, rows: Tensor) -> "LayerPlan":
        """See `Plan.with_rows`."""
        rows = rows.to(self.valid.device)
        return LayerPlan(None if self.indices is None else self.indices[rows], self.valid[rows])


@dataclass(frozen=True)
class Plan:
    """A decided compaction.

    Attributes:
        layers: By attention ordinal; dropped once carried out.
        context: Slots of the context.
        kept: Per row and attention layer, entries kept per head, protected ones included.
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

    def with_rows(self, rows: Tensor) -> "Plan":
        """Of other rows; `rows` are their numbers in this one, int64."""
        kept, means = ([table[i] for i in rows.tolist()] if table else [] for table in (self.kept, self.gate_means))
        layers = [layer.with_rows(rows) for layer in self.layers]  # there are some if a compaction failed half-way
        return replace(self, layers=layers, kept=kept, gate_means=means)


def plan_compaction(
    prefill: Prefill,
    scorer: Scorer,
    gate_means: list[list[float]],
    options: CompactionOptions,
    kv_bytes_before: int,
    held: list[list[int]] | None = None,
) -> Plan:
    """Decide what every attention layer keeps; nothing is scored where all layers keep everything.

    Args:
        prefill: What was recorded of the context.
        scorer: Rates its entries.
        gate_means: Per row and attention layer; may be empty unless `allocation` is `gate`, and `head` then has equal
            shares.
        options: Kept fraction, protection, allocation.
        kv_bytes_before: For the report.
        held: Per row and attention layer, entries besides protected ones that are still there, over all heads;
            everything then gets a score and indices. None if all are there.

    Raises:
        ValueError: The scorer gave NaN or a wrong shape, gate means are missing, or a row is all padding.
    """
    lengths, count = prefill.lengths, prefill.spec.num_attention_layers
    if min(lengths) == 0:
        raise ValueError(f"Row {lengths.index(0)} of the context has no tokens, only padding (attention_mask).")
    evictable = [end - first for first, end in map(options.protected.evictable, lengths)]
    protected = [length - n for length, n in zip(lengths, evictable, strict=True)]
    budgets = [total_budget(options.kept_fraction, n, count) for n in evictable]
    # Those that choose for themselves.
    heads = 1 if prefill.spec.indexed else prefill.keys[0].shape[1]
    if budgets == [count * n for n in evictable]:
        options = replace(options, allocation="flat")  # everything stays, and nothing needs a score
    if options.allocation == "score":
        scorer = Scores(checked_scores(scorer, prefill))
        totals = _within(held, [heads * n for n in budgets])
        shares = _shares_by_score(_scores(scorer, prefill), totals, lengths, options.protected)
    else:
        shares = [_shares(options, count, gate_means[row] if gate_means else None) for row in range(len(lengths))]
    counts = [
        spread(total, weights, n, options.block_size, always) if n else [0] * count
        for total, weights, n, always in zip(budgets, shares, evictable, protected, strict=True)
    ]
    if options.allocation in BY_HEADS:
        there = held or [[heads * n] * count for n in evictable]
        groups = (
            [(range(count), [min(heads * n, sum(row)) for n, row in zip(budgets, there, strict=True)])]
            if options.allocation == "global"
            else [
                (range(j, j + 1), [min(heads * k[j], n[j]) for k, n in zip(counts, there, strict=True)])
                for j in range(count)
            ]
        )
        layers = _plan_groups(prefill, scorer, groups, options.protected)
        kept = [[_fullest_head(layer, row) for layer in layers] for row in range(len(lengths))]
        entries = sum(sum(totals) for _, totals in groups) / heads
    else:
        if held is not None:
            counts = [[min(k, n // heads) for k, n in zip(*row, strict=True)] for row in zip(counts, held, strict=True)]
        whole = [
            held is None and all(row[j] == n for row, n in zip(counts, evictable, strict=True)) for j in range(count)
        ]
        layers = _plan_layers(prefill, scorer, counts, whole, options.protected)
        kept = [[k + protected[row] for k in counts[row]] for row in range(len(lengths))]
        entries = sum(map(sum, counts))
    total = count * sum(evictable)
    return Plan(
        layers=layers,
        context=prefill.keys[0].shape[2],
        kept=kept,
        achieved_fraction=entries / total if total else 1.0,
        gate_means=gate_means,
        kv_bytes_before=kv_bytes_before,
    )


def _within(held: list[list[int]] | None, totals: list[int]) -> list[int]:
    """By row, no more entries of all heads of all layers than are there."""
    return totals if held is None else [min(n, sum(row)) for n, row in zip(totals, held, strict=True)]


def _shares(options: CompactionOptions, layers: int, gate_means: list[float] | None) -> list[float]:
    """Of each layer, before scores are known; equal ones where all compete, or where there are no gates for `head`."""
    of_layers = {"global": "flat", "head": "flat" if gate_means is None else "gate"}
    allocation = of_layers.get(options.allocation, options.allocation)
    return layer_weights(allocation, layers, gate_means, options.gate_exponent)


def _shares_by_score(
    scores: list[Tensor], totals: list[int], lengths: list[int], protected: Protected
) -> list[list[float]]:
    """By row and layer, how many of the layer's entries are among the best of all layers, per head."""
    heads = scores[0].shape[1]
    best = best_of_all(scores, totals, lengths, protected)
    counted = torch.stack([of_layer.sum((1, 2)).cpu() for of_layer in best], dim=1)
    return (counted / heads).tolist()


def _plan_layers(
    prefill: Prefill, scorer: Scorer, counts: list[list[int]], whole: list[bool], protected: Protected
) -> list[LayerPlan]:
    """The same number of entries for all heads of a layer; everything, without scores, of those that are `whole`."""
    scores = [] if all(whole) else _scores(scorer, prefill)
    layers = []
    for j, keys in enumerate(prefill.keys):
        if whole[j]:
            slots = keys.shape[2]
            first_slot = torch.tensor([slots - n for n in prefill.lengths], device=keys.device)
            layers.append(LayerPlan(None, torch.arange(slots, device=keys.device) >= first_slot.unsqueeze(1)))
        else:
            of_layer = [row[j] for row in counts]
            chosen = select(scores[j], of_layer, prefill.lengths, protected)
            layers.append(_layer_plan(*chosen, keys.shape[1]))
    return layers


def _plan_groups(
    prefill: Prefill, scorer: Scorer, groups: list[tuple[range, list[int]]], protected: Protected
) -> list[LayerPlan]:
    """Entries of all heads of a group of layers compete for one budget for each row; groups are in order."""
    scores = _scores(scorer, prefill)
    chosen = (select_global([scores[j] for j in group], totals, prefill.lengths, protected) for group, totals in groups)
    return [_layer_plan(*of_layer, prefill.spec.num_key_value_heads) for of_group in chosen for of_layer in of_group]


def _scores(scorer: Scorer, prefill: Prefill) -> list[Tensor]:
    """`[B, H, T]` by layer; `[B, 1, T]` where heads must keep the same entries, since one index serves all of them.

    An entry then has the best of its heads' scores: one that a single head needs stays, whether scores are utilities or
    logarithms of them.
    """
    scores = checked_scores(scorer, prefill)
    return [of_layer.amax(1, keepdim=True) for of_layer in scores] if prefill.spec.indexed else scores


def _layer_plan(indices: Tensor, valid: Tensor, heads: int) -> LayerPlan:
    """Of slots chosen for each head, or once for all `heads`."""
    if indices.shape[1] < heads:
        indices, valid = indices.expand(-1, heads, -1).contiguous(), valid.view(len(valid), -1)
    return LayerPlan(indices, valid)


def _fullest_head(layer: LayerPlan, row: int) -> int:
    """Entries that it keeps."""
    return int(layer.valid[row].sum(-1).max())
