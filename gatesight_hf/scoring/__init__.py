"""What a prefill shows, and how entries are rated.

Signals and views come in and are gathered (`Recording`); a scorer sees them as a `Prefill` and gives scores
`[B, H, T]` per attention layer, higher is kept. The library's own scorer is `Estimator`. Imports `models`, `entries`,
`files`.
"""

from .estimator import Estimator, EstimatorConfig
from .interface import Needs, Prefill, QueryMoments, Recorder, Scorer, Scores, checked_scores
from .recording import Recording
from .utility import continuation_utilities, entry_utilities

__all__ = [
    "Estimator",
    "EstimatorConfig",
    "Needs",
    "Prefill",
    "QueryMoments",
    "Recorder",
    "Recording",
    "Scorer",
    "Scores",
    "checked_scores",
    "continuation_utilities",
    "entry_utilities",
]
