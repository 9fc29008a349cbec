"""Models of every family, tiny and random, and estimators for them."""

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    KimiLinearConfig,
    KimiLinearForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Qwen4ExpForCausalLM,
    Qwen4ExpTextConfig,
)

from gatesight_hf import Estimator, EstimatorConfig, Prefill
from gatesight_hf.models import HybridSpec, find_modules
from gatesight_hf.scoring import Needs

VOCAB = 128
#: Size of the matrices: larger ones amplify rounding beyond the tolerances. The attention layers' outputs are large, so
#: that a wrong mask or position changes logits by 1e-1 and tokens with them.
GAIN, O_PROJ_GAIN = 0.4, 2.0
FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen3_5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig),
    "qwen3_5_moe": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig),
    "qwen3_next": (Qwen3NextForCausalLM, Qwen3NextConfig),
    "olmo_hybrid": (OlmoHybridForCausalLM, OlmoHybridConfig),
    "kimi_linear": (KimiLinearForCausalLM, KimiLinearConfig),
    "qwen4_exp": (Qwen4ExpForCausalLM, Qwen4ExpTextConfig),
}
for name, family in (("lara_mini", "LaraMini"), ("bailing_hybrid", "BailingHybrid")):
    if hasattr(transformers, f"{family}Config"):  # not in every supported release
        FAMILIES[name] = (getattr(transformers, f"{family}ForCausalLM"), getattr(transformers, f"{family}Config"))
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
PARTIAL = {**ROPE, "partial_rotary_factor": 0.25}
GATED = {"rope_parameters": PARTIAL, "attention_bias": True}
MROPE = {**GATED, "rope_parameters": {**PARTIAL, "mrope_section": [2, 1, 1], "mrope_interleaved": True}}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {"shared_expert_intermediate_size": 32}
GDN = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
LATENT = {"num_key_value_heads": 6, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
#: Where the defaults are beyond the vocabulary.
TOKENS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
GROUPS = {"n_group": 1, "topk_group": 1, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TYPES = (["linear_attention"] * 3 + ["full_attention"]) * 2
FAMILY_OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3_5": {**GDN, **MROPE},
    "qwen3_5_moe": {**GDN, **MROPE, **EXPERTS, **SHARED},
    "qwen3_next": {**GDN, **GATED, **EXPERTS, **SHARED},
    # Its attention is dense up to the budget of tokens; entries/test_sparse.py goes beyond it.
    "qwen4_exp": {
        **GDN, **MROPE, **EXPERTS, **SHARED, "hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 4,
        "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 64, "indexer_compress_ratio": 4,
    },
    "olmo_hybrid": {**GDN, **TOKENS, "rope_parameters": ROPE},
    "lara_mini": {
        **GDN, **EXPERTS, **SHARED, **TOKENS, "attention_bias": True, "rope_parameters": ROPE, "sliding_window": 9,
        "num_hidden_layers": 10,
        "layer_types": [*TYPES[:3], "sliding_attention", *TYPES[3:], "sliding_attention"],
    },
    "kimi_linear": {
        **LATENT, **GROUPS, **TOKENS, "linear_num_heads": 4, "linear_head_dim": 16, "layer_types": TYPES,
        "mlp_layer_types": ["dense"] + ["sparse"] * 7,
    },
    "bailing_hybrid": {
        **LATENT, **GROUPS, **TOKENS, "head_dim": 16, "layer_types": TYPES, "rope_parameters": ROPE,
        "q_lora_rank": 20, "rms_norm_eps": 1e-5,
        "mlp_layer_types": ["dense"] + ["sparse"] * 7,
    },
}  # fmt: skip


def tiny_model(family: str = "qwen3_5", **options: Any) -> Any:
    """A seeded random model in float32 with logits of order 1: layers G G G A G G G A, 6 query and 2 KV heads."""
    model_class, config_class = FAMILIES[family]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "vocab_size": VOCAB}
    attention = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}
    given = {**sizes, **attention, **FAMILY_OPTIONS[family], **options}
    if not hasattr(config_class, "head_dim"):
        given["hidden_size"] = 6 * given.pop("head_dim")
    return randomised(model_class, config_class(**given), family)


def randomised(model_class: Any, config: Any, family: str) -> Any:
    """A model with seeded weights whose logits are of order 1."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config).eval().requires_grad_(False)
    attention_layers = find_modules(model, HybridSpec.from_config(model.config)).attention
    loud = tuple(name + ".o_proj" for name, module in model.named_modules() if module in attention_layers)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("A_log"):
            parameter.copy_(0.3 * noise if family == "bailing_hybrid" else noise - 2.0)  # slow to fast decay
        elif parameter.ndim == 1:
            parameter.add_(0.3 * noise)
        elif "conv1d" in name:
            parameter.copy_(0.5 * noise)
        else:
            gain = O_PROJ_GAIN if name.startswith(loud) or "forget_gate" in name else GAIN
            parameter.copy_(gain * noise * parameter.shape[-1] ** -0.5)
    for shift, layer in zip((-1.5, 1.0), attention_layers, strict=False):
        if family.startswith("qwen"):
            layer.q_proj.bias.view(-1, 2, layer.head_dim)[:, 1] += shift  # type: ignore[union-attr, operator]
    return model


#: Tokens that stand for pictures, beyond the ids of `text_ids`.
IMAGE, VIDEO, VISION_START, VISION_END = 120, 121, 122, 123
MULTIMODAL = {
    "qwen3_5": (Qwen3_5ForConditionalGeneration, Qwen3_5Config),
    "qwen3_5_moe": (Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeConfig),
}


def tiny_multimodal(family: str = "qwen3_5") -> Any:
    """The text model of `tiny_model` with a random vision tower: patches of 4 x 4 pixels, four patches to a token."""
    model_class, config_class = MULTIMODAL[family]
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64, "num_position_embeddings": 64}
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    tokens |= {"vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END}
    text = tiny_model(family).config.to_dict()
    return randomised(model_class, config_class(text_config=text, vision_config=vision, **tokens), family)


def random_config(model: Any, **options: Any) -> EstimatorConfig:
    return EstimatorConfig.for_model(HybridSpec.from_config(model.config), "tiny", **{"hidden_size": 16, **options})


def random_tensors(config: EstimatorConfig, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in config.tensor_shapes().items()}
    return {name: t.abs() + 0.5 if name.endswith("input_std") else t for name, t in tensors.items()}


def random_estimator(model: Any, seed: int = 0, **options: Any) -> Estimator:
    config = random_config(model, **options)
    return Estimator(config, random_tensors(config, seed))


class KeyNorm:
    """A scorer that needs no signals."""

    needs = Needs()

    def check(self, spec: HybridSpec) -> None:
        pass

    def score(self, prefill: Prefill) -> list[Tensor]:
        return [keys.float().norm(dim=-1) for keys in prefill.keys]
