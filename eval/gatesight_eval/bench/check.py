"""Are the outputs right whose cost is measured? Everything against float64, before any time is believed.

Bounds come from the error of the same maths in plain torch in the signals' dtype: at most twice that. Where plain torch
happens to be exact, a quarter of a rounding step passes, about the RMS of rounding once.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gatesight_hf import Estimator, GateSightCache
from gatesight_hf.cache import prefill
from gatesight_hf.models import HybridSpec, attach, find_modules
from gatesight_hf.models import listening as signals
from gatesight_hf.models.families import GDNAdapter, adapter_for
from gatesight_hf.scoring import Prefill
from gatesight_hf.scoring.features import SIGNALS

from .model import inputs_of

#: Tokens of the references at a time: they are in float64.
TOKENS_PER_STEP = 8192


@dataclass(frozen=True)
class Check:
    """One comparison. `passed` if the error is at most the bound; both are relative RMS unless `what` says more."""

    what: str
    tokens: int
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound  # False for NaN

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "error": finite(self.error), "bound": finite(self.bound), "passed": self.passed}


class DifferentOutputsError(Exception):
    """What is measured does not compute what it should: its times say nothing."""

    def __init__(self, checks: list[Check]) -> None:
        failed = [f"{c.what}, {c.tokens} tokens: error {c.error:.3g} > {c.bound:.3g}" for c in checks if not c.passed]
        super().__init__("outputs differ: " + "; ".join(failed))
        self.checks = checks


def require(checks: list[Check]) -> list[Check]:
    """The checks, if all passed.

    Raises:
        DifferentOutputsError: One did not.
    """
    if not all(check.passed for check in checks):
        raise DifferentOutputsError(checks)
    return checks


def finite(value: float) -> float | None:
    """For JSON, which has no NaN."""
    return value if math.isfinite(value) else None


def relative_rms(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def largest_error(found: Tensor, exact: Tensor) -> float:
    """As a share of the largest exact value."""
    return float((found.double() - exact).abs().max() / exact.abs().max().clamp_min(1e-300))


def bound_for(plain: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    return max(2 * relative_rms(plain, exact), torch.finfo(dtype).eps / 4)


# -- signals -----------------------------------------------------------------------------------------------------------


def plain_signals(layer: Any, b: Tensor, a: Tensor, values: Tensor) -> Tensor:
    """`[B, T, 3, HV]` from the start of a context, in the dtype of `values` `[B, T, HV·D]`, by `F.conv1d`."""
    first, left = 2 * layer.key_dim, layer.conv_kernel_size - 1
    padded = F.pad(values.transpose(1, 2), (left, 0))
    convolved = F.conv1d(padded, layer.conv1d.weight[first:], groups=layer.value_dim)
    heads = F.silu(convolved).unflatten(1, (layer.num_v_heads, layer.head_v_dim))
    decay = -layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias.float())
    magnitude = torch.linalg.vector_norm(heads, dim=2, dtype=torch.float32).transpose(1, 2)
    return torch.stack([b.sigmoid(), decay.to(values.dtype), magnitude.to(values.dtype)], dim=2)


def exact_signals(layer: Any, b: Tensor, a: Tensor, values: Tensor) -> Tensor:
    """The same in float64 from the layer's own weights, the convolution as a sum of shifted inputs."""
    weight = layer.conv1d.weight[2 * layer.key_dim :, 0].double()
    steps = weight.shape[-1]
    parts = []
    for start in range(0, values.shape[1], TOKENS_PER_STEP):
        before = min(start, steps - 1)
        part = F.pad(values[:, start - before : start + TOKENS_PER_STEP].double(), (0, 0, steps - 1 - before, 0))
        length = part.shape[1] - (steps - 1)
        convolved = sum(part[:, k : k + length] * weight[:, k] for k in range(steps))
        assert isinstance(convolved, Tensor)
        activated = convolved * convolved.sigmoid()
        heads = activated.unflatten(-1, (layer.num_v_heads, layer.head_v_dim))
        parts.append(heads.square().sum(-1).sqrt())
    decay = -layer.A_log.double().exp() * F.softplus(a.double() + layer.dt_bias.double(), threshold=700.0)
    return torch.stack([b.double().sigmoid(), decay, torch.cat(parts, dim=1)], dim=2)


