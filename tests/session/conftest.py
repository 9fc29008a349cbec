"""A tiny model for the chat tokenizer, with and without hooks."""

from typing import Any

import pytest

from ..helpers import chats
from ..helpers.models import tiny_model


def chat_model() -> Any:
    model = tiny_model(vocab_size=chats.VOCAB)
    model.generation_config.eos_token_id = chats.chat_tokenizer().eos_token_id
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(scope="session")
def model() -> Any:
    return chat_model()


@pytest.fixture(scope="session")
def unhooked() -> Any:
    """The same weights; no cache of the library is used with it."""
    return chat_model()
