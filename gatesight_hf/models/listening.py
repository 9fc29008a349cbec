"""What is put on a model's modules: functions that find the cache of a call, and tell it what they see.

They are at module level and keep no state of their own but the layers' calls under way in a thread, so that models with
hooks can be copied and pickled, and many caches, of any kind, can interleave on one model. `hooks` puts them in place.
"""

import inspect
import threading
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from gatesight_kernels.checks import described

from ..entries.view import named_arguments
from ._compat import CACHE_ARGUMENTS, cache_argument, cache_of_call, selected_entries, selection_mask
from .families import FamilyAdapter
from .sink import ListeningCache, SignalSink


@dataclass
class _Call:
    """One forward of a GDN or attention layer, from its pre-hook to its post-hook."""

    sink: SignalSink
    layer: Any
    context: Tensor | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)


class _Calls(threading.local):
    """The calls under way in this thread, by hook key."""

    def __init__(self) -> None:
        self.by_key: dict[tuple[int, str, int], _Call] = {}

    def forget(self, hooks: int) -> None:
        """Drop those of one set of hooks."""
        for key in [key for key in self.by_key if key[0] == hooks]:
            del self.by_key[key]


_calls = _Calls()


def gdn_signals(adapter: FamilyAdapter, layer: Any, outputs: dict[str, Tensor], context: Tensor | None) -> Tensor:
    """β, g and ‖v‖ of one GDN layer, `[B, T, 3, HV]`: see `FamilyAdapter.signals`."""
    return adapter.signals(layer, outputs, context)


def _checked_cache(kwargs: dict[str, Any]) -> Any:
    """The cache of a call of the model, or None.

    Raises:
        TypeError: It is no cache.
        ValueError: There are two.
    """
    given = [name for name in CACHE_ARGUMENTS if kwargs.get(name) is not None]
    cache = cache_of_call(kwargs)
    if any(kwargs[name] is not cache for name in given):
        raise ValueError(f"{' and '.join(given)} are different caches: give one of them.")
    if given and (isinstance(cache, type) or not hasattr(cache, "get_seq_length")):
        raise TypeError(f"{given[0]} must be a cache, such as a GateSightCache, got {described(cache)}.")
    return cache


def _sink_of(kwargs: dict[str, Any]) -> SignalSink | None:
    """Of the GateSight cache among the arguments of a call; None if there is none."""
    cache = cache_of_call(kwargs)
    return cache.calls if isinstance(cache, ListeningCache) else None


