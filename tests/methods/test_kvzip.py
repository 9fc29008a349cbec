"""KVzip and the oracle scorer replay text on forks: their scores, and that the parent never notices."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from gatesight_hf import CacheStateError, GateSightCache
from gatesight_hf.methods import KVzip, OracleScorer
from gatesight_hf.methods.kvzip import FIRST_PROMPT, LATER_PROMPT, replay_scores
from gatesight_hf.models import HybridSpec
from gatesight_hf.scoring import Recorder, Scorer

from ..helpers.methods_reference import recorded, replayed_attention
from ..helpers.models import tiny_model
from ..helpers.oracle import Oracle, assert_same, capture_attention, evicted_of
from ..helpers.replays import CONTINUATIONS, tokenizer
from ..helpers.running import cache_kwargs, compacted, forward, left_padded, prefilled, random_ids, steps

pytestmark = pytest.mark.core

LENGTH = 17


def kvzip(model: Any, **options: Any) -> KVzip:
    return KVzip(model, tokenizer, **{"prompts": ("Repeat.", "Go on at"), **options})


def tensors_of(cache: GateSightCache) -> list[Tensor]:
    """Everything that a cache holds: entries, GDN states, records."""
    layers = [layer.state() for layer in cache.attention_layers]
    states = [[*layer.conv_states.values(), *layer.recurrent_states.values()] for layer in cache.gdn_layers]
    held = [tensor for layer in layers for tensor in layer.values()] + [s for layer in states for s in layer]
    recording = cache.context.recording
    assert recording is not None
    held += [*recording.signals, *recording.hidden, *recording.queries]
    held += [sums for sums in recording._gate_sums if sums is not None]
    return [tensor for tensor in [*held, cache.context.tokens.padding, cache.context.tokens.ids] if tensor is not None]


def hooks(model: Any) -> list[int]:
    return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


# -- scores ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "chunk", "sinks"),
    [(1, 6, 4), (2, 6, 4), (5, 6, 4), (6, 6, 4), (7, 6, 4), (LENGTH, 6, 4), (LENGTH, 2, 4), (LENGTH, 64, 0)],
)
def test_scores_are_those_of_a_replay_on_a_full_cache(
    dense: Any, plain: Any, length: int, chunk: int, sinks: int
) -> None:
    """The replay is run again on a deep copy of a plain cache, and its attention is taken in loops."""
    ids = random_ids(length, seed=length)
    scores = kvzip(dense, chunk=chunk, sinks=sinks).score(prefilled(dense, ids, scorer=Recorder()).prefill())
    _, rows = recorded(dense, ids)
    whole = DynamicCache(config=plain.config)
    forward(plain, ids, whole)
    spec = HybridSpec.from_config(plain.config)
    assert all((of_layer[..., :sinks] >= 1e30).all() for of_layer in scores)
    for start in range(0, length, chunk):
        stop = min(length, start + chunk)
        text = tokenizer("Go on at" if start else "Repeat.", False).input_ids
        quoted = ids[0, max(0, start - 8) : start].tolist()
        replay = torch.tensor([[*text, *quoted, *tokenizer("\n", False).input_ids, *ids[0, start:stop].tolist()]])
        cache = copy.deepcopy(whole)
        with capture_attention(plain, spec, cache) as views:
            forward(plain, replay, cache)
        for j, (view,) in enumerate(views):
            expected = replayed_attention(rows[j][0], sinks, start, stop, view.queries[0], view.keys[0])
            free = slice(max(0, sinks - start), stop - start)
            assert_same(scores[j][0, :, start:stop][:, free].double(), expected[:, free])


def test_replays_are_a_prompt_the_last_eight_tokens_and_the_chunk(dense: Any) -> None:
    """Every replay starts from the end of the context, whatever was replayed before it."""
    ids, seen = random_ids(LENGTH), []
    cache = prefilled(dense, ids, scorer=Recorder())

    def spy(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        fork = next(value for value in kwargs.values() if isinstance(value, GateSightCache))
        assert fork is not cache
        seen.append((fork.get_seq_length(), kwargs["input_ids"][0].tolist()))

    handle = dense.model.register_forward_pre_hook(spy, with_kwargs=True)
    try:
        cache.score(KVzip(dense, tokenizer, chunk=7, suffix="<assistant>"))
    finally:
        handle.remove()

    def encoded(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    context, suffix = ids[0].tolist(), encoded("<assistant>")
    assert seen == [
        (LENGTH, encoded(FIRST_PROMPT) + suffix + context[:7]),
        (LENGTH, encoded(LATER_PROMPT) + context[:7] + suffix + context[7:14]),
        (LENGTH, encoded(LATER_PROMPT) + context[6:14] + suffix + context[14:]),
    ]


class Templated:
    """A tokenizer with a chat template."""

    chat_template = "any"

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        return tokenizer(text, add_special_tokens)

    def apply_chat_template(self, messages: Any, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and add_generation_prompt
        return f"<s><user>{messages[0]['content']}</user><assistant>"


def test_the_suffix_is_the_chat_templates(dense: Any) -> None:
    """The end of the turn and the assistant's header, unless another one was given."""
    ids = random_ids(LENGTH)[0]
    for options, suffix in (({}, "</user><assistant>"), ({"suffix": "|"}, "|"), ({"suffix": ""}, "")):
        prompt = KVzip(dense, Templated(), **options)._prompt(ids, 0).tolist()
        assert prompt == tokenizer(FIRST_PROMPT, False).input_ids + tokenizer(suffix, False).input_ids
    plain = KVzip(dense, tokenizer)._prompt(ids, 0).tolist()
    assert plain == tokenizer(FIRST_PROMPT, False).input_ids + tokenizer("\n", False).input_ids
    changed = Templated()
    changed.apply_chat_template = lambda *given, **options: "REPEAT."  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="suffix="):
        KVzip(dense, changed)._prompt(ids, 0)


