"""Fixtures that all rooms share; what they are built of is in `helpers`."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

# Before anything imports triton: without a GPU its kernels are interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


from gatesight_hf import GateSightCache
from gatesight_hf.reference import load_model, load_tokenizer

from .helpers.hub_server import hub  # noqa: F401 - fixture
from .helpers.kernel_fixtures import backend, device, poisoned  # noqa: F401 - fixtures
from .helpers.models import FAMILIES, tiny_model
from .helpers.oracle import Oracle, evicted_of
from .helpers.running import CONTEXT, LENGTH, compacted

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


@pytest.fixture
def parent(dense: Any) -> GateSightCache:
    """A cache that holds 0.3 of `CONTEXT`, to ask and to fork."""
    return compacted(dense, CONTEXT, kept_fraction=0.3)


@pytest.fixture
def oracle(plain: Any, parent: GateSightCache) -> Iterator[Oracle]:
    """What `parent` must answer."""
    with Oracle(plain, evicted_of(parent, 0, LENGTH)) as oracle:
        yield oracle


@pytest.fixture(scope="session")
def bundled() -> tuple[Any, Any]:
    """The reference model and its tokenizer, for tests that do not change them."""
    return load_model(), load_tokenizer()


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield
