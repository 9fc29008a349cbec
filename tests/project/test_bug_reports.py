"""Public bug reports of KV caches, hybrid models and eviction methods: what happens here.

Numbers are those of the tests below. What another test covers whole is named in this table, which is tested too.

| # | report | covered by |
|---|---|---|
| 1 | transformers 49036: `crop` takes back convolutions but not recurrent states | `test_misuse.test_misuse_of_a_compacted_cache` |
| 2 | transformers 45513: several tokens after a cache ignore its states | `test_cache.test_chunked_prefill_equals_the_oracle` |
| 3 | transformers 48947: an offloaded cache gives wrong logits | here |
| 4 | transformers 46748: prefetching reaches GDN layers | here |
| 5 | transformers 46441: `cache_implementation="static"` raises a KeyError | here |
| 7 | transformers 46781: a quantised cache fails late on hybrids | here |
| 8 | transformers 48510: the mask is sized by a sliding layer | here |
| 9 | transformers 35168: layers of unequal lengths break masks | here |
| 10 | transformers 46773: left pads of a single row enter linear layers | here |
| 11 | transformers 44717, slime 1686, ms-swift 9565: packed sequences share GDN states | here |
| 12 | transformers 46831: weights of offloaded layers are read outside their forward | `test_devices.test_an_offloaded_model_answers_alike` |
| 13 | Model-Optimizer 1137, kvpress 241: states or indices on another device | `test_devices.test_every_layer_stays_on_its_own_device` |
| 14 | transformers 42257, optimum-intel 1619: beams do not reorder states | `test_serving.test_beams_equal_the_oracle` |
| 16 | transformers 44530, 44349: continuous batching of hybrids | here |
| 18 | transformers 5.24 renames `past_key_values` | `test_cache.test_both_names_of_the_argument_work_without_a_warning` |
| 19 | kvpress 16, keys_values 140, KVCache-Factory 21: wrong positions after eviction | here |
| 20 | kvpress 27, 30, 114: the second question is answered wrongly | `test_serving.test_the_order_of_questions_does_not_matter` |
| 21 | Qwen3.8 37: hybrids fail with a cache of attention layers alone | `test_misuse.test_a_dynamic_cache_without_config_fails_by_itself_and_leaves_nothing`, `test_misuse.test_a_cache_that_cannot_be_made` |
| 22 | mlx-lm 980, vllm 51198, 51250: no reuse of a prefix, and nothing says so | here |
| 25 | kvpress 147, 227: ties evict protected tokens, short contexts lose everything | `test_selection.test_ties_keep_the_exact_number_and_the_prefix`, `test_compaction.test_kept_totals_are_exact` |
| 26 | triattention 24: the budget has no effect | `test_compaction.test_the_budget_has_an_effect` |
| 27 | turboquant_plus 75: perplexity is fine while needles are lost at some depths | here |
| 29 | vllm 37121, LMCache 3080: memory of KV is counted for all layers | `test_compaction.test_bytes_after_are_the_kept_share_exactly` |
| 30 | kvpress 25: pads are kept | `test_cache.test_ragged_rows_keep_what_each_keeps_alone` |
| 31 | transformers 5.24: new ids without a whole mask raise a reshape error | `test_serving.test_every_way_to_pass_a_question_is_the_same` |
| 32 | transformers 5.24: assisted decoding of stateful models | `test_misuse.test_misuse_of_a_new_cache` |
"""  # noqa: E501

import random
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from gatesight_hf import CacheStateError, GateSightCache, Session
from gatesight_hf.methods import TriAttention
from gatesight_hf.reference import ESTIMATOR_PATH, documents

from ..helpers.models import FAMILIES, random_estimator, tiny_model
from ..helpers.oracle import Oracle, assert_same, evicted_of
from ..helpers.paths import ROOT
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

pytestmark = pytest.mark.core


def test_the_table_names_tests_that_exist() -> None:
    rows = [line.split("|")[1:4] for line in str(__doc__).splitlines() if re.match(r"\| \d", line)]
    assert len(rows) == 26
    here = Path(__file__).read_text(encoding="utf-8")
    for number, _, covered in rows:
        if covered.strip() == "here":
            assert re.search(rf"def test_(\d+_)*{number.strip()}_", here), number
        for file, test in re.findall(r"`(\w+)\.(\w+)`", covered):
            (path,) = (ROOT / "tests").rglob(f"{file}.py")
            assert f"def {test}(" in path.read_text(encoding="utf-8"), test


