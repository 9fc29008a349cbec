"""The kernels compile for GPUs of two generations, within their limits: proved without one."""

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from typing import Any

import pytest

from ..helpers.kernel_fixtures import NO_TRITON
from ..helpers.paths import ROOT

pytestmark = [NO_TRITON, pytest.mark.slow]

#: Of a multiprocessor: most shared memory of one block, and registers.
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
REGISTERS = 65536
TENSOR_CORES = {80: "mma", 90: "wgmma"}


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What `kernel_builds.py` says of each build, all compiled anew."""
    own = {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "TRITON_DEFAULT_FP_FUSION": "1"}
    own["PYTHONPATH"] = str(ROOT / "kernels")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "tests" / "helpers" / "kernel_builds.py"), *map(str, SHARED_BYTES)]
    done = subprocess.run(command, env={**environment, **own}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    print("", " ".join(f"{name:>9}" for name in found[0]), sep="\n")
    for line in sorted({" ".join(f"{value:>9}" for value in build.values()) for build in found}):
        print(line)
    return found


def named(build: dict[str, Any]) -> str:
    return f"{build['kernel']} in {build['dtype']} for sm_{build['arch']}"


def test_every_kernel_compiles_for_every_gpu(builds):
    package = importlib.import_module("gatesight_kernels.triton_ops")
    modules = [importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    names = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    assert len(names) >= len(modules) >= 5
    for arch in SHARED_BYTES:
        assert {build["kernel"] for build in builds if build["arch"] == arch} == names


def test_nothing_is_spilled(builds):
    assert not [named(build) for build in builds if build["stack"]]


def test_a_block_fits_a_multiprocessor(builds):
    for build in builds:
        assert build["shared"] <= SHARED_BYTES[build["arch"]], named(build)
        assert build["registers"] * build["warps"] * 32 <= REGISTERS, named(build)


def test_scores_in_16_bits_are_computed_by_tensor_cores(builds):
    for build in builds:
        if build["kernel"] == "score_entries_kernel":
            found = [name for name in ("mma", "wgmma") if build[name]]
            assert found == ([] if build["dtype"] == "float32" else [TENSOR_CORES[build["arch"]]]), named(build)
