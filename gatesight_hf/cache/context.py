"""Everything that a cache holds of one context, and how all of it goes back when something fails."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from gatesight_kernels.checks import described

from ..compaction.budget import BY_GATES
from ..compaction.growing import check_can_grow
from ..compaction.plan import CompactionOptions, Plan
from ..entries.attention import GateSightAttentionLayer
from ..entries.held import storage_bytes
from ..entries.states import GDNStateLayer, SlidingAttentionLayer
from ..entries.view import rotary_tables
from ..errors import CacheStateError, SessionMismatchError
from ..models.families import adapter_for
from ..models.hooks import attach
from ..models.hybrid import HybridSpec, find_modules
from ..scoring.interface import Prefill, Scorer
from ..scoring.recording import Recording
from .identity import ModelReference
from .tokens import Tokens

Layer = GateSightAttentionLayer | GDNStateLayer | SlidingAttentionLayer
#: States of the layers, and all else by name.
Snapshot = tuple[list[dict[str, Any]], dict[str, Any]]


class Context:
    """The state of a cache; no object that it holds knows the cache.

    Attributes:
        spec: Layout of the model.
        scorer: Rates entries.
        options: Of compactions.
        layers: By absolute index, the list that transformers sees too.
        model: The model object that the cache belongs to.
        rotary: Its rotary tables.
        tokens: Those seen.
        recording: What is gathered of the context; None once it is compacted, or, of a growing cache, of what came
            since.
        plan: Of the last compaction, or of one that was decided and failed half-way.
        seconds: Wall time by phase.
    """

    def __init__(self, model: Any, scorer: Scorer, options: CompactionOptions, layers: Sequence[Any]) -> None:
        self.spec = HybridSpec.of(model)
        self.scorer = scorer
        self.options = _possible(options, self.spec)
        self.layers: list[Layer] = list(layers)
        self._tie(model)
        self.clear()

    def clear(self) -> None:
        """Forget all but layers, which have a `reset` of their own."""
        self.recording: Recording | None = Recording(self.spec, self.scorer.needs)
        self.plan: Plan | None = None
        self.tokens = Tokens()
        self.seconds = {"prefill": 0.0, "score": 0.0, "compact": 0.0}

    def _tie(self, model: Any) -> None:
        self.model = ModelReference(model)
        self.rotary = rotary_tables(adapter_for(self.spec).rotary_embedding(find_modules(model, self.spec).decoder))

    def tie(self, model: Any) -> None:
        """See `GateSightCache.tie`."""
        if HybridSpec.of(model) != self.spec:
            raise SessionMismatchError(f"The cache is of another model: of {self.spec.describe()}.")
        self.model.check_same(model)
        attach(model)
        self._tie(model)

    # -- parts ---------------------------------------------------------------------------------------------------------

    @property
    def attention_layers(self) -> list[GateSightAttentionLayer]:
        """By attention ordinal."""
        return [self.layers[i] for i in self.spec.attention_layers]  # type: ignore[misc]

    @property
    def gdn_layers(self) -> list[GDNStateLayer]:
        """By GDN ordinal."""
        return [self.layers[i] for i in self.spec.gdn_layers]  # type: ignore[misc]

    @property
    def bounded_layers(self) -> list[GDNStateLayer | SlidingAttentionLayer]:
        """Those whose size does not grow with the context."""
        return [layer for layer in self.layers if not isinstance(layer, GateSightAttentionLayer)]

    @property
    def is_compacted(self) -> bool:
        return self.plan is not None and not self.plan.layers

    @property
    def records(self) -> bool:
        """Whether coming tokens are recorded: not between a compaction that is decided and its end."""
        return self.recording is not None and (self.plan is None or self.is_compacted)

    @property
    def batch_size(self) -> int:
        """Rows held; -1 before the first forward."""
        return self.attention_layers[0].rows

    @property
    def seen(self) -> int:
        """Slots of all tokens seen, padding among them: the logical length."""
        return self.attention_layers[0].get_seq_length()

    def lengths(self) -> list[int]:
        """Tokens of each row, padding not counted."""
        return self.tokens.lengths(self.batch_size)

    def kv_bytes(self) -> int:
        """Of the attention cache as it is held now."""
        names = ("kept_keys", "kept_values", "key_scales", "value_scales", "tail_keys", "tail_values")
        return storage_bytes(getattr(layer, name) for layer in self.attention_layers for name in names)

    def clock(self) -> float:
        """Seconds, once the device has done its work."""
        tail = self.attention_layers[0].tail_keys
        if tail is not None and tail.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    # -- going back ----------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The state as it is now. It is free: values are replaced and not written to, but for the record, a copy."""
        held = {name: value for name, value in vars(self).items() if name != "layers"}
        if self.recording is not None:
            held["recording"] = self.recording.copy()
        return [layer.snapshot() for layer in self.layers], held

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot, which can be done again if it is interrupted."""
        states, held = snapshot
        vars(self).update(held)
        for layer, state in zip(self.layers, states, strict=True):
            layer.restore(state)

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """What is done in it is taken back if it fails or is interrupted."""
        before = self.snapshot()
        try:
            yield
        except BaseException:
            self.restore(before)
            raise

    @contextmanager
    def changing_rows(self, rows: Tensor) -> Iterator[None]:
        """Carry a change of the layers' batch dimension through everything, or through nothing if it fails."""
        held = self.batch_size
        with self.all_or_nothing():
            yield
            if held != -1:
                self._follow_rows(rows)

    def repeat_rows(self, repeats: int) -> None:
        """Repeat each row."""
        with self.changing_rows(torch.arange(max(self.batch_size, 0)).repeat_interleave(repeats)):
            for layer in self.layers:
                layer.batch_repeat_interleave(repeats)

    def _follow_rows(self, rows: Tensor) -> None:
        self.tokens = self.tokens.with_rows(rows)
        if self.plan is not None:
            self.plan = self.plan.with_rows(rows)
        if self.recording is not None:
            self.recording.map_rows(lambda tensor: tensor[rows.to(tensor.device)])

    # -- what scorers see ----------------------------------------------------------------------------------------------

    def prefill(self, fork: Callable[[], Any]) -> Prefill:
        """See `GateSightCache.prefill`; `fork` makes a cache for a scorer that runs the context again."""
        if self.recording is None:
            raise CacheStateError(
                "This cache is compacted already; the entries that were evicted are gone. Use fork() to ask several "
                "questions, or reset() to prefill another context; one made with growing=True or recompact_every=N can "
                "be compacted again."
            )
        if self.seen == 0:
            raise CacheStateError("Nothing to compact: run the model on the context with this cache first.")
        tails = [layer.tail() for layer in self.attention_layers]
        lengths, new = self.lengths(), self.attention_layers[0].tail_length
        tokens = self.tokens
        deltas = None if tokens.rope_deltas is None else tokens.rope_deltas.tolist()
        return Prefill(
            spec=self.spec,
            lengths=[min(length, new) for length in lengths],
            next_positions=None if deltas is None else [n + d for n, d in zip(lengths, deltas, strict=True)],
            signals=self.recording.signals,
            keys=[keys for keys, _ in tails],
            values=[values for _, values in tails],
            queries=self.recording.queries,
            query_moments=self.recording.query_moments,
            hidden=self.recording.hidden,
            rotary=self.rotary,
            ids=None if tokens.pictures or tokens.ids is None else tokens.ids[:, tokens.count - new :],
            fork=None if self.is_compacted else fork,
            before=[length - new for length in lengths] if self.is_compacted else [],
        )

    def check_not_begun(self) -> None:
        """Raise an error if a compaction was decided and failed half-way: some entries may be gone already."""
        if self.plan is not None and not self.is_compacted:
            raise CacheStateError("A compaction of this cache failed half-way: call compact() again to complete it.")

    def check_recorded(self, scorer: Scorer) -> None:
        """Raise an error unless `scorer` fits the model and finds what it needs of the tokens seen."""
        check_scorer(scorer, self.spec)
        missing = scorer.needs.missing_from(self.scorer.needs)
        if missing and self.seen:
            raise CacheStateError(
                f"{scorer} needs {' and '.join(missing)}, which {self.scorer} did not have recorded. Prefill a cache "
                "whose scorer needs them too, for example scoring.Recorder(needs)."
            )

    # -- forks ---------------------------------------------------------------------------------------------------------

    def fork(self, scorer: Scorer | None, options: dict[str, Any]) -> "Context":
        """See `GateSightCache.fork`."""
        if unknown := sorted(options.keys() - {field.name for field in fields(CompactionOptions)}):
            raise TypeError(f"fork() has no option {unknown[0]!r}: give scorer, or options of GateSightCache.")
        if self.is_compacted and (scorer is not None or options):
            raise CacheStateError("A compacted cache cannot be compacted otherwise: fork it without options.")
        if scorer is not None or options:
            self.check_not_begun()
        if scorer is not None:
            self.check_recorded(scorer)
        wanted = _possible(replace(self.options, **options), self.spec)
        if wanted.grows:
            check_can_grow(scorer or self.scorer, self.spec)
        recorded = self.recording if self.seen else None
        begins = reads_gates(wanted, self.spec) and not reads_gates(self.options, self.spec)
        if begins and recorded is not None and not recorded.has_gates_of(self.lengths()):
            raise CacheStateError(
                f"allocation={wanted.allocation!r} needs output gates, which a cache with "
                f"allocation={self.options.allocation!r} does not record: prefill it with allocation='gate', and fork "
                "it with any."
            )
        child = object.__new__(type(self))
        vars(child).update(vars(self))
        child.scorer, child.options = scorer or self.scorer, wanted
        child.layers = [layer.fork() for layer in self.layers]
        if self.recording is not None:
            self.recording.join_signals()  # once for all forks
            child.recording = self.recording.copy(child.scorer.needs)
        child.seconds = dict(self.seconds)
        return child


