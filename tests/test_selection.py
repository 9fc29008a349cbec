"""Selection: each head's own best entries in position order, the protected prefix always, padding never."""

import itertools

import pytest
import torch
from torch import Tensor

from gatesight_hf.selection import select, select_global

pytestmark = pytest.mark.core


def expected_row(scores: list[float], count: int, length: int, protected: int) -> set[int]:
    """Slots that one head of one row keeps, by sorting in Python; scores without ties."""
    start = len(scores) - length
    protected = min(protected, length)
    rest = sorted(range(start + protected, len(scores)), key=lambda slot: -scores[slot])
    return set(range(start, start + protected)) | set(rest[:count])


def check(scores: Tensor, counts: list[int], lengths: list[int], protected: int) -> None:
    indices, valid = select(scores, counts, lengths, protected)
    batch, heads, slots = scores.shape
    kept = [count + min(protected, length) for count, length in zip(counts, lengths, strict=True)]
    assert indices.shape == (batch, heads, max(kept))
    assert indices.dtype == torch.int64
    assert valid.sum(-1).tolist() == kept
    assert ((indices >= 0) & (indices < slots)).all(), "filled-up places must be safe to gather"
    for row, head in itertools.product(range(batch), range(heads)):
        found = indices[row, head, valid[row]].tolist()
        assert found == sorted(expected_row(scores[row, head].tolist(), counts[row], lengths[row], protected))


@pytest.mark.parametrize("length", [1, 2, 5, 64])
@pytest.mark.parametrize("protected", [0, 1, 3, 64, 100])
def test_one_row_keeps_its_best(length, protected):
    scores = torch.randn(1, 3, length)
    for count in range(length - min(protected, length) + 1):
        check(scores, [count], [length], protected)


@pytest.mark.parametrize("protected", [0, 2, 9])
def test_ragged_rows_keep_their_own_best_and_no_padding(protected):
    lengths = [9, 1, 5]
    scores = torch.randn(3, 2, 9)
    scores[1, :, :8] = scores[2, :, :4] = 1e9  # pads look best
    for counts in itertools.product((0, 1, 3, 9), repeat=3):
        room = [length - min(protected, length) for length in lengths]
        check(scores, [min(c, n) for c, n in zip(counts, room, strict=True)], lengths, protected)


def test_heads_choose_apart():
    scores = torch.tensor([[[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]]])
    assert select(scores, [2], [4])[0].tolist() == [[[0, 1], [2, 3]]]


