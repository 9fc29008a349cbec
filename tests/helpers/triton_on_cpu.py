"""Has vLLM find Triton on a machine without a GPU, as its Model Runner V2 wants: kernels run in Triton's interpreter.

Imported before vLLM, and only where `GATESIGHT_TEST_RUNNER=v2` asks for that runner.
"""

import os
from types import SimpleNamespace

os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")

import torch
import triton.backends as backends


class _Idle:
    @staticmethod
    def is_active() -> bool:
        return False


backends.backends["cpu"] = SimpleNamespace(driver=_Idle, compiler=None)
torch.cuda.get_device_capability = lambda *_, **__: (9, 0)
