"""A context of fixed shapes and addresses, and how a cache of it follows calls, compiled ones among them.

A forward writes only what no earlier one reads: slots behind the position, and working copies of GDN states. Its end
copies the states and moves the position on. A forward that fails therefore leaves nothing to undo. Only inductor may
move the copies to where the states are computed: after an error within its programs the cache must be rewound.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..entries.attention import GateSightAttentionLayer, LatentAttentionLayer
from ..entries.frozen import (
    FrozenAttentionLayer,
    FrozenLatentLayer,
    FrozenStateLayer,
    at_one_address,
    values_are_unknown,
)
from ..entries.states import GDNStateLayer
from ..errors import CacheStateError
from ..models._compat import default_mask
from ..models.multimodal import has_pictures
from ..models.sink import GenerateCall
from .calls import CallFollower
from .context import Context, Snapshot
from .generate import answer_tokens
from .inputs import check_new, check_one_sequence, whole_padding

#: Layers that can be frozen.
FROZEN: dict[type, type[FrozenAttentionLayer]] = {
    GateSightAttentionLayer: FrozenAttentionLayer,
    LatentAttentionLayer: FrozenLatentLayer,
}


class FrozenContext(Context):
    """A compacted context whose layers are written in place.

    Attributes:
        max_new_tokens: Room for tokens from the freezing on.
        first_seen: Tokens seen when it was frozen.
        next_positions: `[B]`, the positions that followed them, less the entries of the tail by then.
        late_ids: `[B, slots of the tail]`, int64, the ids of the tail; None once embeddings were given.
        spoiled: Whether something that is done in place was interrupted.
    """

    max_new_tokens: int
    first_seen: int
    next_positions: Tensor
    late_ids: Tensor | None
    spoiled: bool

    @classmethod
    def of(cls, context: Context, max_new_tokens: int) -> "FrozenContext":
        """A compacted context, frozen; `context` is of no use afterwards."""
        frozen = object.__new__(cls)
        vars(frozen).update(vars(context))
        group = context.spec.num_attention_heads // context.spec.num_key_value_heads
        layers: list[Any] = []
        for layer in context.layers:
            if isinstance(layer, GDNStateLayer):
                layers.append(FrozenStateLayer(layer))
            else:
                layers.append(FROZEN[type(layer)].of(layer, max_new_tokens, group))  # type: ignore[arg-type]
        frozen.layers = layers
        device = frozen.filled.device
        start = torch.tensor(frozen.lengths())
        if frozen.tokens.rope_deltas is not None:
            start = start + frozen.tokens.rope_deltas.cpu()
        frozen.max_new_tokens = max_new_tokens
        frozen.first_seen = frozen.seen
        frozen.next_positions = start.to(device) - frozen.filled
        frozen.late_ids = None
        if frozen.tokens.ids is not None:
            slots = frozen.attention_layers[0].tail_length + max_new_tokens
            ids = torch.zeros((frozen.batch_size, slots), dtype=torch.long, device=device)
            frozen.late_ids = at_one_address(ids)
        frozen.spoiled = False
        return frozen

    @property
    def frozen_layers(self) -> list[FrozenAttentionLayer]:
        """By attention ordinal."""
        return self.attention_layers  # type: ignore[return-value]

    @property
    def state_layers(self) -> list[FrozenStateLayer]:
        """By GDN ordinal."""
        return self.gdn_layers  # type: ignore[return-value]

    @property
    def filled(self) -> Tensor:
        """Entries of the tail, a scalar."""
        return self.frozen_layers[0].filled

    @property
    def room(self) -> int:
        """Tokens that can still come."""
        return self.frozen_layers[0].room

    def check_room(self, length: int, what: str) -> None:
        """Raises CacheStateError unless `length` tokens can come."""
        if length > self.room:
            raise CacheStateError(
                f"{length} more {what} do not fit into this frozen cache, which has room for {self.room} of "
                f"max_new_tokens={self.max_new_tokens}: freeze its parent again with a larger number, or rewind()."
            )

    def rewind(self) -> None:
        """See `FrozenCache.rewind`."""
        for layer in self.layers:
            layer.rewind()  # type: ignore[union-attr]
        tokens, seen = self.tokens, self.first_seen
        ids, padding = (None if held is None else held[:, :seen] for held in (tokens.ids, tokens.padding))
        self.tokens = replace(tokens, count=seen, ids=ids, padding=padding)

    def catch_up(self) -> None:
        """Bring ids and padding up to the tokens seen, which compiled steps have not done."""
        tokens, seen = self.tokens, self.seen
        ids, padding = tokens.ids, tokens.padding
        if ids is not None and self.late_ids is not None:
            tail = self.frozen_layers[0].tail_length
            new = self.late_ids[:, tail - (seen - tokens.count) : tail]
            ids = torch.cat([ids.to(new.device), new], dim=1)
        if padding is not None:
            padding = F.pad(padding, (0, seen - tokens.count), value=True)
        self.tokens = replace(tokens, count=seen, ids=None if self.late_ids is None else ids, padding=padding)

    def commit(self, length: int) -> None:
        """Make what a forward of `length` tokens has written part of the context; it cannot be taken back."""
        self.spoiled = True
        for layer in self.frozen_layers:
            layer.commit(length)
        for state in self.state_layers:
            state.commit()
        self.spoiled = False

    def restore(self, snapshot: Snapshot) -> None:
        spoiled = self.spoiled
        super().restore(snapshot)
        self.spoiled = spoiled  # nothing that was written in place comes back

    def fork(self, scorer: Any, options: dict[str, Any]) -> "FrozenContext":
        child = super().fork(scorer, options)
        assert isinstance(child, FrozenContext)
        child.late_ids = None if self.late_ids is None else at_one_address(self.late_ids.clone())
        return child

    @contextmanager
    def changing_rows(self, rows: Tensor) -> Iterator[None]:
        try:
            with super().changing_rows(rows):
                yield
        except BaseException:
            self.spoiled = True
            raise

    def _follow_rows(self, rows: Tensor) -> None:
        super()._follow_rows(rows)
        self.next_positions = self.next_positions[rows.to(self.next_positions.device)]
        if self.late_ids is not None:
            self.late_ids = at_one_address(self.late_ids[rows.to(self.late_ids.device)])


class FrozenCalls(CallFollower):
    """What a frozen cache does in the calls of its model."""

    context: FrozenContext

    def __init__(self, context: FrozenContext) -> None:
        super().__init__(context)
        #: Tokens of the forward under way, or of one that has ended within a call that has not; None between calls.
        self._length: int | None = None

    def check_announced(self) -> None:
        if self._length is None:
            super().check_announced()

    def note_taken(self, layer_idx: int) -> None:
        if values_are_unknown():
            self.check_announced()
        else:
            super().note_taken(layer_idx)

    def begin_forward(self, decoder: nn.Module, model_inputs: dict[str, Any]) -> dict[str, Any]:
        context = self.context
        if self._length is not None and self.in_call:
            self._commit()  # the second forward of one call
        coming, self._coming = self._coming, {}
        new, ids = check_new(model_inputs, decoder), model_inputs.get("input_ids")
        ids = coming.get("input_ids") if ids is None else ids
        rows, length = new.shape[:2]
        context.model.check(decoder)
        if not values_are_unknown():
            self._admit(rows, length, model_inputs)
        elif rows != context.batch_size:
            raise ValueError(f"A compiled step of a cache with {context.batch_size} rows was given {rows}.")
        self._length, self.running = length, True
        for state in context.state_layers:
            state.begin()
        tail = torch.arange(length, device=context.filled.device) + context.filled
        if ids is None:
            context.late_ids = None
        elif context.late_ids is not None:
            context.late_ids.index_copy_(1, tail, ids.to(context.late_ids))
        # No pad can come, and layers have masks of their own.
        model_inputs = {**model_inputs, "attention_mask": None}
        if model_inputs.get("position_ids") is None:
            model_inputs["position_ids"] = (context.next_positions.unsqueeze(1) + tail).to(new.device)
        return model_inputs

    def _admit(self, rows: int, length: int, model_inputs: dict[str, Any]) -> None:
        """Check a forward that is not compiled, and bring the rows to its number."""
        context = self.context
        if context.spoiled:
            raise CacheStateError(
                "This frozen cache, which is written in place, was interrupted while it was written to: freeze its "
                "parent again."
            )
        if not self.in_call:
            self.undo()
        context.catch_up()
        if length == 0:
            raise CacheStateError("No new tokens: append the question to the context, or pass it alone.")
        context.check_room(length, "tokens")
        repeats = self._repeats_for(rows)
        padding = self._check_mask(model_inputs.get("attention_mask"), rows, length)
        check_one_sequence(model_inputs, padding, context.seen)
        self._taken.clear()
        self._before = context.snapshot()
        if repeats > 1:
            context.repeat_rows(repeats)

    def _check_mask(self, mask: Any, rows: int, length: int) -> Tensor | None:
        """What `whole_padding` gives.

        Raises:
            ValueError: The mask has pads among the coming tokens, or is not of the form that it must have.
        """
        if isinstance(mask, dict) or (isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[-1] == length):
            mask = None  # made by `generate` of one that was checked, by `get_mask_sizes`
        self._repeats_for(rows)
        return whole_padding(mask, self.context.tokens.padding_of(rows), rows, self.context.seen, length)

    def end_forward(self, compact: Callable[[], Any]) -> None:
        if not values_are_unknown():
            self._check_taken()
        self.running = False
        if not self.in_call:
            self._commit()

    def end_call(self) -> None:
        if self._length is not None:
            self._commit()
        self.in_call = False

    def _commit(self) -> None:
        assert self._length is not None
        self.context.commit(self._length)
        self._length, self._before = None, None

    def undo(self) -> None:
        self._length = None
        super().undo()

    def mask_for(self, ordinal: int, mask: Any, query: Tensor, implementation: str) -> Any:
        context = self.context
        group = context.spec.num_attention_heads // context.spec.num_key_value_heads
        layer = context.attention_layers[ordinal]
        return layer.attention_mask(query.shape[1], None, implementation, query.dtype, group)

    def gdn_mask_for(self, mask: Any, device: torch.device) -> Any:
        return None

    def _positions_on_axes(self, core: Any, inputs: dict[str, Any]) -> Tensor:
        if has_pictures(inputs):
            raise CacheStateError("A frozen cache takes no new images or videos: give them to a fork of its parent.")
        new, context = inputs["inputs_embeds"] if inputs.get("input_ids") is None else inputs["input_ids"], self.context
        rows, length = new.shape[:2]
        start = context.next_positions.repeat_interleave(rows // context.batch_size).unsqueeze(1) + context.filled
        return (start + torch.arange(length, device=start.device)).to(new.device).expand(3, -1, -1)

    def begin_generate(self, model: Any, inputs: Tensor | None, arguments: dict[str, Any]) -> GenerateCall:
        self.context.catch_up()
        call = super().begin_generate(model, inputs, arguments)
        ids = call.inputs
        if ids is None or call.arguments.get("inputs_embeds") is not None:
            return call
        # `generate` turns the mask into one of queries and slots, in which forwards cannot see pads.
        mask = call.arguments.get("attention_mask")
        mask = default_mask(model, ids, call.arguments) if mask is None else mask
        length = ids.shape[1] - (self.context.seen if mask.shape[1] == ids.shape[1] else 0)
        self._check_mask(mask, len(ids), length)
        answer = answer_tokens(model, arguments)
        if answer is not None:
            # The last token of an answer is not fed back.
            self.context.check_room(length + answer - 1, "tokens of question and answer")
        return call
