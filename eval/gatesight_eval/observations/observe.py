"""Why GDN signals tell which KV entries will matter: half-lives of heads, and how signals and scores follow utility.

The observations of the GateSight paper (section 3), on any model and documents. What is measured reads collected
shards (`gatesight_hf.training.collect`), one document at a time; nothing here runs the model.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from gatesight_hf import Estimator, EstimatorConfig
from gatesight_hf.training.collect import Shard, read_shards
from gatesight_hf.training.fit import FitOptions, ScoreFunction, evaluate, fit, mlp_scores, signal_inputs
from gatesight_hf.training.metrics import spearman

#: Slow heads: this share of a window's GDN heads, those with the longest half-lives.
SLOW_SHARE = 0.1
DECILES = 10


def half_life(log_decay: Tensor) -> Tensor:
    """Tokens after which a state has decayed to one half: ln 2 / -g, of mean log-decays of any shape."""
    return math.log(2) / (-log_decay).clamp_min(1e-12)


def checkpoint_log_decay(gdn_layers: Sequence[Any]) -> Tensor | None:
    """Log-decay `[M, HV]` that the parameters alone give, with an input of zero: -exp(A_log) · softplus(dt_bias).

    None for families whose decay has other parameters, or whose parameters are offloaded.
    """
    rows = []
    for layer in gdn_layers:
        log_a, bias = getattr(layer, "A_log", None), getattr(layer, "dt_bias", None)
        if log_a is None or bias is None or log_a.is_meta or log_a.shape != bias.shape:
            return None
        rows.append((-log_a.float().exp() * torch.nn.functional.softplus(bias.float())).detach().cpu())
    return torch.stack(rows)


def half_lives(shards: Iterable[Shard], checkpoint: Tensor | None) -> dict[str, Any]:
    """Of every GDN head: by document, from the mean of its log-decay signal, and from the checkpoint.

    Args:
        shards: Documents.
        checkpoint: See `checkpoint_log_decay`.

    Returns:
        `median`, `least`, `most`: tokens, `[M][HV]`, over documents. `rank_agreement`: mean Spearman correlation of the
        heads' half-lives over pairs of documents (None for a single one). `checkpoint`: tokens, `[M][HV]`;
        `checkpoint_agreement`: its Spearman correlation with the medians. Both None without parameters.
    """
    means = torch.stack([torch.stack([signal[:, 1].float().mean(0) for signal in shard.signals]) for shard in shards])
    lives = half_life(means)  # [documents, M, HV]
    flat = lives.flatten(1)
    pairs = [float(spearman(flat[i], flat[k])) for i, k in combinations(range(len(flat)), 2)]
    median = lives.median(0).values
    found: dict[str, Any] = {
        "median": median.tolist(),
        "least": lives.amin(0).tolist(),
        "most": lives.amax(0).tolist(),
        "rank_agreement": mean(pairs) if pairs else None,
        "checkpoint": None,
        "checkpoint_agreement": None,
    }
    if checkpoint is not None:
        found["checkpoint"] = half_life(checkpoint).tolist()
        found["checkpoint_agreement"] = float(spearman(half_life(checkpoint).flatten(), median.flatten()))
    return found


def written_and_forgotten(signal: Tensor) -> Tensor:
    """Effective write β‖v‖ and forgetting 1 - exp(g) of a GDN layer: `[T, 3, HV]` -> `[2, HV, T]`, float32."""
    gate, decay, magnitude = signal.float().unbind(1)
    return torch.stack([(gate * magnitude).T, -torch.expm1(decay).T])


@dataclass
class _Cells:
    """Sums over documents, of what the signals of a window's heads have to do with utilities of one attention layer."""

    documents: int
    correlation: Tensor  # [2, GDN layers, HV, H]
    lift: Tensor  # [2, GDN layers, HV, H, DECILES]


