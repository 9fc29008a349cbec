"""What is done with a model and a cache: ids, padding, forwards, `generate`, prefill and compaction."""

from typing import Any

import torch
from torch import Tensor

from gatesight_hf import FrozenCache, GateSightCache
from gatesight_hf.models._compat import cache_argument

from .models import VOCAB, random_estimator


def random_ids(length: int, rows: int = 1, seed: int = 0) -> Tensor:
    """Token ids of 2 … VOCAB-1; 0 is left for padding, 1 for end of sequence."""
    return torch.randint(2, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


#: A context and a question on it, for tests that need no other.
LENGTH = 43
CONTEXT, QUESTION = random_ids(LENGTH), random_ids(6, seed=9)
FULL = torch.cat([CONTEXT, QUESTION], 1)


def left_padded(ids: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows `[1, n]` of different lengths as one batch and its mask."""
    longest = max(row.shape[1] for row in ids)
    batch = torch.cat([torch.nn.functional.pad(row, (longest - row.shape[1], 0)) for row in ids])
    mask = torch.stack([torch.arange(longest) >= longest - row.shape[1] for row in ids]).long()
    return batch, mask


def padded(mask: Tensor, new: int) -> dict[str, Tensor]:
    """Arguments for the last `new` tokens of padded rows: the whole mask, and positions that do not count pads."""
    return {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)[:, -new:]}


def cache_kwargs(model: Any, cache: Any) -> dict[str, Any]:
    """The cache under the name that this transformers release gives it, in forward and in generate."""
    return {cache_argument(model): cache}


def forward(model: Any, ids: Tensor, cache: Any, **arguments: Any) -> Tensor:
    """Logits `[B, T, vocab]`."""
    return model(input_ids=ids, **cache_kwargs(model, cache), **arguments).logits


def as_new(ids: Tensor, cache: GateSightCache) -> dict[str, Tensor]:
    """Arguments of a `generate` that say that `ids` are new text."""
    if isinstance(cache, FrozenCache):
        cache.context.catch_up()
    rows = cache.context.tokens.mask(len(ids), ids)
    return {"attention_mask": torch.cat([rows, torch.ones_like(ids)], 1)}


def steps(
    model: Any, ids: Tensor, cache: Any, tokens: int = 4, new: bool = False, **arguments: Any
) -> tuple[Tensor, Tensor]:
    """New tokens `[B, tokens]`, greedy unless told otherwise, and the logits they came from `[B, tokens, vocab]`.

    Ids are all ids from the context's start, or, if `new`, text after everything seen.
    """
    arguments |= as_new(ids, cache) if new else {}
    options = {"max_new_tokens": tokens, "do_sample": False, **arguments}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    output = model.generate(ids, **cache_kwargs(model, cache), **options)
    return output.sequences[:, -tokens:], torch.stack(output.logits, dim=1)


def generate(model: Any, ids: Tensor, cache: Any, tokens: int = 4, new: bool = False, **arguments: Any) -> Tensor:
    """New tokens only `[B, tokens]`; see `steps`."""
    arguments |= as_new(ids, cache) if new else {}
    options = {"max_new_tokens": tokens, "do_sample": False, **arguments}
    return model.generate(ids, **cache_kwargs(model, cache), **options)[:, -tokens:]


def prefilled(
    model: Any, ids: Tensor, chunks: list[int] | None = None, mask: Tensor | None = None, **options: Any
) -> Any:
    """A GateSight cache that has seen a context but is not compacted."""
    cache = GateSightCache(options.pop("scorer", None) or random_estimator(model), model, **options)
    seen = 0
    for length in chunks or [ids.shape[1]]:
        given = {} if mask is None else padded(mask[:, : seen + length], length)
        forward(model, ids[:, seen : seen + length], cache, **given)
        seen += length
    assert seen == ids.shape[1]
    return cache


def compacted(
    model: Any, ids: Tensor, chunks: list[int] | None = None, mask: Tensor | None = None, **options: Any
) -> Any:
    """A GateSight cache after prefill and compaction."""
    cache = prefilled(model, ids, chunks, mask, **options)
    cache.compact()
    return cache
