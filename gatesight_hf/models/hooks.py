"""Hooks that hand a model's own signals to the cache of the call: β, g, ‖v‖, and views of its attention layers.

The hooks are stateless and are attached once per model. Each finds its cache among the arguments of the call and does
nothing when that is not a GateSight cache, so that many caches, of any kind, can interleave on one model. Signals come
from the projections that the forward computes anyway; only the short convolution of the values is run once more.
"""

import inspect
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gatesight_kernels.checks import described

from ..entries.view import AttentionView, named_arguments
from ..errors import UnsupportedModelError
from ._compat import CACHE_ARGUMENTS, cache_argument, cache_of_call, selected_entries, selection_mask
from .families import FamilyAdapter, adapter_for
from .hybrid import HybridModules, HybridSpec, find_modules
from .multimodal import core_of


class SignalSink(ABC):
    """What the hooks need of a cache."""

    @abstractmethod
    def wants_signals(self) -> bool:
        """Whether GDN signals of the current forward are to be recorded."""

    @abstractmethod
    def wants_attention(self) -> bool:
        """Whether views of the attention layers of the current forward are to be recorded."""

    @abstractmethod
    def begin_forward(self, decoder: nn.Module, model_inputs: dict[str, Any]) -> dict[str, Any]:
        """Called before the decoder runs; returns its keyword arguments, completed."""

    @abstractmethod
    def begin_multimodal(self, core: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """Called before a model that joins a vision tower to the decoder runs; returns its arguments, completed."""

    @abstractmethod
    def end_multimodal(self) -> None:
        """Called after it ran, or failed."""

    @abstractmethod
    def end_forward(self) -> None:
        """Called after the decoder ran."""

    #: Whether the decoder runs.
    running: bool
    #: Whether a model around the decoder runs, whose end is the forward's.
    in_call: bool

    @abstractmethod
    def begin_call(self) -> None:
        """Called before the outermost model around the decoder runs."""

    @abstractmethod
    def end_call(self) -> None:
        """Called after it ran."""

    @abstractmethod
    def undo(self) -> None:
        """Called in place of the end of a forward or call, or after it, if anything failed or was interrupted."""

    @abstractmethod
    def convolution_context(self, gdn: int) -> Tensor | None:
        """Copy of the last inputs of a GDN layer's short convolution, `[B, channels, kernel]`; None at the start."""

    @abstractmethod
    def record_signals(self, gdn: int, signals: Tensor) -> None:
        """Take `[B, T, 3, HV]` of GDN ordinal `gdn`."""

    @abstractmethod
    def record_attention(self, ordinal: int, view: AttentionView) -> None:
        """Take the view of attention ordinal `ordinal`, whose entries the cache holds already."""

    @abstractmethod
    def mask_for(self, ordinal: int, mask: Any, query: Tensor, implementation: str) -> Any:
        """The attention mask that attention ordinal `ordinal` must use in place of `mask`."""

    @abstractmethod
    def select_entries(
        self, ordinal: int, indexer: Any, hidden: Tensor, angles: tuple[Tensor, Tensor]
    ) -> Tensor | None:
        """The entries that an indexer is to pick for the coming tokens of attention ordinal `ordinal`.

        Args:
            ordinal: Of the layer.
            indexer: Its indexer.
            hidden: `[B, T, C]`, the layer's input.
            angles: cos and sin `[B, t, R]`, the last T of them those of the coming tokens.

        Returns:
            `[B or 1, 1, T or 1, entries or 1]`, bool; None leaves it to the indexer's own forward.
        """

    @abstractmethod
    def gdn_mask_for(self, mask: Any, device: torch.device) -> Any:
        """The padding mask of the current tokens that GDN layers on `device` must use in place of `mask`."""

    @abstractmethod
    def begin_generate(self, model: Any, inputs: Tensor | None, arguments: dict[str, Any]) -> "GenerateCall":
        """Called before `generate` of `model` with `inputs` and keyword arguments; returns what it is to be given."""

    @abstractmethod
    def end_prefill(self) -> None:
        """Called when `generate` has prefilled its prompt, in one forward or in chunks."""

    @abstractmethod
    def end_generate(self) -> None:
        """Called when `generate` has returned."""


@dataclass(frozen=True)
class GenerateCall:
    """What `generate` is given.

    Attributes:
        inputs: Its first argument.
        arguments: By keyword.
        given: `[B, T]`, the ids of the caller, if `inputs` are other ones that stand for them.
    """

    inputs: Tensor | None
    arguments: dict[str, Any]
    given: Tensor | None = None

    def as_given(self, output: Any) -> Any:
        """What `generate` returned, with sequences that begin as the caller's ids do."""
        if self.given is None or self.inputs is None:
            return output
        sequences = getattr(output, "sequences", output)
        begun = self.given.repeat_interleave(len(sequences) // len(self.given), dim=0)
        whole = torch.cat([begun, sequences[:, self.inputs.shape[1] :]], dim=1)
        if sequences is output:
            return whole
        output.sequences = whole
        return output


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


# -- hooks: module-level functions, so that models with hooks can still be copied and pickled --------------------------


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


def _rename_cache(native: str, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Both names of the cache argument, of which one is the model's own, work on every version, without a warning."""
    cache = _checked_cache(kwargs)
    if isinstance(cache, SignalSink) and native not in kwargs:
        return args, {**{k: v for k, v in kwargs.items() if k not in CACHE_ARGUMENTS}, native: cache}
    return None


def _by_name(args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    if len(args) > 1:
        raise ValueError("Pass attention_mask and further arguments of the decoder by name.")
    return {**kwargs, "input_ids": args[0]} if args else kwargs


def _decode(decoder: nn.Module, before: Any, hooks: int, *args: Any, **kwargs: Any) -> Any:
    """The forward of the decoder, which a GateSight cache follows, or takes back whatever ends it, Ctrl-C too."""
    # A partial, which dynamo can trace, as it cannot the making of a bound method.
    forward = before if before is not None else partial(type(decoder).forward, decoder)
    sink = cache_of_call(kwargs)
    if not isinstance(sink, SignalSink) or sink.running:  # running: an earlier attach's is around this one
        return forward(*args, **kwargs)
    try:
        output = forward(**sink.begin_forward(decoder, _by_name(args, kwargs)))
        sink.end_forward()
    except BaseException:
        # What layers have left that did not get to their end would keep the cache alive.
        _calls.forget(hooks)
        _take_back(sink)
        raise
    return output


def _call(model: nn.Module, before: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a model around the decoder: what fails after the decoder undoes the forward as well."""
    forward = before if before is not None else partial(type(model).forward, model)
    sink = cache_of_call(kwargs)
    if not isinstance(sink, SignalSink) or sink.in_call:
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


def _join(core: nn.Module, before: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a model that joins a vision tower to the decoder."""
    forward = before if before is not None else MethodType(type(core).forward, core)
    sink = cache_of_call(kwargs)
    if not isinstance(sink, SignalSink):
        return forward(*args, **kwargs)
    try:
        return forward(**sink.begin_multimodal(core, _by_name(args, kwargs)))
    finally:
        sink.end_multimodal()


def _before_gdn(key: tuple[int, str, int], layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    _calls.by_key.pop(key, None)
    sink = cache_of_call(kwargs)
    if not isinstance(sink, SignalSink):
        return None
    if sink.wants_signals():
        _calls.by_key[key] = _Call(sink, layer, sink.convolution_context(key[2]))
    # transformers leaves the mask out for a single token, which may be a pad of a row that has not begun.
    hidden = named_arguments(args, kwargs)["hidden_states"]
    return args, {**kwargs, "attention_mask": sink.gdn_mask_for(kwargs.get("attention_mask"), hidden.device)}


def _before_ple(ple: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Per-layer embeddings see pads as GDN layers do; a pad counts as an end of sequence among their n-grams."""
    hidden, ids, sink = args
    mask = sink.gdn_mask_for(kwargs.get("conv_mask"), hidden.device) if isinstance(sink, SignalSink) else None
    if mask is None:
        return None
    return (hidden, ids.where(mask.bool(), ple.ple_embedding.eos_token_id), sink), {**kwargs, "conv_mask": mask}


def _before_attention(key: tuple[int, str, int], layer: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    _calls.by_key.pop(key, None)
    sink = cache_of_call(kwargs)
    if not isinstance(sink, SignalSink):
        return None
    kwargs = named_arguments(args, kwargs)
    if sink.wants_attention():
        _calls.by_key[key] = _Call(sink, layer, kwargs=kwargs)
    query = kwargs["hidden_states"]
    mask = sink.mask_for(key[2], kwargs.get("attention_mask"), query, layer.config._attn_implementation)
    return (), {**kwargs, "attention_mask": mask}


def _after_layer(key: tuple[int, str, int], layer: nn.Module, args: Any, output: Any) -> None:
    _calls.by_key.pop(key, None)


def _keep_output(key: tuple[int, str, int], name: str, module: nn.Module, args: Any, output: Tensor) -> None:
    if (call := _calls.by_key.get(key)) is not None:
        call.outputs[name] = output


def _before_out_proj(key: tuple[int, str, int], adapter: FamilyAdapter, module: nn.Module, args: Any) -> None:
    # The last step of a GDN forward: every projection is known, and an offloaded layer still has its parameters.
    if (call := _calls.by_key.pop(key, None)) is not None:
        with torch.no_grad():
            signals = gdn_signals(adapter, call.layer, call.outputs, call.context)
        call.sink.record_signals(key[2], signals)


def _before_o_proj(key: tuple[int, str, int], adapter: FamilyAdapter, module: nn.Module, args: Any) -> None:
    if (call := _calls.by_key.pop(key, None)) is not None:
        call.sink.record_attention(key[2], adapter.view(call.layer, call.kwargs, call.outputs))


def _index(
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
    if not isinstance(cache, SignalSink):
        return forward(hidden, angles, mask, cache)
    selected = cache.select_entries(key[2], indexer, hidden, angles)
    if selected is None:
        selected = selected_entries(forward(hidden, angles, mask, cache))
    _keep_output(key, "indexer", indexer, (), selected)
    return selection_mask(selected, mask)


def _generate(model: Any, before: Any, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """`generate` of the model, which first tells a GateSight cache what it is given."""
    generate = before if before is not None else MethodType(type(model).generate, model)
    cache = _checked_cache(kwargs)
    if not isinstance(cache, SignalSink):
        return generate(inputs, *args, **kwargs)
    kwargs = {k: v for k, v in kwargs.items() if k not in CACHE_ARGUMENTS}
    if args:
        names = [name for name in inspect.signature(type(model).generate).parameters if name not in ("self", "inputs")]
        kwargs |= dict(zip(names, args, strict=False))
    call = cache.begin_generate(model, inputs, kwargs)
    output = generate(call.inputs, **call.arguments, **{cache_argument(model): cache})
    cache.end_generate()
    return call.as_given(output)


def _prefill(model: Any, before: Any, ids: Tensor, config: Any, model_kwargs: dict[str, Any], **kwargs: Any) -> Any:
    """The prefill stage of `generate`, after which a GateSight cache is compacted.

    `generate` looks this method up when it gets there. So it is found even where the cache, and with it the hooks, are
    made among the arguments of the first call: `model.generate(**inputs, cache=GateSightCache(..., model=model))`.
    """
    prefill = before if before is not None else MethodType(type(model)._prefill, model)
    outputs = prefill(ids, config, model_kwargs, **kwargs)
    cache = cache_of_call(model_kwargs)
    if isinstance(cache, SignalSink):
        cache.end_prefill()
    return outputs


#: What is put in place of methods of a model object, by name.
_METHODS: dict[str, Any] = {"generate": _generate, "_prefill": _prefill}


class SignalHooks:
    """The hooks on one decoder and on the models around it. `remove()` takes them off; also a context manager."""

    def __init__(self, modules: HybridModules, adapter: FamilyAdapter) -> None:
        self._handles: list[RemovableHandle] = []
        #: Models whose `generate` and forward know the cache.
        self.covered: list[Any] = []
        self._cores: list[Any] = []
        self._replaced: list[tuple[Any, str, Any]] = []
        self._places: list[tuple[Any, str, Any]] = []
        self._decoder: Any = modules.decoder
        add = self._handles.append
        self._replace(modules.decoder, "forward", _decode, id(self))
        for i, gdn in enumerate(modules.gdn):
            key = (id(self), "gdn", i)
            add(gdn.register_forward_pre_hook(partial(_before_gdn, key), with_kwargs=True))
            for name in adapter.projections:
                add(self._part(gdn, name).register_forward_hook(partial(_keep_output, key, name)))
            output = self._part(gdn, adapter.gdn_output)
            add(output.register_forward_pre_hook(partial(_before_out_proj, key, adapter)))
            add(gdn.register_forward_hook(partial(_after_layer, key), always_call=True))
        for layer in modules.decoder.layers:  # type: ignore[union-attr]
            if getattr(layer, "ple", None) is not None:
                add(layer.ple.register_forward_pre_hook(_before_ple, with_kwargs=True))
        for j, attention in enumerate(modules.attention):
            key = (id(self), "attention", j)
            add(attention.register_forward_pre_hook(partial(_before_attention, key), with_kwargs=True))
            for name in adapter.viewed(attention):
                add(self._part(attention, name).register_forward_hook(partial(_keep_output, key, name)))
            add(self._part(attention, "o_proj").register_forward_pre_hook(partial(_before_o_proj, key, adapter)))
            add(attention.register_forward_hook(partial(_after_layer, key), always_call=True))
            if adapter.indexed:
                self._replace(attention.indexer, "forward", _index, key)
        modules.decoder._gatesight_hooks = self  # type: ignore[assignment]

    def _part(self, layer: Any, name: str) -> Any:
        part = getattr(layer, name)
        self._places.append((layer, name, part))
        return part

    @property
    def in_place(self) -> bool:
        """False once something hooked was exchanged, such as a projection for one with an adapter."""
        forward = vars(self._decoder).get("forward")
        while forward is not None and getattr(forward, "func", None) is not _decode:
            forward = getattr(forward, "__wrapped__", None)  # accelerate puts its own around it
        return forward is not None and all(getattr(layer, name) is part for layer, name, part in self._places)

    def cover(self, model: Any) -> None:
        """Let `generate` and the forward of a model around the decoder know the cache; once per model."""
        if any(covered is model for covered in self.covered):
            return
        core = core_of(model, self._decoder)
        if core is not None and not any(covered is core for covered in self._cores):
            self._cores.append(core)
            self._replace(core, "forward", _join)
        for module in model.modules():
            # A wrapper hands its arguments on to the model inside.
            inside = hasattr(type(module), "_prefill") and not any(covered is module for covered in self.covered)
            if module is model or inside:
                self.covered.append(module)
                rename = partial(_rename_cache, cache_argument(module))
                self._handles.append(module.register_forward_pre_hook(rename, with_kwargs=True))
                if module is not self._decoder and module is not core:
                    self._replace(module, "forward", _call)
            for name, method in _METHODS.items():
                if hasattr(type(module), name) and getattr(vars(module).get(name), "func", None) is not method:
                    self._replace(module, name, method)

    def _replace(self, module: Any, name: str, method: Any, *bound: Any) -> None:
        """Put `method` in place of a module's own; it is given the module and what an earlier one put there."""
        own = getattr(module, name)
        ours: Any = partial(method, module, vars(module).get(name), *bound)
        ours.__wrapped__ = own  # whose signature `generate` reads
        setattr(module, name, ours)
        self._replaced.append((module, name, method))

    def remove(self) -> None:
        """Take everything off; does nothing the second time."""
        for handle in self._handles:
            handle.remove()
        for module, name, method in self._replaced:
            own, moved = vars(module).get(name), vars(module).get(f"_old_{name}")
            if getattr(own, "func", None) is method:
                delattr(module, name)
                if own.args[1] is not None:
                    setattr(module, name, own.args[1])
            elif getattr(moved, "func", None) is method:  # accelerate's hook came later, and calls it
                setattr(module, f"_old_{name}", moved.args[1] or MethodType(getattr(type(module), name), module))
        if vars(self._decoder).get("_gatesight_hooks") is self:
            del self._decoder._gatesight_hooks
        self._handles, self.covered, self._cores, self._replaced, self._places = [], [], [], [], []

    def __enter__(self) -> "SignalHooks":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def attach(model: Any) -> SignalHooks:
    """Put the hooks on a model, or return those that are on its decoder already, perhaps through another wrapper.

    Where projections were exchanged since then (adapters, quantisation), hooks are put on the new ones.

    Raises:
        TypeError: It is no model.
        UnsupportedModelError: The model is no hybrid of a known family, or multimodal only by its configuration.
    """
    modules = find_modules(model, HybridSpec.of(model))
    if model.config.model_type in adapter_for(model.config).multimodal_types and not core_of(model, modules.decoder):
        raise UnsupportedModelError(
            f"{type(model).__name__} is configured as a multimodal model, but no module in it joins the text model to "
            "a vision tower and numbers their positions."
        )
    held: Any = vars(modules.decoder).get("_gatesight_hooks")
    if held is None or not held.in_place:
        covered = [] if held is None else held.covered
        if held is not None:
            held.remove()
        held = SignalHooks(modules, adapter_for(model.config))
        for earlier in covered:
            held.cover(earlier)
    hooks: SignalHooks = held
    hooks.cover(model)
    return hooks
