"""Cache layers with fixed shapes and addresses: attention in one storage each, and GDN states written in place."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import CacheStateError
from .attention import GateSightAttentionLayer, LatentAttentionLayer
from .held import storage_bytes
from .masks import mask_for_implementation
from .states import GDNStateLayer


def values_are_unknown() -> bool:
    """Whether the forward is being traced or captured: no value of a tensor may be looked at."""
    if torch.compiler.is_compiling():
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def at_one_address(tensor: Tensor) -> Tensor:
    """The tensor, of which graphs may know that it stays where it is; another child's is no reason to compile again."""
    torch._dynamo.mark_static_address(tensor, guard=False)
    return tensor


class FrozenAttentionLayer(GateSightAttentionLayer):
    """KV entries of one attention layer in a storage of fixed size; S = N + slots for the tail.

    Attributes:
        stored_keys, stored_values (`Tensor`): `[B, H, S, D]`: kept entries, the tail, and slots not written yet.
        valid (`Tensor | None`): `[B, 1 or query heads, S]`, bool, False where a row or a head kept fewer entries.
        filled (`Tensor`): int64, a scalar: entries of the tail.
    """

    is_compileable = True
    kind: ClassVar[str | None] = None
    batched: ClassVar[tuple[str, ...]] = (
        "stored_keys", "stored_values", "valid", "kept_positions", "kept_valid", "kept_scores"
    )  # fmt: skip

    stored_keys: Tensor
    stored_values: Tensor
    valid: Tensor | None
    filled: Tensor
    _kept: int
    _first_filled: int
    _room: int

    @classmethod
    def of(cls, layer: GateSightAttentionLayer, room: int, group: int) -> "FrozenAttentionLayer":
        """The entries of a compacted layer, copied, with `room` more slots; `group` query heads share a KV head."""
        assert layer.kept_keys is not None and layer.tail_keys is not None
        frozen = object.__new__(cls)
        state = layer.snapshot()
        for name in ("kept_keys", "kept_values", "tail_keys", "tail_values"):
            del state[name]
        frozen.restore(state)
        frozen._kept, frozen._first_filled, frozen._room = layer.kept_length, layer.tail_length, room
        frozen.stored_keys = frozen._stored(layer.kept_keys, layer.tail_keys)
        frozen.stored_values = frozen._stored(layer.kept_values, layer.tail_values)
        frozen.filled = torch.tensor(layer.tail_length, device=layer.kept_keys.device)
        frozen.valid = None
        if layer.kept_valid is not None:
            valid = layer.kept_valid
            valid = valid.repeat_interleave(group, dim=1) if valid.ndim == 3 else valid.unsqueeze(1)
            frozen.valid = F.pad(valid, (0, frozen.stored_keys.shape[2] - layer.kept_length), value=True)
        frozen._settle_addresses()
        return frozen

    def _stored(self, *parts: Tensor | None) -> Tensor:
        held = [part for part in parts if part is not None]
        length = sum(part.shape[2] for part in held)
        # Zeros: an entry of weight 0 counts if it is not a number.
        stored = held[0].new_zeros((*held[0].shape[:2], length + self._room, held[0].shape[3]))
        torch.cat([part.detach() for part in held], dim=2, out=stored[:, :, :length])
        return stored

    def _settle_addresses(self) -> None:
        for tensor in (self.stored_keys, self.stored_values, self.filled):
            at_one_address(tensor)

    # -- what transformers reads ---------------------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write entries behind the tail; returns the whole storages `[B, H, S, D]`."""
        if torch.is_grad_enabled() and key_states.requires_grad:
            raise CacheStateError(
                "A frozen cache is written in place, which gradients cannot follow: run the model under "
                "torch.no_grad(), or fork its parent instead of freezing it."
            )
        slots = self._slots(key_states.shape[2])
        self.stored_keys.index_copy_(2, slots, key_states)
        self.stored_values.index_copy_(2, slots, value_states)
        return self.stored_keys, self.stored_values

    def _slots(self, length: int) -> Tensor:
        """Where the next `length` entries go, `[length]`."""
        return torch.arange(self._kept, self._kept + length, device=self.filled.device) + self.filled

    def get_seq_length(self) -> Any:
        """Tokens seen; a tensor within compiled programs."""
        seen = self._kept + self.evicted + self.filled
        return seen if values_are_unknown() else int(seen)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of the mask that layers would share, the smallest possible, as none of them uses it."""
        return query_length, 0

    @property
    def kept_keys(self) -> Tensor:  # type: ignore[override]
        return self.stored_keys[:, :, : self._kept]

    @property
    def kept_values(self) -> Tensor:  # type: ignore[override]
        return self.stored_values[:, :, : self._kept]

    @property
    def tail_keys(self) -> Tensor:  # type: ignore[override]
        return self.stored_keys[:, :, self._kept : self.physical_length]

    @property
    def tail_values(self) -> Tensor:  # type: ignore[override]
        return self.stored_values[:, :, self._kept : self.physical_length]

    @property
    def keys(self) -> Tensor:  # type: ignore[override]
        return self.stored_keys[:, :, : self.physical_length]

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        return self.stored_values[:, :, : self.physical_length]

    @property
    def rows(self) -> int:
        return self.stored_keys.shape[0]

    @property
    def kept_length(self) -> int:
        return self._kept

    @property
    def tail_length(self) -> int:
        return int(self.filled)

    @property
    def room(self) -> int:
        """Slots not written yet."""
        return self.stored_keys.shape[2] - self.physical_length

    # -- steps ---------------------------------------------------------------------------------------------------------

    def commit(self, length: int) -> None:
        """Count the `length` entries that a forward has written."""
        self.filled.add_(length)

    def rewind(self) -> None:
        self.filled.fill_(self._first_filled)

    def fork(self) -> "FrozenAttentionLayer":
        """A layer with a storage of its own."""
        child = object.__new__(type(self))
        child.restore(self.snapshot())
        for name in ("stored_keys", "stored_values", "filled"):
            setattr(child, name, getattr(self, name).clone())
        child._settle_addresses()
        return child

    def _map(self, function: Any) -> None:
        super()._map(function)
        self._settle_addresses()

    def batch_repeat_interleave(self, repeats: int) -> None:
        # Every row gets a storage of its own, since it is written to.
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for name, tensor in self.state().items():
            chosen = tensor.index_select(0, beam_idx.to(tensor.device))
            if name.startswith("stored"):
                tensor.copy_(chosen)
            else:
                setattr(self, name, chosen)  # shared with forks

    def attention_mask(
        self, query_length: int, padding: Tensor | None, implementation: str, dtype: torch.dtype, group: int
    ) -> Tensor:
        """This layer's mask `[B or 1, 1 or heads, query_length, S]`; see `GateSightAttentionLayer.attention_mask`."""
        slots = torch.arange(self.stored_keys.shape[2], device=self.filled.device)
        mask = (slots <= self._slots(query_length).unsqueeze(1)).unsqueeze(0).unsqueeze(0)
        if self.valid is not None:
            mask = mask & self.valid.unsqueeze(2)
        return mask_for_implementation(mask, implementation, dtype)


