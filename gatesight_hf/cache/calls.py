"""How a cache follows the calls of its model: what it completes, records and masks, and takes back when one fails."""

import time
import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from gatesight_kernels.checks import INTEGERS, check_tensor, check_whole_number, described

from ..compaction.plan import CompactionOptions, Plan
from ..entries.attention import GateSightAttentionLayer
from ..entries.sparse import SparseAttentionLayer
from ..entries.states import GDNStateLayer, SlidingAttentionLayer
from ..entries.view import AttentionView
from ..errors import CacheStateError
from ..models._compat import IndexedCache, default_mask, generation_option, lengthened, without_restarting_chunks
from ..models.hooks import GenerateCall, SignalSink
from ..models.hybrid import HybridSpec, find_modules
from ..models.multimodal import core_of, has_pictures, positions_on_axes, rope_deltas_after, without_seen_pictures
from ..scoring.interface import Scorer
from ..scoring.recording import Recording
from .identity import ModelReference
from .inputs import (
    check_embeds,
    check_mask,
    check_new,
    check_no_checkpointing,
    check_one_sequence,
    positions_of,
    repeats_of,
    whole_padding,
)
from .tokens import Tokens

#: What a forward changes besides layers; values are replaced, never written to, but for the recording, which is copied.
_PER_FORWARD = ("_recording", "_plan", "_tokens")


