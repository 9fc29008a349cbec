"""What has a fixed size whatever the context's length: GDN states, and the entries of sliding windows."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionLayer

from ..files.tensor_files import TensorInfo
from .held import Extent, refuse_offload


class SlidingAttentionLayer(DynamicSlidingWindowLayer):
    """Entries of a sliding-window layer, whose size is bounded: never compacted, with forks and rollback."""

    kind: ClassVar[str | None] = None

    def offload(self) -> None:
        refuse_offload()

    prefetch = offload

    def detach(self) -> None:
        """Let go of everything before the window, and of the autograd graph of forwards that ran with gradients."""
        if self.keys is not None and self.values is not None:
            # Views until now of all entries that a forward read.
            self.keys, self.values = self.keys.detach().clone(), self.values.detach().clone()

    def snapshot(self) -> dict[str, Any]:
        """The layer's state by reference: free, since tensors are replaced and never written to."""
        return dict(vars(self))

    def restore(self, snapshot: dict[str, Any]) -> None:
        vars(self).update(snapshot)

    def fork(self) -> "SlidingAttentionLayer":
        """A layer that shares the entries and appends to a window of its own."""
        child = SlidingAttentionLayer(self.sliding_window)
        child.restore(self.snapshot())
        return child


class GDNStateLayer(LinearAttentionLayer):
    """Convolution and recurrent state of one GDN layer, with batch operations, forks, rollback and files."""

    #: Names the layer's class in files of saved caches.
    kind: ClassVar[str | None] = "gdn"

    def reset(self) -> None:
        self.__init__(self.number_of_states)  # type: ignore[misc]

    def offload(self) -> None:
        refuse_offload()

    prefetch = offload

    def activate_past_recording(self) -> None:
        raise NotImplementedError(
            "GateSightCache does not support assisted decoding: rejected tokens cannot be taken out of GDN states."
        )

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        # Replaced instead of copied into, so that snapshots are free; only compiled static caches need addresses.
        self.recurrent_states[state_idx] = recurrent_states
        self.is_recurrent_states_initialized[state_idx] = True
        return recurrent_states

    def _map(self, function: Any) -> None:
        for states in (self.conv_states, self.recurrent_states):
            for i, state in states.items():
                if state is not None:
                    states[i] = function(state)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda state: state[indices])

    def snapshot(self) -> dict[str, Any]:
        """The layer's state. Convolution states are copied: single-token steps write to them in place."""
        saved = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()}
        saved["conv_states"] = {i: None if s is None else s.clone() for i, s in self.conv_states.items()}
        return saved

    def restore(self, snapshot: dict[str, Any]) -> None:
        vars(self).update(snapshot)

    def fork(self) -> "GDNStateLayer":
        """A layer with its own copy of both states."""
        child = GDNStateLayer(self.number_of_states)
        child.restore(self.snapshot())
        # Copied too: a fused kernel may write the state it is given in place.
        child.recurrent_states = {i: None if s is None else s.clone() for i, s in self.recurrent_states.items()}
        return child

    def state(self) -> dict[str, Tensor]:
        """Every tensor that the layer holds, by name: what is saved of it."""
        return {
            f"{name}.{i}": state
            for name in ("conv_states", "recurrent_states")
            for i, state in getattr(self, name).items()
            if state is not None
        }

    def expected_state(self, extent: Extent, found: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """What a file must hold for a layer like this one, which has seen one token."""
        return {name: TensorInfo(state.dtype, (extent.rows, *state.shape[1:])) for name, state in self.state().items()}

    def load_state(self, tensors: Mapping[str, Tensor], extent: Extent) -> None:
        """Become the layer whose `state` the tensors are, which are what `expected_state` said."""
        for name, tensor in tensors.items():
            states, _, i = name.partition(".")
            getattr(self, states)[int(i)] = tensor

    def detach(self) -> None:
        """Let go of the autograd graph of forwards that ran with gradients."""
        self._map(Tensor.detach)

    @property
    def nbytes(self) -> int:
        states = (*self.conv_states.values(), *self.recurrent_states.values())
        return sum(state.untyped_storage().nbytes() for state in states if state is not None)
