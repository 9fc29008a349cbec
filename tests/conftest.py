"""Fixtures that all rooms share; what they are built of is in `helpers`."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

# Before anything imports triton: without a GPU its kernels are interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


from .helpers.hub_server import hub  # noqa: F401 - fixture
from .helpers.kernel_fixtures import backend, device, poisoned  # noqa: F401 - fixtures
from .helpers.models import FAMILIES, tiny_model

torch.set_num_threads(1)  # tiny tensors: threads only wait for each other


@pytest.fixture(scope="session", params=FAMILIES)
def any_model(request: pytest.FixtureRequest) -> Any:
    """A model of each family in turn."""
    return tiny_model(request.param)


@pytest.fixture(scope="session")
def any_plain(any_model: Any) -> Any:
    """Its twin without hooks, in eager attention."""
    model = tiny_model(next(name for name, family in FAMILIES.items() if isinstance(any_model, family[0])))
    model.set_attn_implementation("eager")
    return model


@pytest.fixture(scope="session")
def dense() -> Any:
    """Qwen3.5, for tests that need only one family."""
    return tiny_model()


@pytest.fixture(scope="session")
def plain() -> Any:
    """The same model without hooks, in eager attention: what oracles run on."""
    model = tiny_model()
    model.set_attn_implementation("eager")
    return model


@pytest.fixture(params=["sdpa", "eager"])
def attention(request: pytest.FixtureRequest, dense: Any) -> Iterator[str]:
    """Both attention implementations of `dense` in turn."""
    dense.set_attn_implementation(request.param)
    yield request.param
    dense.set_attn_implementation("sdpa")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield
