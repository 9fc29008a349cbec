"""One view of an attention layer in a forward: queries, keys, values and output gate, before and after RoPE."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .hybrid import FamilyAdapter

#: Positions `[n]` -> cos and sin `[n, rotary channels]`, float32.
RotaryTables = Callable[[Tensor], tuple[Tensor, Tensor]]

#: Projections and norms of an attention layer whose outputs a view is made of.
VIEWED = ("q_proj", "q_norm", "k_norm", "v_proj")


def apply_rotary(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding on the first `cos.shape[-1]` channels; the others pass (partial RoPE).

    Channel i turns with channel i + R/2 of the R rotary ones. `sin` negated turns back.

    Args:
        states: `[..., D]`.
        cos, sin: `[..., R]`, broadcast against `states`.
    """
    rotary, passed = states[..., : cos.shape[-1]], states[..., cos.shape[-1] :]
    first, second = rotary.chunk(2, dim=-1)
    return torch.cat([rotary * cos + torch.cat([-second, first], dim=-1) * sin, passed], dim=-1)


def rotary_tables(decoder: Any) -> RotaryTables:
    """The rotary angles of a decoder, its scaling included, for text positions."""
    return partial(_tables, decoder.rotary_emb)


def _tables(embedding: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    # A copy: a dynamic RoPE writes down frequencies for the largest position that it was asked for.
    own = copy.deepcopy(embedding)
    cos, sin = own(torch.empty(0, device=positions.device, dtype=torch.float32), positions.unsqueeze(0))
    return cos[0], sin[0]


def named_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of an attention layer's forward by name: some families pass the first two by position."""
    return {**dict(zip(("hidden_states", "position_embeddings"), args, strict=False)), **kwargs}


@dataclass(frozen=True)
class AttentionView:
    """One attention layer in one forward of T tokens; H KV heads, `heads` query heads, D channels, R of them rotary.

    Attributes:
        hidden: `[B, T, C]`, the layer's input (after the input norm).
        queries_before_rope: `[B, T, heads, D]`, after the query norm.
        keys_before_rope: `[B, T, H, D]`, after the key norm.
        values: `[B, T, H, D]`.
        gate: `[B, T, heads, D]`, logits of the output gate.
        cos, sin: `[B, T, R]`.
        selected: `[B or 1, 1, T or 1, entries or 1]`, bool: what an indexer picked for each token, pads and later
            tokens not always excluded; None without an indexer.
    """

    hidden: Tensor
    queries_before_rope: Tensor
    keys_before_rope: Tensor
    values: Tensor
    gate: Tensor
    cos: Tensor
    sin: Tensor
    selected: Tensor | None = None

    @classmethod
    def of(
        cls, adapter: FamilyAdapter, layer: Any, kwargs: dict[str, Any], outputs: dict[str, Tensor]
    ) -> "AttentionView":
        """The view of a call of `layer` with `kwargs`, from the `outputs` of the modules in `VIEWED`."""
        hidden = kwargs["hidden_states"]
        # Layers with an indexer get the angles of all tokens so far.
        cos, sin = (table[:, -hidden.shape[1] :] for table in kwargs["position_embeddings"])
        return cls(
            hidden=hidden,
            queries_before_rope=outputs["q_norm"],
            keys_before_rope=outputs["k_norm"],
            values=outputs["v_proj"].unflatten(-1, (-1, layer.head_dim)),
            gate=adapter.output_gate(layer, outputs["q_proj"]),
            cos=cos,
            sin=sin,
            selected=outputs.get("indexer"),
        )

    @property
    def queries(self) -> Tensor:
        """`[B, T, heads, D]`, with RoPE."""
        return apply_rotary(self.queries_before_rope, self.cos.unsqueeze(2), self.sin.unsqueeze(2))

    @property
    def keys(self) -> Tensor:
        """`[B, T, H, D]`, with RoPE."""
        return apply_rotary(self.keys_before_rope, self.cos.unsqueeze(2), self.sin.unsqueeze(2))
