"""Fit an estimator on collected shards, with the honest baselines on the same tensors.

Everything streams: one document is in memory at a time, so that memory does not grow with their number. All heads of a
layer are fitted at once. Targets are log utilities: utilities span many orders of magnitude, and only their order
matters to selection.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from ..estimator import Estimator, EstimatorConfig
from ..features import AGES, assemble, feature_names
from .collect import Shard, read_shards
from .metrics import METRICS, overlap

#: Utilities below this share of the largest one are as good as zero.
UTILITY_FLOOR = 1e-4
#: Tokens of one document in one step.
TOKENS_PER_STEP = 8192

#: Scores `[H, T]` of one document for one attention layer from its inputs `[T, F]`, not standardised.
ScoreFunction = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class FitOptions:
    epochs: int = 30
    learning_rate: float = 3e-3
    weight_decay: float = 1e-2
    seed: int = 0


def layer_inputs(config: EstimatorConfig, shard: Shard, ordinal: int) -> Tensor:
    """Estimator inputs of one document for one attention layer, `[T, F]`."""
    return assemble([shard.signals[i] for i in config.gdn_windows[ordinal]], 0, shard.length, 0, shard.length)


def log_target(utilities: Tensor) -> Tensor:
    return (utilities + UTILITY_FLOOR).log()


@dataclass
class Moments:
    """Sums over all training tokens of one attention layer: enough for means, deviations and ridge regression."""

    count: int
    inputs: Tensor
    products: Tensor
    targets: Tensor
    cross: Tensor

    @property
    def mean(self) -> Tensor:
        return self.inputs / self.count

    @property
    def std(self) -> Tensor:
        variance = self.products.diagonal() / self.count - self.mean.square()
        return variance.clamp_min(0).sqrt().clamp_min(1e-4)

    def ridge(self, strength: float = 1e-3) -> tuple[Tensor, Tensor]:
        """Weights `[F, H]` and biases `[H]` on raw inputs, float64; `strength` is relative to unit-variance inputs."""
        mean, std, target_mean = self.mean, self.std, self.targets / self.count
        covariance = (self.products / self.count - torch.outer(mean, mean)) / torch.outer(std, std)
        cross = (self.cross / self.count - torch.outer(mean, target_mean)) / std.unsqueeze(1)
        eye = torch.eye(len(mean), dtype=covariance.dtype)
        weights = torch.linalg.solve(covariance + strength * eye, cross) / std.unsqueeze(1)
        return weights, target_mean - mean @ weights


def gather_moments(config: EstimatorConfig, paths: Sequence[Path]) -> list[Moments]:
    """One pass over the training shards."""
    moments: list[Moments] = []
    for shard in tqdm(read_shards(paths), total=len(paths), desc="statistics", unit="document"):
        for j in range(len(config.gdn_windows)):
            inputs = layer_inputs(config, shard, j).double()
            targets = log_target(shard.utilities[j]).double().T
            new = Moments(len(inputs), inputs.sum(0), inputs.T @ inputs, targets.sum(0), inputs.T @ targets)
            if len(moments) <= j:
                moments.append(new)
            else:
                moments[j] = Moments(*(getattr(moments[j], f.name) + getattr(new, f.name) for f in fields(Moments)))
    return moments


@torch.enable_grad()
def fit_mlps(
    config: EstimatorConfig,
    paths: Sequence[Path],
    moments: Sequence[Moments],
    options: FitOptions,
    columns: slice = slice(None),
    label: str = "fit",
) -> list[dict[str, Tensor]]:
    """Train the MLPs of all layers and heads on the inputs `columns`; returns each layer's tensors."""
    generator = torch.Generator().manual_seed(options.seed)
    heads, width = config.num_key_value_heads, config.hidden_size
    layers: list[dict[str, Tensor]] = []
    for moment in moments:
        size = len(moment.mean[columns])
        target = moment.targets / moment.count
        layers.append(
            {
                "weight_in": torch.randn(heads, size, width, generator=generator) * size**-0.5,
                "bias_in": torch.zeros(heads, width),
                "weight_out": torch.randn(heads, width, generator=generator) * width**-0.5,
                "bias_out": target.float().clone(),
            }
        )
    parameters = [tensor.requires_grad_() for layer in layers for tensor in layer.values()]
    optimiser = torch.optim.AdamW(parameters, lr=options.learning_rate, weight_decay=options.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, options.learning_rate, total_steps=options.epochs * len(paths), pct_start=0.05
    )
    rng = random.Random(options.seed)
    for _ in tqdm(range(options.epochs), desc=label, unit="epoch"):
        for shard in read_shards(rng.sample(list(paths), len(paths))):
            token = torch.randperm(shard.length, generator=generator)[:TOKENS_PER_STEP]
            loss = torch.zeros(())
            for j, (layer, moment) in enumerate(zip(layers, moments, strict=True)):
                inputs = layer_inputs(config, shard, j)[token][:, columns]
                inputs = ((inputs - moment.mean[columns]) / moment.std[columns]).float()
                loss = loss + F.mse_loss(_mlps(layer, inputs), log_target(shard.utilities[j][:, token]))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    return [
        {
            "input_mean": moment.mean[columns].float(),
            "input_std": moment.std[columns].float(),
            **{name: tensor.detach() for name, tensor in layer.items()},
        }
        for layer, moment in zip(layers, moments, strict=True)
    ]


