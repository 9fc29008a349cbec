"""The Triton kernel of `gdn_signals`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_T, BLOCK_H = 16, 8


@triton.jit
def softplus(x):
    # log(1 + e) keeps its digits for small e: divided by what 1 + e was rounded to (Kahan).
    e = tl.exp(-tl.abs(x))
    rounded = 1.0 + e
    log1p = tl.where(rounded == 1.0, e, tl.log(rounded) * (e / tl.where(rounded == 1.0, 1.0, rounded - 1.0)))
    return tl.maximum(x, 0.0) + log1p


@triton.jit(do_not_specialize=["T"])
def gdn_signals_kernel(
    b_ptr,
    a_ptr,
    x_ptr,
    log_a_ptr,
    dt_bias_ptr,
    weight_ptr,
    bias_ptr,
    context_ptr,
    out_ptr,
    T,
    stride_bb,
    stride_bt,
    stride_ab,
    stride_at,
    stride_xb,
    stride_xt,
    stride_xg,
    stride_cb,
    stride_cc,
    stride_ck,
    HV: tl.constexpr,
    D: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CONTEXT: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
):
    i_t = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1)
    i_b = tl.program_id(2).to(tl.int64)
    # blocks begin at 64-bit addresses; offsets within a block are 32 bits wide, which halves the registers for them
    o_b = tl.arange(0, BT)
    o_t = i_t * BT + o_b
    o_h = i_h * BH + tl.arange(0, BH)
    o_d = tl.arange(0, BD)
    m_t = o_t < T
    m_h = o_h < HV

    p_block = x_ptr + i_b * stride_xb + i_t * BT * stride_xt

    # head after head, so that the tile of one fits the registers
    b_magnitude = tl.zeros((BT, BH), dtype=tl.float32)
    for j in range(BH):
        head = i_h * BH + j
        m_d = o_d < tl.where(head < HV, D, 0)
        p_x = p_block + (head // HEADS_PER_GROUP) * stride_xg + (head % HEADS_PER_GROUP) * D
        b_sum = tl.zeros((BT, BD), dtype=tl.float32)
        for tap in tl.static_range(K):
            o_s = o_b + (tap - (K - 1))
            m_x = (m_t & (i_t * BT + o_s >= 0))[:, None] & m_d[None, :]
            b_x = tl.load(p_x + (o_s[:, None] * stride_xt + o_d[None, :]), mask=m_x, other=0.0).to(tl.float32)
            # only the first block looks back beyond the chunk
            if HAS_CONTEXT:  # noqa: SIM102 - decided at compile time
                if i_t == 0:
                    p_c = context_ptr + i_b * stride_cb + (head * D + o_d) * stride_cc
                    p_c = p_c[None, :] + (o_s + (K - 1))[:, None] * stride_ck
                    b_x += tl.load(p_c, mask=(o_s < 0)[:, None] & m_d[None, :], other=0.0).to(tl.float32)
            b_w = tl.load(weight_ptr + (head * D + o_d) * K + tap, mask=m_d, other=0.0).to(tl.float32)
            b_sum += b_x * b_w[None, :]
        if HAS_BIAS:
            b_sum += tl.load(bias_ptr + head * D + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
        b_v = b_sum * tl.sigmoid(b_sum)
        b_norm = tl.sqrt(tl.sum(b_v * b_v, axis=1))
        b_magnitude = tl.where((o_h == head)[None, :], b_norm[:, None], b_magnitude)

    m_s = m_t[:, None] & m_h[None, :]
    b_b = tl.load(b_ptr + i_b * stride_bb + o_t[:, None] * stride_bt + o_h[None, :], mask=m_s, other=0.0)
    b_a = tl.load(a_ptr + i_b * stride_ab + o_t[:, None] * stride_at + o_h[None, :], mask=m_s, other=0.0)
    b_dt = tl.load(dt_bias_ptr + o_h, mask=m_h, other=0.0).to(tl.float32)
    b_log_a = tl.load(log_a_ptr + o_h, mask=m_h, other=0.0).to(tl.float32)
    b_beta = tl.sigmoid(b_b.to(tl.float32))
    b_decay = -tl.exp(b_log_a)[None, :] * softplus(b_a.to(tl.float32) + b_dt[None, :])

    p_out = out_ptr + (i_b * T + o_t)[:, None] * (3 * HV) + o_h[None, :]
    tl.store(p_out, b_beta.to(out_ptr.dtype.element_ty), mask=m_s)
    tl.store(p_out + HV, b_decay.to(out_ptr.dtype.element_ty), mask=m_s)
    tl.store(p_out + 2 * HV, b_magnitude.to(out_ptr.dtype.element_ty), mask=m_s)


def gdn_signals_triton(
    b: Tensor,
    a: Tensor,
    values: Tensor,
    log_a: Tensor,
    dt_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    context: Tensor | None = None,
) -> Tensor:
    """See `signals.gdn_signals`."""
    batch, length, heads = b.shape
    channels, taps = weight.shape
    b, a, values = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (b, a, values))
    size = channels // heads
    out = torch.empty((batch, length, 3, heads), dtype=values.dtype, device=values.device)
    past = weight if context is None else context
    past_strides = (0, 0, 0) if context is None else context.stride()
    grid = (triton.cdiv(length, BLOCK_T), triton.cdiv(heads, BLOCK_H), batch)
    gdn_signals_kernel[grid](
        b,
        a,
        values,
        log_a.contiguous(),
        dt_bias.contiguous(),
        weight.contiguous(),
        weight if bias is None else bias.contiguous(),
        past,
        out,
        length,
        *b.stride()[:2],
        *a.stride()[:2],
        *values.stride()[:3],
        *past_strides,
        HV=heads,
        D=size,
        HEADS_PER_GROUP=heads // values.shape[2],
        K=taps,
        HAS_BIAS=bias is not None,
        HAS_CONTEXT=context is not None,
        BT=max(BLOCK_T, triton.next_power_of_2(taps)),
        BH=BLOCK_H,
        BD=triton.next_power_of_2(size),
        num_warps=8,
    )
    return out
