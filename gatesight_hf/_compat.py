"""Every difference between the supported versions of transformers, in one place.

- 5.19 … 5.23 call the cache `past_key_values` in attention layers and `cache_params` in GDN layers; 5.24 calls it
  `cache` in both and warns on the old names. Drop the old names when the lower bound passes 5.23.
"""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

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
