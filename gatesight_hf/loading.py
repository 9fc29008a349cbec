"""Models by the names that commands take."""

from pathlib import Path
from typing import Any

REFERENCE = "reference"


def load_named(name: str) -> tuple[Any, Any]:
    """A model in evaluation mode, in its own dtype, and its tokenizer.

    Args:
        name: `reference` (bundled), or a folder or Hub id of a hybrid model.

    Raises:
        FileNotFoundError: No such folder.
    """
    if name == REFERENCE:
        from . import reference

        return reference.load_model(), reference.load_tokenizer()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if name.startswith(("/", ".", "~")):
        if not Path(name).expanduser().is_dir():
            raise FileNotFoundError(f"--model {name}: no such folder.")
        name = str(Path(name).expanduser())
    placement = {"device_map": "auto"} if torch.cuda.is_available() else {}
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", **placement).eval()
    return model, AutoTokenizer.from_pretrained(name)
