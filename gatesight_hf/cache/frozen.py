"""A compacted cache with fixed shapes and addresses, whose decoding steps can be compiled and captured in graphs.

Every attention layer gets one storage for its kept entries and all tokens to come; entries are written by index at a
position that is a tensor, and each layer's mask covers its whole storage. Layers differ in length, not over time.

A forward writes only what no earlier one reads: slots behind the position, and working copies of GDN states. Its end
copies the states and moves the position on. A forward that fails therefore leaves nothing to undo. Only inductor may
move the copies to where the states are computed: after an error within its programs the cache must be rewound.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gatesight_kernels.checks import check_whole_number, described

from ..entries.attention import GateSightAttentionLayer, LatentAttentionLayer
from ..entries.frozen import (
    FrozenAttentionLayer,
    FrozenLatentLayer,
    FrozenStateLayer,
    at_one_address,
    values_are_unknown,
)
from ..entries.states import GDNStateLayer, SlidingAttentionLayer
from ..errors import CacheStateError
from ..models._compat import default_mask
from ..models.hooks import GenerateCall
from ..models.multimodal import has_pictures
from ..scoring.interface import Scorer
from .cache import GateSightCache
from .inputs import check_new, check_one_sequence, whole_padding

#: Layers that can be frozen.
_FROZEN: dict[type, type[FrozenAttentionLayer]] = {
    GateSightAttentionLayer: FrozenAttentionLayer,
    LatentAttentionLayer: FrozenLatentLayer,
}


class FrozenCache(GateSightCache):
    """A child of a compacted cache with fixed shapes: for `torch.compile`, and for CUDA graphs.

    It answers as `parent.fork()` does. `generate` compiles its decoding steps as it does with transformers' static
    caches: by itself on GPUs, elsewhere if its `CompileConfig` says so. A step is one graph, and every child of one
    parent runs the same one. Fork the parent rather than freeze it where nothing is compiled: a frozen cache copies the
    kept entries, which forks share.

    Forwards and `generate` check what they are given and that there is room for it. Within a program that the caller
    has compiled, no value can be looked at: pads are not noticed, and a step without room fails with an index out of
    bounds, on GPUs in a device assertion. A loop of one's own asks for `room` first.

    Args:
        parent: The compacted cache; it is not changed.
        max_new_tokens: Room for tokens from now on, those of questions and of answers.

    Raises:
        TypeError: The parent is no GateSight cache.
        ValueError: `max_new_tokens` below 1.
        CacheStateError: The parent is not compacted, is frozen already, grows, or has layers that cannot be frozen.
    """

    def __init__(self, parent: GateSightCache, max_new_tokens: int) -> None:
        if not isinstance(parent, GateSightCache):
            raise TypeError(f"parent must be a compacted GateSightCache, got {described(parent)}.")
        check_whole_number("max_new_tokens", max_new_tokens)
        _check_can_be_frozen(parent)
        child = parent.fork()
        vars(self).update(vars(child))
        self.max_new_tokens = max_new_tokens
        group = self.spec.num_attention_heads // self.spec.num_key_value_heads
        layers: list[Any] = []
        for layer in child.layers:
            if isinstance(layer, GDNStateLayer):
                layers.append(FrozenStateLayer(layer))
            else:
                layers.append(_FROZEN[type(layer)].of(layer, max_new_tokens, group))
        self.layers = layers
        device = self._filled.device
        start = torch.tensor(self._lengths())
        if self._tokens.rope_deltas is not None:
            start = start + self._tokens.rope_deltas.cpu()
        #: Tokens seen when the cache was frozen, and the position that followed them, by row `[B]`.
        self._first_seen = self.get_seq_length()
        self._next = start.to(device) - self._filled
        #: Ids `[B, slots of the tail]`; None once embeddings were given.
        self._late_ids: Tensor | None = None
        if self._tokens.ids is not None:
            slots = self.attention_layers[0].tail_length + max_new_tokens
            self._late_ids = at_one_address(torch.zeros((self.batch_size, slots), dtype=torch.long, device=device))
        #: Whether a change of rows, which is made in place, failed half-way.
        self._spoiled = False
        #: Tokens of the forward under way, or of one that has ended within a call that has not; None between calls.
        self._length: int | None = None

    @classmethod
    def load(
        cls, path: str | Path, model: Any, *, tokenizer: Any = None, scorer: Scorer | None = None
    ) -> "GateSightCache":
        """Raises CacheStateError: files hold no room for tokens to come."""
        raise CacheStateError("Files hold no frozen caches: load the parent with GateSightCache.load, and freeze it.")

    # -- parts ---------------------------------------------------------------------------------------------------------

    @property
    def _frozen_layers(self) -> list[FrozenAttentionLayer]:
        return self.attention_layers  # type: ignore[return-value]

    @property
    def _filled(self) -> Tensor:
        return self._frozen_layers[0].filled

    @property
    def batch_size(self) -> int:
        return self._frozen_layers[0].stored_keys.shape[0]

    @property
    def room(self) -> int:
        """Tokens that can still come."""
        return self._frozen_layers[0].room

    # -- life ----------------------------------------------------------------------------------------------------------

    def rewind(self) -> None:
        """Go back to the parent's state, in the rows held now, at the same addresses: for the next question."""
        for layer in self.layers:
            layer.rewind()
        tokens, seen = self._tokens, self._first_seen
        ids, padding = (None if held is None else held[:, :seen] for held in (tokens.ids, tokens.padding))
        self._tokens = replace(tokens, count=seen, ids=ids, padding=padding)

    def fork(self, **options: Any) -> "FrozenCache":
        """A frozen child with a copy of everything, which may go on otherwise.

        Raises:
            CacheStateError: Options, which only caches take that are not compacted.
        """
        child = super().fork(**options)
        assert isinstance(child, FrozenCache)
        child._late_ids = None if self._late_ids is None else at_one_address(self._late_ids.clone())
        return child

    def reset(self) -> None:
        raise CacheStateError(
            "A frozen cache cannot take another context: rewind() brings it back to its parent's state, and the parent "
            "can be reset."
        )

    # -- what the hooks call -------------------------------------------------------------------------------------------

    def _check_announced(self) -> None:
        if self._length is None:
            super()._check_announced()

    def begin_forward(self, decoder: nn.Module, model_inputs: dict[str, Any]) -> dict[str, Any]:
        if self._length is not None and self.in_call:
            self._commit()  # the second forward of one call
        coming, self._coming = self._coming, {}
        new, ids = check_new(model_inputs, decoder), model_inputs.get("input_ids")
        ids = coming.get("input_ids") if ids is None else ids
        rows, length = new.shape[:2]
        self._model.check(decoder)
        if not values_are_unknown():
            self._admit(rows, length, model_inputs)
        elif rows != self.batch_size:
            raise ValueError(f"A compiled step of a cache with {self.batch_size} rows was given {rows}.")
        self._length, self.running = length, True
        for state in self.gdn_layers:
            assert isinstance(state, FrozenStateLayer)
            state.begin()
        tail = torch.arange(length, device=self._filled.device) + self._filled
        if ids is None:
            self._late_ids = None
        elif self._late_ids is not None:
            self._late_ids.index_copy_(1, tail, ids.to(self._late_ids))
        # No pad can come, and layers have masks of their own.
        model_inputs = {**model_inputs, "attention_mask": None}
        if model_inputs.get("position_ids") is None:
            model_inputs["position_ids"] = (self._next.unsqueeze(1) + tail).to(new.device)
        return model_inputs

    def _admit(self, rows: int, length: int, model_inputs: dict[str, Any]) -> None:
        """Check a forward that is not compiled, and bring the rows to its number."""
        if self._spoiled:
            raise CacheStateError(
                "This frozen cache, which is written in place, was interrupted while it was written to: freeze its "
                "parent again."
            )
        if not self.in_call:
            self.undo()
        self._catch_up()
        if length == 0:
            raise CacheStateError("No new tokens: append the question to the context, or pass it alone.")
        self._check_room(length, "tokens")
        repeats = self._repeats_for(rows)
        padding = self._check_mask(model_inputs.get("attention_mask"), rows, length)
        check_one_sequence(model_inputs, padding, self.get_seq_length())
        self._taken.clear()
        self._before = ([layer.snapshot() for layer in self.layers], self._own_state())
        if repeats > 1:
            self.batch_repeat_interleave(repeats)

    def _check_mask(self, mask: Any, rows: int, length: int) -> Tensor | None:
        """What `whole_padding` gives.

        Raises:
            ValueError: The mask has pads among the coming tokens, or is not of the form that it must have.
        """
        if isinstance(mask, dict) or (isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[-1] == length):
            mask = None  # made by `generate` of one that was checked, by `get_mask_sizes`
        past = self._tokens.padding
        past = None if past is None else past.repeat_interleave(self._repeats_for(rows), dim=0)
        return whole_padding(mask, past, rows, self.get_seq_length(), length)

    def _own_state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("_tokens", "_next", "_late_ids")}

    def _check_room(self, length: int, what: str) -> None:
        if length > self.room:
            raise CacheStateError(
                f"{length} more {what} do not fit into this frozen cache, which has room for {self.room} of "
                f"max_new_tokens={self.max_new_tokens}: freeze its parent again with a larger number, or rewind()."
            )

    def _catch_up(self) -> None:
        """Bring ids and padding up to the tokens seen, which compiled steps have not done."""
        tokens, seen = self._tokens, self.get_seq_length()
        ids, padding = tokens.ids, tokens.padding
        if ids is not None and self._late_ids is not None:
            tail = self._frozen_layers[0].tail_length
            new = self._late_ids[:, tail - (seen - tokens.count) : tail]
            ids = torch.cat([ids.to(new.device), new], dim=1)
        if padding is not None:
            padding = F.pad(padding, (0, seen - tokens.count), value=True)
        self._tokens = replace(tokens, count=seen, ids=None if self._late_ids is None else ids, padding=padding)

    def end_forward(self) -> None:
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
        """Make what the forward has written part of the cache; in place, so that it cannot be taken back."""
        length = self._length
        assert length is not None
        self._spoiled = True
        for layer in self._frozen_layers:
            layer.commit(length)
        for state in self.gdn_layers:
            assert isinstance(state, FrozenStateLayer)
            state.commit()
        self._spoiled, self._length, self._before = False, None, None

    def undo(self) -> None:
        self._length = None
        super().undo()

    def mask_for(self, ordinal: int, mask: Any, query: Tensor, implementation: str) -> Any:
        group = self.spec.num_attention_heads // self.spec.num_key_value_heads
        layer = self.attention_layers[ordinal]
        return layer.attention_mask(query.shape[1], None, implementation, query.dtype, group)

    def gdn_mask_for(self, mask: Any, device: torch.device) -> Any:
        return None

    def _positions_on_axes(self, core: Any, inputs: dict[str, Any]) -> Tensor:
        if has_pictures(inputs):
            raise CacheStateError("A frozen cache takes no new images or videos: give them to a fork of its parent.")
        new = inputs["inputs_embeds"] if inputs.get("input_ids") is None else inputs["input_ids"]
        rows, length = new.shape[:2]
        start = self._next.repeat_interleave(rows // self.batch_size).unsqueeze(1) + self._filled
        return (start + torch.arange(length, device=start.device)).to(new.device).expand(3, -1, -1)

    def begin_generate(self, model: Any, inputs: Tensor | None, arguments: dict[str, Any]) -> GenerateCall:
        self._catch_up()
        call = super().begin_generate(model, inputs, arguments)
        ids = call.inputs
        if ids is None or call.arguments.get("inputs_embeds") is not None:
            return call
        # `generate` turns the mask into one of queries and slots, in which forwards cannot see pads.
        mask = call.arguments.get("attention_mask")
        mask = default_mask(model, ids, call.arguments) if mask is None else mask
        length = ids.shape[1] - (self.get_seq_length() if mask.shape[1] == ids.shape[1] else 0)
        self._check_mask(mask, len(ids), length)
        answer = _answer_tokens(model, arguments)
        if answer is not None:
            # The last token of an answer is not fed back.
            self._check_room(length + answer - 1, "tokens of question and answer")
        return call

    def _note_taken(self, layer_idx: int) -> None:
        if not values_are_unknown():
            super()._note_taken(layer_idx)

    @contextmanager
    def _changing_rows(self, rows: Tensor) -> Iterator[None]:
        try:
            with super()._changing_rows(rows):
                yield
        except BaseException:
            self._spoiled = True
            raise

    def _follow_rows(self, rows: Tensor) -> None:
        super()._follow_rows(rows)
        self._next = self._next[rows.to(self._next.device)]
        if self._late_ids is not None:
            self._late_ids = at_one_address(self._late_ids[rows.to(self._late_ids.device)])


def _answer_tokens(model: Any, arguments: dict[str, Any]) -> int | None:
    """`max_new_tokens` of a `generate`, if it is given."""
    values = [arguments.get("max_new_tokens")]
    configs = (arguments.get("generation_config"), model.generation_config)
    values += [getattr(config, "max_new_tokens", None) for config in configs]
    return next((value for value in values if value is not None), None)


def _check_can_be_frozen(parent: GateSightCache) -> None:
    """Raises CacheStateError if the cache cannot be frozen."""
    if isinstance(parent, FrozenCache):
        raise CacheStateError("This cache is frozen already: fork it, or freeze its parent with more room.")
    if parent.options.grows:
        raise CacheStateError(
            "A growing cache cannot be frozen: compacting it again would change its shapes. Make it without growing "
            "and recompact_every."
        )
    if parent.options.entries_dtype is not None:
        raise CacheStateError(
            "A cache with quantised entries cannot be frozen, since its steps read entries as they are. Make it "
            "without entries_dtype."
        )
    if not parent.is_compacted:
        raise CacheStateError("Only a compacted cache can be frozen: prefill a context and call compact() first.")
    kinds = {type(layer) for layer in parent.layers} - {GDNStateLayer, *_FROZEN}
    if SlidingAttentionLayer in kinds:
        raise CacheStateError(
            f"{parent.spec.model_type} has sliding windows, whose entries move: its cache cannot be frozen; fork it."
        )
    if kinds:
        raise CacheStateError(
            f"{parent.spec.model_type} has an indexer, whose blocks grow with the text: its cache cannot be frozen; "
            "fork it."
        )
