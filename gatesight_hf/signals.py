"""Hooks that hand a model's own signals to the cache of the call: β, g, ‖v‖ and output-gate means.

The hooks are stateless and are attached once per model. Each finds its cache among the arguments of the call and does
nothing when that is not a GateSight cache, so that many caches, of any kind, can interleave on one model. Signals come
from the projections that the forward computes anyway; only the short convolution of the values is run once more.
"""

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.activations import ACT2FN

from ._compat import CACHE_ARGUMENTS, cache_argument, cache_of_call
from .hybrid import FamilyAdapter, HybridSpec, adapter_for, find_modules


class SignalSink(ABC):
    """What the hooks need of a cache."""

    @abstractmethod
    def wants_signals(self) -> bool:
        """Whether GDN signals of the current forward are to be recorded."""

    @abstractmethod
    def wants_gates(self) -> bool:
        """Whether output gates of the current forward are to be recorded."""

    @abstractmethod
    def begin_forward(self, model_inputs: dict[str, Any]) -> dict[str, Any]:
        """Called before the decoder runs; returns its keyword arguments, completed."""

    @abstractmethod
    def end_forward(self, completed: bool) -> None:
        """Called after the decoder ran, or failed."""

    @abstractmethod
    def convolution_context(self, gdn: int) -> Tensor | None:
        """Copy of the last inputs of a GDN layer's short convolution, `[B, channels, kernel]`; None at the start."""

    @abstractmethod
    def record_signals(self, gdn: int, signals: Tensor) -> None:
        """Take `[B, T, 3, HV]` of GDN ordinal `gdn`."""

    @abstractmethod
    def record_gate(self, ordinal: int, gate: Tensor) -> None:
        """Take the output gate of attention ordinal `ordinal`: logits `[B, T, heads, head_dim]`."""

    @abstractmethod
    def mask_for(self, ordinal: int, mask: Any, query: Tensor, implementation: str) -> Any:
        """The attention mask that attention ordinal `ordinal` must use in place of `mask`."""

    @abstractmethod
    def gdn_mask_for(self, mask: Any) -> Any:
        """The padding mask of the current tokens that GDN layers must use in place of `mask`."""

    @abstractmethod
    def begin_generate(self, model: Any, inputs: Tensor | None, arguments: dict[str, Any]) -> dict[str, Any]:
        """Called before `generate`; returns its keyword arguments, completed."""

    @abstractmethod
    def end_generate(self) -> None:
        """Called after `generate`, however it ended."""


@dataclass
class _Call:
    """One forward of a GDN or attention layer, from its pre-hook to its post-hook."""

    sink: SignalSink
    layer: Any
    context: Tensor | None = None
    outputs: dict[str, Tensor] = field(default_factory=dict)


class _Calls(threading.local):
    """The calls under way in this thread, by hook key."""

    def __init__(self) -> None:
        self.by_key: dict[tuple[int, str, int], _Call] = {}


_calls = _Calls()


def gdn_signals(
    adapter: FamilyAdapter, layer: Any, outputs: dict[str, Tensor], context: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """β, g and ‖v‖ of one GDN layer from the outputs of its projections.

    g = -exp(A_log) · softplus(a + dt_bias), β = sigmoid(b), and v = SiLU(conv(values)) per value head
    (arXiv 2412.06464, equations 8 to 10 with the gates of its section 3.4).

    Args:
        adapter: Of the model's family.
        layer: The GDN module; its own parameters are read, so call this inside its forward.
        outputs: Outputs of the projections that the adapter names, `[B, T, …]`.
        context: Last inputs of the convolution before this chunk, `[B, channels, kernel]`, or None at the start.
        dtype: Of the result.

    Returns:
        `[B, T, 3, HV]`.
    """
    b, a = adapter.b_and_a(layer, outputs)
    log_decay = -layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias.float())
    values = adapter.values(layer, outputs).transpose(1, 2)
    left = layer.conv_kernel_size - 1
    first = 2 * layer.key_dim
    past = F.pad(values[..., :0], (left, 0)) if context is None else context[:, first:, context.shape[-1] - left :]
    bias = layer.conv1d.bias
    convolved = F.conv1d(
        torch.cat([past, values], dim=-1),
        layer.conv1d.weight[first:],
        None if bias is None else bias[first:],
        groups=layer.value_dim,
    )
    activated = ACT2FN[layer.activation](convolved).unflatten(1, (layer.num_v_heads, layer.head_v_dim))
    magnitude = torch.linalg.vector_norm(activated, dim=2, dtype=torch.float32).transpose(1, 2)
    return torch.stack([b.sigmoid().to(dtype), log_decay.to(dtype), magnitude.to(dtype)], dim=2)


# -- hooks: module-level functions, so that models with hooks can still be copied and pickled --------------------------


