"""Modes of `generate`: each equals `DynamicCache` at p = 1, and the -inf-mask oracle below it.

Greedy search, beams over forks, sampling with a seed, several questions at once and ways to pass ids are in
test_serving.py; prefill in chunks in test_cache.py; refusals in test_misuse.py.
"""

import copy
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)

from gatesight_hf import CacheStateError, GateSightCache
from gatesight_hf.reference import ESTIMATOR_PATH

from ..helpers.models import random_estimator, tiny_model
from ..helpers.oracle import Oracle, assert_same, evicted_of
from ..helpers.running import (
    CONTEXT,
    FULL,
    LENGTH,
    QUESTION,
    cache_kwargs,
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


def even_tokens(batch: int, ids: Tensor) -> list[int]:
    return list(range(2, 128, 2))


MODES: dict[str, dict[str, Any]] = {
    "sampling": {"do_sample": True, "temperature": 1.3, "top_k": 20, "top_p": 0.9},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "several beams": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5},
    "beam sampling": {"num_beams": 3, "do_sample": True, "num_return_sequences": 2},
    "penalties": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    "allowed tokens": {"prefix_allowed_tokens_fn": even_tokens},
    "a configuration": {"generation_config": GenerationConfig(num_beams=2, min_new_tokens=3, do_sample=True)},
    "chunks": {"generation_config": GenerationConfig(prefill_chunk_size=9)},
    "beams over chunks": {"generation_config": GenerationConfig(prefill_chunk_size=9, num_beams=3)},
}
modes = pytest.mark.parametrize("mode", MODES)


def sample(run: Any, *args: Any, mode: str, **arguments: Any) -> Tensor:
    torch.manual_seed(5)
    options = dict(MODES[mode])
    if (config := options.get("generation_config")) is not None:
        arguments["do_sample"] = config.do_sample
        if isinstance(getattr(run, "__self__", None), Oracle):  # which prefills at once
            options["generation_config"] = config = copy.copy(config)
            config.prefill_chunk_size = None
    return run(*args, **{"tokens": 6, **options, **arguments})


# -- modes -------------------------------------------------------------------------------------------------------------


@modes
@pytest.mark.parametrize("rows", [1, 2])
def test_keeping_all_equals_a_dynamic_cache_with_the_same_seed(dense: Any, mode: str, rows: int) -> None:
    ids, mask = left_padded([CONTEXT, random_ids(17)][:rows])
    expected = sample(generate, dense, ids, DynamicCache(config=dense.config), mode=mode, attention_mask=mask)
    cache = GateSightCache(random_estimator(dense), dense, kept_fraction=1.0)
    assert torch.equal(sample(generate, dense, ids, cache, mode=mode, attention_mask=mask), expected)
    assert cache.is_compacted


@modes
def test_a_first_call_equals_the_oracle(dense: Any, plain: Any, attention: str, mode: str) -> None:
    cache = GateSightCache(random_estimator(dense), dense, kept_fraction=0.3)
    found = sample(generate, dense, CONTEXT, cache, mode=mode)
    assert cache.report().achieved_fraction == pytest.approx(0.3, abs=0.01)
    with Oracle(plain, evicted_of(cache, 0, LENGTH)) as oracle:
        assert torch.equal(found, sample(oracle.generate, CONTEXT, mode=mode))


@modes
def test_a_child_equals_the_oracle(dense: Any, plain: Any, parent: GateSightCache, mode: str) -> None:
    found = sample(generate, dense, FULL, parent.fork(), mode=mode)
    with Oracle(plain, evicted_of(parent, 0, LENGTH)) as oracle:
        assert torch.equal(found, sample(oracle.generate, FULL, mode=mode))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    """Bit for bit at p = 1; below it as near the oracle, in steps of the dtype at 1, as in float32."""
    model, plain = tiny_model().to(dtype), tiny_model().to(dtype)
    plain.set_attn_implementation("eager")
    expected = steps(model, CONTEXT, DynamicCache(config=model.config))
    cache = GateSightCache(random_estimator(model), model, kept_fraction=1.0)
    for found, step in zip(steps(model, CONTEXT, cache), expected, strict=True):
        assert torch.equal(found, step)
    cache = compacted(model, CONTEXT, kept_fraction=0.3)
    assert all(layer.kept_keys.dtype == layer.kept_values.dtype == dtype for layer in cache.attention_layers)
    with Oracle(plain, evicted_of(cache, 0, LENGTH)) as oracle:
        expected_logits = oracle.logits(CONTEXT, QUESTION)
    assert_same(
        forward(model, QUESTION, cache), expected_logits, 1e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    )


