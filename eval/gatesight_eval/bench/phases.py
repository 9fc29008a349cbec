"""Times of one prefill, scoring and compaction, phase by phase, and of a whole comparison at one context length."""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

from torch import Tensor, device
from transformers import DynamicCache

from gatesight_hf import Estimator, GateSightCache, Scorer
from gatesight_hf.cache import compacting, prefill
from gatesight_hf.cache.calls import CallFollower
from gatesight_hf.cache.context import Context
from gatesight_hf.entries import GateSightAttentionLayer
from gatesight_hf.models import HybridSpec, attach, listening
from gatesight_hf.scoring import Needs, Prefill

from .check import Check, check_compaction, check_scores, require
from .machine import PeakMeter, Stopwatch, around_calls, clock
from .model import (
    Work,
    compaction_work,
    gates_work,
    prefill_work,
    random_ids,
    scoring_work,
    signals_work,
)

GATESIGHT, KVZIP = "gatesight", "kvzip"
#: The model's own forward, and what a method does besides, in order.
PREFILL = "prefill"
PHASES = ("signals", "attention", "scoring", "compaction")
#: Tokens of a forward: longer contexts are prefilled in chunks.
CHUNK = 8192
SEED = 0


@dataclass
class Pass:
    """Seconds of one prefill and compaction, by phase; and what the cache held before it was compacted."""

    seconds: dict[str, float]
    prefill_seconds: float
    kept: int
    signal_bytes: int
    kv_bytes: int
    peaks: dict[str, int | None] = field(default_factory=dict)


def plain_prefill(model: Any, ids: Tensor, meter: PeakMeter | None = None) -> float:
    """Seconds of the model's own forward, without hooks."""
    attach(model).remove()
    cache: Any = DynamicCache(config=model.config)
    meter = meter or PeakMeter(model.device)
    begun = clock(model.device)
    with meter.part(PREFILL):
        prefill(model, ids, cache, CHUNK)
    return clock(model.device) - begun


@contextmanager
def recording(on: device, meter: PeakMeter) -> Iterator[dict[str, Stopwatch]]:
    """Time what hooks and cache do within forwards: the signals, and what is taken from attention layers."""
    watches = {name: Stopwatch(on) for name in ("signals", "attention")}
    calls = (
        ("signals", listening, "gdn_signals"),
        ("signals", CallFollower, "convolution_context"),
        ("signals", CallFollower, "record_signals"),
        ("attention", CallFollower, "record_attention"),
    )
    with ExitStack() as stack:
        for name, owner, function in calls:
            stack.enter_context(around_calls(owner, function, partial(meter.part, name), watches[name].running))
        yield watches


@dataclass
class Remembered:
    """A scorer that keeps what it was given and what it gave, so that scores can be checked without scoring again."""

    scorer: Scorer
    recorded: Prefill | None = None
    scores: list[Tensor] = field(default_factory=list)

    @property
    def needs(self) -> Needs:
        return self.scorer.needs

    def check(self, spec: HybridSpec) -> None:
        self.scorer.check(spec)

    def score(self, prefill: Prefill) -> list[Tensor]:
        self.recorded, self.scores = prefill, self.scorer.score(prefill)
        return self.scores


def run_pass(
    model: Any, method: str, scorer: Scorer, ids: Tensor, kept_fraction: float, checked: bool = False
) -> tuple[Pass, list[Check]]:
    """Prefill, score and compact once.

    Args:
        model: The slice.
        method: Name of the scorer.
        scorer: Of the method.
        ids: Context `[1, T]`.
        kept_fraction: Of the compaction.
        checked: Also measure peaks, and compare the outputs with their references.

    Raises:
        DifferentOutputsError: They differ.
    """
    gc.collect()
    meter = PeakMeter(model.device)
    scorer = Remembered(scorer) if checked else scorer
    with attach(model), meter.watch() if checked else nullcontext():
        cache = GateSightCache(scorer, model, kept_fraction)
        with recording(model.device, meter) as watches, meter.part(PREFILL):
            begun = clock(model.device)
            prefill(model, ids, cache, CHUNK)
            prefill_seconds = clock(model.device) - begun
        if scorer.needs.signals and not watches["signals"].parts:
            raise RuntimeError(
                "No signals were timed: the forward does not call gatesight_hf.models.listening.gdn_signals."
            )
        before = cache.report()
        entries = _entries(cache) if checked else []
        with (
            around_calls(Context, "prefill", partial(meter.part, "scoring")),
            around_calls(compacting, "plan_compaction", partial(meter.part, "scoring")),
            around_calls(GateSightAttentionLayer, "compact", partial(meter.part, "compaction")),
        ):
            after = cache.compact()
    phases = {name: watch.seconds for name, watch in watches.items()}
    phases |= {"scoring": after.seconds["score"], "compaction": after.seconds["compact"]}
    checks: list[Check] = []
    if isinstance(scorer, Remembered):
        assert scorer.recorded is not None
        recorded = replace(scorer.recorded, keys=[k for k, _ in entries], values=[v for _, v in entries])
        if isinstance(scorer.scorer, Estimator):
            checks += check_scores(scorer.scorer, recorded, scorer.scores)
        checks += check_compaction(method, recorded, cache, scorer.scores)
    measured = Pass(
        seconds={name: phases[name] for name in PHASES},
        prefill_seconds=prefill_seconds,
        kept=after.kept_per_layer[0][0],
        signal_bytes=before.signal_bytes,
        kv_bytes=before.kv_bytes,
        peaks={name: meter.peak(name) for name in (PREFILL, *PHASES)} if checked else {},
    )
    return measured, require(checks)


