"""What the library knows about a model: where its Gated-DeltaNet and attention layers are and how to read them.

Everything else works on *attention ordinals* j = 0 … L-1 and *GDN ordinals* i = 0 … M-1, never on absolute layer
indices. One small adapter per family knows the names of the projections.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from .errors import UnsupportedModelError


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

    @classmethod
    def from_config(cls, config: Any) -> "HybridSpec":
        """Read the layout of a text model's `PretrainedConfig`.

        Raises:
            UnsupportedModelError: A multimodal model, no adapter for the family, a layer type that is neither GDN nor
                full attention, or no GDN layer below some attention layer.
        """
        if config.get_text_config(decoder=True) is not config:
            raise UnsupportedModelError(
                f"{config.model_type} is a multimodal model, which keeps positions of its own outside the cache. Load "
                "its text model alone, for example with AutoModelForCausalLM."
            )
        adapter = adapter_for(config)
        if config.hidden_act not in ("silu", "swish"):
            raise UnsupportedModelError(
                f"{config.model_type} with hidden_act={config.hidden_act!r}: write magnitudes are those of values "
                "after SiLU, which all published models of these families have."
            )
        types = list(config.layer_types)
        unknown = sorted(set(types) - {"linear_attention", adapter.attention_type})
        if unknown:
            raise UnsupportedModelError(
                f"{config.model_type}: layer types {unknown} are neither 'linear_attention' nor "
                f"{adapter.attention_type!r}."
            )
        gdn = tuple(i for i, kind in enumerate(types) if kind == "linear_attention")
        attention = tuple(i for i, kind in enumerate(types) if kind == adapter.attention_type)
        if not gdn or not attention or gdn[0] > attention[0]:
            raise UnsupportedModelError(
                f"{config.model_type}: GateSight scores the KV entries of an attention layer from the GDN layers below "
                f"it, but this model has {len(gdn)} GDN and {len(attention)} full-attention layers in the order "
                f"{[kind.split('_')[0] for kind in types[:8]]}…. Use a hybrid such as Qwen3.5 or Qwen3-Next."
            )
        return cls(
            model_type=config.model_type,
            gdn_layers=gdn,
            attention_layers=attention,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            num_value_heads=config.linear_num_value_heads,
            num_key_heads=config.linear_num_key_heads,
            value_head_dim=config.linear_value_head_dim,
            key_head_dim=config.linear_key_head_dim,
        )

    @property
    def num_attention_layers(self) -> int:
        return len(self.attention_layers)

    @property
    def indexed(self) -> bool:
        """Whether an index picks what queries attend to, so that the heads of a layer keep the same entries."""
        return adapter_for(self).indexed

    def gdn_below(self, ordinal: int, window: int) -> tuple[int, ...]:
        """GDN ordinals of the up to `window` nearest GDN layers below attention ordinal `ordinal`, ascending."""
        if window < 1:
            raise ValueError(f"window must be at least 1 GDN layer, got {window}.")
        below = [i for i, layer in enumerate(self.gdn_layers) if layer < self.attention_layers[ordinal]]
        return tuple(below[-window:])

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with anything an estimator depends on."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def describe(self) -> str:
        """One line for error messages."""
        return (
            f"{self.model_type} with {len(self.gdn_layers)} GDN layers of {self.num_value_heads} value heads and "
            f"{len(self.attention_layers)} attention layers of {self.num_key_value_heads} KV heads "
            f"(layout {self.fingerprint})"
        )


class FamilyAdapter(ABC):
    """Names and shapes of one family's projections.

    `projections` lists the linear layers of a GDN layer whose outputs hold b, a and the values before their short
    convolution; the methods take these outputs apart.
    """

    model_types: ClassVar[tuple[str, ...]] = ()
    projections: ClassVar[tuple[str, ...]] = ()
    #: What `config.layer_types` calls an attention layer.
    attention_type: ClassVar[str] = "full_attention"
    #: Whether attention layers have an `indexer`, see `sparse.py`.
    indexed: ClassVar[bool] = False

    @abstractmethod
    def b_and_a(self, layer: Any, outputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Logit of β and input of g, each `[B, T, HV]`."""

    @abstractmethod
    def values(self, layer: Any, outputs: Mapping[str, Tensor]) -> Tensor:
        """Values before the short convolution, `[B, T, G, C]`: HV · value_head_dim channels in G groups, not copied."""

    def output_gate(self, attention: Any, q_proj: Tensor) -> Tensor:
        """Logits of the output gate, `[B, T, heads, head_dim]`, from the output of `q_proj`.

        Both families interleave query and gate by head: `[q | gate]` of each head side by side.
        """
        return q_proj.unflatten(-1, (-1, 2, attention.head_dim))[..., 1, :]


