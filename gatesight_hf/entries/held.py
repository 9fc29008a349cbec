"""What layers of a cache share: tensors by name that follow the rows, go back to a snapshot, and are forked."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import Tensor

Layer = TypeVar("Layer", bound="HeldTensors")


@dataclass(frozen=True)
class Extent:
    """Sizes that all layers of a saved cache share.

    Attributes:
        rows: B.
        context: Slots of the context, all of them, kept or not.
        tail: Tokens since compaction.
    """

    rows: int
    context: int
    tail: int


def refuse_offload() -> None:
    raise NotImplementedError(
        "GateSightCache does not offload its layers: after compaction they hold the kept fraction only."
    )


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages behind some tensors, each storage once."""
    storages = {}
    for tensor in tensors:
        if tensor is not None and tensor.numel():
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class HeldTensors:
    """A layer's tensors, which are replaced and never written to: forks share them, and going back is free."""

    #: Tensors with the batch dimension first.
    batched: ClassVar[tuple[str, ...]]

    def offload(self) -> None:
        refuse_offload()

    prefetch = offload

    def _map(self, function: Any) -> None:
        for name, tensor in self.state().items():
            setattr(self, name, function(tensor))

    def state(self) -> dict[str, Tensor]:
        """Every tensor that the layer holds, by name: what is saved of it."""
        return {name: tensor for name in self.batched if (tensor := getattr(self, name)) is not None}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda tensor: tensor[indices.to(tensor.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        def repeated(tensor: Tensor) -> Tensor:
            # The entries of one row are shared by all repeats, not copied: held tensors are never written to.
            if len(tensor) == 1:
                return tensor.expand(repeats, *tensor.shape[1:])
            return tensor.repeat_interleave(repeats, dim=0)

        self._map(repeated)

    def snapshot(self) -> dict[str, Any]:
        """The layer's state by reference: free, since tensors are replaced and never written to."""
        return dict(vars(self))

    def restore(self, snapshot: dict[str, Any]) -> None:
        vars(self).update(snapshot)

    def fork(self: Layer) -> Layer:
        """A layer that shares all entries and appends to a tail of its own."""
        child = object.__new__(type(self))
        child.restore(self.snapshot())
        return child
