"""The hot path of GateSight: each operation as a Triton kernel and as a torch twin of the same signature.

A public name runs the Triton kernel for CUDA tensors and the twin elsewhere; `use_backend` or the environment variable
`GATESIGHT_BACKEND` forces one of them.
"""

from .backend import BACKENDS, use_backend
from .compact import compact_rows
from .gates import gate_means
from .packing import PackedMLP, age_features, pack_mlp
from .score import packed_dtype, score_entries
from .select import select_top
from .signals import gdn_signals

__all__ = [
    "BACKENDS",
    "PackedMLP",
    "age_features",
    "compact_rows",
    "gate_means",
    "gdn_signals",
    "pack_mlp",
    "packed_dtype",
    "score_entries",
    "select_top",
    "use_backend",
]
