"""Models by the names that commands take."""

from pathlib import Path
from typing import Any

REFERENCE = "reference"


def load_named(name: str, dtype: str | None = None, device_map: str | dict[str, Any] | None = None) -> tuple[Any, Any]:
    """A model in evaluation mode, and its tokenizer.

    Args:
        name: `reference` (bundled), or a folder or Hub id of a hybrid model.
        dtype: Of the model, such as `bfloat16`; None is its own.
        device_map: As transformers takes it, such as `auto` or `cuda:1`; None is `auto` where there is a GPU. The
            bundled model stays on the CPU.

    Raises:
        FileNotFoundError: No such folder.
        ValueError: No such dtype.
    """
    import torch

    if dtype is not None and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"--dtype {dtype}: no data type of torch; give bfloat16, float16 or float32.")
    if name == REFERENCE:
        from . import reference

        return reference.load_model(dtype=getattr(torch, dtype or "float32")), reference.load_tokenizer()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if name.startswith(("/", ".", "~")):
        if not Path(name).expanduser().is_dir():
            raise FileNotFoundError(f"--model {name}: no such folder.")
        name = str(Path(name).expanduser())
    if device_map is None and torch.cuda.is_available():
        device_map = "auto"
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype or "auto", device_map=device_map).eval()
    return model, AutoTokenizer.from_pretrained(name)