def test_negative_scores_do_not_fall_behind_the_protected_prefix():
    scores = torch.tensor([[[-9.0, -8.0, -3.0, -1.0, -2.0]]])
    assert select(scores, [2], [5], 1)[0].tolist() == [[[0, 3, 4]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [0.0, 1.0, -torch.inf, torch.inf])
def test_ties_keep_the_exact_number_and_the_prefix(dtype, value):
    indices, valid = select(torch.full((2, 2, 20), value, dtype=dtype), [7, 3], [20, 11], protected_prefix=4)
    for row, (count, start) in enumerate([(7, 0), (3, 9)]):
        for head in range(2):
            kept = indices[row, head, valid[row]].tolist()
            assert len(set(kept)) == count + 4
            assert kept == sorted(kept)
            assert kept[:4] == list(range(start, start + 4))


def test_ties_are_decided_the_same_way_each_time():
    scores = torch.zeros(1, 2, 100)
    assert torch.equal(select(scores, [10], [100])[0], select(scores.clone(), [10], [100])[0])


def test_infinite_scores_order_as_numbers():
    scores = torch.tensor([[[0.0, torch.inf, -torch.inf, 1.0]]])
    assert select(scores, [2], [4])[0].tolist() == [[[1, 3]]]


def test_nan_for_an_entry_is_refused():
    scores = torch.zeros(1, 2, 8)
    scores[0, 1, 5] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        select(scores, [3], [8])


def test_nan_that_nobody_reads_is_harmless():
    scores = torch.randn(1, 1, 8)
    scores[..., :3] = torch.nan  # a pad and the protected prefix
    indices, _ = select(scores, [2], [7], protected_prefix=2)
    assert indices[0, 0, :2].tolist() == [1, 2]
    assert (indices[0, 0, 2:] > 2).all()


@pytest.mark.parametrize(("count", "protected"), [(9, 0), (6, 3), (1, 8)])
def test_more_than_there_is_is_refused(count, protected):
    with pytest.raises(ValueError, match="evictable"):
        select(torch.zeros(1, 1, 8), [count], [8], protected)


def test_scores_are_not_changed():
    scores = torch.randn(2, 2, 10)
    before = scores.clone()
    select(scores, [3, 2], [10, 6], 2)
    assert torch.equal(scores, before)


# -- all layers and heads together -------------------------------------------------------------------------------------


def expected_global(
    scores: list[Tensor], total: int, length: int, row: int, protected: int
) -> set[tuple[int, int, int]]:
    """(layer, head, slot) of what one row keeps, by sorting in Python; scores without ties."""
    slots = scores[0].shape[2]
    first = slots - length + min(protected, length)
    heads = range(scores[0].shape[1])
    everywhere = [(j, h, i) for j in range(len(scores)) for h in heads for i in range(first, slots)]
    best = sorted(everywhere, key=lambda at: -float(scores[at[0]][row, at[1], at[2]]))[:total]
    return set(best) | {(j, h, i) for j in range(len(scores)) for h in heads for i in range(slots - length, first)}


@pytest.mark.parametrize("protected", [0, 2, 9, 100])
@pytest.mark.parametrize("totals", [[0, 0, 0], [1, 3, 2], [20, 5, 0]])
def test_global_selection_is_the_best_of_all_layers_and_heads(protected: int, totals: list[int]) -> None:
    lengths = [9, 1, 5]
    scores = [torch.randn(3, 2, 9) + shift for shift in (0.0, 1.0, -0.5)]
    for of_layer in scores:
        of_layer[1, :, :8] = of_layer[2, :, :4] = torch.nan  # pads
    room = [3 * 2 * (length - min(protected, length)) for length in lengths]
    totals = [min(total, most) for total, most in zip(totals, room, strict=True)]
    chosen = select_global(scores, totals, lengths, protected)
    for row, length in enumerate(lengths):
        kept = set()
        for j, (indices, valid) in enumerate(chosen):
            assert indices.shape == valid.shape
            assert not indices[~valid].any(), "filled up with slot 0"
            assert valid.any(dim=(0, 1)).all(), "no wider than the fullest head"
            for head in range(2):
                slots = indices[row, head, valid[row, head]].tolist()
                assert slots == sorted(slots)
                assert not valid[row, head, len(slots) :].any(), "real entries come first"
                kept |= {(j, head, slot) for slot in slots}
        assert kept == expected_global(scores, totals[row], length, row, protected)


def test_global_selection_does_not_depend_on_the_order_of_layers_or_heads() -> None:
    scores = [torch.randn(2, 3, 20) for _ in range(3)]
    chosen = select_global(scores, [50, 31], [20, 14], 1)
    for order in itertools.permutations(range(3)):
        again = select_global([scores[j][:, order] for j in order], [50, 31], [20, 14], 1)
        for (indices, valid), j in zip(again, order, strict=True):
            assert torch.equal(indices, chosen[j][0][:, order])
            assert torch.equal(valid, chosen[j][1][:, order])


@pytest.mark.parametrize("value", [0.0, -torch.inf, torch.inf])
def test_global_ties_keep_the_exact_total(value: float) -> None:
    chosen = select_global([torch.full((1, 2, 10), value)] * 3, [23], [10], 2)
    assert sum(int(valid.sum()) for _, valid in chosen) == 23 + 3 * 2 * 2


def test_global_selection_refuses_nan_for_an_entry_of_any_layer() -> None:
    scores = [torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)]
    scores[1][0, 1, 7] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        select_global(scores, [3], [8])
