"""Fuzzed files: saved caches and estimators give only documented errors, and take no more memory than their size."""

import json
import shutil
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gatesight_hf import Estimator, GateSightCache, SessionFileError, SessionMismatchError
from gatesight_hf.files.tensor_files import JSON_LIMIT

from ..helpers.models import random_estimator
from ..helpers.running import forward, random_ids
from ..helpers.saved_files import SLOTS, changed_cache, lines_of

pytestmark = pytest.mark.core

#: A header as Python objects, and a forward of the tiny model on one token.
MOST_PYTHON_BYTES = 24 * JSON_LIMIT
fuzz = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def estimator_folder(dense: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("estimators") / "good"
    random_estimator(dense).save_pretrained(folder)
    return folder


class Bounded:
    """Counts what is allocated within: Python's peak, and the bytes of tensors made for file content."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tensor_bytes, empty = 0, torch.empty

        def counted(*args: Any, **kwargs: Any) -> Tensor:
            out = empty(*args, **kwargs)
            self.tensor_bytes += out.nbytes
            return out

        monkeypatch.setattr("gatesight_hf.files.tensor_files.torch.empty", counted)

    def __enter__(self) -> "Bounded":
        self.tensor_bytes = 0
        tracemalloc.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.python_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()


def assert_refused_or_loaded(load: Callable[[], Any], size: int, bounded: Bounded, *errors: Any) -> None:
    """Only the documented errors, and no more memory than the file is large."""
    refused = None
    with bounded:
        try:
            load()
        except errors as error:
            refused = error
    assert refused is None or (type(refused) in errors and len(str(refused)) < 2000)
    assert bounded.tensor_bytes <= size
    assert bounded.python_bytes <= MOST_PYTHON_BYTES


def mutated(data: bytes, draw: st.DataObject) -> bytes:
    """Some bytes changed, most of them in the header; or cut off, or followed by others."""
    out = bytearray(data)
    end = 8 + int.from_bytes(data[:8], "little")
    places = st.one_of(st.integers(0, 15), st.integers(0, end), st.integers(0, len(data) - 1))
    for place in draw.draw(st.lists(places, max_size=4)):
        out[place] = draw.draw(st.integers(0, 255))
    length = draw.draw(st.one_of(st.none(), st.integers(0, len(data)), st.integers(0, end)))
    return bytes(out[:length]) + draw.draw(st.binary(max_size=8))


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> Bounded:
    return Bounded(monkeypatch)


@fuzz
@given(draw=st.data())
def test_a_damaged_cache_is_never_loaded(dense, cache_file, tmp_path, bounded, draw):
    good = cache_file.read_bytes()
    data = mutated(good, draw)
    path = tmp_path / "bad"
    path.write_bytes(data)

    def load() -> None:
        GateSightCache.load(path, dense)
        assert data == good, "damage was not seen"

    assert_refused_or_loaded(load, len(data), bounded, SessionFileError, SessionMismatchError)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


def replace_somewhere(data: Any, draw: st.DataObject) -> Any:
    """A JSON value with one part replaced, removed or added."""
    if isinstance(data, dict) and data and draw.draw(st.integers(0, 3)):
        key = draw.draw(st.sampled_from(sorted(data)))
        if draw.draw(st.integers(0, 9)) == 0:
            return {name: value for name, value in data.items() if name != key}
        return {**data, key: replace_somewhere(data[key], draw)}
    if isinstance(data, list) and data and draw.draw(st.booleans()):
        place = draw.draw(st.integers(0, len(data) - 1))
        return [*data[:place], replace_somewhere(data[place], draw), *data[place + 1 :]]
    if isinstance(data, dict) and draw.draw(st.booleans()):
        return {**data, draw.draw(st.text(max_size=8)): draw.draw(JSON_VALUES)}
    return draw.draw(JSON_VALUES)


@fuzz
@given(draw=st.data())
def test_a_cache_with_other_metadata_is_refused_or_is_one(dense, cache_file, tmp_path, bounded, draw):
    """With a right checksum: whatever is loaded can be asked."""

    def change(tensors: dict[str, Tensor], content: dict[str, Any]) -> None:
        metadata = content.pop("metadata")
        new = replace_somewhere(content, draw)
        content.clear()
        content.update(new if isinstance(new, dict) else {"cache": new})
        content["metadata"] = metadata

    try:
        path = changed_cache(cache_file, tmp_path / "bad", change)
    except (UnicodeEncodeError, AttributeError):
        return  # not even a header

    def load() -> None:
        cache = GateSightCache.load(path, dense)
        with torch.no_grad():
            assert forward(dense, random_ids(2, rows=2), cache.fork()).isfinite().all()

    assert_refused_or_loaded(load, path.stat().st_size, bounded, SessionFileError, SessionMismatchError)


@fuzz
@given(draw=st.data())
def test_a_cache_with_other_values_is_refused_or_is_one(dense, cache_file, tmp_path, bounded, draw):
    """With a right checksum: numbers of any tensor replaced."""

    def change(tensors: dict[str, Tensor], content: dict[str, Any]) -> None:
        name = draw.draw(st.sampled_from(sorted(tensors)))
        flat = tensors[name].reshape(-1)
        place = draw.draw(st.integers(0, flat.numel() - 1))
        if tensors[name].is_floating_point():
            flat[place] = draw.draw(st.floats(width=32) | st.sampled_from([float("nan"), float("inf")]))
        elif tensors[name].dtype == torch.bool:
            flat[place] = draw.draw(st.booleans())
        else:
            flat[place] = draw.draw(st.integers(-3, 50) | st.integers(-(2**31), 2**31 - 1))

    path = changed_cache(cache_file, tmp_path / "bad", change)

    def load() -> None:
        cache = GateSightCache.load(path, dense)
        for layer in cache.attention_layers:
            assert layer.kept_positions.min() >= 0 and layer.kept_positions.max() < SLOTS
        with torch.no_grad():
            forward(dense, random_ids(2, rows=2), cache.fork())

    assert_refused_or_loaded(load, path.stat().st_size, bounded, SessionFileError)


@fuzz
@given(draw=st.data())
def test_a_damaged_estimator_is_refused_or_is_one(estimator_folder, tmp_path, bounded, draw):
    """An estimator's file has no checksum: changed weights that are finite are weights."""
    folder = tmp_path / "bad"
    shutil.copytree(estimator_folder, folder, dirs_exist_ok=True)
    data = mutated((folder / "model.safetensors").read_bytes(), draw)
    (folder / "model.safetensors").write_bytes(data)

    def load() -> None:
        estimator = Estimator.from_pretrained(folder)
        assert all(tensor.isfinite().all() for tensor in estimator.tensors.values())

    assert_refused_or_loaded(load, len(data), bounded, ValueError)


@fuzz
@given(draw=st.data())
def test_an_estimator_with_another_config_is_refused_or_is_one(estimator_folder, tmp_path, bounded, draw):
    folder = tmp_path / "bad"
    shutil.copytree(estimator_folder, folder, dirs_exist_ok=True)
    config = replace_somewhere(json.loads((folder / "config.json").read_text()), draw)
    (folder / "config.json").write_text(json.dumps(config))

    def load() -> None:
        estimator = Estimator.from_pretrained(folder)
        assert {name: tuple(t.shape) for name, t in estimator.tensors.items()} == estimator.config.tensor_shapes()

    assert_refused_or_loaded(load, (folder / "model.safetensors").stat().st_size, bounded, ValueError)


# -- memory ------------------------------------------------------------------------------------------------------------


def sparse(path: Path, header: dict[str, Any], data_bytes: int) -> None:
    """A file with the header, and data that are there for the file system only."""
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + data_bytes)


