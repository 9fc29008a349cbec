"""β, g and ‖v‖ of a Gated-DeltaNet layer from the outputs of its projections."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .backend import runs_triton
from .checks import check_tensor, described

#: Tokens that the twin works on at a time: its tiles stay in the processor's cache, which is most of its speed.
TOKENS_PER_TILE = 128


@torch.no_grad()
def gdn_signals(
    b: Tensor,
    a: Tensor,
    values: Tensor,
    log_a: Tensor,
    dt_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    context: Tensor | None = None,
) -> Tensor:
    """Write gate β, log-decay g and write magnitude ‖v‖ in one pass.

    β = sigmoid(b), g = -exp(log_a) · softplus(a + dt_bias), and v = SiLU(conv(values)) per value head, with a causal
    depthwise convolution (arXiv 2412.06464, equations 8 to 10 with the gates of its section 3.4). Everything is
    computed in float32 and rounded once. No gradients flow.

    Args:
        b: Logit of β, `[B, T, HV]`.
        a: Input of g, `[B, T, HV]`.
        values: Before the convolution, `[B, T, G, C]`: the HV · D channels in G equal groups of whole heads, of any
            stride between groups, so that projections that interleave keys and values need no copy.
        log_a: `[HV]`.
        dt_bias: `[HV]`.
        weight: Of the convolution, `[HV · D, K]`; tap K-1 is the current token's.
        bias: Of the convolution, `[HV · D]`.
        context: The last inputs of the convolution before this chunk, oldest first, `[B, HV · D, K-1]`; None at the
            start, as zeros.

    Returns:
        `[B, T, 3, HV]`, in the dtype of `values`.

    Raises:
        ValueError: Shapes that do not belong together.
        RuntimeError: Triton is forced and cannot run.
    """
    _check(b, a, values, log_a, dt_bias, weight, bias, context)
    if runs_triton(values, b, a, log_a, dt_bias, weight):
        from .triton_ops.signals import gdn_signals_triton

        with torch.cuda.device_of(values):
            return gdn_signals_triton(b, a, values, log_a, dt_bias, weight, bias, context)
    return gdn_signals_torch(b, a, values, log_a, dt_bias, weight, bias, context)


def gdn_signals_torch(
    b: Tensor,
    a: Tensor,
    values: Tensor,
    log_a: Tensor,
    dt_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    context: Tensor | None = None,
) -> Tensor:
    """The twin: see `gdn_signals`."""
    batch, length, heads = b.shape
    channels, taps = weight.shape
    out = values.new_empty((batch, length, 3, heads))
    work = torch.promote_types(values.dtype, torch.float32)
    out[:, :, 0] = b.to(work).sigmoid()
    out[:, :, 1] = -log_a.to(work).exp() * F.softplus(a.to(work) + dt_bias.to(work))
    by_tap = weight.to(work).t().contiguous()
    past = taps - 1
    # One buffer for all tiles: the last inputs of a tile are the context of the next one.
    tokens = max(1, min(TOKENS_PER_TILE, length))
    inputs = values.new_empty((past + tokens, *values.shape[2:]), dtype=work)
    rows = inputs.view(len(inputs), channels)
    sums = rows.new_empty((tokens, channels))
    for row in range(batch):
        rows[:past] = 0 if context is None else context[row].t()
        for start in range(0, length, tokens):
            size = min(tokens, length - start)
            inputs[past : past + size] = values[row, start : start + size]
            tile = sums[:size]
            torch.mul(rows[past : past + size], by_tap[past], out=tile)
            for tap in range(past):
                tile.addcmul_(rows[tap : tap + size], by_tap[tap])
            if bias is not None:
                tile += bias
            F.silu(tile, inplace=True)
            out[row, start : start + size, 2] = torch.linalg.vector_norm(tile.view(size, heads, -1), dim=-1)
            rows[:past] = rows[size : size + past].clone()
    return out


def _check(
    b: Tensor,
    a: Tensor,
    values: Tensor,
    log_a: Tensor,
    dt_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    context: Tensor | None,
) -> None:
    check_tensor("b", b, "[B, T, HV]")
    check_tensor("values", values, "[B, T, G, C]")
    check_tensor("weight", weight, "[HV · D, K]")
    batch, length, heads = b.shape
    channels, taps = weight.shape
    groups, per_group = values.shape[2:]
    if groups * per_group != channels or channels % heads or per_group % (channels // heads):
        raise ValueError(f"weight: {channels} channels are not {heads} whole heads in {groups} groups of {per_group}.")
    expected: dict[str, tuple[Any, tuple[int, ...]]] = {
        "a": (a, (batch, length, heads)),
        "values": (values, (batch, length, groups, per_group)),
        "log_a": (log_a, (heads,)),
        "dt_bias": (dt_bias, (heads,)),
        "bias": (bias, (channels,)),
        "context": (context, (batch, channels, taps - 1)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is None and name in ("bias", "context"):
            continue
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {described(tensor)}.")
