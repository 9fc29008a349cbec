"""The face of a cache that transformers sees: rows, and layers that take tokens only in announced forwards."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from gatesight_kernels.checks import check_whole_number

from ..compaction.plan import CompactionOptions
from ..entries.attention import GateSightAttentionLayer
from ..entries.states import GDNStateLayer, SlidingAttentionLayer
from ..entries.view import AttentionView
from ..models._compat import IndexedCache
from ..models.hybrid import HybridSpec
from ..models.sink import ListeningCache
from ..scoring.interface import Scorer
from .calls import CallFollower
from .context import Context
from .inputs import checked_rows


class HookedCache(IndexedCache, Cache, ListeningCache):
    """A transformers cache over a context.

    Attributes:
        context: What is held.
        calls: What the model's hooks and this cache's layers talk to.
    """

    context: Context
    calls: CallFollower

    def __init__(self, context: Context) -> None:
        self.context, self.calls = context, CallFollower(context)
        super().__init__(layers=context.layers)  # type: ignore[arg-type]

    @property
    def layers(self) -> list[Any]:
        """By absolute index."""
        return self.context.layers

    @layers.setter
    def layers(self, layers: list[Any]) -> None:
        self.context.layers = layers

    @property
    def spec(self) -> HybridSpec:
        """Layout of the model."""
        return self.context.spec

    @property
    def scorer(self) -> Scorer:
        """Rates KV entries."""
        return self.context.scorer

    @property
    def options(self) -> CompactionOptions:
        """As the cache was made with."""
        return self.context.options

    @property
    def attention_layers(self) -> list[GateSightAttentionLayer]:
        """By attention ordinal."""
        return self.context.attention_layers

    @property
    def gdn_layers(self) -> list[GDNStateLayer]:
        """By GDN ordinal."""
        return self.context.gdn_layers

    @property
    def bounded_layers(self) -> list[GDNStateLayer | SlidingAttentionLayer]:
        """Those whose size does not grow with the context."""
        return self.context.bounded_layers

    @property
    def is_compacted(self) -> bool:
        return self.context.is_compacted

    @property
    def batch_size(self) -> int:
        """Rows held; -1 before the first forward."""
        return self.context.batch_size

    # -- what model layers call: only within a forward that the hooks have announced -----------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.calls.note_taken(layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_indexer(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls.check_announced()
        return super().update_indexer(*args, **kwargs)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls.check_announced()
        return super().update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        self.calls.note_taken(layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    # Single-token steps write to the convolution state that they are given.

    def get_conv_state(self, *args: Any, **kwargs: Any) -> Tensor | None:
        self.calls.check_announced()
        return super().get_conv_state(*args, **kwargs)

    def has_previous_state(self, layer_idx: int | None = None, *args: Any, **kwargs: Any) -> bool:
        if layer_idx is not None:
            self.calls.check_announced()
        return super().has_previous_state(layer_idx, *args, **kwargs)

    def early_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: layers take their shapes, dtypes and devices from the first entries they are given."""

    def activate_past_recording(self) -> None:
        self.gdn_layers[0].activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError(
            "A GateSightCache cannot be cropped: GDN states cannot be rolled back. Fork the cache before the tokens "
            "that may have to go, and drop the fork."
        )

    # -- watching ------------------------------------------------------------------------------------------------------

    def watch_attention(self, watcher: Callable[[int, AttentionView], None]) -> AbstractContextManager[None]:
        """Show `watcher` every attention layer of the forwards with this cache: its ordinal, and the view of it.

        The layer's entries of the forward are in the cache by then. Forks are not watched.

        Raises:
            TypeError: The watcher cannot be called.
        """
        return self.calls.watch_attention(watcher)

    # -- rows: beams, several sequences, several questions at once -----------------------------------------------------

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row.

        Raises:
            ValueError: No whole number of 1 or more.
        """
        check_whole_number("repeats", repeats)
        self.context.repeat_rows(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows.

        Args:
            indices: `[B']`, their numbers.

        Raises:
            ValueError: No such tensor, or one that is empty or names rows that there are not.
        """
        rows = checked_rows("indices", indices, self.batch_size)
        with self.context.changing_rows(rows):
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
        with self.context.changing_rows(rows):
            super().reorder_cache(beam_idx)  # type: ignore[arg-type]