IN_LITTLE_MEMORY = """
import json, resource, sys
import torch
from tests.helpers.models import tiny_model
from gatesight_hf import Estimator, GateSightCache, SessionFileError
torch.set_num_threads(1)
model = tiny_model()
GateSightCache.load(sys.argv[1], model)  # what the first load needs besides
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + 2**26, held + 2**26))
try:
    torch.empty(2**28, dtype=torch.uint8)
except RuntimeError:
    print("limited")
for path in sys.argv[2:-1]:
    try:
        GateSightCache.load(path, model)
    except SessionFileError as error:
        print("refused", str(error)[:300])
try:
    Estimator.from_pretrained(sys.argv[-1])
except ValueError as error:
    print("refused", str(error)[:300])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and RLIMIT_AS")
def test_claims_of_a_terabyte_are_refused_in_64_mib(cache_file, estimator_folder, tmp_path):
    """Files that are as large as they say, but not as the model's layout says."""
    size, paths = 2**40, []
    data = cache_file.read_bytes()
    for i, name in enumerate(("layers.3.kept_keys", "layers.0.recurrent_states.0", "ids")):
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        # A terabyte of rows more; what lies behind them moves.
        begin, end = header[name]["data_offsets"]
        row = (end - begin) // header[name]["shape"][0]
        rows = size // row
        header[name]["shape"][0] += rows
        entries = [entry for key, entry in header.items() if key != "__metadata__"]
        for entry in entries:
            entry["data_offsets"] = [n + rows * row if n >= end else n for n in entry["data_offsets"]]
        paths.append(tmp_path / f"huge{i}")
        sparse(paths[-1], header, max(entry["data_offsets"][1] for entry in entries))
    folder = tmp_path / "estimator"
    shutil.copytree(estimator_folder, folder)
    tensor = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    sparse(folder / "model.safetensors", {"layers.0.bias_in": tensor}, size)

    printed = lines_of(IN_LITTLE_MEMORY, cache_file, *paths, folder)
    lines = [line for line in printed if line.startswith(("limited", "refused"))]
    assert lines[0] == "limited" and len(lines) == 5
    named = ("kept_keys must be", "recurrent_states.0 must be", "ids must be", "where at most")
    for line, match in zip(lines[1:], named, strict=True):
        assert match in line
