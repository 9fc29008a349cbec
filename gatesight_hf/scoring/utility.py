"""The training target: how much attention outputs change when one KV entry is removed.

For one query with attention weights a and output o = Σ a_i v_i, removing entry i renormalises the rest to
o' = (o - a_i v_i) / (1 - a_i), so that o' - o = a_i / (1 - a_i) · (o - v_i). The utility of entry i is the largest norm
of that change, taken over all query heads of the group together, over the queries of sampled continuations; the output
gate is left out, as in the GateSight paper.
"""

from typing import Any

import torch
from torch import Tensor

from ..entries.view import AttentionView
from ..models._compat import cache_argument

#: Queries handled at a time: bounds the scratch memory at `groups x QUERIES x T` numbers.
QUERIES_PER_CHUNK = 64


def entry_utilities(
    queries: Tensor, keys: Tensor, values: Tensor, context: int, scale: float, selected: Tensor | None = None
) -> Tensor:
    """Utilities of the first `context` entries for queries that follow each other at the end of the keys.

    Logits are float32; weights and changes are float64, since 1 - a loses all its digits in float32 where one entry
    takes nearly all attention.

    Args:
        queries: `[Q, heads, D]`, rotated; query t sees all keys up to its own, at `len(keys) - Q + t`.
        keys: `[H, T, D]`, rotated.
        values: `[H, T, D]`, or `[heads, T, D]` where each query head reads values of its own from an entry (MLA).
        context: Entries to rate, the first ones.
        scale: Of the logits.
        selected: `[Q, T]`, bool: keys that an indexer picked for each query; None without an indexer.

    Returns:
        `[H, context]`, float32, not normalised.
    """
    heads, length, _ = keys.shape
    groups = queries.shape[1] // heads
    count = queries.shape[0]
    utilities = keys.new_zeros((heads, context), dtype=torch.float64)
    slot = torch.arange(length, device=keys.device)
    for head in range(heads):
        # [T, D], or [groups, T, D] where query heads read values of their own
        key, value = keys[head].float(), values.unflatten(0, (heads, -1))[head].double()
        value = value[0] if len(value) == 1 else value
        rated = value[..., :context, :]
        for start in range(0, count, QUERIES_PER_CHUNK):
            stop = min(count, start + QUERIES_PER_CHUNK)
            query = queries[start:stop, head * groups : (head + 1) * groups].float()
            logits = torch.einsum("qgd,td->gqt", query, key) * scale
            own = torch.arange(length - count + start, length - count + stop, device=keys.device)
            hidden = slot > own[:, None]
            if selected is not None:
                hidden = hidden | selected[start:stop].logical_not()
            logits = logits.masked_fill(hidden, float("-inf"))
            weights = logits.double().softmax(-1)
            outputs = weights @ value
            distance = (
                rated.square().sum(-1).unsqueeze(-2) - 2 * outputs @ rated.mT + outputs.square().sum(-1, keepdim=True)
            ).clamp_min(0)
            # Where one entry takes nearly all attention, o is nearly its value: only the difference itself has digits.
            top = weights.argmax(-1, keepdim=True)
            at_top = value.expand(groups, -1, -1).gather(1, top.expand(-1, -1, value.shape[-1]))
            exact = (at_top - outputs).square().sum(-1, keepdim=True)
            distance = torch.where(slot[:context] == top, exact, distance)
            kept = weights[..., :context]
            ratio = kept / (1 - kept).clamp_min(1e-12)
            change = (ratio.square() * distance).sum(0).sqrt()
            utilities[head] = torch.maximum(utilities[head], change.amax(0))
    return utilities.float()


def continuation_utilities(model: Any, child: Any, ids: Tensor, context: int, scale: float) -> list[Tensor]:
    """Utilities of a context's entries for one continuation of it.

    Args:
        model: A hybrid model.
        child: A fork of the context's cache, of one row, that holds all entries; pads stand before the context.
        ids: `[1, Q]`, what follows the context.
        context: Tokens of the context, pads not counted.
        scale: Of the logits.

    Returns:
        Per attention ordinal `[H, context]`, float32, not normalised.
    """
    pads = child.get_seq_length() - context
    found: list[Tensor] = []

    def rate(ordinal: int, view: AttentionView) -> None:
        layer = child.attention_layers[ordinal]
        keys, values = layer.keys[0, :, pads:], layer.values[0, :, pads:]
        selected = view.selected
        if selected is not None:
            selected = selected[0, 0].expand(ids.shape[1], pads + keys.shape[1])[:, pads:]
        found.append(entry_utilities(view.queries[0], keys, view.read(values), context, scale, selected))

    with torch.no_grad(), child.watch_attention(rate):
        model(ids, **{cache_argument(model): child}, use_cache=True, logits_to_keep=1)
    return found


def normalise(utilities: Tensor) -> Tensor:
    """Divide by the maximum over the entries of each row, `[..., T]`; all-zero rows stay zero."""
    return utilities / utilities.amax(-1, keepdim=True).clamp_min(torch.finfo(utilities.dtype).tiny)