def cells(paths: Sequence[Path], config: EstimatorConfig) -> list[dict[str, Any]]:
    """For each attention layer, how effective write and forgetting of each GDN head below go with utility.

    Returns:
        Per attention ordinal: `gdn`, the GDN ordinals of the window; `correlation`, Spearman with the utility, mean
        over documents and KV heads, `{"write" | "forgetting": [GDN layers][HV]}`; `lift`, of the head with the
        strongest correlation, mean utility of each tenth of entries by signal (lowest first) over the mean of all.
    """
    sums: list[_Cells] = []
    for shard in tqdm(read_shards(paths), total=len(paths), desc="cells", unit="document", disable=None):
        for j, utilities in enumerate(shard.utilities):
            signals = torch.stack([written_and_forgotten(shard.signals[i]) for i in config.gdn_windows[j]], dim=1)
            kinds, layers, heads, length = signals.shape
            each = signals.unsqueeze(3).expand(-1, -1, -1, len(utilities), -1)  # [2, layers, HV, H, T]
            found = spearman(each, utilities.expand(kinds, layers, heads, -1, -1))
            # Mean utility of each tenth by signal, over the document's mean.
            order = each.argsort(-1)[..., : length // DECILES * DECILES]
            sorted_utilities = utilities.expand_as(each).gather(-1, order).unflatten(-1, (DECILES, -1)).mean(-1)
            lift = sorted_utilities / utilities.mean(-1).unsqueeze(-1).clamp_min(1e-30)
            if len(sums) <= j:
                sums.append(_Cells(0, torch.zeros_like(found), torch.zeros_like(lift)))
            sums[j].documents += 1
            sums[j].correlation += found
            sums[j].lift += lift
    results = []
    for j, total in enumerate(sums):
        correlation = (total.correlation / total.documents).mean(-1)
        lift = (total.lift / total.documents).mean(-2)
        result: dict[str, Any] = {"gdn": list(config.gdn_windows[j]), "correlation": {}, "lift": {}}
        for k, kind in enumerate(("write", "forgetting")):
            layer, head = divmod(int(correlation[k].abs().argmax()), correlation.shape[-1])
            result["correlation"][kind] = correlation[k].tolist()
            result["lift"][kind] = {
                "gdn": config.gdn_windows[j][layer],
                "head": head,
                "by_decile": lift[k, layer, head].tolist(),
            }
        results.append(result)
    return results


def slow_write(config: EstimatorConfig, lives: Sequence[Sequence[float]]) -> ScoreFunction:
    """Scores: effective write of a window's slowest heads, each over its mean in the document; equal for KV heads."""

    def score(shard: Shard, ordinal: int) -> Tensor:
        window = config.gdn_windows[ordinal]
        life = torch.tensor([lives[i] for i in window])
        count = max(1, round(SLOW_SHARE * life.numel()))
        written = torch.stack([written_and_forgotten(shard.signals[i])[0] for i in window])  # [layers, HV, T]
        slowest = written.flatten(0, 1)[life.flatten().topk(count).indices]
        together = (slowest / slowest.mean(-1, keepdim=True).clamp_min(1e-30)).mean(0)
        return together.expand(shard.utilities.shape[1], -1)

    return score


def observe(
    train: Sequence[Path],
    held_out: Sequence[Path],
    longer: Sequence[Path],
    config: EstimatorConfig,
    checkpoint: Tensor | None,
    options: FitOptions,
    estimator: Estimator | None = None,
) -> dict[str, Any]:
    """All observations on collected documents.

    Args:
        train: Shards that ridge regressions, MLPs and the choice of single signals are fitted on.
        held_out: Shards of other documents, which everything is measured on.
        longer: Shards of longer documents, which the same scores are measured on too; may be empty.
        config: Of the estimator that is fitted.
        checkpoint: See `checkpoint_log_decay`.
        options: Of fitting.
        estimator: A trained one to measure beside those fitted here.

    Returns:
        `half_lives`, `cells`, `scores` (metrics by method on held-out documents), `longer` (the same on longer ones)
        and `best_single_signals`.
    """
    lives = half_lives(read_shards(held_out), checkpoint)
    fitted = fit(config, train, held_out, options)
    more: dict[str, ScoreFunction] = {"slow-head effective write": slow_write(config, lives["median"])}
    if estimator is not None:
        inputs_of = signal_inputs(config)
        layers: list[dict[str, Tensor]] = [{} for _ in config.gdn_windows]
        for full_name, tensor in estimator.tensors.items():
            _, j, name = full_name.split(".")
            layers[int(j)][name] = tensor
        more["given estimator"] = lambda shard, j: mlp_scores(layers[j], inputs_of(shard, j))
    return {
        "half_lives": lives,
        "cells": cells(held_out, config),
        "scores": {**fitted.metrics, **evaluate(held_out, more)},
        "longer": evaluate(longer, {**fitted.methods, **more}) if longer else None,
        "best_single_signals": fitted.best_single_signals,
    }
