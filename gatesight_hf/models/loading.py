"""Models by the names that commands take."""

from pathlib import Path
from typing import Any

from ..checks import check_text

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

    chosen = named_dtype(dtype)
    if name == REFERENCE:
        from .. import reference

        return reference.load_model(dtype=chosen or torch.float32), reference.load_tokenizer()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = _source(name)
    if device_map is None and torch.cuda.is_available():
        device_map = "auto"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=chosen or "auto", device_map=device_map).eval()
    return model, AutoTokenizer.from_pretrained(source)


def load_config(name: str, revision: str | None = None) -> Any:
    """The configuration of a model by its name, or of a folder or file with nothing else.

    Args:
        name: `reference` (bundled), a folder, a Hub id, or a file.
        revision: Branch, tag or commit of a Hub id; None is `main`.

    Raises:
        FileNotFoundError: No such folder.
    """
    from transformers import AutoConfig

    check_text("name", name)
    if name == REFERENCE:
        from .. import reference

        return AutoConfig.from_pretrained(reference.MODEL_PATH)
    source = name if Path(name).is_file() else _source(name)
    return AutoConfig.from_pretrained(source, **({} if revision is None else {"revision": revision}))


def model_dtype(config: Any, name: str | None = None) -> Any:
    """The data type of torch that a model has: the one with this name, or its configuration's, or bfloat16.

    Raises:
        ValueError: There is none of this name.
    """
    import torch

    return named_dtype(name) or getattr(config.get_text_config(decoder=True), "dtype", None) or torch.bfloat16


def named_dtype(name: str | None) -> Any:
    """The data type of torch with this name; None of None.

    Raises:
        ValueError: There is none.
    """
    import torch

    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if name is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"--dtype {name}: no data type of torch; give bfloat16, float16 or float32.")
    return dtype


def _source(name: str) -> str:
    """What transformers loads: a folder that exists, or a Hub id."""
    check_text("name", name, "; models are named by a folder or a Hub id")
    if not name.startswith(("/", ".", "~")):
        return name
    if not Path(name).expanduser().is_dir():
        raise FileNotFoundError(f"--model {name}: no such folder.")
    return str(Path(name).expanduser())
