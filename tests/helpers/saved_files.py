"""What tests of saved caches share: a cache to save, copies that are wrong in one way, and another process."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gatesight_hf.files import TensorFile, write_tensor_file

from .paths import ROOT
from .running import compacted, forward, left_padded, random_ids

SLOTS = 43
#: Changes tensors and the `cache` object of the metadata.
Change = Callable[[dict[str, Tensor], dict[str, Any]], Any]


def save_a_cache(model: Any, path: Path) -> Path:
    """Two rows, one padded, and a tail, so that every kind of tensor is there."""
    ids, mask = left_padded([random_ids(SLOTS), random_ids(17, seed=1)])
    with torch.no_grad():
        cache = compacted(model, ids, mask=mask, kept_fraction=0.3)
        forward(model, random_ids(3, rows=2, seed=2), cache)
        cache.save(path)
    return path


def changed_cache(source: Path, target: Path, change: Change) -> Path:
    """A copy whose tensors and `cache` object are changed, its checksum being right."""
    with TensorFile(source) as file:
        tensors, metadata = file.read(), dict(file.metadata)
    metadata.pop("sha256")
    content = json.loads(metadata["cache"])
    content["metadata"] = metadata
    change(tensors, content)
    del content["metadata"]
    if "cache" in metadata:
        metadata["cache"] = json.dumps(content)
    write_tensor_file(target, tensors, metadata)
    return target


def lines_of(code: str, *arguments: Any) -> list[str]:
    """What another Python process prints; it finds the packages and tests of this one."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
