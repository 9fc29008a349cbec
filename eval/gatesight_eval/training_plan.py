"""What training an estimator takes at least, from a model's layout, the command and a machine's data sheet.

Only what `gatesight train` cannot avoid is counted: matrix products of prefill, and bytes of weights and cache that
sampling and utilities read. Real runs take several times as long: launches, Python and loading the model come on top.
"""

import argparse
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gatesight_hf.estimator import EstimatorConfig
from gatesight_hf.hybrid import HybridSpec, UnsupportedModelError

BF16, FLOAT32, INT64 = 2, 4, 8
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
        value_heads, key_head_dim, value_head_dim: Of GDN layers.
        mlp_width: Channels between the matrices of a feed-forward layer, all chosen experts together.
    """

    parameters: int
    layer_parameters: int
    head_parameters: int
    attention_layers: int
    gdn_layers: int
    attention_heads: int
    key_value_heads: int
    head_dim: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    mlp_width: int

    @property
    def cache_bytes_per_token(self) -> int:
        """Keys and values of all attention layers, bf16."""
        return 2 * self.attention_layers * self.key_value_heads * self.head_dim * BF16

    @property
    def signal_bytes_per_token(self) -> int:
        """Write gate, log-decay and write magnitude of all GDN layers, bf16."""
        return 3 * self.gdn_layers * self.value_heads * BF16

    @property
    def state_bytes(self) -> int:
        """GDN states of one sequence, float32."""
        return self.gdn_layers * self.value_heads * self.key_head_dim * self.value_head_dim * FLOAT32


def text_config(model_type: str, sizes: dict[str, Any]) -> Any:
    """The configuration of a text model of this family and these sizes."""
    return AutoConfig.for_model(model_type, **sizes)


def layout_of(config: Any) -> Layout:
    """Read a configuration; parameters are counted on a model without storage."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    head = sum(n for name, n in counts.items() if "lm_head" in name)
    experts = sum(n for name, n in counts.items() if ".experts." in name)
    tables = sum(n for name, n in counts.items() if any(table in name for table in TABLES))
    idle = 0 if not experts else experts - experts * config.num_experts_per_tok // config.num_experts
    if experts:
        width = config.num_experts_per_tok * config.moe_intermediate_size + config.shared_expert_intermediate_size
    else:
        width = config.intermediate_size
    attention = sum(kind != "linear_attention" for kind in config.layer_types)
    return Layout(
        parameters=sum(counts.values()),
        layer_parameters=sum(counts.values()) - head - tables - idle,
        head_parameters=head,
        attention_layers=attention,
        gdn_layers=len(config.layer_types) - attention,
        attention_heads=config.num_attention_heads,
        key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        value_heads=config.linear_num_value_heads,
        key_head_dim=config.linear_key_head_dim,
        value_head_dim=config.linear_value_head_dim,
        mlp_width=width,
    )


def estimator_sizes(layout: Layout, gdn_below: list[int], args: argparse.Namespace) -> dict[str, int]:
    """Inputs and parameters of the estimator; `gdn_below`: per attention layer the GDN layers below it."""
    inputs = [3 * layout.value_heads * min(args.window, below) + 3 for below in gdn_below]
    width, heads = args.hidden_size, layout.key_value_heads
    return {
        "mlps": heads * len(inputs),
        "least_inputs": min(inputs),
        "most_inputs": max(inputs),
        "parameters": sum(heads * (size * width + 2 * width + 1) for size in inputs),
        "squared_inputs": sum(size * size for size in inputs),
    }


def estimate(layout: Layout, sizes: dict[str, int], args: argparse.Namespace, machine: Machine) -> dict[str, Any]:
    """Lower bounds of time, memory and disk for `gatesight train` with these arguments."""
    documents, tokens = args.train_documents + args.eval_documents, args.length
    rows, steps = args.continuations, args.continuation_tokens
    prompts = args.prompt or [""]
    matrices = layout.layer_parameters + layout.head_parameters
    cache = tokens * layout.cache_bytes_per_token
    # Per document. Causal attention: scores and outputs, 2 multiply-adds each, over half the square.
    prefill = 2 * layout.layer_parameters * tokens
    prefill += 2 * tokens**2 * layout.attention_heads * layout.head_dim * layout.attention_layers
    # Without a prompt each continuation prefills the document for itself; with one they fork from it.
    anew = rows * sum(not prompt for prompt in prompts)
    read = len(prompts) * steps * (matrices * BF16 + rows * cache)
    utilities = len(prompts) * rows * (matrices * BF16 + cache)
    seconds = {
        "prefill": prefill / machine.bf16_flops,
        "sampling": anew * prefill / machine.bf16_flops + read / machine.bytes_per_second,
        "utilities": utilities / machine.bytes_per_second,
    }
    memory = layout.parameters * BF16 + (1 + rows) * (cache + layout.state_bytes)
    memory += tokens * layout.signal_bytes_per_token
    # Both halves of a gated feed-forward layer and their product.
    memory += 3 * max(1, rows * bool(anew)) * tokens * layout.mlp_width * BF16
    shard = tokens * (layout.signal_bytes_per_token + INT64)
    shard += tokens * layout.attention_layers * layout.key_value_heads * FLOAT32
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


def training_plan(
    name: str, model: dict[str, Any], args: argparse.Namespace, machine: Machine = H200
) -> dict[str, Any]:
    """All that a card says of an estimator that is still to be trained; no `config` if the family cannot be read yet.

    Args:
        name: Of the Hub repo.
        model: `base_model`, `model_type`, `sizes` (keywords of its configuration) and `source` of these.
        args: Arguments of `gatesight train`.
        machine: What the bounds of time are for.
    """
    config = text_config(model["model_type"], model["sizes"])
    layout = layout_of(config)
    kinds = list(config.layer_types)
    below = [kinds[:i].count("linear_attention") for i, kind in enumerate(kinds) if kind != "linear_attention"]
    sizes = estimator_sizes(layout, below, args)
    estimator = None
    with suppress(UnsupportedModelError):
        spec = HybridSpec.from_config(config)
        estimator = asdict(EstimatorConfig.for_model(spec, model["base_model"], args.window, args.hidden_size))
    return {
        "repo": name,
        **model,
        "layout": asdict(layout)
        | {
            "cache_kib_per_token": layout.cache_bytes_per_token / 1024,
            "group": layout.attention_heads // layout.key_value_heads,
        },
        "estimator": sizes,
        "config": estimator,
        "machine": asdict(machine),
        "bounds": estimate(layout, sizes, args, machine),
    }
