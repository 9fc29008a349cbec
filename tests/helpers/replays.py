"""What is replayed to a scorer: a tokenizer without a vocabulary, and continuations as token ids."""

from types import SimpleNamespace
from typing import Any

CONTINUATIONS = ((3, 4, 5), (90, 8))


def tokenizer(text: str, add_special_tokens: bool = True) -> Any:
    """One token for each character, and one that no replay may hold in front of each text."""
    return SimpleNamespace(input_ids=[1] * add_special_tokens + [2 + ord(character) % 100 for character in text])
