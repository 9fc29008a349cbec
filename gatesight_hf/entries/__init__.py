"""One layer of a cache: its entries or states, held, compacted, quantised, frozen, seen.

Keys, values and states of a forward come in, and later the slots to keep; the tensors that attention reads, and its
mask, go out. Knows nothing of models or scores. Imports `files` (what a saved layer holds).
"""

from .attention import GateSightAttentionLayer, LatentAttentionLayer
from .held import Extent, storage_bytes
from .sparse import SparseAttentionLayer
from .states import GDNStateLayer, SlidingAttentionLayer
from .view import AttentionView, LatentMap

__all__ = [
    "AttentionView",
    "Extent",
    "GDNStateLayer",
    "GateSightAttentionLayer",
    "LatentAttentionLayer",
    "LatentMap",
    "SlidingAttentionLayer",
    "SparseAttentionLayer",
    "storage_bytes",
]
