"""One small adapter per family of models: how its layers are called, and how what they compute is taken apart."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

import gatesight_kernels as kernels

from ..entries.attention import GateSightAttentionLayer, LatentAttentionLayer
from ..entries.view import AttentionView, LatentMap
from ..errors import UnsupportedModelError


class FamilyAdapter(ABC):
    """Names and shapes of one family; what most have in common is the default.

    `projections` lists the modules of a GDN layer whose outputs `signals` reads; `viewed` does the same for the `view`
    of an attention layer.
    """

    model_types: ClassVar[tuple[str, ...]] = ()
    #: Models around the text model whose vision tower and positions on three axes are followed.
    multimodal_types: ClassVar[tuple[str, ...]] = ()
    projections: ClassVar[tuple[str, ...]] = ()
    #: Attribute of a decoder layer that is its GDN mixer; its attention is always `self_attn`.
    gdn_name: ClassVar[str] = "linear_attn"
    #: Last projection of a GDN layer.
    gdn_output: ClassVar[str] = "out_proj"
    #: Whether attention outputs pass a gate, of which `gate` budgets are made.
    has_output_gate: ClassVar[bool] = True
    #: What `config.layer_types` calls an attention layer.
    attention_type: ClassVar[str] = "full_attention"
    #: Whether attention layers have an `indexer`, see `entries/sparse.py`.
    indexed: ClassVar[bool] = False
    #: Whether layers of type `sliding_attention` may stand between the others.
    allows_sliding: ClassVar[bool] = False
    #: What holds the entries of an attention layer.
    cache_layer: ClassVar[type[GateSightAttentionLayer]] = GateSightAttentionLayer

    @abstractmethod
    def sizes(self, config: Any) -> dict[str, Any]:
        """What `HybridSpec` says of heads and channels."""

    # -- GDN layers ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def signals(self, layer: Any, outputs: Mapping[str, Tensor], context: Tensor | None) -> Tensor:
        """β, g and ‖v‖ of one GDN layer; `gatesight_kernels.gdn_signals` has the maths.

        Args:
            layer: The GDN module; its own parameters are read, so call this inside its forward.
            outputs: Of the modules in `projections`, `[B, T, …]`.
            context: Last inputs of the convolution before this chunk, `[B, channels, kernel]`, or None at the start.

        Returns:
            `[B, T, 3, HV]`, in the dtype of the projections.
        """

    # -- attention layers ----------------------------------------------------------------------------------------------

    def viewed(self, attention: Any) -> tuple[str, ...]:
        """Modules of an attention layer whose outputs a view is made of."""
        return ("q_norm", "k_norm", "v_proj", *(("q_proj",) if self.has_output_gate else ()))

    def output_gate(self, attention: Any, q_proj: Tensor) -> Tensor:
        """Logits of the output gate, `[B, T, heads, head_dim]`, from the output of `q_proj`.

        Qwen's families interleave query and gate by head: `[q | gate]` of each head side by side.
        """
        return q_proj.unflatten(-1, (-1, 2, attention.head_dim))[..., 1, :]

    def view(self, attention: Any, kwargs: Mapping[str, Any], outputs: Mapping[str, Tensor]) -> AttentionView:
        """The view of a call of `attention` with `kwargs`, from the `outputs` of the modules in `viewed`."""

        def by_head(states: Tensor) -> Tensor:
            return states if states.ndim == 4 else states.unflatten(-1, (-1, attention.head_dim))

        hidden = kwargs["hidden_states"]
        return AttentionView(
            hidden,
            by_head(outputs["q_norm"]),
            by_head(outputs["k_norm"]),
            by_head(outputs["v_proj"]),
            self.output_gate(attention, outputs["q_proj"]) if self.has_output_gate else None,
            *_angles(kwargs, hidden),
            selected=outputs.get("indexer"),
        )

    def rotary_embedding(self, decoder: Any) -> Any:
        """What makes the rotary angles of the attention layers; None if nothing turns."""
        return getattr(decoder, "rotary_emb", None)


def _angles(kwargs: Mapping[str, Any], hidden: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin `[B, T, R]` that a layer was given; of no channels where it turns nothing (NoPE)."""
    given = kwargs.get("position_embeddings")
    if given is None:
        return hidden[..., :0], hidden[..., :0]
    # Layers with an indexer get the angles of all tokens so far.
    cos, sin = (table[:, -hidden.shape[1] :] for table in given)
    return cos, sin


