"""Selection and compaction, as Triton kernels and as torch twins: exact, whatever the strides and however far."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import gatesight_kernels as kernels

from ..helpers.kernel_fixtures import cases, sparse

pytestmark = pytest.mark.usefixtures("poisoned", "backend")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
FAR = 2**31

# -- select_top --------------------------------------------------------------------------------------------------------

SCORES: dict[str, Callable[[int, int], Tensor]] = {
    "random": torch.randn,
    "ties": lambda *shape: torch.randint(-3, 4, shape).float(),
    "equal": lambda *shape: torch.full(shape, -2.5),
    "least": lambda *shape: torch.full(shape, -torch.inf),
    "zeros": lambda *shape: torch.tensor([0.0, -0.0])[torch.randint(2, shape)],
    "infinite": lambda *shape: torch.tensor([-torch.inf, torch.inf, 1.0])[torch.randint(3, shape)],
    "denormal": lambda *shape: torch.randint(-5, 6, shape) * 2.0**-149,
    "close": lambda *shape: 1 + torch.randint(4, shape) * 2.0**-23,
}


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize(("heads", "length"), [(1, 1), (3, 2), (2, 63), (4, 1000), (1, 4096), (2, 4097), (1, 9000)])
def test_selection_is_the_first_of_a_stable_sort(kind, heads, length, device):
    scores = SCORES[kind](heads, length)
    order = scores.sort(dim=1, descending=True, stable=True).indices
    for count in {0, 1, length // 3, length - 1, length} if kind == "ties" else {length // 3}:
        found = kernels.select_top(scores.to(device), count)
        assert found.dtype == torch.int64
        assert torch.equal(found.cpu(), order[:, :count].sort(dim=1).values)


def test_selection_reads_scores_of_any_strides(device):
    wide = torch.randn(5, 300, device=device)
    for scores in (wide[::2, 7:207], wide.mT[:5, :4].contiguous().mT, wide[:1].expand(3, -1)):
        order = scores.cpu().sort(dim=1, descending=True, stable=True).indices[:, :2]
        assert torch.equal(kernels.select_top(scores, 2).cpu(), order.sort(dim=1).values)


# -- compact_rows ------------------------------------------------------------------------------------------------------


def kept(which: str, batch: int, heads: int, length: int) -> Tensor:
    """Ascending positions `[B, H, N]`."""
    if which == "some":
        chosen = torch.rand(batch, heads, length).topk(max(1, length // 3)).indices
        return chosen.sort().values
    first = {"none": length, "all": 0, "the last": length // 3, "all but the first": min(1, length - 1)}[which]
    return torch.arange(first, length).expand(batch, heads, -1)


def whole(rows: Tensor) -> Tensor:
    """Everything that lies in the storage."""
    return torch.empty(0, dtype=rows.dtype, device=rows.device).set_(rows.untyped_storage())


ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda rows: rows,
    "after pads": lambda rows: torch.cat([rows[:, :, :3], rows], dim=2)[:, :, min(3, rows.shape[2]) :],
    "heads inside": lambda rows: rows.transpose(1, 2).contiguous().transpose(1, 2),
    "half of each row": lambda rows: torch.cat([rows, rows], dim=3)[..., rows.shape[3] :],
}


@cases(
    "B H T D _ _",
    (1, 1, 1, 1, F32, "contiguous"),
    (2, 3, 63, 20, BF16, "after pads"),
    (2, 2, 100, 128, F16, "heads inside"),
    (1, 4, 1000, 20, torch.int8, "half of each row"),
    (1, 2, 1000, 256, BF16, "after pads"),
    (1, 2, 1000, 128, torch.int64, "heads inside"),
    (1, 1, 4097, 256, F32, "heads inside"),
)
@pytest.mark.parametrize("which", ["none", "some", "all", "the last", "all but the first"])
@pytest.mark.parametrize("in_place", [False, True])
def test_rows_are_gathered(case, which, in_place, device):
    *shape, dtype, layout = case
    rows = ROWS[layout](torch.randint(-100, 100, shape).to(dtype)).to(device)
    indices = kept(which, *shape[:3]).to(device)
    before = whole(rows).clone()
    untouched = before.as_strided(rows.shape, rows.stride(), rows.storage_offset())
    expected = untouched.gather(2, indices.unsqueeze(-1).expand(-1, -1, -1, shape[3]))
    found = kernels.compact_rows(rows, indices, in_place)
    assert torch.equal(found, expected)
    if in_place:
        assert found.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
        assert (found.storage_offset(), found.stride()) == (rows.storage_offset(), rows.stride())
        untouched[:, :, : found.shape[2]] = expected
    else:
        assert found.untyped_storage().nbytes() == found.nbytes
    assert torch.equal(whole(rows), before), "only the front of each head may change"


@pytest.mark.parametrize("far", ["tokens", "kept", "heads", "rows"])
@pytest.mark.parametrize("in_place", [False, True])
def test_rows_beyond_32_bits_are_moved(far, in_place, device, tmp_path):
    memory = sparse(tmp_path, device, FAR + FAR // 8, torch.int8)
    length = FAR // 64 + 64 if far == "tokens" else 72
    strides = (FAR // 2 if far == "rows" else 0, FAR // 2 if far == "heads" else 0, FAR // 64 if far == "kept" else 64)
    rows = memory.as_strided((3 if far == "rows" else 1, 3 if far == "heads" else 1, length, 64), (*strides, 1))
    tokens = list(range(1, length)) if far == "kept" else [1, 5, length - 7, length - 1]
    expected = torch.randint(-100, 100, (*rows.shape[:2], len(tokens), 64), dtype=torch.int8, device=device)
    for i, token in enumerate(tokens):
        rows[:, :, token] = expected[:, :, i]
    indices = torch.tensor(tokens, device=device).expand(*rows.shape[:2], -1)
    assert torch.equal(kernels.compact_rows(rows, indices, in_place), expected)


def test_heads_of_scores_beyond_32_bits_are_read(device, tmp_path):
    near = torch.randn(3, 50, device=device)
    far = sparse(tmp_path, device, FAR + 50, F32).as_strided((3, 50), (FAR // 2, 1))
    far.copy_(near)
    assert torch.equal(kernels.select_top(far, 7), kernels.select_top(near, 7))
