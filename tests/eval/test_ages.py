"""What `gatesight_eval.observations.ages` measures, and what is committed of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gatesight_eval.observations import ages
from gatesight_hf import Estimator
from gatesight_hf.training.collect import read_shards
from gatesight_hf.training.fit import mlp_scores, signal_inputs

from ..helpers.models import random_estimator, tiny_model
from ..helpers.paths import ROOT

RESULTS = ROOT / "eval" / "results"
COMMITTED = json.loads((RESULTS / "ages.json").read_text(encoding="utf-8"))
TOKENS = 200


@pytest.fixture
def estimator() -> Estimator:
    """Of which ages weigh as much as signals do."""
    return random_estimator(tiny_model())


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for number, path in enumerate(paths):
        generator = torch.Generator().manual_seed(number)
        signals = {f"signals.{i}": torch.rand(TOKENS, 3, 4, generator=generator) for i in range(6)}
        save_file({**signals, "utilities": torch.rand(2, 2, TOKENS, generator=generator)}, path)
    return paths


def test_what_format_2_reads_is_what_the_library_reads(estimator, shards):
    shard = next(read_shards(shards))
    inputs = ages.inputs_with(estimator.config, ages.SCALES[ages.NEW][0])(shard, 1)
    assert torch.equal(inputs, signal_inputs(estimator.config)(shard, 1))


@pytest.mark.parametrize("name", ages.SCALES)
def test_ages_of_a_context_of_one_or_no_token(name):
    scale, _ = ages.SCALES[name]
    assert scale(0, 1, 1).tolist() == [[0, 0, 0]]
    assert scale(0, 0, 0).shape == (0, 3)


def test_old_ages_are_those_of_the_first_format():
    """age / T, and logarithms of tokens over that of 2^20 tokens."""
    found = ages.constant_scale(2, 4, 5)
    scale = torch.tensor(1 + 2**20).log()
    expected = torch.tensor([[2 / 5, torch.tensor(3.0).log() / scale, torch.tensor(3.0).log() / scale],
                             [1 / 5, torch.tensor(2.0).log() / scale, torch.tensor(4.0).log() / scale]])  # fmt: skip
    torch.testing.assert_close(found, expected)


def test_all_scales_but_the_first_agree_at_1024_tokens():
    new, shares = (ages.SCALES[name][0](0, 1024, 1024) for name in (ages.NEW, ages.SHARES))
    torch.testing.assert_close(new, shares)


def test_places_are_part_of_the_longer_context():
    """With ages that give the tokens' places away."""

    def places(start: int, stop: int, length: int) -> Tensor:
        return torch.arange(start, stop)[:, None] + torch.tensor([0, 1000, 1000 * length])

    found = {name: place(places, 5, 3) for name, place in ages.PLACES.items()}
    assert {name: tensor[:, 0].tolist() for name, tensor in found.items()} == {
        "spread over it": [0, 4, 7, 10, 14],
        "its beginning": [0, 1, 2, 3, 4],
        "its end": [10, 11, 12, 13, 14],
    }
    assert all((tensor[:, 2] - tensor[:, 0] == 15_000).all() for tensor in found.values())


def test_changes_are_those_of_the_best_tenth(estimator, shards):
    found = ages.changed(estimator, ages.constant_scale, shards, 256)
    layers, shares = ages.layers_of(estimator), []
    for shard in read_shards(shards):
        for j, layer in enumerate(layers):
            inputs = ages.inputs_with(estimator.config, ages.constant_scale)(shard, j)
            longer = torch.cat([inputs[:, :-3], ages.constant_scale(0, TOKENS, 256 * TOKENS)], dim=1)
            kept, other = (mlp_scores(layer, x).topk(TOKENS // 10).indices for x in (inputs, longer))
            shares += [len({*a.tolist()} - {*b.tolist()}) / 20 for a, b in zip(kept, other, strict=True)]
    assert found["its beginning"] == pytest.approx(sum(shares) / len(shares))
    assert min(found.values()) > 0.05


def test_nothing_changes_with_shares_of_the_context_and_at_the_same_length(estimator, shards):
    assert ages.changed(estimator, ages.shares, shards, 256)["spread over it"] < 0.01
    for scale, _ in ages.SCALES.values():
        assert ages.changed(estimator, scale, shards, 1) == dict.fromkeys(ages.PLACES, 0)


def test_deviations_are_those_of_the_statistics(estimator):
    mean, std = (estimator.tensors[f"layers.0.input_{name}"] for name in ("mean", "std"))
    found = ages.standardised(estimator, ages.constant_scale, 1000)
    assert found["relative_age"] == pytest.approx([float(-mean[-3] / std[-3]), float((0.999 - mean[-3]) / std[-3])])
    assert all(low < high for low, high in found.values())


@pytest.mark.slow
def test_the_command_writes_what_it_measures(tmp_path, capsys):
    sizes = "--length 256 --longer 2 --train-documents 2 --eval-documents 2 --longer-documents 1 --continuations 2"
    out = ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "found")]
    ages.main([*out, *sizes.split(), "--epochs", "1", "--contexts", "1"])
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["documents"] == {"train": 2, "256": 2, "512": 1} and not found["fitted_is_bundled"]
    assert set(found["overlap@10"]) == set(found["retrieval"]) == {"256", "512"}
    assert (tmp_path / "found.md").read_text() == ages.markdown(found)
    assert capsys.readouterr().out.strip() == ages.markdown(found).strip()


# -- what is committed -------------------------------------------------------------------------------------------------


def test_the_committed_tables_are_those_of_the_committed_numbers():
    assert (RESULTS / "ages.md").read_text(encoding="utf-8") == ages.markdown(COMMITTED)


def test_what_is_committed_was_measured_with_the_bundled_estimator():
    assert COMMITTED["fitted_is_bundled"]
    metrics: dict[str, Any] = json.loads((ages.ESTIMATOR_PATH / "metrics.json").read_text())
    own = COMMITTED["overlap@10"][str(COMMITTED["length"])][ages.NEW]
    held_out = {name: row["overlap@10"] for name, row in metrics["held_out"].items() if name in own}
    assert own == pytest.approx(held_out, abs=1e-3)


def test_new_ages_stay_where_training_saw_them():
    """Within a hundredth of a deviation, at all lengths; old ones leave by more than five."""
    inputs = COMMITTED["inputs"]
    first, *_, last = inputs[ages.NEW]
    for age, ends in inputs[ages.NEW][first].items():
        assert inputs[ages.NEW][last][age] == pytest.approx(ends, abs=0.01)
    assert max(high for _, high in inputs[ages.OLD][last].values()) > 6.5
