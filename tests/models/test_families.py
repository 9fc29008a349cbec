"""What families have of their own: no output gate, no RoPE, doubled β, latent attention, sliding windows."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload
from torch import Tensor
from transformers import KimiLinearConfig, OlmoHybridConfig, Qwen3_5TextConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import gatesight_kernels as kernels
from gatesight_hf import Estimator, EstimatorConfig, GateSightCache, UnsupportedModelError, reference
from gatesight_hf.entries import LatentAttentionLayer, SlidingAttentionLayer
from gatesight_hf.methods import ExpectedAttention, KeyDiff, LagKV, SnapKV, TriAttention
from gatesight_hf.models import HybridSpec, find_modules
from gatesight_hf.scoring import Needs, Recorder, continuation_utilities
from gatesight_hf.training.collect import Sampling, collect, read_shards
from gatesight_hf.training.fit import FitOptions, fit

from ..helpers.models import FAMILIES, random_estimator, tiny_model
from ..helpers.oracle import Oracle, assert_same, evicted_of
from ..helpers.running import as_new, cache_kwargs, compacted, forward, generate, prefilled, random_ids

pytestmark = pytest.mark.core

LENGTH = 29
QUESTION = random_ids(5, seed=50)
UNGATED = [family for family in FAMILIES if family in ("olmo_hybrid", "lara_mini", "kimi_linear")]
LATENT = [family for family in FAMILIES if family in ("kimi_linear", "bailing_hybrid")]


# -- every family ------------------------------------------------------------------------------------------------------


def test_children_of_one_parent_and_forwards_that_fail(any_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers do not depend on what other children were asked, nor on a forward that broke off in the last layer."""
    ids = random_ids(LENGTH)
    parent = compacted(any_model, ids, kept_fraction=0.4)
    expected = [forward(any_model, QUESTION, compacted(any_model, ids, kept_fraction=0.4)) for _ in range(2)]
    assert torch.equal(*expected)
    for question in (random_ids(9, seed=51), QUESTION, random_ids(1, seed=52), QUESTION):
        child = parent.fork()
        logits = forward(any_model, question, child)
        assert question is not QUESTION or torch.equal(logits, expected[0])

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ArithmeticError

    for length in (1, 6):
        with monkeypatch.context() as patch:
            patch.setattr(any_model.model.layers[-1].mlp, "forward", fail)
            with pytest.raises(ArithmeticError):
                forward(any_model, random_ids(length, seed=53), parent)
    assert torch.equal(forward(any_model, QUESTION, parent), expected[0])


def test_beams_equal_the_oracle(any_model: Any, any_plain: Any) -> None:
    """The score of the best beam is what the oracle gives its tokens."""
    ids = random_ids(LENGTH)
    cache = compacted(any_model, ids, kept_fraction=0.4)
    options = {"max_new_tokens": 4, "num_beams": 3, "return_dict_in_generate": True, "output_scores": True}
    found = any_model.generate(
        QUESTION, do_sample=False, **options, **as_new(QUESTION, cache), **cache_kwargs(any_model, cache.fork())
    )
    tokens = found.sequences[:, 5:]
    with Oracle(any_plain, evicted_of(cache, 0, LENGTH)) as oracle:
        logits = oracle.logits(ids, torch.cat([QUESTION, tokens[:, :-1]], dim=1))[0, -4:]
    assert_same(found.sequences_scores[0], logits.log_softmax(-1).gather(1, tokens[0, :, None]).mean())


@pytest.mark.parametrize("allocation", ["pyramid", "score", "head", "global"])
def test_other_budgets_equal_the_oracle(any_model: Any, any_plain: Any, allocation: str) -> None:
    ids = random_ids(LENGTH)
    cache = compacted(any_model, ids, kept_fraction=0.4, allocation=allocation)
    with Oracle(any_plain, evicted_of(cache, 0, LENGTH)) as oracle:
        assert_same(forward(any_model, QUESTION, cache), oracle.logits(ids, QUESTION))


