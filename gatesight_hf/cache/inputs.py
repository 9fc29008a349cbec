"""What a call gives a cache: which slots are padding, and whether each row is one sequence that goes on."""

from typing import Any

import torch
from torch import Tensor, nn

from gatesight_kernels.checks import INTEGERS, check_tensor, described

from ..errors import CacheStateError

#: Arguments by which trainers tell kernels where packed sequences begin.
PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx")


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


def checked_rows(name: str, rows: Any, held: int) -> Tensor:
    """Numbers of rows `[B']`, on the CPU; `held` are there.

    Raises:
        ValueError: Something else, none, or one that is not there.
    """
    check_tensor(name, rows, "[rows]", INTEGERS)
    if rows.is_meta or not len(rows) or not bool(((rows >= 0) & (rows < held)).all()):
        raise ValueError(f"{name} must name rows of the {max(held, 0)} that the cache holds, got {described(rows)}.")
    return rows.cpu()


def check_new(model_inputs: dict[str, Any], decoder: nn.Module) -> Tensor:
    """The ids `[B, T]` or embeddings `[B, T, C]` that a decoder is given.

    Raises:
        ValueError: There are none, or they are something else.
    """
    ids, embeds = model_inputs.get("input_ids"), model_inputs.get("inputs_embeds")
    name, new = ("input_ids", ids) if ids is not None else ("inputs_embeds", embeds)
    if new is None:
        raise ValueError("The decoder needs input_ids or inputs_embeds.")
    if ids is not None:
        check_tensor(name, new, "[batch, tokens]", INTEGERS)
    else:
        check_tensor(name, new, "[batch, tokens, channels]")
        width = getattr(getattr(decoder, "config", None), "hidden_size", new.shape[2])
        if new.shape[2] != width or not new.is_floating_point():
            raise ValueError(f"{name} must be floating-point ones of {width} channels, got {described(new)}.")
    if new.is_meta and not next(decoder.parameters()).is_meta:
        raise ValueError(f"{name} must be on the model's device, got {described(new)}.")
    if not new.shape[0]:
        raise ValueError(f"{name} must have a row at least, got {described(new)}.")
    checked: Tensor = new
    return checked


def check_mask(mask: Any, rows: int) -> None:
    """Raises ValueError unless `mask` is None or a mask `[rows, tokens]` of 0 and 1."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        raise ValueError(
            "GateSightCache needs the 2-D attention mask [batch, tokens], not a prepared mask: got as attention_mask "
            f"{described(mask)}."
        )
    if mask.is_meta:
        raise ValueError(f"attention_mask must be on the model's device, got {described(mask)}.")
    if mask.dtype != torch.bool and not bool((mask == mask.bool()).all()):
        raise ValueError("attention_mask must hold 1 at tokens and 0 at pads; it holds other values.")
    if len(mask) != rows:
        raise ValueError(f"attention_mask has {len(mask)} rows for an input of {rows}.")


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
    check_mask(mask, rows)
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
            "Padding after a row's first token (attention_mask): GDN layers cannot skip it. Pad contexts on the left "
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
    new = inputs["inputs_embeds"] if inputs.get("input_ids") is None else inputs["input_ids"]
    rows, length = new.shape[:2]
    shape = list(positions.shape) if isinstance(positions, Tensor) and positions.dtype in INTEGERS else []
    if len(shape) not in (2, 3) or shape[-1] != length or shape[-2] not in (1, rows) or positions.is_meta:
        raise ValueError(
            f"position_ids must be int64, [{rows}, {length}] or [axes, {rows}, {length}], got {described(positions)}."
        )
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


def check_no_checkpointing(decoder: nn.Module) -> None:
    """Raises CacheStateError if gradient checkpointing will take the cache away from the decoder's layers."""
    if not (decoder.training and torch.is_grad_enabled()):
        return
    if any(getattr(module, "gradient_checkpointing", False) for module in decoder.modules()):
        raise CacheStateError(
            "Gradient checkpointing takes the cache away from layers in training mode: call model.eval(), or "
            "model.gradient_checkpointing_disable()."
        )
