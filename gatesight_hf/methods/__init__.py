"""Other eviction methods, as scorers behind the interface of `gatesight_hf.scoring`."""

from .controls import RandomScorer

__all__ = ["RandomScorer"]