def test_3_an_offloading_flag_is_refused(dense: Any, parent: GateSightCache) -> None:
    with pytest.raises(TypeError, match="offloading"):
        GateSightCache(random_estimator(dense), dense, offloading=True)  # type: ignore[call-arg]
    for layer in range(len(parent.layers)):
        with pytest.raises(NotImplementedError, match="does not offload"):
            parent.offload(layer)
    assert not parent.offloading
    assert torch.equal(
        generate(dense, FULL, parent), generate(dense, FULL, compacted(dense, CONTEXT, kept_fraction=0.3))
    )


def test_4_prefetching_skips_gdn_layers(parent: GateSightCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks the cache which layers are linear; wherever it starts, it then meets our refusal."""
    assert [i for i, linear in enumerate(parent.is_linear) if linear] == list(parent.spec.gdn_layers)
    parent.prefetch_stream = nullcontext()
    reached: list[Any] = []
    monkeypatch.setattr(type(parent.attention_layers[0]), "prefetch", lambda layer: reached.append(layer))
    for layer in range(len(parent.layers)):
        parent.prefetch(layer)
    assert reached == [parent.attention_layers[0]] * 4 + [parent.attention_layers[1]] * 4


IMPLEMENTATIONS = [(5, "static"), (3, "offloaded"), (7, "quantized"), (16, "paged")]


@pytest.mark.parametrize(("report", "name"), IMPLEMENTATIONS, ids=lambda value: str(value))
@pytest.mark.parametrize("place", ["argument", "config"])
def test_5_7_16_another_implementation_beside_our_cache_is_refused(
    dense: Any, parent: GateSightCache, report: int, name: str, place: str
) -> None:
    given: dict[str, Any] = {"cache_implementation": name}
    given = given if place == "argument" else {"generation_config": GenerationConfig(**given)}
    for cache in (parent, GateSightCache(random_estimator(dense), dense)):
        before = cache.get_seq_length()
        with pytest.raises(ValueError, match=f"cache_implementation='{name}' with a cache: leave one of them out"):
            generate(dense, FULL, cache, **given)
        assert cache.get_seq_length() == before


def test_5_a_static_cache_still_works_on_a_hooked_model(dense: Any, plain: Any, parent: GateSightCache) -> None:
    assert not parent.is_compileable, "generate would compile the forward"
    options = {"max_new_tokens": 4, "do_sample": False}
    found = dense.generate(CONTEXT, cache_implementation="static", disable_compile=True, **options)
    assert torch.equal(found, plain.generate(CONTEXT, **options))


@pytest.mark.skipif("lara_mini" not in FAMILIES, reason="this transformers has no hybrid with sliding windows")
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_8_masks_beyond_a_sliding_window_are_those_of_each_layer(implementation: str) -> None:
    """Layer 0 is linear, a sliding layer comes before the first full one, and single steps pass its window of 9."""
    model, plain = tiny_model("lara_mini"), tiny_model("lara_mini")
    model.set_attn_implementation(implementation)
    plain.set_attn_implementation("eager")
    assert model.config.layer_types[3:5] == ["sliding_attention", "full_attention"]
    cache = compacted(model, CONTEXT[:, :7], kept_fraction=0.5)
    with Oracle(plain, evicted_of(cache, 0, 7)) as oracle:
        expected = oracle.logits(CONTEXT[:, :7], CONTEXT[:, 7:30])
    found = [forward(model, piece, cache) for piece in CONTEXT[:, 7:30].split([1] * 12 + [11], dim=1)]
    assert_same(torch.cat(found, 1), expected)


def test_9_layers_of_very_unequal_lengths_take_several_tokens(dense: Any, plain: Any, attention: str) -> None:
    cache = compacted(dense, CONTEXT, kept_fraction=0.5, gate_exponent=6.0)
    shorter, longer = sorted(cache.report().physical_lengths)
    assert longer >= 4 * shorter
    with Oracle(plain, evicted_of(cache, 0, LENGTH)) as oracle:
        for new in (QUESTION, QUESTION[:, :1], random_ids(8, seed=3)):
            assert_same(forward(dense, new, cache.fork()), oracle.logits(CONTEXT, new))


@pytest.mark.parametrize("family", FAMILIES)
def test_10_pads_of_a_single_row_change_nothing(family: str) -> None:
    """Five pads before one row: the same entries stay, and the same logits come, in forwards and in generate."""
    model = tiny_model(family)
    ids, mask = torch.nn.functional.pad(CONTEXT, (5, 0)), torch.tensor([[0] * 5 + [1] * LENGTH])
    alone = compacted(model, CONTEXT, kept_fraction=0.3)
    cache = compacted(model, ids, mask=mask, kept_fraction=0.3)
    assert cache.report().kept_per_layer == alone.report().kept_per_layer
    pairs = zip(evicted_of(cache, 0, LENGTH), evicted_of(alone, 0, LENGTH), strict=True)
    assert all(torch.equal(found, expected) for found, expected in pairs)
    whole = torch.nn.functional.pad(mask, (0, 6), value=1)
    found = forward(model, QUESTION, cache.fork(), **padded(whole, 6))
    assert_same(found, forward(model, QUESTION, alone.fork()))
    tokens, logits = steps(model, torch.cat([ids, QUESTION], 1), cache, attention_mask=whole)
    expected_tokens, expected = steps(model, FULL, alone)
    assert_same(logits, expected)
    assert torch.equal(tokens, expected_tokens)


# -- 11: packed sequences ----------------------------------------------------------------------------------------------

RESTARTED = torch.cat([torch.arange(20), torch.arange(23)])[None]
PACKED: dict[str, dict[str, Any]] = {
    "positions that start again": {"position_ids": RESTARTED},
    "positions on three axes": {"position_ids": RESTARTED.expand(3, 1, -1)},
    "a first sequence of one token": {"position_ids": torch.cat([torch.zeros(1), torch.arange(42)]).long()[None]},
    "seq_idx": {"seq_idx": torch.tensor([[0] * 20 + [1] * 23])},
    "cu_seq_lens_q": {"cu_seq_lens_q": torch.tensor([0, 20, 43])},
    "behind pads": {
        "position_ids": torch.cat([torch.ones(5), torch.arange(20), torch.arange(18)]).long()[None],
        "attention_mask": torch.tensor([[0] * 5 + [1] * 38]),
    },
}


@pytest.mark.parametrize("case", PACKED)
def test_11_packed_sequences_are_refused(dense: Any, case: str) -> None:
    cache = GateSightCache(random_estimator(dense), dense, kept_fraction=0.3)
    with pytest.raises(ValueError, match=r"packed sequences.*share GDN states"):
        forward(dense, CONTEXT, cache, **PACKED[case])
    assert cache.get_seq_length() == 0
    forward(dense, CONTEXT, cache)
    expected = compacted(dense, CONTEXT, kept_fraction=0.3)
    assert cache.compact().kept_per_layer == expected.report().kept_per_layer
    assert torch.equal(generate(dense, FULL, cache), generate(dense, FULL, expected))


@pytest.mark.parametrize("pads", [0, 1], ids=["positions of pads 0", "positions of pads 1"])
@pytest.mark.parametrize("axes", [None, 3])
def test_11_positions_of_padded_rows_and_of_chunks_are_no_packing(dense: Any, pads: int, axes: int | None) -> None:
    """Both ways to number pads in use; the second row begins within the second chunk."""
    ids, mask = left_padded([CONTEXT, random_ids(17)])
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, pads)
    cache = GateSightCache(random_estimator(dense), dense, kept_fraction=0.3)
    for start, stop in ((0, 20), (20, 42), (42, 43)):
        of_chunk = positions[:, start:stop]
        of_chunk = of_chunk if axes is None else of_chunk.expand(axes, -1, -1)
        forward(dense, ids[:, start:stop], cache, attention_mask=mask[:, :stop], position_ids=of_chunk)
    expected = compacted(dense, ids, mask=mask, kept_fraction=0.3)
    assert cache.compact().kept_per_layer == expected.report().kept_per_layer


def test_11_positions_may_leave_numbers_out(dense: Any) -> None:
    """They only have to rise: transformers itself takes any that do, for one sequence with a cache."""
    positions = torch.arange(LENGTH)[None] * 2
    cache = GateSightCache(random_estimator(dense), dense, kept_fraction=1.0)
    expected = DynamicCache(config=dense.config)
    found, logits = (forward(dense, CONTEXT, held, position_ids=positions) for held in (cache, expected))
    assert torch.equal(found, logits)


# -- 16, 19, 22 --------------------------------------------------------------------------------------------------------


def test_16_continuous_batching_fails_by_itself_and_leaves_the_model_usable(dense: Any, parent: GateSightCache) -> None:
    """transformers has no pages for linear attention; it says so with or without our hooks."""
    with pytest.raises(ValueError, match="linear_attention"):
        dense.generate_batch([CONTEXT[0].tolist()], generation_config=GenerationConfig(max_new_tokens=2))
    dense.set_attn_implementation("sdpa")
    expected = compacted(dense, CONTEXT, kept_fraction=0.3)
    assert torch.equal(generate(dense, FULL, parent), generate(dense, FULL, expected))


@pytest.mark.parametrize("length", [1, 6])
def test_19_default_and_explicit_positions_agree(dense: Any, plain: Any, parent: GateSightCache, length: int) -> None:
    new = QUESTION[:, :length]
    with Oracle(plain, evicted_of(parent, 0, LENGTH)) as oracle:
        expected = oracle.logits(CONTEXT, new)
    assert_same(forward(dense, new, parent.fork()), expected)
    assert_same(forward(dense, new, parent.fork(), position_ids=torch.arange(LENGTH, LENGTH + length)[None]), expected)


@pytest.mark.parametrize("length", [1, 6])
@pytest.mark.parametrize("start", ["nothing", "the entries held", "the last token"])
def test_19_positions_of_the_entries_held_are_refused(
    dense: Any, parent: GateSightCache, length: int, start: str
) -> None:
    """Counting from what is kept, not from what was seen, is the silent error of naive eviction."""
    held = {"nothing": 0, "the entries held": parent.report().physical_lengths[0], "the last token": LENGTH - 1}
    first, child = held[start], parent.fork()
    with pytest.raises(ValueError, match="go on from the tokens seen"):
        forward(dense, QUESTION[:, :length], child, position_ids=torch.arange(first, first + length)[None])
    assert child.get_seq_length() == LENGTH
    assert torch.equal(forward(dense, QUESTION, child), forward(dense, QUESTION, parent.fork()))


def test_19_all_ids_are_not_fed_again(dense: Any, parent: GateSightCache) -> None:
    """A prompt longer than what is held: only the question and the answer are added."""
    held, child = parent.report().physical_lengths, parent.fork()
    assert max(held) < LENGTH
    generate(dense, FULL, child)
    assert child.report().physical_lengths == [n + 6 + 3 for n in held]
    assert child.get_seq_length() == LENGTH + 6 + 3


def test_22_a_shared_prefix_is_reused_exactly_or_the_miss_is_said(dense: Any, parent: GateSightCache) -> None:
    """A checkpoint at the context's end, restored for each question; a prefix that ends inside it cannot be."""
    checkpoint = parent.fork()
    first = generate(dense, FULL, parent)
    fresh = compacted(dense, CONTEXT, kept_fraction=0.3)
    other = torch.cat([CONTEXT, random_ids(4, seed=4)], 1)
    assert torch.equal(generate(dense, other, checkpoint.fork()), generate(dense, other, fresh.fork()))
    assert torch.equal(generate(dense, FULL, checkpoint.fork()), first)
    edited = FULL.clone()
    edited[0, 30:] = random_ids(19, seed=5)
    with pytest.raises(CacheStateError, match=r"at token 3\d of 43"):
        generate(dense, edited, checkpoint)
    with pytest.raises(CacheStateError, match="shorter prefix"):
        generate(dense, CONTEXT[:, :30], checkpoint)


# -- 27: needles by depth ----------------------------------------------------------------------------------------------


def at_depth(depth: float, length: int = 512) -> documents.Document:
    """One needle of the reference model's kind with other ones around it, at a share of the context."""
    rng = random.Random(round(depth * 100))
    sentences = [list(s) for s in documents.noise(rng, length - 48, False)]
    key, *others = rng.sample(documents.MAGIC_WORDS, 4)
    numbers = {word: [rng.choice(documents.DIGITS) for _ in range(4)] for word in (key, *others)}
    for other in others:
        sentences.insert(rng.randint(0, len(sentences)), documents.needle(other, numbers[other]))
    sentences.insert(round(depth * len(sentences)), documents.needle(key, numbers[key]))
    words = [word for sentence in sentences for word in sentence]
    return documents.Document(words, [documents.Question(documents.ask_number(key), numbers[key])], [])


def test_27_a_needle_is_found_at_every_depth_with_a_tenth_of_the_cache(bundled: Any) -> None:
    model, tokenizer = bundled
    for depth in (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0):
        document = at_depth(depth)
        session = Session.open(model, tokenizer, ESTIMATOR_PATH, document.text, kept_fraction=0.1)
        assert session.report().achieved_fraction == pytest.approx(0.1, abs=0.01)
        (question,) = document.questions
        assert session.ask(question.text, max_new_tokens=5) == question.expected, depth


def test_27_triattention_counts_the_rotary_frequencies_only(dense: Any) -> None:
    """Channels without RoPE taken for frequencies are noise: changing them must not change a score."""
    scorer = TriAttention.calibrate(dense, CONTEXT, nope="none")
    prefill = prefilled(dense, CONTEXT, scorer=scorer).prefill()
    expected = scorer.score(prefill)
    rotary = int(dense.config.head_dim * 0.25)
    for keys in prefill.keys:
        keys[..., rotary:] = torch.randn(keys[..., rotary:].shape)
    assert all(torch.equal(a, b) for a, b in zip(scorer.score(prefill), expected, strict=True))
    for keys in prefill.keys:
        keys[..., :rotary] *= -1
    assert not any(torch.equal(a, b) for a, b in zip(scorer.score(prefill), expected, strict=True))