def test_prompts_may_be_empty(dense: Any) -> None:
    scorer = kvzip(dense, prompts=("", ""), suffix="", chunk=10)
    for scores in prefilled(dense, random_ids(LENGTH), scorer=scorer).score().of:
        assert ((scores > 0) & (scores[..., -1:] <= 1)).all()


def test_replay_scores_by_hand() -> None:
    """One sink, two chunk keys, a replay of two zero queries: 1 of 4 keys for the first, 1 of 5 for the second."""
    zeros = torch.zeros
    scores = replay_scores(zeros(2, 1, 4), zeros(1, 1, 4), zeros(1, 2, 4), zeros(1, 2, 4), 0.5)
    assert_same(scores, torch.tensor([[1 / 4, 1 / 4]]))
    queries = zeros(2, 2, 4)
    queries[1, 1, 0] = 2.0  # the second query's second head sees the first chunk key three times as well
    chunk = zeros(1, 2, 4)
    chunk[0, 0, 0] = torch.tensor(3.0).log()
    assert_same(replay_scores(queries, zeros(1, 1, 4), chunk, zeros(1, 2, 4), 0.5), torch.tensor([[3 / 7, 1 / 4]]))


def test_long_replays_are_scored_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys = torch.randn(11, 4, 8), torch.randn(2, 25, 8)
    parts = (keys[:, :3], keys[:, 3:14], keys[:, 14:], 0.3)
    whole = replay_scores(queries, *parts)
    monkeypatch.setattr("gatesight_hf.methods.kvzip.QUERIES_PER_STEP", 4)
    assert_same(replay_scores(queries, *parts), whole, 1e-6)


@pytest.mark.parametrize("chunk", [4, 64])
def test_left_padded_rows_are_scored_as_alone(dense: Any, chunk: int) -> None:
    rows = [random_ids(n, seed=n) for n in (LENGTH, 6, 1)]
    ids, mask = left_padded(rows)
    scorer = kvzip(dense, chunk=chunk)
    together = prefilled(dense, ids, mask=mask, scorer=scorer).score().of
    for r, row in enumerate(rows):
        for found, expected in zip(together, prefilled(dense, row, scorer=scorer).score().of, strict=True):
            free = expected[0] < 1e30
            assert_same(found[r, :, -row.shape[1] :][free], expected[0][free])
            assert torch.equal(found[r, :, -row.shape[1] :] >= 1e30, ~free)


def test_chunked_prefills_are_scored_the_same(dense: Any) -> None:
    whole, parts = (
        prefilled(dense, random_ids(LENGTH), chunks, scorer=kvzip(dense, sinks=0)).score().of
        for chunks in (None, [9, 1, 7])
    )
    for found, expected in zip(parts, whole, strict=True):
        assert_same(found, expected)


