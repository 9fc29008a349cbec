"""How a cache follows the calls of its model: what it completes, records and masks, and takes back when one fails."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gatesight_kernels.checks import described

from ..entries.sparse import SparseAttentionLayer
from ..entries.states import GDNStateLayer
from ..entries.view import AttentionView
from ..errors import CacheStateError
from ..models.hybrid import find_modules
from ..models.multimodal import has_pictures, positions_on_axes, rope_deltas_after
from ..models.sink import GenerateCall, SignalSink
from . import generate
from .compacting import forget_positions
from .context import Context, Snapshot, reads_gates
from .inputs import check_new, check_no_checkpointing, check_one_sequence, positions_of, repeats_of, whole_padding


class CallFollower(SignalSink):
    """What a cache does in the calls of its model: carries each into the context, as a whole or not at all.

    Args:
        context: Of the cache.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.running = self.in_call = False
        #: What a multimodal model was given for the forward of its text model that is coming.
        self._coming: dict[str, Any] = {}
        #: Its columns of the forward under way, if there are pads among them.
        self._late_pads: Tensor | None = None
        #: State before the forward or call under way.
        self._before: Snapshot | None = None
        #: By layer, how often it took the tokens of the forward under way.
        self._taken: Counter[int] = Counter()
        #: Shown views of attention layers, see `GateSightCache.watch_attention`.
        self._watcher: Callable[[int, AttentionView], None] | None = None
        self._begun = 0.0

    # -- what the cache's layers tell ----------------------------------------------------------------------------------

    def check_announced(self) -> None:
        """Raise an error unless the hooks have announced the forward that a layer is in."""
        if self._before is None:
            assert self.context.model.decoder is not None  # or an error says why
            raise CacheStateError(
                "This model object has no GateSight hooks: they were removed, or the cache belongs to another object. "
                "Call gatesight_hf.models.attach(model) on the cache's model, or cache.tie(model) if this is the same "
                "model, loaded or copied again."
            )

    def note_taken(self, layer_idx: int) -> None:
        """A layer takes the tokens of the forward under way."""
        self.check_announced()
        self._taken[layer_idx] += 1

    # -- forwards ------------------------------------------------------------------------------------------------------

    def begin_forward(self, decoder: nn.Module, model_inputs: dict[str, Any]) -> dict[str, Any]:
        context = self.context
        context.model.check(decoder)
        if not self.in_call:
            self.undo()
        new, ids = check_new(model_inputs, decoder), model_inputs.get("input_ids")
        coming, self._coming = self._coming, {}
        ids = coming.get("input_ids") if ids is None else ids
        rows, length = new.shape[:2]
        if length == 0:
            raise CacheStateError(
                f"No new tokens: the cache has seen {context.seen} tokens, and all of the input is among "
                "them. Append the question to the context."
            )
        repeats, seen = self._repeats_for(rows), context.tokens
        padding = whole_padding(model_inputs.get("attention_mask"), seen.padding_of(rows), rows, seen.count, length)
        check_one_sequence(model_inputs, padding, seen.count)
        check_no_checkpointing(decoder)

        self._taken.clear()
        self.running = True
        if self._before is None:  # or this is the second forward of one call, which is undone as a whole
            self._before = context.snapshot()
        if repeats > 1:
            context.repeat_rows(repeats)
        tokens = context.tokens.followed_by(ids, length, padding)
        positions = model_inputs.get("position_ids")
        if positions is not None and positions.ndim == 3:
            lengths = torch.tensor(tokens.lengths(rows), device=positions.device)
            tokens = replace(tokens, rope_deltas=rope_deltas_after(positions, lengths))
        context.tokens = replace(tokens, pictures=tokens.pictures or has_pictures(coming))
        self._begun = context.clock() if context.plan is None else 0.0
        self._late_pads = None
        if padding is None:
            return model_inputs
        if not bool(padding[:, -length:].all()):
            self._late_pads = padding[:, -length:].long()
        model_inputs = {**model_inputs, "attention_mask": padding.long()}
        if positions is None:
            model_inputs["position_ids"] = positions_of(padding, length)
        return model_inputs

    def _repeats_for(self, rows: int) -> int:
        """How often each held row is repeated for `rows` rows of input: beams, several sequences or questions."""
        held = self.context.batch_size
        return 1 if held == -1 else repeats_of(held, rows)

    def end_forward(self, compact: Callable[[], Any]) -> None:
        context = self.context
        self._check_taken()
        forget_positions(context)
        if context.plan is None:
            context.seconds["prefill"] += context.clock() - self._begun
        every, new = context.options.recompact_every, context.attention_layers[0].tail_length
        if every is not None and new >= every and context.is_compacted:
            compact()
        self.running = False
        if not self.in_call:
            self._before = None

    def _check_taken(self) -> None:
        """Raise an error unless every layer, and the record, took the tokens of the forward that ends, once."""
        context = self.context
        seen, layers = context.tokens.count, context.layers
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
        if context.records and context.recording is not None:
            recorded = context.recording.lengths(context.scorer.needs)
            if any(length != context.attention_layers[0].tail_length for length in recorded):
                raise CacheStateError(
                    "Some layers' signals were not recorded in this forward, and the cache is as it was before: a "
                    "hooked projection was exchanged. Call gatesight_hf.models.attach(model), which hooks the new one."
                )

    def begin_call(self) -> None:
        self.undo()
        self.in_call = True

    def end_call(self) -> None:
        self.in_call = False
        self._before = None

    def undo(self) -> None:
        self.running = self.in_call = False
        if self._before is not None:
            self.context.restore(self._before)
            self._before = None

    # -- multimodal models ---------------------------------------------------------------------------------------------

    def begin_multimodal(self, core: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        self.context.model.check(core.language_model)
        self._coming = inputs
        if inputs.get("position_ids") is not None:
            return inputs
        return {**inputs, "position_ids": self._positions_on_axes(core, inputs)}

    def end_multimodal(self) -> None:
        self._coming = {}

    def _positions_on_axes(self, core: Any, inputs: dict[str, Any]) -> Tensor:
        """Positions `[3, B, T]` of new ids or embeddings behind everything seen."""
        new = inputs["inputs_embeds"] if inputs.get("input_ids") is None else inputs["input_ids"]
        (rows, length), tokens = new.shape[:2], self.context.tokens
        repeats, seen = self._repeats_for(rows), tokens.count
        padding = whole_padding(inputs.get("attention_mask"), tokens.padding_of(rows), rows, seen, length)
        start = torch.full((rows,), seen) if padding is None else padding[:, :seen].sum(-1)
        if tokens.rope_deltas is not None:
            start = start.to(tokens.rope_deltas.device) + tokens.rope_deltas.repeat_interleave(repeats)
        return positions_on_axes(core, inputs, start, None if padding is None else padding[:, -length:])

    # -- generate ------------------------------------------------------------------------------------------------------

    def begin_generate(self, model: Any, inputs: Tensor | None, arguments: dict[str, Any]) -> GenerateCall:
        decoder = find_modules(model, self.context.spec).decoder
        self.context.model.check(decoder)
        generate.check_options(model, arguments)
        return generate.completed(model, decoder, self.context.tokens, inputs, arguments, self._positions_on_axes)

    def end_prefill(self, compact: Callable[[], Any]) -> None:
        if not self.context.is_compacted:
            compact()

    def end_generate(self) -> None:
        if not self.context.is_compacted:
            warnings.warn(
                "Nothing was compacted: this way of generating does not prefill as `generate` itself does, so that the "
                "answer became part of the context. Prefill with a forward and call compact() first.",
                stacklevel=4,
            )

    # -- layers --------------------------------------------------------------------------------------------------------

    def wants_signals(self) -> bool:
        return self.context.records and self.context.scorer.needs.signals

    def wants_attention(self) -> bool:
        return self._watcher is not None or self._records_attention

    @property
    def _records_attention(self) -> bool:
        needs = self.context.scorer.needs
        of_gates = reads_gates(self.context.options, self.context.spec)
        return self.context.records and bool(of_gates or needs.queries or needs.query_moments or needs.hidden)

    @contextmanager
    def watch_attention(self, watcher: Callable[[int, AttentionView], None]) -> Iterator[None]:
        """See `GateSightCache.watch_attention`."""
        if not callable(watcher):
            raise TypeError(f"watcher must be a function of an ordinal and a view, got {described(watcher)}.")
        self._watcher = watcher
        try:
            yield
        finally:
            self._watcher = None

    def convolution_context(self, gdn: int) -> Tensor | None:
        layer = self.context.gdn_layers[gdn]
        state = layer.conv_states[0]
        return state.clone() if state is not None and layer.has_previous_state[0] else None

    def record_signals(self, gdn: int, signals: Tensor) -> None:
        if self.context.recording is not None:
            self.context.recording.add_signals(gdn, signals)

    def record_attention(self, ordinal: int, view: AttentionView) -> None:
        if self._watcher is not None:
            self._watcher(ordinal, view)
        context = self.context
        if context.recording is not None and self._records_attention:
            first = context.attention_layers[ordinal].get_seq_length() - view.hidden.shape[1]
            context.recording.add_attention(ordinal, view, first, context.tokens.padding)

    def mask_for(self, ordinal: int, mask: Any, query: Tensor, implementation: str) -> Any:
        context = self.context
        if all(layer.kept_keys is None for layer in context.attention_layers):
            # Layers have one length before compaction, so that the mask they share is right.
            return mask
        group = context.spec.num_attention_heads // context.spec.num_key_value_heads
        layer, padding = context.attention_layers[ordinal], context.tokens.padding
        return layer.attention_mask(query.shape[1], padding, implementation, query.dtype, group)

    def select_entries(
        self, ordinal: int, indexer: Any, hidden: Tensor, angles: tuple[Tensor, Tensor]
    ) -> Tensor | None:
        layer = self.context.attention_layers[ordinal]
        assert isinstance(layer, SparseAttentionLayer)
        return layer.select(indexer, hidden, angles)

    def gdn_mask_for(self, mask: Any, device: torch.device) -> Any:
        return mask if self._late_pads is None else self._late_pads.to(device)
