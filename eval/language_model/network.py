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


def size_options(hidden_size: int, layers: int) -> dict[str, int]:
    """Options of `build` for a smaller model of the same make, on which recipes can be tried faster."""
    return {"hidden_size": hidden_size, "intermediate_size": hidden_size * 3 // 2, "num_hidden_layers": layers}


def gdn_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "A_log")]


def slow_heads(value_heads: int) -> list[int]:
    """The second half of the value heads: they have key heads of their own."""
    return list(range(value_heads // 2, value_heads))


def half_lives(layer: Any) -> Tensor:
    """Of each value head, in tokens, from the parameters alone (the input of the decay gate taken as zero)."""
    rate = layer.A_log.detach().exp() * nn.functional.softplus(layer.dt_bias.detach())
    return math.log(2) / rate


def initialise(model: Qwen3_5ForCausalLM, seed: int, with_slow: bool = True) -> None:
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
        slow = slow_heads(model.config.linear_num_value_heads) if with_slow else []
        spread = _logarithmic(*SLOW_HALF_LIVES, max(1, len(gdn) * len(slow)))
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
            if slow:
                layer.out_proj.weight[:, slow[0] * model.config.linear_value_head_dim :] = 0.0


def _logarithmic(low: float, high: float, count: int) -> Tensor:
    return torch.logspace(math.log10(low), math.log10(high), count) if count > 1 else torch.tensor([low])


#: Parts of a GDN layer's rows that belong to heads, as `(name, kinds of heads in their order)`.
_ROWS = (
    ("in_proj_qkv.weight", ("key", "key", "value")),
    ("conv1d.weight", ("key", "key", "value")),
    ("in_proj_z.weight", ("value",)),
    ("in_proj_b.weight", ("one",)),
    ("in_proj_a.weight", ("one",)),
    ("A_log", ("one",)),
    ("dt_bias", ("one",)),
)


def build(vocab_size: int, phase: int, seed: int, **options: Any) -> Qwen3_5ForCausalLM:
    """The model of a phase, initialised. That of phase 1 lacks the slow heads, half of all, and is faster to train."""
    if phase == 1:
        config = build_config(vocab_size, **options)
        options |= {
            "linear_num_key_heads": config.linear_num_key_heads // 2,
            "linear_num_value_heads": config.linear_num_value_heads // 2,
        }
    model = Qwen3_5ForCausalLM(build_config(vocab_size, **options))
    initialise(model, seed, with_slow=phase > 1)
    return model


@torch.no_grad()
def let_in_slow_heads(narrow: Qwen3_5ForCausalLM, wide: Qwen3_5ForCausalLM) -> None:
    """Copies a model of phase 1 into one of phase 2; it computes the same, since its slow heads' outputs are zero."""
    mine = dict(narrow.named_parameters())
    for name, parameter in wide.named_parameters():
        if parameter.shape == mine[name].shape:
            parameter.copy_(mine[name])
    sizes = {"key": narrow.config.linear_key_head_dim, "value": narrow.config.linear_value_head_dim, "one": 1}
    few = {"key": narrow.config.linear_num_key_heads, "value": narrow.config.linear_num_value_heads}
    many = {"key": wide.config.linear_num_key_heads, "value": wide.config.linear_num_value_heads}
    few["one"], many["one"] = few["value"], many["value"]
    for small, large in zip(gdn_layers(narrow), gdn_layers(wide), strict=True):
        of_small, of_large = dict(small.named_parameters()), dict(large.named_parameters())
        for name, kinds in _ROWS:
            source = target = 0
            for kind in kinds:
                size = sizes[kind] * few[kind]
                of_large[name][target : target + size] = of_small[name][source : source + size]
                source += size
                target += sizes[kind] * many[kind]
        large.out_proj.weight.zero_()
        large.out_proj.weight[:, : small.out_proj.weight.shape[1]] = small.out_proj.weight


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
