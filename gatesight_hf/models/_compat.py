"""Every difference between the supported versions of transformers, in one place.

- 5.19 … 5.23 call the cache `past_key_values` in attention layers and `cache_params` in GDN layers; 5.24 calls it
  `cache` in both and warns on the old names. Drop the old names when the lower bound passes 5.23.
- Those versions' chunked prefill starts at position 0 even if the cache has seen tokens. Drop
  `without_restarting_chunks` with them.
- 5.19 and 5.20 keep the positions of an indexed model's tokens on the cache, later ones on its first indexed layer.
- Up to 5.22 an indexer gives an additive mask where it is given one, later ones always booleans.
- All of them prefill in `GenerationMixin._prefill`, the one private method that the library relies on (`hooks.py`).
"""

import copy
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig

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


def generation_option(model: Any, arguments: dict[str, Any], name: str) -> Any:
    """An option as `generate` finds it: among the arguments, be it None, in the configuration given, or the model's."""
    if name in arguments:
        return arguments[name]
    own = getattr(model, "generation_config", None)  # a wrapper may have none
    given = [getattr(config, name, None) for config in (arguments.get("generation_config"), own)]
    return next((value for value in given if value is not None), None)


def lengthened(model: Any, arguments: dict[str, Any], more: int) -> dict[str, Any]:
    """Arguments of a `generate` whose prompt was made longer by `more` pads, which lengths in tokens count too."""
    lengths = {}
    for name, other in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
        value = generation_option(model, arguments, name)
        if value and generation_option(model, arguments, other) is None and value != getattr(GenerationConfig(), name):
            lengths[name] = value + more
    return {**arguments, **lengths}


def default_mask(model: Any, ids: Tensor, arguments: dict[str, Any]) -> Tensor:
    """The mask that `generate` infers of ids without one: pads are hidden, unless the pad token also ends sequences."""
    pad, end = (generation_option(model, arguments, name) for name in ("pad_token_id", "eos_token_id"))
    if pad is None or pad in (end if isinstance(end, (list, tuple)) else [end]):
        return torch.ones_like(ids)
    return ids.ne(pad).long()


class IndexedCache:
    """Positions of an indexed model's tokens stand on its first indexed layer, for releases that seek them here too."""

    layers: list[Any]

    @property
    def position_ids(self) -> Tensor:
        """`[axes, B, tokens]`.

        Raises:
            AttributeError: There are none, as these releases expect.
        """
        positions = self._first_indexed().indexer_position_ids
        if positions is None:
            raise AttributeError("No positions yet.")
        return positions

    @position_ids.setter
    def position_ids(self, positions: Tensor) -> None:
        self._first_indexed().indexer_position_ids = positions

    def _first_indexed(self) -> Any:
        for layer in self.layers:
            if hasattr(layer, "indexer_position_ids"):
                return layer
        raise AttributeError("No layer is indexed.")


_ADDITIVE_SELECTION = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)


def selected_entries(selection: Tensor) -> Tensor:
    """Which entries an indexer selected, as booleans."""
    return selection if selection.dtype == torch.bool else selection == 0


def selection_mask(selected: Tensor, mask: Tensor) -> Tensor:
    """What this release has an indexer give where it is given `mask`, bool or additive."""
    if not (_ADDITIVE_SELECTION and mask.is_floating_point()):
        return selected
    # Nothing where the mask hides an entry already: the sum would overflow, and be NaN for a pad, which sees no entry.
    hidden = selected.logical_not() & (mask == 0)
    return torch.zeros_like(mask).masked_fill_(hidden, torch.finfo(mask.dtype).min)
