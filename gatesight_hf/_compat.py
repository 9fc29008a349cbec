"""Every difference between the supported versions of transformers, in one place.

- 5.19 … 5.23 call the cache `past_key_values` in attention layers and `cache_params` in GDN layers; 5.24 calls it
  `cache` in both and warns on the old names. Drop the old names when the lower bound passes 5.23.
- Those versions' chunked prefill starts at position 0 even if the cache has seen tokens. Drop
  `without_restarting_chunks` with them.
- All of them prefill in `GenerationMixin._prefill`, the one private method that the library relies on (`signals.py`).
"""

import copy
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")


def cache_of_call(kwargs: Mapping[str, Any]) -> Any:
    """The cache among the keyword arguments of a decoder, attention or GDN forward, or None."""
    for name in CACHE_ARGUMENTS:
        value = kwargs.get(name)
        if value is not None:
            return value
    return None


def cache_argument(model: Any) -> str:
    """The name under which this model's forward takes its cache, without a deprecation warning."""
    model_class: Any = type(model)
    return _cache_argument(model_class)


@functools.cache
def _cache_argument(model_class: Any) -> str:
    parameters = inspect.signature(inspect.unwrap(model_class.forward)).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def without_restarting_chunks(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a `generate` that continues a cache, without chunked prefill where that would start over."""
    if cache_argument(model) == "cache":
        return arguments
    config = arguments.get("generation_config")
    if arguments.get("prefill_chunk_size") is None and getattr(config, "prefill_chunk_size", None) is None:
        return arguments
    if config is not None:
        config = copy.copy(config)
        config.prefill_chunk_size = None
        arguments = {**arguments, "generation_config": config}
    return {name: value for name, value in arguments.items() if name != "prefill_chunk_size"}


def default_mask(model: Any, ids: Tensor, arguments: dict[str, Any]) -> Tensor:
    """The mask that `generate` infers of ids without one: pads are hidden, unless the pad token also ends sequences."""

    def token(name: str) -> Any:
        values = [arguments.get(name)]
        values += [getattr(c, name, None) for c in (arguments.get("generation_config"), model.generation_config)]
        return next((value for value in values if value is not None), None)

    pad, end = token("pad_token_id"), token("eos_token_id")
    if pad is None or pad in (end if isinstance(end, (list, tuple)) else [end]):
        return torch.ones_like(ids)
    return ids.ne(pad).long()
