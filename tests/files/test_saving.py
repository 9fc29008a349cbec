"""Only what can be loaded is saved, and a file is written whole or not at all."""

import copy
import errno
import gc
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from gatesight_hf import CacheStateError, GateSightCache, SessionFileError
from gatesight_hf.reference import MODEL_PATH

from ..helpers.models import random_estimator, tiny_model
from ..helpers.running import CONTEXT, compacted, prefilled
from ..helpers.saved_files import lines_of

pytestmark = pytest.mark.core


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "doc.gatesight"


# -- what is not saved -------------------------------------------------------------------------------------------------


def test_an_uncompacted_cache_is_not_saved(dense, path):
    for cache in (GateSightCache(random_estimator(dense), dense), prefilled(dense, CONTEXT)):
        with pytest.raises(CacheStateError, match=r"call compact\(\) first"):
            cache.save(path)
    assert not path.exists()


@pytest.mark.parametrize("option", [{"growing": True}, {"recompact_every": 9}])
def test_a_growing_cache_is_not_saved(dense, path, option):
    cache = compacted(dense, CONTEXT, kept_fraction=0.3, **option)
    for growing in (cache, cache.fork()):
        with pytest.raises(CacheStateError, match=r"growing cache cannot be saved.*made without growing"):
            growing.save(path)
    assert not path.exists()


def test_states_that_are_not_finite_are_not_saved(dense, path):
    cache = compacted(dense, CONTEXT, kept_fraction=0.3)
    cache.gdn_layers[2].recurrent_states[0][0, 1, 2, 3] = torch.nan
    with pytest.raises(ValueError, match=r"layers\.2\.recurrent_states\.0 holds NaN"):
        cache.save(path)
    assert not path.exists()


def test_a_cache_whose_model_is_gone_is_not_saved(path):
    model = tiny_model()
    cache = compacted(model, CONTEXT, kept_fraction=0.3)
    copied = copy.deepcopy(cache)
    copied.save(path)
    pickled = pickle.loads(pickle.dumps(cache))
    del model
    gc.collect()
    for of_no_model in (cache, pickled):
        with pytest.raises(CacheStateError, match=r"lost its model|was pickled"):
            of_no_model.save(path)


# -- whole or not at all -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [b"what was there before", None])
@pytest.mark.parametrize("call", ["os.fsync", "pathlib.Path.replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file(dense, path, monkeypatch, old, call, error):
    def fail(*_: Any) -> None:
        raise error

    if old is not None:
        path.write_bytes(old)
    cache = compacted(dense, CONTEXT, kept_fraction=0.3)
    monkeypatch.setattr(call, fail)
    with pytest.raises(type(error)):
        cache.save(path)
    monkeypatch.undo()
    assert {p.name: p.read_bytes() for p in path.parent.iterdir()} == ({} if old is None else {path.name: old})
    cache.save(path)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    GateSightCache.load(path, dense)


DISK_FULL = """
import resource, sys, torch
from gatesight_hf import Session
from gatesight_hf.reference import ESTIMATOR_PATH, load_model, load_tokenizer
torch.set_num_threads(1)
session = Session.open(load_model(), load_tokenizer(), ESTIMATOR_PATH, "The sky is blue . " * 100)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    session.save(sys.argv[1])
except OSError as error:
    print(type(error).__name__, error.errno, session.ask("The", max_new_tokens=1) != "")
"""


def test_a_full_disk_leaves_the_old_file(path):
    path.write_bytes(b"what was there before")
    assert lines_of(DISK_FULL, path)[-1] == f"OSError {errno.EFBIG} True"
    assert [(p.name, p.read_bytes()) for p in path.parent.iterdir()] == [(path.name, b"what was there before")]


def test_where_a_file_goes(dense, path):
    cache = compacted(dense, CONTEXT, kept_fraction=0.3)
    with pytest.raises(FileNotFoundError):
        cache.save(path / "no" / "such" / "folder")
    with pytest.raises(IsADirectoryError):
        cache.save(path.parent)
    path.symlink_to(path.parent / "real")
    cache.save(str(path))
    assert path.is_symlink() and (path.parent / "real").is_file()
    GateSightCache.load(str(path), dense)
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_missing_file_is_named(dense, tmp_path):
    for name in ("nowhere", "."):
        with pytest.raises(FileNotFoundError, match="no such file"):
            GateSightCache.load(tmp_path / name, dense)
    with pytest.raises(SessionFileError, match="not one of a saved cache"):
        GateSightCache.load(MODEL_PATH / "model.safetensors", dense)
