"""Everything that a cache holds, as one digest; codes read back as numbers."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gatesight_hf import GateSightCache
from gatesight_hf.entries.quantised import dequantise


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Every tensor within layers, dicts and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_of(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_of(part)


def digest(cache: GateSightCache) -> str:
    state = hashlib.sha256(repr(replace(cache.report(), seconds={})).encode())
    for tensor in tensors_of([vars(layer) for layer in cache.layers]):
        state.update(repr((tensor.shape, tensor.dtype)).encode() + tensor.contiguous().numpy().tobytes())
    return state.hexdigest()


def read(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.empty(codes.shape, dtype=dtype)
    dequantise(codes, scales, out)
    return out
