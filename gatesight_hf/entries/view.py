"""One view of an attention layer in a forward: queries, keys, values and output gate, before and after RoPE."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

#: Positions `[n]` -> cos and sin `[n, rotary channels]`, float32; no channels where nothing turns.
RotaryTables = Callable[[Tensor], tuple[Tensor, Tensor]]


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


def rotary_tables(embedding: Any) -> RotaryTables:
    """The rotary angles of a decoder's embedding, its scaling included, for text positions; of None, of no channels."""
    return _no_tables if embedding is None else partial(_tables, embedding)


def _no_tables(positions: Tensor) -> tuple[Tensor, Tensor]:
    nothing = torch.empty((len(positions), 0), device=positions.device)
    return nothing, nothing


def _tables(embedding: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    # A copy: a dynamic RoPE writes down frequencies for the largest position that it was asked for.
    own = copy.deepcopy(embedding)
    cos, sin = own(torch.empty(0, device=positions.device, dtype=torch.float32), positions.unsqueeze(0))
    # Hooks that spread a model over devices answer on the embedding's own.
    return cos[0].to(positions.device), sin[0].to(positions.device)


def named_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of an attention layer's forward by name: some families pass the first two by position."""
    return {**dict(zip(("hidden_states", "position_embeddings"), args, strict=False)), **kwargs}


@dataclass(frozen=True)
class LatentMap:
    """Multi-head latent attention (MLA, arXiv 2405.04434) as attention to the latents themselves.

    A cached token is one latent of R channels, from which each head's key and value are projected, and P rotary key
    channels that all heads share. A query that is folded through the key projection reads `[rotary | latent]` as its
    one key, so that the layer has one KV head of P + R channels whose value is the latent.

    Attributes:
        project: The layer's `kv_b_proj`: R channels to keys and values of all heads, side by side by head.
        rank: R.
        key_channels: Of a head's projected key.
        value_channels: Of a head's projected value.
    """

    project: Callable[[Tensor], Tensor]
    rank: int
    key_channels: int
    value_channels: int

    def _by_head(self, projected: Tensor) -> tuple[Tensor, ...]:
        """`[..., heads · (key + value)]` -> keys and values `[..., heads, channels]`."""
        channels = (self.key_channels, self.value_channels)
        return projected.unflatten(-1, (-1, sum(channels))).split(channels, dim=-1)

    def folded(self, queries: Tensor) -> Tensor:
        """`[B, T, heads, key_channels + P]`, `[latent part | rotary part]`, -> `[B, T, heads, P + R]`."""
        of_latent, rotary = queries[..., : self.key_channels], queries[..., self.key_channels :]
        # Through the module, not its weight, which may be offloaded or quantised.
        weight, _ = self._by_head(self.project(torch.eye(self.rank, dtype=queries.dtype, device=queries.device)))
        return torch.cat([rotary, torch.einsum("bthk,rhk->bthr", of_latent, weight)], dim=-1)

    def values(self, latents: Tensor) -> Tensor:
        """`[1, T, R]` -> `[heads, T, value_channels]`."""
        return self._by_head(self.project(latents[0]))[1].transpose(0, 1)


@dataclass(frozen=True)
class AttentionView:
    """One attention layer in one forward of T tokens; H KV heads, `heads` query heads, D channels, R of them rotary.

    Attributes:
        hidden: `[B, T, C]`, the layer's input (after the input norm).
        own_queries: `[B, T, heads, D]`, after the query norm; those of MLA before they are folded.
        keys_before_rope: `[B, T, H, D]`, after the key norm.
        values: `[B, T, H, D]`.
        gate: `[B, T, heads, D or 1]`, logits of the output gate; None if the layer has none.
        cos, sin: `[B, T, R]`.
        latent: How MLA reads its latents; None for other attention.
        selected: `[B or 1, 1, T or 1, entries or 1]`, bool: what an indexer picked for each token, pads and later
            tokens not always excluded; None without an indexer.
    """

    hidden: Tensor
    own_queries: Tensor
    keys_before_rope: Tensor
    values: Tensor
    gate: Tensor | None
    cos: Tensor
    sin: Tensor
    latent: LatentMap | None = None
    selected: Tensor | None = None

    @cached_property
    def queries_before_rope(self) -> Tensor:
        """`[B, T, heads, D]`, as the keys are read."""
        return self.own_queries if self.latent is None else self.latent.folded(self.own_queries)

    @property
    def queries(self) -> Tensor:
        """`[B, T, heads, D]`, with RoPE."""
        return apply_rotary(self.queries_before_rope, self.cos.unsqueeze(2), self.sin.unsqueeze(2))

    @property
    def keys(self) -> Tensor:
        """`[B, T, H, D]`, with RoPE."""
        return apply_rotary(self.keys_before_rope, self.cos.unsqueeze(2), self.sin.unsqueeze(2))

    def read(self, values: Tensor) -> Tensor:
        """What query heads read of cached values `[H, T, D]`: these, or in MLA `[heads, T, D']`, each head its own."""
        return values if self.latent is None else self.latent.values(values)
