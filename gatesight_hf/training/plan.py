"""What training an estimator takes at least, from a model's layout, the command and a machine's data sheet.

Only what `gatesight train` cannot avoid is counted: matrix products of prefill, and bytes of weights and cache that
sampling and utilities read. Real runs take several times as long: launches, Python and loading the model come on top.
"""

import argparse
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ..entries.attention import LatentAttentionLayer
from ..models.families import adapter_for
from ..models.hybrid import HybridSpec
from ..scoring.estimator import EstimatorConfig

FLOAT32, INT64 = 4, 8
#: Tables of embeddings: looked up, not multiplied.
TABLES = ("embed_tokens", "ngram_embedding")


@dataclass(frozen=True)
class Machine:
    """One accelerator by its data sheet, without sparsity."""

    name: str
    memory_bytes: float
    bytes_per_second: float
    bf16_flops: float


H200 = Machine("NVIDIA H200 SXM", 141e9, 4.8e12, 989e12)


@dataclass(frozen=True)
class Layout:
    """What of a model's configuration the estimate reads.

    Attributes:
        parameters: All of the text model.
        layer_parameters: That one token is multiplied with in the layers, of the experts those that are chosen.
        head_parameters: Of the language-model head.
        attention_layers, gdn_layers: L and M.
        attention_heads, key_value_heads, head_dim: Of attention layers.
        entry_channels: Cached of one token by one KV head: a key and a value, in MLA a key alone.
        attention_channels: Of the queries and values of all heads of an attention layer.
        value_heads, key_head_dim, value_head_dim: Of GDN layers.
        hidden_size: Channels between layers.
        mlp_width: Channels between the matrices of a feed-forward layer, all chosen experts together.
        value_bytes: Of one number of the model.
    """

    parameters: int
    layer_parameters: int
    head_parameters: int
    attention_layers: int
    gdn_layers: int
    attention_heads: int
    key_value_heads: int
    head_dim: int
    entry_channels: int
    attention_channels: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    hidden_size: int
    mlp_width: int
    value_bytes: int

    @property
    def cache_bytes_per_token(self) -> int:
        """Entries of all attention layers."""
        return self.attention_layers * self.key_value_heads * self.entry_channels * self.value_bytes

    @property
    def signal_bytes_per_token(self) -> int:
        """Write gate, log-decay and write magnitude of all GDN layers."""
        return 3 * self.gdn_layers * self.value_heads * self.value_bytes

    @property
    def state_bytes(self) -> int:
        """GDN states of one sequence, float32."""
        return self.gdn_layers * self.value_heads * self.key_head_dim * self.value_head_dim * FLOAT32


def text_model_without_storage(config: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The text model of a configuration on the device `meta`: shapes, and no memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config.get_text_config(decoder=True), dtype=dtype).eval()


def layout_of(model: Any) -> Layout:
    """Read a text model, with or without storage.

    Raises:
        UnsupportedModelError: It is no hybrid of a known family.
    """
    config, spec = model.config, HybridSpec.of(model)
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    head = model.get_output_embeddings().weight.numel()
    tables = sum(n for name, n in counts.items() if any(table in name for table in TABLES))
    own_head = sum(n for name, n in counts.items() if "lm_head" in name)
    experts = sum(n for name, n in counts.items() if ".experts." in name)
    if not experts:
        idle, width = 0, config.intermediate_size
    else:
        chosen, all_experts = config.num_experts_per_tok, getattr(config, "num_experts", None)
        idle = experts - experts * chosen // (all_experts or config.num_local_experts)
        width = chosen * config.moe_intermediate_size + getattr(config, "shared_expert_intermediate_size", 0)
    entry, channels = 2 * spec.head_dim, 2 * spec.head_dim
    if issubclass(adapter_for(spec).cache_layer, LatentAttentionLayer):
        entry = spec.head_dim
        channels = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    return Layout(
        parameters=sum(counts.values()),
        layer_parameters=sum(counts.values()) - own_head - tables - idle,
        head_parameters=head,
        attention_layers=spec.num_attention_layers,
        gdn_layers=len(spec.gdn_layers),
        attention_heads=spec.num_attention_heads,
        key_value_heads=spec.num_key_value_heads,
        head_dim=spec.head_dim,
        entry_channels=entry,
        attention_channels=spec.num_attention_heads * channels,
        value_heads=spec.num_value_heads,
        key_head_dim=spec.key_head_dim,
        value_head_dim=spec.value_head_dim,
        hidden_size=config.hidden_size,
        mlp_width=width,
        value_bytes=model.dtype.itemsize,
    )


