"""Files that are right, for copies that are not."""

from pathlib import Path
from typing import Any

import pytest

from ..helpers.saved_files import save_a_cache


@pytest.fixture(scope="session")
def cache_file(dense: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved cache with every kind of tensor."""
    return save_a_cache(dense, tmp_path_factory.mktemp("caches") / "good")
