"""Which of given ids are new: `generate` takes all ids from the context's start, row by row, padded as they may be."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig

from gatesight_hf import CacheStateError, FrozenCache, GateSightCache
from gatesight_hf.cache.tokens import Tokens

from ..helpers.models import random_estimator
from ..helpers.oracle import assert_same
from ..helpers.running import (
    as_new,
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

pytestmark = [pytest.mark.core, pytest.mark.quick]

LENGTHS, NEW = (43, 29), 6
ROWS = [random_ids(n, seed=n) for n in LENGTHS]
CONTEXTS, MASK = left_padded(ROWS)
QUESTION = random_ids(NEW, rows=2, seed=9)
WHOLE = [torch.cat([row, QUESTION[i : i + 1]], 1) for i, row in enumerate(ROWS)]


@pytest.fixture(scope="module")
def parent(dense: Any) -> GateSightCache:
    with torch.no_grad():
        return compacted(dense, CONTEXTS, mask=MASK, kept_fraction=0.3)


def with_pads(pads: int) -> tuple[Tensor, Tensor]:
    """Contexts and questions as one batch, each row with so many more pads on its left, and the mask."""
    ids, mask = left_padded(WHOLE)
    return F.pad(ids, (pads, 0), value=0), F.pad(mask, (pads, 0))


# -- padded anew -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("pads", [0, 1, 7])
def test_a_batch_may_be_padded_anew(dense, parent, pads, frozen):
    expected = steps(dense, QUESTION, parent.fork(), **as_new(QUESTION, parent))
    ids, mask = with_pads(pads)
    child = FrozenCache(parent, 16) if frozen else parent.fork()
    tokens, logits = steps(dense, ids, child, attention_mask=mask)
    assert torch.equal(tokens, expected[0])
    assert_same(logits, expected[1])
    assert child.get_seq_length() == CONTEXTS.shape[1] + NEW + 3


def test_one_row_of_a_batch_needs_no_pads(dense, parent):
    """The cache of the shorter row still has slots for pads, which its ids alone have not."""
    expected = generate(dense, QUESTION, parent.fork(), **as_new(QUESTION, parent))
    for row, whole in enumerate(WHOLE):
        child = parent.fork()
        child.batch_select_indices(torch.tensor([row]))
        assert torch.equal(generate(dense, whole, child), expected[row : row + 1])


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
def test_the_output_begins_with_the_ids_that_were_given(dense, parent, options):
    ids, mask = with_pads(3)
    output = dense.generate(
        ids, attention_mask=mask, max_length=ids.shape[1] + 5, return_dict_in_generate=True,
        **options, **cache_kwargs(dense, parent.fork()),
    )  # fmt: skip
    repeats = options.get("num_return_sequences", 1)
    assert torch.equal(output.sequences[:, : ids.shape[1]], ids.repeat_interleave(repeats, 0))
    assert output.sequences.shape[1] == ids.shape[1] + 5


@pytest.mark.parametrize("place", ["the model's", "given", "given by position"])
def test_a_length_in_tokens_counts_those_that_were_given(dense, parent, place):
    ids, mask = with_pads(3)
    config = copy.copy(dense.generation_config)
    config.max_length = ids.shape[1] + 5
    arguments = (ids, config) if place == "given by position" else (ids,)
    given = {"generation_config": config} if place == "given" else {}
    before = dense.generation_config
    dense.generation_config = config if place == "the model's" else before
    try:
        output = dense.generate(
            *arguments, attention_mask=mask, do_sample=False, **given, **cache_kwargs(dense, parent.fork())
        )
    finally:
        dense.generation_config = before
    assert output.shape[1] == ids.shape[1] + 5


def test_options_by_position_are_checked_too(dense, parent):
    config = GenerationConfig(prompt_lookup_num_tokens=3)
    with pytest.raises(ValueError, match="assisted decoding"):
        dense.generate(with_pads(0)[0], config, **cache_kwargs(dense, parent.fork()))


def test_a_row_that_has_not_begun_goes_on_with_its_first_tokens(dense):
    """Its pads stand before its first token still."""
    expected = compacted(dense, CONTEXTS, mask=MASK, kept_fraction=0.3)
    cache = GateSightCache(random_estimator(dense), dense, kept_fraction=0.3)
    forward(dense, CONTEXTS[:, :10], cache, **padded(MASK[:, :10], 10))  # the second row has 14 pads
    found = generate(dense, CONTEXTS, cache, 1, attention_mask=MASK)
    assert cache.report().kept_per_layer == expected.report().kept_per_layer
    assert found.shape == (2, 1)


def test_pads_are_found_without_a_mask(dense, parent):
    ids, mask = with_pads(4)
    expected = generate(dense, ids, parent.fork(), attention_mask=mask, pad_token_id=0, eos_token_id=1)
    assert torch.equal(generate(dense, ids, parent.fork(), pad_token_id=0, eos_token_id=1), expected)


def test_several_questions_of_one_row_may_be_padded(dense):
    cache = compacted(dense, ROWS[0], kept_fraction=0.3)
    whole = torch.cat([ROWS[0].expand(3, -1), random_ids(NEW, rows=3, seed=4)], 1)
    expected = generate(dense, whole, cache.fork())
    padded, mask = F.pad(whole, (5, 0)), F.pad(torch.ones_like(whole), (5, 0))
    assert torch.equal(generate(dense, padded, cache.fork(), attention_mask=mask), expected)


def test_an_uncompacted_cache_goes_on_from_ids_padded_anew(dense):
    ids, mask = with_pads(5)
    plain = prefilled(dense, CONTEXTS, mask=MASK, kept_fraction=0.3)
    other = plain.fork()
    expected = generate(dense, *(with_pads(0)[:1]), plain, attention_mask=with_pads(0)[1])
    assert torch.equal(generate(dense, ids, other, attention_mask=mask), expected)
    assert plain.is_compacted and other.is_compacted


def test_rows_with_different_numbers_of_new_tokens_are_refused(dense, parent):
    rows = [torch.cat([ROWS[0], QUESTION[:1, :4]], 1), torch.cat([ROWS[1], QUESTION[1:]], 1)]
    ids, mask = left_padded(rows)
    with pytest.raises(CacheStateError, match=r"different numbers of tokens \(4, 6\).*fork"):
        generate(dense, ids, parent.fork(), attention_mask=mask)


# -- another history ---------------------------------------------------------------------------------------------------


def changed(ids: Tensor, row: int, at: int) -> Tensor:
    ids = ids.clone()
    ids[row, at] = (ids[row, at] - 1) % 100 + 2
    return ids


@pytest.mark.parametrize(("row", "token"), [(0, 0), (0, 42), (1, 0), (1, 17)])
def test_ids_that_part_say_where(dense, parent, row, token):
    ids, mask = with_pads(2)
    at = ids.shape[1] - NEW - LENGTHS[row] + token
    child = parent.fork()
    with pytest.raises(
        CacheStateError, match=rf"Row {row} .* at token {token} of {LENGTHS[row]} .*fork.*attention_mask"
    ):
        generate(dense, changed(ids, row, at), child, attention_mask=mask)
    assert child.get_seq_length() == CONTEXTS.shape[1]


@pytest.mark.parametrize("length", [1, 20, 43])
def test_a_shorter_prefix_is_refused(dense, parent, length):
    with pytest.raises(CacheStateError, match="shorter prefix"):
        generate(dense, CONTEXTS[:, -length:] if length == 43 else ROWS[0][:, :length].expand(2, -1), parent.fork())


@pytest.mark.parametrize("length", [1, 6, 43, 44, 200])
def test_no_text_is_taken_for_new_without_a_word(dense, length):
    """However different it looks, and however long it is."""
    cache = compacted(dense, ROWS[0], kept_fraction=0.3)
    other = random_ids(length, seed=77)
    for given in ({}, {"attention_mask": torch.ones_like(other)}):
        with pytest.raises(CacheStateError, match="at token 0"):
            generate(dense, other, cache, **given)
    expected = forward(dense, other, cache.fork())[:, -1]
    _, logits = steps(dense, other, cache, 1, **as_new(other, cache))
    assert_same(logits[:, 0], expected)


def test_a_forward_takes_new_ids(dense, parent):
    """As everywhere in transformers: the caller slices, `generate` does it for them."""
    child = parent.fork()
    forward(dense, QUESTION, child)
    assert torch.equal(child.context.tokens.ids[:, -NEW:], QUESTION)


# -- the value ---------------------------------------------------------------------------------------------------------


def test_tokens_are_never_written_to():
    first = Tokens().followed_by(random_ids(5, rows=2), 5, None)
    second = first.followed_by(random_ids(3, rows=2, seed=1), 3, torch.ones(2, 8, dtype=torch.bool))
    third = second.with_rows(torch.tensor([1, 1, 0]))
    assert (first.count, second.count, third.count) == (5, 8, 8)
    assert first.padding is None and first.ids is not None and first.ids.shape == (2, 5)
    assert third.ids is not None and third.ids.shape == (3, 8)
    assert third.lengths(3) == [8, 8, 8]


def test_embeddings_leave_no_ids():
    tokens = Tokens().followed_by(random_ids(5), 5, None).followed_by(None, 3, None)
    assert tokens.ids is None and tokens.count == 8
    with pytest.raises(CacheStateError, match="embeddings"):
        tokens.new_among(random_ids(10), torch.ones(1, 10))
