"""A compacted cache with fixed shapes and addresses, whose decoding steps can be compiled and captured in graphs.

Every attention layer gets one storage for its kept entries and all tokens to come; entries are written by index at a
position that is a tensor, and each layer's mask covers its whole storage. Layers differ in length, not over time.
"""

from pathlib import Path
from typing import Any

from gatesight_kernels.checks import check_whole_number, described

from ..entries.states import GDNStateLayer, SlidingAttentionLayer
from ..errors import CacheStateError
from ..scoring.interface import Scorer
from .cache import GateSightCache
from .frozen_calls import FROZEN, FrozenCalls, FrozenContext


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

    context: FrozenContext

    def __init__(self, parent: GateSightCache, max_new_tokens: int) -> None:
        if not isinstance(parent, GateSightCache):
            raise TypeError(f"parent must be a compacted GateSightCache, got {described(parent)}.")
        check_whole_number("max_new_tokens", max_new_tokens)
        _check_can_be_frozen(parent)
        child = parent.fork()
        vars(self).update(vars(child))
        self.context = FrozenContext.of(child.context, max_new_tokens)
        self.calls = FrozenCalls(self.context)

    @classmethod
    def load(
        cls, path: str | Path, model: Any, *, tokenizer: Any = None, scorer: Scorer | None = None
    ) -> "GateSightCache":
        """Raises CacheStateError: files hold no room for tokens to come."""
        raise CacheStateError("Files hold no frozen caches: load the parent with GateSightCache.load, and freeze it.")

    @property
    def max_new_tokens(self) -> int:
        """As the cache was made with."""
        return self.context.max_new_tokens

    @property
    def room(self) -> int:
        """Tokens that can still come."""
        return self.context.room

    def rewind(self) -> None:
        """Go back to the parent's state, in the rows held now, at the same addresses: for the next question."""
        self.context.rewind()

    def fork(self, *, scorer: Scorer | None = None, **options: Any) -> "FrozenCache":
        """A frozen child with a copy of everything, which may go on otherwise.

        Raises:
            CacheStateError: A scorer or options, which only caches take that are not compacted.
        """
        child = super().fork(scorer=scorer, **options)
        assert isinstance(child, FrozenCache)
        return child

    def reset(self) -> None:
        raise CacheStateError(
            "A frozen cache cannot take another context: rewind() brings it back to its parent's state, and the parent "
            "can be reset."
        )


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
    kinds = {type(layer) for layer in parent.layers} - {GDNStateLayer, *FROZEN}
    if SlidingAttentionLayer in kinds:
        raise CacheStateError(
            f"{parent.spec.model_type} has sliding windows, whose entries move: its cache cannot be frozen; fork it."
        )
    if kinds:
        raise CacheStateError(
            f"{parent.spec.model_type} has an indexer, whose blocks grow with the text: its cache cannot be frozen; "
            "fork it."
        )
