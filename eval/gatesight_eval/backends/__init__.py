"""What runs a model: one interface, so that every engine answers the same items."""

from .base import Answer, Backend, CellResult, ContextResult, Request
from .hf import TransformersBackend

__all__ = ["Answer", "Backend", "CellResult", "ContextResult", "Request", "TransformersBackend"]
