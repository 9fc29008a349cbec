"""Mean output gate of an attention layer per token."""

import torch
from torch import Tensor

from .backend import runs_triton
from .checks import check_tensor

#: Tokens that the twin works on at a time, see `signals.TOKENS_PER_TILE`.
TOKENS_PER_TILE = 512


def gate_means(gate: Tensor) -> Tensor:
    """Mean over heads and channels of sigmoid(gate), summed in float32.

    Args:
        gate: Logits of the output gate, `[B, T, heads, D]`, of any strides.

    Returns:
        `[B, T]`, float32.

    Raises:
        ValueError: Logits of another form.
        RuntimeError: Triton is forced and cannot run.
    """
    check_tensor("gate", gate, "[B, T, heads, D]")
    if runs_triton(gate):
        from .triton_ops.gates import gate_means_triton

        with torch.cuda.device_of(gate):
            return gate_means_triton(gate)
    return gate_means_torch(gate)


def gate_means_torch(gate: Tensor) -> Tensor:
    """The twin: see `gate_means`."""
    tiles = [
        tile.to(torch.float32, copy=True).sigmoid_().flatten(2).mean(-1) for tile in gate.split(TOKENS_PER_TILE, dim=1)
    ]
    return torch.cat(tiles, dim=1)
