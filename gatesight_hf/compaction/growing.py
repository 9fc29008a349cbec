"""Conversations that grow: what came since a compaction is scored by its own record and compacted with the survivors.

A token is rated once, when it is compacted for the first time, with its position and age in everything seen until then.
Entries that survive keep that score, age included: the signals it came from are gone. One selection then goes over
survivors and new entries, with the budget counted over everything seen; what was evicted before stays evicted.

A cache that does not grow frees layer after layer, and can complete a compaction that failed. Here it is done for all
layers or for none, so that no token goes unrecorded; it needs room for all kept entries at once.
"""

import torch
from torch import Tensor

from ..entries.attention import GateSightAttentionLayer
from ..models.hybrid import HybridSpec
from ..scoring.interface import Prefill, Scorer, Scores, checked_scores
from .plan import CompactionOptions, Plan, plan_compaction
from .selection import Protected


def check_can_grow(scorer: Scorer, spec: HybridSpec) -> None:
    """Raises ValueError if `scorer` reads what a compaction takes away, or entries are regrouped with an index."""
    if spec.indexed:
        raise ValueError(
            f"{spec.model_type} has an index over its entries, which is made once: leave growing and recompact_every "
            "out, and its cache keeps all later tokens."
        )
    if gone := scorer.needs.of_the_whole:
        raise ValueError(
            f"{scorer} cannot rate what comes after a compaction: it reads {' and '.join(gone)} of a context that is "
            "partly gone by then. Use a scorer that rates each token by itself, such as an Estimator, or leave growing "
            "and recompact_every out."
        )


def plan_growing(
    prefill: Prefill,
    layers: list[GateSightAttentionLayer],
    scorer: Scorer,
    gate_means: list[list[float]],
    options: CompactionOptions,
    kv_bytes_before: int,
) -> tuple[Plan, list[Tensor]]:
    """Decide what every attention layer keeps of everything seen.

    Args:
        prefill: What was recorded since the last compaction.
        layers: The cache's attention layers, unchanged since that record ended.
        scorer: Rates the new entries.
        gate_means: Per row and attention layer, over all tokens seen.
        options: Kept fraction, protection, allocation.
        kv_bytes_before: For the report.

    Returns:
        The plan, whose slots count all tokens seen (S), and per layer the scores `[B, H, S]`, float32, -inf at entries
        that were evicted before.

    Raises:
        ValueError: See `plan_compaction`.
    """
    new = checked_scores(scorer, prefill)
    scores = [_of_everything(*pair) for pair in zip(layers, new, strict=True)]
    lengths = [prefill.first(row) + length for row, length in enumerate(prefill.lengths)]
    # All that a plan reads of keys is their number and their device.
    slots = [of_layer.new_empty((*of_layer.shape, 0)) for of_layer in scores]
    seen = Prefill(prefill.spec, lengths, [], slots, slots)
    held = [_held(layer, lengths, options.protected) for layer in layers]
    per_row = [list(row) for row in zip(*held, strict=True)]
    return plan_compaction(seen, Scores(scores), gate_means, options, kv_bytes_before, per_row), scores


def carry_out(plan: Plan, layers: list[GateSightAttentionLayer], scores: list[Tensor], quantised: bool) -> None:
    """Compact all layers, and quantise them if asked to; if one fails, the caller takes all of it back."""
    for layer, chosen, of_layer in zip(layers, plan.layers, scores, strict=True):
        assert chosen.indices is not None
        kept_scores = of_layer.gather(2, chosen.indices)
        layer.compact(chosen.indices, chosen.valid, plan.context)
        layer.kept_scores = kept_scores
        if quantised:
            layer.quantise()


def _of_everything(layer: GateSightAttentionLayer, new: Tensor) -> Tensor:
    """Scores `[B, H, S]` by slot: those of the kept entries, and `new` `[B, H, t]`."""
    # -inf says that an entry is gone, so that no score may be lower than the lowest number.
    new = new.float().clamp_min(torch.finfo(torch.float32).min)
    if layer.kept_keys is None:
        return new
    assert layer.kept_scores is not None
    everything = new.new_full((*new.shape[:2], layer.get_seq_length() + 1), -torch.inf)
    held = torch.cat([layer.kept_scores, new], dim=-1)
    return everything.scatter_(2, layer.held_slots(), held)[..., :-1]


def _held(layer: GateSightAttentionLayer, lengths: list[int], protected: Protected) -> list[int]:
    """By row, how many entries besides protected ones all heads together still hold."""
    slots, seen = layer.held_slots(), layer.get_seq_length()
    evictable = [(seen - n + first, seen - n + end) for n in lengths for first, end in [protected.evictable(n)]]
    first, end = torch.tensor(evictable, device=slots.device).T[..., None, None]
    return ((slots >= first) & (slots < end)).sum((1, 2)).tolist()
