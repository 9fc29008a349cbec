"""Fit an estimator on collected shards, with the honest baselines on the same tensors.

Everything streams: one document is in memory at a time, so that memory does not grow with their number. All heads of a
layer are fitted at once. Targets are log utilities: utilities span many orders of magnitude, and only their order
matters to selection.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from gatesight_kernels import age_features
from gatesight_kernels.checks import check_whole_number, described

from ..methods.hidden import HiddenStateConfig, HiddenStateScorer
from ..scoring.estimator import Estimator, EstimatorConfig
from ..scoring.features import AGES, assemble, feature_names
from .collect import Shard, read_shards
from .metrics import METRICS, overlap

#: Utilities below this share of the largest one are as good as zero.
UTILITY_FLOOR = 1e-4
#: Tokens of one document in one step.
TOKENS_PER_STEP = 8192

#: Inputs `[T, F]` of one document for one attention layer, not standardised.
InputFunction = Callable[[Shard, int], Tensor]
#: Scores `[H, T]` of one document for one attention layer.
ScoreFunction = Callable[[Shard, int], Tensor]


@dataclass(frozen=True)
class FitOptions:
    epochs: int = 30
    learning_rate: float = 3e-3
    weight_decay: float = 1e-2
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole_number("epochs", self.epochs)
        check_whole_number("seed", self.seed, least=None)
        for name in ("learning_rate", "weight_decay"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 <= value < inf:
                raise ValueError(f"{name} must be a finite number of 0 or more, got {described(value)}.")


def signal_inputs(config: EstimatorConfig) -> InputFunction:
    """What the estimator reads."""
    return lambda shard, j: assemble([shard.signals[i] for i in config.gdn_windows[j]])


def hidden_state_inputs(shard: Shard, ordinal: int) -> Tensor:
    """What the hidden-state scorer reads."""
    hidden = shard.hidden[ordinal]
    return torch.cat([hidden.float(), age_features(0, shard.length, shard.length, hidden.device)], dim=-1)


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


def gather_moments(inputs_of: InputFunction, paths: Sequence[Path]) -> list[Moments]:
    """One pass over the training shards; one entry per attention layer."""
    moments: list[Moments] = []
    for shard in tqdm(read_shards(paths), total=len(paths), desc="statistics", unit="document", disable=None):
        for j, utilities in enumerate(shard.utilities):
            inputs = inputs_of(shard, j).double()
            targets = log_target(utilities).double().T
            new = Moments(len(inputs), inputs.sum(0), inputs.T @ inputs, targets.sum(0), inputs.T @ targets)
            if len(moments) <= j:
                moments.append(new)
            else:
                moments[j] = Moments(*(getattr(moments[j], f.name) + getattr(new, f.name) for f in fields(Moments)))
    return moments


@torch.enable_grad()
def fit_mlps(
    inputs_of: InputFunction,
    width: int,
    paths: Sequence[Path],
    moments: Sequence[Moments],
    options: FitOptions,
    columns: slice = slice(None),
    label: str = "fit",
) -> list[dict[str, Tensor]]:
    """Train the MLPs of all layers and heads, `width` wide, on the inputs `columns`; returns each layer's tensors."""
    generator = torch.Generator().manual_seed(options.seed)
    heads = len(moments[0].targets)
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
    for _ in tqdm(range(options.epochs), desc=label, unit="epoch", disable=None):
        for shard in read_shards(rng.sample(list(paths), len(paths))):
            token = torch.randperm(shard.length, generator=generator)[:TOKENS_PER_STEP]
            loss = torch.zeros(())
            for j, (layer, moment) in enumerate(zip(layers, moments, strict=True)):
                inputs = inputs_of(shard, j)[token][:, columns]
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
    for shard in tqdm(read_shards(paths), total=len(paths), desc="single signals", unit="document", disable=None):
        for j in range(len(config.gdn_windows)):
            columns = signal_inputs(config)(shard, j)[:, : -len(AGES)].T
            signed = torch.stack([columns, -columns])
            found = overlap(signed, shard.utilities[j][:, None, None])
            sums[j] = sums[j] + found
    best = []
    for total in sums:
        flat = total.flatten(1).argmax(-1)
        best.append([(int(i % total.shape[2]), 1 if i < total.shape[2] else -1) for i in flat])
    return best


