"""GateSightCache: the life of one context. Prefill, compaction, forks, serving."""

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gatesight_kernels.checks import check_whole_number, described

from ..compaction.growing import carry_out, check_can_grow, plan_growing
from ..compaction.plan import CompactionOptions, plan_compaction
from ..entries.held import Extent, storage_bytes
from ..entries.sparse import SparseAttentionLayer
from ..entries.states import GDNStateLayer, SlidingAttentionLayer
from ..entries.view import rotary_tables
from ..errors import CacheStateError, SessionMismatchError
from ..models._compat import cache_argument
from ..models.families import adapter_for
from ..models.hooks import attach
from ..models.hybrid import HybridSpec, find_modules
from ..scoring.estimator import Estimator
from ..scoring.interface import Prefill, Recorder, Scorer, Scores, checked_scores
from ..scoring.recording import Recording
from .calls import CallFollower
from .identity import Identity, ModelReference
from .inputs import checked_rows
from .report import CacheReport
from .storage import AbsentScorer, CacheFile, SavedCache, save_cache
from .tokens import Tokens


class GateSightCache(CallFollower):
    """A KV cache for hybrid GDN/attention models that keeps a fraction of the context's entries.

    Until compaction it behaves as `DynamicCache` and records GDN signals. `generate` compacts it once, when the prompt
    is prefilled; after direct forwards call `compact()`. Keys keep the rotary angle of their first position, and later
    tokens go on from the logical length. With sparse attention, all KV heads of a layer keep the same entries, those
    with the best score of any head, and the layer's index shrinks with them (`sparse.py`). A forward that fails leaves
    the cache as it was before.

    Args:
        scorer: Rates KV entries, for example an `Estimator`.
        model: The hybrid model; hooks are attached to it once (`gatesight_hf.models.attach`).
        kept_fraction: Share of the KV entries that are not protected that stays, in (0, 1].
        protected_prefix: First tokens of each row that always stay and are not counted.
        allocation: How layers share the budget: `gate` (mean output gate; without output gates as `flat`, and a
            warning says so), `flat` or `pyramid`; `score`: in proportion to how many of a layer's entries are among the
            best of all layers; or `global`: entries of all layers and heads compete by their scores, as in KVzip, and
            layers are filled up to their fullest head, so that less memory is freed than entries are evicted.
        block_size: Round each layer's entries up to whole blocks, as paged engines do.
        gate_exponent: Power of the mean output gate in `gate` shares.
        growing: Whether tokens after a compaction are recorded, so that `compact()` can be called again; see
            the module `growing` for what it keeps. It holds signals of new tokens, and 4 bytes per kept entry and head.
        recompact_every: Compact a growing cache again at the end of a forward after which this many
            tokens or more have come since the last compaction; a question is evicted like any text, so let it be more
            than a question with its answer. A number implies `growing`. The first compaction is not by itself: it is
            that of `generate`, or a call of `compact()`.
        entries_dtype: `int8` holds kept entries as 8-bit integers, see `quantised.py`; later tokens stay
            in the model's dtype, and so do a layer's entries if NaN or infinity is among them. Every forward turns them
            back, one layer after another, each for as long as it runs. None: the model's dtype.
        protected_suffix: Last tokens of each row at a compaction that always stay and are not counted, such as those of
            a question in the prompt of `generate`, which is compacted as a whole.

    Raises:
        ValueError: Kept fraction outside (0, 1], negative prefix or suffix, unknown allocation or dtype of entries, or
            a scorer that rates a context only as a whole for a cache that grows.
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
        growing: bool = False,
        recompact_every: int | None = None,
        entries_dtype: str | None = None,
        protected_suffix: int = 0,
    ) -> None:
        options = CompactionOptions(
            kept_fraction,
            protected_prefix,
            allocation,
            block_size,
            gate_exponent,
            growing,
            recompact_every,
            entries_dtype,
            protected_suffix,
        )
        spec = HybridSpec.of(model)
        _check_scorer(scorer, spec)
        if options.grows:
            check_can_grow(scorer, spec)
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
        self._model = ModelReference(model)
        self._rotary = rotary_tables(adapter.rotary_embedding(modules.decoder))
        self._clear()

    @classmethod
    def from_pretrained(
        cls,
        estimator: str | Path,
        *,
        model: Any,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        **options: Any,
    ) -> "GateSightCache":
        """Load an estimator and make a cache with it.

        Args:
            estimator: Folder of an estimator, or its repo on the Hub.
            model: The model it was trained for.
            revision, token, cache_dir, local_files_only: See `Estimator.from_pretrained`.
            options: Those of `GateSightCache`.

        Raises:
            OSError, ValueError: See `Estimator.from_pretrained`.
            UnsupportedModelError, EstimatorMismatchError: See `GateSightCache`.
        """
        scorer = Estimator.from_pretrained(
            estimator, revision=revision, token=token, cache_dir=cache_dir, local_files_only=local_files_only
        )
        return cls(scorer, model, **options)

    # -- compaction ----------------------------------------------------------------------------------------------------

    def compact(self) -> CacheReport:
        """Score the context, decide the budgets, keep the best entries and free the rest.

        Nothing changes if scoring or selection fails. Layers are then compacted one after another, each at once or not
        at all; if one fails, the cache stays usable, and a second call goes on with the rest. Tokens that came in
        between stay too. A growing cache is compacted as a whole or not at all, and again whenever this is called.

        Raises:
            CacheStateError: Nothing was prefilled, or a cache that does not grow is compacted already.
            ValueError: The scorer gave NaN, or a model without output gates with `allocation="gate"`.
        """
        begun = self._clock()
        prefill = self.prefill()
        assert self._recording is not None
        if self.options.grows:
            return self._compact_growing(prefill, self._recording, begun)
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
            for state in self.bounded_layers:
                state.detach()
        self._seconds["compact"] = self._clock() - begun
        self._recording = None
        self._plan = self._plan.carried_out()
        self._forget_positions()
        return self.report()

    def _compact_growing(self, prefill: Prefill, recording: Recording, begun: float) -> CacheReport:
        if self.attention_layers[0].tail_length == 0:
            return self.report()
        layers = self.attention_layers
        with torch.no_grad(), self._all_or_nothing():
            plan, scores = plan_growing(
                prefill, layers, self.scorer, recording.gate_means, self.options, self._kv_bytes()
            )
            scored = self._clock()
            carry_out(plan, layers, scores, quantised=self.options.entries_dtype is not None)
            for state in self.bounded_layers:
                state.detach()
            self._plan, self._recording = plan.carried_out(), recording.after_compaction()
        self._seconds["score"] += scored - begun
        self._seconds["compact"] += self._clock() - scored
        return self.report()

    def prefill(self) -> Prefill:
        """What was recorded of the context, or since the compaction of a growing cache, as scorers see it.

        Raises:
            CacheStateError: Nothing was prefilled, or the cache is compacted and the record gone.
        """
        if self._recording is None:
            raise CacheStateError(
                "This cache is compacted already; the entries that were evicted are gone. Use fork() to ask several "
                "questions, or reset() to prefill another context; one made with growing=True or recompact_every=N can "
                "be compacted again."
            )
        if self.get_seq_length() == 0:
            raise CacheStateError("Nothing to compact: run the model on the context with this cache first.")
        tails = [layer.tail() for layer in self.attention_layers]
        lengths, new = self._lengths(), self.attention_layers[0].tail_length
        tokens = self._tokens
        deltas = None if tokens.rope_deltas is None else tokens.rope_deltas.tolist()
        return Prefill(
            spec=self.spec,
            lengths=[min(length, new) for length in lengths],
            next_positions=None if deltas is None else [n + d for n, d in zip(lengths, deltas, strict=True)],
            signals=self._recording.signals,
            keys=[keys for keys, _ in tails],
            values=[values for _, values in tails],
            queries=self._recording.queries,
            query_moments=self._recording.query_moments,
            hidden=self._recording.hidden,
            rotary=self._rotary,
            ids=None if tokens.pictures or tokens.ids is None else tokens.ids[:, tokens.count - new :],
            fork=None if self.is_compacted else lambda: self.fork(scorer=Recorder(), allocation="flat"),
            before=[length - new for length in lengths] if self.is_compacted else [],
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
        if self.is_compacted:
            raise CacheStateError("This cache is compacted already: score the context before, for forks of it.")
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
            options: Those of `GateSightCache`, likewise. A child of a growing cache grows by itself.

        Raises:
            CacheStateError: Another scorer or other options for a compacted parent, or one that needs what was not
                recorded.
            TypeError, ValueError: Options that `GateSightCache` does not have, or values that they cannot have.
        """
        if unknown := sorted(options.keys() - {field.name for field in fields(CompactionOptions)}):
            raise TypeError(f"fork() has no option {unknown[0]!r}: give scorer, or options of GateSightCache.")
        if self.is_compacted and (scorer is not None or options):
            raise CacheStateError("A compacted cache cannot be compacted otherwise: fork it without options.")
        if scorer is not None or options:
            self._check_not_begun()
        if scorer is not None:
            self._check_recorded(scorer)
        wanted = _possible(replace(self.options, **options), self.spec)
        if wanted.grows:
            check_can_grow(scorer or self.scorer, self.spec)
        seen = self._recording if self.get_seq_length() else None
        begins = wanted.allocation == "gate" != self.options.allocation
        if begins and seen is not None and not seen.has_gates_of(self._lengths()):
            raise CacheStateError(
                f"allocation='gate' needs output gates, which a cache with allocation={self.options.allocation!r} does "
                "not record: prefill it with allocation='gate', and fork it with any."
            )
        child = object.__new__(type(self))
        vars(child).update(vars(self))
        child.scorer = scorer or self.scorer
        child.options = wanted
        child._watcher, child._before, child._taken = None, None, Counter()
        child.running = child.in_call = False
        child.layers = [layer.fork() for layer in self._all_layers]
        if self._recording is not None:
            self._recording.join_signals()  # once for all forks
            child._recording = self._recording.copy(child.scorer.needs)
        child._seconds = dict(self._seconds)
        return child

    def _check_not_begun(self) -> None:
        """Raise an error if a compaction was decided and failed half-way: some entries may be gone already."""
        if self._plan is not None and not self.is_compacted:
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
        with self._all_or_nothing():
            super().reset()
            self._clear()

    def tie(self, model: Any) -> None:
        """Go on with another object of the same model: one that was loaded or copied again, or after pickling.

        Args:
            model: Its weights are compared by a sample (`identity`) where those of the cache's model are known.

        Raises:
            SessionMismatchError: It is another model.
            UnsupportedModelError: It is no hybrid of a known family.
        """
        if HybridSpec.of(model) != self.spec:
            raise SessionMismatchError(f"The cache is of another model: of {self.spec.describe()}.")
        self._model.check_same(model)
        attach(model)
        self._model = ModelReference(model)
        self._rotary = rotary_tables(adapter_for(self.spec).rotary_embedding(self._model.decoder))

    def early_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: layers take their shapes, dtypes and devices from the first entries they are given."""

    # -- files ---------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, *, tokenizer: Any = None) -> None:
        """Write the compacted cache into one file, from which `load` goes on in any process.

        The file (`gatesight_hf.cache.storage`) holds all entries, those shared with a parent too, GDN states, the ids
        of all tokens seen, options, report, and which model, scorer and tokenizer they belong to. It is written beside
        `path` and then takes its place, so that a failure leaves an old file as it was.

        Args:
            path: The file.
            tokenizer: Noted, so that `load` can compare.

        Raises:
            CacheStateError: The cache is not compacted, it grows, or its model is gone.
            OSError: The file cannot be written.
            ValueError: A state holds NaN or infinite values.
        """
        if not self.is_compacted or self._plan is None:
            raise CacheStateError("Only a compacted cache can be saved: prefill a context and call compact() first.")
        if self.options.grows:
            raise CacheStateError(
                "A growing cache cannot be saved: its scores and its record of new tokens have no place in the file. "
                "Save one made without growing and recompact_every."
            )
        if self._tokens.rope_deltas is not None:
            raise CacheStateError(
                "A cache of a multimodal model cannot be saved: files hold no positions on three axes."
            )
        layers = _held_by_files(self._all_layers)
        model = self._model.existing()
        context = self._plan.context
        saved = SavedCache(
            identity=Identity.of(model, tokenizer, self.scorer),
            options=self.options,
            extent=Extent(self.batch_size, context, self.get_seq_length() - context),
            plan=self._plan,
            seconds=self._seconds,
            ids=self._tokens.ids,
            padding=self._tokens.padding,
        )
        save_cache(path, saved, layers)

    @classmethod
    def load(
        cls, path: str | Path, model: Any, *, tokenizer: Any = None, scorer: Scorer | None = None
    ) -> "GateSightCache":
        """Read a compacted cache that `save` wrote; it answers as the one that was saved.

        The file may come from anyone: its sizes are checked before memory is taken, and its values before they are
        used. The model runs on one token, whose cache says what the file's tensors must be and where they go.

        Args:
            path: The file.
            model: The model it was saved with: same layout, dtype and weights (of which a sample is compared).
            tokenizer: Compared with the one noted in the file; None is not compared.
            scorer: Likewise. Only needed to prefill another context after `reset()`.

        Raises:
            FileNotFoundError: No such file.
            SessionFileError: The file is not a saved cache, damaged, or of another version.
            SessionMismatchError: It belongs to another model, tokenizer or scorer.
            UnsupportedModelError, EstimatorMismatchError: See `GateSightCache`.
        """
        with CacheFile(path) as file:
            file.check(Identity.of(model, tokenizer, scorer))
            cache = cls(scorer or AbsentScorer(file.saved.identity.scorer), model, **asdict(file.saved.options))
            layers = _held_by_files(cache._all_layers)
            with torch.no_grad():
                token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
                model(token, **{cache_argument(model): cache}, use_cache=True)
            saved = file.load_layers(layers, token.device)
        cache._recording, cache._plan, cache._seconds = None, saved.plan, saved.seconds
        cache._tokens = Tokens(saved.extent.context + saved.extent.tail, saved.ids, saved.padding)
        return cache

    # -- reports -------------------------------------------------------------------------------------------------------

    def report(self) -> CacheReport:
        """Lengths, bytes and seconds as they are now."""
        plan, recording = self._plan, self._recording
        recorded = [] if recording is None else recording.tensors
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
            signal_bytes=storage_bytes([*recorded, *(layer.kept_scores for layer in self.attention_layers)]),
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
        """Repeat each row.

        Raises:
            ValueError: No whole number of 1 or more.
        """
        check_whole_number("repeats", repeats)
        rows = torch.arange(max(self.batch_size, 0)).repeat_interleave(repeats)
        with self._changing_rows(rows):
            super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows.

        Args:
            indices: `[B']`, their numbers.

        Raises:
            ValueError: No such tensor, or one that is empty or names rows that there are not.
        """
        rows = checked_rows("indices", indices, self.batch_size)
        with self._changing_rows(rows):
            super().batch_select_indices(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put other rows in the rows' places, as beam search does.

        Args:
            beam_idx: `[B]`, numbers of rows.

        Raises:
            ValueError: No such tensor, or one that names rows that there are not.
        """
        rows = checked_rows("beam_idx", beam_idx, self.batch_size)
        if len(rows) != self.batch_size:
            raise ValueError(f"beam_idx must name a row for each of {self.batch_size} rows, got {len(rows)}.")
        with self._changing_rows(rows):
            super().reorder_cache(beam_idx)  # type: ignore[arg-type]

    @contextmanager
    def _changing_rows(self, rows: Tensor) -> Iterator[None]:
        """Carry a change of the batch dimension through all that the cache holds, or through nothing if it fails."""
        held = self.batch_size
        with self._all_or_nothing():
            yield
            if held != -1:
                self._follow_rows(rows)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """What is done in it is taken back if it fails or is interrupted."""
        states = [layer.snapshot() for layer in self._all_layers]
        others = {name: value for name, value in vars(self).items() if name != "layers"}
        recording = None if self._recording is None else self._recording.copy()
        try:
            yield
        except BaseException:
            for layer, state in zip(self._all_layers, states, strict=True):
                layer.restore(state)
            vars(self).update(others)
            self._recording = recording
            raise

    def _follow_rows(self, rows: Tensor) -> None:
        """What the cache holds besides its layers."""
        self._tokens = self._tokens.with_rows(rows)
        if self._plan is not None:
            self._plan = self._plan.with_rows(rows)
        if self._recording is not None:
            self._recording.map_rows(lambda tensor: tensor[rows.to(tensor.device)])

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
        given = f"the class {scorer.__name__}" if isinstance(scorer, type) else described(scorer)
        raise TypeError(
            f"scorer must be an Estimator or a scorer such as methods.RandomScorer(), got {given};"
            " to load an estimator use Estimator.from_pretrained(folder_or_repo)."
        )
    scorer.check(spec)


def _held_by_files(layers: Sequence[Any]) -> list[Any]:
    """The layers; raises CacheStateError if there is one that files of caches have no place for."""
    if without := sorted({type(layer).__name__ for layer in layers if layer.kind is None}):
        raise CacheStateError(f"Caches with {', '.join(without)} cannot be saved: files hold no such layers.")
    return list(layers)
