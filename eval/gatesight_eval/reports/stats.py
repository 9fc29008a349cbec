"""Means over tasks with paired bootstrap intervals: contexts are drawn anew, the same ones for every method."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

#: Accuracies of one method: by task, one number per context, in the same order for all methods.
ByTask = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Interval:
    """A mean with the 95 % interval of its bootstrap distribution."""

    mean: float
    low: float
    high: float

    def format(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f}–{self.high:.3f})"


class PairedBootstrap:
    """Draws contexts with replacement within each task, `resamples` times, once for all methods.

    Args:
        counts: Contexts of each task; at least one task.
        resamples: How often.
        seed: Of the draws.

    Raises:
        ValueError: No tasks.
    """

    def __init__(self, counts: Mapping[str, int], resamples: int = 1000, seed: int = 0) -> None:
        if not counts:
            raise ValueError("A mean over no tasks.")
        rng = np.random.default_rng(seed)
        self._draws = {task: rng.integers(0, n, size=(resamples, n)) for task, n in sorted(counts.items())}

    def mean(self, accuracies: ByTask) -> Interval:
        """Mean over tasks of the mean over contexts."""
        return self._interval(accuracies)

    def difference(self, first: ByTask, second: ByTask) -> Interval:
        """Mean of first minus second on the same contexts."""
        return self._interval({task: first[task] - second[task] for task in self._draws})

    def _interval(self, values: ByTask) -> Interval:
        means = np.mean([values[task][draws].mean(axis=1) for task, draws in self._draws.items()], axis=0)
        low, high = np.percentile(means, [2.5, 97.5])
        return Interval(float(np.mean([values[task].mean() for task in self._draws])), float(low), float(high))
