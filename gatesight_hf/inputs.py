"""What a call gives a cache that has already seen tokens: which ids are new, and which slots are padding."""

from typing import Any

import torch
from torch import Tensor

from .errors import CacheStateError

#: An input that shares at least this many first tokens with the context, and half of them all, was meant to repeat it.
MEANT_TO_REPEAT = 8


def are_new(ids: Tensor, known: Tensor | None, seen: int) -> bool:
    """Whether ids are new tokens (True) or everything from the context's start (False), by comparing them.

    Args:
        ids: `[B', T']`, with B' a multiple of the held rows.
        known: Ids of the context `[B, T]`, or None if it was prefilled from embeddings.
        seen: Tokens the cache has seen, the context and everything after it.

    Raises:
        CacheStateError: They stop inside what the cache has seen, or leave the context half-way.
    """
    if known is None:
        raise CacheStateError(
            "The context was prefilled from embeddings, so that its ids are unknown: pass an attention_mask over all "
            f"{seen} seen tokens and the new ones."
        )
    if len(ids) % len(known):
        raise ValueError(f"The cache holds {len(known)} rows and the input has {len(ids)}: not a multiple.")
    length = min(ids.shape[1], known.shape[1])
    repeated = known[:, :length].repeat_interleave(len(ids) // len(known), dim=0)
    same = (ids[:, :length].to(known.device) == repeated).all(0)
    if bool(same.all()):
        if ids.shape[1] > seen:
            return False
        raise CacheStateError(
            f"The input has {ids.shape[1]} tokens and starts as the {seen} that this cache has seen: a session cannot "
            "go back to a shorter prefix. Append the question to all text seen so far, pass the question alone, or "
            "fork the parent again."
        )
    common = int(same.int().argmin())
    if common >= max(MEANT_TO_REPEAT, length // 2):
        raise CacheStateError(
            f"The input equals the cached context in its first {common} tokens and differs after that. If it should "
            "repeat the context, tokenize context and question apart and concatenate the ids; if it is new text, pass "
            f"an attention_mask of {seen + ids.shape[1]} tokens."
        )
    return True


def whole_padding(mask: Any, past: Tensor | None, rows: int, seen: int, length: int, in_context: bool) -> Tensor | None:
    """The 2-D mask of everything seen and the coming tokens, `[B, seen + length]`, bool; None if nothing is padding.

    Args:
        mask: What the caller gave: None, or `[B, length]` or `[B, seen + length]`.
        past: Of the tokens seen, `[B, seen]`, or None if none of them is padding.
        rows: B.
        seen: Tokens seen.
        length: Coming tokens.
        in_context: Whether the coming tokens belong to the context that is to be compacted, where pads may only stand
            before a row's first token.

    Raises:
        ValueError: A mask of another form or length, one that hides seen tokens, or padding inside the context.
    """
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
        raise ValueError("GateSightCache needs the 2-D attention mask [batch, tokens], not a prepared mask.")
    if mask is not None and mask.shape[1] not in (length, seen + length):
        raise ValueError(
            f"attention_mask covers {mask.shape[1]} tokens; expected {seen + length} (all seen and the new ones) or "
            f"{length} (the new ones)."
        )
    late = None if mask is None else mask[:, -length:].bool()
    if late is not None and bool(late.all()):
        late = None
    if mask is not None and mask.shape[1] > length:
        held = mask[:, :seen].bool()
        if not bool(held.all() if past is None else (held == past.to(held.device)).all()):
            raise ValueError("attention_mask disagrees with what was padding when the cache saw these tokens.")
    if late is None and past is None:
        return None
    device = late.device if late is not None else past.device if past is not None else None
    early = torch.ones((rows, seen), dtype=torch.bool, device=device) if past is None else past.to(device)
    if late is None:
        late = torch.ones((rows, length), dtype=torch.bool, device=device)
    whole = torch.cat([early, late], dim=1)
    if in_context and bool((whole.int().diff(dim=1) < 0).any()):
        raise ValueError(
            "Padding inside or after a row of the context: pad it on the left (tokenizer.padding_side = 'left')."
        )
    return whole
