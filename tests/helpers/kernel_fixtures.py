"""What tests of kernels share: where and how they run, outputs that begin as NaN, and huge sparse memory."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gatesight_kernels as kernels

GPU = torch.cuda.is_available()
NO_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.int8: "i8", torch.int64: "i64"}


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(GPU, reason="kernels are interpreted only where there is no GPU")),
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a CUDA device")]),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    """Where kernels run: on a GPU, or interpreted."""
    return request.param


@pytest.fixture(params=["torch", pytest.param("triton", marks=NO_TRITON)])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, device: str) -> Iterator[str]:
    """Twin and kernel in turn."""
    if request.param == "triton" and device == "cpu":
        round_as_gpus_do(monkeypatch)
    with kernels.use_backend(request.param):
        yield request.param


def round_as_gpus_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter cuts float32 down to bfloat16; GPUs round."""
    from triton.language import bfloat16, float32
    from triton.runtime import interpreter

    def convert(data: Any, old: Any, new: Any, rounding: Any, cut: Any = interpreter._convert_float) -> Any:
        if (old, new) == (float32, bfloat16):
            return torch.from_numpy(data.copy()).bfloat16().view(torch.uint16).numpy()
        return cut(data, old, new, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `gatesight_kernels` allocates without setting it is NaN, or huge: no output with a hole can pass."""

    def poisoning(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def empty(*args: Any, **kwargs: Any) -> Tensor:
            found = allocate(*args, **kwargs)
            if sys._getframe(1).f_globals["__name__"].startswith("gatesight_kernels"):
                found.fill_(torch.nan if found.is_floating_point() else torch.iinfo(found.dtype).max)
            return found

        return empty

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoning(getattr(owner, name)))


def cases(letters: str, *rows: tuple[Any, ...]) -> Any:
    """Parametrise `case` with ids like `B2-T63-bf16`; the letter `_` is not shown."""

    def shown(letter: str, value: Any) -> str:
        if isinstance(value, bool):
            return letter if value else f"no {letter}"
        text = "+".join(map(str, value)) if isinstance(value, tuple) else NAMES.get(value, str(value))
        return text if letter == "_" else letter + text

    ids = ["-".join(map(shown, letters.split(), row)) for row in rows]
    return pytest.mark.parametrize("case", rows, ids=ids)


def sparse(folder: Path, device: str, size: int, dtype: torch.dtype) -> Tensor:
    """Memory of which, on a CPU, only those pages exist that are written to; as much lies before it, for offsets that
    wrapped around."""
    if device != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    path = folder / "sparse"
    memory = torch.from_file(str(path), shared=True, size=2 * size, dtype=dtype)
    path.unlink()
    return memory[size:]
