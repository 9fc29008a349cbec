"""A model with sparse attention, and its twin that oracles run on."""

from typing import Any

import pytest

from ..helpers.models import tiny_model
from ..helpers.sparse_oracle import BUDGET, eager


@pytest.fixture(scope="session")
def sparse() -> Any:
    """A model whose queries attend to 2 blocks of 4 and what fills none yet."""
    return tiny_model("qwen4_exp", indexer_budget=BUDGET)


@pytest.fixture(scope="session")
def plain_sparse() -> Any:
    """The same without hooks, in eager attention."""
    return eager(indexer_budget=BUDGET)
