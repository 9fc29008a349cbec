"""The Triton kernel of `compact_rows`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_N, BLOCK_D = 64, 128


@triton.jit(do_not_specialize=["N"])
def compact_rows_kernel(
    rows_ptr,
    indices_ptr,
    out_ptr,
    N,
    stride_b,
    stride_h,
    stride_t,
    stride_ob,
    stride_oh,
    stride_ot,
    H: tl.constexpr,
    D: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    # axis 0 strides over blocks of rows; in place it has one program, which moves them in order
    i_n = tl.program_id(0).to(tl.int64)
    i_h = (tl.program_id(1) % H).to(tl.int64)
    i_b = (tl.program_id(1) // H).to(tl.int64)
    o_d = tl.program_id(2) * BD + tl.arange(0, BD)
    m_d = o_d < D
    p_i = indices_ptr + (i_b * H + i_h) * N
    p_rows = rows_ptr + i_b * stride_b + i_h * stride_h + o_d[None, :]
    p_out = out_ptr + i_b * stride_ob + i_h * stride_oh + o_d[None, :]
    for n in range(i_n * BN, N, tl.num_programs(0) * BN):
        o_n = n + tl.arange(0, BN).to(tl.int64)
        m_n = o_n < N
        m = m_n[:, None] & m_d[None, :]
        b_i = tl.load(p_i + o_n, mask=m_n, other=0)
        b_row = tl.load(p_rows + b_i[:, None] * stride_t, mask=m)
        # no thread may write a row that another one has yet to read
        tl.debug_barrier()
        tl.store(p_out + o_n[:, None] * stride_ot, b_row, mask=m)


def compact_rows_triton(rows: Tensor, indices: Tensor, in_place: bool = False) -> Tensor:
    """See `compact.compact_rows`."""
    batch, heads, _, size = rows.shape
    kept = indices.shape[2]
    if rows.stride(3) != 1:
        if in_place:
            raise ValueError(f"In place the channels of a row must lie side by side, got strides {rows.stride()}.")
        rows = rows.contiguous()
    out = (
        rows[:, :, :kept] if in_place else torch.empty((batch, heads, kept, size), dtype=rows.dtype, device=rows.device)
    )
    if out.numel() == 0:
        return out
    block_d = min(BLOCK_D, triton.next_power_of_2(size))
    grid = (1 if in_place else triton.cdiv(kept, BLOCK_N), batch * heads, triton.cdiv(size, block_d))
    compact_rows_kernel[grid](
        rows,
        indices.contiguous(),
        out,
        kept,
        *rows.stride()[:3],
        *out.stride()[:3],
        H=heads,
        D=size,
        BN=BLOCK_N,
        BD=block_d,
        num_warps=4,
    )
    return out
