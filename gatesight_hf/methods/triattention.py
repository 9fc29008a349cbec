"""TriAttention: expected attention over future distances, from statistics of queries on calibration text."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gatesight_kernels.checks import INTEGERS, check_tensor, described

from ..cache.cache import GateSightCache
from ..checks import check_path, check_text
from ..entries.view import AttentionView, apply_rotary
from ..errors import EstimatorMismatchError
from ..files.tensor_files import replacing
from ..models._compat import cache_argument
from ..models.hybrid import HybridSpec
from ..scoring.interface import Prefill, Recorder
from .base import Row, RowScorer

Nope = Literal["none", "mean", "full"]
Mode = Literal["per_layer_head", "per_head"]

#: Distances to future queries.
OFFSETS = tuple(2**k for k in range(17))


@dataclass(frozen=True)
class TriAttention(RowScorer):
    """Score of a key k at position p for queries at distances δ from the end n (arXiv 2604.04921).

    Per query head, with q̄ the mean query before RoPE and E|q| the mean magnitude, over frequencies f as complex pairs:
    mean over δ of Σ_f Re(q̄_f k̄_f e^{iω_f(n + δ - p)}) + Σ_f (E|q_f| - |q̄_f|)·|k_f|; standardised over the entries; the
    largest of the GQA group. No ‖v‖, no window.

    Args:
        statistics: Per attention ordinal `mean` `[heads, D]` of queries before RoPE and `magnitude`
            `[heads, R/2 + D - R]`: mean magnitude of each rotary pair, then of each other channel.
        fingerprint: Layout of the model they are from (`HybridSpec.fingerprint`).
        nope: What channels without RoPE add: `none` (rotary frequencies only: the method as published, for models that
            rotate all channels); or, as variants of ours, `mean` (q̄·k) or `full` (each treated as a frequency of 0).
        mode: `per_layer_head`: each layer and KV head by itself. `per_head`: the mean over layers, so that a KV head
            keeps the same tokens in every layer (the paper's scripts).
        aggregation: Of the distances: `mean` or `max`.
    """

    statistics: list[dict[str, Tensor]]
    fingerprint: str
    nope: Nope = "none"
    mode: Mode = "per_layer_head"
    aggregation: Literal["mean", "max"] = "mean"

    def __post_init__(self) -> None:
        options = (("nope", get_args(Nope)), ("mode", get_args(Mode)), ("aggregation", ("mean", "max")))
        for name, known in options:
            value = getattr(self, name)
            if not isinstance(value, str) or value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {described(value)}.")
        check_text("fingerprint", self.fingerprint)
        layers = self.statistics if isinstance(self.statistics, (list, tuple)) else [None]
        for of_layer in layers:
            if not isinstance(of_layer, dict) or set(of_layer) != {"mean", "magnitude"}:
                raise ValueError(
                    "statistics must be a list of a mean and a magnitude for each attention layer, as calibrate "
                    f"gathers them, got {described(self.statistics)}."
                )
            check_tensor("mean of statistics", of_layer["mean"], "[heads, D]")
            check_tensor("magnitude of statistics", of_layer["magnitude"], "[heads, parts]")

    def __repr__(self) -> str:
        return f"TriAttention(nope={self.nope!r}, mode={self.mode!r}, aggregation={self.aggregation!r})"

    def check(self, spec: HybridSpec) -> None:
        """Raises EstimatorMismatchError unless the statistics are of this layout, and ValueError unless complete."""
        if spec.fingerprint != self.fingerprint:
            raise EstimatorMismatchError(
                f"These TriAttention statistics are for the layout {self.fingerprint}; the model is {spec.describe()}. "
                "Calibrate on this model: TriAttention.calibrate(model, ids)."
            )
        found = [tuple(of_layer["mean"].shape) for of_layer in self.statistics]
        expected = [(spec.num_attention_heads, spec.head_dim)] * spec.num_attention_layers
        if found != expected:
            raise ValueError(f"Mean queries have the shapes {found}, where the layout they name has {expected}.")
        for of_layer in self.statistics:
            heads, parts = of_layer["magnitude"].shape
            if heads != spec.num_attention_heads or not spec.head_dim // 2 <= parts <= spec.head_dim:
                raise ValueError(f"Magnitudes have the shape {tuple(of_layer['magnitude'].shape)}, which fits no RoPE.")
            if not all(part.dtype == torch.float32 and part.isfinite().all() for part in of_layer.values()):
                raise ValueError("TriAttention statistics must be float32 and finite.")

    def score(self, prefill: Prefill) -> list[Tensor]:
        scores = super().score(prefill)
        if self.mode == "per_head":
            shared = torch.stack([of_layer.to(scores[0].device) for of_layer in scores]).mean(0)
            scores = [shared.to(of_layer.device) for of_layer in scores]
        return scores

    def score_row(self, row: Row, ordinal: int) -> Tensor:
        keys = row.keys(ordinal)
        heads = keys.shape[0]
        statistics = {name: tensor.to(keys.device) for name, tensor in self.statistics[ordinal].items()}
        mean, magnitude = (statistics[name].unflatten(0, (heads, -1)) for name in ("mean", "magnitude"))
        offsets = torch.tensor(OFFSETS, device=keys.device)
        # One query at each distance; the keys' own rotations make up the rest of the angle.
        cos, sin = row.rotary(row.next_position + offsets)
        rotary = cos.shape[-1]
        if self.aggregation == "mean":
            cos, sin = cos.mean(0, keepdim=True), sin.mean(0, keepdim=True)
        turned = apply_rotary(mean.unsqueeze(2).expand(-1, -1, len(cos), -1), cos, sin)[..., :rotary]
        towards = torch.einsum("hgod,hnd->hgon", turned, keys[..., :rotary]).amax(2)
        # Frequencies of a scaled RoPE weigh by the square of the scale: once in the keys, once here.
        scale = row.rotary(torch.zeros(1, dtype=torch.long, device=keys.device))[0][0, : rotary // 2]
        spread = magnitude - _magnitudes(mean, rotary)
        spread = torch.cat([spread[..., : rotary // 2] * scale, spread[..., rotary // 2 :]], dim=-1)
        parts = _magnitudes(keys, rotary)
        if self.nope != "full":
            spread, parts = spread[..., : rotary // 2], parts[..., : rotary // 2]
        scores = towards + torch.einsum("hgf,hnf->hgn", spread, parts)
        if self.nope != "none":
            scores = scores + torch.einsum("hgd,hnd->hgn", mean[..., rotary:], keys[..., rotary:])
        centred = scores - scores.mean(-1, keepdim=True)
        return (centred / scores.std(-1, correction=0, keepdim=True).clamp_min(1e-6)).amax(1)

    # -- statistics ----------------------------------------------------------------------------------------------------

    @classmethod
    def calibrate(cls, model: Any, ids: Tensor, **options: Any) -> "TriAttention":
        """Gather the statistics in one forward over plain text.

        Args:
            model: The hybrid model.
            ids: `[B, T]`, without padding.
            options: `nope`, `mode`, `aggregation`.

        Raises:
            TypeError, ValueError: No hybrid model, no ids, or unknown options.
        """
        check_tensor("ids", ids, "[B, T]", INTEGERS)
        if ids.numel() == 0:
            raise ValueError("ids hold no tokens to calibrate on.")
        spec = HybridSpec.of(model)
        cache = GateSightCache(Recorder(), model, allocation="flat")
        statistics: list[dict[str, Tensor]] = []

        def gather(ordinal: int, view: AttentionView) -> None:
            queries = view.queries_before_rope.float().flatten(0, 1)
            magnitude = _magnitudes(queries, view.cos.shape[-1]).mean(0)
            statistics.append({"mean": queries.mean(0).cpu(), "magnitude": magnitude.cpu()})

        with torch.no_grad(), cache.watch_attention(gather):
            model(ids, **{cache_argument(model): cache}, logits_to_keep=1)
        return cls(statistics, spec.fingerprint, **options)

    def save(self, path: str | Path) -> None:
        """Write the statistics as one safetensors file that names the layout they are for.

        Raises:
            OSError: It cannot be written.
        """
        check_path("path", path)
        layers = enumerate(self.statistics)
        tensors = {f"{j}.{name}": tensor.contiguous() for j, layer in layers for name, tensor in layer.items()}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(save(tensors, metadata={"triattention": json.dumps({"fingerprint": self.fingerprint})}))

    @classmethod
    def load(cls, path: str | Path, **options: Any) -> "TriAttention":
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It is no file of TriAttention statistics.
        """
        check_path("path", path)
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path}: no such file; TriAttention.calibrate(model, ids).save(path) makes it.")
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
                fingerprint = json.loads((file.metadata() or {})["triattention"])["fingerprint"]
            layers = {name.partition(".")[0] for name in tensors}
            statistics = [{name: tensors[f"{j}.{name}"] for name in ("mean", "magnitude")} for j in range(len(layers))]
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no TriAttention statistics: {error}") from error
        return cls(statistics, fingerprint, **options)


def _magnitudes(states: Tensor, rotary: int) -> Tensor:
    """`[..., D]` -> `[..., R/2 + D - R]`: of each rotary pair (i, i + R/2), then of each other channel."""
    first, second = states[..., :rotary].chunk(2, dim=-1)
    return torch.cat([torch.hypot(first, second), states[..., rotary:].abs()], dim=-1)