def b_a_and_values(adapter: GDNAdapter, layer: Any, outputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """From what a layer's projections gave: b and a `[B, T, HV]`, and values `[B, T, HV·D]`."""
    return *adapter.b_and_a(layer, outputs), adapter.values(layer, outputs).flatten(2)


@dataclass
class Captured:
    """Of a prefill: outputs of a layer's projections over all tokens, and the first call of `hooks.gdn_signals`."""

    projections: dict[tuple[str, int, str], list[Tensor]]
    first_call: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def of(self, kind: str, ordinal: int) -> dict[str, Tensor]:
        found = {name: outputs for (k, i, name), outputs in self.projections.items() if (k, i) == (kind, ordinal)}
        return {name: torch.cat(outputs, dim=1) for name, outputs in found.items()}

    def keep(self, key: tuple[str, int, str], module: Any, args: Any, output: Tensor) -> None:
        self.projections.setdefault(key, []).append(output)


@contextmanager
def capture(model: Any, gdn_layers: int | None = None) -> Iterator[Captured]:
    """Keep what the model's projections give, by hooks of its own, of the first `gdn_layers` GDN layers or of all."""
    modules = find_modules(model, HybridSpec.from_config(model.config))
    captured, handles = Captured({}), []
    for i, gdn in enumerate(modules.gdn[:gdn_layers]):
        for name in adapter_for(model.config).projections:
            hook = partial(captured.keep, ("gdn", i, name))
            handles.append(getattr(gdn, name).register_forward_hook(hook))
    for j, attention in enumerate(modules.attention if gdn_layers is None else ()):
        hook = partial(captured.keep, ("attention", j, "q_proj"))
        handles.append(attention.q_proj.register_forward_hook(hook))  # type: ignore[union-attr]
    plain = signals.gdn_signals

    def note(*args: Any, **kwargs: Any) -> Tensor:
        captured.first_call = captured.first_call or (args, kwargs)
        return plain(*args, **kwargs)

    signals.gdn_signals = note
    try:
        yield captured
    finally:
        signals.gdn_signals = plain
        for handle in handles:
            handle.remove()


def check_recording(model: Any, scorer: Estimator, ids: Tensor, chunk: int) -> list[Check]:
    """Signals and mean output gates of a whole prefill in chunks, the last of them a single token."""
    adapter, dtype, tokens = adapter_for(model.config), model.dtype, ids.shape[1]
    assert isinstance(adapter, GDNAdapter)
    modules = find_modules(model, HybridSpec.from_config(model.config))
    with attach(model), capture(model) as captured:
        cache = GateSightCache(scorer, model)
        prefill(model, ids[:, :-1], cache, chunk)
        prefill(model, ids[:, -1:], cache)
        recorded, means = cache.prefill(), cache.report().gate_means
    checks = []
    for i, layer in enumerate(modules.gdn):
        outputs = captured.of("gdn", i)
        projected = b_a_and_values(adapter, layer, outputs)
        exact, plain = exact_signals(layer, *projected), plain_signals(layer, *projected)
        for number, name in enumerate(SIGNALS):
            found, right = recorded.signals[i][:, :, number], exact[:, :, number]
            bound = bound_for(plain[:, :, number], right, dtype)
            checks.append(Check(f"{name} of GDN layer {i}", tokens, relative_rms(found, right), bound))
    for j, attention in enumerate(modules.attention):
        gates = adapter.output_gate(attention, captured.of("attention", j)["q_proj"])
        mean = gates.double().sigmoid().mean()
        bound = bound_for(gates.sigmoid().mean(dtype=torch.float32), mean, dtype)
        found = torch.tensor(means[0][j], dtype=torch.float64, device=mean.device)
        checks.append(Check(f"mean output gate of attention layer {j}", tokens, relative_rms(found, mean), bound))
    return checks


# -- scores ------------------------------------------------------------------------------------------------------------


def weights_of(scorer: Estimator, ordinal: int, device: torch.device) -> tuple[Tensor, ...]:
    names = ("input_mean", "input_std", "weight_in", "bias_in", "weight_out", "bias_out")
    return tuple(scorer.tensors[f"layers.{ordinal}.{name}"].to(device) for name in names)


def exact_scores(scorer: Estimator, recorded: Prefill, ordinal: int) -> tuple[Tensor, Tensor]:
    """Scores `[H, T]` in float64, and from the same inputs in the signals' dtype, standardisation folded in before."""
    device, dtype, tokens = recorded.signals[0].device, recorded.signals[0].dtype, recorded.lengths[0]
    mean, std, weight_in, bias_in, weight_out, bias_out = (w.double() for w in weights_of(scorer, ordinal, device))
    weight = weight_in / std.unsqueeze(-1)
    folded = (weight, bias_in - (mean.unsqueeze(-1) * weight).sum(1), weight_out, bias_out)
    exact, plain = [], []
    for start in range(0, tokens, TOKENS_PER_STEP):
        inputs = inputs_of(scorer, recorded, ordinal, start, min(tokens, start + TOKENS_PER_STEP))
        exact.append(mlp((inputs.double() - mean) / std, weight_in, bias_in, weight_out, bias_out))
        plain.append(mlp(inputs.to(dtype), *(w.to(dtype) for w in folded)))
    return torch.cat(exact, dim=1), torch.cat(plain, dim=1)


def mlp(inputs: Tensor, weight_in: Tensor, bias_in: Tensor, weight_out: Tensor, bias_out: Tensor) -> Tensor:
    """`[T, F]` -> `[H, T]`, one matrix product per KV head."""
    parts = zip(weight_in, bias_in, weight_out, bias_out, strict=True)
    return torch.stack([F.gelu(inputs @ w + b) @ out + last for w, b, out, last in parts])


def check_scores(scorer: Estimator, recorded: Prefill, scores: list[Tensor]) -> list[Check]:
    """Scores that the scorer gave for a recorded context."""
    checks = []
    for j, found in enumerate(scores):
        exact, plain = exact_scores(scorer, recorded, j)
        bound = bound_for(plain, exact, recorded.signals[0].dtype)
        error = relative_rms(found[0], exact)
        checks.append(Check(f"scores of attention layer {j}", recorded.lengths[0], error, bound))
    return checks


# -- compaction --------------------------------------------------------------------------------------------------------


def check_compaction(method: str, recorded: Prefill, compacted: GateSightCache, scores: list[Tensor]) -> list[Check]:
    """Kept entries are bit by bit those of the prefill, in order, and have the best scores."""
    checks = []
    for j, layer in enumerate(compacted.attention_layers):
        assert layer.kept_keys is not None and layer.kept_values is not None and layer.kept_positions is not None
        positions = layer.kept_positions.long()
        index = positions.unsqueeze(-1).expand(*layer.kept_keys.shape)
        kept = ((layer.kept_keys, recorded.keys[j]), (layer.kept_values, recorded.values[j]))
        wrong = sum(int((found != all_.gather(2, index)).sum()) for found, all_ in kept)
        wrong += int((positions.diff(dim=-1) <= 0).sum())
        best = scores[j].topk(positions.shape[-1], dim=-1).values.sort(dim=-1).values
        wrong += int((scores[j].gather(2, positions).sort(dim=-1).values != best).sum())
        what = f"{method}: numbers that differ in the kept entries of attention layer {j}, or in their scores"
        checks.append(Check(what, recorded.lengths[0], float(wrong), 0.0))
    return checks
