"""What runs a model: one interface, so that every engine answers the same items.

Items' token ids and rows of a table (`methods`) come in; answers, lengths and bytes go out. `hf` is transformers,
`paged` vLLM, `harness` the model of lm-evaluation-harness. Imports `suites`.
"""

from .base import Answer, Backend, CellResult, ContextResult, Request
from .hf import TransformersBackend

__all__ = ["Answer", "Backend", "CellResult", "ContextResult", "Request", "TransformersBackend"]
