"""Where weights and entries live: two devices, offloaded weights, quantised linears, adapters."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from torch import Tensor, nn
from transformers import DynamicCache

from gatesight_hf import GateSightCache
from gatesight_hf.compaction import ALLOCATIONS
from gatesight_hf.methods import (
    ExpectedAttention,
    KeyDiff,
    KVzip,
    LagKV,
    OracleScorer,
    RandomScorer,
    SnapKV,
    StreamingLLM,
    TriAttention,
)
from gatesight_hf.models import attach

from ..helpers.models import FAMILIES, random_estimator, tiny_model
from ..helpers.oracle import Oracle, assert_same, evicted_of
from ..helpers.running import (
    CONTEXT,
    FULL,
    LENGTH,
    QUESTION,
    compacted,
    forward,
    generate,
    left_padded,
    padded,
    prefilled,
    random_ids,
    steps,
)
from ..helpers.second_device import ELSEWHERE, HERE, SecondDevice, spread

pytestmark = pytest.mark.core

MAKERS: dict[str, Callable[[Any], Any]] = {
    "gatesight": random_estimator,
    "snapkv": lambda model: SnapKV(window=6),
    "keydiff": lambda model: KeyDiff(),
    "lagkv": lambda model: LagKV(lag=4, sinks=2),
    "expected attention": lambda model: ExpectedAttention(future=8),
    "triattention": lambda model: TriAttention.calibrate(model, random_ids(30, seed=2)),
    "streaming llm": lambda model: StreamingLLM(),
    "random": lambda model: RandomScorer(),
    "kvzip": lambda model: KVzip(model, characters, prompts=("Repeat.", "Go on at")),
    "oracle": lambda model: OracleScorer(model, ((3, 4, 5),)),
}


def characters(text: str, add_special_tokens: bool = True) -> Any:
    return SimpleNamespace(input_ids=[2 + ord(character) % 100 for character in text])


def answer(model: Any, cache: GateSightCache, pieces: tuple[int, ...] = (4, 1, 1)) -> Tensor:
    """Logits of a question's tokens, several or one at a time."""
    child = cache.fork()
    return torch.cat([forward(model, new, child) for new in QUESTION[:, : sum(pieces)].split(pieces, dim=1)], dim=1)


# -- two devices -------------------------------------------------------------------------------------------------------


def test_the_second_device_can_tell() -> None:
    with SecondDevice():
        here, there = torch.ones(2, 2), torch.ones(2, 2, device=ELSEWHERE)
        assert (there * 2).device == ELSEWHERE and there.to(HERE).device == HERE
        with pytest.raises(RuntimeError, match="two devices"):
            here + there


@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("rows", [1, 2])
def test_every_layer_stays_on_its_own_device(dense: Any, first: int, rows: int) -> None:
    """A run of GDN layers, whose signals are joined, is cut by the border at layer 5; ids and masks stay here."""
    ids, mask = left_padded([CONTEXT, random_ids(17)][:rows])
    whole = torch.nn.functional.pad(mask, (0, 6), value=1)
    expected = compacted(dense, ids, [20, 23], mask, kept_fraction=0.3)
    given = padded(whole, 6)
    logits = forward(dense, QUESTION.expand(rows, -1), expected.fork(), **given)
    tokens = generate(dense, QUESTION.expand(rows, -1), expected.fork(), new=True, num_beams=2)
    model = spread(tiny_model(), first)
    with SecondDevice():
        cache = compacted(model, ids, [20, 23], mask, kept_fraction=0.3)
        child = cache.fork()
        assert_same(forward(model, QUESTION.expand(rows, -1), child, **given), logits)
        for i, layer in enumerate(child.layers):
            named = layer.state().values() if i in child.spec.attention_layers else ()
            states = [getattr(layer, name, {}).values() for name in ("conv_states", "recurrent_states")]
            held = [*named, *(state for of_kind in states for state in of_kind)]
            assert held and {t.device for t in held} == {ELSEWHERE if i >= first else HERE}
        assert cache.report().kept_per_layer == expected.report().kept_per_layer
        assert torch.equal(generate(model, QUESTION.expand(rows, -1), cache, new=True, num_beams=2), tokens)


