"""Has vLLM keep asynchronous scheduling on CPUs, where it turns the option off as of no use.

In one process steps still run one after another; the scheduler makes each before it has seen what the one before gave.
"""

from typing import Any

from vllm.platforms.cpu import CpuPlatform

_plain = CpuPlatform.check_and_update_config


def _asynchronous(config: Any) -> None:
    asked = config.scheduler_config.async_scheduling
    _plain(config)
    config.scheduler_config.async_scheduling = asked


CpuPlatform.check_and_update_config = staticmethod(_asynchronous)
