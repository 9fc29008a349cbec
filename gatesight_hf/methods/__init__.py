"""Other eviction methods, as scorers behind the interface of `gatesight_hf.scoring`.

A `Prefill` comes in, as with every scorer; scores `[B, H, T]` per attention layer go out. Replays and calibration run
the model with a cache of their own, so that this room stands above `cache`. Imports `cache`, `scoring`, `models`,
`entries`, `files`.
"""

from .controls import OracleScorer, RandomScorer
from .hidden import HiddenStateConfig, HiddenStateScorer
from .keys import KeyDiff, KeyNorm, LagKV, StreamingLLM
from .kvzip import KVzip
from .queries import ExpectedAttention, SnapKV
from .triattention import TriAttention

__all__ = [
    "ExpectedAttention",
    "HiddenStateConfig",
    "HiddenStateScorer",
    "KVzip",
    "KeyDiff",
    "KeyNorm",
    "LagKV",
    "OracleScorer",
    "RandomScorer",
    "SnapKV",
    "StreamingLLM",
    "TriAttention",
]
