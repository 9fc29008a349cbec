"""TriAttention against the paper's own form of the score, and the life of its statistics."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gatesight_hf import EstimatorMismatchError, GateSightCache
from gatesight_hf.methods import KeyDiff, TriAttention
from gatesight_hf.methods.triattention import OFFSETS

from ..helpers import methods_reference as reference
from ..helpers.methods_reference import Plain, check_scores, made_prefill, random_rows, recorded
from ..helpers.models import tiny_model
from ..helpers.oracle import assert_same, evicted_of
from ..helpers.running import compacted, left_padded, prefilled, random_ids

pytestmark = [pytest.mark.core, pytest.mark.quick]

LENGTH = 17
nopes = pytest.mark.parametrize("nope", ["none", "mean", "full"])
aggregations = pytest.mark.parametrize("aggregation", ["mean", "max"])


def made_statistics(layers: int, heads: int = 6, pairs: int = 2, channels: int = 8) -> list[dict[str, Tensor]]:
    """Mean magnitudes are at least magnitudes of means, as of real queries."""
    statistics = []
    for _ in range(layers):
        mean = torch.randn(heads, channels)
        pair_norms = torch.hypot(mean[:, :pairs], mean[:, pairs : 2 * pairs])
        least = torch.cat([pair_norms, mean[:, 2 * pairs :].abs()], dim=1)
        statistics.append({"mean": mean, "magnitude": least + torch.rand(least.shape)})
    return statistics


# -- scores ------------------------------------------------------------------------------------------------------------


@nopes
@aggregations
@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_scores_are_those_of_the_formula(nope: str, aggregation: str, scale: float) -> None:
    """Padded rows, partial RoPE, groups of 3, and an attention scaling that counts squared."""
    rows = random_rows([LENGTH, 1, 2, 5], layers=2, scale=scale)
    prefill, statistics = made_prefill(rows, group=3), made_statistics(2)
    scorer = TriAttention(statistics, "", nope=nope, aggregation=aggregation)  # type: ignore[arg-type]
    for found, layer, of_layer in zip(scorer.score(prefill), rows, statistics, strict=True):
        for scores, row in zip(found, layer, strict=True):
            expected = reference.triattention(row, of_layer["mean"], of_layer["magnitude"], nope, aggregation, OFFSETS)
            check_scores(scores[:, -row.length :], expected, 2e-5)


@nopes
@aggregations
def test_scores_of_a_calibrated_model_are_those_of_the_formula(dense: Any, nope: str, aggregation: str) -> None:
    """Statistics of the prefilled text itself, by the plain definition. Distances of 65536 turn the fastest pair by
    angles that float32 holds to 4e-3, in the model as in any other implementation."""
    ids = random_ids(LENGTH)
    scorer = TriAttention.calibrate(dense, ids, nope=nope, aggregation=aggregation)
    prefill, rows = recorded(dense, ids)
    for j, (row,) in enumerate(rows):
        half = len(row.frequencies)
        mean = torch.stack([sum(row.queries[:, head]) / LENGTH for head in range(6)])  # type: ignore[arg-type]
        pairs = (row.queries[..., :half].square() + row.queries[..., half : 2 * half].square()).sqrt()
        magnitude = torch.cat([pairs, row.queries[..., 2 * half :].abs()], dim=-1).mean(0)
        assert_same(scorer.statistics[j]["mean"].double(), mean)
        assert_same(scorer.statistics[j]["magnitude"].double(), magnitude)
        expected = reference.triattention(row, mean, magnitude, nope, aggregation, OFFSETS)
        check_scores(scorer.score(prefill)[j][0], expected, 1e-3 if aggregation == "mean" else 1e-2)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("mean", [-1 / 3, 8 / 3, -7 / 3]), ("max", [-1.0, 0.0, 1.0])],
)
def test_by_hand(aggregation: str, expected: list[float]) -> None:
    """One pair that turns by π a token, keys of norm 1, 2 and 3: cosines of -1, 1, -1 at all distances but one."""
    row = Plain(
        torch.zeros(3, 1, 2), torch.tensor([[[1.0, 0.0]], [[2.0, 0.0]], [[3.0, 0.0]]]), torch.zeros(3, 1, 2), [math.pi]
    )
    statistics = [{"mean": torch.tensor([[1.0, 0.0]]), "magnitude": torch.tensor([[1.0]])}]
    scorer = TriAttention(statistics, "", aggregation=aggregation)  # type: ignore[arg-type]
    exact = torch.tensor(expected)
    exact = exact / exact.std(correction=0)
    assert_same(scorer.score(made_prefill([[row]], group=1))[0][0, 0], exact)


def test_per_head_gives_all_layers_the_mean_of_their_scores() -> None:
    prefill = made_prefill(random_rows([LENGTH, 6], layers=3), group=3)
    scorer = TriAttention(made_statistics(3), "")
    apart = scorer.score(prefill)
    shared = replace(scorer, mode="per_head").score(prefill)
    assert (apart[0] - apart[1]).abs().max() > 0.1
    for of_layer in shared:
        assert torch.equal(of_layer, shared[0])
        assert_same(of_layer, sum(apart) / 3)  # type: ignore[arg-type]


def test_heads_keep_the_same_tokens_in_every_layer_per_head(dense: Any) -> None:
    scorer = TriAttention.calibrate(dense, random_ids(40, seed=9), mode="per_head")
    cache = compacted(dense, random_ids(LENGTH), scorer=scorer, kept_fraction=0.5, allocation="flat")
    first, second = evicted_of(cache, 0, LENGTH)
    assert (~first).sum() == (~second).sum() + 2  # one entry more per head: 17 of 34
    assert (second | ~first).all(), "what the second layer keeps, the first one keeps"


def test_identical_keys_score_zero() -> None:
    """A deviation of nearly nothing must not blow rounding up."""
    keys = torch.ones(LENGTH, 2, 8)
    prefill = made_prefill([[Plain(torch.ones(LENGTH, 6, 8), keys, keys, frequencies=[0.0, 0.0])]], group=3)
    (scores,) = TriAttention(made_statistics(1), "").score(prefill)
    assert scores.abs().max() < 1.0


def test_padded_rows_keep_what_each_keeps_alone(dense: Any) -> None:
    scorer = TriAttention.calibrate(dense, random_ids(40, seed=9))
    rows = [random_ids(n, seed=n) for n in (LENGTH, 6, 1)]
    ids, mask = left_padded(rows)
    together = compacted(dense, ids, mask=mask, scorer=scorer, kept_fraction=0.4, allocation="flat")
    for r, row in enumerate(rows):
        alone = compacted(dense, row, scorer=scorer, kept_fraction=0.4, allocation="flat")
        pairs = zip(evicted_of(together, r, row.shape[1]), evicted_of(alone, 0, row.shape[1]), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_a_bfloat16_model_scores_nearly_as_in_float32(dense: Any) -> None:
    ids = random_ids(LENGTH)
    narrow = tiny_model().bfloat16()
    expected = TriAttention.calibrate(dense, ids).score(recorded(dense, ids)[0])
    found = TriAttention.calibrate(narrow, ids).score(recorded(narrow, ids)[0])
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).abs().max() < 0.3  # of scores with a deviation of 1


# -- statistics --------------------------------------------------------------------------------------------------------


def test_saved_statistics_load_bit_for_bit_in_any_mode(dense: Any, tmp_path: Any) -> None:
    scorer = TriAttention.calibrate(dense, random_ids(40))
    path = tmp_path / "new folder" / "statistics.safetensors"
    scorer.save(path)
    loaded = TriAttention.load(path, nope="none", mode="per_head", aggregation="max")
    assert (loaded.nope, loaded.mode, loaded.aggregation) == ("none", "per_head", "max")
    assert loaded.fingerprint == scorer.fingerprint
    for found, expected in zip(loaded.statistics, scorer.statistics, strict=True):
        assert set(found) == set(expected) == {"mean", "magnitude"}
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(ValueError, match="mode must be one of"):
        TriAttention.load(path, mode="union")


def test_more_than_nine_layers_load_in_order(tmp_path: Any) -> None:
    scorer = TriAttention(made_statistics(12), "0123")
    scorer.save(tmp_path / "statistics")
    for found, expected in zip(TriAttention.load(tmp_path / "statistics").statistics, scorer.statistics, strict=True):
        assert torch.equal(found["mean"], expected["mean"])


def test_calibration_counts_all_rows_and_leaves_the_model_as_it_was(dense: Any) -> None:
    rows = random_ids(20, rows=2)
    modules = list(dense.modules())
    GateSightCache(TriAttention.calibrate(dense, rows), dense)  # its hooks are attached from now on
    before = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules]
    both = TriAttention.calibrate(dense, rows).statistics
    assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules] == before
    apart = [TriAttention.calibrate(dense, row[None]).statistics for row in rows]
    for j, of_layer in enumerate(both):
        for name, tensor in of_layer.items():
            assert_same(tensor, (apart[0][j][name] + apart[1][j][name]) / 2)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(5, dtype=torch.long), r"ids must be \[B, T\]"),
        (torch.zeros((1, 0), dtype=torch.long), "no tokens to calibrate on"),
    ],
)
def test_calibration_needs_text(dense: Any, ids: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TriAttention.calibrate(dense, ids)


def test_statistics_of_another_model_are_refused(dense: Any) -> None:
    """triattention issues 7 and 8: statistics that do not say what they are for."""
    scorer = TriAttention.calibrate(tiny_model(num_key_value_heads=3), random_ids(20))
    with pytest.raises(EstimatorMismatchError, match=r"layout .*qwen3_5_text.*Calibrate on this model"):
        GateSightCache(scorer, dense)
    with pytest.raises(EstimatorMismatchError):
        prefilled(dense, random_ids(5), scorer=KeyDiff()).fork(scorer=scorer)


def test_incomplete_statistics_are_refused(dense: Any) -> None:
    scorer = TriAttention.calibrate(dense, random_ids(20))
    narrow = [{name: tensor[:3] for name, tensor in of_layer.items()} for of_layer in scorer.statistics]
    for statistics in (scorer.statistics[:1], [], narrow):
        with pytest.raises(ValueError, match="Mean queries"):
            GateSightCache(replace(scorer, statistics=statistics), dense)


def test_damaged_files_say_so(dense: Any, tmp_path: Any) -> None:
    path = tmp_path / "statistics.safetensors"
    with pytest.raises(FileNotFoundError, match="calibrate"):
        TriAttention.load(path)
    with pytest.raises(FileNotFoundError, match="calibrate"):
        TriAttention.load(tmp_path)
    TriAttention.calibrate(dense, random_ids(20)).save(path)
    whole, tensors = path.read_bytes(), load_file(path)
    metadata = {"triattention": '{"fingerprint": "0"}'}

    def refused() -> None:
        with pytest.raises(ValueError, match="holds no TriAttention statistics"):
            TriAttention.load(path)

    for damaged in (b"", b"nothing of the kind", whole[:50], whole[:-4]):
        path.write_bytes(damaged)
        refused()
    for data in (None, {"triattention": "no json"}, {"triattention": "[]"}, {"triattention": "{}"}, {"other": "{}"}):
        save_file(tensors, path, metadata=data)
        refused()
    for name in tensors:
        save_file({key: tensor for key, tensor in tensors.items() if key != name}, path, metadata=metadata)
        refused()
