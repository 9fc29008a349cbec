"""Checks of what callers give, each an error of one sentence that names the argument."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

#: Of ids, positions and numbers of rows.
INTEGERS = (torch.int64, torch.int32)


def described(value: Any) -> str:
    """What something is, in a few words: a tensor's dtype and shape, a short value itself, or the type of another."""
    if isinstance(value, Tensor):
        where = " on meta, without values" if value.is_meta else ""
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{'an' if dtype[0] == 'i' else 'a'} {dtype} tensor of shape {list(value.shape)}{where}"
    text = repr(value) if isinstance(value, (bool, int, float, str, bytes, list, tuple, dict, type, type(None))) else ""
    return text if text and len(text) <= 80 else type(value).__name__


def check_tensor(name: str, value: Any, form: str, dtypes: Sequence[torch.dtype] | None = None) -> None:
    """Raises ValueError unless `value` is a tensor of as many dimensions as `form` has, such as `[B, T]`.

    Args:
        name: Of the argument.
        value: What was given.
        form: For the message too; several may be joined by `or`.
        dtypes: That it may have; None is any.
    """
    ranks = [one.count(",") + 1 for one in form.split(" or ")]
    if not isinstance(value, Tensor) or value.ndim not in ranks or (dtypes and value.dtype not in dtypes):
        kind = "a tensor" if not dtypes else f"an {str(dtypes[0]).removeprefix('torch.')} tensor"
        raise ValueError(f"{name} must be {form}, {kind}, got {described(value)}.")


def check_whole_number(name: str, value: Any, least: int | None = 1, or_none: bool = False) -> None:
    """Raises ValueError unless `value` is an int of at least `least`, or None where that may be."""
    if or_none and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        bound = "" if least is None else f" of {least} or more"
        raise ValueError(f"{name} must be a whole number{bound}{', or None' * or_none}, got {described(value)}.")


def check_bool(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {described(value)}.")
