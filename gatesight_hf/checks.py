"""Checks of what callers give besides tensors and numbers, for which there is `gatesight_kernels.checks`."""

import os
from typing import Any

from gatesight_kernels.checks import described


def check_path(name: str, value: Any) -> None:
    """Raises TypeError unless `value` is a path."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} must be a path, as text or pathlib.Path, got {described(value)}.")


def check_text(name: str, value: Any, note: str = "") -> None:
    """Raises TypeError unless `value` is a string; `note` is added to the message."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one string, got {described(value)}{note}.")


def check_characters(name: str, value: Any, note: str = "") -> None:
    """Likewise; and ValueError if it holds surrogates, which are no characters, and which no tokenizer takes."""
    check_text(name, value, note)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} holds {value[error.start]!r} at {error.start}, half of a surrogate pair and no character: decode "
            'its bytes with errors="replace".'
        ) from None


def check_model(model: Any) -> None:
    """Raises TypeError unless `model` is a model of transformers, or wraps one."""
    if not hasattr(model, "config") or not hasattr(model, "forward"):
        raise TypeError(f"model must be the hybrid model itself, got {described(model)}.")


def check_tokenizer(tokenizer: Any) -> None:
    """Raises TypeError unless `tokenizer` can be called, and is no model."""
    if not callable(tokenizer) or hasattr(tokenizer, "forward"):
        raise TypeError(f"tokenizer must be the model's tokenizer, got {described(tokenizer)}.")