def reads_gates(options: CompactionOptions, spec: HybridSpec) -> bool:
    """Whether layers share the budget by their output gates, which are then recorded."""
    return options.allocation in BY_GATES and adapter_for(spec).has_output_gate


def _possible(options: CompactionOptions, spec: HybridSpec) -> CompactionOptions:
    """The options; for a model without output gates with equal layer shares in place of `gate`, and a warning.

    With `head`, the plan has them too.
    """
    if options.allocation not in BY_GATES or adapter_for(spec).has_output_gate:
        return options
    warnings.warn(
        f"{spec.model_type} has no output gates to share the budget by: its attention layers share it equally, as with "
        "allocation='flat'.",
        stacklevel=1,  # a place of our own, so that Python shows it once
    )
    return replace(options, allocation="flat") if options.allocation == "gate" else options


def check_scorer(scorer: Any, spec: HybridSpec) -> None:
    """Raise an error unless it is a scorer that fits the model.

    Raises:
        TypeError: It is none.
        EstimatorMismatchError: See `Scorer.check`.
    """
    if not isinstance(scorer, Scorer) or isinstance(scorer, type):
        given = f"the class {scorer.__name__}" if isinstance(scorer, type) else described(scorer)
        raise TypeError(
            f"scorer must be an Estimator or a scorer such as methods.RandomScorer(), got {given};"
            " to load an estimator use Estimator.from_pretrained(folder_or_repo)."
        )
    scorer.check(spec)
