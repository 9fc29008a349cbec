"""What a call gives a cache that has already seen tokens: which ids are new, and which slots are padding."""

from typing import Any

import torch
from torch import Tensor

from .errors import CacheStateError

#: Arguments by which trainers tell kernels where packed sequences begin.
PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx")
#: An input that shares at least this many first tokens with the context, and half of them all, was meant to repeat it.
MEANT_TO_REPEAT = 8


def repeats_of(held: int, rows: int) -> int:
    """How often each of `held` rows is repeated for `rows` rows of input.

    Raises:
        ValueError: Not a multiple.
    """
    if rows % held:
        raise ValueError(
            f"The cache holds {held} rows and the input has {rows}: not a multiple. After beams or several sequences a "
            "cache holds a row for each of them; go on from a fork made before."
        )
    return rows // held


def are_new(ids: Tensor, known: Tensor | None, seen: int) -> bool:
    """Whether ids are new tokens (True) or everything from the context's start (False), by comparing them.

    Args:
        ids: `[B', T']`, with B' a multiple of the held rows.
        known: Ids of everything seen `[B, seen]`, or None if some came as embeddings.
        seen: Tokens the cache has seen, the context and everything after it.

    Raises:
        CacheStateError: They stop inside what the cache has seen, or leave it half-way.
    """
    if known is None:
        raise CacheStateError(
            "The context was prefilled from embeddings, so that its ids are unknown: pass an attention_mask over all "
            f"{seen} seen tokens and the new ones."
        )
    length = min(ids.shape[1], seen)
    repeated = known[:, :length].repeat_interleave(repeats_of(len(known), len(ids)), dim=0)
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
            f"The input equals what this cache has seen in its first {common} tokens and differs after that. For "
            "another question on the same context, fork the parent again. If the input should repeat it, tokenize "
            "context and question apart and concatenate the ids; if it is new text, pass an attention_mask of "
            f"{seen + ids.shape[1]} tokens."
        )
    return True


def whole_padding(mask: Any, past: Tensor | None, rows: int, seen: int, length: int) -> Tensor | None:
    """The 2-D mask of everything seen and the coming tokens, `[B, seen + length]`, bool; None if nothing is padding.

    Pads may only stand before a row's first token: a GDN layer cannot skip a pad between tokens, which would decay its
    state and enter its convolution.

    Args:
        mask: What the caller gave: None, or `[B, length]` or `[B, seen + length]`.
        past: Of the tokens seen, `[B, seen]`, or None if none of them is padding.
        rows: B.
        seen: Tokens seen.
        length: Coming tokens.

    Raises:
        ValueError: A mask of another form or length, one that disagrees with the past, or a pad after a token.
    """
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
        raise ValueError("GateSightCache needs the 2-D attention mask [batch, tokens], not a prepared mask.")
    if mask is not None and mask.shape[1] not in (length, seen + length):
        raise ValueError(
            f"attention_mask covers {mask.shape[1]} tokens; expected {seen + length} (all seen and the new ones) or "
            f"{length} (the new ones)."
        )
    if mask is not None and mask.shape[1] > length:
        held = mask[:, :seen].bool()
        if not bool(held.all() if past is None else (held == past.to(held.device)).all()):
            raise ValueError("attention_mask disagrees with what was padding when the cache saw these tokens.")
    late = None if mask is None else mask[:, -length:].bool()
    if late is None or bool(late.all()):
        if past is None:
            return None
        late = past.new_ones((rows, length))
    early = late.new_ones((rows, seen)) if past is None else past.to(late.device)
    whole = torch.cat([early, late], dim=1)
    if bool((whole[:, 1:] < whole[:, :-1]).any()):
        raise ValueError(
            "Padding after a row's first token: GDN layers cannot skip it. Pad contexts on the left "
            "(tokenizer.padding_side = 'left'), and ask questions of unequal lengths from separate forks."
        )
    return whole


def positions_of(padding: Tensor, length: int) -> Tensor:
    """Positions `[B, length]` of the last tokens, pads not counted, as `generate` numbers them."""
    return (padding.long().cumsum(-1) - 1).clamp_min(0)[:, -length:]


def check_embeds(length: int, seen: int, mask: Any) -> None:
    """Raise an error unless `length` embeddings given to `generate` are those of all tokens.

    Args:
        length: Tokens that have embeddings.
        seen: Tokens seen.
        mask: What the caller gave.

    Raises:
        CacheStateError: They are of new tokens alone.
    """
    if length <= seen or (mask is not None and mask.shape[1] > length):
        raise CacheStateError(
            f"inputs_embeds of {length} tokens, and the cache has seen {seen}: generate takes those of all tokens, or "
            "new ones as input_ids. Of the seen ones nothing is read, so that zeros do."
        )


def check_one_sequence(inputs: dict[str, Any], padding: Tensor | None, seen: int) -> None:
    """Raise an error if a row holds several packed sequences, or goes on at a position that it has passed.

    Args:
        inputs: Of the decoder. `position_ids` are `[B or 1, T]`, and must rise from token to token; or `[axes, B, T]`,
            the first of which may stand still, as within a picture.
        padding: `[B, seen + T]`, bool, False at pads, or None; positions of pads may be any.
        seen: Tokens seen.

    Raises:
        ValueError: See above.
    """
    given = [name for name in PACKING if inputs.get(name) is not None]
    if given:
        raise ValueError(
            f"{given[0]}: packed sequences share GDN states, which nothing separates here. Pad them on the left as a "
            "batch, or give each a cache."
        )
    positions = inputs.get("position_ids")
    if positions is None:
        return
    plain = positions.ndim == 2
    of_text = positions if plain else positions[0]
    rises = of_text.diff(dim=-1) >= int(plain)
    begins = of_text[:, :1] >= (seen if plain else 0)
    if padding is not None:
        padding = padding.to(positions.device)
        real = padding[:, seen:]
        rises = rises | ~real[:, :-1]
        begins = of_text[:, :1] >= padding[:, :seen].sum(-1, keepdim=True) if plain else begins
        begins = begins | ~real[:, :1]
    if not bool(torch.cat([begins, rises.expand(len(begins), -1)], dim=1).all()):
        raise ValueError(
            "position_ids go back or stand still. Within an input that means packed sequences, which share GDN states, "
            "or pads without an attention_mask: pass sequences as left-padded rows with their mask. At its start it "
            "means positions of the entries held: they go on from the tokens seen, which is the default."
        )
