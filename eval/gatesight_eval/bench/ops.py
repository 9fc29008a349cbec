"""Each operation's implementations side by side on one recorded prefill: times, and errors against float64."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from gatesight_hf import Estimator
from gatesight_hf.cache import GateSightCache, prefill
from gatesight_hf.compaction import select
from gatesight_hf.entries import GateSightAttentionLayer
from gatesight_hf.models import HybridSpec, attach, find_modules
from gatesight_hf.models import listening as signals
from gatesight_hf.models.families import GDNAdapter, adapter_for
from gatesight_hf.scoring import Prefill
from gatesight_hf.scoring.features import SIGNALS

from .check import (
    Check,
    b_a_and_values,
    bound_for,
    capture,
    exact_scores,
    exact_signals,
    largest_error,
    mlp,
    plain_signals,
    relative_rms,
    require,
    weights_of,
)
from .machine import seconds_of
from .model import inputs_of, window_signals

Way = Callable[[], Any]


@dataclass(frozen=True)
class Operation:
    """What is computed in several ways.

    Attributes:
        name: Of the operation.
        tokens: That it runs over.
        exact: The result in float64, `[…, parts]`.
        bounds: Largest relative RMS error that passes, for each part.
        comparable: From what a way returns to a tensor of the shape of `exact`; not timed.
    """

    name: str
    tokens: int
    exact: Tensor
    bounds: tuple[float, ...]
    comparable: Callable[[Any], Tensor]

    def compare(self, ways: Mapping[str, Way], repeats: int) -> "Contest":
        """Two ways: the first is the one that the second is measured against.

        Raises:
            DifferentOutputsError: One of them is not what it should be; nothing is timed.
        """
        parts = self.exact.unbind(-1)
        checks, errors = [], []
        for name, way in ways.items():
            found = self.comparable(way()).unbind(-1)
            pairs = list(zip(found, parts, self.bounds, strict=True))
            checks += [Check(f"{self.name}: {name}", self.tokens, relative_rms(a, b), bound) for a, b, bound in pairs]
            errors.append(max(largest_error(a, b) for a, b, _ in pairs))
        require(checks)
        seconds = [seconds_of(way, self.exact.device, repeats) for way in ways.values()]
        return Contest(self.name, self.tokens, list(ways), seconds, errors)


@dataclass(frozen=True)
class Contest:
    """Times in seconds, and the largest error of each way as a share of the largest exact value."""

    operation: str
    tokens: int
    ways: list[str]
    seconds: list[float]
    errors: list[float]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.seconds[0] / self.seconds[1]}


def plain_scores(scorer: Estimator, recorded: Prefill, weights: tuple[Tensor, ...]) -> Tensor:
    """`[H, T]` in float32, as the formulas say it: assembled, standardised inputs; one matrix product per KV head."""
    mean, std, *of_mlp = weights
    return mlp((inputs_of(scorer, recorded, 0, 0, recorded.lengths[0]) - mean) / std, *of_mlp)


def plain_select(scores: Tensor, count: int) -> Tensor:
    return scores.topk(count, dim=-1).indices.sort(dim=-1).values


def plain_compact(keys: Tensor, values: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    index = slots.unsqueeze(-1).expand(-1, -1, -1, keys.shape[-1])
    return keys.gather(2, index), values.gather(2, index)


@dataclass(frozen=True)
class Case:
    """Inputs of all operations, from one recorded prefill; first layer of each kind.

    Attributes:
        layer: GDN module.
        projected: Its b, a and values `[B, T, …]` of the first forward.
        call: Arguments that the hooks gave `hooks.gdn_signals` then.
        scorer: The estimator.
        recorded: What the cache holds of the whole context.
        entries: Cache layer, not compacted.
        scores: `[1, H, T]`, float32.
        slots: `[1, H, N]`, those of the best scores.
    """

    layer: Any
    projected: tuple[Tensor, Tensor, Tensor]
    call: tuple[tuple[Any, ...], dict[str, Any]]
    scorer: Estimator
    recorded: Prefill
    entries: GateSightAttentionLayer
    scores: Tensor
    slots: Tensor

    @classmethod
    def of(cls, model: Any, scorer: Estimator, ids: Tensor, chunk: int, kept_fraction: float) -> "Case":
        adapter = adapter_for(model.config)
        assert isinstance(adapter, GDNAdapter)
        layer = find_modules(model, HybridSpec.from_config(model.config)).gdn[0]
        cache = GateSightCache(scorer, model, kept_fraction)
        with attach(model):
            with capture(model, gdn_layers=1) as captured:
                prefill(model, ids[:, :chunk], cache)
            if ids.shape[1] > chunk:
                prefill(model, ids[:, chunk:], cache, chunk)
        assert captured.first_call is not None, "the forward did not call signals.gdn_signals"
        outputs, recorded = captured.of("gdn", 0), cache.prefill()
        scores = scorer.score(recorded)[0].float()
        slots = plain_select(scores, max(1, round(kept_fraction * ids.shape[1])))
        projected = b_a_and_values(adapter, layer, outputs)
        entries = cache.attention_layers[0]
        return cls(layer, projected, captured.first_call, scorer, recorded, entries, scores, slots)

    @property
    def states(self) -> tuple[Tensor, Tensor]:
        """Keys and values `[1, H, T, D]`."""
        return self.recorded.keys[0], self.recorded.values[0]

    @property
    def tokens(self) -> int:
        return self.recorded.lengths[0]

    @property
    def count(self) -> int:
        return self.slots.shape[-1]

    def operations(self) -> "Operations":
        dtype = self.recorded.signals[0].dtype
        exact, plain = (f(self.layer, *self.projected).transpose(2, 3) for f in (exact_signals, plain_signals))
        bounds = tuple(bound_for(plain[..., i], exact[..., i], dtype) for i in range(len(SIGNALS)))
        right, rounded = exact_scores(self.scorer, self.recorded, 0)
        best = self.scores[0].double().sort(dim=-1, descending=True).values[..., : self.count]
        rows = [torch.stack([of[0, h, kept] for h, kept in enumerate(self.slots[0])]) for of in self.states]
        return Operations(
            signals=Operation(
                "signals of a GDN layer", exact.shape[1], exact, bounds, lambda found: found.transpose(2, 3)
            ),
            scores=Operation(
                "scores of an attention layer",
                self.tokens,
                right.unsqueeze(-1),
                (bound_for(rounded, right, dtype),),
                lambda found: found.unsqueeze(-1),
            ),
            selection=Operation(
                "selection in an attention layer",
                self.tokens,
                best.unsqueeze(-1),
                (0.0,),
                lambda found: _by_score(self.scores[0], found),
            ),
            compaction=Operation(
                "compaction of an attention layer",
                self.tokens,
                torch.cat(rows, dim=-1).double().unsqueeze(-1),
                (0.0,),
                lambda found: torch.cat([states[0] for states in found], dim=-1).unsqueeze(-1),
            ),
        )


@dataclass(frozen=True)
class Operations:
    signals: Operation
    scores: Operation
    selection: Operation
    compaction: Operation


def compare(
    model: Any, scorer: Estimator, ids: Tensor, chunk: int, kept_fraction: float, repeats: int
) -> list[Contest]:
    """Plain torch against the library, and on a GPU each Triton kernel against its twin in torch.

    Args:
        model: The slice.
        scorer: Its estimator.
        ids: A context `[1, T]`.
        chunk: Tokens of a forward.
        kept_fraction: Of the selection.
        repeats: Timed calls, of which the median counts.
    """
    case = Case.of(model, scorer, ids, chunk, kept_fraction)
    operations = case.operations()
    found = library_contests(case, operations, repeats)
    if model.device.type != "cuda":
        return found
    import gatesight_kernels

    return found + kernel_contests(case, operations, gatesight_kernels, repeats)


def library_contests(case: Case, operations: Operations, repeats: int) -> list[Contest]:
    """Plain torch against what the library runs."""
    args, kwargs = case.call
    weights = weights_of(case.scorer, 0, case.scores.device)
    valid = torch.ones((1, case.count), dtype=torch.bool, device=case.scores.device)

    def compacted() -> tuple[Tensor | None, Tensor | None]:
        child = case.entries.fork()
        child.compact(case.slots, valid, case.tokens)
        return child.kept_keys, child.kept_values

    library = "gatesight_hf"
    ways: list[tuple[Operation, dict[str, Way]]] = [
        (
            operations.signals,
            {
                "F.conv1d": lambda: plain_signals(case.layer, *case.projected),
                library: lambda: signals.gdn_signals(*args, **kwargs),
            },
        ),
        (
            operations.scores,
            {
                "inputs assembled, a product per head": lambda: plain_scores(case.scorer, case.recorded, weights),
                library: lambda: case.scorer.score(case.recorded)[0][0],
            },
        ),
        (
            operations.selection,
            {
                "topk, sort": lambda: plain_select(case.scores, case.count)[0],
                library: lambda: select(case.scores, [case.count], [case.tokens])[0][0],
            },
        ),
        (
            operations.compaction,
            {"gather": lambda: plain_compact(*case.states, case.slots), library: compacted},
        ),
    ]
    return [operation.compare(of_operation, repeats) for operation, of_operation in ways]


def kernel_contests(case: Case, operations: Operations, kernels: Any, repeats: int) -> list[Contest]:
    """Each kernel of `gatesight_kernels` against its twin in torch."""

    def both(function: Way) -> dict[str, Way]:
        def under(backend: str) -> Any:
            with kernels.use_backend(backend):
                return function()

        return {"torch twin": lambda: under("torch"), "Triton": lambda: under("triton")}

    signal = case.recorded.signals[0]
    mean, std, *of_mlp = weights_of(case.scorer, 0, signal.device)
    packed = kernels.pack_mlp(*of_mlp, mean, std, ages=True, dtype=signal.dtype, device=signal.device)
    blocks = [of_window.flatten(1) for of_window in window_signals(case.scorer, case.recorded, 0)]
    b, a, values = case.projected
    weight = case.layer.conv1d.weight[2 * case.layer.key_dim :, 0]
    projected = (b, a, values.unsqueeze(2), case.layer.A_log, case.layer.dt_bias, weight)
    ways: list[tuple[Operation, Way]] = [
        (operations.signals, lambda: kernels.gdn_signals(*projected)),
        (operations.scores, lambda: kernels.score_entries(blocks, packed)),
        (operations.selection, lambda: kernels.select_top(case.scores[0], case.count)),
        (operations.compaction, lambda: [kernels.compact_rows(states, case.slots) for states in case.states]),
    ]
    return [operation.compare(both(way), repeats) for operation, way in ways]


def _by_score(scores: Tensor, slots: Tensor) -> Tensor:
    """Scores `[H, N, 1]` of what was selected, in order, since equal ones may be chosen either way; NaN unless slots
    ascend."""
    found = scores.gather(1, slots).sort(dim=-1, descending=True).values
    return found.masked_fill((slots.diff(dim=-1) <= 0).any(), torch.nan).unsqueeze(-1)
