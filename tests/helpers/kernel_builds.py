"""Compile every kernel for GPUs that are not there, as it is launched at the sizes of a 27B model.

    python tests/helpers/kernel_builds.py 80 90

Launchers run on meta tensors, so what is compiled is what they would launch. Prints a line of JSON for each build.
TRITON_INTERPRET must not be set.
"""

import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from gatesight_kernels import pack_mlp
from gatesight_kernels.triton_ops.compact import compact_rows_triton
from gatesight_kernels.triton_ops.gates import gate_means_triton
from gatesight_kernels.triton_ops.score import score_entries_triton
from gatesight_kernels.triton_ops.select import select_top_triton
from gatesight_kernels.triton_ops.signals import gdn_signals_triton

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
#: Tokens of a short and of a long context, and what is kept of it; so many elements that strides need 64 bits.
FEW, MANY, KEPT, FAR = 2**12, 2**18, 26215, 2**31
HV, D = 48, 128


class Target:
    """Stands in for Triton's driver, which needs a GPU; a device's number is its compute capability."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def signals(dtype: torch.dtype) -> None:
    of_heads, weight, bias = meta(HV), meta(HV * D, 4, dtype=dtype), meta(HV * D, dtype=dtype)
    past = meta(1, HV * D, 4, dtype=dtype)[..., 1:]
    for length in (FEW, MANY):
        b, values = meta(1, length, HV, dtype=dtype), meta(1, length, 10240, dtype=dtype)[..., 4096:].unsqueeze(2)
        gdn_signals_triton(b, b, values, of_heads, of_heads, weight)
        gdn_signals_triton(b, b, values, of_heads, of_heads, weight, bias, past)
    b, of_heads, weight = meta(1, MANY, 32, dtype=dtype), meta(32), meta(32 * D, 4, dtype=dtype)
    values = meta(1, MANY, 16, 6 * D, dtype=dtype)[..., 2 * D : 4 * D]
    gdn_signals_triton(b, b, values, of_heads, of_heads, weight)


def gates(dtype: torch.dtype) -> None:
    for length in (FEW, MANY):
        gate_means_triton(meta(1, length, 24, 512, dtype=dtype)[..., 256:])


def scores(dtype: torch.dtype) -> None:
    for blocks in (1, 2):
        size = 432 * blocks + 3
        layers = torch.zeros(4, size, 64), torch.zeros(4, 64), torch.zeros(4, 64), torch.zeros(4)
        mlp = pack_mlp(*layers, torch.zeros(size), torch.ones(size), ages=True, dtype=dtype, device="meta")
        score_entries_triton([meta(MANY, 432, dtype=dtype)] * blocks, mlp)


def selection(dtype: torch.dtype) -> None:
    for stride in (MANY, FAR):
        select_top_triton(meta(4, stride, dtype=dtype)[:, :MANY], KEPT)


def compaction(dtype: torch.dtype) -> None:
    indices = meta(1, 4, KEPT, dtype=torch.int64)
    for length, size, in_place in itertools.product((MANY, FAR // 128), (128, 256), (False, True)):
        compact_rows_triton(meta(1, 4, length, size, dtype=dtype), indices, in_place)


def described(build: Any, arch: int, dtype: torch.dtype) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(build.asm["cubin"])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    numbers = dict(part.split(":", 1) for part in usage.split() if part.startswith(("REG:", "STACK:", "LOCAL:")))
    return {
        "kernel": build.metadata.name,
        "arch": arch,
        "dtype": str(dtype).removeprefix("torch."),
        "warps": build.metadata.num_warps,
        "registers": int(numbers["REG"]),
        "stack": int(numbers["STACK"]) + int(numbers["LOCAL"]),
        "shared": build.metadata.shared,
        "wgmma": build.asm["ptx"].count("wgmma.mma_async"),
        "mma": build.asm["ptx"].count("mma.sync"),
    }


def main() -> None:
    run, seen = JITFunction.run, set()

    def compiled(self: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        build = run(self, *args, warmup=True, **options)
        if build.hash not in seen:
            seen.add(build.hash)
            print(json.dumps(described(build, arch, dtype)), flush=True)
        return build

    JITFunction.run = compiled
    for arch in map(int, sys.argv[1:]):
        driver.set_active(Target(arch))
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for launches in (signals, gates, scores, compaction):
                launches(dtype)
        selection(dtype)


if __name__ == "__main__":
    main()
