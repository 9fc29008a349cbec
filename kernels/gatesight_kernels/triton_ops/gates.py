"""The Triton kernel of `gate_means`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_T = 4


@triton.jit(do_not_specialize=["T"])
def gate_means_kernel(
    gate_ptr,
    out_ptr,
    T,
    stride_b,
    stride_t,
    stride_h,
    H: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    i_t = tl.program_id(0).to(tl.int64)
    i_b = tl.program_id(1).to(tl.int64)
    o_t = i_t * BT + tl.arange(0, BT)
    o_d = tl.arange(0, BD)
    m_t = o_t < T
    m_g = m_t[:, None] & (o_d < D)[None, :]
    p_g = gate_ptr + i_b * stride_b + o_t[:, None] * stride_t + o_d[None, :]
    b_sum = tl.zeros((BT, BD), dtype=tl.float32)
    for i_h in range(H):
        b_g = tl.load(p_g + i_h * stride_h, mask=m_g, other=0.0).to(tl.float32)
        b_sum += tl.where(m_g, tl.sigmoid(b_g), 0.0)
    tl.store(out_ptr + i_b * T + o_t, tl.sum(b_sum, axis=1) / (H * D), mask=m_t)


def gate_means_triton(gate: Tensor) -> Tensor:
    """See `gates.gate_means`."""
    gate = gate if gate.stride(-1) == 1 else gate.contiguous()
    batch, length, heads, size = gate.shape
    out = torch.empty((batch, length), dtype=torch.float32, device=gate.device)
    gate_means_kernel[(triton.cdiv(length, BLOCK_T), batch)](
        gate,
        out,
        length,
        *gate.stride()[:3],
        H=heads,
        D=size,
        BT=BLOCK_T,
        BD=triton.next_power_of_2(size),
        num_warps=4,
    )
    return out
