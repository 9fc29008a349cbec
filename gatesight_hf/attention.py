"""One view of an attention layer in a forward: queries, keys, values and output gate, before and after RoPE."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._compat import cache_of_call
from .hybrid import FamilyAdapter, HybridSpec, adapter_for, find_modules

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
    cos, sin = embedding(torch.empty(0, device=positions.device), positions.unsqueeze(0))
    return cos[0].float(), sin[0].float()


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
    """

    hidden: Tensor
    queries_before_rope: Tensor
    keys_before_rope: Tensor
    values: Tensor
    gate: Tensor
    cos: Tensor
    sin: Tensor

    @classmethod
    def of(
        cls, adapter: FamilyAdapter, layer: Any, kwargs: dict[str, Any], outputs: dict[str, Tensor]
    ) -> "AttentionView":
        """The view of a call of `layer` with `kwargs`, from the `outputs` of the modules in `VIEWED`."""
        cos, sin = kwargs["position_embeddings"]
        return cls(
            hidden=kwargs["hidden_states"],
            queries_before_rope=outputs["q_norm"],
            keys_before_rope=outputs["k_norm"],
            values=outputs["v_proj"].unflatten(-1, (-1, layer.head_dim)),
            gate=adapter.output_gate(layer, outputs["q_proj"]),
            cos=cos,
            sin=sin,
        )

    @property
    def queries(self) -> Tensor:
        """`[B, T, heads, D]`, with RoPE."""
        return apply_rotary(self.queries_before_rope, self.cos.unsqueeze(2), self.sin.unsqueeze(2))

    @property
    def keys(self) -> Tensor:
        """`[B, T, H, D]`, with RoPE."""
        return apply_rotary(self.keys_before_rope, self.cos.unsqueeze(2), self.sin.unsqueeze(2))


@contextmanager
def capture_attention(model: Any, spec: HybridSpec, cache: Any) -> Iterator[list[list[AttentionView]]]:
    """Collect a view of every attention layer in forwards with `cache`.

    Yields:
        Per attention ordinal, a list of views, one per forward.
    """
    modules, adapter = find_modules(model, spec), adapter_for(model.config)
    views: list[list[AttentionView]] = [[] for _ in modules.attention]
    calls: dict[int, tuple[dict[str, Any], dict[str, Tensor]]] = {}

    def before(ordinal: int, module: Any, args: Any, kwargs: Any) -> None:
        calls.pop(ordinal, None)
        if cache_of_call(kwargs) is cache:
            calls[ordinal] = (kwargs, {})

    def keep(ordinal: int, name: str, module: Any, args: Any, output: Tensor) -> None:
        if ordinal in calls:
            calls[ordinal][1][name] = output.detach()

    def after(ordinal: int, module: Any, args: Any, output: Any) -> None:
        if ordinal in calls:
            views[ordinal].append(AttentionView.of(adapter, module, *calls.pop(ordinal)))

    handles = []
    for j, layer in enumerate(modules.attention):
        handles.append(layer.register_forward_pre_hook(partial(before, j), with_kwargs=True))
        handles += [getattr(layer, name).register_forward_hook(partial(keep, j, name)) for name in VIEWED]
        handles.append(layer.register_forward_hook(partial(after, j)))
    try:
        yield views
    finally:
        for handle in handles:
            handle.remove()
