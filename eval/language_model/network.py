"""The language model's configuration, its initialisation, and the slow heads that are let in late."""

import importlib.util
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

#: Half-lives in tokens at the start. Fast heads see a few tokens back; slow ones are spread evenly in the logarithm.
FAST_HALF_LIVES = (1.2, 4.0)
SLOW_HALF_LIVES = (24.0, 4000.0)


def build_config(vocab_size: int, **options: Any) -> Qwen3_5TextConfig:
    """10.5 M parameters: 16 layers GGGA, width 256, 4 query and 2 KV heads of 64, GDN heads of 64."""
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 16,
        "full_attention_interval": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
        "pad_token_id": 0,
        "eos_token_id": 2,
        "bos_token_id": None,
    }
    return Qwen3_5TextConfig(**{**settings, **options})


def gdn_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "A_log")]


def slow_heads(value_heads: int) -> list[int]:
    """The second half of the value heads: they have key heads of their own."""
    return list(range(value_heads // 2, value_heads))


def half_lives(layer: Any) -> Tensor:
    """Of each value head, in tokens, from the parameters alone (the input of the decay gate taken as zero)."""
    rate = layer.A_log.detach().exp() * nn.functional.softplus(layer.dt_bias.detach())
    return math.log(2) / rate


def initialise(model: Qwen3_5ForCausalLM, seed: int) -> None:
    """Embeddings N(0, 1/sqrt(d)), linears N(0, 0.8/sqrt(fan-in)); half-lives as above, slow heads' outputs zero."""
    generator = torch.Generator().manual_seed(seed)
    layers = model.config.num_hidden_layers
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                parameter.normal_(0, model.config.hidden_size**-0.5, generator=generator)
            elif parameter.ndim == 2:
                std = 0.8 * parameter.shape[1] ** -0.5
                if any(part in name for part in ("out_proj", "o_proj", "down_proj")):
                    std /= math.sqrt(2 * layers)
                parameter.normal_(0, std, generator=generator)
        gdn = gdn_layers(model)
        slow = slow_heads(model.config.linear_num_value_heads)
        spread = _logarithmic(*SLOW_HALF_LIVES, len(gdn) * len(slow))
        # Neighbouring layers get far-apart half-lives, so that every part of the depth has short and long ones.
        order = torch.randperm(len(spread), generator=generator)
        for i, layer in enumerate(gdn):
            fast = _logarithmic(*FAST_HALF_LIVES, layer.A_log.numel() - len(slow))
            layer.dt_bias.fill_(1.0)
            layer.A_log[: len(fast)] = (math.log(2) / (fast * math.log1p(math.e))).log()
            for j, head in enumerate(slow):
                # softplus(dt_bias) alone sets the rate: the gate then changes it by factors, and can reset the state.
                layer.A_log[head] = 0.0
                layer.dt_bias[head] = torch.expm1(math.log(2) / spread[order[i * len(slow) + j]]).log()
            layer.out_proj.weight.mul_(fast_columns(layer))


def _logarithmic(low: float, high: float, count: int) -> Tensor:
    return torch.logspace(math.log10(low), math.log10(high), count) if count > 1 else torch.tensor([low])


def fast_columns(layer: Any) -> Tensor:
    """1 for columns of `out_proj` that read fast heads, 0 for those of slow ones, `[1, value heads * head dim]`."""
    mask = torch.ones(layer.A_log.numel(), device=layer.A_log.device)
    mask[slow_heads(layer.A_log.numel())] = 0.0
    return mask.repeat_interleave(layer.out_proj.weight.shape[1] // mask.numel())[None]


def hold_slow_heads(model: nn.Module) -> list[Any]:
    """Masks gradients so that slow heads' outputs stay zero; returns the handles whose removal lets them in."""
    return [
        layer.out_proj.weight.register_hook(lambda gradient, mask=fast_columns(layer): gradient * mask)
        for layer in gdn_layers(model)
    ]


def parameter_groups(model: nn.Module, learning_rate: float, decay_factor: float) -> list[dict[str, Any]]:
    """Matrices with weight decay; the rest without; the GDN decays with a learning rate of their own."""

    def is_decay(name: str) -> bool:
        return name.endswith(("A_log", "dt_bias"))

    named = list(model.named_parameters())

    def those(wanted: Any) -> Iterator[Tensor]:
        return (parameter for name, parameter in named if wanted(name, parameter))

    return [
        {"params": list(those(lambda n, p: p.ndim == 2 and not is_decay(n))), "weight_decay": 0.02, "factor": 1.0},
        {"params": list(those(lambda n, p: p.ndim != 2 and not is_decay(n))), "weight_decay": 0.0, "factor": 1.0},
        {"params": list(those(lambda n, p: is_decay(n))), "weight_decay": 0.0, "factor": decay_factor},
    ]


def fast_delta_rule() -> AbstractContextManager[None]:
    """The reference model's chunked delta rule, in place of transformers' while the context lasts."""
    path = Path(__file__).parents[1] / "reference_model" / "fast_delta.py"
    spec = importlib.util.spec_from_file_location("fast_delta", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.fast_delta_rule()
