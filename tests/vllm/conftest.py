"""What must be there before vLLM is imported."""

import os

if os.environ.get("GATESIGHT_TEST_RUNNER") == "v2":
    from ..helpers import triton_on_cpu  # noqa: F401 - for its effect
if os.environ.get("GATESIGHT_TEST_MODE") == "async":
    from ..helpers import vllm_async_on_cpu  # noqa: F401 - likewise
