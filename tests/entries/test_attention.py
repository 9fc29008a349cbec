"""The attention view holds what the module computed: from it the module's own output can be made again."""

import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from gatesight_hf import GateSightCache
from gatesight_hf.entries.view import AttentionView, apply_rotary, rotary_tables
from gatesight_hf.methods import OracleScorer
from gatesight_hf.models import HybridSpec, find_modules
from gatesight_hf.scoring import Needs, Recorder

from ..helpers.models import tiny_model
from ..helpers.oracle import assert_same, capture_attention
from ..helpers.running import forward, left_padded, padded, prefilled, random_ids

pytestmark = [pytest.mark.core, pytest.mark.quick]

LENGTH = 17


def outputs_of(model: Any, run: Any) -> list[list[Tensor]]:
    """What each attention module returns, forward by forward."""
    seen: list[list[Tensor]] = []
    handles = []
    for module in find_modules(model, HybridSpec.from_config(model.config)).attention:
        chunks: list[Tensor] = []
        seen.append(chunks)
        handles.append(module.register_forward_hook(lambda _m, _a, out, chunks=chunks: chunks.append(out[0])))
    run()
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("chunks", [[LENGTH], [9, 8], [16, 1]])
def test_the_view_reproduces_the_output_of_the_module(any_model: Any, chunks: list[int]) -> None:
    """o_proj(σ(gate) ⊙ softmax(scale · q kᵀ) v), with all keys and values of the forwards so far."""
    spec = HybridSpec.from_config(any_model.config)
    modules = find_modules(any_model, spec)
    cache = GateSightCache(Recorder(), any_model, allocation="flat")
    ids = random_ids(LENGTH, rows=2)
    with capture_attention(any_model, spec, cache) as views:
        outputs = outputs_of(any_model, lambda: [forward(any_model, part, cache) for part in ids.split(chunks, dim=1)])
    group = spec.num_attention_heads // spec.num_key_value_heads
    for module, of_layer, expected, layer in zip(
        modules.attention, views, outputs, cache.attention_layers, strict=True
    ):
        queries, keys, values = (
            torch.cat([getattr(view, name) for view in of_layer], dim=1) for name in ("queries", "keys", "values")
        )
        assert layer.keys is not None and layer.values is not None
        assert_same(keys.transpose(1, 2), layer.keys)
        assert_same(values.transpose(1, 2), layer.values)
        assert queries.shape[-1] == keys.shape[-1] == spec.head_dim
        logits = torch.einsum("bqhd,bkhd->bhqk", queries, keys.repeat_interleave(group, dim=2)) * spec.scale
        weights = logits.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf).softmax(-1)
        read = torch.stack([of_layer[0].read(row) for row in layer.values])
        read = read.repeat_interleave(spec.num_attention_heads // read.shape[1], dim=1)
        attended = torch.einsum("bhqk,bhkd->bqhd", weights, read)
        if of_layer[0].gate is not None:
            attended = attended * torch.cat([view.gate for view in of_layer], dim=1).sigmoid()
        made: Any = module.o_proj  # type: ignore[union-attr]
        assert_same(made(attended.flatten(2)), torch.cat(expected, dim=1))


def test_rotary_turns_only_its_own_channels_and_back(dense: Any) -> None:
    spec = HybridSpec.from_config(dense.config)
    cos, sin = rotary_tables(dense.model.rotary_emb)(torch.arange(5, 9))
    assert cos.shape == (4, spec.head_dim // 4)
    states = torch.randn(3, 4, spec.head_dim)
    turned = apply_rotary(states, cos, sin)
    assert torch.equal(turned[..., 8:], states[..., 8:])
    assert (turned[..., :8] - states[..., :8]).abs().max() > 0.1
    assert_same(apply_rotary(turned, cos, -sin), states)


def test_a_cache_shows_views_and_only_its_own(dense: Any) -> None:
    """Equal to those of hooks that know nothing of caches; neither other caches nor forks are watched."""
    spec = HybridSpec.from_config(dense.config)
    cache, other = (GateSightCache(Recorder(), dense, allocation="flat") for _ in range(2))
    seen: list[tuple[int, AttentionView]] = []
    ids = random_ids(LENGTH)
    with capture_attention(dense, spec, cache) as views, cache.watch_attention(lambda j, view: seen.append((j, view))):
        forward(dense, ids, cache)
        forward(dense, ids, other)
        forward(dense, ids, cache.fork())
    forward(dense, ids, cache)
    assert [j for j, _ in seen] == [0, 1]
    for (_, shown), (hooked,) in zip(seen, views, strict=True):
        for name, value in vars(hooked).items():
            found = getattr(shown, name)
            assert found is value is None or torch.equal(found, value)


def test_a_watcher_that_fails_is_let_go(dense: Any) -> None:
    cache = GateSightCache(Recorder(), dense, allocation="flat")

    def fail(ordinal: int, view: AttentionView) -> None:
        raise ArithmeticError

    with pytest.raises(ArithmeticError), cache.watch_attention(fail):
        forward(dense, random_ids(3), cache)
    assert cache.get_seq_length() == 0
    forward(dense, random_ids(3), cache)


def test_two_threads_watch_at_once(dense: Any) -> None:
    """One scores with a replay while another runs the model: neither sees the other's forwards."""
    expected = prefilled(dense, random_ids(12), allocation="flat", scorer=Recorder())
    scorer = OracleScorer(dense, ((3, 4, 5),))
    wanted = scorer.score(expected.prefill())
    failures: list[BaseException] = []

    def run() -> None:
        try:
            for _ in range(20):
                with torch.no_grad():
                    forward(dense, random_ids(9, seed=3), GateSightCache(Recorder(), dense, allocation="flat"))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        thread.start()
        for _ in range(10):
            assert all(torch.equal(a, b) for a, b in zip(scorer.score(expected.prefill()), wanted, strict=True))
    finally:
        thread.join()
        sys.setswitchinterval(interval)
    assert not failures


def test_dynamic_rope_is_not_changed_by_a_look_ahead() -> None:
    model = tiny_model(
        rope_parameters={
            "rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1], "mrope_interleaved": True,
        },
        max_position_embeddings=64,
    )  # fmt: skip
    rotary = find_modules(model, HybridSpec.from_config(model.config)).decoder.rotary_emb
    before = rotary.inv_freq.clone()  # type: ignore[union-attr, operator]
    rotary_tables(rotary)(torch.arange(500, 600))
    assert torch.equal(rotary.inv_freq, before)  # type: ignore[union-attr, arg-type]


# -- what a cache records for scorers ----------------------------------------------------------------------------------

EVERYTHING = Needs(signals=True, queries=6, query_moments=True, hidden=True)


def recorded(model: Any, ids: Tensor, chunks: list[int], mask: Tensor | None = None) -> Any:
    cache = GateSightCache(Recorder(EVERYTHING), model, allocation="flat")
    spec, seen = HybridSpec.from_config(model.config), 0
    with capture_attention(model, spec, cache) as views:
        for part in ids.split(chunks, dim=1):
            seen += part.shape[1]
            forward(model, part, cache, **({} if mask is None else padded(mask[:, :seen], part.shape[1])))
    return cache.prefill(), views


@pytest.mark.parametrize("chunks", [[LENGTH], [2, 3, 12], [16, 1], [1] * LENGTH])
def test_records_of_attention_do_not_depend_on_chunks(dense: Any, chunks: list[int]) -> None:
    prefill, _ = recorded(dense, random_ids(LENGTH, rows=2), chunks)
    whole, views = recorded(dense, random_ids(LENGTH, rows=2), [LENGTH])
    for j, (view,) in enumerate(views):
        assert_same(prefill.queries[j], view.queries[:, -6:], 1e-4)
        assert_same(prefill.hidden[j], view.hidden, 1e-4)
        counted = view.queries_before_rope[:, 4:].double()
        moments = prefill.query_moments[j]
        assert moments.count.tolist() == [LENGTH - 4] * 2
        assert_same(moments.mean.double(), counted.mean(1), 1e-4)
        for head in range(counted.shape[2]):
            for row in range(2):
                expected = torch.cov(counted[row, :, head].T, correction=0)
                assert_same(moments.covariance[row, head].double(), expected, 1e-3)
    assert_same(whole.hidden[1], views[1][0].hidden)


def test_moments_leave_out_pads(dense: Any) -> None:
    """The first four real tokens of each row are skipped, wherever they stand."""
    rows = [random_ids(LENGTH, seed=1), random_ids(7, seed=2)]
    ids, mask = left_padded(rows)
    batch, _ = recorded(dense, ids, [12, 5], mask)
    for row, alone in enumerate(rows):
        single, _ = recorded(dense, alone, [alone.shape[1]])
        for j in range(2):
            assert batch.query_moments[j].count[row] == alone.shape[1] - 4
            assert_same(batch.query_moments[j].mean[row], single.query_moments[j].mean[0], 1e-4)
            assert_same(batch.query_moments[j].covariance[row], single.query_moments[j].covariance[0], 1e-4)