def mlp_scores(layer: dict[str, Tensor], inputs: Tensor) -> Tensor:
    """Scores `[H, T]` of one layer's MLPs on raw inputs `[T, F]`."""
    return _mlps(layer, (inputs - layer["input_mean"]) / layer["input_std"])


def _mlps(layer: dict[str, Tensor], standard: Tensor) -> Tensor:
    """All heads' MLPs of one layer on standardised inputs: `[T, F]` -> `[H, T]`."""
    hidden = F.gelu(torch.einsum("tf,hfw->htw", standard, layer["weight_in"]) + layer["bias_in"].unsqueeze(1))
    return torch.einsum("htw,hw->ht", hidden, layer["weight_out"]) + layer["bias_out"].unsqueeze(1)


def best_single_signals(config: EstimatorConfig, paths: Sequence[Path]) -> list[list[tuple[int, int]]]:
    """For each layer and head, the signal and sign with the highest mean overlap@10 on the training documents."""
    sums: list[Any] = [0.0] * len(config.gdn_windows)
    for shard in tqdm(read_shards(paths), total=len(paths), desc="single signals", unit="document"):
        for j in range(len(config.gdn_windows)):
            columns = layer_inputs(config, shard, j)[:, : -len(AGES)].T
            signed = torch.stack([columns, -columns])
            found = torch.stack(
                [overlap(signed, utilities.expand_as(signed)) for utilities in shard.utilities[j]], dim=0
            )
            sums[j] = sums[j] + found
    best = []
    for total in sums:
        flat = total.flatten(1).argmax(-1)
        best.append([(int(i % total.shape[2]), 1 if i < total.shape[2] else -1) for i in flat])
    return best


def evaluate(
    config: EstimatorConfig, paths: Sequence[Path], methods: dict[str, ScoreFunction]
) -> dict[str, dict[str, float]]:
    """Mean of each metric over documents, layers and heads, for each method."""
    sums = {name: dict.fromkeys(METRICS, 0.0) for name in methods}
    for shard in tqdm(read_shards(paths), total=len(paths), desc="evaluation", unit="document"):
        for j in range(len(config.gdn_windows)):
            inputs = layer_inputs(config, shard, j)
            for name, score in methods.items():
                scores = score(j, inputs)
                for metric, function in METRICS.items():
                    sums[name][metric] += float(function(scores, shard.utilities[j]).mean())
    count = len(paths) * len(config.gdn_windows)
    return {name: {metric: total / count for metric, total in row.items()} for name, row in sums.items()}


def fit(
    config: EstimatorConfig, train: Sequence[Path], held_out: Sequence[Path], options: FitOptions
) -> tuple[Estimator, dict[str, dict[str, float]], list[list[str]]]:
    """Fit the estimator and its baselines, and measure all of them on held-out documents.

    Returns:
        The estimator; metrics by method; and per layer and head the name of the best single signal.
    """
    moments = gather_moments(config, train)
    mlps = fit_mlps(config, train, moments, options, label="fit mlp")
    ages = fit_mlps(config, train, moments, options, slice(-len(AGES), None), label="fit age only")
    ridges = [moment.ridge() for moment in moments]
    singles = best_single_signals(config, train)

    def single(j: int, inputs: Tensor) -> Tensor:
        return torch.stack([sign * inputs[:, column] for column, sign in singles[j]])

    def ridge(j: int, inputs: Tensor) -> Tensor:
        return (inputs.double() @ ridges[j][0] + ridges[j][1]).T

    metrics = evaluate(
        config,
        held_out,
        {
            "mlp": lambda j, inputs: mlp_scores(mlps[j], inputs),
            "ridge": ridge,
            "best single signal": single,
            "age only": lambda j, inputs: mlp_scores(ages[j], inputs[:, -len(AGES) :]),
        },
    )
    names = [
        [
            ("-" if sign < 0 else "") + feature_names(config.num_value_heads, len(config.gdn_windows[j]))[column]
            for column, sign in layer
        ]
        for j, layer in enumerate(singles)
    ]
    tensors = {f"layers.{j}.{name}": tensor for j, layer in enumerate(mlps) for name, tensor in layer.items()}
    return Estimator(config, tensors), metrics, names