def rename_cache(native: str, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Both names of the cache argument, of which one is the model's own, work on every version, without a warning."""
    cache = _checked_cache(kwargs)
    if isinstance(cache, ListeningCache) and native not in kwargs:
        return args, {**{k: v for k, v in kwargs.items() if k not in CACHE_ARGUMENTS}, native: cache}
    return None


def _by_name(args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    if len(args) > 1:
        raise ValueError("Pass attention_mask and further arguments of the decoder by name.")
    return {**kwargs, "input_ids": args[0]} if args else kwargs


def decode(decoder: nn.Module, before: Any, hooks: int, *args: Any, **kwargs: Any) -> Any:
    """The forward of the decoder, which a GateSight cache follows, or takes back whatever ends it, Ctrl-C too."""
    # A partial, which dynamo can trace, as it cannot the making of a bound method.
    forward = before if before is not None else partial(type(decoder).forward, decoder)
    cache = cache_of_call(kwargs)
    if not isinstance(cache, ListeningCache) or cache.calls.running:  # running: an earlier attach's is around this one
        return forward(*args, **kwargs)
    sink = cache.calls
    try:
        output = forward(**sink.begin_forward(decoder, _by_name(args, kwargs)))
        sink.end_forward(cache.compact)
    except BaseException:
        # What layers have left that did not get to their end would keep the cache alive.
        _calls.forget(hooks)
        _take_back(sink)
        raise
    return output


def call_around(model: nn.Module, before: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a model around the decoder: what fails after the decoder undoes the forward as well."""
    forward = before if before is not None else partial(type(model).forward, model)
    sink = _sink_of(kwargs)
    if sink is None or sink.in_call:
        return forward(*args, **kwargs)
    try:
        sink.begin_call()
        output = forward(*args, **kwargs)
        sink.end_call()
    except BaseException:
        _take_back(sink)
        raise
    return output


def _take_back(sink: SignalSink) -> None:
    """Undo what failed, whatever interrupts that: it is short, and the first interrupt is raised again."""
    while True:
        try:
            sink.undo()
        except KeyboardInterrupt:
            continue
        return


def join(core: nn.Module, before: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a model that joins a vision tower to the decoder."""
    forward = before if before is not None else MethodType(type(core).forward, core)
    sink = _sink_of(kwargs)
    if sink is None:
        return forward(*args, **kwargs)
    try:
        return forward(**sink.begin_multimodal(core, _by_name(args, kwargs)))
    finally:
        sink.end_multimodal()


def before_gdn(key: tuple[int, str, int], layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    _calls.by_key.pop(key, None)
    sink = _sink_of(kwargs)
    if sink is None:
        return None
    if sink.wants_signals():
        _calls.by_key[key] = _Call(sink, layer, sink.convolution_context(key[2]))
    # transformers leaves the mask out for a single token, which may be a pad of a row that has not begun.
    hidden = named_arguments(args, kwargs)["hidden_states"]
    return args, {**kwargs, "attention_mask": sink.gdn_mask_for(kwargs.get("attention_mask"), hidden.device)}


def before_ple(ple: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Per-layer embeddings see pads as GDN layers do; a pad counts as an end of sequence among their n-grams."""
    hidden, ids, cache = args
    listens = isinstance(cache, ListeningCache)
    mask = cache.calls.gdn_mask_for(kwargs.get("conv_mask"), hidden.device) if listens else None
    if mask is None:
        return None
    return (hidden, ids.where(mask.bool(), ple.ple_embedding.eos_token_id), cache), {**kwargs, "conv_mask": mask}


def before_attention(key: tuple[int, str, int], layer: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    _calls.by_key.pop(key, None)
    sink = _sink_of(kwargs)
    if sink is None:
        return None
    kwargs = named_arguments(args, kwargs)
    if sink.wants_attention():
        _calls.by_key[key] = _Call(sink, layer, kwargs=kwargs)
    query = kwargs["hidden_states"]
    mask = sink.mask_for(key[2], kwargs.get("attention_mask"), query, layer.config._attn_implementation)
    return (), {**kwargs, "attention_mask": mask}


def after_layer(key: tuple[int, str, int], layer: nn.Module, args: Any, output: Any) -> None:
    _calls.by_key.pop(key, None)


def keep_output(key: tuple[int, str, int], name: str, module: nn.Module, args: Any, output: Tensor) -> None:
    if (call := _calls.by_key.get(key)) is not None:
        call.outputs[name] = output


def before_out_proj(key: tuple[int, str, int], adapter: FamilyAdapter, module: nn.Module, args: Any) -> None:
    # The last step of a GDN forward: every projection is known, and an offloaded layer still has its parameters.
    if (call := _calls.by_key.pop(key, None)) is not None:
        with torch.no_grad():
            signals = gdn_signals(adapter, call.layer, call.outputs, call.context)
        call.sink.record_signals(key[2], signals)


def before_o_proj(key: tuple[int, str, int], adapter: FamilyAdapter, module: nn.Module, args: Any) -> None:
    if (call := _calls.by_key.pop(key, None)) is not None:
        call.sink.record_attention(key[2], adapter.view(call.layer, call.kwargs, call.outputs))


def index(
    indexer: Any,
    before: Any,
    key: tuple[int, str, int],
    hidden: Tensor,
    angles: tuple[Tensor, Tensor],
    mask: Tensor,
    cache: Any,
) -> Tensor:
    """The forward of an indexer, which a GateSight cache takes over once it is compacted."""
    forward = before if before is not None else MethodType(type(indexer).forward, indexer)
    if not isinstance(cache, ListeningCache):
        return forward(hidden, angles, mask, cache)
    selected = cache.calls.select_entries(key[2], indexer, hidden, angles)
    if selected is None:
        selected = selected_entries(forward(hidden, angles, mask, cache))
    keep_output(key, "indexer", indexer, (), selected)
    return selection_mask(selected, mask)


def generate(model: Any, before: Any, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """`generate` of the model, which first tells a GateSight cache what it is given."""
    generate = before if before is not None else MethodType(type(model).generate, model)
    cache = _checked_cache(kwargs)
    if not isinstance(cache, ListeningCache):
        return generate(inputs, *args, **kwargs)
    kwargs = {k: v for k, v in kwargs.items() if k not in CACHE_ARGUMENTS}
    if args:
        names = [name for name in inspect.signature(type(model).generate).parameters if name not in ("self", "inputs")]
        kwargs |= dict(zip(names, args, strict=False))
    call = cache.calls.begin_generate(model, inputs, kwargs)
    output = generate(call.inputs, **call.arguments, **{cache_argument(model): cache})
    cache.calls.end_generate()
    return call.as_given(output)


def prefill(model: Any, before: Any, ids: Tensor, config: Any, model_kwargs: dict[str, Any], **kwargs: Any) -> Any:
    """The prefill stage of `generate`, after which a GateSight cache is compacted.

    `generate` looks this method up when it gets there. So it is found even where the cache, and with it the hooks, are
    made among the arguments of the first call: `model.generate(**inputs, cache=GateSightCache(..., model=model))`.
    """
    prefill = before if before is not None else MethodType(type(model)._prefill, model)
    outputs = prefill(ids, config, model_kwargs, **kwargs)
    cache = cache_of_call(model_kwargs)
    if isinstance(cache, ListeningCache):
        cache.calls.end_prefill(cache.compact)
    return outputs
