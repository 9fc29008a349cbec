"""The life of one context: prefill, compaction, forks, serving, files.

A model's forwards come in, `generate` among them; answers' entries, reports and files go out. Imports everything below:
`compaction`, `scoring`, `models`, `entries`, `files`.
"""

from .cache import GateSightCache
from .frozen import FrozenCache
from .report import CacheReport

__all__ = [
    "CacheReport",
    "FrozenCache",
    "GateSightCache",
]
