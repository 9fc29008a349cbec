"""Tiny random models, estimators, and the oracle: a full cache with an explicit -inf mask on evicted entries."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import transformers

# Before anything imports triton: without a GPU its kernels are interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from torch import Tensor, nn
from transformers import (
    DynamicCache,
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

from gatesight_hf import Estimator, EstimatorConfig, FrozenCache, GateSightCache, Prefill
from gatesight_hf.entries.view import AttentionView, named_arguments
from gatesight_hf.models import HybridSpec, adapter_for, find_modules
from gatesight_hf.models._compat import cache_argument, cache_of_call
from gatesight_hf.scoring import Needs

from .hub_server import hub  # noqa: F401 - fixture
from .kernel_fixtures import backend, device, poisoned  # noqa: F401 - fixtures

torch.set_num_threads(1)  # tiny tensors: threads only wait for each other

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
    # Its attention is dense up to the budget of tokens; test_sparse.py goes beyond it.
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


@pytest.fixture(scope="session", params=FAMILIES)
def any_model(request: pytest.FixtureRequest) -> Any:
    """A model of each family in turn."""
    return tiny_model(request.param)


@pytest.fixture(scope="session")
def any_plain(any_model: Any) -> Any:
    """Its twin without hooks, in eager attention."""
    model = tiny_model(next(name for name, family in FAMILIES.items() if isinstance(any_model, family[0])))
    model.set_attn_implementation("eager")
    return model


@pytest.fixture(scope="session")
def dense() -> Any:
    """Qwen3.5, for tests that need only one family."""
    return tiny_model()


@pytest.fixture(scope="session")
def plain() -> Any:
    """The same model without hooks, in eager attention: what oracles run on."""
    model = tiny_model()
    model.set_attn_implementation("eager")
    return model


@pytest.fixture(params=["sdpa", "eager"])
def attention(request: pytest.FixtureRequest, dense: Any) -> Iterator[str]:
    """Both attention implementations of `dense` in turn."""
    dense.set_attn_implementation(request.param)
    yield request.param
    dense.set_attn_implementation("sdpa")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def random_ids(length: int, rows: int = 1, seed: int = 0) -> Tensor:
    """Token ids of 2 … VOCAB-1; 0 is left for padding, 1 for end of sequence."""
    return torch.randint(2, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def left_padded(ids: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows `[1, n]` of different lengths as one batch and its mask."""
    longest = max(row.shape[1] for row in ids)
    batch = torch.cat([torch.nn.functional.pad(row, (longest - row.shape[1], 0)) for row in ids])
    mask = torch.stack([torch.arange(longest) >= longest - row.shape[1] for row in ids]).long()
    return batch, mask


def padded(mask: Tensor, new: int) -> dict[str, Tensor]:
    """Arguments for the last `new` tokens of padded rows: the whole mask, and positions that do not count pads."""
    return {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)[:, -new:]}


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


def cache_kwargs(model: Any, cache: Any) -> dict[str, Any]:
    """The cache under the name that this transformers release gives it, in forward and in generate."""
    return {cache_argument(model): cache}


def forward(model: Any, ids: Tensor, cache: Any, **arguments: Any) -> Tensor:
    """Logits `[B, T, vocab]`."""
    return model(input_ids=ids, **cache_kwargs(model, cache), **arguments).logits


def as_new(ids: Tensor, cache: GateSightCache) -> dict[str, Tensor]:
    """Arguments of a `generate` that say that `ids` are new text."""
    if isinstance(cache, FrozenCache):
        cache.context.catch_up()
    rows = cache.context.tokens.mask(len(ids), ids)
    return {"attention_mask": torch.cat([rows, torch.ones_like(ids)], 1)}


def steps(
    model: Any, ids: Tensor, cache: Any, tokens: int = 4, new: bool = False, **arguments: Any
) -> tuple[Tensor, Tensor]:
    """New tokens `[B, tokens]`, greedy unless told otherwise, and the logits they came from `[B, tokens, vocab]`.

    Ids are all ids from the context's start, or, if `new`, text after everything seen.
    """
    arguments |= as_new(ids, cache) if new else {}
    options = {"max_new_tokens": tokens, "do_sample": False, **arguments}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    output = model.generate(ids, **cache_kwargs(model, cache), **options)
    return output.sequences[:, -tokens:], torch.stack(output.logits, dim=1)


def generate(model: Any, ids: Tensor, cache: Any, tokens: int = 4, new: bool = False, **arguments: Any) -> Tensor:
    """New tokens only `[B, tokens]`; see `steps`."""
    arguments |= as_new(ids, cache) if new else {}
    options = {"max_new_tokens": tokens, "do_sample": False, **arguments}
    return model.generate(ids, **cache_kwargs(model, cache), **options)[:, -tokens:]


def prefilled(
    model: Any, ids: Tensor, chunks: list[int] | None = None, mask: Tensor | None = None, **options: Any
) -> Any:
    """A GateSight cache that has seen a context but is not compacted."""
    cache = GateSightCache(options.pop("scorer", None) or random_estimator(model), model, **options)
    seen = 0
    for length in chunks or [ids.shape[1]]:
        given = {} if mask is None else padded(mask[:, : seen + length], length)
        forward(model, ids[:, seen : seen + length], cache, **given)
        seen += length
    assert seen == ids.shape[1]
    return cache