class Qwen35Adapter(FamilyAdapter):
    """Qwen3.5, 3.6, 3.8 (dense and MoE): separate projections for qkv, b and a."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_text", "qwen3_5_moe_text")
    projections = ("in_proj_qkv", "in_proj_b", "in_proj_a")

    def b_and_a(self, layer: Any, outputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return outputs["in_proj_b"], outputs["in_proj_a"]

    def values(self, layer: Any, outputs: Mapping[str, Tensor]) -> Tensor:
        return outputs["in_proj_qkv"][..., 2 * layer.key_dim :].unsqueeze(2)


class Qwen3NextAdapter(FamilyAdapter):
    """Qwen3-Next: projections fused and grouped by key head, `[q | k | v | z]` and `[b | a]` per key head."""

    model_types = ("qwen3_next",)
    projections = ("in_proj_qkvz", "in_proj_ba")

    def b_and_a(self, layer: Any, outputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        b, a = outputs["in_proj_ba"].unflatten(-1, (layer.num_k_heads, 2, -1)).unbind(-2)
        return b.flatten(-2), a.flatten(-2)

    def values(self, layer: Any, outputs: Mapping[str, Tensor]) -> Tensor:
        per_key_head = layer.value_dim // layer.num_k_heads
        grouped = outputs["in_proj_qkvz"].unflatten(-1, (layer.num_k_heads, -1))
        start = 2 * layer.head_k_dim
        return grouped[..., start : start + per_key_head]


class Qwen4ExpAdapter(Qwen35Adapter):
    """Qwen4-Exp: the mixers of Qwen3.5, with sparse attention (QSA)."""

    model_types = ("qwen4_exp_text",)
    attention_type = "indexed_attention"
    indexed = True


ADAPTERS: tuple[FamilyAdapter, ...] = (Qwen35Adapter(), Qwen3NextAdapter(), Qwen4ExpAdapter())


def adapter_for(config: Any) -> FamilyAdapter:
    """The adapter of a text configuration's family.

    Raises:
        UnsupportedModelError: No adapter knows `config.model_type`.
    """
    for adapter in ADAPTERS:
        if config.model_type in adapter.model_types:
            return adapter
    known = ", ".join(name for adapter in ADAPTERS for name in adapter.model_types)
    raise UnsupportedModelError(
        f"GateSight needs a hybrid of Gated-DeltaNet and full-attention layers; model type {config.model_type!r} is "
        f"not one it knows ({known})."
    )


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
    for module in model.modules():
        layers = getattr(module, "layers", None)
        if not isinstance(layers, nn.ModuleList) or len(layers) <= max(spec.gdn_layers + spec.attention_layers):
            continue
        gdn = [getattr(layers[i], "linear_attn", None) for i in spec.gdn_layers]
        attention = [getattr(layers[i], "self_attn", None) for i in spec.attention_layers]
        if None not in gdn and None not in attention:
            return HybridModules(module, tuple(gdn), tuple(attention))  # type: ignore[arg-type]
    raise UnsupportedModelError(
        f"The configuration describes {spec.describe()}, but no module of {type(model).__name__} has such layers."
    )
