"""Hooks that hand a model's own signals to the cache of the call: β, g, ‖v‖, and views of its attention layers.

The hooks are stateless and are attached once per model. Each finds its cache among the arguments of the call and does
nothing when that is not a GateSight cache. Signals come from the projections that the forward computes anyway; only the
short convolution of the values is run once more. What the hooks do is in `listening`.
"""

from functools import partial
from types import MethodType
from typing import Any

from torch.utils.hooks import RemovableHandle

from ..errors import UnsupportedModelError
from . import listening
from ._compat import cache_argument
from .families import FamilyAdapter, adapter_for
from .hybrid import HybridModules, HybridSpec, find_modules
from .multimodal import core_of

#: What is put in place of methods of a model object, by name.
_METHODS: dict[str, Any] = {"generate": listening.generate, "_prefill": listening.prefill}


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
        self._replace(modules.decoder, "forward", listening.decode, id(self))
        for i, gdn in enumerate(modules.gdn):
            key = (id(self), "gdn", i)
            add(gdn.register_forward_pre_hook(partial(listening.before_gdn, key), with_kwargs=True))
            for name in adapter.projections:
                add(self._part(gdn, name).register_forward_hook(partial(listening.keep_output, key, name)))
            output = self._part(gdn, adapter.gdn_output)
            add(output.register_forward_pre_hook(partial(listening.before_out_proj, key, adapter)))
            add(gdn.register_forward_hook(partial(listening.after_layer, key), always_call=True))
        for layer in modules.decoder.layers:  # type: ignore[union-attr]
            if getattr(layer, "ple", None) is not None:
                add(layer.ple.register_forward_pre_hook(listening.before_ple, with_kwargs=True))
        for j, attention in enumerate(modules.attention):
            key = (id(self), "attention", j)
            add(attention.register_forward_pre_hook(partial(listening.before_attention, key), with_kwargs=True))
            for name in adapter.viewed(attention):
                add(self._part(attention, name).register_forward_hook(partial(listening.keep_output, key, name)))
            add(
                self._part(attention, "o_proj").register_forward_pre_hook(
                    partial(listening.before_o_proj, key, adapter)
                )
            )
            add(attention.register_forward_hook(partial(listening.after_layer, key), always_call=True))
            if adapter.indexed:
                self._replace(attention.indexer, "forward", listening.index, key)
        modules.decoder._gatesight_hooks = self  # type: ignore[assignment]

    def _part(self, layer: Any, name: str) -> Any:
        part = getattr(layer, name)
        self._places.append((layer, name, part))
        return part

    @property
    def in_place(self) -> bool:
        """False once something hooked was exchanged, such as a projection for one with an adapter."""
        forward = vars(self._decoder).get("forward")
        while forward is not None and getattr(forward, "func", None) is not listening.decode:
            forward = getattr(forward, "__wrapped__", None)  # accelerate puts its own around it
        return forward is not None and all(getattr(layer, name) is part for layer, name, part in self._places)

    def cover(self, model: Any) -> None:
        """Let `generate` and the forward of a model around the decoder know the cache; once per model."""
        if any(covered is model for covered in self.covered):
            return
        core = core_of(model, self._decoder)
        if core is not None and not any(covered is core for covered in self._cores):
            self._cores.append(core)
            self._replace(core, "forward", listening.join)
        for module in model.modules():
            # A wrapper hands its arguments on to the model inside.
            inside = hasattr(type(module), "_prefill") and not any(covered is module for covered in self.covered)
            if module is model or inside:
                self.covered.append(module)
                rename = partial(listening.rename_cache, cache_argument(module))
                self._handles.append(module.register_forward_pre_hook(rename, with_kwargs=True))
                if module is not self._decoder and module is not core:
                    self._replace(module, "forward", listening.call_around)
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