def test_a_bfloat16_model_is_scored_nearly_as_in_float32(dense: Any) -> None:
    model, ids = tiny_model().bfloat16(), random_ids(LENGTH)
    for found, expected in zip(
        prefilled(model, ids, scorer=kvzip(model, sinks=0)).score().of,
        prefilled(dense, ids, scorer=kvzip(dense, sinks=0)).score().of,
        strict=True,
    ):
        assert found.dtype == torch.float32
        assert (found - expected).abs().max() < 0.15 * expected.max()


def test_oracle_scores_are_utilities_for_the_continuations(dense: Any) -> None:
    """Each entry is really left out: the change of a group's outputs together, largest over queries, continuations."""
    ids = random_ids(LENGTH)
    scores = OracleScorer(dense, CONTINUATIONS).score(prefilled(dense, ids, scorer=Recorder()).prefill())
    expected = torch.zeros(2, 2, LENGTH, dtype=torch.float64)
    for continuation in CONTINUATIONS:
        _, rows = recorded(dense, torch.cat([ids, torch.tensor([continuation])], 1))
        for j, head, t, i in itertools.product(range(2), range(2), range(len(continuation)), range(LENGTH)):
            (row,) = rows[j]
            seen, square = LENGTH + t + 1, 0.0
            rest = [k for k in range(seen) if k != i]
            values = row.values[:, head]
            for g in range(3):
                logits = row.rotated_keys[:seen, head] @ row.rotated_queries[seen - 1, 3 * head + g] / 32**0.5
                change = logits[rest].softmax(0) @ values[rest] - logits.softmax(0) @ values[:seen]
                square += float(change.square().sum())
            expected[j, head, i] = max(expected[j, head, i], square**0.5)
    for found, of_layer in zip(scores, expected, strict=True):
        assert_same(found[0].double(), of_layer / of_layer.amax(-1, keepdim=True))


def test_oracle_reads_a_padded_row_and_embeddings(dense: Any) -> None:
    """A row of a batch by itself still has its padding."""
    row, scorer = random_ids(6), OracleScorer(dense, CONTINUATIONS)
    expected = prefilled(dense, row, scorer=scorer).score().of
    batch, mask = left_padded([random_ids(9), row])
    cache = prefilled(dense, batch[1:], mask=mask[1:], scorer=scorer)
    for found, alone in zip(cache.score().of, expected, strict=True):
        assert_same(found[..., 3:], alone)
    cache.compact()
    embedded = GateSightCache(scorer, dense)
    dense(inputs_embeds=dense.get_input_embeddings()(row), **cache_kwargs(dense, embedded))
    for found, alone in zip(embedded.score().of, expected, strict=True):
        assert torch.equal(found, alone)


def test_the_oracle_keeps_what_its_question_needs(dense: Any) -> None:
    """It must lose less on its own question than the reverse choice."""
    ids, new = random_ids(LENGTH), torch.tensor([CONTINUATIONS[0]])
    cache = prefilled(dense, ids, scorer=Recorder(), kept_fraction=0.5, allocation="flat")
    full = forward(dense, new, cache.fork(kept_fraction=1.0))
    best = cache.score(OracleScorer(dense, (CONTINUATIONS[0],)))
    worst = type(best)([-scores for scores in best.of])
    losses = []
    for scores in (best, worst):
        fork = cache.fork(scorer=scores)
        fork.compact()
        losses.append((forward(dense, new, fork) - full).abs().mean())
    assert losses[0] < 0.8 * losses[1]


# -- the parent --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("kind", ["kvzip", "oracle"])
def test_replays_leave_the_parent_as_it_was(dense: Any, kind: str, compact: bool) -> None:
    scorer: Scorer = kvzip(dense, chunk=6) if kind == "kvzip" else OracleScorer(dense, CONTINUATIONS)
    ids, question = random_ids(LENGTH), random_ids(5, seed=1)
    cache = prefilled(dense, ids, scorer=scorer, kept_fraction=0.5)
    held = tensors_of(cache)
    before, report, counts = [tensor.clone() for tensor in held], cache.report(), hooks(dense)
    untouched = cache.fork()
    scores = cache.score()
    assert len(tensors_of(cache)) == len(before)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(cache), before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True)), "written to in place"
    assert cache.report() == report
    assert hooks(dense) == counts
    if compact:
        cache.compact()
        untouched = untouched.fork(scorer=scores)
        untouched.compact()
    full = torch.cat([ids, question], 1)
    options = {} if compact else {"kept_fraction": 1.0}
    tokens, logits = steps(dense, full, cache.fork(**options))
    expected_tokens, expected_logits = steps(dense, full, untouched.fork(**options))
    assert torch.equal(tokens, expected_tokens)
    assert torch.equal(logits, expected_logits)


