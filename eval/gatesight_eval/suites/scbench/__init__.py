"""SCBench (arXiv 2412.10319): twelve tasks, many questions on one shared context, each asked of the context alone.

That is its "multi-request" mode, `--same_context_different_query` in the official runner. `load` reads the official
rows, `load_kvzip` the form that KVzip and others compare on.
"""

from .kvzip import load_kvzip
from .loading import load
from .tasks import OFFICIAL_MAX_TURNS, TASKS, reserved_tokens

__all__ = ["OFFICIAL_MAX_TURNS", "TASKS", "load", "load_kvzip", "reserved_tokens"]
