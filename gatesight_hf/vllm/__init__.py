"""GateSight in unmodified vLLM: compacted parent sessions in its paged cache, and children that answer from them.

`register` is the plugin's entry point (`vllm.general_plugins`); `GateSightLLM` is the offline API. Nothing here is
imported by the rest of `gatesight_hf`, and vLLM is imported only when one of the two is used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .llm import GateSightLLM, SessionReport

__all__ = ["GateSightLLM", "SessionReport", "register"]

_registered = False


def register() -> None:
    """Make vLLM know GateSight's cache spec and attention backend; in every process of an engine, once.

    Does nothing to engines that do not use `GateSightConnector`, and nothing if this vLLM is not a supported one: the
    connector then says so.
    """
    global _registered
    if _registered:
        return
    _registered = True
    from .support import vllm_is_supported

    if vllm_is_supported():
        from .paged import register_paged

        register_paged()


def __getattr__(name: str) -> Any:
    if name in ("GateSightLLM", "SessionReport"):
        from . import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