# -- what is passed in and handed out ----------------------------------------------------------------------------------


def test_embeddings_in_place_of_ids(dense: Any, plain: Any) -> None:
    embed = dense.get_input_embeddings()
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    cache = GateSightCache(random_estimator(dense), dense, kept_fraction=0.3)
    found = dense.generate(inputs_embeds=embed(CONTEXT), **cache_kwargs(dense, cache), **options)
    with Oracle(plain, evicted_of(cache, 0, LENGTH)) as oracle:
        assert torch.equal(found, oracle.generate(CONTEXT))


def test_embeddings_that_go_on(dense: Any, parent: GateSightCache) -> None:
    """Those of all tokens, of which the seen ones are not read; of new tokens alone they are refused with the mend."""
    embed, expected = dense.get_input_embeddings(), generate(dense, FULL, parent.fork())
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    unread = torch.nn.functional.pad(embed(QUESTION), (0, 0, LENGTH, 0))
    for embeds in (embed(FULL), unread):
        for mask in ({}, {"attention_mask": torch.ones(1, LENGTH + 6, dtype=torch.long)}):
            found = dense.generate(inputs_embeds=embeds, **cache_kwargs(dense, parent.fork()), **mask, **options)
            assert torch.equal(found, expected)
    longer = embed(random_ids(LENGTH + 1))
    whole = torch.ones(1, 2 * LENGTH + 1, dtype=torch.long)
    for embeds, given in ((embed(QUESTION), {}), (longer, {"attention_mask": whole})):
        with pytest.raises(CacheStateError, match="those of all tokens"):
            dense.generate(inputs_embeds=embeds, **cache_kwargs(dense, parent), **given, **options)
    assert torch.equal(generate(dense, FULL, parent), expected)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_dictionary_with_scores(dense: Any, plain: Any, parent: GateSightCache, beams: int) -> None:
    options = {"max_new_tokens": 4, "do_sample": False, "num_beams": beams, "return_dict_in_generate": True}
    options |= {"output_scores": True, "output_logits": True}
    child = parent.fork()
    found = dense.generate(FULL, **cache_kwargs(dense, child), **options)
    with Oracle(plain, evicted_of(parent, 0, LENGTH)) as oracle:
        held = DynamicCache(config=plain.config)
        expected = oracle.model.generate(FULL, **cache_kwargs(plain, held), **options)
    assert torch.equal(found.sequences, expected.sequences)
    for name in ("scores", "logits"):
        for a, b in zip(getattr(found, name), getattr(expected, name), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-5)
    if beams > 1:
        torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, rtol=0, atol=1e-5)
    assert child in (found.get("cache"), found.get("past_key_values"))


