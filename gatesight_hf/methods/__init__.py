"""Other eviction methods, as scorers behind the interface of `gatesight_hf.scoring`."""

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
