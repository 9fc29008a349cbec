"""Selection: each head's own best entries in position order, protected ones always, padding never."""

import itertools

import pytest
import torch
from torch import Tensor

from gatesight_hf.compaction import Protected, select, select_global

pytestmark = [pytest.mark.core, pytest.mark.quick]


def always(slots: int, length: int, protected: Protected) -> set[int]:
    """Slots of one row's protected tokens."""
    tokens = range(length)
    return {slots - length + i for i in tokens if i < protected.prefix or i >= length - protected.suffix}


def room(length: int, protected: Protected) -> int:
    return length - len(always(length, length, protected))


def expected_row(scores: list[float], count: int, length: int, protected: Protected) -> set[int]:
    """Slots that one head of one row keeps, by sorting in Python; scores without ties."""
    stays = always(len(scores), length, protected)
    rest = set(range(len(scores) - length, len(scores))) - stays
    return stays | set(sorted(rest, key=lambda slot: -scores[slot])[:count])


def check(scores: Tensor, counts: list[int], lengths: list[int], protected: Protected) -> None:
    indices, valid = select(scores, counts, lengths, protected)
    batch, heads, slots = scores.shape
    kept = [count + length - room(length, protected) for count, length in zip(counts, lengths, strict=True)]
    assert indices.shape == (batch, heads, max(kept))
    assert indices.dtype == torch.int64
    assert valid.sum(-1).tolist() == kept
    assert ((indices >= 0) & (indices < slots)).all(), "filled-up places must be safe to gather"
    for row, head in itertools.product(range(batch), range(heads)):
        found = indices[row, head, valid[row]].tolist()
        assert found == sorted(expected_row(scores[row, head].tolist(), counts[row], lengths[row], protected))


@pytest.mark.parametrize("length", [1, 2, 5, 64])
@pytest.mark.parametrize("prefix", [0, 1, 3, 64, 100])
@pytest.mark.parametrize("suffix", [0, 2, 64])
def test_one_row_keeps_its_best(length, prefix, suffix):
    scores, protected = torch.randn(1, 3, length), Protected(prefix, suffix)
    for count in range(room(length, protected) + 1):
        check(scores, [count], [length], protected)


@pytest.mark.parametrize("protected", [Protected(*ends) for ends in ((0, 0), (2, 0), (9, 0), (0, 3), (2, 2), (4, 9))])
def test_ragged_rows_keep_their_own_best_and_no_padding(protected):
    lengths = [9, 1, 5]
    scores = torch.randn(3, 2, 9)
    scores[1, :, :8] = scores[2, :, :4] = 1e9  # pads look best
    for counts in itertools.product((0, 1, 3, 9), repeat=3):
        most = [room(length, protected) for length in lengths]
        check(scores, [min(c, n) for c, n in zip(counts, most, strict=True)], lengths, protected)


def test_heads_choose_apart():
    scores = torch.tensor([[[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]]])
    assert select(scores, [2], [4])[0].tolist() == [[[0, 1], [2, 3]]]


def test_negative_scores_do_not_fall_behind_the_protected_prefix():
    scores = torch.tensor([[[-9.0, -8.0, -3.0, -1.0, -2.0]]])
    assert select(scores, [2], [5], Protected(1))[0].tolist() == [[[0, 3, 4]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [0.0, 1.0, -torch.inf, torch.inf])
def test_ties_keep_the_exact_number_and_the_prefix(dtype, value):
    indices, valid = select(torch.full((2, 2, 20), value, dtype=dtype), [7, 3], [20, 11], Protected(4))
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
    scores[..., :3] = scores[..., 7] = torch.nan  # a pad and what is protected
    indices, _ = select(scores, [2], [7], Protected(2, 1))
    assert indices[0, 0, :2].tolist() == [1, 2] and indices[0, 0, -1] == 7
    assert (indices[0, 0, 2:] > 2).all()


@pytest.mark.parametrize(("count", "protected"), [(9, (0, 0)), (6, (3, 0)), (1, (8, 0)), (6, (1, 2)), (1, (3, 9))])
def test_more_than_there_is_is_refused(count, protected):
    with pytest.raises(ValueError, match="evictable"):
        select(torch.zeros(1, 1, 8), [count], [8], Protected(*protected))


def test_scores_are_not_changed():
    scores = torch.randn(2, 2, 10)
    before = scores.clone()
    select(scores, [3, 2], [10, 6], Protected(2))
    assert torch.equal(scores, before)


# -- all layers and heads together -------------------------------------------------------------------------------------


def expected_global(
    scores: list[Tensor], total: int, length: int, row: int, protected: Protected
) -> set[tuple[int, int, int]]:
    """(layer, head, slot) of what one row keeps, by sorting in Python; scores without ties."""
    slots = scores[0].shape[2]
    stays = always(slots, length, protected)
    heads = [(j, h) for j in range(len(scores)) for h in range(scores[0].shape[1])]
    rest = [(j, h, i) for j, h in heads for i in range(slots - length, slots) if i not in stays]
    best = sorted(rest, key=lambda at: -float(scores[at[0]][row, at[1], at[2]]))[:total]
    return set(best) | {(j, h, i) for j, h in heads for i in stays}


@pytest.mark.parametrize("ends", [(0, 0), (2, 0), (9, 0), (100, 0), (0, 2), (1, 2), (3, 100)])
@pytest.mark.parametrize("totals", [[0, 0, 0], [1, 3, 2], [20, 5, 0]])
def test_global_selection_is_the_best_of_all_layers_and_heads(ends: tuple[int, int], totals: list[int]) -> None:
    lengths, protected = [9, 1, 5], Protected(*ends)
    scores = [torch.randn(3, 2, 9) + shift for shift in (0.0, 1.0, -0.5)]
    for of_layer in scores:
        of_layer[1, :, :8] = of_layer[2, :, :4] = torch.nan  # pads
    most = [3 * 2 * room(length, protected) for length in lengths]
    totals = [min(total, n) for total, n in zip(totals, most, strict=True)]
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
    chosen = select_global(scores, [50, 31], [20, 14], Protected(1, 2))
    for order in itertools.permutations(range(3)):
        again = select_global([scores[j][:, order] for j in order], [50, 31], [20, 14], Protected(1, 2))
        for (indices, valid), j in zip(again, order, strict=True):
            assert torch.equal(indices, chosen[j][0][:, order])
            assert torch.equal(valid, chosen[j][1][:, order])


@pytest.mark.parametrize("value", [0.0, -torch.inf, torch.inf])
def test_global_ties_keep_the_exact_total(value: float) -> None:
    chosen = select_global([torch.full((1, 2, 10), value)] * 3, [23], [10], Protected(2))
    assert sum(int(valid.sum()) for _, valid in chosen) == 23 + 3 * 2 * 2


def test_global_selection_refuses_nan_for_an_entry_of_any_layer() -> None:
    scores = [torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)]
    scores[1][0, 1, 7] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        select_global(scores, [3], [8])
