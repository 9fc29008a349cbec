"""Tiny random models, estimators, and the oracle: a full cache with an explicit -inf mask on evicted entries."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

# Before anything imports triton: without a GPU its kernels are interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from torch import Tensor, nn
from transformers import (
    DynamicCache,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from gatesight_hf import Estimator, EstimatorConfig, GateSightCache, Prefill
from gatesight_hf._compat import cache_argument, cache_of_call
from gatesight_hf.attention import VIEWED, AttentionView
from gatesight_hf.hybrid import HybridSpec, adapter_for, find_modules
from gatesight_hf.scoring import Needs

from .hub_server import hub  # noqa: F401 - fixture
from .kernel_fixtures import backend, device, poisoned  # noqa: F401 - fixtures

torch.set_num_threads(1)  # tiny tensors: threads only wait for each other

VOCAB = 128
#: Size of the matrices: larger ones amplify rounding beyond the tolerances. The attention layers' outputs are large, so
#: that a wrong mask or position changes logits by 1e-1 and tokens with them.
GAIN, O_PROJ_GAIN = 0.4, 2.0
FAMILIES = {
    "qwen3_5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig),
    "qwen3_5_moe": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig),
    "qwen3_next": (Qwen3NextForCausalLM, Qwen3NextConfig),
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILY_OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3_5": {},
    "qwen3_5_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_next": {**EXPERTS, "shared_expert_intermediate_size": 32},
}


def tiny_model(family: str = "qwen3_5", **options: Any) -> Any:
    """A seeded random model in float32 with logits of order 1: layers G G G A G G G A, 6 query and 2 KV heads."""
    model_class, config_class = FAMILIES[family]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    if family != "qwen3_next":
        rope |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "vocab_size": VOCAB}
    attention = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "rope_parameters": rope}
    linear = {f"linear_num_{kind}_heads": n for kind, n in (("key", 2), ("value", 4))}
    linear |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    attention["attention_bias"] = True
    config = config_class(**{**sizes, **attention, **linear, **FAMILY_OPTIONS[family], **options})
    model = model_class(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("A_log"):
            parameter.copy_(noise - 2.0)  # slow to fast decay
        elif parameter.ndim == 1:
            parameter.add_(0.3 * noise)
        elif "conv1d" in name:
            parameter.copy_(0.5 * noise)
        else:
            gain = O_PROJ_GAIN if "o_proj" in name else GAIN
            parameter.copy_(gain * noise * parameter.shape[-1] ** -0.5)
    attention_modules = (module for module in model.modules() if hasattr(module, "q_proj"))
    for shift, layer in zip((-1.5, 1.0), attention_modules, strict=False):
        layer.q_proj.bias.view(-1, 2, layer.head_dim)[:, 1] += shift  # unlike output gates
    return model


@pytest.fixture(scope="session", params=FAMILIES)
def any_model(request: pytest.FixtureRequest) -> Any:
    """A model of each family in turn."""
    return tiny_model(request.param)


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


def steps(model: Any, ids: Tensor, cache: Any, tokens: int = 4, **arguments: Any) -> tuple[Tensor, Tensor]:
    """New tokens `[B, tokens]`, greedy unless told otherwise, and the logits they came from `[B, tokens, vocab]`."""
    options = {"max_new_tokens": tokens, "do_sample": False, **arguments}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    output = model.generate(ids, **cache_kwargs(model, cache), **options)
    return output.sequences[:, -tokens:], torch.stack(output.logits, dim=1)


def generate(model: Any, ids: Tensor, cache: Any, tokens: int = 4, **arguments: Any) -> Tensor:
    """New tokens only `[B, tokens]`."""
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
            calls[ordinal] = (kwargs, {})

    def keep(ordinal: int, name: str, module: Any, args: Any, output: Tensor) -> None:
        if ordinal in calls:
            calls[ordinal][1][name] = output.detach()

    def after(ordinal: int, module: Any, args: Any, output: Any) -> None:
        if ordinal in calls:
            views[ordinal].append(AttentionView.of(adapter, module, *calls.pop(ordinal)))

    handles = []
    for j, layer in enumerate(modules.attention):
        handles.append(layer.register_forward_pre_hook(partial(before, j), with_kwargs=True))
        handles += [getattr(layer, name).register_forward_hook(partial(keep, j, name)) for name in VIEWED]
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
        modules = [layer.self_attn for layer in self.model.model.layers if hasattr(layer, "self_attn")]
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
            held = kwargs.get("cache", kwargs.get("past_key_values")).layers[module.layer_idx]  # type: ignore[union-attr]
            past = held.get_seq_length()
            queries = past + torch.arange(kwargs["hidden_states"].shape[1])
            keys = torch.arange(int(queries[-1]) + 1)
            hidden = (keys > queries[:, None])[None].repeat(len(evicted), 1, 1)
            hidden[:, queries >= context, :context] |= evicted[:, None]
            groups = module.num_key_value_groups
            mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf).repeat_interleave(groups, dim=0)
            return args, {**kwargs, "attention_mask": mask[None]}

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