class FrozenLatentLayer(LatentAttentionLayer, FrozenAttentionLayer):  # type: ignore[misc]
    """The same for latent attention."""

    kind: ClassVar[str | None] = None


class FrozenStateLayer(GDNStateLayer):
    """States of one GDN layer at fixed addresses.

    `conv_states` are working copies, which the model writes to; `recurrent_states` change at the end of a forward.
    """

    kind: ClassVar[str | None] = None

    def __init__(self, layer: GDNStateLayer) -> None:
        """A copy of the states of `layer`."""
        super().__init__(layer.number_of_states)
        self.restore(layer.fork().snapshot())
        self._conv = _copies(self.conv_states)
        #: As they were at first, see `rewind`.
        self._first = (_copies(self.conv_states), _copies(self.recurrent_states))
        #: Of the forward under way.
        self._coming: dict[int, Tensor] = {}
        self._settle_addresses()

    def _settle_addresses(self) -> None:
        for states in (self.conv_states, self.recurrent_states, self._conv):
            for state in _held(states).values():
                at_one_address(state)

    def begin(self) -> None:
        """Take the working copies, whatever a failed forward has left in them."""
        self._coming.clear()
        working = _held(self.conv_states)
        for i, state in _held(self._conv).items():
            working[i].copy_(state)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self._coming[state_idx] = recurrent_states
        return recurrent_states

    def commit(self) -> None:
        """Make what a forward has computed the states."""
        working, recurrent = _held(self.conv_states), _held(self.recurrent_states)
        for i, state in _held(self._conv).items():
            state.copy_(working[i])
        for i, state in self._coming.items():
            recurrent[i].copy_(state)
        self._coming.clear()

    def rewind(self) -> None:
        for states, first in zip((self._conv, self.recurrent_states), self._first, strict=True):
            for i, state in _held(states).items():
                state.copy_(first[i])

    def _map(self, function: Any) -> None:
        for states in self._copied:
            for i, state in _held(states).items():
                states[i] = function(state)
        self._settle_addresses()

    @property
    def _copied(self) -> tuple[dict[int, Any], ...]:
        return self.conv_states, self.recurrent_states, self._conv, *self._first

    @property
    def nbytes(self) -> int:
        """Of all copies."""
        return storage_bytes(state for states in self._copied for state in states.values())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for states in (self._conv, self.recurrent_states):
            for state in _held(states).values():
                state.copy_(state.index_select(0, beam_idx.to(state.device)))
        for states in self._first:
            for i, state in _held(states).items():
                states[i] = state.index_select(0, beam_idx.to(state.device))  # shared with forks

    def snapshot(self) -> dict[str, Any]:
        """The layer's state by reference: a forward that fails has changed no value."""
        saved = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()}
        return {**saved, "_first": tuple(dict(states) for states in self._first)}

    def fork(self) -> "FrozenStateLayer":
        """A layer with copies of the states, which rewinds to the same ones."""
        child = object.__new__(type(self))
        child.restore(self.snapshot())
        for name in ("conv_states", "recurrent_states", "_conv"):
            setattr(child, name, _copies(getattr(self, name)))
        child._settle_addresses()
        return child


def _held(states: dict[int, Any]) -> dict[int, Tensor]:
    return {i: state for i, state in states.items() if state is not None}


def _copies(states: dict[int, Any]) -> dict[int, Any]:
    return {i: None if state is None else state.clone() for i, state in states.items()}
