"""Sparse attention (QSA): heads keep the same entries, kept tokens are regrouped, and their index shrinks with them.

The oracle works on explicit tensors and knows nothing of caches: hidden states of all tokens, kept tokens given.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor
from transformers import DynamicCache

from gatesight_hf import CacheStateError, GateSightCache
from gatesight_hf.attention import named_arguments
from gatesight_hf.budget import ALLOCATIONS
from gatesight_hf.scoring import Recorder, Scores
from gatesight_hf.signals import attach
from gatesight_hf.sparse import SparseAttentionLayer
from gatesight_hf.utility import continuation_utilities

from .conftest import (
    Oracle,
    assert_same,
    cache_kwargs,
    compacted,
    evicted_of,
    forward,
    generate,
    left_padded,
    padded,
    prefilled,
    random_estimator,
    random_ids,
    steps,
    tiny_model,
)

pytestmark = pytest.mark.core

CONTEXT, BUDGET, RATIO, WIDTH, ROTARY = 43, 8, 4, 16, 8
LENGTHS = (CONTEXT, 17, 5)
#: Per-layer embeddings: short convolutions and n-grams of ids, in states of their own.
PLE = {"ple_layer_ids": [2], "ple_embed_dim": 16, "heads_per_ngram": 2, "ngram_vocab_size_base": 50,
       "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 1, "eos_token_id": 1}  # fmt: skip


@pytest.fixture(scope="module")
def sparse() -> Any:
    """A model whose queries attend to 2 blocks of 4 and what fills none yet."""
    return tiny_model("qwen4_exp", indexer_budget=BUDGET)


@pytest.fixture(scope="module")
def plain_sparse() -> Any:
    """The same without hooks, in eager attention."""
    return eager(indexer_budget=BUDGET)


@pytest.fixture(params=["sdpa", "eager"])
def attention(request: pytest.FixtureRequest, sparse: Any) -> Iterator[str]:
    sparse.set_attn_implementation(request.param)
    yield request.param
    sparse.set_attn_implementation("sdpa")


def eager(**options: Any) -> Any:
    model = tiny_model("qwen4_exp", **options)
    model.set_attn_implementation("eager")
    return model


def row_of(length: int) -> Tensor:
    return random_ids(length, seed=length)


def questions_of(count: int, length: int) -> list[Tensor]:
    return [random_ids(length, seed=100 + row) for row in range(count)]


# -- the oracle --------------------------------------------------------------------------------------------------------


def norm(states: Tensor, module: Any) -> Tensor:
    return states * (states.square().mean(-1, keepdim=True) + module.eps).rsqrt() * (1 + module.weight)


def rope(states: Tensor, positions: Tensor) -> Tensor:
    """Of `[n, ..., channels]`, at `[n]`: channel i of the first 8 turns with channel i + 4."""
    angles = positions[:, None] / 10000.0 ** (torch.arange(0, ROTARY, 2) / ROTARY)
    cos, sin = (table.view(len(positions), *[1] * (states.ndim - 2), -1) for table in (angles.cos(), angles.sin()))
    a, b = states[..., : ROTARY // 2], states[..., ROTARY // 2 : ROTARY]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, states[..., ROTARY:]], dim=-1)


def attend(module: Any, hidden: Tensor, new: int, kept: list[int], context: int) -> Tensor:
    """What an attention layer gives its last `new` tokens, `[new, hidden size]`, of one row without padding.

    Args:
        module: Its weights are read.
        hidden: `[tokens, hidden size]`, the layer's inputs so far.
        new: Tokens of the forward.
        kept: What later tokens see of the context.
        context: Its tokens, which all see each other.
    """
    total, width, index = len(hidden), module.head_dim, module.indexer
    ratio, blocks_at_most = index.compress_ratio, index.token_budget // index.compress_ratio
    places = torch.arange(total)
    queries, gate = module.q_proj(hidden).view(total, -1, 2 * width).chunk(2, dim=-1)
    queries = rope(norm(queries, module.q_norm), places)
    keys = rope(norm(module.k_proj(hidden).view(total, -1, width), module.k_norm), places)
    keys = keys.repeat_interleave(module.num_key_value_groups, dim=1)
    values = module.v_proj(hidden).view(total, -1, width).repeat_interleave(module.num_key_value_groups, dim=1)
    projected = index.index_qk_proj(hidden).view(total, -1, WIDTH)
    index_queries, index_keys = rope(norm(projected[:, :-1], index.q_layernorm), places), projected[:, -1]
    outputs = []
    for t in range(total - new, total):
        seen = [s for s in range(t + 1) if t < context or s >= context or s in kept]
        whole = len(seen) // ratio
        attended = seen[whole * ratio :]
        if whole:
            blocks = torch.tensor(seen[: whole * ratio]).view(whole, ratio)
            block_keys = rope(norm(index_keys[blocks].mean(1), index.k_layernorm), blocks[:, 0])
            scores = (index_queries[t] @ block_keys.T).relu().sum(0)
            attended = attended + blocks[scores.topk(min(blocks_at_most, whole)).indices].flatten().tolist()
        mask = torch.full((total,), -torch.inf)
        mask[attended] = 0
        weights = (torch.einsum("hd,shd->hs", queries[t], keys) * width**-0.5 + mask).softmax(-1)
        outputs.append(module.o_proj((torch.einsum("hs,shd->hd", weights, values) * gate[t].sigmoid()).flatten()))
    return torch.stack(outputs)


def kept_of(cache: GateSightCache, row: int, length: int) -> list[list[int]]:
    """Tokens of a row that each layer keeps, the same for all heads."""
    gone = evicted_of(cache, row, length)
    assert all(torch.equal(of_layer, of_layer[:1].expand_as(of_layer)) for of_layer in gone)
    return [(~of_layer[0]).nonzero().flatten().tolist() for of_layer in gone]


@contextmanager
def explicit(model: Any, kept: list[list[int]], *contexts: int) -> Iterator[Any]:
    """Have `attend` give the outputs of the attention layers of one run of one row, which starts here.

    `contexts` are the layers' own, or one for both.
    """
    modules = [layer.self_attn for layer in model.model.layers if hasattr(layer, "self_attn")]

    def hook_of(of_layer: list[int], context: int) -> Any:
        history: list[Tensor] = []

        def hook(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
            history.append(named_arguments(args, kwargs)["hidden_states"][0])
            return attend(module, torch.cat(history), len(history[-1]), of_layer, context)[None], None

        return hook

    hooks = map(hook_of, kept, contexts if len(contexts) == 2 else contexts * 2)
    handles = [m.register_forward_hook(hook, with_kwargs=True) for m, hook in zip(modules, hooks, strict=True)]
    yield DynamicCache(config=model.config)
    for handle in handles:
        handle.remove()


def check_rows(model: Any, plain: Any, cache: GateSightCache, rows: list[Tensor], new: list[Tensor]) -> None:
    """Direct forwards of a question and generation, row by row against the oracle."""
    ids, mask = left_padded(rows)
    question = torch.cat(new)
    whole, whole_mask = torch.cat([ids, question], 1), torch.cat([mask, torch.ones_like(question)], 1)
    logits = forward(model, question, cache.fork(), **padded(whole_mask, question.shape[1]))
    tokens, step_logits = steps(model, whole, cache.fork(), tokens=6, attention_mask=whole_mask)
    for r, (row, asked) in enumerate(zip(rows, new, strict=True)):
        kept = kept_of(cache, r, row.shape[1])
        with explicit(plain, kept, row.shape[1]) as fresh:
            expected = forward(plain, torch.cat([row, asked], 1), fresh)
            assert_same(logits[r : r + 1], expected[:, row.shape[1] :])
        with explicit(plain, kept, row.shape[1]) as fresh:
            expected_tokens, expected_logits = steps(plain, torch.cat([row, asked], 1), fresh, tokens=6)
        assert_same(step_logits[r : r + 1], expected_logits)
        assert torch.equal(tokens[r : r + 1], expected_tokens)


def test_the_oracle_is_the_model_where_nothing_is_evicted(plain_sparse):
    ids = random_ids(CONTEXT)
    with explicit(plain_sparse, [list(range(CONTEXT))] * 2, CONTEXT) as fresh:
        made = forward(plain_sparse, ids, fresh)
    assert_same(forward(plain_sparse, ids, DynamicCache(config=plain_sparse.config)), made)


def test_the_oracle_can_tell(sparse, plain_sparse):
    """Eviction, the token budget and regrouping change logits by far more than the tolerance."""
    row, new = random_ids(CONTEXT), random_ids(6, seed=1)
    cache = compacted(sparse, row, kept_fraction=0.5)
    found, kept = forward(sparse, new, cache.fork()), kept_of(cache, 0, CONTEXT)
    shifted = [of_layer[1:] for of_layer in kept]  # without its first entry, all blocks are others
    for model, wrong in (
        (plain_sparse, [list(range(CONTEXT))] * 2),
        (plain_sparse, kept[::-1]),
        (plain_sparse, shifted),
        (eager(), kept),
    ):
        with explicit(model, wrong, CONTEXT) as fresh:
            other = forward(model, torch.cat([row, new], 1), fresh)[:, CONTEXT:]
        assert (other - found).abs().max() > 1e-3


# -- everything kept ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(CONTEXT,), LENGTHS], ids=["one row", "ragged"])
@pytest.mark.parametrize("question", [1, 6])
def test_keeping_all_equals_a_dynamic_cache_bit_for_bit(sparse, attention, lengths, question):
    ids, mask = left_padded([row_of(length) for length in lengths])
    new = torch.cat(questions_of(len(lengths), question))
    whole, whole_mask = torch.cat([ids, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
    expected = DynamicCache(config=sparse.config)
    before = forward(sparse, ids, expected, **padded(mask, ids.shape[1]))
    cache = GateSightCache(random_estimator(sparse), sparse, kept_fraction=1.0)
    found = forward(sparse, ids, cache, **padded(mask, ids.shape[1]))
    cache.compact()
    assert found[mask.bool()].isfinite().all()
    if not before[mask.bool()].isfinite().all():
        pytest.skip("transformers up to 5.22: the model's own indexer overflows at pads in eager attention")
    assert torch.equal(found[mask.bool()], before[mask.bool()])
    given = padded(whole_mask, question)
    logits = forward(sparse, new, copy.deepcopy(expected), **given)
    assert torch.equal(forward(sparse, new, cache.fork(), **given), logits)
    expected_steps = steps(sparse, whole, expected, attention_mask=whole_mask)
    for found, step in zip(steps(sparse, whole, cache.fork(), attention_mask=whole_mask), expected_steps, strict=True):
        assert torch.equal(found, step)


@pytest.mark.parametrize("chunks", [[20, 22, 1], [1] * CONTEXT], ids=lambda c: f"{len(c)} chunks")
def test_until_compaction_it_is_a_dynamic_cache_bit_for_bit(sparse, attention, chunks):
    cache, expected = GateSightCache(random_estimator(sparse), sparse), DynamicCache(config=sparse.config)
    for part in random_ids(CONTEXT).split(chunks, dim=1):
        assert torch.equal(*(forward(sparse, part, held) for held in (cache, expected)))


@pytest.mark.parametrize("options", [{}, PLE], ids=["plain", "per-layer embeddings"])
def test_bfloat16_keeping_all_equals_a_dynamic_cache_bit_for_bit(options):
    model = tiny_model("qwen4_exp", indexer_budget=BUDGET, **options).bfloat16()
    ids, new = random_ids(CONTEXT), random_ids(6, seed=1)
    expected = DynamicCache(config=model.config)
    forward(model, ids, expected)
    cache = compacted(model, ids, kept_fraction=1.0)
    for part in (new, new[:, :1], new[:, 1:2]):
        assert torch.equal(forward(model, part, cache), forward(model, part, expected))


# -- eviction ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allocation", ALLOCATIONS)
@pytest.mark.parametrize("fraction", [0.9, 0.5, 0.1])
def test_one_row_equals_the_oracle(sparse, plain_sparse, attention, fraction, allocation):
    row = random_ids(CONTEXT)
    cache = compacted(sparse, row, kept_fraction=fraction, allocation=allocation)
    assert sum(map(len, kept_of(cache, 0, CONTEXT))) == int(fraction * 2 * CONTEXT + 0.5)
    assert cache.report().achieved_fraction == pytest.approx(fraction, abs=0.01)
    check_rows(sparse, plain_sparse, cache, [row], questions_of(1, 6))


@pytest.mark.parametrize("question", [1, 6])
@pytest.mark.parametrize("allocation", ["gate", "global"])
@pytest.mark.parametrize("fraction", [0.9, 0.5])
def test_ragged_rows_equal_the_oracle_row_by_row(sparse, plain_sparse, fraction, allocation, question):
    rows = [row_of(length) for length in LENGTHS]
    ids, mask = left_padded(rows)
    cache = compacted(sparse, ids, mask=mask, kept_fraction=fraction, allocation=allocation, protected_prefix=2)
    check_rows(sparse, plain_sparse, cache, rows, questions_of(3, question))


@pytest.mark.parametrize("chunks", [[42, 1], [10, 10, 10, 10, 3], [1] * 43], ids=lambda c: f"{len(c)} of {c[0]}")
def test_chunked_prefill_equals_the_oracle(sparse, plain_sparse, chunks):
    row = random_ids(CONTEXT)
    cache = compacted(sparse, row, chunks, kept_fraction=0.5)
    check_rows(sparse, plain_sparse, cache, [row], questions_of(1, 6))


@pytest.mark.parametrize(("ratio", "budget"), [(1, 5), (3, 6), (8, 8)])
def test_blocks_of_other_sizes_equal_the_oracle(ratio, budget):
    options = {"indexer_compress_ratio": ratio, "indexer_budget": budget}
    model, rows = tiny_model("qwen4_exp", **options), [row_of(length) for length in (CONTEXT, 17)]
    ids, mask = left_padded(rows)
    cache = compacted(model, ids, mask=mask, kept_fraction=0.6)
    check_rows(model, eager(**options), cache, rows, questions_of(2, 6))


@pytest.mark.parametrize("pieces", [[1, 5, 1, 1, 8, 1], [17], [1] * 17], ids=lambda p: f"{len(p)} pieces")
def test_a_long_conversation_fills_new_blocks_as_the_oracle_does(sparse, plain_sparse, attention, pieces):
    rows = [row_of(length) for length in (CONTEXT, 17)]
    ids, mask = left_padded(rows)
    cache = compacted(sparse, ids, mask=mask, kept_fraction=0.3)
    kept = [kept_of(cache, r, row.shape[1]) for r, row in enumerate(rows)]
    assert len({len(of_layer) % RATIO for of_row in kept for of_layer in of_row}) > 1
    later = random_ids(17, rows=2, seed=3)
    logits = torch.cat([forward(sparse, piece, cache) for piece in later.split(pieces, dim=1)], dim=1)
    for r, row in enumerate(rows):
        with explicit(plain_sparse, kept[r], row.shape[1]) as fresh:
            whole = torch.cat([row, later[r : r + 1]], 1)
            assert_same(logits[r : r + 1], forward(plain_sparse, whole, fresh)[:, row.shape[1] :])


def test_the_models_own_indexer_regroups_alike_under_a_mask(sparse, plain_sparse):
    """Its blocks are of the tokens that a query sees: the oracle of all other families serves this one too."""
    row, new = random_ids(CONTEXT), random_ids(6, seed=1)
    cache = compacted(sparse, row, kept_fraction=0.5)
    with Oracle(plain_sparse, evicted_of(cache, 0, CONTEXT)) as oracle:
        assert_same(forward(sparse, new, cache.fork()), oracle.logits(row, new))


@pytest.mark.parametrize("chunks", [[CONTEXT], [20, 22, 1]], ids=["at once", "chunks"])
def test_per_layer_embeddings_equal_the_oracle(chunks):
    options = {"indexer_budget": BUDGET, **PLE}
    model, row = tiny_model("qwen4_exp", **options), random_ids(CONTEXT)
    cache = compacted(model, row, chunks, kept_fraction=0.4)
    check_rows(model, eager(**options), cache, [row], questions_of(1, 6))
    check_rows(model, eager(**options), cache, [row], questions_of(1, 1))  # a second question finds the same states


@pytest.mark.parametrize("chunks", [[CONTEXT], [1] * CONTEXT], ids=["at once", "single tokens"])
def test_per_layer_embeddings_skip_pads(chunks):
    """Also those that come as the only new token, for which transformers builds no mask."""
    options = {"indexer_budget": BUDGET, **PLE}
    model, rows = tiny_model("qwen4_exp", **options), [row_of(length) for length in LENGTHS]
    ids, mask = left_padded(rows)
    cache = compacted(model, ids, chunks, mask, kept_fraction=0.5)
    check_rows(model, eager(**options), cache, rows, questions_of(3, 6))


def test_an_entry_has_the_best_score_of_any_head(sparse):
    whole = prefilled(sparse, random_ids(CONTEXT), allocation="flat")
    scores = [torch.rand(1, 2, CONTEXT, generator=torch.Generator().manual_seed(j)) for j in range(2)]
    child = whole.fork(scorer=Scores(scores), kept_fraction=0.25)
    child.compact()
    for of_layer, kept in zip(scores, kept_of(child, 0, CONTEXT), strict=True):
        assert kept == sorted(of_layer[0].amax(0).topk(len(kept)).indices.tolist())


@pytest.mark.parametrize("pads", [0, 4])
def test_utilities_are_those_of_the_entries_that_queries_attend_to(sparse, plain_sparse, pads):
    """From the attention weights of the model itself, which are 0 outside the selected blocks."""
    row, later = random_ids(CONTEXT), random_ids(6, seed=1)
    ids, mask = left_padded([row, random_ids(CONTEXT + pads)]) if pads else (row, torch.ones_like(row))
    cache = prefilled(sparse, ids[:1], mask=mask[:1], scorer=Recorder())
    found = continuation_utilities(sparse, cache.fork(), later, CONTEXT, 32**-0.5)
    held = DynamicCache(config=plain_sparse.config)
    weights = plain_sparse(torch.cat([row, later], 1), **cache_kwargs(plain_sparse, held), output_attentions=True)
    for utilities, attended, layer in zip(found, weights.attentions, (held.layers[3], held.layers[7]), strict=True):
        a, v = attended[0, :, -6:].double(), layer.values[0].double().repeat_interleave(3, dim=0)
        outputs, kept = a @ v, a[..., :CONTEXT]
        change = kept / (1 - kept) * torch.cdist(outputs, v[:, :CONTEXT])
        expected = change.unflatten(0, (2, 3)).square().sum(1).sqrt().amax(1).float()
        assert 0 < (expected == 0).sum() < expected.numel()
        assert torch.equal(utilities == 0, expected == 0)
        assert_same(utilities, expected)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.1])
def test_the_index_shrinks_to_a_quarter_of_the_kept_tokens(sparse, fraction):
    cache = prefilled(sparse, random_ids(CONTEXT), [20, 20, 3], kept_fraction=fraction)
    assert cache.report().index_bytes == 4 * CONTEXT * (2 * WIDTH + 2 * ROTARY)  # two layers, angles once
    report = cache.compact()
    blocks = [kept // RATIO for kept in report.kept_per_layer[0]]
    assert [layer.block_keys.shape for layer in cache.attention_layers] == [(1, n, WIDTH) for n in blocks]
    waiting = 2 * (RATIO - 1) * (WIDTH + 2 * ROTARY)
    assert report.index_bytes == 4 * (sum(blocks) * WIDTH + waiting)
    assert all(layer.positions is None for layer in cache.attention_layers)


def test_new_tokens_add_a_key_for_every_four(sparse):
    cache = compacted(sparse, random_ids(CONTEXT), kept_fraction=0.5)
    counts = cache.report().kept_per_layer[0]
    for asked in range(1, 10):
        forward(sparse, random_ids(1, seed=asked), cache)
        held = [layer.block_keys.shape[1] for layer in cache.attention_layers]
        assert held == [(kept + asked) // RATIO for kept in counts]
        assert {layer.raw_keys.shape[1] for layer in cache.attention_layers} == {RATIO - 1}
        assert all(layer.positions is None for layer in cache.attention_layers)


# -- forks, batches, failures ------------------------------------------------------------------------------------------


def index_of(cache: GateSightCache) -> list[Tensor]:
    return [tensor for layer in cache.attention_layers for tensor in layer.index_tensors]


def test_children_share_the_index_and_leave_it_alone(sparse):
    row, questions = random_ids(CONTEXT), [random_ids(n, seed=n) for n in (6, 1, 9)]
    parent = compacted(sparse, row, kept_fraction=0.5)
    before = [tensor.clone() for tensor in index_of(parent)]
    answers = [generate(sparse, torch.cat([row, q], 1), parent.fork()) for q in questions]
    generate(sparse, questions[0], parent.fork(), num_beams=3)
    forward(sparse, questions[0].expand(2, -1), parent.fork().fork())
    for mine, theirs in zip(parent.fork().attention_layers, parent.attention_layers, strict=True):
        assert mine.block_keys.data_ptr() == theirs.block_keys.data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(index_of(parent), before, strict=True))
    for q, answer in zip(questions, answers, strict=True):
        fresh = compacted(sparse, row, kept_fraction=0.5)
        assert torch.equal(generate(sparse, torch.cat([row, q], 1), fresh), answer)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}])
def test_beams_reorder_the_index(sparse, plain_sparse, options):
    row = random_ids(CONTEXT)
    cache = compacted(sparse, row, kept_fraction=0.5)
    whole = torch.cat([row, random_ids(6, seed=1)], 1)
    with Oracle(plain_sparse, evicted_of(cache, 0, CONTEXT)) as oracle:
        expected = oracle.generate(whole, tokens=9, **options)
    assert torch.equal(generate(sparse, whole, cache.fork(), tokens=9, **options), expected)


def test_questions_of_a_batch_equal_separate_forks(sparse):
    parent, questions = compacted(sparse, random_ids(CONTEXT), kept_fraction=0.5), random_ids(6, rows=3, seed=1)
    together = forward(sparse, questions, parent.fork())
    for r in range(3):
        assert_same(together[r : r + 1], forward(sparse, questions[r : r + 1], parent.fork()))


def test_rows_are_taken_out_and_repeated(sparse):
    rows, new = [row_of(length) for length in (CONTEXT, 17)], random_ids(6, rows=2, seed=1)
    ids, mask = left_padded(rows)
    whole = prefilled(sparse, ids, mask=mask, kept_fraction=0.5)
    expected = whole.fork()
    expected.compact()
    logits = forward(sparse, new, expected)
    for early in (True, False):
        cache = whole.fork()
        if early:
            cache.batch_select_indices(torch.tensor([1, 0]))
        cache.compact()
        if not early:
            cache.batch_select_indices(torch.tensor([1, 0]))
        cache.batch_repeat_interleave(2)
        assert_same(forward(sparse, new.flip(0).repeat_interleave(2, dim=0), cache)[::2].flip(0), logits)


def test_a_compaction_that_failed_half_way_goes_on(sparse, plain_sparse, monkeypatch):
    """Tokens that come in between see all of the layer that is not compacted, and enter the index of both."""
    row, between, new = (random_ids(n, rows=2, seed=n) for n in (CONTEXT, 5, 6))
    cache = prefilled(sparse, row, kept_fraction=0.5)
    settle, calls = SparseAttentionLayer._settle, []

    def fails_once(layer: SparseAttentionLayer, *args: Any) -> None:
        calls.append(layer)
        if len(calls) == 2:
            raise MemoryError
        settle(layer, *args)

    monkeypatch.setattr(SparseAttentionLayer, "_settle", fails_once)
    with pytest.raises(MemoryError):
        cache.compact()
    assert [layer.block_keys is None for layer in cache.attention_layers] == [False, True]
    logits = [*(forward(sparse, part, cache) for part in between.split([1, 4], dim=1))]
    cache.compact()
    logits += [*(forward(sparse, part, cache) for part in new.split([5, 1], dim=1))]
    found, asked = torch.cat(logits, 1), torch.cat([row, between, new], 1)
    for r in range(2):
        first, second = ((layer.kept_positions[r, 0]).tolist() for layer in cache.attention_layers)
        kept = [first, second + list(range(CONTEXT, CONTEXT + 5))]
        with explicit(plain_sparse, kept, CONTEXT, CONTEXT + 5) as fresh:
            assert_same(found[r : r + 1], forward(plain_sparse, asked[r : r + 1], fresh)[:, CONTEXT:])


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_that_fails_leaves_the_index_as_it_was(sparse, when):
    row, new = random_ids(CONTEXT), random_ids(6, seed=1)
    cache = (prefilled if when == "before" else compacted)(sparse, row, kept_fraction=0.5)
    expected = forward(sparse, new, cache.fork())

    def fail(*_: Any) -> None:
        raise MemoryError

    handle = sparse.model.layers[-1].mlp.register_forward_hook(fail)
    with pytest.raises(MemoryError):
        forward(sparse, new, cache)
    handle.remove()
    assert torch.equal(forward(sparse, new, cache), expected)


def test_hooks_give_the_indexer_back(plain_sparse):
    model, ids = copy.deepcopy(plain_sparse), random_ids(CONTEXT)
    cache = compacted(model, ids, kept_fraction=0.5)
    indexer = model.model.layers[3].self_attn.indexer
    assert "forward" in vars(indexer)
    model.model._gatesight_hooks.remove()
    assert "forward" not in vars(indexer)
    with pytest.raises(CacheStateError, match="hooks"):
        forward(model, ids[:, :1], cache)


@pytest.mark.parametrize("first", ["offloaded", "hooked"])
def test_an_offloaded_model_answers_alike(plain_sparse, first):
    """Weights are there only inside their modules' own forwards; compaction needs those of the indexer's norm."""
    ids, new = random_ids(CONTEXT), random_ids(6, seed=1)
    estimator, model = random_estimator(plain_sparse), copy.deepcopy(plain_sparse)
    expected = forward(model, new, compacted(model, ids, kept_fraction=0.5, scorer=estimator))
    model = copy.deepcopy(plain_sparse)
    if first == "hooked":
        attach(model)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.model.layers[3].self_attn.indexer.k_layernorm.weight.device.type == "meta"
    assert torch.equal(forward(model, new, compacted(model, ids, kept_fraction=0.5, scorer=estimator)), expected)
