"""What the library knows about a model: where its Gated-DeltaNet and attention layers are and how to read them.

Everything else works on *attention ordinals* j = 0 … L-1 and *GDN ordinals* i = 0 … M-1, never on absolute layer
indices. One small adapter per family (`families`) knows the names of the projections.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from gatesight_kernels.checks import check_whole_number, described

from ..checks import check_model
from ..errors import UnsupportedModelError
from .families import adapter_for


@dataclass(frozen=True)
class HybridSpec:
    """The layout of a hybrid model, from its configuration alone.

    Attributes:
        model_type: `config.model_type` of the text decoder.
        gdn_layers: Absolute indices of the GDN layers, ascending; M of them.
        attention_layers: Absolute indices of the full-attention layers, ascending; L of them.
        num_attention_heads: Query heads of an attention layer.
        num_key_value_heads: H, KV heads of an attention layer.
        head_dim: Channels of an attention head.
        num_value_heads: HV, value heads of a GDN layer.
        num_key_heads: Key heads of a GDN layer.
        value_head_dim: Channels of a GDN value head.
        key_head_dim: Channels of a GDN key head.
        logit_scale: Of attention logits; None for head_dim ** -0.5.
        sliding_layers: Absolute indices of sliding-window layers, whose bounded caches are left alone.
        sliding_window: Tokens that they see.
    """

    model_type: str
    gdn_layers: tuple[int, ...]
    attention_layers: tuple[int, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_value_heads: int
    num_key_heads: int
    value_head_dim: int
    key_head_dim: int
    logit_scale: float | None = None
    sliding_layers: tuple[int, ...] | None = None
    sliding_window: int | None = None

    @classmethod
    def of(cls, model: Any) -> "HybridSpec":
        """Read the layout of a model.

        Raises:
            TypeError: It is no model.
            UnsupportedModelError: See `from_config`.
        """
        check_model(model)
        return cls.from_config(model.config)

    @classmethod
    def from_config(cls, config: Any) -> "HybridSpec":
        """Read the layout of a `PretrainedConfig`; of a multimodal model, that of the text model inside it.

        Raises:
            UnsupportedModelError: No adapter for the family, a layer type that is neither GDN nor full attention, or no
                GDN layer below some attention layer.
        """
        adapter, text = adapter_for(config), config.get_text_config(decoder=True)
        if text.hidden_act not in ("silu", "swish"):
            raise UnsupportedModelError(
                f"{text.model_type} with hidden_act={text.hidden_act!r}: write magnitudes are those of values "
                "after SiLU, which all published models of these families have."
            )
        types = list(text.layer_types)
        gdn, attention, sliding = (
            tuple(i for i, kind in enumerate(types) if kind == wanted)
            for wanted in ("linear_attention", adapter.attention_type, "sliding_attention")
        )
        known = {"linear_attention", adapter.attention_type}
        known |= {"sliding_attention"} if adapter.allows_sliding else set()
        unknown = sorted(set(types) - known)
        if unknown:
            raise UnsupportedModelError(
                f"{text.model_type}: layer types {unknown} are neither 'linear_attention' nor "
                f"{adapter.attention_type!r}."
            )
        if not gdn or not attention or gdn[0] > attention[0]:
            raise UnsupportedModelError(
                f"{text.model_type}: GateSight scores the KV entries of an attention layer from the GDN layers below "
                f"it, but this model has {len(gdn)} GDN and {len(attention)} full-attention layers in the order "
                f"{[kind.split('_')[0] for kind in types[:8]]}…. Use a hybrid such as Qwen3.5 or Qwen3-Next."
            )
        return cls(
            model_type=text.model_type,
            gdn_layers=gdn,
            attention_layers=attention,
            **adapter.sizes(text),
            **({"sliding_layers": sliding, "sliding_window": text.sliding_window} if sliding else {}),
        )

    @property
    def num_attention_layers(self) -> int:
        return len(self.attention_layers)

    @property
    def scale(self) -> float:
        """Of attention logits."""
        return self.head_dim**-0.5 if self.logit_scale is None else self.logit_scale

    @property
    def indexed(self) -> bool:
        """Whether an index picks what queries attend to, so that the heads of a layer keep the same entries."""
        return adapter_for(self).indexed

    def gdn_below(self, ordinal: int, window: int) -> tuple[int, ...]:
        """GDN ordinals of the up to `window` nearest GDN layers below attention ordinal `ordinal`, ascending."""
        check_whole_number("window", window)
        below = [i for i, layer in enumerate(self.gdn_layers) if layer < self.attention_layers[ordinal]]
        return tuple(below[-window:])

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with anything an estimator depends on."""
        # What a family does not have is left out, so that a later attribute leaves the fingerprints of others alone.
        said = {name: value for name, value in asdict(self).items() if value is not None}
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]

    def describe(self) -> str:
        """One line for error messages."""
        return (
            f"{self.model_type} with {len(self.gdn_layers)} GDN layers of {self.num_value_heads} value heads and "
            f"{len(self.attention_layers)} attention layers of {self.num_key_value_heads} KV heads "
            f"(layout {self.fingerprint})"
        )


def check_spec(spec: Any) -> None:
    """Raises TypeError unless `spec` is the layout of a model."""
    if not isinstance(spec, HybridSpec):
        raise TypeError(f"spec must be a HybridSpec, such as HybridSpec.of(model), got {described(spec)}.")


@dataclass(frozen=True)
class HybridModules:
    """The modules of a model that hooks go on, by ordinal."""

    decoder: nn.Module
    gdn: tuple[nn.Module, ...]
    attention: tuple[nn.Module, ...]


def find_modules(model: nn.Module, spec: HybridSpec) -> HybridModules:
    """Find the decoder and its token mixers inside any wrapper (causal LM, PEFT).

    Raises:
        UnsupportedModelError: No submodule has a list `layers` with the mixers that the configuration promises.
    """
    gdn_name = adapter_for(spec).gdn_name
    for module in model.modules():
        layers = getattr(module, "layers", None)
        if not isinstance(layers, nn.ModuleList) or len(layers) <= max(spec.gdn_layers + spec.attention_layers):
            continue
        gdn = [getattr(layers[i], gdn_name, None) for i in spec.gdn_layers]
        attention = [getattr(layers[i], "self_attn", None) for i in spec.attention_layers]
        if None not in gdn and None not in attention:
            return HybridModules(module, tuple(gdn), tuple(attention))  # type: ignore[arg-type]
    raise UnsupportedModelError(
        f"The configuration describes {spec.describe()}, but no module of {type(model).__name__} has such layers."
    )
