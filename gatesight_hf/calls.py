"""How a cache follows the calls of its model: what it completes, records and masks, and takes back when one fails."""

import time
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ._compat import IndexedCache, default_mask, generation_option, without_restarting_chunks
from .attention import AttentionView
from .compaction import CompactionOptions, Plan
from .errors import CacheStateError
from .hybrid import HybridSpec, find_modules
from .inputs import are_new, check_embeds, check_one_sequence, positions_of, repeats_of, whole_padding
from .layers import GateSightAttentionLayer, GDNStateLayer, SlidingAttentionLayer
from .multimodal import core_of, has_pictures, positions_on_axes, rope_deltas_after, without_seen_pictures
from .recording import Recording
from .scoring import Scorer
from .signals import SignalSink
from .sparse import SparseAttentionLayer

#: What a forward changes besides layers; values are replaced, never written to, but for the recording, which is copied.
_PER_FORWARD = ("_recording", "_plan", "_padding", "_ids", "_rope_deltas", "_pictures")


class CallFollower(IndexedCache, Cache, SignalSink):
    """The half of `GateSightCache` that its model's layers and hooks talk to."""

    spec: HybridSpec
    scorer: Scorer
    options: CompactionOptions

    def _clear(self) -> None:
        #: What is gathered of the context; None once it is compacted, or, of a growing cache, of what came since.
        self._recording: Recording | None = Recording(self.spec, self.scorer.needs)
        self._plan: Plan | None = None
        #: Ids of all tokens seen `[B, tokens]`; None once embeddings were given.
        self._ids: Tensor | None = torch.empty((1, 0), dtype=torch.long)
        #: `[B, tokens seen]`, False at pads; None while no pad was seen.
        self._padding: Tensor | None = None
        #: By row, how far positions are from numbers of tokens, `[B]`; None until pictures or their model say so.
        self._rope_deltas: Tensor | None = None
        #: Whether there are pictures among the tokens seen.
        self._pictures = False
        #: What a multimodal model was given for the forward of its text model that is coming.
        self._coming: dict[str, Any] = {}
        #: Its columns of the forward under way, if there are pads among them.
        self._late_pads: Tensor | None = None
        #: State before the forward under way.
        self._before: tuple[list[dict[str, Any]], dict[str, Any]] | None = None
        #: Shown views of attention layers, see `watch_attention`.
        self._watcher: Callable[[int, AttentionView], None] | None = None
        self._begun = 0.0
        self._seconds = {"prefill": 0.0, "score": 0.0, "compact": 0.0}

    @abstractmethod
    def compact(self) -> Any:
        """See `GateSightCache.compact`."""

    # -- parts ---------------------------------------------------------------------------------------------------------

    @property
    def attention_layers(self) -> list[GateSightAttentionLayer]:
        """By attention ordinal."""
        return [self.layers[i] for i in self.spec.attention_layers]

    @property
    def gdn_layers(self) -> list[GDNStateLayer]:
        """By GDN ordinal."""
        return [self.layers[i] for i in self.spec.gdn_layers]

    @property
    def bounded_layers(self) -> list[GDNStateLayer | SlidingAttentionLayer]:
        """Those whose size does not grow with the context."""
        return [layer for layer in self._all_layers if not isinstance(layer, GateSightAttentionLayer)]

    @property
    def _all_layers(self) -> list[GateSightAttentionLayer | GDNStateLayer | SlidingAttentionLayer]:
        return self.layers

    @property
    def is_compacted(self) -> bool:
        return self._plan is not None and not self._plan.layers

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

    def _clock(self) -> float:
        tail = self.attention_layers[0].tail_keys
        if tail is not None and tail.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    # -- what model layers call: only within a forward that the hooks have announced -----------------------------------

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self._check_announced()
        return super().update(*args, **kwargs)

    def update_indexer(self, *args: Any, **kwargs: Any) -> Tensor:
        self._check_announced()
        return super().update_indexer(*args, **kwargs)

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
        return self._watcher is not None or self._records_attention

    @property
    def _records_attention(self) -> bool:
        needs = self.scorer.needs
        of_attention = self.options.allocation == "gate" or needs.queries or needs.query_moments or needs.hidden
        return self._in_context and bool(of_attention)

    @contextmanager
    def watch_attention(self, watcher: Callable[[int, AttentionView], None]) -> Iterator[None]:
        """Show `watcher` every attention layer of the forwards with this cache: its ordinal, and the view of it.

        The layer's entries of the forward are in the cache by then. Forks are not watched.
        """
        self._watcher = watcher
        try:
            yield
        finally:
            self._watcher = None

    @property
    def _in_context(self) -> bool:
        """Whether coming tokens are recorded: not between a compaction that is decided and its end."""
        return self._recording is not None and (self._plan is None or self.is_compacted)

    def begin_forward(self, model_inputs: dict[str, Any]) -> dict[str, Any]:
        self._recover()
        ids, embeds = model_inputs.get("input_ids"), model_inputs.get("inputs_embeds")
        new = ids if ids is not None else embeds
        if new is None:
            raise ValueError("The decoder needs input_ids or inputs_embeds.")
        coming, self._coming = self._coming, {}
        ids = coming.get("input_ids") if ids is None else ids
        rows, length = new.shape[:2]
        if length == 0:
            raise CacheStateError(
                f"No new tokens: the cache has seen {self.get_seq_length()} tokens, and all of the input is among "
                "them. Append the question to the context."
            )
        repeats = self._repeats_for(rows)
        past = None if self._padding is None else self._padding.repeat_interleave(repeats, dim=0)
        padding = whole_padding(model_inputs.get("attention_mask"), past, rows, self.get_seq_length(), length)
        check_one_sequence(model_inputs, padding, self.get_seq_length())

        states = [layer.snapshot() for layer in self._all_layers]
        self._before = (states, {name: getattr(self, name) for name in _PER_FORWARD})
        if self._recording is not None:
            self._recording = self._recording.copy()
        self._pictures = self._pictures or has_pictures(coming)
        if repeats > 1:
            self.batch_repeat_interleave(repeats)
        self._padding = padding
        positions = model_inputs.get("position_ids")
        if positions is not None and positions.ndim == 3:
            self._rope_deltas = rope_deltas_after(positions, self._seen_with(rows, length).to(positions.device))
        if ids is None or self._ids is None:
            self._ids = None
        else:
            self._ids = torch.cat([self._ids.to(ids.device).expand(rows, -1), ids], dim=1)
        self._begun = self._clock() if self._plan is None else 0.0
        self._late_pads = None
        if padding is None:
            return model_inputs
        if not bool(padding[:, -length:].all()):
            self._late_pads = padding[:, -length:].long()
        model_inputs = {**model_inputs, "attention_mask": padding.long()}
        if model_inputs.get("position_ids") is None:
            model_inputs["position_ids"] = positions_of(padding, length)
        return model_inputs

    def _seen_with(self, rows: int, length: int) -> Tensor:
        """Tokens of each row with `length` coming ones, padding not counted, `[rows]`; the padding is known by now."""
        if self._padding is None:
            return torch.full((rows,), self.get_seq_length() + length)
        return self._padding.sum(-1)

    def begin_multimodal(self, core: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        self._recover()
        self._coming = inputs
        if inputs.get("position_ids") is not None:
            return inputs
        return {**inputs, "position_ids": self._positions_on_axes(core, inputs)}

    def end_multimodal(self) -> None:
        self._coming = {}

    def _positions_on_axes(self, core: Any, inputs: dict[str, Any]) -> Tensor:
        """Positions `[3, B, T]` of new ids or embeddings behind everything seen."""
        new = inputs["inputs_embeds"] if inputs.get("input_ids") is None else inputs["input_ids"]
        (rows, length), seen = new.shape[:2], self.get_seq_length()
        repeats = self._repeats_for(rows)
        past = None if self._padding is None else self._padding.repeat_interleave(repeats, dim=0)
        padding = whole_padding(inputs.get("attention_mask"), past, rows, seen, length)
        start = torch.full((rows,), seen) if padding is None else padding[:, :seen].sum(-1)
        if self._rope_deltas is not None:
            start = start.to(self._rope_deltas.device) + self._rope_deltas.repeat_interleave(repeats)
        return positions_on_axes(core, inputs, start, None if padding is None else padding[:, -length:])

    def end_forward(self, completed: bool) -> None:
        if not completed:
            self._recover()
            return
        before, self._before = self._before, None
        self._forget_positions()
        if self._plan is None:
            self._seconds["prefill"] += self._clock() - self._begun
        every, new = self.options.recompact_every, self.attention_layers[0].tail_length
        if every is None or new < every or not self.is_compacted:
            return
        try:
            self.compact()
        except BaseException:
            self._before = before
            self._recover()
            raise

    def end_prefill(self) -> None:
        if not self.is_compacted:
            self.compact()

    def end_generate(self) -> None:
        if not self.is_compacted:
            warnings.warn(
                "Nothing was compacted: this way of generating does not prefill as `generate` itself does, so that the "
                "answer became part of the context. Prefill with a forward and call compact() first.",
                stacklevel=4,
            )

    def _recover(self) -> None:
        """Undo a forward that did not end (an error, or an interrupt that no hook sees)."""
        if self._before is not None:
            states, others = self._before
            vars(self).update(others)
            for layer, state in zip(self._all_layers, states, strict=True):
                layer.restore(state)
            self._before = None

    def _repeats_for(self, rows: int) -> int:
        """How often each held row is repeated for `rows` rows of input: beams, several sequences or questions."""
        held = self.batch_size
        return 1 if held == -1 else repeats_of(held, rows)

    def convolution_context(self, gdn: int) -> Tensor | None:
        layer = self.gdn_layers[gdn]
        state = layer.conv_states[0]
        return state.clone() if state is not None and layer.has_previous_state[0] else None

    def record_signals(self, gdn: int, signals: Tensor) -> None:
        if self._recording is not None:
            self._recording.add_signals(gdn, signals)

    def record_attention(self, ordinal: int, view: AttentionView) -> None:
        if self._watcher is not None:
            self._watcher(ordinal, view)
        if self._recording is not None and self._records_attention:
            first = self.attention_layers[ordinal].get_seq_length() - view.hidden.shape[1]
            self._recording.add_attention(ordinal, view, first, self._padding)

    def mask_for(self, ordinal: int, mask: Any, query: Tensor, implementation: str) -> Any:
        if all(layer.kept_keys is None for layer in self.attention_layers):
            # Layers have one length before compaction, so that the mask they share is right.
            return mask
        layer = self.attention_layers[ordinal]
        group = self.spec.num_attention_heads // self.spec.num_key_value_heads
        return layer.attention_mask(query.shape[1], self._padding, implementation, query.dtype, group)

    def select_entries(
        self, ordinal: int, indexer: Any, hidden: Tensor, angles: tuple[Tensor, Tensor]
    ) -> Tensor | None:
        layer = self.attention_layers[ordinal]
        assert isinstance(layer, SparseAttentionLayer)
        return layer.select(indexer, hidden, angles)

    def _forget_positions(self) -> None:
        """Drop those of an indexed model's context, which it would turn into angles again in every forward."""
        for layer in self.attention_layers:
            if self.is_compacted and isinstance(layer, SparseAttentionLayer):
                layer.indexer_position_ids = None

    def gdn_mask_for(self, mask: Any, device: torch.device) -> Any:
        return mask if self._late_pads is None else self._late_pads.to(device)

    def begin_generate(self, model: Any, inputs: Tensor | None, arguments: dict[str, Any]) -> dict[str, Any]:
        self._recover()
        option = partial(generation_option, model, arguments)
        for name in ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"):
            if option(name):
                raise ValueError(
                    f"{name}: GateSightCache does not support assisted decoding, since rejected tokens cannot be taken "
                    "out of GDN states. Generate without it."
                )
        implementation = option("cache_implementation")
        if implementation is not None:
            raise ValueError(
                f"cache_implementation={implementation!r} with a cache: leave one of them out. A GateSightCache is not "
                "static, offloaded, quantised or paged."
            )
        if option("use_cache") is False:
            raise ValueError("use_cache=False with a cache: leave one of them out.")
        ids = inputs if inputs is not None else arguments.get("input_ids")
        mask, seen = arguments.get("attention_mask"), self.get_seq_length()
        core = core_of(model, find_modules(model, self.spec).decoder)
        embeds = arguments.get("inputs_embeds")
        embedded = embeds is not None
        if core is not None and embedded and seen and arguments.get("position_ids") is None:
            raise ValueError(
                "A multimodal model goes on from a cache by input_ids; with inputs_embeds pass position_ids too."
            )
        if embeds is not None and seen:
            check_embeds(embeds.shape[1], seen, mask)
        if ids is None or embedded or seen == 0:
            return arguments
        arguments = without_restarting_chunks(model, arguments)
        if mask is not None and mask.shape[1] == seen + ids.shape[1]:
            return self._with_positions(core, ids, arguments)
        if mask is not None and mask.shape[1] != ids.shape[1]:
            raise ValueError(
                f"attention_mask covers {mask.shape[1]} tokens; the cache has seen {seen}, given {ids.shape[1]}: "
                f"pass a mask of {ids.shape[1]} (all tokens given) or {seen + ids.shape[1]}."
            )
        if not are_new(ids, self._ids, seen):
            if core is not None:
                arguments = without_seen_pictures(arguments, seen)
            return self._with_positions(core, ids[:, seen:], arguments)
        # `generate` takes the ids for new ones only if its mask covers everything seen as well.
        late = mask if mask is not None else default_mask(model, ids, arguments)
        early = torch.ones((len(ids), seen), dtype=late.dtype, device=late.device)
        if self._padding is not None:
            early = self._padding.to(late).repeat_interleave(self._repeats_for(len(ids)), dim=0)
        return self._with_positions(core, ids, {**arguments, "attention_mask": torch.cat([early, late], dim=1)})

    def _with_positions(self, core: Any, new: Tensor, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments of a `generate` with positions, where a multimodal model would number them by its last document."""
        if core is None or arguments.get("position_ids") is not None:
            return arguments
        positions = self._positions_on_axes(core, {**arguments, "input_ids": new})
        # As long as everything seen and new: only the last ones are read.
        return {**arguments, "position_ids": torch.nn.functional.pad(positions, (self.get_seq_length(), 0))}
