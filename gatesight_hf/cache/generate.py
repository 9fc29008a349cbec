"""What `generate` is given with a cache that has seen tokens, and what it is to be given in place of that."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gatesight_kernels.checks import INTEGERS, check_tensor, check_whole_number

from ..models._compat import default_mask, generation_option, lengthened, without_restarting_chunks
from ..models.multimodal import core_of, without_seen_pictures
from ..models.sink import GenerateCall
from .inputs import check_embeds, check_mask, check_new
from .tokens import Tokens

#: Positions `[3, B, T]` of a multimodal model's new tokens, by its core and the arguments.
PositionsOf = Callable[[Any, dict[str, Any]], Tensor]


def check_options(model: Any, arguments: dict[str, Any]) -> None:
    """Raises ValueError for ways of generating that a cache of GDN states has no part in."""
    option = partial(generation_option, model, arguments)
    for name in ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"):
        if option(name):
            raise ValueError(
                f"{name}: GateSightCache does not support assisted decoding, since rejected tokens cannot be taken "
                "out of GDN states. Generate without it."
            )
    implementation = option("cache_implementation")
    if implementation is not None:
        raise ValueError(
            f"cache_implementation={implementation!r} with a cache: leave one of them out. A GateSightCache is not "
            "static, offloaded, quantised or paged."
        )
    if option("use_cache") is False:
        raise ValueError("use_cache=False with a cache: leave one of them out.")
    for name in ("max_new_tokens", "prefill_chunk_size"):
        number = option(name)
        if number is not None and not (hasattr(number, "__index__") and number >= 1):  # NumPy's and such too
            check_whole_number(name, number)


def completed(
    model: Any,
    decoder: nn.Module,
    tokens: Tokens,
    inputs: Tensor | None,
    arguments: dict[str, Any],
    positions_of: PositionsOf,
) -> GenerateCall:
    """What `generate` is to be given so that it goes on from the tokens seen.

    Args:
        model: Whose `generate` is called.
        decoder: In it.
        tokens: Seen by the cache.
        inputs: First argument.
        arguments: By keyword.
        positions_of: See above.

    Raises:
        ValueError, CacheStateError: Inputs that do not go on from the tokens seen, or that are no inputs.
    """
    ids = inputs if inputs is not None else arguments.get("input_ids")
    mask, seen, core = arguments.get("attention_mask"), tokens.count, core_of(model, decoder)
    embeds = arguments.get("inputs_embeds")
    _check_inputs(decoder, core, tokens, ids, arguments)
    if ids is None or embeds is not None or seen == 0:
        return GenerateCall(inputs, arguments)
    arguments = {name: value for name, value in arguments.items() if name != "input_ids"}
    arguments = without_restarting_chunks(model, arguments)
    if mask is not None and mask.shape[1] == seen + ids.shape[1]:
        return GenerateCall(ids, _with_positions(core, seen, ids, arguments, positions_of))
    if mask is not None and mask.shape[1] != ids.shape[1]:
        raise ValueError(
            f"attention_mask covers {mask.shape[1]} tokens; the cache has seen {seen}, given are {ids.shape[1]}: "
            f"pass a mask of {ids.shape[1]} if they are all ids from the context's start, or of "
            f"{seen + ids.shape[1]} if they are new."
        )
    mask = default_mask(model, ids, arguments) if mask is None else mask
    new = tokens.new_among(ids, mask)
    if core is not None:
        arguments = without_seen_pictures(arguments, ids.shape[1] - new)
    laid = tokens.laid_out(ids, new)
    if laid is not ids:
        late = mask[:, mask.shape[1] - new :]
        arguments = lengthened(model, arguments, laid.shape[1] - ids.shape[1])
        arguments["attention_mask"] = torch.cat([tokens.mask(len(ids), late), late], dim=1)
    arguments = _with_positions(core, seen, laid[:, seen:], arguments, positions_of)
    return GenerateCall(laid, arguments, given=None if laid is ids else ids)


def _check_inputs(decoder: nn.Module, core: Any, tokens: Tokens, ids: Tensor | None, arguments: dict[str, Any]) -> None:
    """Raise an error unless ids, embeddings, mask and positions are of the form that they must have."""
    mask, seen = arguments.get("attention_mask"), tokens.count
    embeds, positions = arguments.get("inputs_embeds"), arguments.get("position_ids")
    if positions is not None:
        check_tensor("position_ids", positions, "[batch, tokens] or [axes, batch, tokens]", INTEGERS)
    if embeds is not None:
        check_new({"inputs_embeds": embeds}, decoder)
    elif ids is not None:
        check_new({"input_ids": ids}, decoder)
    new = embeds if embeds is not None else ids
    if new is not None:
        check_mask(mask, len(new))
    if embeds is not None and seen:
        if core is not None and positions is None:
            raise ValueError(
                "A multimodal model goes on from a cache by input_ids; with inputs_embeds pass position_ids too."
            )
        check_embeds(embeds.shape[1], seen, mask)
    if new is not None and mask is not None and seen == 0 and mask.shape[1] != new.shape[1]:
        raise ValueError(f"attention_mask covers {mask.shape[1]} tokens; expected {new.shape[1]}.")


def _with_positions(
    core: Any, seen: int, new: Tensor, arguments: dict[str, Any], positions_of: PositionsOf
) -> dict[str, Any]:
    """Arguments with positions, where a multimodal model would number them by its last document."""
    if core is None or arguments.get("position_ids") is not None:
        return arguments
    positions = positions_of(core, {**arguments, "input_ids": new})
    # As long as everything seen and new: only the last ones are read.
    return {**arguments, "position_ids": torch.nn.functional.pad(positions, (seen, 0))}


def answer_tokens(model: Any, arguments: dict[str, Any]) -> int | None:
    """`max_new_tokens` of a `generate`, if it is given."""
    values = [arguments.get("max_new_tokens")]
    configs = (arguments.get("generation_config"), model.generation_config)
    values += [getattr(config, "max_new_tokens", None) for config in configs]
    return next((value for value in values if value is not None), None)
