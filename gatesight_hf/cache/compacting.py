"""Compaction of a context: entries are rated, layers get their budgets, the best stay, and the rest is freed."""

from collections.abc import Callable
from typing import Any

import torch

from ..compaction.growing import carry_out, plan_growing
from ..compaction.plan import plan_compaction
from ..entries.sparse import SparseAttentionLayer
from .context import Context


def compact(context: Context, fork: Callable[[], Any]) -> None:
    """See `GateSightCache.compact`; `fork` makes a cache for a scorer that runs the context again."""
    if context.options.grows:
        _compact_growing(context, fork)
    else:
        _compact_once(context, fork)


def _compact_once(context: Context, fork: Callable[[], Any]) -> None:
    begun = context.clock()
    prefill, recording = context.prefill(fork), context.recording
    assert recording is not None
    with torch.no_grad():
        if context.plan is None:
            bytes_before = context.kv_bytes()
            context.plan = plan_compaction(prefill, context.scorer, recording.gate_means, context.options, bytes_before)
            context.seconds["score"] = context.clock() - begun
        # The prefill's references would keep each layer's full tensors alive until the end.
        del prefill
        begun, plan = context.clock(), context.plan
        for layer, chosen in zip(context.attention_layers, plan.layers, strict=True):
            if layer.kept_keys is None:
                if chosen.indices is None:
                    layer.keep_all(chosen.valid, plan.context)
                else:
                    layer.compact(chosen.indices, chosen.valid, plan.context)
            if context.options.entries_dtype is not None:
                layer.quantise()
        for state in context.bounded_layers:
            state.detach()
    context.seconds["compact"] = context.clock() - begun
    context.recording = None
    context.plan = plan.carried_out()
    forget_positions(context)


def _compact_growing(context: Context, fork: Callable[[], Any]) -> None:
    begun = context.clock()
    prefill, recording, layers = context.prefill(fork), context.recording, context.attention_layers
    assert recording is not None
    if layers[0].tail_length == 0:
        return
    with torch.no_grad(), context.all_or_nothing():
        plan, scores = plan_growing(
            prefill, layers, context.scorer, recording.gate_means, context.options, context.kv_bytes()
        )
        scored = context.clock()
        carry_out(plan, layers, scores, quantised=context.options.entries_dtype is not None)
        for state in context.bounded_layers:
            state.detach()
        context.plan, context.recording = plan.carried_out(), recording.after_compaction()
    context.seconds["score"] += scored - begun
    context.seconds["compact"] += context.clock() - scored


def forget_positions(context: Context) -> None:
    """Drop those of an indexed model's context, which it would turn into angles again in every forward."""
    for layer in context.attention_layers:
        if context.is_compacted and isinstance(layer, SparseAttentionLayer):
            layer.indexer_position_ids = None
