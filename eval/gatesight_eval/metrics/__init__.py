"""Scorers: a prediction and its question in, an official and a revised score out.

`SCORERS` holds them by name; `gatesight_eval.metrics.metrics` wraps them as an `evaluate.Metric`.
"""

from .registry import SCORERS, score
from .scores import Score, Scorer

__all__ = ["SCORERS", "Score", "Scorer", "score"]
