"""What other libraries show while a command runs. Of commands only: the library leaves their logging as it is."""

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from huggingface_hub import constants
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers.utils.logging import set_tqdm_hook

#: Of transformers, once for each kernel that is not installed.
FALLBACK = "falling back to its reference PyTorch implementation"


@contextmanager
def quiet(on_cpu: bool = False, data_sets: bool = False) -> Iterator[None]:
    """Bars on a terminal only, and no word of kernels that a CPU could not use anyway; at the end all is as before.

    Other warnings are shown, and where there is a GPU these too: there they tell of a large loss of speed. If
    `TRANSFORMERS_VERBOSITY` is set, transformers says what that asks for.

    Args:
        on_cpu: The model stays on the CPU, even where there is a GPU.
        data_sets: A data set may be loaded, so that the bars of `datasets` matter.
    """
    with ExitStack() as undo:
        undo.callback(set_tqdm_hook, set_tqdm_hook(_brief))
        if not os.environ.get("TRANSFORMERS_VERBOSITY"):
            fallbacks = _Fallbacks(hidden=on_cpu or not torch.cuda.is_available())
            for handler in logging.getLogger("transformers").handlers:
                handler.addFilter(fallbacks)
                undo.callback(handler.removeFilter, fallbacks)
        if not sys.stderr.isatty():
            # Where a variable asks for these bars they cannot be put off, and the libraries would warn.
            if constants.HF_HUB_DISABLE_PROGRESS_BARS is None and not are_progress_bars_disabled():
                disable_progress_bars()
                undo.callback(enable_progress_bars)
            if data_sets and importlib.util.find_spec("datasets"):
                import datasets

                if datasets.config.HF_DATASETS_DISABLE_PROGRESS_BARS is None and datasets.is_progress_bar_enabled():
                    datasets.disable_progress_bars()
                    undo.callback(datasets.enable_progress_bars)
        yield


def _brief(bar: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """A bar of transformers that is seen only if it takes a while, and is gone when it is full."""
    return bar(*args, **{"disable": None, "leave": False, "delay": 2, **options})


class _Fallbacks(logging.Filter):
    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.hidden = hidden

    def filter(self, record: logging.LogRecord) -> bool:
        return not (self.hidden and FALLBACK in record.getMessage())
