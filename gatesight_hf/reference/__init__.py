"""The reference model: a small Qwen3.5 hybrid with its tokenizer and estimator, carried by the package.

It exists to be measured on and to try the library without a GPU or a network; `eval/reference_model` trains it.
"""

from pathlib import Path
from typing import Any

import torch

from ..checks import check_path

MODEL_PATH = Path(__file__).parent / "model"
ESTIMATOR_PATH = Path(__file__).parent / "estimator"


def load_model(path: str | Path = MODEL_PATH, dtype: torch.dtype = torch.float32) -> Any:
    """The reference model (`Qwen3_5ForCausalLM`, 1.8 M parameters), or another folder's, in evaluation mode.

    Raises:
        TypeError, FileNotFoundError: No path, or no such folder.
    """
    _check_folder(path)
    from transformers import Qwen3_5ForCausalLM

    return Qwen3_5ForCausalLM.from_pretrained(path, dtype=dtype).eval()


def load_tokenizer(path: str | Path = MODEL_PATH) -> Any:
    """Its word-level tokenizer (`PreTrainedTokenizerFast`): one word, digit or punctuation mark is one token.

    Raises:
        TypeError, FileNotFoundError: See `load_model`.
    """
    _check_folder(path)
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(path)


def _check_folder(path: str | Path) -> None:
    check_path("path", path)
    if not Path(path).is_dir():
        raise FileNotFoundError(f"path {path}: no such folder.")
