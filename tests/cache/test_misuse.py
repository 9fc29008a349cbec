"""Every misuse is a clear error, and the cache still answers properly afterwards."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from gatesight_hf import CacheStateError, EstimatorMismatchError, GateSightCache, UnsupportedModelError

from ..helpers.models import random_estimator, tiny_model
from ..helpers.running import CONTEXT, FULL, LENGTH, QUESTION, compacted, forward, generate, prefilled, random_ids

pytestmark = [pytest.mark.core, pytest.mark.quick]

HIDING = torch.tensor([[0] + [1] * 48])
PADDED_RIGHT = torch.tensor([[1] * 40 + [0] * 3, [1] * 43])


@pytest.fixture(scope="module")
def expected(dense: Any) -> Tensor:
    with torch.no_grad():
        return generate(dense, FULL, compacted(dense, CONTEXT, kept_fraction=0.3))


@pytest.fixture
def new(dense: Any) -> GateSightCache:
    return GateSightCache(random_estimator(dense), dense, kept_fraction=0.3)


@pytest.fixture
def recording(dense: Any) -> GateSightCache:
    return prefilled(dense, CONTEXT, kept_fraction=0.3)


def assert_usable(model: Any, cache: GateSightCache, expected: Tensor) -> None:
    """The cache goes on from where it was: prefill, compaction, question."""
    if cache.get_seq_length() == 0:
        forward(model, CONTEXT, cache)
    if not cache.is_compacted:
        cache.compact()
    assert cache.get_seq_length() == LENGTH
    assert torch.equal(generate(model, FULL, cache.fork()), expected)
    assert torch.equal(generate(model, QUESTION, cache, new=True), expected)


# -- making a cache ----------------------------------------------------------------------------------------------------


def pure_attention() -> Any:
    config = Qwen3Config(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=1, head_dim=16, vocab_size=128)  # fmt: skip
    return Qwen3ForCausalLM(config)


MAKING: dict[str, tuple[Callable[[Any], Any], type[Exception] | tuple[type[Exception], ...], str]] = {
    "a wrong estimator": (lambda m: GateSightCache(random_estimator(tiny_model("qwen3_next")), m),
                          EstimatorMismatchError, "was trained for"),
    "a pure-attention model": (lambda m: GateSightCache(random_estimator(m), pure_attention()),
                               UnsupportedModelError, "needs a hybrid .* 'qwen3'"),
    "no arguments, as DynamicCache": (lambda m: GateSightCache(), TypeError, "'scorer' and 'model'"),
    "a config only, as DynamicCache": (lambda m: GateSightCache(config=m.config), TypeError, "config"),
    "a config as the model": (lambda m: GateSightCache(random_estimator(m), m.config),
                              (TypeError, ValueError), "model"),
    "a name as the scorer": (lambda m: GateSightCache("org/name", m), TypeError, r"from_pretrained\(folder"),
    "a folder that is not there": (lambda m: GateSightCache.from_pretrained(Path("no"), model=m),
                                   FileNotFoundError, "config.json"),
    "an unknown option": (lambda m: GateSightCache(random_estimator(m), m, ratio=0.5), TypeError, "ratio"),
}  # fmt: skip
OPTIONS: list[tuple[str, Any]] = [
    *(("kept_fraction", value) for value in (0, 0.0, 1.5, -1, True, math.nan, "0.1", None)),
    *((f"protected_{end}", value) for end in ("prefix", "suffix") for value in (-1, 1.5, True, None)),
    *(("block_size", value) for value in (0, -4, 1.5, True)),
    *(("allocation", value) for value in ("Gate", "", None)),
]


@pytest.mark.parametrize("case", MAKING)
def test_a_cache_that_cannot_be_made(dense, parent, expected, case):
    make, error, match = MAKING[case]
    with pytest.raises(error, match=match):
        make(dense)
    assert_usable(dense, parent, expected)


@pytest.mark.parametrize(("option", "value"), OPTIONS, ids=lambda value: str(value))
def test_an_option_that_makes_no_sense(dense, option, value):
    with pytest.raises(ValueError, match=option):
        GateSightCache(random_estimator(dense), dense, **{option: value})


def test_a_dynamic_cache_without_config_fails_by_itself_and_leaves_nothing(dense, parent, expected):
    with pytest.raises(IndexError):
        forward(dense, CONTEXT, DynamicCache())
    assert_usable(dense, parent, expected)


# -- while the context is prefilled ------------------------------------------------------------------------------------


def ask(ids: Tensor, **arguments: Any) -> Callable[[Any, GateSightCache], Any]:
    return lambda model, cache: generate(model, ids, cache, **arguments)


def feed(ids: Tensor, **arguments: Any) -> Callable[[Any, GateSightCache], Any]:
    return lambda model, cache: forward(model, ids, cache, **arguments)


Cases = dict[str, tuple[Callable[[Any, GateSightCache], Any], type[Exception], str]]
BEFORE: Cases = {
    "compacting nothing": (lambda m, c: c.compact(), CacheStateError, "Nothing to compact"),
    "scoring nothing": (lambda m, c: c.prefill(), CacheStateError, "run the model on the context"),
    "right padding": (feed(random_ids(43, 2), attention_mask=PADDED_RIGHT), ValueError, "padding_side = 'left'"),
    "right padding in generate": (ask(random_ids(43, 2), attention_mask=PADDED_RIGHT), ValueError, "'left'"),
    "a prepared mask": (feed(CONTEXT, attention_mask=torch.ones(1, 1, 43, 43)), ValueError, "2-D attention mask"),
    "a mask too long": (feed(CONTEXT, attention_mask=torch.ones(1, 44)), ValueError, "covers 44 tokens; expected 43"),
    "no tokens": (feed(CONTEXT[:, :0]), CacheStateError, "No new tokens"),
    "prompt lookup": (ask(CONTEXT, prompt_lookup_num_tokens=3), ValueError, "prompt_lookup_num_tokens.*assisted"),
}
RECORDING: Cases = {
    "padding inside": (feed(QUESTION, attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]])), ValueError, "Padding after"),
    "identical ids": (ask(CONTEXT), CacheStateError, "shorter prefix"),
    "a mask that hides seen tokens": (
        feed(QUESTION, attention_mask=HIDING),
        ValueError,
        "seen|saw",
    ),
}


@pytest.mark.parametrize("case", BEFORE)
def test_misuse_of_a_new_cache(dense, new, expected, case):
    act, error, match = BEFORE[case]
    with pytest.raises(error, match=match):
        act(dense, new)
    assert_usable(dense, new, expected)


@pytest.mark.parametrize("case", RECORDING)
def test_misuse_of_a_prefilled_cache(dense, recording, expected, case):
    act, error, match = RECORDING[case]
    with pytest.raises(error, match=match):
        act(dense, recording)
    assert_usable(dense, recording, expected)


# -- after compaction --------------------------------------------------------------------------------------------------


def changed(at: int) -> Tensor:
    ids = FULL.clone()
    ids[0, at] = (ids[0, at] + 1) % 100 + 2
    return ids


AFTER: Cases = {
    "compacting twice": (lambda m, c: c.compact(), CacheStateError, "compacted already"),
    "reading the record": (lambda m, c: c.prefill(), CacheStateError, "compacted already"),
    "fewer ids than seen": (ask(CONTEXT[:, :20]), CacheStateError, "shorter prefix"),
    "one id of those seen": (ask(CONTEXT[:, :1], attention_mask=None), CacheStateError, "shorter prefix"),
    "identical ids": (ask(CONTEXT), CacheStateError, "shorter prefix"),
    "a context tokenized differently half-way": (ask(changed(25)), CacheStateError, "at token 25 of 43"),
    "a context tokenized differently at its end": (ask(changed(42)), CacheStateError, "at token 42 of 43"),
    "another beginning": (ask(changed(0)), CacheStateError, "at token 0 of 43"),
    "new ids without a mask": (ask(QUESTION), CacheStateError, "at token 0 of 43.*attention_mask over the 43"),
    "new ids with their own mask": (
        ask(QUESTION, attention_mask=torch.ones(1, 6)), CacheStateError, "at token 0 of 43"),
    "another text": (ask(random_ids(90, seed=5)), CacheStateError, "at token 0 of 43"),
    "ids of one dimension": (ask(FULL[0]), ValueError, "input_ids must be"),
    "no tokens": (feed(QUESTION[:, :0]), CacheStateError, "No new tokens"),
    "prompt lookup": (ask(FULL, prompt_lookup_num_tokens=3), ValueError, "assisted decoding"),
    "prompt lookup in a config": (
        ask(FULL, generation_config=GenerationConfig(prompt_lookup_num_tokens=3)), ValueError, "assisted decoding"),
    "an assistant": (lambda m, c: generate(m, FULL, c, assistant_model=m), ValueError, "assisted decoding"),
    "recording the past": (lambda m, c: c.activate_past_recording(), NotImplementedError, "assisted decoding"),
    "cropping": (lambda m, c: c.crop(-2), NotImplementedError, "cannot be cropped.*Fork"),
    "another cache implementation": (ask(FULL, cache_implementation="static"), ValueError, "cache_implementation"),
    "a prepared mask": (feed(QUESTION, attention_mask=torch.ones(1, 1, 6, 49)), ValueError, "2-D attention mask"),
    "a mask of another length": (feed(QUESTION, attention_mask=torch.ones(1, 20)), ValueError, "expected 49"),
    "a mask of another length in generate": (
        ask(QUESTION, attention_mask=torch.ones(1, 20)), ValueError, "mask of 6 .* 49"),
    "a mask of another length for two rows": (
        feed(QUESTION.expand(2, -1), attention_mask=torch.ones(2, 20)), ValueError, "expected 49"),
    "a mask that hides seen tokens": (feed(QUESTION, attention_mask=HIDING), ValueError, "seen|saw"),
}  # fmt: skip


@pytest.mark.parametrize("case", AFTER)
def test_misuse_of_a_compacted_cache(dense, parent, expected, case):
    act, error, match = AFTER[case]
    with pytest.raises(error, match=match):
        act(dense, parent)
    assert_usable(dense, parent, expected)


def test_rows_that_are_no_multiple(dense, expected):
    cache = compacted(dense, CONTEXT.expand(2, -1), kept_fraction=0.3)
    for act in (feed(QUESTION.expand(3, -1)), ask(QUESTION.expand(3, -1)), ask(FULL.expand(3, -1))):
        with pytest.raises(ValueError, match="holds 2 rows and the input has 3"):
            act(dense, cache)
    assert torch.equal(generate(dense, FULL.expand(2, -1), cache), expected.expand(2, -1))


def test_another_text_for_a_used_child(dense, parent, expected):
    """A child that was asked one question must not take another one for the rest of what it has seen."""
    child = parent.fork()
    first = torch.cat([FULL, generate(dense, FULL, child)], 1)
    other = torch.cat([CONTEXT, random_ids(15, seed=3)], 1)
    with pytest.raises(CacheStateError, match="fork"):
        generate(dense, other, child)
    again = torch.cat([first, QUESTION], 1)
    fresh = compacted(dense, CONTEXT, kept_fraction=0.3)
    assert torch.equal(generate(dense, again, child), generate(dense, again, fresh))
    assert_usable(dense, parent, expected)


def test_new_ids_after_a_context_of_embeddings(dense, new, expected):
    name = "past_key_values"
    dense(inputs_embeds=dense.get_input_embeddings()(CONTEXT), **{name: new})
    new.compact()
    for ids in (QUESTION, FULL):
        with pytest.raises(CacheStateError, match=r"embeddings.*attention_mask"):
            generate(dense, ids, new)
    mask = torch.ones(1, FULL.shape[1], dtype=torch.long)
    assert torch.equal(generate(dense, QUESTION, new.fork(), attention_mask=mask), expected)


def test_an_attention_implementation_without_such_masks(dense, parent, expected):
    with pytest.raises(ValueError, match=r"not 'flex_attention'.*set_attn_implementation\('sdpa'\)"):
        parent.attention_layers[0].attention_mask(6, None, "flex_attention", torch.float32, 3)
    assert_usable(dense, parent, expected)


def test_offloading_is_refused(dense, parent, expected):
    for act in (parent.attention_layers[0].offload, parent.attention_layers[0].prefetch):
        with pytest.raises(NotImplementedError, match="does not offload"):
            act()
    assert_usable(dense, parent, expected)
