"""RULER: 13 tasks of retrieval, tracing, counting and question answering, generated or loaded, the question apart.

Source: RULER (arXiv 2404.06654), github.com/NVIDIA/RULER.
"""

from .generate import VARIANTS, generate
from .load import load_kvpress, load_official, write_official
from .manifest import manifest
from .sources import Sources
from .templates import TASKS

__all__ = [
    "TASKS",
    "VARIANTS",
    "Sources",
    "generate",
    "load_kvpress",
    "load_official",
    "manifest",
    "write_official",
]