def _rename_cache(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Both names of the cache argument work on every version, without a warning."""
    cache = cache_of_call(kwargs)
    native = cache_argument(model)
    if isinstance(cache, SignalSink) and native not in kwargs:
        return args, {**{k: v for k, v in kwargs.items() if k not in CACHE_ARGUMENTS}, native: cache}
    return None


def _before_decoder(decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    sink = cache_of_call(kwargs)
    if not isinstance(sink, SignalSink):
        return None
    if args:
        kwargs = {**kwargs, "input_ids": args[0]}
        if len(args) > 1:
            raise ValueError("Pass attention_mask and further arguments of the decoder by name.")
    return (), sink.begin_forward(kwargs)


def _after_decoder(decoder: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    sink = cache_of_call(kwargs)
    if isinstance(sink, SignalSink):
        # An always-called hook gets None as the output of a forward that raised.
        sink.end_forward(completed=output is not None)


def _before_gdn(key: tuple[int, str, int], layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    _calls.by_key.pop(key, None)
    sink = cache_of_call(kwargs)
    if not isinstance(sink, SignalSink):
        return None
    if sink.wants_signals():
        _calls.by_key[key] = _Call(sink, layer, sink.convolution_context(key[2]))
    # transformers leaves the mask out for a single token, which may be a pad of a row that has not begun.
    return args, {**kwargs, "attention_mask": sink.gdn_mask_for(kwargs.get("attention_mask"))}


def _before_attention(key: tuple[int, str, int], layer: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    _calls.by_key.pop(key, None)
    sink = cache_of_call(kwargs)
    if not isinstance(sink, SignalSink):
        return None
    if sink.wants_gates():
        _calls.by_key[key] = _Call(sink, layer)
    query = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    mask = sink.mask_for(key[2], kwargs.get("attention_mask"), query, layer.config._attn_implementation)
    return args, {**kwargs, "attention_mask": mask}


def _after_layer(key: tuple[int, str, int], layer: nn.Module, args: Any, output: Any) -> None:
    _calls.by_key.pop(key, None)


def _keep_output(key: tuple[int, str, int], name: str, module: nn.Module, args: Any, output: Tensor) -> None:
    if (call := _calls.by_key.get(key)) is not None:
        call.outputs[name] = output


def _before_out_proj(key: tuple[int, str, int], adapter: FamilyAdapter, module: nn.Module, args: Any) -> None:
    # The last step of a GDN forward: every projection is known, and an offloaded layer still has its parameters.
    if (call := _calls.by_key.pop(key, None)) is not None:
        with torch.no_grad():
            signals = gdn_signals(adapter, call.layer, call.outputs, call.context, args[0].dtype)
        call.sink.record_signals(key[2], signals)


def _after_q_proj(
    key: tuple[int, str, int], adapter: FamilyAdapter, module: nn.Module, args: Any, output: Tensor
) -> None:
    if (call := _calls.by_key.pop(key, None)) is not None:
        call.sink.record_gate(key[2], adapter.output_gate(call.layer, output.detach()))


def _generate(model: Any, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """`generate` of the model, which first tells a GateSight cache where the prompt ends."""
    before = model._gatesight_hooks.generate_before or MethodType(type(model).generate, model)
    cache = cache_of_call(kwargs)
    if not isinstance(cache, SignalSink):
        return before(inputs, *args, **kwargs)
    kwargs = {k: v for k, v in kwargs.items() if k not in CACHE_ARGUMENTS}
    try:
        completed = cache.begin_generate(model, inputs, kwargs)
        return before(inputs, *args, **completed, **{cache_argument(model): cache})
    finally:
        cache.end_generate()


class SignalHooks:
    """The hooks on one model. `remove()` takes them off; as a context manager they live for the block."""

    def __init__(self, model: nn.Module, spec: HybridSpec) -> None:
        self.spec = spec
        self.generate_before: Any = vars(model).get("generate")
        self._handles: list[RemovableHandle] = []
        self._model: nn.Module | None = model
        adapter = adapter_for(model.config.get_text_config(decoder=True))  # type: ignore[union-attr, operator]
        modules = find_modules(model, spec)
        add = self._handles.append
        add(model.register_forward_pre_hook(_rename_cache, with_kwargs=True))
        add(modules.decoder.register_forward_pre_hook(_before_decoder, with_kwargs=True))
        add(modules.decoder.register_forward_hook(_after_decoder, with_kwargs=True, always_call=True))
        for i, gdn in enumerate(modules.gdn):
            key = (id(self), "gdn", i)
            add(gdn.register_forward_pre_hook(partial(_before_gdn, key), with_kwargs=True))
            for name in adapter.projections:
                add(getattr(gdn, name).register_forward_hook(partial(_keep_output, key, name)))
            add(gdn.out_proj.register_forward_pre_hook(partial(_before_out_proj, key, adapter)))  # type: ignore[union-attr]
            add(gdn.register_forward_hook(partial(_after_layer, key), always_call=True))
        for j, attention in enumerate(modules.attention):
            key = (id(self), "attention", j)
            add(attention.register_forward_pre_hook(partial(_before_attention, key), with_kwargs=True))
            add(attention.q_proj.register_forward_hook(partial(_after_q_proj, key, adapter)))  # type: ignore[union-attr]
            add(attention.register_forward_hook(partial(_after_layer, key), always_call=True))
        model._gatesight_hooks = self  # type: ignore[assignment]
        if hasattr(type(model), "generate"):
            model.generate = partial(_generate, model)  # type: ignore[assignment]

    def remove(self) -> None:
        """Take everything off the model; does nothing the second time."""
        model, self._model = self._model, None
        if model is None:
            return
        for handle in self._handles:
            handle.remove()
        if getattr(vars(model).get("generate"), "func", None) is _generate:
            del model.generate
            if self.generate_before is not None:
                model.generate = self.generate_before
        del model._gatesight_hooks

    def __enter__(self) -> "SignalHooks":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def attach(model: Any) -> SignalHooks:
    """Put the hooks on a model, or return those that are there already.

    Raises:
        UnsupportedModelError: The model is no hybrid of a known family.
    """
    hooks = vars(model).get("_gatesight_hooks")
    return hooks if hooks is not None else SignalHooks(model, HybridSpec.from_config(model.config))
