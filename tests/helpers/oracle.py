"""The oracle: a full cache with an explicit -inf mask on evicted entries; and what a cache evicted."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from gatesight_hf import GateSightCache
from gatesight_hf.entries.view import AttentionView, named_arguments
from gatesight_hf.models import HybridSpec, adapter_for, find_modules
from gatesight_hf.models._compat import cache_of_call

from .running import forward, generate, steps


def assert_same(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Logits within the tolerance that the proof demands in float32."""
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def evicted_of(cache: GateSightCache, row: int, length: int) -> list[Tensor]:
    """Per attention layer `[H, length]`: which tokens of a row are gone. Only real tokens may have been kept."""
    gone = []
    for layer in cache.attention_layers:
        assert layer.kept_positions is not None
        slots = int(layer.get_seq_length() - layer.tail_length)
        kept = layer.kept_positions[row].long()
        valid = torch.ones_like(kept, dtype=torch.bool)
        if layer.kept_valid is not None:
            valid &= layer.kept_valid[row]
        evicted = torch.ones(len(kept), length, dtype=torch.bool)
        for head in range(len(kept)):
            tokens = kept[head, valid[head]] - (slots - length)
            assert (tokens >= 0).all(), "padding was kept"
            assert (tokens.diff() > 0).all(), "entries twice or out of order"
            evicted[head, tokens] = False
        gone.append(evicted)
    return gone


@contextmanager
def capture_attention(model: Any, spec: HybridSpec, cache: Any) -> Iterator[list[list[AttentionView]]]:
    """Collect a view of every attention layer in forwards with `cache`, of any kind, by hooks of its own.

    Yields:
        Per attention ordinal, a list of views, one per forward.
    """
    modules, adapter = find_modules(model, spec), adapter_for(model.config)
    views: list[list[AttentionView]] = [[] for _ in modules.attention]
    calls: dict[int, tuple[dict[str, Any], dict[str, Tensor]]] = {}

    def before(ordinal: int, module: Any, args: Any, kwargs: Any) -> None:
        calls.pop(ordinal, None)
        if cache_of_call(kwargs) is cache:
            calls[ordinal] = (named_arguments(args, kwargs), {})

    def keep(ordinal: int, name: str, module: Any, args: Any, output: Tensor) -> None:
        if ordinal in calls:
            calls[ordinal][1][name] = output.detach()

    def after(ordinal: int, module: Any, args: Any, output: Any) -> None:
        if ordinal in calls:
            views[ordinal].append(adapter.view(module, *calls.pop(ordinal)))

    handles = []
    for j, layer in enumerate(modules.attention):
        handles.append(layer.register_forward_pre_hook(partial(before, j), with_kwargs=True))
        handles += [
            getattr(layer, name).register_forward_hook(partial(keep, j, name)) for name in adapter.viewed(layer)
        ]
        handles.append(layer.register_forward_hook(partial(after, j)))
    try:
        yield views
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class Oracle:
    """Hides evicted entries from every query after the context, for one unpadded row and everything sampled from it.

    A plain `DynamicCache` holds all entries; hooks on the attention modules build the whole additive mask anew.
    """

    model: Any
    evicted: list[Tensor]
    handles: list[Any] = field(default_factory=list)

    def __enter__(self) -> "Oracle":
        modules = find_modules(self.model, HybridSpec.from_config(self.model.config)).attention
        for module, evicted in zip(modules, self.evicted, strict=True):
            hook = self._hook(evicted)
            self.handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    @staticmethod
    def _hook(evicted: Tensor) -> Any:
        context = evicted.shape[1]

        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            kwargs = named_arguments(args, kwargs)
            held = kwargs.get("cache", kwargs.get("past_key_values")).layers[module.layer_idx]  # type: ignore[union-attr]
            past = held.get_seq_length()
            queries = past + torch.arange(kwargs["hidden_states"].shape[1])
            keys = torch.arange(int(queries[-1]) + 1)
            hidden = (keys > queries[:, None])[None].repeat(len(evicted), 1, 1)
            hidden[:, queries >= context, :context] |= evicted[:, None]
            groups = module.num_key_value_groups
            mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf).repeat_interleave(groups, dim=0)
            # An indexer of the model reads a mask of every row.
            return (), {**kwargs, "attention_mask": mask.expand(len(kwargs["hidden_states"]), -1, -1, -1)}

        return hook

    def logits(self, context: Tensor, question: Tensor) -> Tensor:
        """Logits of the question's tokens."""
        cache = DynamicCache(config=self.model.config)
        forward(self.model, context, cache)
        return forward(self.model, question, cache)

    def steps(self, ids: Tensor, tokens: int = 4, **arguments: Any) -> tuple[Tensor, Tensor]:
        return steps(self.model, ids, DynamicCache(config=self.model.config), tokens, **arguments)

    def generate(self, ids: Tensor, tokens: int = 4, **arguments: Any) -> Tensor:
        return generate(self.model, ids, DynamicCache(config=self.model.config), tokens, **arguments)
