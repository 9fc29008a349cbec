"""Utilities equal what brute-force deletion of KV entries gives."""

import pytest
import torch
from torch import Tensor

from gatesight_hf.scoring.utility import QUERIES_PER_CHUNK, entry_utilities, normalise
from gatesight_hf.training.metrics import mass_covered, overlap, spearman

pytestmark = [pytest.mark.core, pytest.mark.quick]


def brute_force(
    queries: Tensor, keys: Tensor, values: Tensor, context: int, scale: float, selected: Tensor | None = None
) -> Tensor:
    """Delete each entry in turn and recompute the softmax over what is left."""
    heads, length, _ = keys.shape
    groups, count = queries.shape[1] // heads, len(queries)
    result = torch.zeros(heads, context, dtype=torch.float64)
    for head in range(heads):
        for t in range(count):
            end = length - count + t + 1
            key, value = keys[head, :end].double(), values[head, :end].double()
            logits = queries[t, head * groups : (head + 1) * groups].double() @ key.T * scale
            seen = [k for k in range(end) if selected is None or selected[t, k]]
            full = logits[:, seen].softmax(-1) @ value[seen]
            for i in range(context):
                rest = [k for k in seen if k != i]
                without = logits[:, rest].softmax(-1) @ value[rest]
                result[head, i] = max(result[head, i], (without - full).norm())
    return result.float()


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 4.0])
def test_closed_form_equals_deletion(sharpness: float) -> None:
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(5, 6, 16, generator=generator) * sharpness
    keys, values = torch.randn(2, 24, 16, generator=generator), torch.randn(2, 24, 16, generator=generator)
    found = entry_utilities(queries, keys, values, 19, 16**-0.5)
    expected = brute_force(queries, keys, values, 19, 16**-0.5)
    assert (normalise(found) - normalise(expected)).abs().max() < 1.4e-5


def test_entries_that_no_query_selects_have_no_utility() -> None:
    generator = torch.Generator().manual_seed(1)
    queries, keys, values = (torch.randn(n, m, 16, generator=generator) for n, m in ((5, 6), (2, 24), (2, 24)))
    selected = torch.rand(5, 24, generator=generator) < 0.3
    selected[:, 19:] = True
    found = entry_utilities(queries, keys, values, 19, 16**-0.5, selected)
    assert torch.equal(found > 0, selected[:, :19].any(0).expand(2, -1))
    expected = brute_force(queries, keys, values, 19, 16**-0.5, selected)
    assert (normalise(found) - normalise(expected)).abs().max() < 1.4e-5


def test_an_entry_that_takes_nearly_all_attention_keeps_its_digits() -> None:
    keys = torch.zeros(1, 8, 4)
    keys[0, 3, 0] = 40.0
    values = torch.randn(1, 8, 4, generator=torch.Generator().manual_seed(2))
    queries = torch.tensor([[[1.0, 0, 0, 0]]])
    found = entry_utilities(queries, keys, values, 7, 0.5)
    assert torch.allclose(found, brute_force(queries, keys, values, 7, 0.5), rtol=1e-5, atol=1e-9)


def test_chunks_of_queries_do_not_matter() -> None:
    generator = torch.Generator().manual_seed(3)
    count = QUERIES_PER_CHUNK + 7
    queries = torch.randn(count, 2, 8, generator=generator)
    keys, values = (
        torch.randn(1, count + 20, 8, generator=generator),
        torch.randn(1, count + 20, 8, generator=generator),
    )
    whole = entry_utilities(queries, keys, values, 20, 0.35)
    parts = [
        entry_utilities(queries[t : t + 1], keys[:, : 20 + t + 1], values[:, : 20 + t + 1], 20, 0.35)
        for t in range(count)
    ]
    assert torch.allclose(whole, torch.stack(parts).amax(0), rtol=1e-5, atol=1e-8)


def test_metrics_on_known_orders() -> None:
    utilities = torch.arange(20.0).expand(2, -1)
    scores = torch.stack([torch.arange(20.0), -torch.arange(20.0)])
    assert overlap(scores, utilities).tolist() == [1.0, 0.0]
    assert torch.allclose(mass_covered(scores, utilities), torch.tensor([37 / 190, 1 / 190]))
    assert torch.allclose(spearman(scores, utilities).float(), torch.tensor([1.0, -1.0]))
    tied = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    assert spearman(tied, torch.tensor([[1.0, 2.0, 3.0, 4.0]])).item() == pytest.approx(0.894427, abs=1e-6)