def _entries(cache: GateSightCache) -> list[tuple[Tensor, Tensor]]:
    """Copies of each attention layer's keys and values, which no compaction can move."""
    held = [(layer.tail_keys, layer.tail_values) for layer in cache.attention_layers]
    return [(keys.clone(), values.clone()) for keys, values in held if keys is not None and values is not None]


# -- one length --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """What is measured.

    Attributes:
        model: The slice.
        scorers: By method.
        kept_fraction: Of all compactions.
        repeats: Timed passes, of which the median counts; KVzip runs once.
        ceilings: Of the machine, see `machine.ceilings`.
    """

    model: Any
    scorers: dict[str, Scorer]
    kept_fraction: float
    repeats: int
    ceilings: dict[str, float]

    @property
    def spec(self) -> HybridSpec:
        return HybridSpec.from_config(self.model.config)

    def passes(self) -> int:
        """Prefills at each length."""
        return sum(1 if name == KVZIP else 1 + self.repeats for name in (PREFILL, *self.scorers))

    def measure(self, tokens: int, step: Callable[[], Any]) -> tuple[dict[str, Any], list[Check]]:
        """All phases of all methods at one length, methods in turn.

        Args:
            tokens: Length of the context.
            step: Called after each prefill.

        Raises:
            DifferentOutputsError: What is measured does not compute what it should.
        """
        ids = random_ids(self.model, tokens, SEED)
        meter = PeakMeter(self.model.device)
        with meter.watch():
            plain_prefill(self.model, ids, meter)
        step()
        first: dict[str, Pass] = {}
        checks: list[Check] = []
        for name, scorer in self.scorers.items():
            first[name], found = run_pass(self.model, name, scorer, ids, self.kept_fraction, checked=True)
            checks += found
            step()
        plain: list[float] = []
        timed: dict[str, list[Pass]] = {name: [first[name]] if name == KVZIP else [] for name in self.scorers}
        for _ in range(self.repeats):
            plain.append(plain_prefill(self.model, ids))
            step()
            for name, scorer in self.scorers.items():
                if name != KVZIP:
                    timed[name].append(run_pass(self.model, name, scorer, ids, self.kept_fraction)[0])
                    step()
        seconds = median(plain)
        work = prefill_work(self.model, self.spec, tokens)
        return {
            "tokens": tokens,
            PREFILL: {
                "ms": seconds * 1e3,
                "ms_per_1k_tokens": seconds * 1e6 / tokens,
                "runs_ms": [1e3 * run for run in plain],
                "peak_bytes": meter.peak(PREFILL),
                **self._floor(work),
            },
            "methods": {name: self._method(name, runs, first[name], seconds, tokens) for name, runs in timed.items()},
        }, checks

    def _method(self, name: str, runs: list[Pass], first: Pass, prefill_seconds: float, tokens: int) -> dict[str, Any]:
        work = self._work(tokens, first.kept) if name == GATESIGHT else {}
        phases: dict[str, dict[str, Any]] = {}
        for phase in PHASES:
            seconds = median(run.seconds[phase] for run in runs)
            phases[phase] = {
                "ms": seconds * 1e3,
                "ms_per_1k_tokens": seconds * 1e6 / tokens,
                "percent_of_prefill": 100 * seconds / prefill_seconds,
                "runs_ms": [1e3 * run.seconds[phase] for run in runs],
                "peak_bytes": first.peaks[phase],
                **(self._floor(work[phase]) if phase in work else {}),
            }
        return {
            "phases": phases,
            "ms": sum(phase["ms"] for phase in phases.values()),
            "percent_of_prefill": sum(phase["percent_of_prefill"] for phase in phases.values()),
            "kept_per_head": first.kept,
            "signal_bytes": first.signal_bytes,
            "kv_bytes": first.kv_bytes,
            "recorded_prefill_ms": 1e3 * median(run.prefill_seconds for run in runs),
            "recorded_prefill_peak_bytes": first.peaks[PREFILL],
        }

    def _work(self, tokens: int, kept: int) -> dict[str, Work]:
        size, scorer = self.model.dtype.itemsize, self.scorers[GATESIGHT]
        assert isinstance(scorer, Estimator)
        return {
            "signals": signals_work(self.spec, tokens, size, self.model.config.linear_conv_kernel_dim),
            "attention": gates_work(self.spec, tokens, size),
            "scoring": scoring_work(scorer.config, tokens, size),
            "compaction": compaction_work(self.spec, kept, size),
        }

    def _floor(self, work: Work) -> dict[str, Any]:
        """The work, and the ms it takes at the ceilings; products at the faster of the two dtypes."""
        moved = 1e3 * work.bytes / self.ceilings["copy_bytes_per_s"]
        computed = {
            name.removeprefix("gemm_").removesuffix("_flop_per_s"): 1e3 * work.flop / value
            for name, value in self.ceilings.items()
            if name.startswith("gemm_")
        }
        floor = max(moved, min(computed.values()))
        return {**asdict(work), "bytes_ms": moved, "flop_ms": computed, "floor_ms": floor}