def _signals(
    layer: Any, b: Tensor, a: Tensor, values: Tensor, log_a: Tensor, dt_bias: Tensor, context: Tensor | None
) -> Tensor:
    """The kernel's signals, with the share of the short convolution that is the values'."""
    weight, bias, left = layer.conv1d.weight[:, 0], layer.conv1d.bias, layer.conv_kernel_size - 1
    first = len(weight) - values.shape[-2] * values.shape[-1]  # queries and keys come before
    return kernels.gdn_signals(
        b,
        a,
        values,
        log_a,
        dt_bias,
        weight[first:],
        None if bias is None else bias[first:],
        None if context is None else context[:, first:, context.shape[-1] - left :],
    )


class GDNAdapter(FamilyAdapter):
    """A family whose linear layers are Gated DeltaNet: one decay per value head."""

    def sizes(self, config: Any) -> dict[str, Any]:
        return {
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            "num_value_heads": config.linear_num_value_heads,
            "num_key_heads": config.linear_num_key_heads,
            "value_head_dim": config.linear_value_head_dim,
            "key_head_dim": config.linear_key_head_dim,
        }

    @abstractmethod
    def b_and_a(self, layer: Any, outputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Logit of β and input of g, each `[B, T, HV]`."""

    @abstractmethod
    def values(self, layer: Any, outputs: Mapping[str, Tensor]) -> Tensor:
        """Values before the short convolution, `[B, T, G, C]`: HV · value_head_dim channels in G groups, not copied."""

    def signals(self, layer: Any, outputs: Mapping[str, Tensor], context: Tensor | None) -> Tensor:
        b, a = self.b_and_a(layer, outputs)
        return _signals(layer, b, a, self.values(layer, outputs), layer.A_log, layer.dt_bias, context)


class Qwen35Adapter(GDNAdapter):
    """Qwen3.5, 3.6, 3.8 (dense and MoE): separate projections for qkv, b and a."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_text", "qwen3_5_moe_text")
    multimodal_types: ClassVar[tuple[str, ...]] = ("qwen3_5", "qwen3_5_moe")
    projections = ("in_proj_qkv", "in_proj_b", "in_proj_a")

    def b_and_a(self, layer: Any, outputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return outputs["in_proj_b"], outputs["in_proj_a"]

    def values(self, layer: Any, outputs: Mapping[str, Tensor]) -> Tensor:
        return outputs["in_proj_qkv"][..., 2 * layer.key_dim :].unsqueeze(2)


class Qwen3NextAdapter(GDNAdapter):
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
    multimodal_types = ()
    attention_type = "indexed_attention"
    indexed = True


class OlmoHybridAdapter(GDNAdapter):
    """OLMo-Hybrid: β up to 2, norms over whole queries and keys, no output gate, in published models no RoPE."""

    model_types = ("olmo_hybrid",)
    projections = ("v_proj", "b_proj", "a_proj")
    gdn_output = "o_proj"
    has_output_gate = False

    def b_and_a(self, layer: Any, outputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return outputs["b_proj"], outputs["a_proj"]

    def values(self, layer: Any, outputs: Mapping[str, Tensor]) -> Tensor:
        return outputs["v_proj"].unsqueeze(2)

    def signals(self, layer: Any, outputs: Mapping[str, Tensor], context: Tensor | None) -> Tensor:
        found = super().signals(layer, outputs, context)
        if layer.allow_neg_eigval:
            found[:, :, 0] *= 2
        return found


class LaraMiniAdapter(Qwen35Adapter):
    """Lara-Mini: GDN layers of Qwen3.5; attention without output gate or RoPE, between sliding windows with RoPE."""

    model_types = ("lara_mini",)
    multimodal_types = ()
    has_output_gate = False
    allows_sliding = True

    def rotary_embedding(self, decoder: Any) -> Any:
        return None  # its angles are for the sliding windows


class KimiLinearAdapter(FamilyAdapter):
    """Kimi-Linear: Kimi Delta Attention (KDA, arXiv 2510.26692) and latent attention (MLA) without RoPE.

    KDA is GDN with a decay per key channel. Its log-decay g is the mean over them: exp(g) is then the geometric mean of
    the decays, by which the volume of the state shrinks, and where all channels agree it is GDN's.
    """

    model_types = ("kimi_linear",)
    projections = ("v_proj", "b_proj", "forget_gate")
    gdn_name = "self_attn"
    gdn_output = "o_proj"
    has_output_gate = False
    cache_layer = LatentAttentionLayer

    def sizes(self, config: Any) -> dict[str, Any]:
        return {
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": 1,
            "head_dim": config.kv_lora_rank + config.qk_rope_head_dim,
            "num_value_heads": config.linear_num_heads,
            "num_key_heads": config.linear_num_heads,
            "value_head_dim": config.linear_head_dim,
            "key_head_dim": config.linear_head_dim,
            "logit_scale": (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5,
        }

    def signals(self, layer: Any, outputs: Mapping[str, Tensor], context: Tensor | None) -> Tensor:
        b = outputs["b_proj"]
        # The kernel's own g has no meaning here and is overwritten.
        nothing = torch.zeros(b.shape[-1], device=b.device)
        found = _signals(layer, b, b, outputs["v_proj"].unsqueeze(2), nothing, nothing, context)
        found[:, :, 1] = outputs["forget_gate"].float().mean(-1)
        return found

    def viewed(self, attention: Any) -> tuple[str, ...]:
        return (self._query_projection(attention), "kv_a_proj_with_mqa", "kv_a_layernorm")

    @staticmethod
    def _query_projection(attention: Any) -> str:
        return "q_proj" if attention.q_lora_rank is None else "q_b_proj"

    def view(self, attention: Any, kwargs: Mapping[str, Any], outputs: Mapping[str, Tensor]) -> AttentionView:
        hidden = kwargs["hidden_states"]
        queries = outputs[self._query_projection(attention)].unflatten(-1, (-1, attention.qk_head_dim))
        latents = outputs["kv_a_layernorm"].unsqueeze(2)
        rotary = outputs["kv_a_proj_with_mqa"][..., attention.kv_lora_rank :].unsqueeze(2)
        nope = attention.qk_nope_head_dim
        queries = torch.cat([queries[..., :nope], self.rotary_channels(queries[..., nope:])], dim=-1)
        return AttentionView(
            hidden,
            queries,
            torch.cat([self.rotary_channels(rotary), latents], dim=-1),
            latents,
            self.latent_gate(outputs),
            *_angles(kwargs, hidden),
            LatentMap(attention.kv_b_proj, attention.kv_lora_rank, nope, attention.v_head_dim),
        )

    def rotary_channels(self, states: Tensor) -> Tensor:
        """Rotary channels before RoPE in the order that they are cached in."""
        return states

    def latent_gate(self, outputs: Mapping[str, Tensor]) -> Tensor | None:
        """Logits of the output gate, `[B, T, heads, 1]`."""
        return None


class BailingHybridAdapter(KimiLinearAdapter):
    """Ling 3 (Bailing-Hybrid): KDA, and MLA with RoPE and one output gate per head."""

    model_types = ("bailing_hybrid",)
    has_output_gate = True

    def sizes(self, config: Any) -> dict[str, Any]:
        if config.rope_parameters.get("rope_type", "default") != "default":
            raise UnsupportedModelError(
                f"bailing_hybrid with rope_type={config.rope_parameters['rope_type']!r}: the scale of its attention "
                "logits follows the RoPE scaling, which has been tried with rope_type='default' only."
            )
        return super().sizes(config)

    def viewed(self, attention: Any) -> tuple[str, ...]:
        return (*super().viewed(attention), "g_proj")

    def rotary_channels(self, states: Tensor) -> Tensor:
        # Pairs lie side by side in the projections, and half the channels apart in the cache.
        return torch.cat([states[..., 0::2], states[..., 1::2]], dim=-1)

    def latent_gate(self, outputs: Mapping[str, Tensor]) -> Tensor | None:
        return outputs["g_proj"].unsqueeze(-1)


ADAPTERS: tuple[FamilyAdapter, ...] = (
    Qwen35Adapter(),
    Qwen3NextAdapter(),
    Qwen4ExpAdapter(),
    OlmoHybridAdapter(),
    LaraMiniAdapter(),
    KimiLinearAdapter(),
    BailingHybridAdapter(),
)


def adapter_for(config: Any) -> FamilyAdapter:
    """The adapter of a family.

    Args:
        config: Anything with a `model_type`: the configuration of a model, the text model inside it, or a `HybridSpec`.

    Raises:
        UnsupportedModelError: No adapter knows it.
    """
    for adapter in ADAPTERS:
        if config.model_type in adapter.model_types + adapter.multimodal_types:
            return adapter
    known = ", ".join(name for adapter in ADAPTERS for name in adapter.model_types)
    kinds = sorted(set(getattr(config, "layer_types", None) or ()))
    found = f" (its layers are {', '.join(kinds)})" if kinds else ""
    raise UnsupportedModelError(
        f"GateSight needs a hybrid of Gated-DeltaNet and full-attention layers; model type {config.model_type!r}"
        f"{found} is not one it knows ({known})."
    )
