"""The life of one context: prefill, compaction, forks, serving, files.

A model's forwards come in, `generate` among them; answers' entries, reports and files go out. Imports everything below:
`compaction`, `scoring`, `models`, `entries`, `files`.

- `context`: all state, which goes back to a snapshot as a whole; `compacting`: its compaction; `report`: its figures.
- `calls`: how each call of the model is carried into it; `inputs`, `tokens` and `generate`: what calls are given.
- `cache`: what a user calls; `hooked`: what transformers sees of it; `frozen`, `frozen_calls`: with fixed shapes.
- `prefill`: a context by direct forwards.
- `saving`, `storage`, `header`, `identity`: files.
"""

from .cache import GateSightCache
from .frozen import FrozenCache
from .prefill import prefill
from .report import CacheReport

__all__ = [
    "CacheReport",
    "FrozenCache",
    "GateSightCache",
    "prefill",
]
