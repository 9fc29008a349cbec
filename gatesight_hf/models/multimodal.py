"""Images and videos: positions on three axes, which the model around a text model does not keep in the cache.

A picture takes fewer positions than tokens, so that the text after it is numbered behind the number of tokens seen. The
model writes the difference, its rope delta, into an attribute of itself, where the next document's prefill replaces it.
A GateSight cache keeps the deltas of its own context, and gives every later call its positions.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CacheStateError

GRIDS = ("image_grid_thw", "video_grid_thw")
#: What goes with the ids of pictures.
VISION_INPUTS = (*GRIDS, "pixel_values", "pixel_values_videos", "mm_encoder_outputs", "mm_token_type_ids")


def core_of(model: nn.Module, decoder: nn.Module) -> Any:
    """The module in `model` that joins a vision tower to the text model `decoder`; None in a text model."""
    for module in model.modules():
        if getattr(module, "language_model", None) is decoder and hasattr(module, "get_rope_index"):
            return module
    return None


def has_pictures(inputs: Mapping[str, Any]) -> bool:
    """Whether there are images or videos among the tokens of a call."""
    return any(inputs.get(name) is not None for name in GRIDS)


def positions_on_axes(core: Any, inputs: Mapping[str, Any], start: Tensor, padding: Tensor | None) -> Tensor:
    """Positions of new tokens.

    Args:
        core: See `core_of`.
        inputs: Of its forward: ids or embeddings `[B, T]`, and what goes with pictures among them.
        start: The next position of each row, `[B]`.
        padding: Of the new tokens `[B, T]`, bool, False at pads; None without pads.

    Returns:
        `[3, B, T]`: time, height, width; equal for text.

    Raises:
        ValueError: Pictures without the ids and `mm_token_type_ids` that say where they stand.
    """
    ids, kinds = inputs.get("input_ids"), inputs.get("mm_token_type_ids")
    new = ids if ids is not None else inputs["inputs_embeds"]
    rows, length = new.shape[:2]
    start = start.to(new.device).unsqueeze(1)
    if has_pictures(inputs):
        if ids is None or kinds is None:
            raise ValueError(
                "Positions of images and videos come from input_ids and mm_token_type_ids: pass both, as the model's "
                "processor returns them."
            )
        mask = None if padding is None else padding.long().to(new.device)
        grids = {name: inputs.get(name) for name in GRIDS}
        local, _ = core.get_rope_index(ids, mm_token_type_ids=kinds[..., -length:], attention_mask=mask, **grids)
        return local + start
    if padding is None:
        local = torch.arange(length, device=new.device).expand(rows, -1)
    else:
        local = (padding.to(new.device).long().cumsum(-1) - 1).clamp_min(0)
    return (local + start).expand(3, -1, -1)


def rope_deltas_after(positions: Tensor, lengths: Tensor) -> Tensor:
    """How far the next position of each row is from the number of its tokens, `[B]`.

    Args:
        positions: Of the last tokens, `[axes, B or 1, T]`; of four axes the first counts tokens.
        lengths: Tokens of each row with these, padding not counted, `[B]`.
    """
    axes = positions[1:] if positions.shape[0] == 4 else positions
    following = axes.amax((0, 2)) + 1
    return torch.where(lengths > 0, following - lengths, 0)


def without_seen_pictures(arguments: dict[str, Any], seen: int) -> dict[str, Any]:
    """Arguments of a `generate` over all ids without the pictures among the first `seen` ones, which are in the cache.

    Raises:
        CacheStateError: There are new pictures too, which cannot be told from those that were seen.
    """
    kinds = arguments.get("mm_token_type_ids")
    if kinds is not None and bool(kinds[:, seen:].any()):
        raise CacheStateError(
            "The ids repeat what this cache has seen and hold new images or videos: pass the new ids alone, with their "
            "own pixel values, grids and mm_token_type_ids, and an attention_mask over all seen and new tokens."
        )
    return {name: value for name, value in arguments.items() if name not in VISION_INPUTS}