def estimator_sizes(config: EstimatorConfig) -> dict[str, int]:
    """Inputs and parameters of the estimator."""
    inputs = [config.input_size(j) for j in range(config.num_layers)]
    return {
        "mlps": config.num_key_value_heads * len(inputs),
        "least_inputs": min(inputs),
        "most_inputs": max(inputs),
        "parameters": config.num_parameters,
        "squared_inputs": sum(size * size for size in inputs),
    }


def estimator_words(sizes: dict[str, int]) -> str:
    """What `estimator_sizes` says of its MLPs, in words."""
    return f"{sizes['mlps']} MLPs of {sizes['least_inputs']} to {sizes['most_inputs']} inputs"


def prompts_of(args: argparse.Namespace) -> list[str]:
    """Texts that continuations begin with; one that is empty stands for none."""
    return args.prompt or (["question :"] if args.model == "reference" else [""])


def estimate(layout: Layout, sizes: dict[str, int], args: argparse.Namespace, machine: Machine) -> dict[str, Any]:
    """Lower bounds of time, memory and disk for `gatesight train` with these arguments."""
    documents, tokens = args.train_documents + args.eval_documents, args.length
    prompts, continuations = prompts_of(args), args.continuations
    rows = min(args.rows or continuations, continuations)
    weights = (layout.layer_parameters + layout.head_parameters) * layout.value_bytes
    cache = tokens * layout.cache_bytes_per_token
    # Per document. Causal attention: one multiply-add with each channel, over half the square.
    prefill = 2 * layout.layer_parameters * tokens + tokens**2 * layout.attention_channels * layout.attention_layers
    # Without a prompt the first token comes from the prefill.
    steps = sum(args.continuation_tokens - (not prompt) for prompt in prompts)
    read = steps * (ceil(continuations / rows) * weights + continuations * cache)
    utilities = len(prompts) * continuations * (weights + cache)
    seconds = {
        "prefill": prefill / machine.bf16_flops,
        "sampling": read / machine.bytes_per_second,
        "utilities": utilities / machine.bytes_per_second,
    }
    # Prefill holds signals, and both halves of a gated feed-forward layer and their product. Sampling holds the GDN
    # states of each row, and for the layer that is running its entries; all others are shared.
    prefilling = tokens * (layout.signal_bytes_per_token + 3 * layout.mlp_width * layout.value_bytes)
    sampling = rows * (layout.state_bytes + cache // layout.attention_layers)
    memory = layout.parameters * layout.value_bytes + cache + layout.state_bytes + max(prefilling, sampling)
    shard = tokens * (layout.signal_bytes_per_token + INT64)
    shard += tokens * layout.attention_layers * layout.key_value_heads * FLOAT32
    if args.hidden_states:
        shard += tokens * layout.attention_layers * layout.hidden_size * layout.value_bytes
    # Forward and backward of the MLPs, and the products of inputs that standardise and give the ridge baseline.
    fit = 6 * sizes["parameters"] * args.epochs * args.train_documents * min(tokens, 8192)
    moments = 2 * sizes["squared_inputs"] * args.train_documents * tokens
    return {
        "documents": documents,
        "minutes": {name: _short(documents * value / 60) for name, value in seconds.items()},
        "minutes_in_all": _short(documents * sum(seconds.values()) / 60),
        "accelerator_gb": _short(memory / 1e9),
        "accelerators": ceil(memory / machine.memory_bytes),
        "disk_gb": _short(documents * shard / 1e9),
        "fit_pflop": _short((fit + moments) / 1e15),
        "fit_reads_gb": _short(args.epochs * args.train_documents * shard / 1e9),
        "host_gb": _short((2 * shard + 8 * sizes["squared_inputs"]) / 1e9),
    }


def _short(value: float) -> float:
    """Three significant digits: a bound has no more."""
    return float(f"{value:.3g}")


def training_plan(model: Any, name: str, args: argparse.Namespace, machine: Machine = H200) -> dict[str, Any]:
    """An estimator that is still to be trained: layout, sizes, configuration, and what its training takes at least.

    Args:
        model: The text model, with or without storage.
        name: Of the model, for the estimator's configuration.
        args: Arguments of `gatesight train`.
        machine: What the bounds of time are for.

    Raises:
        UnsupportedModelError: The model is no hybrid of a known family.
    """
    layout = layout_of(model)
    config = EstimatorConfig.for_model(HybridSpec.of(model), name, args.window, args.hidden_size)
    sizes = estimator_sizes(config)
    return {
        "layout": asdict(layout)
        | {
            "cache_kib_per_token": layout.cache_bytes_per_token / 1024,
            "group": layout.attention_heads // layout.key_value_heads,
        },
        "estimator": sizes,
        "config": asdict(config),
        "machine": asdict(machine),
        "bounds": estimate(layout, sizes, args, machine),
    }
