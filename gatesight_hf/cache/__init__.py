"""The life of one context: prefill, compaction, forks, serving, files.

A model's forwards come in, `generate` among them; answers' entries, reports and files go out. `context` holds all
state, and goes back to a snapshot as a whole. `calls` carries each call of the model into it, with `inputs`, `tokens`
and `generate` for what it is given; `compacting` compacts it; `report`, `saving`, `storage`, `header` and `identity` tell
and write what it is. `hooked` is what transformers sees, `cache` what a user calls, `frozen` and `frozen_calls` the same
with fixed shapes. Imports everything below: `compaction`, `scoring`, `models`, `entries`, `files`.
"""

from .cache import GateSightCache
from .frozen import FrozenCache
from .report import CacheReport

__all__ = [
    "CacheReport",
    "FrozenCache",
    "GateSightCache",
]
