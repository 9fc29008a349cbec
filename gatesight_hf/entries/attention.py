"""Entries of attention layers, which can be compacted.

A layer holds *kept* entries (the compacted context; empty before compaction) and a *tail* (everything after it; before
compaction: everything). It tells tokens seen (logical) from entries held (physical).
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from gatesight_kernels import compact_rows

from ..files.tensor_files import TensorInfo
from .held import Extent, HeldTensors
from .masks import entry_mask, mask_for_implementation
from .quantised import dequantise, quantise
from .saved import expected_entries


class GateSightAttentionLayer(HeldTensors, CacheLayerMixin):
    """KV entries of one attention layer.

    Attributes:
        kept_keys, kept_values (`Tensor | None`): `[B, H, N, D]`, the compacted context, int8 codes once quantised; None
            before compaction.
        key_scales, value_scales (`Tensor | None`): `[B, H, 1, D, 2]` and `[B, H, N, 1, 2]`, float32, scales and zero
            points of quantised entries (`quantised.py`); None of others.
        kept_positions (`Tensor | None`): `[B, H, N]`, int32: the slot of the context each kept entry came from.
        kept_valid (`Tensor | None`): `[B, N]`, or `[B, H, N]` where heads keep different numbers, bool; None if every
            kept entry counts.
        kept_scores (`Tensor | None`): `[B, H, N]`, float32, of the kept entries of a growing cache
            (`compaction.growing`).
        tail_keys, tail_values (`Tensor`): `[B, H, t, D]`, entries since then.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False
    batched: ClassVar[tuple[str, ...]] = (
        "kept_keys", "kept_values", "key_scales", "value_scales", "kept_positions", "kept_valid", "kept_scores",
        "tail_keys", "tail_values",
    )  # fmt: skip
    #: Whether the model reads a mask even where every query sees every entry.
    needs_mask: ClassVar[bool] = False
    #: Names the layer's class in files of saved caches; None for layers that no file holds.
    kind: ClassVar[str | None] = "attention"

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.kept_keys: Tensor | None = None
        self.kept_values: Tensor | None = None
        self.key_scales: Tensor | None = None
        self.value_scales: Tensor | None = None
        self.kept_positions: Tensor | None = None
        self.kept_valid: Tensor | None = None
        self.kept_scores: Tensor | None = None
        self.tail_keys: Tensor | None = None
        self.tail_values: Tensor | None = None
        self.evicted = 0
        self.is_initialized = False

    # -- what transformers reads ---------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.tail_keys = key_states[..., :0, :]
        self.tail_values = value_states[..., :0, :]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append entries; returns all held entries `[B, H, N + t, D]`. Held tensors are replaced, never written to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.tail_keys is not None and self.tail_values is not None
        self.tail_keys = torch.cat([self.tail_keys, key_states], dim=-2)
        self.tail_values = torch.cat([self.tail_values, value_states], dim=-2)
        keys = _joined(self.kept_keys, self.key_scales, self.tail_keys)
        return keys, _joined(self.kept_values, self.value_scales, self.tail_values)

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """All held keys `[B, H, N + t, D]`."""
        return None if self.tail_keys is None else _joined(self.kept_keys, self.key_scales, self.tail_keys)

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """All held values `[B, H, N + t, D]`."""
        return None if self.tail_values is None else _joined(self.kept_values, self.value_scales, self.tail_values)

    @property
    def index_tensors(self) -> list[Tensor]:
        """What an index of the entries holds; empty but in sparse attention."""
        return []

    def tail(self) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, H, t, D]` of the entries since the last compaction."""
        assert self.tail_keys is not None and self.tail_values is not None
        return self.tail_keys, self.tail_values

    @property
    def _ragged(self) -> bool:
        """Whether heads keep different numbers of entries."""
        return self.kept_valid is not None and self.kept_valid.ndim == 3

    @property
    def rows(self) -> int:
        """Rows held; -1 before the first forward."""
        return -1 if self.tail_keys is None else self.tail_keys.shape[0]

    @property
    def kept_length(self) -> int:
        return 0 if self.kept_keys is None else self.kept_keys.shape[-2]

    @property
    def kept_nbytes(self) -> int:
        """Of the kept entries and their scales, each row counted, storages shared or not."""
        held = (self.kept_keys, self.kept_values, self.key_scales, self.value_scales)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    @property
    def tail_length(self) -> int:
        return 0 if self.tail_keys is None else self.tail_keys.shape[-2]

    @property
    def physical_length(self) -> int:
        """Entries held per head (of the longest row)."""
        return self.kept_length + self.tail_length

    def get_seq_length(self) -> int:
        """Tokens seen: the logical length, which gives positions and slices prompts."""
        return self.physical_length + self.evicted

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.physical_length + query_length, self.evicted

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self._clear()

    # -- compaction ----------------------------------------------------------------------------------------------------

    def compact(self, indices: Tensor, valid: Tensor, context: int) -> None:
        """Keep only the slots `indices` `[B, H, N]` of the first `context` tokens seen; `valid` marks real ones.

        `valid` is `[B, N]`, or `[B, H, N]`. Later entries stay. The layer changes only after all its new tensors exist.
        """
        assert self.tail_keys is not None and self.tail_values is not None
        keys = _joined(self.kept_keys, self.key_scales, self.tail_keys)
        values = _joined(self.kept_values, self.value_scales, self.tail_values)
        slots = indices
        if self.kept_keys is not None:
            places = indices.new_zeros((*indices.shape[:2], self.get_seq_length() + 1))
            held = self.held_slots()
            places.scatter_(2, held, torch.arange(held.shape[2], device=held.device).expand_as(held))
            indices = places.gather(2, slots)
        # Never in place: forks share these tensors.
        keys, values = compact_rows(keys, indices), compact_rows(values, indices)
        self._settle(keys, values, slots.to(torch.int32), valid, context)

    def held_slots(self) -> Tensor:
        """Slots of all held entries `[B, H, N + t]`, int64; the number of tokens seen stands for those not valid."""
        assert self.tail_keys is not None
        seen, (batch, heads, tail, _) = self.get_seq_length(), self.tail_keys.shape
        late = torch.arange(seen - tail, seen, device=self.tail_keys.device).expand(batch, heads, -1)
        if self.kept_positions is None:
            return late
        kept = self.kept_positions.long()
        if self.kept_valid is not None:
            valid = self.kept_valid if self._ragged else self.kept_valid.unsqueeze(1)
            kept = kept.masked_fill(~valid, seen)
        return torch.cat([kept, late], dim=-1)

    def keep_all(self, valid: Tensor, context: int) -> None:
        """Call the first `context` entries kept, without moving one; `valid` `[B, context]` is False at pads."""
        assert self.tail_keys is not None and self.tail_values is not None
        batch, heads = self.tail_keys.shape[:2]
        positions = torch.arange(context, dtype=torch.int32, device=self.tail_keys.device).expand(batch, heads, -1)
        # Detached first: a slice would hold on to the autograd graph of what it is a view of.
        keys, values = (tail.detach()[:, :, :context] for tail in (self.tail_keys, self.tail_values))
        self._settle(keys, values, positions, valid, context)

    def _settle(self, keys: Tensor, values: Tensor, positions: Tensor, valid: Tensor, context: int) -> None:
        assert self.tail_keys is not None and self.tail_values is not None
        # Cloned, so that the tail does not hold on to the context's storage.
        start = context - (self.get_seq_length() - self.tail_length)
        late_keys, late_values = self.tail_keys[:, :, start:].clone(), self.tail_values[:, :, start:].clone()
        # At once: an interrupt finds the layer as it was, or as it is to be.
        vars(self).update(
            kept_valid=None if bool(valid.all()) else valid,
            kept_keys=keys,
            kept_values=values,
            kept_positions=positions,
            key_scales=None,
            value_scales=None,
            tail_keys=late_keys,
            tail_values=late_values,
            evicted=context - keys.shape[-2],
        )

    def quantise(self) -> None:
        """Hold the kept entries as 8-bit integers from now on. Entries that are not all finite stay as they are."""
        if self.key_scales is not None:
            return
        quantised: dict[str, Tensor] = {}
        for name, scales, dim in (("kept_keys", "key_scales", -2), ("kept_values", "value_scales", -1)):
            entries = getattr(self, name)
            if entries.numel():  # a layer may keep none, and latent attention holds no values
                quantised[name], quantised[scales] = quantise(entries, dim, self.kept_valid)
                if not quantised[scales].isfinite().all():
                    return
        vars(self).update(quantised)

    # -- files ---------------------------------------------------------------------------------------------------------

    def expected_state(self, extent: Extent, found: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """What a file must hold for a compacted layer like this one, which has seen one token.

        Args:
            extent: Sizes of the saved cache.
            found: What the file declares for the layer. Only how many entries are kept, whether they are quantised, and
                whether and for what `kept_valid` is there, is taken from it.
        """
        assert self.tail_keys is not None and self.tail_values is not None
        return expected_entries({"key": self.tail_keys, "value": self.tail_values}, extent, found)

    def load_state(self, tensors: Mapping[str, Tensor], extent: Extent) -> None:
        """Become the layer whose `state` the tensors are, which are what `expected_state` said."""
        self._clear()
        for name, tensor in tensors.items():
            setattr(self, name, tensor)
        self.evicted = extent.context - self.kept_length
        self.is_initialized = True

    # -- masks ---------------------------------------------------------------------------------------------------------

    def attention_mask(
        self, query_length: int, padding: Tensor | None, implementation: str, dtype: torch.dtype, group: int
    ) -> Tensor | None:
        """This layer's own mask for the next `query_length` tokens: kept entries for all, the tail causally.

        Args:
            query_length: Tokens of the coming update.
            padding: `[B, tokens seen + query_length]`, bool, False at pads, or None if no pad was ever seen.
            implementation: The model's attention implementation.
            dtype: Of the model, for additive masks.
            group: Query heads of a KV head.

        Returns:
            `[B or 1, 1 or heads, query_length, N + t]`: bool for sdpa, additive for eager; None where every query
            sees every entry (or where the implementation aligns causal masks to the last key by itself).

        Raises:
            ValueError: An implementation for which no such mask is known.
        """
        assert self.tail_keys is not None
        device, tail = self.tail_keys.device, self.tail_length + query_length
        # After compaction no pad can come: pads stand before a row's first token, which the context holds.
        late = padding[:, -tail:].to(device) if padding is not None and self.kept_keys is None else None
        padded = self.kept_valid is not None or late is not None
        if (query_length == 1 or "flash" in implementation) and not padded and not self.needs_mask:
            return None
        mask = entry_mask(self.kept_length, self.kept_valid, tail, late, query_length, group, device)
        return mask_for_implementation(mask, implementation, dtype)


def _joined(kept: Tensor | None, scales: Tensor | None, tail: Tensor) -> Tensor:
    """Kept entries, dequantised if they have scales, and the tail behind them."""
    if kept is None or scales is None:
        return tail if kept is None else torch.cat([kept, tail], dim=-2)
    count = kept.shape[-2]
    joined = tail.new_empty((*kept.shape[:2], count + tail.shape[-2], kept.shape[-1]))
    dequantise(kept, scales, out=joined[:, :, :count])
    joined[:, :, count:] = tail
    return joined


class LatentAttentionLayer(GateSightAttentionLayer):
    """Entries of multi-head latent attention, which caches a latent and the rotary channels that its heads share.

    Both are one entry of one KV head: its key is `[rotary | latent]`, its value is the latent, a view of the key, so
    that nothing is held or moved twice. `tail_values` and `kept_values` have no channels. Quantised, a latent has one
    scale per channel, as a key has.
    """

    kind: ClassVar[str | None] = "latent"

    def _clear(self) -> None:
        super()._clear()
        #: Rotary channels of a key.
        self.rotary = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append latents `[B, 1, t, R]` and rotary channels `[B, 1, t, P]`; returns all held ones."""
        self.rotary = value_states.shape[-1]
        keys, _ = super().update(torch.cat([value_states, key_states], dim=-1), value_states[..., :0])
        return keys[..., self.rotary :], keys[..., : self.rotary]

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """All held latents `[B, 1, N + t, R]`."""
        keys = self.keys
        return None if keys is None else keys[..., self.rotary :]

    def tail(self) -> tuple[Tensor, Tensor]:
        keys, _ = super().tail()
        return keys, keys[..., self.rotary :]

    def load_state(self, tensors: Mapping[str, Tensor], extent: Extent) -> None:
        rotary = self.rotary  # as the token had it that this layer has seen
        super().load_state(tensors, extent)
        self.rotary = rotary