class CallFollower(IndexedCache, Cache, SignalSink):
    """The half of `GateSightCache` that its model's layers and hooks talk to."""

    spec: HybridSpec
    scorer: Scorer
    options: CompactionOptions
    _model: ModelReference

    def _clear(self) -> None:
        #: What is gathered of the context; None once it is compacted, or, of a growing cache, of what came since.
        self._recording: Recording | None = Recording(self.spec, self.scorer.needs)
        self._plan: Plan | None = None
        self._tokens = Tokens()
        #: What a multimodal model was given for the forward of its text model that is coming.
        self._coming: dict[str, Any] = {}
        #: Its columns of the forward under way, if there are pads among them.
        self._late_pads: Tensor | None = None
        #: State before the forward under way.
        self._before: tuple[list[dict[str, Any]], dict[str, Any]] | None = None
        self.running = self.in_call = False
        #: By layer, how often it took the tokens of the forward under way.
        self._taken: Counter[int] = Counter()
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
        return self._tokens.lengths(self.batch_size)

    def _clock(self) -> float:
        tail = self.attention_layers[0].tail_keys
        if tail is not None and tail.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    # -- what model layers call: only within a forward that the hooks have announced -----------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self._check_announced()
        self._note_taken(layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_indexer(self, *args: Any, **kwargs: Any) -> Tensor:
        self._check_announced()
        return super().update_indexer(*args, **kwargs)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        self._check_announced()
        return super().update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        self._check_announced()
        self._note_taken(layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    # Single-token steps write to the convolution state that they are given.

    def get_conv_state(self, *args: Any, **kwargs: Any) -> Tensor | None:
        self._check_announced()
        return super().get_conv_state(*args, **kwargs)

    def has_previous_state(self, layer_idx: int | None = None, *args: Any, **kwargs: Any) -> bool:
        if layer_idx is not None:
            self._check_announced()
        return super().has_previous_state(layer_idx, *args, **kwargs)

    def _note_taken(self, layer_idx: int) -> None:
        self._taken[layer_idx] += 1

    def _check_announced(self) -> None:
        if self._before is None:
            assert self._model.decoder is not None  # or an error says why
            raise CacheStateError(
                "This model object has no GateSight hooks: they were removed, or the cache belongs to another object. "
                "Call gatesight_hf.models.attach(model) on the cache's model, or cache.tie(model) if this is the same "
                "model, loaded or copied again."
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

        Raises:
            TypeError: The watcher cannot be called.
        """
        if not callable(watcher):
            raise TypeError(f"watcher must be a function of an ordinal and a view, got {described(watcher)}.")
        self._watcher = watcher
        try:
            yield
        finally:
            self._watcher = None

    @property
    def _in_context(self) -> bool:
        """Whether coming tokens are recorded: not between a compaction that is decided and its end."""
        return self._recording is not None and (self._plan is None or self.is_compacted)

    def begin_forward(self, decoder: nn.Module, model_inputs: dict[str, Any]) -> dict[str, Any]:
        self._model.check(decoder)
        if not self.in_call:
            self.undo()
        new, ids = check_new(model_inputs, decoder), model_inputs.get("input_ids")
        coming, self._coming = self._coming, {}
        ids = coming.get("input_ids") if ids is None else ids
        rows, length = new.shape[:2]
        if length == 0:
            raise CacheStateError(
                f"No new tokens: the cache has seen {self.get_seq_length()} tokens, and all of the input is among "
                "them. Append the question to the context."
            )
        repeats, seen = self._repeats_for(rows), self._tokens
        past = None if seen.padding is None else seen.padding.repeat_interleave(repeats, dim=0)
        padding = whole_padding(model_inputs.get("attention_mask"), past, rows, seen.count, length)
        check_one_sequence(model_inputs, padding, seen.count)

        check_no_checkpointing(decoder)

        self._taken.clear()
        self.running = True
        if self._before is None:  # or this is the second forward of one call, which is undone as a whole
            states = [layer.snapshot() for layer in self._all_layers]
            self._before = (states, {name: getattr(self, name) for name in _PER_FORWARD})
        if self._recording is not None:
            self._recording = self._recording.copy()
        if repeats > 1:
            self.batch_repeat_interleave(repeats)
        tokens = self._tokens.followed_by(ids, length, padding)
        positions = model_inputs.get("position_ids")
        if positions is not None and positions.ndim == 3:
            lengths = torch.tensor(tokens.lengths(rows), device=positions.device)
            tokens = replace(tokens, rope_deltas=rope_deltas_after(positions, lengths))
        self._tokens = replace(tokens, pictures=tokens.pictures or has_pictures(coming))
        self._begun = self._clock() if self._plan is None else 0.0
        self._late_pads = None
        if padding is None:
            return model_inputs
        if not bool(padding[:, -length:].all()):
            self._late_pads = padding[:, -length:].long()
        model_inputs = {**model_inputs, "attention_mask": padding.long()}
        if positions is None:
            model_inputs["position_ids"] = positions_of(padding, length)
        return model_inputs

    def begin_multimodal(self, core: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        self._model.check(core.language_model)
        self._coming = inputs
        if inputs.get("position_ids") is not None:
            return inputs
        return {**inputs, "position_ids": self._positions_on_axes(core, inputs)}

    def end_multimodal(self) -> None:
        self._coming = {}

    def _positions_on_axes(self, core: Any, inputs: dict[str, Any]) -> Tensor:
        """Positions `[3, B, T]` of new ids or embeddings behind everything seen."""
        new = inputs["inputs_embeds"] if inputs.get("input_ids") is None else inputs["input_ids"]
        (rows, length), tokens = new.shape[:2], self._tokens
        repeats, seen = self._repeats_for(rows), tokens.count
        past = None if tokens.padding is None else tokens.padding.repeat_interleave(repeats, dim=0)
        padding = whole_padding(inputs.get("attention_mask"), past, rows, seen, length)
        start = torch.full((rows,), seen) if padding is None else padding[:, :seen].sum(-1)
        if tokens.rope_deltas is not None:
            start = start.to(tokens.rope_deltas.device) + tokens.rope_deltas.repeat_interleave(repeats)
        return positions_on_axes(core, inputs, start, None if padding is None else padding[:, -length:])

    def end_forward(self) -> None:
        self._check_taken()
        self._forget_positions()
        if self._plan is None:
            self._seconds["prefill"] += self._clock() - self._begun
        every, new = self.options.recompact_every, self.attention_layers[0].tail_length
        if every is not None and new >= every and self.is_compacted:
            self.compact()
        self.running = False
        if not self.in_call:
            self._before = None

    def begin_call(self) -> None:
        self.undo()
        self.in_call = True

    def end_call(self) -> None:
        self.in_call = False
        self._before = None

    def _check_taken(self) -> None:
        """Raise an error unless every layer, and the record, took the tokens of the forward that ends, once."""
        seen, layers = self._tokens.count, self._all_layers
        missed = [
            i
            for i, layer in enumerate(layers)
            if self._taken[i] != 1 or not (isinstance(layer, GDNStateLayer) or layer.get_seq_length() == seen)
        ]
        if missed:
            raise CacheStateError(
                f"{len(missed)} of {len(layers)} layers (the first is layer {missed[0]}) did not take this forward's "
                "tokens into the cache, or ran twice: a cache cannot go on from that, and is as it was before."
            )
        if self._in_context and self._recording is not None:
            recorded = self._recording.lengths(self.scorer.needs)
            if any(length != self.attention_layers[0].tail_length for length in recorded):
                raise CacheStateError(
                    "Some layers' signals were not recorded in this forward, and the cache is as it was before: a "
                    "hooked projection was exchanged. Call gatesight_hf.models.attach(model), which hooks the new one."
                )

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

    def undo(self) -> None:
        """Go back to before the forward or call under way, if there is one: after an error or an interrupt."""
        self.running = self.in_call = False
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
            self._recording.add_attention(ordinal, view, first, self._tokens.padding)

    def mask_for(self, ordinal: int, mask: Any, query: Tensor, implementation: str) -> Any:
        if all(layer.kept_keys is None for layer in self.attention_layers):
            # Layers have one length before compaction, so that the mask they share is right.
            return mask
        layer = self.attention_layers[ordinal]
        group = self.spec.num_attention_heads // self.spec.num_key_value_heads
        return layer.attention_mask(query.shape[1], self._tokens.padding, implementation, query.dtype, group)

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

    def begin_generate(self, model: Any, inputs: Tensor | None, arguments: dict[str, Any]) -> GenerateCall:
        decoder = find_modules(model, self.spec).decoder
        self._model.check(decoder)
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
        for name in ("max_new_tokens", "prefill_chunk_size"):
            number = option(name)
            if number is not None and not (hasattr(number, "__index__") and number >= 1):  # NumPy's and such too
                check_whole_number(name, number)
        ids = inputs if inputs is not None else arguments.get("input_ids")
        mask, seen, core = arguments.get("attention_mask"), self._tokens.count, core_of(model, decoder)
        embeds, positions = arguments.get("inputs_embeds"), arguments.get("position_ids")
        if positions is not None:
            check_tensor("position_ids", positions, "[batch, tokens] or [axes, batch, tokens]", INTEGERS)
        if embeds is not None:
            check_new({"inputs_embeds": embeds}, decoder)
        elif ids is not None:
            check_new({"input_ids": ids}, decoder)
        new = embeds if embeds is not None else ids
        if new is not None:
            check_mask(mask, len(new))
        if embeds is not None and seen:
            if core is not None and positions is None:
                raise ValueError(
                    "A multimodal model goes on from a cache by input_ids; with inputs_embeds pass position_ids too."
                )
            check_embeds(embeds.shape[1], seen, mask)
        if new is not None and mask is not None and seen == 0 and mask.shape[1] != new.shape[1]:
            raise ValueError(f"attention_mask covers {mask.shape[1]} tokens; expected {new.shape[1]}.")
        if ids is None or embeds is not None or seen == 0:
            return GenerateCall(inputs, arguments)
        arguments = {name: value for name, value in arguments.items() if name != "input_ids"}
        arguments = without_restarting_chunks(model, arguments)
        if mask is not None and mask.shape[1] == seen + ids.shape[1]:
            return GenerateCall(ids, self._with_positions(core, ids, arguments))
        if mask is not None and mask.shape[1] != ids.shape[1]:
            raise ValueError(
                f"attention_mask covers {mask.shape[1]} tokens; the cache has seen {seen}, given are {ids.shape[1]}: "
                f"pass a mask of {ids.shape[1]} if they are all ids from the context's start, or of "
                f"{seen + ids.shape[1]} if they are new."
            )
        mask = default_mask(model, ids, arguments) if mask is None else mask
        new = self._tokens.new_among(ids, mask)
        if core is not None:
            arguments = without_seen_pictures(arguments, ids.shape[1] - new)
        laid = self._tokens.laid_out(ids, new)
        if laid is not ids:
            late = mask[:, mask.shape[1] - new :]
            arguments = lengthened(model, arguments, laid.shape[1] - ids.shape[1])
            arguments["attention_mask"] = torch.cat([self._tokens.mask(len(ids), late), late], dim=1)
        arguments = self._with_positions(core, laid[:, seen:], arguments)
        return GenerateCall(laid, arguments, given=None if laid is ids else ids)

    def _with_positions(self, core: Any, new: Tensor, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments of a `generate` with positions, where a multimodal model would number them by its last document."""
        if core is None or arguments.get("position_ids") is not None:
            return arguments
        positions = self._positions_on_axes(core, {**arguments, "input_ids": new})
        # As long as everything seen and new: only the last ones are read.
        return {**arguments, "position_ids": torch.nn.functional.pad(positions, (self.get_seq_length(), 0))}