#: Single steps: a forward of several tokens dispatches a thousand operations.
STEPS = (1, 1)


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_layers_on_two_devices_compete_for_one_budget(dense: Any, allocation: str) -> None:
    expected = compacted(dense, CONTEXT, kept_fraction=0.3, allocation=allocation)
    logits, model = answer(dense, expected, STEPS), spread(tiny_model(), 5)
    with SecondDevice():
        cache = compacted(model, CONTEXT, kept_fraction=0.3, allocation=allocation)
        assert cache.report().kept_per_layer == expected.report().kept_per_layer
        assert_same(answer(model, cache, STEPS), logits)


@pytest.mark.parametrize("method", MAKERS)
def test_every_method_scores_each_layer_on_its_device(dense: Any, method: str) -> None:
    expected = compacted(dense, CONTEXT, kept_fraction=0.3, scorer=MAKERS[method](dense))
    logits, model = answer(dense, expected, STEPS), spread(tiny_model(), 5)
    with SecondDevice():
        cache = prefilled(model, CONTEXT, kept_fraction=0.3, scorer=MAKERS[method](model))
        scores = cache.score()
        for of_layer, layer in zip(scores.score(cache.prefill()), cache.attention_layers, strict=True):
            assert of_layer.device == layer.tail_keys.device
        child = cache.fork(scorer=scores)
        child.compact()
        assert child.report().kept_per_layer == expected.report().kept_per_layer
        assert_same(answer(model, child, STEPS), logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_works_on_two_devices(family: str) -> None:
    twin, model = tiny_model(family), spread(tiny_model(family), 5)
    expected = compacted(twin, CONTEXT, kept_fraction=0.3)
    logits = answer(twin, expected, STEPS)
    with SecondDevice():
        cache = compacted(model, CONTEXT, kept_fraction=0.3)
        assert cache.report().kept_per_layer == expected.report().kept_per_layer
        assert_same(answer(model, cache, STEPS), logits)


# -- offloaded weights -------------------------------------------------------------------------------------------------


def to_cpu(model: Any, folder: Path) -> None:
    cpu_offload(model, execution_device=HERE)


def to_disk(model: Any, folder: Path) -> None:
    disk_offload(model, folder, execution_device=HERE)


def with_buffers(model: Any, folder: Path) -> None:
    cpu_offload(model, execution_device=HERE, offload_buffers=True)


def by_map(model: Any, folder: Path) -> None:
    """As `device_map` does: some layers on a device, some in memory, some on disk."""
    places = {i: ("disk" if i % 3 == 2 else "cpu") for i in range(len(model.model.layers))}
    device_map: dict[str, Any] = {f"model.layers.{i}": place for i, place in places.items()}
    others = [name for name, _ in model.model.named_children() if name != "layers"]
    device_map |= {f"model.{name}": "cpu" for name in others} | {"lm_head": "cpu"}
    dispatch_model(model, device_map, main_device=HERE, offload_dir=folder, force_hooks=True)


OFFLOADS = {"cpu": to_cpu, "disk": to_disk, "device map": by_map, "cpu with buffers": with_buffers}


WAYS = [("qwen3_5", way) for way in OFFLOADS] + [(family, "cpu with buffers") for family in FAMILIES]


@pytest.mark.parametrize(
    ("family", "way", "first"),
    [(*way, "offloaded") for way in WAYS[:3] + WAYS[4:]] + [(*way, "hooked") for way in WAYS[:4]],
)
def test_an_offloaded_model_answers_alike(family: str, way: str, first: str, tmp_path: Path) -> None:
    """Weights are there only inside their own modules' forwards."""
    twin, model = tiny_model(family), tiny_model(family)
    if first == "hooked":
        attach(model)
    OFFLOADS[way](model, tmp_path)
    assert any(parameter.is_meta for parameter in model.parameters())
    cache = compacted(model, CONTEXT, [42, 1], scorer=random_estimator(twin), kept_fraction=0.3)
    expected = compacted(twin, CONTEXT, [42, 1], kept_fraction=0.3)
    assert cache.report().kept_per_layer == expected.report().kept_per_layer
    assert torch.equal(answer(model, cache), answer(twin, expected))
    assert torch.equal(generate(model, FULL, cache), generate(twin, FULL, expected))
    assert any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("method", MAKERS)
@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
def test_every_method_scores_an_offloaded_model(family: str, method: str) -> None:
    """Of latent attention, methods read queries and values through a projection of the layer, after its forward."""
    twin, model = tiny_model(family), tiny_model(family)
    with_buffers(model, Path())
    cache = compacted(model, CONTEXT, kept_fraction=0.3, scorer=MAKERS[method](model))
    expected = compacted(twin, CONTEXT, kept_fraction=0.3, scorer=MAKERS[method](twin))
    assert cache.report().kept_per_layer == expected.report().kept_per_layer
    assert_same(answer(model, cache), answer(twin, expected))


# -- quantised linears -------------------------------------------------------------------------------------------------


def exchange(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    """As quantisers do: linears of the decoder's layers give way to other modules."""
    for module in list(model.model.layers.modules()):  # type: ignore[union-attr, operator]
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, make(child))


class Int8Linear(nn.Module):
    """Weights in int8 with a scale for each row, and nothing called `weight`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("whole", (linear.weight / scale).round().to(torch.int8))
        self.bias = linear.bias

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states, self.whole * self.scale, self.bias)


def int8(model: Any) -> None:
    exchange(model, Int8Linear)


def torchao_int8(model: Any) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model.model.layers, Int8WeightOnlyConfig())


def quanto_int8(model: Any) -> None:
    from optimum.quanto import freeze, qint8, quantize

    quantize(model.model.layers, weights=qint8)
    freeze(model)


def bitsandbytes_int8(model: Any) -> None:
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    def make(linear: nn.Linear) -> nn.Module:
        made = Linear8bitLt(linear.in_features, linear.out_features, linear.bias is not None, has_fp16_weights=False)
        made.weight = Int8Params(linear.weight.data.clone(), has_fp16_weights=False, requires_grad=False)
        made.bias = linear.bias
        return made.to("cpu")

    exchange(model, make)


def bitsandbytes_nf4(model: Any) -> None:
    from bitsandbytes.nn import Linear4bit, Params4bit

    def make(linear: nn.Linear) -> nn.Module:
        made = Linear4bit(linear.in_features, linear.out_features, linear.bias is not None, quant_type="nf4")
        made.weight = Params4bit(linear.weight.data.clone(), requires_grad=False, quant_type="nf4")
        made.bias = linear.bias
        return made.to("cpu")

    exchange(model, make)


QUANTISERS = {
    "int8": (int8, None),
    "torchao int8": (torchao_int8, "torchao"),
    "quanto int8": (quanto_int8, "optimum"),
    "bitsandbytes int8": (bitsandbytes_int8, "bitsandbytes"),
    "bitsandbytes nf4": (bitsandbytes_nf4, "bitsandbytes"),
}
quantisers = [
    pytest.param(name, marks=pytest.mark.skipif(package is not None and not importlib.util.find_spec(package),
                                                reason=f"{package} is not installed"))
    for name, (_, package) in QUANTISERS.items()
]  # fmt: skip


@pytest.mark.parametrize("when", ["before the hooks", "after the hooks"])
@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
@pytest.mark.parametrize("quantiser", quantisers)
def test_a_quantised_model_equals_its_own_oracle(family: str, quantiser: str, when: str) -> None:
    model, plain = tiny_model(family), tiny_model(family)
    estimator = random_estimator(model)
    if when == "after the hooks":
        compacted(model, CONTEXT)
    exact = forward(plain, QUESTION, None)
    for quantised in (model, plain):
        QUANTISERS[quantiser][0](quantised)
    plain.set_attn_implementation("eager")
    assert (forward(plain, QUESTION, None) - exact).abs().max() > 1e-3
    expected = steps(model, CONTEXT, DynamicCache(config=model.config))
    whole = GateSightCache(estimator, model, kept_fraction=1.0)
    assert all(torch.equal(a, b) for a, b in zip(steps(model, CONTEXT, whole), expected, strict=True))
    cache = compacted(model, CONTEXT, kept_fraction=0.3, scorer=estimator)
    with Oracle(plain, evicted_of(cache, 0, LENGTH)) as oracle:
        expected_logits = oracle.logits(CONTEXT, QUESTION)
    assert_same(forward(model, QUESTION, cache), expected_logits)


# -- adapters ----------------------------------------------------------------------------------------------------------


class LowRank(nn.Module):
    """What adapter libraries put in place of a linear: the linear, and a product of two small ones beside it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.base_layer = linear
        self.lora_A, self.lora_B = (nn.Parameter(torch.randn(*size) * 0.3) for size in
                                    ((4, linear.in_features), (linear.out_features, 4)))  # fmt: skip

    def forward(self, states: Tensor) -> Tensor:
        return self.base_layer(states) + states @ self.lora_A.T @ self.lora_B.T * 0.1


class Adapted(nn.Module):
    """And around the model: two modules, of which the outer one has a `generate` of its own."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model

    @property
    def config(self) -> Any:
        return self.base_model.model.config  # type: ignore[union-attr]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.model(*args, **kwargs)  # type: ignore[operator]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.model.generate(*args, **kwargs)  # type: ignore[operator, union-attr]


def low_rank(model: Any) -> Any:
    torch.manual_seed(3)
    exchange(model, LowRank)
    return Adapted(model)


def peft_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


ADAPTERS = {"low rank": low_rank, "peft": peft_lora}
adapters = [
    "low rank",
    pytest.param("peft", marks=pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="no peft")),
]


@pytest.mark.parametrize("when", ["before the hooks", "after the hooks"])
@pytest.mark.parametrize("adapter", adapters)
def test_a_model_with_adapters_records_what_they_add(adapter: str, when: str) -> None:
    """Hooks that stay on the inner linears would miss it: signals and gates must be those of the whole projection."""
    model, plain = tiny_model(), ADAPTERS[adapter](tiny_model())
    estimator = random_estimator(model)
    bare = prefilled(model if when == "after the hooks" else tiny_model(), CONTEXT, kept_fraction=0.3)
    wrapped = ADAPTERS[adapter](model).eval()
    plain.eval()
    core = plain.base_model.model
    core.set_attn_implementation("eager")
    cache = GateSightCache(estimator, wrapped, kept_fraction=0.3)
    wrapped(input_ids=CONTEXT, past_key_values=cache)

    logits: dict[int, Tensor] = {}
    for i, layer in enumerate(core.model.layers):
        if hasattr(layer, "linear_attn"):
            keep = lambda module, args, output, i=i: logits.__setitem__(i, output)  # noqa: E731
            layer.linear_attn.in_proj_b.register_forward_hook(keep)
    core(CONTEXT, use_cache=False)
    for found, expected, without in zip(cache.prefill().signals, logits.values(), bare.prefill().signals, strict=True):
        assert_same(found[:, :, 0], expected.sigmoid())
        assert (found[:, :, 0] - without[:, :, 0]).abs().max() > 1e-3
    cache.compact()
    with Oracle(core, evicted_of(cache, 0, LENGTH)) as oracle:
        expected_tokens = oracle.generate(FULL)
        assert_same(wrapped(input_ids=QUESTION, past_key_values=cache.fork()).logits, oracle.logits(CONTEXT, QUESTION))
    found = wrapped.generate(input_ids=FULL, past_key_values=cache.fork(), max_new_tokens=4, do_sample=False)
    assert torch.equal(found[:, -4:], expected_tokens)


def test_hooks_follow_exchanged_projections_and_leave_no_trace() -> None:
    model = tiny_model()
    hooks = attach(model)
    assert hooks.in_place
    low_rank(model)
    assert not hooks.in_place
    renewed = attach(model)
    assert renewed is not hooks and renewed.in_place and attach(model) is renewed
    renewed.remove()
    hooks.remove()
    left = [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks or "generate" in vars(m)]
    assert not left
