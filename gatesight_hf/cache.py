"""GateSightCache: the life of one context. Prefill, compaction, forks, serving."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .attention import rotary_tables
from .calls import CallFollower
from .compaction import CompactionOptions, plan_compaction
from .errors import CacheStateError
from .estimator import Estimator
from .families import adapter_for
from .hybrid import HybridSpec, find_modules
from .layers import GDNStateLayer, SlidingAttentionLayer
from .report import CacheReport, storage_bytes
from .scoring import Prefill, Recorder, Scorer, Scores, checked_scores
from .signals import attach
from .sparse import SparseAttentionLayer


class GateSightCache(CallFollower):
    """A KV cache for hybrid GDN/attention models that keeps a fraction of the context's entries.

    Until compaction it behaves as `DynamicCache` and records GDN signals. `generate` compacts it once, when the prompt
    is prefilled; after direct forwards call `compact()`. Keys keep the rotary angle of their first position, and later
    tokens go on from the logical length. With sparse attention, all KV heads of a layer keep the same entries, those
    with the best score of any head, and the layer's index shrinks with them (`sparse.py`). A forward that fails leaves
    the cache as it was before.

    Args:
        scorer (`Scorer`): Rates KV entries, for example an `Estimator`.
        model (`PreTrainedModel`): The hybrid model; hooks are attached to it once (`gatesight_hf.signals.attach`).
        kept_fraction (`float`): Share of KV entries outside the protected prefix that stays, in (0, 1].
        protected_prefix (`int`): First tokens of each row that always stay and are not counted.
        allocation (`str`): How layers share the budget: `gate` (mean output gate; without output gates as `flat`, and a
            warning says so), `flat` or `pyramid`; `score`: in proportion to how many of a layer's entries are among the
            best of all layers; or `global`: entries of all layers and heads compete by their scores, as in KVzip, and
            layers are filled up to their fullest head, so that less memory is freed than entries are evicted.
        block_size (`int`): Round each layer's entries up to whole blocks, as paged engines do.
        gate_exponent (`float`): Power of the mean output gate in `gate` shares.
        entries_dtype (`str | None`): `int8` holds kept entries as 8-bit integers, see `quantised.py`; later tokens stay
            in the model's dtype, and so do a layer's entries if NaN or infinity is among them. Every forward turns them
            back, one layer after another, each for as long as it runs. None: the model's dtype.

    Raises:
        ValueError: Kept fraction outside (0, 1], negative prefix, unknown allocation or `entries_dtype`.
        UnsupportedModelError: The model is no hybrid of a known family.
        EstimatorMismatchError: The estimator is for another layout.
    """

    def __init__(
        self,
        scorer: Scorer,
        model: Any,
        kept_fraction: float = 0.1,
        protected_prefix: int = 0,
        allocation: str = "gate",
        block_size: int = 1,
        gate_exponent: float = 1.0,
        entries_dtype: str | None = None,
    ) -> None:
        options = CompactionOptions(
            kept_fraction, protected_prefix, allocation, block_size, gate_exponent, entries_dtype=entries_dtype
        )
        if not hasattr(model, "config") or not hasattr(model, "forward"):
            raise TypeError(f"model must be the hybrid model itself, got {type(model).__name__}.")
        spec = HybridSpec.from_config(model.config)
        _check_scorer(scorer, spec)
        attach(model)

        adapter, modules = adapter_for(spec), find_modules(model, spec)
        states = getattr(model.config.get_text_config(decoder=True), "number_of_conv_states", 1)
        layers: dict[int, Any] = {i: GDNStateLayer(states) for i in spec.gdn_layers}
        for i, attention in zip(spec.attention_layers, modules.attention, strict=True):
            layers[i] = SparseAttentionLayer(attention.indexer) if spec.indexed else adapter.cache_layer()
        layers |= {i: SlidingAttentionLayer(spec.sliding_window or 0) for i in spec.sliding_layers or ()}
        super().__init__(layers=[layers[i] for i in sorted(layers)])
        self.spec = spec
        self.scorer = scorer
        self.options = _possible(options, spec)
        self._rotary = rotary_tables(adapter.rotary_embedding(modules.decoder))
        self._clear()

    @classmethod
    def from_pretrained(cls, estimator: str | Path, *, model: Any, **options: Any) -> "GateSightCache":
        """Load an estimator and make a cache with it.

        Args:
            estimator: Folder of an estimator.
            model: The model it was trained for.
            options: `kept_fraction`, `protected_prefix`, `allocation`, `block_size`, `gate_exponent`, `entries_dtype`.

        Raises:
            FileNotFoundError, ValueError: See `Estimator.from_pretrained`.
            UnsupportedModelError, EstimatorMismatchError: See `GateSightCache`.
        """
        return cls(Estimator.from_pretrained(estimator), model, **options)

    # -- compaction ----------------------------------------------------------------------------------------------------

    def compact(self) -> CacheReport:
        """Score the context, decide the budgets, keep the best entries and free the rest.

        Nothing changes if scoring or selection fails. Layers are then compacted one after another, each at once or not
        at all; if one fails, the cache stays usable, and a second call goes on with the rest. Tokens that came in
        between stay too.

        Raises:
            CacheStateError: Nothing was prefilled, or the cache is compacted already.
            ValueError: The scorer gave NaN, or a model without output gates with `allocation="gate"`.
        """
        begun = self._clock()
        prefill = self.prefill()
        assert self._recording is not None
        with torch.no_grad():
            if self._plan is None:
                means = self._recording.gate_means
                self._plan = plan_compaction(prefill, self.scorer, means, self.options, self._kv_bytes())
                self._seconds["score"] = self._clock() - begun
            # The prefill's references would keep each layer's full tensors alive until the end.
            del prefill
            begun = self._clock()
            for layer, chosen in zip(self.attention_layers, self._plan.layers, strict=True):
                if layer.kept_keys is None:
                    if chosen.indices is None:
                        layer.keep_all(chosen.valid, self._plan.context)
                    else:
                        layer.compact(chosen.indices, chosen.valid, self._plan.context)
                if self.options.entries_dtype is not None:
                    layer.quantise()
            for state in self.gdn_layers:
                state.detach()
        self._seconds["compact"] = self._clock() - begun
        self._recording = None
        self._plan = self._plan.carried_out()
        self._forget_positions()
        return self.report()

    def prefill(self) -> Prefill:
        """What has been recorded of the context, as scorers see it.

        Raises:
            CacheStateError: Nothing was prefilled, or the cache is compacted and the record gone.
        """
        if self._recording is None:
            raise CacheStateError(
                "This cache is compacted already; the entries that were evicted are gone. Use fork() to ask several "
                "questions, or reset() to prefill another context."
            )
        self._recover()
        if self.get_seq_length() == 0:
            raise CacheStateError("Nothing to compact: run the model on the context with this cache first.")
        lengths, ahead = self._lengths(), [] if self._rope_deltas is None else self._rope_deltas.tolist()
        following = [n + d for n, d in zip(lengths, ahead, strict=True)] if ahead else lengths
        keys = [layer.keys for layer in self.attention_layers]
        values = [layer.values for layer in self.attention_layers]
        return Prefill(
            spec=self.spec,
            lengths=lengths,
            next_positions=following,
            signals=self._recording.signals,
            keys=keys,  # type: ignore[arg-type]
            values=values,  # type: ignore[arg-type]
            queries=self._recording.queries,
            query_moments=self._recording.query_moments,
            hidden=self._recording.hidden,
            rotary=self._rotary,
            ids=None if self._pictures else self._ids,
            fork=lambda: self.fork(scorer=Recorder(), allocation="flat"),
        )

    def score(self, scorer: Scorer | None = None) -> Scores:
        """Rate the context once, for any number of forks: `fork(scorer=cache.score(), kept_fraction=…)`.

        Args:
            scorer: In place of the cache's own; what it needs must have been recorded.

        Raises:
            CacheStateError: Nothing was prefilled, the cache is compacted, or something needed was not recorded.
            ValueError: Scores of a wrong shape.
        """
        prefill = self.prefill()
        self._check_not_begun()
        if scorer is not None:
            self._check_recorded(scorer)
        return Scores(checked_scores(scorer or self.scorer, prefill))

    # -- forks ---------------------------------------------------------------------------------------------------------

    def fork(self, *, scorer: Scorer | None = None, **options: Any) -> "GateSightCache":
        """A child session: shares this cache's entries, owns its GDN states and everything appended later.

        The parent is never changed by a child. An uncompacted cache can be forked too; each fork is then compacted on
        its own, if need be with another scorer or other options, so that one prefill serves many comparisons.

        Args:
            scorer: In place of the parent's; only for an uncompacted parent, whose own scorer has the same needs or
                more (`scoring.Recorder` has a parent record for several).
            options: `kept_fraction`, `protected_prefix`, `allocation`, `block_size`, `gate_exponent`, `entries_dtype`,
                likewise.

        Raises:
            CacheStateError: Another scorer or other options for a compacted parent, or one that needs what was not
                recorded.
        """
        self._recover()
        if self._recording is None and (scorer is not None or options):
            raise CacheStateError("A compacted cache cannot be compacted otherwise: fork it without options.")
        if scorer is not None or options:
            self._check_not_begun()
        if scorer is not None:
            self._check_recorded(scorer)
        wanted = _possible(replace(self.options, **options), self.spec)
        recorded = self._recording is not None and self.get_seq_length() > 0
        if recorded and wanted.allocation == "gate" != self.options.allocation and not self.report().gate_means:
            raise CacheStateError(
                f"allocation='gate' needs output gates, which a cache with allocation={self.options.allocation!r} does "
                "not record: prefill it with allocation='gate', and fork it with any."
            )
        child = object.__new__(type(self))
        vars(child).update(vars(self))
        child.scorer = scorer or self.scorer
        child.options = wanted
        child._watcher = None
        child.layers = [layer.fork() for layer in self._all_layers]
        if self._recording is not None:
            self._recording.join_signals()  # once for all forks
            child._recording = self._recording.copy(child.scorer.needs)
        child._seconds = dict(self._seconds)
        return child

    def _check_not_begun(self) -> None:
        """Raise an error if a compaction was decided and failed half-way: some entries may be gone already."""
        if self._plan is not None and self._recording is not None:
            raise CacheStateError("A compaction of this cache failed half-way: call compact() again to complete it.")

    def _check_recorded(self, scorer: Scorer) -> None:
        """Raise an error unless `scorer` fits the model and finds what it needs of the tokens seen."""
        _check_scorer(scorer, self.spec)
        missing = scorer.needs.missing_from(self.scorer.needs)
        if missing and self.get_seq_length():
            raise CacheStateError(
                f"{scorer} needs {' and '.join(missing)}, which {self.scorer} did not have recorded. Prefill a cache "
                "whose scorer needs them too, for example scoring.Recorder(needs)."
            )

    def reset(self) -> None:
        """Forget the context: the cache is as new, and can prefill another one."""
        super().reset()
        self._clear()

    # -- reports -------------------------------------------------------------------------------------------------------

    def report(self) -> CacheReport:
        """Lengths, bytes and seconds as they are now."""
        plan, recording = self._plan, self._recording
        means = [] if plan is None else plan.gate_means
        if recording is not None and self.get_seq_length():
            means = recording.gate_means
        return CacheReport(
            logical_length=self.get_seq_length(),
            physical_lengths=[layer.physical_length for layer in self.attention_layers],
            kept_per_layer=[] if plan is None else plan.kept,
            kept_fraction=self.options.kept_fraction,
            achieved_fraction=None if plan is None else plan.achieved_fraction,
            gate_means=means,
            kv_bytes_before=None if plan is None else plan.kv_bytes_before,
            kv_bytes=self._kv_bytes(),
            index_bytes=storage_bytes(t for layer in self.attention_layers for t in layer.index_tensors),
            gdn_bytes=sum(layer.nbytes for layer in self.gdn_layers),
            signal_bytes=0 if recording is None else storage_bytes(recording.tensors),
            seconds=dict(self._seconds),
        )

    def _kv_bytes(self) -> int:
        names = ("kept_keys", "kept_values", "key_scales", "value_scales", "tail_keys", "tail_values")
        return storage_bytes(getattr(layer, name) for layer in self.attention_layers for name in names)

    def __repr__(self) -> str:
        state = "compacted" if self.is_compacted else "recording"
        held = [layer.physical_length for layer in self.attention_layers]
        return (
            f"GateSightCache({state}, kept_fraction={self.options.kept_fraction}, "
            f"allocation={self.options.allocation!r}, logical_length={self.get_seq_length()}, physical_lengths={held})"
        )

    # -- batches: beams, several sequences, several questions at once --------------------------------------------------

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = max(self.batch_size, 0)
        super().batch_repeat_interleave(repeats)
        self._follow_rows(torch.arange(rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        rows = self.batch_size
        super().batch_select_indices(indices)
        self._follow_rows(torch.arange(rows)[indices.cpu()])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._follow_rows(beam_idx.cpu())

    def _follow_rows(self, rows: Tensor) -> None:
        """Carry a change of the batch dimension through everything the cache holds besides its layers."""
        if self.batch_size == -1:
            return

        def chosen(tensor: Tensor) -> Tensor:
            return tensor[rows.to(tensor.device)]

        self._padding = None if self._padding is None else chosen(self._padding)
        self._ids = None if self._ids is None else chosen(self._ids)
        self._rope_deltas = None if self._rope_deltas is None else chosen(self._rope_deltas)
        if self._plan is not None:
            self._plan = self._plan.map_rows(lambda table: [table[i] for i in rows.tolist()] if table else [])
        if self._recording is not None:
            self._recording.map_rows(chosen)

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError(
            "A GateSightCache cannot be cropped: GDN states cannot be rolled back. Fork the cache before the tokens "
            "that may have to go, and drop the fork."
        )

    def activate_past_recording(self) -> None:
        self.gdn_layers[0].activate_past_recording()


def _possible(options: CompactionOptions, spec: HybridSpec) -> CompactionOptions:
    """The options; for a model without output gates with equal layer shares in place of `gate`, and a warning."""
    if options.allocation != "gate" or adapter_for(spec).has_output_gate:
        return options
    warnings.warn(
        f"{spec.model_type} has no output gates to share the budget by: its attention layers share it equally, as with "
        "allocation='flat'.",
        stacklevel=1,  # a place of our own, so that Python shows it once
    )
    return replace(options, allocation="flat")


def _check_scorer(scorer: Scorer, spec: HybridSpec) -> None:
    if not isinstance(scorer, Scorer) or isinstance(scorer, type):
        given = f"the class {scorer.__name__}" if isinstance(scorer, type) else type(scorer).__name__
        raise TypeError(
            f"scorer must be an Estimator or a scorer such as methods.RandomScorer(), got {given};"
            " to load an estimator from a folder use Estimator.from_pretrained(folder)."
        )
    scorer.check(spec)
