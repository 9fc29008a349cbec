"""Methods by the names that commands, servers and the evaluator know them by."""

from collections.abc import Callable

from ..scoring.interface import Scorer
from .controls import RandomScorer
from .keys import KeyDiff, KeyNorm, LagKV, StreamingLLM
from .queries import ExpectedAttention, SnapKV

#: Those that read nothing but the entries themselves.
BY_ENTRIES: dict[str, Callable[..., Scorer]] = {
    "key_norm": KeyNorm,
    "keydiff": KeyDiff,
    "lagkv": LagKV,
    "random": RandomScorer,
    "streaming_llm": StreamingLLM,
}
#: Those that need neither training nor calibration nor a replay.
READY: dict[str, Callable[..., Scorer]] = {**BY_ENTRIES, "expected_attention": ExpectedAttention, "snapkv": SnapKV}