def compacted(
    model: Any, ids: Tensor, chunks: list[int] | None = None, mask: Tensor | None = None, **options: Any
) -> Any:
    """A GateSight cache after prefill and compaction."""
    cache = prefilled(model, ids, chunks, mask, **options)
    cache.compact()
    return cache


def assert_same(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Logits within the tolerance that the proof demands in float32."""
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def evicted_of(cache: GateSightCache, row: int, length: int) -> list[Tensor]:
    """Per attention layer `[H, length]`: which tokens of a row are gone. Only real tokens may have been kept."""
    gone = []
    for layer in cache.attention_layers:
        assert layer.kept_positions is not None
        slots = int(layer.get_seq_length() - layer.tail_length)
        kept = layer.kept_positions[row].long()
        valid = torch.ones_like(kept, dtype=torch.bool)
        if layer.kept_valid is not None:
            valid &= layer.kept_valid[row]
        evicted = torch.ones(len(kept), length, dtype=torch.bool)
        for head in range(len(kept)):
            tokens = kept[head, valid[head]] - (slots - length)
            assert (tokens >= 0).all(), "padding was kept"
            assert (tokens.diff() > 0).all(), "entries twice or out of order"
            evicted[head, tokens] = False
        gone.append(evicted)
    return gone


@contextmanager
def capture_attention(model: Any, spec: HybridSpec, cache: Any) -> Iterator[list[list[AttentionView]]]:
    """Collect a view of every attention layer in forwards with `cache`, of any kind, by hooks of its own.

    Yields:
        Per attention ordinal, a list of views, one per forward.
    """
    modules, adapter = find_modules(model, spec), adapter_for(model.config)
    views: list[list[AttentionView]] = [[] for _ in modules.attention]
    calls: dict[int, tuple[dict[str, Any], dict[str, Tensor]]] = {}

    def before(ordinal: int, module: Any, args: Any, kwargs: Any) -> None:
        calls.pop(ordinal, None)
        if cache_of_call(kwargs) is cache:
            calls[ordinal] = (named_arguments(args, kwargs), {})

    def keep(ordinal: int, name: str, module: Any, args: Any, output: Tensor) -> None:
        if ordinal in calls:
            calls[ordinal][1][name] = output.detach()

    def after(ordinal: int, module: Any, args: Any, output: Any) -> None:
        if ordinal in calls:
            views[ordinal].append(adapter.view(module, *calls.pop(ordinal)))

    handles = []
    for j, layer in enumerate(modules.attention):
        handles.append(layer.register_forward_pre_hook(partial(before, j), with_kwargs=True))
        handles += [
            getattr(layer, name).register_forward_hook(partial(keep, j, name)) for name in adapter.viewed(layer)
        ]
        handles.append(layer.register_forward_hook(partial(after, j)))
    try:
        yield views
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class Oracle:
    """Hides evicted entries from every query after the context, for one unpadded row and everything sampled from it.

    A plain `DynamicCache` holds all entries; hooks on the attention modules build the whole additive mask anew.
    """

    model: Any
    evicted: list[Tensor]
    handles: list[Any] = field(default_factory=list)

    def __enter__(self) -> "Oracle":
        modules = find_modules(self.model, HybridSpec.from_config(self.model.config)).attention
        for module, evicted in zip(modules, self.evicted, strict=True):
            hook = self._hook(evicted)
            self.handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    @staticmethod
    def _hook(evicted: Tensor) -> Any:
        context = evicted.shape[1]

        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            kwargs = named_arguments(args, kwargs)
            held = kwargs.get("cache", kwargs.get("past_key_values")).layers[module.layer_idx]  # type: ignore[union-attr]
            past = held.get_seq_length()
            queries = past + torch.arange(kwargs["hidden_states"].shape[1])
            keys = torch.arange(int(queries[-1]) + 1)
            hidden = (keys > queries[:, None])[None].repeat(len(evicted), 1, 1)
            hidden[:, queries >= context, :context] |= evicted[:, None]
            groups = module.num_key_value_groups
            mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf).repeat_interleave(groups, dim=0)
            # An indexer of the model reads a mask of every row.
            return (), {**kwargs, "attention_mask": mask.expand(len(kwargs["hidden_states"]), -1, -1, -1)}

        return hook

    def logits(self, context: Tensor, question: Tensor) -> Tensor:
        """Logits of the question's tokens."""
        cache = DynamicCache(config=self.model.config)
        forward(self.model, context, cache)
        return forward(self.model, question, cache)

    def steps(self, ids: Tensor, tokens: int = 4, **arguments: Any) -> tuple[Tensor, Tensor]:
        return steps(self.model, ids, DynamicCache(config=self.model.config), tokens, **arguments)

    def generate(self, ids: Tensor, tokens: int = 4, **arguments: Any) -> Tensor:
        return generate(self.model, ids, DynamicCache(config=self.model.config), tokens, **arguments)
