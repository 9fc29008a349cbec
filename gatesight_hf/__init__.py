"""GateSight for Transformers: keep a fraction of a hybrid model's KV cache, chosen by its own GDN gates."""

from .cache import CacheReport, FrozenCache, GateSightCache
from .errors import (
    CacheStateError,
    EstimatorMismatchError,
    SessionFileError,
    SessionMismatchError,
    UnsupportedModelError,
)
from .scoring import Estimator, EstimatorConfig, Prefill, Scorer
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
