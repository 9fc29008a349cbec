"""A context into a cache, by direct forwards."""

from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import Cache

from gatesight_kernels.checks import INTEGERS, check_tensor, check_whole_number, described

from ..checks import check_model
from ..models._compat import cache_argument


def prefill(model: Any, ids: Tensor, cache: Cache, chunk_size: int | None = None) -> None:
    """Run a model over a context, without its logits; several forwards show a progress bar on a terminal.

    Args:
        model: The model of the cache.
        ids: `[B, T]`.
        cache: Receives the context; a GateSight cache is not compacted here.
        chunk_size: Tokens per forward; None runs one.

    Raises:
        TypeError: No model, or no cache.
        ValueError: No ids, or a chunk size that is no whole number of 1 or more.
    """
    check_model(model)
    check_tensor("ids", ids, "[B, T]", INTEGERS)
    if not ids.numel():
        raise ValueError(f"ids must hold tokens, got {described(ids)}.")
    if not isinstance(cache, Cache):
        raise TypeError(f"cache must be a cache of transformers, got {described(cache)}.")
    check_whole_number("prefill_chunk_size", chunk_size, or_none=True)
    chunks = ids.split(chunk_size or ids.shape[1], dim=1)
    bar = tqdm(total=ids.shape[1], desc="prefill", unit="token", leave=False, delay=1, disable=len(chunks) < 2 or None)
    with torch.no_grad(), bar:
        for chunk in chunks:
            model(chunk, **{cache_argument(model): cache}, use_cache=True, logits_to_keep=1)
            bar.update(chunk.shape[1])