class After(StoppingCriteria):
    """Each row stops after a number of tokens of its own."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids.shape[1] >= self.lengths


def test_rows_that_stop_apart_equal_rows_alone(dense: Any, parent: GateSightCache) -> None:
    questions = torch.cat([QUESTION, random_ids(6, seed=10)])
    whole = torch.cat([CONTEXT.expand(2, -1), questions], 1)
    stop = StoppingCriteriaList([After(LENGTH + 6 + 2, LENGTH + 6 + 5)])
    # With an end token, rows that have stopped go on as pads.
    options = {"stopping_criteria": stop, "pad_token_id": 0, "eos_token_id": 1, "max_new_tokens": 8, "do_sample": False}
    found = dense.generate(whole, **cache_kwargs(dense, parent.fork()), **options)[:, LENGTH + 6 :]
    assert found.shape == (2, 5)
    for row, length in enumerate((2, 5)):
        alone = generate(dense, whole[row : row + 1], parent.fork(), tokens=length)
        assert torch.equal(found[row : row + 1, :length], alone)
    assert (found[0, 2:] == 0).all()


def test_streamers_get_every_token_as_it_comes(bundled: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = bundled
    inputs = tokenizer("the sky is blue . " * 8 + "one of the special", return_tensors="pt")
    cache = GateSightCache.from_pretrained(ESTIMATOR_PATH, model=model, kept_fraction=0.5)
    model(**inputs, **cache_kwargs(model, cache))
    cache.compact()
    ids = torch.cat([inputs.input_ids, tokenizer("magic", return_tensors="pt").input_ids], 1)
    answer = generate(model, ids, cache.fork(), tokens=6)
    text = tokenizer.decode(answer[0])
    generate(model, ids, cache.fork(), tokens=6, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.split() == text.split()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = Thread(target=generate, args=(model, ids, cache.fork()), kwargs={"tokens": 6, "streamer": streamer})
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces).split() == text.split() and len(pieces) > 2


# -- the batch dimension -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before compaction", "after compaction", "with a tail"])
def test_rows_are_repeated_chosen_and_reordered(dense: Any, when: str) -> None:
    """Ragged rows a and b become a b b a; a layer's entries, pads, states and the record must all follow."""
    rows = [CONTEXT, random_ids(17)]
    ids, mask = left_padded(rows)
    cache = prefilled(dense, ids, mask=mask, kept_fraction=0.3)
    if when != "before compaction":
        cache.compact()
    tail = 0
    if when == "with a tail":
        tail = 3
        whole = torch.nn.functional.pad(mask, (0, tail), value=1)
        forward(dense, random_ids(tail, seed=3).expand(2, -1), cache, **padded(whole, tail))
    cache.batch_repeat_interleave(2)  # a a b b
    cache.reorder_cache(torch.tensor([0, 2, 3, 1]))  # a b b a
    cache.batch_select_indices(torch.tensor([3, 1]))  # a b
    cache.reorder_cache(torch.tensor([1, 0]))  # b a
    if when == "before compaction":
        cache.compact()
    assert cache.batch_size == 2
    found = forward(dense, QUESTION.expand(2, -1), cache)
    for row, context in zip(found, reversed(rows), strict=True):
        alone = compacted(dense, context, kept_fraction=0.3)
        if tail:
            forward(dense, random_ids(tail, seed=3), alone)
        assert_same(row[None], forward(dense, QUESTION, alone))
        assert sum(cache.report().kept_per_layer[int(context is CONTEXT)]) == sum(alone.report().kept_per_layer[0])


@pytest.mark.parametrize("form", ["all ids", "new ids"])
def test_turns_of_different_modes_on_one_cache(dense: Any, plain: Any, parent: GateSightCache, form: str) -> None:
    """Greedy, sampled, greedy: each answer is the oracle's for all that was said."""
    said = CONTEXT
    turns: list[dict[str, Any]] = [{}, {"do_sample": True}, {"prefill_chunk_size": 4}]
    with Oracle(plain, evicted_of(parent, 0, LENGTH)) as oracle:
        for turn, options in enumerate(turns):
            # The last token of an answer is not in the cache yet.
            said = torch.cat([said, random_ids(5, seed=50 + turn)], 1)
            new = said[:, parent.get_seq_length() :]
            torch.manual_seed(turn)
            expected = oracle.generate(said, do_sample=options.get("do_sample", False))
            torch.manual_seed(turn)
            answer = generate(dense, said if form == "all ids" else new, parent, new=form == "new ids", **options)
            assert torch.equal(answer, expected)
            said = torch.cat([said, answer], 1)


def test_a_cache_of_beams_says_that_it_cannot_go_on(dense: Any, parent: GateSightCache) -> None:
    child = parent.fork()
    generate(dense, FULL, child, num_beams=3)
    for act in (lambda: generate(dense, QUESTION, child, new=True), lambda: forward(dense, QUESTION, child)):
        with pytest.raises(ValueError, match=r"holds 3 rows .* go on from a fork made before"):
            act()


