"""Which implementation runs, decided here and nowhere else."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

from torch import Tensor

#: `auto`: Triton for CUDA tensors, the torch twin elsewhere. The others force one.
BACKENDS = ("auto", "triton", "torch")
VARIABLE = "GATESIGHT_BACKEND"

_forced: ContextVar[str | None] = ContextVar("gatesight_backend", default=None)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Use one of `BACKENDS` for the operations within, in this thread or task; before the environment variable.

    Raises:
        ValueError: No such backend.
    """
    token = _forced.set(_checked(name, "use_backend"))
    try:
        yield
    finally:
        _forced.reset(token)


def runs_triton(*tensors: Tensor) -> bool:
    """Whether an operation on these tensors runs its Triton kernel.

    Args:
        tensors: Those that the kernel would read; on one device.

    Raises:
        ValueError: `GATESIGHT_BACKEND` names no backend.
        RuntimeError: Triton is forced and is not there, or cannot reach the tensors, or does not take their dtype.
    """
    name = _forced.get() or _checked(os.environ.get(VARIABLE) or "auto", VARIABLE)
    if name == "torch" or (name == "auto" and not tensors[0].is_cuda):
        return False
    obstacle = _obstacle(tensors)
    if name == "auto":
        return obstacle is None
    if obstacle is not None:
        raise RuntimeError(f"The Triton kernels are forced, but {obstacle}. Choose backend 'auto' or 'torch'.")
    return True


def _checked(name: str, where: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{where} must be one of {', '.join(BACKENDS)}, got {name!r}.")
    return name


def _obstacle(tensors: tuple[Tensor, ...]) -> str | None:
    """Why Triton cannot run, or None."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        return f"the tensors are on different devices: {', '.join(sorted(map(str, devices)))}"
    if not _importable():
        return "triton cannot be imported"
    if not tensors[0].is_cuda and not _interpreted():
        return f"the tensors are on {tensors[0].device}, not on a GPU (only Triton's interpreter runs there)"
    if double := [tensor for tensor in tensors if tensor.element_size() > 4 and tensor.is_floating_point()]:
        return f"the kernels do not compute in {double[0].dtype}"
    return None


@cache
def _importable() -> bool:
    try:
        importlib.import_module("triton.language")
    except Exception:  # a broken installation may raise anything
        return False
    return True


def _interpreted() -> bool:
    """Whether Triton interprets its kernels: `TRITON_INTERPRET=1`, set before the first kernel was loaded."""
    from triton import knobs

    return bool(knobs.runtime.interpret)
