"""Text in, answers out: a document is prefilled and compacted once, and asked any number of times.

A model, its tokenizer and texts come in; answers, conversations and files go out. Imports `cache` and what is below it.
"""

from .session import Session

__all__ = ["Session"]
