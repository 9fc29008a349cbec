"""GateSight for Transformers: keep a fraction of a hybrid model's KV cache, chosen by its own GDN gates."""

from .cache import GateSightCache
from .errors import (
    CacheStateError,
    EstimatorMismatchError,
    SessionFileError,
    SessionMismatchError,
    UnsupportedModelError,
)
from .estimator import Estimator, EstimatorConfig
from .frozen import FrozenCache
from .report import CacheReport
from .scoring import Prefill, Scorer
from .session import Session

__version__ = "0.1.0"

__all__ = [
    "CacheReport",
    "CacheStateError",
    "Estimator",
    "EstimatorConfig",
    "EstimatorMismatchError",
    "FrozenCache",
    "GateSightCache",
    "Prefill",
    "Scorer",
    "Session",
    "SessionFileError",
    "SessionMismatchError",
    "UnsupportedModelError",
]
