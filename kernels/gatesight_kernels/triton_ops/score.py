"""The Triton kernel of `score_entries`."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from ..packing import PackedMLP, age_scales

#: Tokens of a program, and hidden units of all its heads together: larger tiles spill registers.
BLOCK_T, BLOCK_N, BLOCK_F = 64, 128, 64


@triton.jit(do_not_specialize=["T", "START"])
def score_entries_kernel(
    x_ptrs,
    strides,
    weight_ptr,
    statistics_ptr,
    bias_ptr,
    age_weight_ptr,
    weight_out_ptr,
    bias_out_ptr,
    out_ptr,
    T,
    START,
    oldest,
    log_oldest,
    SIZES: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    HAS_AGES: tl.constexpr,
    STANDARDISE: tl.constexpr,
    F: tl.constexpr,
    GROUPS: tl.constexpr,
    LARGEST: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    BW: tl.constexpr,
    BF: tl.constexpr,
):
    # groups of heads are neighbours in the grid, so that the second one finds its inputs in the L2 cache
    i_g = tl.program_id(0) % GROUPS
    i_t = (tl.program_id(0) // GROUPS).to(tl.int64)
    o_b = tl.arange(0, BT)
    o_t = i_t * BT + o_b
    m_t = o_t < T
    o_n = tl.arange(0, BH * BW)
    if BW == W:
        o_c = i_g * BH * BW + o_n
        m_n = o_c < H * W
    else:
        o_c = (i_g * BH + o_n // BW) * W + o_n % BW
        m_n = (i_g * BH + o_n // BW < H) & (o_n % BW < W)

    b_sum = tl.zeros((BT, BH * BW), dtype=tl.float32) + tl.load(bias_ptr + o_c, mask=m_n, other=0.0)[None, :]
    first = 0
    for i in tl.static_range(len(SIZES)):
        p_x = x_ptrs[i] + i_t * BT * strides[i]
        p_w = weight_ptr + first * (H * W) + o_c[None, :]
        for i_f in range(0, SIZES[i], BF):
            o_f = i_f + tl.arange(0, BF)
            m_f = o_f < SIZES[i]
            b_x = tl.load(p_x + (o_b[:, None] * strides[i] + o_f[None, :]), mask=m_t[:, None] & m_f[None, :], other=0.0)
            b_w = tl.load(p_w + o_f[:, None] * (H * W), mask=m_f[:, None] & m_n[None, :], other=0.0)
            if STANDARDISE:
                b_mean = tl.load(statistics_ptr + first + o_f, mask=m_f, other=0.0)
                b_inverse = tl.load(statistics_ptr + F + first + o_f, mask=m_f, other=0.0)
                b_z = (b_x.to(tl.float32) - b_mean[None, :]) * b_inverse[None, :]
                # float16 has no larger ones
                b_x = tl.clamp(b_z, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(b_w.dtype)
            if WIDEN:
                # Triton's interpreter multiplies the bits of bfloat16 as if they were whole numbers
                b_x, b_w = b_x.to(tl.float32), b_w.to(tl.float32)
            b_sum = tl.dot(b_x, b_w, b_sum, input_precision=PRECISION)
        first += SIZES[i]

    if HAS_AGES:
        b_age = tl.maximum(T - 1 - o_t, 0).to(tl.float32)
        b_position = (START + o_t).to(tl.float32)
        b_w0 = tl.load(age_weight_ptr + o_c, mask=m_n, other=0.0)
        b_w1 = tl.load(age_weight_ptr + H * W + o_c, mask=m_n, other=0.0)
        b_w2 = tl.load(age_weight_ptr + 2 * H * W + o_c, mask=m_n, other=0.0)
        b_sum += (b_age / oldest)[:, None] * b_w0[None, :]
        b_sum += (tl.log(1.0 + b_age) / log_oldest)[:, None] * b_w1[None, :]
        b_sum += (tl.log(1.0 + b_position) / log_oldest)[:, None] * b_w2[None, :]
    b_out = tl.load(weight_out_ptr + o_c, mask=m_n, other=0.0)
    b_hidden = 0.5 * b_sum * (1.0 + tl.erf(b_sum * 0.7071067811865476)) * b_out[None, :]
    b_score = tl.sum(tl.reshape(b_hidden, (BT, BH, BW)), axis=2)
    o_h = i_g * BH + tl.arange(0, BH)
    m_h = o_h < H
    b_score += tl.load(bias_out_ptr + o_h, mask=m_h, other=0.0)[None, :]
    p_out = out_ptr + o_h[None, :].to(tl.int64) * T + o_t[:, None]
    tl.store(p_out, b_score, mask=m_t[:, None] & m_h[None, :])


def launch_options(heads: int, width: int, dtype: torch.dtype) -> dict[str, int | str]:
    """Sizes of the tiles, by the sizes of a layer."""
    block_w = triton.next_power_of_2(width)
    full = dtype == torch.float32
    block_h = min(triton.next_power_of_2(heads), max(1, (64 if full else BLOCK_N) // block_w))
    # A matrix product needs 16 columns.
    block_h = max(block_h, 16 // min(16, block_w))
    return {
        "H": heads,
        "W": width,
        "GROUPS": triton.cdiv(heads, block_h),
        "LARGEST": torch.finfo(dtype).max,
        "PRECISION": "ieee" if full else "tf32",
        "WIDEN": knobs.runtime.interpret and dtype == torch.bfloat16,
        "BT": BLOCK_T,
        "BH": block_h,
        "BW": block_w,
        "BF": 16 if full else BLOCK_F,
        "num_warps": 4,
        "num_stages": 2 if full else 3,
    }


def score_entries_triton(blocks: Sequence[Tensor], mlp: PackedMLP, first: int = 0) -> Tensor:
    """See `score.score_entries`."""
    dtype = blocks[0].dtype
    if mlp.weight.dtype != dtype:
        raise ValueError(f"Inputs in {dtype} need MLPs packed in it, got {mlp.weight.dtype}: see packed_dtype.")
    blocks = [block if block.stride(1) == 1 else block.contiguous() for block in blocks]
    length, (heads, width) = len(blocks[0]), mlp.weight_out.shape
    out = torch.empty((heads, length), dtype=torch.float32, device=mlp.weight.device)
    options, (oldest, log_oldest) = launch_options(heads, width, dtype), age_scales(first + length)
    score_entries_kernel[(triton.cdiv(length, options["BT"]) * options["GROUPS"],)](
        tuple(blocks),
        tuple(block.stride(0) for block in blocks),
        mlp.weight,
        mlp.bias if mlp.statistics is None else mlp.statistics,
        mlp.bias,
        mlp.bias if mlp.age_weight is None else mlp.age_weight,
        mlp.weight_out,
        mlp.bias_out,
        out,
        length,
        first,
        float(oldest),
        log_oldest,
        SIZES=tuple(block.shape[1] for block in blocks),
        HAS_AGES=mlp.age_weight is not None,
        STANDARDISE=mlp.statistics is not None,
        F=len(mlp.weight),
        **options,
    )
    return out