def evaluate(paths: Sequence[Path], methods: dict[str, ScoreFunction]) -> dict[str, dict[str, float]]:
    """Mean of each metric over documents, layers and heads, for each method."""
    sums = {name: dict.fromkeys(METRICS, 0.0) for name in methods}
    count = 0
    for shard in tqdm(read_shards(paths), total=len(paths), desc="evaluation", unit="document", disable=None):
        for j, utilities in enumerate(shard.utilities):
            count += 1
            for name, score in methods.items():
                scores = score(shard, j)
                for metric, function in METRICS.items():
                    sums[name][metric] += float(function(scores, utilities).mean())
    return {name: {metric: total / count for metric, total in row.items()} for name, row in sums.items()}


@dataclass(frozen=True)
class Fitted:
    """What `fit` gives.

    Attributes:
        estimator: The MLPs on GDN signals.
        hidden_states: The same MLPs on hidden states; None if those were not collected.
        metrics: By method, on held-out documents.
        best_single_signals: Per layer and head, the name of the best single signal.
        methods: What was measured, to measure on other documents.
    """

    estimator: Estimator
    hidden_states: HiddenStateScorer | None
    metrics: dict[str, dict[str, float]]
    best_single_signals: list[list[str]]
    methods: dict[str, ScoreFunction]


def fit(
    config: EstimatorConfig,
    train: Sequence[Path],
    held_out: Sequence[Path],
    options: FitOptions,
    hidden_config: HiddenStateConfig | None = None,
    inputs_of: InputFunction | None = None,
) -> Fitted:
    """Fit the estimator and its baselines, and measure all of them on held-out documents.

    Args:
        config: Of the estimator.
        train, held_out: Shards.
        options: Of training.
        hidden_config: Of the scorer on hidden states, if they were collected and it is to be fitted too.
        inputs_of: Other inputs than `signal_inputs`, for measurements: as many, ages last.

    Raises:
        ValueError: No shards.
    """
    for name, paths in (("train", train), ("held_out", held_out)):
        if not isinstance(paths, (list, tuple)) or not paths:
            raise ValueError(f"{name} must be a list of shards, at least one, got {described(paths)}.")
    inputs_of = inputs_of or signal_inputs(config)
    moments = gather_moments(inputs_of, train)
    mlps = fit_mlps(inputs_of, config.hidden_size, train, moments, options, label="fit mlp")
    age = slice(-len(AGES), None)
    ages = fit_mlps(inputs_of, config.hidden_size, train, moments, options, age, label="fit age only")
    ridges = [moment.ridge() for moment in moments]
    singles = best_single_signals(config, train)

    def single(shard: Shard, j: int) -> Tensor:
        inputs = inputs_of(shard, j)
        return torch.stack([sign * inputs[:, column] for column, sign in singles[j]])

    def ridge(shard: Shard, j: int) -> Tensor:
        return (inputs_of(shard, j).double() @ ridges[j][0] + ridges[j][1]).T

    methods: dict[str, ScoreFunction] = {
        "mlp": lambda shard, j: mlp_scores(mlps[j], inputs_of(shard, j)),
        "ridge": ridge,
        "best single signal": single,
        "age only": lambda shard, j: mlp_scores(ages[j], inputs_of(shard, j)[:, age]),
    }
    hidden_scorer = None
    if hidden_config is not None:
        hidden_moments = gather_moments(hidden_state_inputs, train)
        hidden = fit_mlps(
            hidden_state_inputs, hidden_config.hidden_size, train, hidden_moments, options, label="fit hidden states"
        )
        methods["mlp on hidden states"] = lambda shard, j: mlp_scores(hidden[j], hidden_state_inputs(shard, j))
        hidden_scorer = HiddenStateScorer(hidden_config, _named(hidden))
    names = [
        [
            ("-" if sign < 0 else "") + feature_names(config.num_value_heads, len(config.gdn_windows[j]))[column]
            for column, sign in layer
        ]
        for j, layer in enumerate(singles)
    ]
    return Fitted(Estimator(config, _named(mlps)), hidden_scorer, evaluate(held_out, methods), names, methods)


def _named(layers: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {f"layers.{j}.{name}": tensor for j, layer in enumerate(layers) for name, tensor in layer.items()}
