"""What a cache is to the hooks: an object that they tell of a model's calls."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..entries.view import AttentionView


class SignalSink(ABC):
    """What the hooks tell of a model's calls, and ask."""

    @abstractmethod
    def wants_signals(self) -> bool:
        """Whether GDN signals of the current forward are to be recorded."""

    @abstractmethod
    def wants_attention(self) -> bool:
        """Whether views of the attention layers of the current forward are to be recorded."""

    @abstractmethod
    def begin_forward(self, decoder: nn.Module, model_inputs: dict[str, Any]) -> dict[str, Any]:
        """Called before the decoder runs; returns its keyword arguments, completed."""

    @abstractmethod
    def begin_multimodal(self, core: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """Called before a model that joins a vision tower to the decoder runs; returns its arguments, completed."""

    @abstractmethod
    def end_multimodal(self) -> None:
        """Called after it ran, or failed."""

    @abstractmethod
    def end_forward(self, compact: Callable[[], Any]) -> None:
        """Called after the decoder ran; `compact` compacts the cache."""

    #: Whether the decoder runs.
    running: bool
    #: Whether a model around the decoder runs, whose end is the forward's.
    in_call: bool

    @abstractmethod
    def begin_call(self) -> None:
        """Called before the outermost model around the decoder runs."""

    @abstractmethod
    def end_call(self) -> None:
        """Called after it ran."""

    @abstractmethod
    def undo(self) -> None:
        """Called in place of the end of a forward or call, or after it, if anything failed or was interrupted."""

    @abstractmethod
    def convolution_context(self, gdn: int) -> Tensor | None:
        """Copy of the last inputs of a GDN layer's short convolution, `[B, channels, kernel]`; None at the start."""

    @abstractmethod
    def record_signals(self, gdn: int, signals: Tensor) -> None:
        """Take `[B, T, 3, HV]` of GDN ordinal `gdn`."""

    @abstractmethod
    def record_attention(self, ordinal: int, view: AttentionView) -> None:
        """Take the view of attention ordinal `ordinal`, whose entries the cache holds already."""

    @abstractmethod
    def mask_for(self, ordinal: int, mask: Any, query: Tensor, implementation: str) -> Any:
        """The attention mask that attention ordinal `ordinal` must use in place of `mask`."""

    @abstractmethod
    def select_entries(
        self, ordinal: int, indexer: Any, hidden: Tensor, angles: tuple[Tensor, Tensor]
    ) -> Tensor | None:
        """The entries that an indexer is to pick for the coming tokens of attention ordinal `ordinal`.

        Args:
            ordinal: Of the layer.
            indexer: Its indexer.
            hidden: `[B, T, C]`, the layer's input.
            angles: cos and sin `[B, t, R]`, the last T of them those of the coming tokens.

        Returns:
            `[B or 1, 1, T or 1, entries or 1]`, bool; None leaves it to the indexer's own forward.
        """

    @abstractmethod
    def gdn_mask_for(self, mask: Any, device: torch.device) -> Any:
        """The padding mask of the current tokens that GDN layers on `device` must use in place of `mask`."""

    @abstractmethod
    def begin_generate(self, model: Any, inputs: Tensor | None, arguments: dict[str, Any]) -> "GenerateCall":
        """Called before `generate` of `model` with `inputs` and keyword arguments; returns what it is to be given."""

    @abstractmethod
    def end_prefill(self, compact: Callable[[], Any]) -> None:
        """Called when `generate` has prefilled its prompt, in one forward or in chunks; `compact` as above."""

    @abstractmethod
    def end_generate(self) -> None:
        """Called when `generate` has returned."""


@dataclass(frozen=True)
class GenerateCall:
    """What `generate` is given.

    Attributes:
        inputs: Its first argument.
        arguments: By keyword.
        given: `[B, T]`, the ids of the caller, if `inputs` are other ones that stand for them.
    """

    inputs: Tensor | None
    arguments: dict[str, Any]
    given: Tensor | None = None

    def as_given(self, output: Any) -> Any:
        """What `generate` returned, with sequences that begin as the caller's ids do."""
        if self.given is None or self.inputs is None:
            return output
        sequences = getattr(output, "sequences", output)
        begun = self.given.repeat_interleave(len(sequences) // len(self.given), dim=0)
        whole = torch.cat([begun, sequences[:, self.inputs.shape[1] :]], dim=1)
        if sequences is output:
            return whole
        output.sequences = whole
        return output


class ListeningCache(ABC):
    """A cache that the hooks tell of the calls it is given to."""

    calls: SignalSink

    @abstractmethod
    def compact(self) -> Any:
        """Keep the best entries of everything seen."""