@pytest.mark.parametrize(
    "scorer",
    [SnapKV(window=8), KeyDiff(), LagKV(lag=4, sinks=2), ExpectedAttention(future=16)],
    ids=lambda s: type(s).__name__,
)
def test_other_methods_rate_every_family(any_model: Any, any_plain: Any, scorer: Any) -> None:
    ids = random_ids(LENGTH)
    cache = compacted(any_model, ids, [20, 9], scorer=scorer, kept_fraction=0.5)
    with Oracle(any_plain, evicted_of(cache, 0, LENGTH)) as oracle:
        assert_same(forward(any_model, QUESTION, cache), oracle.logits(ids, QUESTION))


@contextmanager
def attention_calls(model: Any) -> Iterator[list[tuple[Tensor, Tensor, Tensor, float]]]:
    """What full-attention modules hand to sdpa: queries, keys, values `[B, heads, t, D]`, and the scale."""
    calls: list[tuple[Tensor, Tensor, Tensor, float]] = []
    modules = find_modules(model, HybridSpec.from_config(model.config)).attention
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if any(module is ours for ours in modules):
            group = query.shape[1] // key.shape[1]
            states = (each.repeat_interleave(group, dim=1).double() for each in (key, value))
            calls.append((query.double(), *states, kwargs["scaling"]))
        return plain(module, query, key, value, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
    try:
        yield calls
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


def logits_of(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Causal `[B, heads, t, T]`."""
    logits = query @ key.mT * scale
    return logits.masked_fill(torch.ones_like(logits).triu(key.shape[2] - query.shape[2] + 1).bool(), -torch.inf)


def test_snapkv_rates_by_the_attention_of_the_module(any_model: Any) -> None:
    """Without a pool, its scores are the mean weights that the last queries give."""
    scorer, heads = SnapKV(window=6, kernel=1), HybridSpec.from_config(any_model.config).num_key_value_heads
    with attention_calls(any_model) as calls:
        cache = prefilled(any_model, random_ids(LENGTH), scorer=scorer)
    assert len(calls) == 2
    for scores, (query, key, _, scale) in zip(scorer.score(cache.prefill()), calls, strict=True):
        weights = logits_of(query, key, scale).softmax(-1)[:, :, -6:, : LENGTH - 6].mean(2)
        assert_same(scores[..., : LENGTH - 6], weights.unflatten(1, (heads, -1)).mean(2).float())


def test_utilities_equal_deletion_from_the_module(any_model: Any) -> None:
    """The change of a layer's output, all query heads of an entry together, the largest over the continuation."""
    heads, later = HybridSpec.from_config(any_model.config).num_key_value_heads, random_ids(4, seed=60)
    parent = compacted(any_model, random_ids(LENGTH), kept_fraction=1.0)
    scale = parent.spec.scale
    with attention_calls(any_model) as calls:
        forward(any_model, later, parent.fork())
    found = continuation_utilities(any_model, parent.fork(), later, LENGTH, scale)
    for utilities, (query, key, value, own_scale) in zip(found, calls, strict=True):
        assert own_scale == pytest.approx(scale)
        logits = logits_of(query, key, scale)
        full, expected = logits.softmax(-1) @ value, torch.zeros(heads, LENGTH)
        for entry in range(LENGTH):
            without = logits.clone()
            without[..., entry] = -torch.inf
            change = (without.softmax(-1) @ value - full)[0].unflatten(0, (heads, -1))
            expected[:, entry] = change.square().sum((1, 3)).sqrt().amax(-1)
        torch.testing.assert_close(utilities, expected, rtol=1e-4, atol=1e-6)


def test_triattention_calibrates_on_every_family(any_model: Any, tmp_path: Path) -> None:
    scorer = TriAttention.calibrate(any_model, random_ids(40, seed=3))
    scorer.save(tmp_path / "statistics.safetensors")
    scorer = TriAttention.load(tmp_path / "statistics.safetensors")
    assert len(evicted_of(compacted(any_model, random_ids(LENGTH), scorer=scorer, kept_fraction=0.5), 0, LENGTH)) == 2


def test_an_estimator_trains_and_serves_on_every_family(any_model: Any, tmp_path: Path) -> None:
    spec, folder = HybridSpec.from_config(any_model.config), tmp_path / "shards"
    sampling = Sampling(continuations=2, tokens=4)
    shards = collect(any_model, [random_ids(24, seed=k)[0].tolist() for k in range(3)], folder, sampling, "documents")
    for shard in read_shards(shards):
        assert len(shard.signals) == 6 and shard.utilities.shape == (2, spec.num_key_value_heads, 24)
        assert shard.utilities.amax(-1).eq(1).all() and shard.utilities.std(-1).gt(0.01).all()
    fitted = fit(EstimatorConfig.for_model(spec, "tiny", hidden_size=8), shards[:2], shards[2:], FitOptions(epochs=2))
    fitted.estimator.save_pretrained(tmp_path / "estimator")
    cache = GateSightCache.from_pretrained(tmp_path / "estimator", model=any_model, kept_fraction=0.3)
    generate(any_model, random_ids(LENGTH), cache)
    assert cache.report().achieved_fraction == pytest.approx(0.3, abs=0.02)


# -- no output gate ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", UNGATED)
def test_without_output_gates_layers_share_equally_and_one_warning_says_so(family: str) -> None:
    model = tiny_model(family)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        parents = [prefilled(model, random_ids(LENGTH), allocation=allocation) for allocation in ("gate", "flat")]
        forks = [parent.fork(allocation="gate", kept_fraction=0.3) for parent in parents]
    assert [str(w.message).split(":")[0] for w in caught] == [f"{family} has no output gates to share the budget by"]
    for fork in forks:
        report = fork.compact()
        assert report.gate_means == [] and fork.options.allocation == "flat"
        assert max(report.kept_per_layer[0]) - min(report.kept_per_layer[0]) <= 1
        assert fork.fork().report().gate_means == []


def test_models_with_gates_do_not_warn(dense: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compacted(dense, random_ids(LENGTH))


# -- OLMo-Hybrid -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("doubled", [True, False])
def test_beta_is_the_one_that_the_layer_writes_with(doubled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its delta rule is given it."""
    model, given = tiny_model("olmo_hybrid", linear_allow_neg_eigval=doubled), []
    layer = model.model.layers[0].linear_attn
    plain = layer.b_proj.forward
    monkeypatch.setattr(layer.b_proj, "forward", lambda x: given.append(plain(x)) or given[-1])
    signals = prefilled(model, random_ids(LENGTH)).prefill().signals[0]
    torch.testing.assert_close(signals[:, :, 0], given[0].sigmoid() * (2 if doubled else 1), rtol=1e-6, atol=1e-6)
    assert bool((signals[:, :, 0] > 1).any()) == doubled


def test_published_olmo_hybrids_have_no_rope() -> None:
    models = [tiny_model("olmo_hybrid", rope_parameters={"rope_type": "default", "rope_theta": None}) for _ in range(2)]
    model, twin = models
    twin.set_attn_implementation("eager")
    assert model.model.rotary_emb is None
    ids = random_ids(LENGTH)
    for scorer in (random_estimator(model), ExpectedAttention(future=8)):
        cache = compacted(model, ids, scorer=scorer, kept_fraction=0.4)
        with Oracle(twin, evicted_of(cache, 0, LENGTH)) as oracle:
            assert_same(forward(model, QUESTION, cache.fork()), oracle.logits(ids, QUESTION))


# -- sliding windows ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif("lara_mini" not in FAMILIES, reason="this transformers has no hybrid with sliding windows")
@pytest.mark.filterwarnings("ignore:.*has no output gates")
@pytest.mark.parametrize("growing", [False, True])
def test_a_compacted_cache_holds_no_more_than_the_window(growing: bool) -> None:
    """transformers' layer keeps a view of all entries of the last forward, which children of a parent would keep."""
    model = tiny_model("lara_mini")
    with torch.enable_grad():
        cache = prefilled(model.requires_grad_(True), random_ids(100), growing=growing)
    cache.compact()
    for layer in cache.bounded_layers:
        if isinstance(layer, SlidingAttentionLayer):
            for entries in (layer.keys, layer.values):
                assert entries.untyped_storage().nbytes() == 2 * 8 * 32 * 4
                assert not entries.requires_grad


# -- latent attention --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", LATENT)
def test_a_latent_is_held_once_and_freed(family: str) -> None:
    model = tiny_model(family)
    cache = prefilled(model, random_ids(LENGTH, rows=2))
    layer = cache.attention_layers[1]
    assert isinstance(layer, LatentAttentionLayer)
    assert layer.keys.shape == (2, 1, LENGTH, 32) and layer.values.shape == (2, 1, LENGTH, 24)
    assert torch.equal(layer.keys[..., 8:], layer.values)
    bytes_per_entry = 32 * 4
    assert cache.report().kv_bytes == 2 * 2 * LENGTH * bytes_per_entry
    report = cache.compact()
    assert report.kv_bytes == 2 * sum(report.physical_lengths) * bytes_per_entry
    assert report.kv_bytes_before == 2 * 2 * LENGTH * bytes_per_entry


@pytest.mark.usefixtures("backend")
def test_kernels_take_values_without_channels_and_one_gate_a_head(device: str) -> None:
    indices = torch.tensor([0, 2, 5], device=device).expand(2, 1, -1)
    assert kernels.compact_rows(torch.empty(2, 1, 7, 0, device=device), indices).shape == (2, 1, 3, 0)
    gate = torch.randn(2, 5, 6, device=device).unsqueeze(-1)
    assert_same(kernels.gate_means(gate), gate.sigmoid().mean((2, 3)))


@pytest.mark.parametrize("family", [f for f in UNGATED + LATENT if f != "lara_mini"])
def test_an_offloaded_model_gives_the_same_signals_and_queries(family: str) -> None:
    """Weights of an offloaded layer are there only inside its own forward."""
    model, offloaded = tiny_model(family), tiny_model(family)
    cpu_offload(offloaded, execution_device=torch.device("cpu"))
    scorer = Recorder(Needs(signals=True, queries=8))
    expected, found = (prefilled(m, random_ids(LENGTH), [28, 1], scorer=scorer).prefill() for m in (model, offloaded))
    for name in ("signals", "queries"):
        assert all(torch.equal(a, b) for a, b in zip(getattr(found, name), getattr(expected, name), strict=True))


# -- what is refused ---------------------------------------------------------------------------------------------------


TYPES = ["linear_attention", "full_attention"]


def qwen(**options: Any) -> Any:
    return Qwen3_5TextConfig(num_hidden_layers=2, **options)


REFUSED = {
    "no adapter": (lambda: transformers.Qwen3Config(), "'qwen3'.*qwen3_next"),
    "no adapter, a hybrid": (lambda: transformers.Glm5NextTextConfig(),
                             "'glm5_next_text' \\(its layers are indexed_attention, linear_attention\\)"),
    "no adapter, multimodal": (lambda: transformers.Glm5NextConfig(), "'glm5_next' .*is not one it knows"),
    "layers of another type": (lambda: qwen(layer_types=["linear_attention", "sliding_attention"]),
                               "layer types \\['sliding_attention'\\]"),
    "sliding windows where none are known": (
        lambda: OlmoHybridConfig(num_hidden_layers=3, layer_types=[*TYPES, "sliding_attention"]), "sliding_attention"),
    "no GDN layer below": (lambda: qwen(layer_types=TYPES[::-1]), "1 GDN and 1 full-attention layers in the order "
                           "\\['full', 'linear'\\]"),
    "attention only": (lambda: KimiLinearConfig(num_hidden_layers=2, layer_types=["full_attention"] * 2),
                       "0 GDN and 2 full-attention"),
    "another activation": (lambda: qwen(hidden_act="gelu"), "hidden_act='gelu'"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED)
def test_other_layouts_are_refused_by_what_was_found(config: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        HybridSpec.from_config(config())


@pytest.mark.skipif("bailing_hybrid" not in FAMILIES, reason="not in this transformers")
def test_scaled_rope_of_latent_attention_is_refused() -> None:
    scaled = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    with pytest.raises(UnsupportedModelError, match="rope_type='yarn'"):
        HybridSpec.from_config(transformers.BailingHybridConfig(rope_parameters=scaled))


def test_the_layout_of_published_estimators_has_not_changed() -> None:
    """Attributes that a family does not have stay out of the fingerprint."""
    estimator = Estimator.from_pretrained(reference.ESTIMATOR_PATH)
    estimator.check(HybridSpec.from_config(reference.load_model().config))