def test_kvzip_works_inside_generate(dense: Any, plain: Any) -> None:
    ids = random_ids(LENGTH)
    cache = GateSightCache(kvzip(dense, chunk=6), dense, kept_fraction=0.4, allocation="global")
    tokens, logits = steps(dense, ids, cache)
    direct = compacted(dense, ids, scorer=kvzip(dense, chunk=6), kept_fraction=0.4, allocation="global")
    evicted = evicted_of(cache, 0, LENGTH)
    assert all(torch.equal(a, b) for a, b in zip(evicted, evicted_of(direct, 0, LENGTH), strict=True))
    assert not torch.stack(evicted)[..., :4].any(), "sinks stay"
    with Oracle(plain, evicted) as oracle:
        expected_tokens, expected_logits = oracle.steps(ids)
    assert_same(logits, expected_logits)
    assert torch.equal(tokens, expected_tokens)


def test_kvzip_works_inside_generate_of_a_left_padded_batch(dense: Any, plain: Any) -> None:
    rows = [random_ids(n, seed=n) for n in (LENGTH, 6)]
    ids, mask = left_padded(rows)
    cache = GateSightCache(kvzip(dense, chunk=6, sinks=2), dense, kept_fraction=0.4)
    tokens, logits = steps(dense, ids, cache, attention_mask=mask)
    for r, row in enumerate(rows):
        with Oracle(plain, evicted_of(cache, r, row.shape[1])) as oracle:
            expected_tokens, expected_logits = oracle.steps(row)
        assert_same(logits[r : r + 1], expected_logits)
        assert torch.equal(tokens[r : r + 1], expected_tokens)


@pytest.mark.parametrize("kind", ["kvzip", "oracle"])
def test_a_replay_that_fails_leaves_no_hook_and_a_cache_that_can_go_on(dense: Any, kind: str) -> None:
    """kvpress issue 244."""
    scorer: Scorer = kvzip(dense, chunk=6) if kind == "kvzip" else OracleScorer(dense, CONTINUATIONS)
    cache = prefilled(dense, random_ids(LENGTH), scorer=scorer, kept_fraction=0.5)
    expected, counts, calls = cache.score().of, hooks(dense), []
    before = [tensor.clone() for tensor in tensors_of(cache)]

    def fail(module: Any, args: Any, output: Any) -> None:
        calls.append(module)
        if len(calls) == 2:
            raise RuntimeError("out of memory, say")

    handle = dense.model.layers[5].register_forward_hook(fail)  # in the middle of the second replay
    try:
        with pytest.raises(RuntimeError, match="out of memory, say"):
            cache.compact()
    finally:
        handle.remove()
    assert hooks(dense) == counts
    assert not cache.is_compacted
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(cache), before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(cache.score().of, expected, strict=True))
    assert sum(cache.compact().physical_lengths) == LENGTH


# -- what they refuse --------------------------------------------------------------------------------------------------


def test_kvzip_needs_token_ids(dense: Any) -> None:
    cache = GateSightCache(kvzip(dense), dense)
    dense(inputs_embeds=dense.get_input_embeddings()(random_ids(9)), **cache_kwargs(dense, cache))
    with pytest.raises(CacheStateError, match=r"token ids.*embeddings"):
        cache.compact()
    assert not cache.is_compacted


def test_kvzip_of_another_model_is_refused(dense: Any) -> None:
    with pytest.raises(ValueError, match=r"KVzip was given .* but the cache is for"):
        GateSightCache(kvzip(tiny_model(num_key_value_heads=3)), dense)


def test_the_oracle_needs_continuations_and_one_row(dense: Any) -> None:
    for continuations in ((), ((1, 2), ())):
        with pytest.raises(ValueError, match="at least one continuation"):
            GateSightCache(OracleScorer(dense, continuations), dense)
    with pytest.raises(ValueError, match="batch of 2 rows"):
        prefilled(dense, random_ids(9, rows=2), scorer=OracleScorer(dense, CONTINUATIONS)).score()


def test_messages_do_not_print_a_model(dense: Any) -> None:
    for scorer in (kvzip(dense), OracleScorer(dense, CONTINUATIONS)):
        assert len(repr(scorer)) < 200
