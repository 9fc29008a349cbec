"""Utilities equal what brute-force deletion of KV entries gives."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gatesight_hf._compat import cache_argument
from gatesight_hf.cache import GateSightCache
from gatesight_hf.hybrid import HybridSpec, find_modules
from gatesight_hf.methods import RandomScorer
from gatesight_hf.training.metrics import mass_covered, overlap, spearman
from gatesight_hf.training.utility import QUERIES_PER_CHUNK, capture_queries, entry_utilities, normalise

pytestmark = pytest.mark.core


def brute_force(queries: Tensor, keys: Tensor, values: Tensor, context: int, scale: float) -> Tensor:
    """Delete each entry in turn and recompute the softmax over what is left."""
    heads, length, _ = keys.shape
    groups, count = queries.shape[1] // heads, len(queries)
    result = torch.zeros(heads, context, dtype=torch.float64)
    for head in range(heads):
        for t in range(count):
            end = length - count + t + 1
            key, value = keys[head, :end].double(), values[head, :end].double()
            logits = queries[t, head * groups : (head + 1) * groups].double() @ key.T * scale
            full = logits.softmax(-1) @ value
            for i in range(context):
                rest = [k for k in range(end) if k != i]
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


def test_captured_queries_reproduce_the_attention_of_the_model(dense: Any) -> None:
    """softmax(q k) v of the captured queries is what the layer multiplies with its output gate and projects."""
    spec = HybridSpec.from_config(dense.config)
    modules = find_modules(dense, spec)
    cache = GateSightCache(RandomScorer(), dense, 1.0)
    outputs: dict[int, Tensor] = {}
    gates: dict[int, Tensor] = {}
    handles = []
    for j, attention in enumerate(modules.attention):
        handles.append(attention.o_proj.register_forward_pre_hook(lambda _m, args, j=j: outputs.update({j: args[0]})))
        handles.append(attention.q_proj.register_forward_hook(lambda _m, _a, out, j=j: gates.update({j: out})))
    ids = torch.randint(1, 128, (1, 17), generator=torch.Generator().manual_seed(4))
    try:
        with torch.no_grad(), capture_queries(dense, spec, cache) as queries:
            dense(ids, **{cache_argument(dense): cache})
    finally:
        for handle in handles:
            handle.remove()
    groups = spec.num_attention_heads // spec.num_key_value_heads
    for j, layer in enumerate(cache.attention_layers):
        assert layer.keys is not None and layer.values is not None
        query = queries[j][0].transpose(1, 2)
        key, value = (x.repeat_interleave(groups, dim=1) for x in (layer.keys, layer.values))
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        gate = gates[j].unflatten(-1, (-1, 2, spec.head_dim))[..., 1, :].sigmoid()
        assert torch.allclose((attended * gate).flatten(2), outputs[j], atol=1e-6)


def test_captures_leave_no_hook_and_ignore_other_caches(dense: Any) -> None:
    spec = HybridSpec.from_config(dense.config)
    before = [len(a.q_norm._forward_hooks) for a in find_modules(dense, spec).attention]
    with torch.no_grad(), capture_queries(dense, spec, object()) as queries:
        dense(torch.tensor([[1, 2, 3]]))
    assert queries == [[], []]
    assert [len(a.q_norm._forward_hooks) for a in find_modules(dense, spec).attention] == before


def test_metrics_on_known_orders() -> None:
    utilities = torch.arange(20.0).expand(2, -1)
    scores = torch.stack([torch.arange(20.0), -torch.arange(20.0)])
    assert overlap(scores, utilities).tolist() == [1.0, 0.0]
    assert torch.allclose(mass_covered(scores, utilities), torch.tensor([37 / 190, 1 / 190]))
    assert torch.allclose(spearman(scores, utilities).float(), torch.tensor([1.0, -1.0]))
    tied = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    assert spearman(tied, torch.tensor([[1.0, 2.0, 3.0, 4.0]])).item() == pytest.approx(0.894427, abs=1e-6)
