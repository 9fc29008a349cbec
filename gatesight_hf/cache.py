"""GateSightCache: the life of one context. Prefill, compaction, forks, serving."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ._compat import default_mask, without_restarting_chunks
from .attention import AttentionView, rotary_tables
from .compaction import CompactionOptions, Plan, plan_compaction
from .errors import CacheStateError
from .estimator import Estimator
from .hybrid import HybridSpec, find_modules
from .inputs import are_new, positions_of, whole_padding
from .layers import GateSightAttentionLayer, GDNStateLayer
from .recording import Recording
from .report import CacheReport, storage_bytes
from .scoring import Prefill, Recorder, Scorer, Scores, checked_scores
from .signals import SignalSink, attach


class GateSightCache(Cache, SignalSink):
    """A KV cache for hybrid GDN/attention models that keeps a fraction of the context's entries.

    Until compaction it behaves as `DynamicCache` and records GDN signals. `generate` compacts it once, when the prompt
    is prefilled; after direct forwards call `compact()`. Keys keep the rotary angle of their first position, and later
    tokens go on from the logical length. A forward that fails leaves the cache as it was before.

    Args:
        scorer (`Scorer`): Rates KV entries, for example an `Estimator`.
        model (`PreTrainedModel`): The hybrid model; hooks are attached to it once (`gatesight_hf.signals.attach`).
        kept_fraction (`float`): Share of KV entries outside the protected prefix that stays, in (0, 1].
        protected_prefix (`int`): First tokens of each row that always stay and are not counted.
        allocation (`str`): How layers share the budget: `gate` (mean output gate), `flat` or `pyramid`; `score`: in
            proportion to how many of a layer's entries are among the best of all layers; or `global`: entries of all
            layers and heads compete by their scores, as in KVzip, and layers are filled up to their fullest head, so
            that less memory is freed than entries are evicted.
        block_size (`int`): Round each layer's entries up to whole blocks, as paged engines do.
        gate_exponent (`float`): Power of the mean output gate in `gate` shares.

    Raises:
        ValueError: Kept fraction outside (0, 1], negative prefix, unknown allocation.
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
    ) -> None:
        options = CompactionOptions(kept_fraction, protected_prefix, allocation, block_size, gate_exponent)
        if not hasattr(model, "config") or not hasattr(model, "forward"):
            raise TypeError(f"model must be the hybrid model itself, got {type(model).__name__}.")
        spec = HybridSpec.from_config(model.config)
        _check_scorer(scorer, spec)
        attach(model)

        count = len(spec.gdn_layers) + len(spec.attention_layers)
        super().__init__(
            layers=[GDNStateLayer() if i in spec.gdn_layers else GateSightAttentionLayer() for i in range(count)]
        )
        self.spec = spec
        self.scorer = scorer
        self.options = options
        self._rotary = rotary_tables(find_modules(model, spec).decoder)
        self._clear()

    def _clear(self) -> None:
        #: What is gathered of the context; None once it is compacted.
        self._recording: Recording | None = Recording(self.spec, self.scorer.needs)
        self._plan: Plan | None = None
        #: Ids of all tokens seen `[B, tokens]`; None once embeddings were given.
        self._ids: Tensor | None = torch.empty((1, 0), dtype=torch.long)
        #: `[B, tokens seen]`, False at pads; None while no pad was seen.
        self._padding: Tensor | None = None
        #: Its columns of the forward under way, if there are pads among them.
        self._late_pads: Tensor | None = None
        #: State before the forward under way.
        self._before: tuple[Any, ...] | None = None
        self._begun = 0.0
        self._seconds = {"prefill": 0.0, "score": 0.0, "compact": 0.0}

    @classmethod
    def from_pretrained(cls, estimator: str | Path, *, model: Any, **options: Any) -> "GateSightCache":
        """Load an estimator and make a cache with it.

        Args:
            estimator: Folder of an estimator.
            model: The model it was trained for.
            options: `kept_fraction`, `protected_prefix`, `allocation`, `block_size`, `gate_exponent`.

        Raises:
            FileNotFoundError, ValueError: See `Estimator.from_pretrained`.
            UnsupportedModelError, EstimatorMismatchError: See `GateSightCache`.
        """
        return cls(Estimator.from_pretrained(estimator), model, **options)

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
    def _all_layers(self) -> list[GateSightAttentionLayer | GDNStateLayer]:
        return self.layers  # type: ignore[return-value]

    @property
    def is_compacted(self) -> bool:
        return self._recording is None

    @property
    def batch_size(self) -> int:
        """Rows held; -1 before the first forward."""
        tail = self.attention_layers[0].tail_keys
        return -1 if tail is None else tail.shape[0]

    def _lengths(self) -> list[int]:
        """Tokens of each row, padding not counted."""
        if self._padding is None:
            return [self.get_seq_length()] * self.batch_size
        return self._padding.sum(-1).tolist()

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
        prefill = self.prefill()
        assert self._recording is not None
        with torch.no_grad():
            if self._plan is None:
                begun = self._clock()
                means = self._recording.gate_means(prefill.lengths)
                self._plan = plan_compaction(prefill, self.scorer, means, self.options, self._kv_bytes())
                self._seconds["score"] = self._clock() - begun
            # The prefill's references would keep each layer's full tensors alive until the end.
            del prefill
            begun = self._clock()
            for layer, chosen in zip(self.attention_layers, self._plan.layers, strict=True):
                if layer.kept_keys is not None:
                    continue
                if chosen.indices is None:
                    layer.keep_all(chosen.valid, self._plan.context)
                else:
                    layer.compact(chosen.indices, chosen.valid, self._plan.context)
            for state in self.gdn_layers:
                state.detach()
        self._seconds["compact"] = self._clock() - begun
        self._recording = None
        self._plan = self._plan.carried_out()
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
        keys = [layer.tail_keys for layer in self.attention_layers]
        values = [layer.tail_values for layer in self.attention_layers]
        return Prefill(
            spec=self.spec,
            lengths=self._lengths(),
            signals=self._recording.signals,
            keys=keys,  # type: ignore[arg-type]
            values=values,  # type: ignore[arg-type]
            queries=self._recording.queries,
            query_moments=self._recording.query_moments,
            hidden=self._recording.hidden,
            rotary=self._rotary,
            ids=self._ids,
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
            options: `kept_fraction`, `protected_prefix`, `allocation`, `block_size`, `gate_exponent`, likewise.

        Raises:
            CacheStateError: Another scorer or other options for a compacted parent, or one that needs what was not
                recorded.
        """
        self._recover()
        if self._recording is None and (scorer is not None or options):
            raise CacheStateError("A compacted cache cannot be compacted otherwise: fork it without options.")
        if scorer is not None:
            self._check_recorded(scorer)
        wanted = replace(self.options, **options)
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
        child.layers = [layer.fork() for layer in self._all_layers]
        if self._recording is not None:
            child._recording = self._recording.copy(child.scorer.needs)
        child._seconds = dict(self._seconds)
        return child

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
            means = recording.gate_means(self._lengths())
        return CacheReport(
            logical_length=self.get_seq_length(),
            physical_lengths=[layer.physical_length for layer in self.attention_layers],
            kept_per_layer=[] if plan is None else plan.kept,
            kept_fraction=self.options.kept_fraction,
            achieved_fraction=None if plan is None else plan.achieved_fraction,
            gate_means=means,
            kv_bytes_before=None if plan is None else plan.kv_bytes_before,
            kv_bytes=self._kv_bytes(),
            gdn_bytes=sum(layer.nbytes for layer in self.gdn_layers),
            signal_bytes=0 if recording is None else storage_bytes(recording.signal_chunks),
            seconds=dict(self._seconds),
        )

    def _kv_bytes(self) -> int:
        names = ("kept_keys", "kept_values", "tail_keys", "tail_values")
        return storage_bytes(getattr(layer, name) for layer in self.attention_layers for name in names)

    def __repr__(self) -> str:
        state = "compacted" if self.is_compacted else "recording"
        held = [layer.physical_length for layer in self.attention_layers]
        return (
            f"GateSightCache({state}, kept_fraction={self.options.kept_fraction}, "
            f"allocation={self.options.allocation!r}, logical_length={self.get_seq_length()}, physical_lengths={held})"
        )

    def _clock(self) -> float:
        tail = self.attention_layers[0].tail_keys
        if tail is not None and tail.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

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

    # -- what model layers call: only within a forward that the hooks have announced -----------------------------------

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self._check_announced()
        return super().update(*args, **kwargs)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        self._check_announced()
        return super().update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        self._check_announced()
        return super().update_recurrent_state(*args, **kwargs)

    def _check_announced(self) -> None:
        if self._before is None:
            raise CacheStateError(
                "This model object has no GateSight hooks: they were removed, or the cache is for another object. "
                "Call gatesight_hf.signals.attach(model) first."
            )

    # -- what the hooks call (SignalSink) ------------------------------------------------------------------------------

    def wants_signals(self) -> bool:
        return self._in_context and self.scorer.needs.signals

    def wants_attention(self) -> bool:
        needs = self.scorer.needs
        of_attention = self.options.allocation == "gate" or needs.queries or needs.query_moments or needs.hidden
        return self._in_context and bool(of_attention)

    @property
    def _in_context(self) -> bool:
        """Whether coming tokens belong to the context: until a compaction is decided, though it may not be done yet."""
        return self._recording is not None and self._plan is None

    def begin_forward(self, model_inputs: dict[str, Any]) -> dict[str, Any]:
        self._recover()
        ids, embeds = model_inputs.get("input_ids"), model_inputs.get("inputs_embeds")
        new = ids if ids is not None else embeds
        if new is None:
            raise ValueError("The decoder needs input_ids or inputs_embeds.")
        rows, length = new.shape[:2]
        if length == 0:
            raise CacheStateError(
                f"No new tokens: the cache has seen {self.get_seq_length()} tokens, and all of the input is among "
                "them. Append the question to the context."
            )
        repeats = self._repeats_for(rows)
        past = None if self._padding is None else self._padding.repeat_interleave(repeats, dim=0)
        padding = whole_padding(model_inputs.get("attention_mask"), past, rows, self.get_seq_length(), length)

        recording = None if self._recording is None else self._recording.copy()
        states = [layer.snapshot() for layer in self._all_layers]
        self._before = (states, recording, self._plan, self._padding, self._ids)
        if repeats > 1:
            self.batch_repeat_interleave(repeats)
        self._padding = padding
        if ids is None or self._ids is None:
            self._ids = None
        else:
            self._ids = torch.cat([self._ids.to(ids.device).expand(rows, -1), ids], dim=1)
        self._begun = self._clock() if self._in_context else 0.0
        self._late_pads = None
        if padding is None:
            return model_inputs
        if not bool(padding[:, -length:].all()):
            self._late_pads = padding[:, -length:].long()
        model_inputs = {**model_inputs, "attention_mask": padding.long()}
        if model_inputs.get("position_ids") is None:
            model_inputs["position_ids"] = positions_of(padding, length)
        return model_inputs

    def end_forward(self, completed: bool) -> None:
        if not completed:
            self._recover()
            return
        self._before = None
        if self._in_context:
            self._seconds["prefill"] += self._clock() - self._begun

    def end_prefill(self) -> None:
        if self._recording is not None:
            self.compact()

    def _recover(self) -> None:
        """Undo a forward that did not end (an error, or an interrupt that no hook sees)."""
        if self._before is not None:
            states, self._recording, self._plan, self._padding, self._ids = self._before
            for layer, state in zip(self._all_layers, states, strict=True):
                layer.restore(state)
            self._before = None

    def _repeats_for(self, rows: int) -> int:
        """How often each held row is repeated for `rows` rows of input: beams, several sequences or questions."""
        held = self.batch_size
        if held == -1:
            return 1
        if rows % held:
            raise ValueError(f"The cache holds {held} rows and the input has {rows}: not a multiple.")
        return rows // held

    def convolution_context(self, gdn: int) -> Tensor | None:
        layer = self.gdn_layers[gdn]
        state = layer.conv_states[0]
        return state.clone() if state is not None and layer.has_previous_state[0] else None

    def record_signals(self, gdn: int, signals: Tensor) -> None:
        if self._recording is not None:
            self._recording.add_signals(gdn, signals)

    def record_attention(self, ordinal: int, view: AttentionView) -> None:
        if self._recording is not None:
            first = self.attention_layers[ordinal].get_seq_length() - view.hidden.shape[1]
            self._recording.add_attention(ordinal, view, first, self._padding)

    def mask_for(self, ordinal: int, mask: Any, query: Tensor, implementation: str) -> Any:
        if all(layer.kept_keys is None for layer in self.attention_layers):
            # Layers have one length before compaction, so that the mask they share is right.
            return mask
        layer = self.attention_layers[ordinal]
        group = self.spec.num_attention_heads // self.spec.num_key_value_heads
        return layer.attention_mask(query.shape[1], self._padding, implementation, query.dtype, group)

    def gdn_mask_for(self, mask: Any) -> Any:
        return mask if self._late_pads is None else self._late_pads

    def begin_generate(self, model: Any, inputs: Tensor | None, arguments: dict[str, Any]) -> dict[str, Any]:
        self._recover()
        config = arguments.get("generation_config")
        for name in ("assistant_model", "prompt_lookup_num_tokens"):
            if arguments.get(name) is not None or getattr(config, name, None) is not None:
                raise ValueError(
                    f"{name}: GateSightCache does not support assisted decoding, since rejected tokens cannot be taken "
                    "out of GDN states. Generate without it."
                )
        if arguments.get("use_cache", getattr(config, "use_cache", True)) is False:
            raise ValueError("use_cache=False with a cache: leave one of them out.")
        ids = inputs if inputs is not None else arguments.get("input_ids")
        mask, seen = arguments.get("attention_mask"), self.get_seq_length()
        if ids is None or arguments.get("inputs_embeds") is not None or seen == 0:
            return arguments
        arguments = without_restarting_chunks(model, arguments)
        if mask is not None and mask.shape[1] == seen + ids.shape[1]:
            return arguments
        if mask is not None and mask.shape[1] != ids.shape[1]:
            raise ValueError(
                f"attention_mask covers {mask.shape[1]} tokens; the cache has seen {seen}, given {ids.shape[1]}: "
                f"pass a mask of {ids.shape[1]} (all tokens given) or {seen + ids.shape[1]}."
            )
        if not are_new(ids, self._ids, seen):
            return arguments
        # `generate` takes the ids for new ones only if its mask covers everything seen as well.
        late = mask if mask is not None else default_mask(model, ids, arguments)
        early = torch.ones((len(ids), seen), dtype=late.dtype, device=late.device)
        if self._padding is not None:
            early = self._padding.to(late).repeat_interleave(self._repeats_for(len(ids)), dim=0)
        return {**arguments, "attention_mask": torch.cat([early, late], dim=1)}


def _check_scorer(scorer: Scorer, spec: HybridSpec) -> None:
    if not isinstance(scorer, Scorer):
        raise TypeError(
            f"scorer must be an Estimator or a scorer such as methods.RandomScorer(), got {type(scorer).__name__};"
            " to load an estimator from a folder use Estimator.from_pretrained(folder)."
        )
    scorer.check(spec)