# -- modes that transformers keeps elsewhere ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "high"},
    ],
    ids=["group beams", "contrastive search", "DoLa"],
)
def test_modes_that_moved_to_the_hub_say_so_and_change_nothing(
    dense: Any, parent: GateSightCache, options: dict[str, Any]
) -> None:
    expected, child = generate(dense, FULL, parent.fork()), parent.fork()
    with pytest.raises(ValueError, match="trust_remote_code"):
        generate(dense, FULL, child, **options)
    assert torch.equal(generate(dense, FULL, child), expected)


@pytest.mark.parametrize(
    "options",
    [{"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 2}, {"use_mtp": True}],
    ids=lambda options: next(iter(options)),
)
def test_assisted_decoding_is_refused_wherever_it_is_asked_for(
    dense: Any, parent: GateSightCache, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ((name, value),) = options.items()
    config = GenerationConfig()
    setattr(config, name, value)
    for given in (options, {"generation_config": config}):
        with pytest.raises(ValueError, match=f"{name}.*rejected tokens cannot be taken out"):
            generate(dense, FULL, parent, **given)
    monkeypatch.setattr(dense.generation_config, name, value, raising=False)
    with pytest.raises(ValueError, match=f"{name}.*rejected tokens cannot be taken out"):
        generate(dense, FULL, parent)
    assert parent.get_seq_length() == LENGTH


def contrastive(model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
                **kwargs: Any) -> Tensor:  # fmt: skip
    """As contrastive search treats a cache: candidates as repeated rows, the best of which is chosen.

    Here the candidate is best after which the model is most certain.
    """
    cache, candidates = kwargs.get("cache", kwargs.get("past_key_values")), 3
    logits = forward(model, input_ids[:, cache.get_seq_length() :], cache)[:, -1]
    for _ in range(4):
        tokens = logits.topk(candidates).indices.T
        cache.batch_repeat_interleave(candidates)
        after = forward(model, tokens, cache)[:, -1]
        best = after.amax(-1).argmax()
        cache.batch_select_indices(best[None])
        input_ids, logits = torch.cat([input_ids, tokens[best][None]], 1), after[best][None]
    return input_ids


def test_a_custom_loop_over_candidates_equals_the_oracle(dense: Any, plain: Any, parent: GateSightCache) -> None:
    found = dense.generate(FULL, custom_generate=contrastive, max_new_tokens=4, **cache_kwargs(dense, parent.fork()))
    ids = FULL
    with Oracle(plain, evicted_of(parent, 0, LENGTH)) as oracle:
        for _ in range(4):
            tokens = oracle.logits(CONTEXT, ids[:, LENGTH:])[:, -1].topk(3).indices[0]
            longer = [torch.cat([ids, token.view(1, 1)], 1) for token in tokens]
            after = [oracle.logits(CONTEXT, one[:, LENGTH:])[0, -1].max() for one in longer]
            ids = longer[int(torch.stack(after).argmax())]
    assert torch.equal(found, ids)


def test_a_custom_loop_that_never_compacts_says_so(dense: Any, parent: GateSightCache, recwarn: Any) -> None:
    cache = GateSightCache(random_estimator(dense), dense, kept_fraction=0.3)
    options = {"custom_generate": contrastive, "max_new_tokens": 4}
    with pytest.warns(UserWarning, match=r"Nothing was compacted.*call compact\(\) first"):
        dense.generate(CONTEXT, **options, **cache_kwargs(dense, cache))
    recwarn.clear()
    dense.generate(FULL, **options, **cache_kwargs(dense, parent))
    assert not [warning for warning in recwarn if "compacted" in str(warning.message)]


def test_logits_processors_of_the_call_see_all_ids(dense: Any, parent: GateSightCache) -> None:
    seen: list[int] = []

    def watch(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(ids.shape[1])
        return scores

    generate(dense, FULL, parent, tokens=3, logits_processor=LogitsProcessorList([watch]))
    assert seen == [LENGTH + 6, LENGTH + 7, LENGTH + 8]
