"""What `gatesight analyze` measures: on shards with a planted answer, and end to end on the reference model."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gatesight_eval.observations.observe import (
    cells,
    checkpoint_log_decay,
    half_life,
    half_lives,
    observe,
    slow_write,
    written_and_forgotten,
)
from gatesight_eval.observations.tables import PLOTTERS, markdown
from gatesight_eval.reports.tables import save_figure
from gatesight_hf import Estimator, EstimatorConfig
from gatesight_hf.commands.cli import main
from gatesight_hf.models import HybridSpec, find_modules
from gatesight_hf.training.collect import Shard, read_shards
from gatesight_hf.training.fit import FitOptions
from gatesight_hf.training.metrics import spearman

from ..helpers.models import random_config, random_estimator, tiny_model

TOKENS = 200


def shard_of(tmp_path: Path, number: int, planted: Tensor, noise: float = 0.0) -> Path:
    """Random signals of six GDN layers of four heads; the utility of every KV head follows head 3 of layer 1 at 0."""
    generator = torch.Generator().manual_seed(number)
    tensors = {}
    for i in range(6):
        gate = torch.rand(TOKENS, 4, generator=generator)
        decay = -torch.rand(TOKENS, 4, generator=generator) * torch.tensor([2.0, 0.02, 0.2, 1.0])
        magnitude = torch.ones(TOKENS, 4) + torch.rand(TOKENS, 4, generator=generator)
        tensors[f"signals.{i}"] = torch.stack([gate, decay, magnitude], dim=1)
    write = tensors["signals.1"][:, 0, 3] * tensors["signals.1"][:, 2, 3]
    utility = write / write.max() * planted + noise * torch.rand(2, 2, TOKENS, generator=generator)
    path = tmp_path / f"document_{number}.safetensors"
    save_file({**tensors, "utilities": (utility / utility.amax(-1, keepdim=True)).contiguous()}, path)
    return path


@pytest.fixture
def config() -> EstimatorConfig:
    return random_config(tiny_model())


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    return [shard_of(tmp_path, number, torch.ones(2, 2, 1)) for number in range(3)]


def test_half_lives_are_those_of_the_formula():
    assert half_life(torch.tensor([-math.log(2), -math.log(2) / 10])).tolist() == pytest.approx([1.0, 10.0])


def test_half_lives_of_documents_and_parameters(shards):
    found = half_lives(read_shards(shards), torch.tensor([[-1.0, -0.01, -0.1, -0.5]] * 6))
    by_hand = [
        [math.log(2) / -float(signal[:, 1, head].mean()) for head in range(4)]
        for signal in next(read_shards(shards[:1])).signals
    ]
    for rows in zip(found["least"], by_hand, found["most"], strict=True):
        assert all(0.9999 * low <= value <= 1.0001 * high for low, value, high in zip(*rows, strict=True))
    assert found["rank_agreement"] > 0.9 and found["checkpoint_agreement"] > 0.9
    assert half_lives(read_shards(shards[:1]), None)["rank_agreement"] is None


def test_the_parameters_alone_give_the_decay_of_an_input_of_zero():
    model = tiny_model()
    gdn = find_modules(model, HybridSpec.from_config(model.config)).gdn
    found = checkpoint_log_decay(gdn)
    layer: Any = gdn[2]
    expected = -layer.A_log.exp() * torch.log1p(layer.dt_bias.exp())
    torch.testing.assert_close(found[2], expected.float())
    assert checkpoint_log_decay([object()]) is None


def test_the_planted_cell_is_the_strongest(shards, config):
    found = cells(shards, config)
    for cell in found:
        strongest = cell["lift"]["write"]
        assert (strongest["gdn"], strongest["head"]) == (1, 3)
        assert cell["correlation"]["write"][cell["gdn"].index(1)][3] == pytest.approx(1.0)
        lift = strongest["by_decile"]
        assert lift == sorted(lift) and sum(lift) / len(lift) == pytest.approx(1.0, rel=1e-3)
        others = [v for i, row in zip(cell["gdn"], cell["correlation"]["write"], strict=True)
                  for h, v in enumerate(row) if (i, h) != (1, 3)]  # fmt: skip
        assert max(map(abs, others)) < 0.3


def test_correlations_are_those_of_single_heads(shards, config):
    shard: Shard = next(read_shards(shards[:1]))
    (cell, _) = cells(shards[:1], config)
    forgotten = written_and_forgotten(shard.signals[2])[1, 1]
    torch.testing.assert_close(forgotten, 1 - shard.signals[2][:, 1, 1].exp())
    mean = sum(float(spearman(forgotten, utility)) for utility in shard.utilities[0]) / 2
    assert cell["correlation"]["forgetting"][2][1] == pytest.approx(mean, abs=1e-6)


def test_slow_heads_are_those_with_long_half_lives(shards, config):
    """One in ten of twelve: one head."""
    shard: Shard = next(read_shards(shards[:1]))
    lives = half_lives(read_shards(shards), None)["median"]
    window = config.gdn_windows[0]
    slowest = max(((i, h) for i in window for h in range(4)), key=lambda pair: lives[pair[0]][pair[1]])
    assert slowest[1] == 1, "head 1 was made the slowest"
    written = written_and_forgotten(shard.signals[slowest[0]])[0, slowest[1]]
    scores = slow_write(config, lives)(shard, 0)
    assert scores.shape == (2, TOKENS)
    assert all(spearman(row, written) == pytest.approx(1.0) for row in scores)


def test_everything_is_measured_and_rendered(tmp_path, shards, config):
    model = tiny_model()
    estimator: Estimator = random_estimator(model)
    longer = [shard_of(tmp_path, 9, torch.ones(2, 2, 1), noise=0.5)]
    found = observe(shards[:2], shards[2:], longer, config, None, FitOptions(epochs=30), estimator)
    assert set(found["scores"]) == set(found["longer"]) == {
        "mlp", "ridge", "best single signal", "age only", "slow-head effective write", "given estimator"
    }  # fmt: skip
    # Utility is β · ‖v‖ of one head, of which age says nothing.
    assert found["scores"]["ridge"]["overlap@10"] > 0.4 > found["scores"]["age only"]["overlap@10"]
    found |= {"model": "m", "weights": "w", "documents": {"train": 2, "held_out": 1, "longer": 1}, "seed": 0}
    found |= {"tokens": {"held_out": TOKENS, "longer": TOKENS}, "sampling": {"continuations": 1, "tokens": 2}}
    found |= {"versions": {"torch": "2"}, "commit": "c"}
    text = markdown(found, "out")
    for name, row in found["scores"].items():
        assert f"| {name} | {row['overlap@10']:.3f} |" in text
    for name, plot in PLOTTERS.items():
        save_figure(plot(found), tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"(out-{name}.png)" in text


def test_the_command_writes_tables_and_plots(tmp_path, capsys):
    sizes = "--train-documents 2 --eval-documents 2 --longer-documents 1 --length 256 --continuations 2 --epochs 1"
    command = ["analyze", "--model", "reference", "--out", str(tmp_path / "found"), *sizes.split(), "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "found.json").read_text())
    assert found["documents"] == {"train": 2, "held_out": 2, "longer": 1} and found["tokens"]["longer"] == 512
    assert found["half_lives"]["checkpoint"] is not None and found["scores"]["given estimator"]["overlap@10"] > 0.3
    assert len(list(tmp_path.glob("found-*.png"))) == 4 and (tmp_path / "found.md").exists()
    assert main([*command[:4], str(tmp_path / "found"), "--longer-documents", "-1"]) == 1
    assert "--longer-documents must be at least 0" in capsys.readouterr().err
