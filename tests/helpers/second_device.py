"""A second device without hardware: its tensors compute on the CPU and refuse to meet those of another device."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_iter, tree_map

#: A device type that torch knows and that needs no runtime.
ELSEWHERE = torch.device("lazy:0")
HERE = torch.device("cpu")


class RemoteTensor(Tensor):
    """Says that it is elsewhere, and holds its values here."""

    @staticmethod
    def __new__(cls, held: Tensor) -> "RemoteTensor":
        layout: dict[str, Any] = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        return Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=ELSEWHERE, **layout)

    def __init__(self, held: Tensor) -> None:
        self.held = held

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})

    def tolist(self) -> Any:
        return self.held.tolist()

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"RemoteTensor({self.held})"


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
    remote = any(isinstance(t, RemoteTensor) for t in tensors)
    moves = function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
    if remote and not moves and any(not isinstance(t, RemoteTensor) and t.ndim for t in tensors):
        raise RuntimeError(f"{function}: tensors on two devices.")
    device = kwargs.get("device")
    of_args, of_kwargs = tree_map(lambda t: t.held if isinstance(t, RemoteTensor) else t, (args, kwargs))
    found = function(*of_args, **(of_kwargs if device is None else {**of_kwargs, "device": HERE}))
    if function is torch.ops.aten.copy_.default:
        return args[0]
    if device is not None:
        remote = torch.device(device).type == ELSEWHERE.type
    if not remote:
        return found
    found = tree_map(lambda t: RemoteTensor(t) if isinstance(t, Tensor) else t, found)
    return return_and_correct_aliasing(function, args, kwargs, found) if device is None else found


class SecondDevice(TorchDispatchMode):
    """While it is entered, tensors can be made elsewhere and moved there."""

    def __enter__(self) -> Any:
        self._tensor = torch.tensor  # which makes its storage without dispatch
        torch.tensor = lambda data, device=None, **options: self._tensor(data, **options).to(device or HERE)  # type: ignore[assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.tensor = self._tensor
        super().__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


def spread(model: Any, first: int) -> Any:
    """The model with its decoder layers from `first` on elsewhere, and hooks that move what layers are given."""
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # the grouped one counts in integers on other devices than a CPU
    for i, layer in enumerate(model.model.layers):
        device = ELSEWHERE if i >= first else HERE
        if device == ELSEWHERE:
            for module in layer.modules():
                _send(module)
        layer.register_forward_pre_hook(_Mover(device), with_kwargs=True)
    for name, module in [*model.model.named_children(), ("lm_head", model.lm_head)]:
        if name != "layers":
            module.register_forward_pre_hook(_Mover(HERE), with_kwargs=True)
    return model


def _send(module: nn.Module) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = nn.Parameter(RemoteTensor(parameter.data), requires_grad=False)
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else RemoteTensor(buffer)


class _Mover:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(lambda t: t.to(self.device) if isinstance(t, Tensor) else t, (args, kwargs))
