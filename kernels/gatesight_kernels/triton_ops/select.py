"""The Triton kernels of `select_top`: a radix search for each head's K-th score, then a scatter in order.

Scores become whole numbers of the same order, whose digits are counted from the highest one down. After four digits the
K-th is known, and how many of those equal to it are kept.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BITS = 8
DIGITS = 32 // BITS
BLOCK_T = 4096


@triton.jit
def order_key(x):
    # zeros of both signs are equal; the bits of negative numbers run backwards
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def search(p_counts, K, BITS: tl.constexpr, DONE: tl.constexpr):
    # the first DONE digits of the K-th largest key, and which of the keys that begin with them it is
    prefix = tl.full((), 0, tl.uint32)
    rank = tl.full((), 0, tl.int32) + K
    o_d = tl.arange(0, 1 << BITS)
    for digit in tl.static_range(DONE):
        b_counts = tl.load(p_counts + digit * (1 << BITS) + o_d)
        b_above = tl.sum(b_counts, axis=0) - tl.cumsum(b_counts, axis=0)
        found = (b_above < rank) & (b_above + b_counts >= rank)
        prefix = (prefix << BITS) | tl.sum(tl.where(found, o_d, 0), axis=0).to(tl.uint32)
        rank -= tl.sum(tl.where(found, b_above, 0), axis=0)
    return prefix, rank


@triton.jit(do_not_specialize=["T", "K"])
def count_digits_kernel(
    scores_ptr,
    counts_ptr,
    T,
    K,
    stride_h,
    BITS: tl.constexpr,
    DIGITS: tl.constexpr,
    DIGIT: tl.constexpr,
    BT: tl.constexpr,
):
    i_h = tl.program_id(1).to(tl.int64)
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    m_t = o_t < T
    p_counts = counts_ptr + i_h * (DIGITS << BITS)
    prefix, _ = search(p_counts, K, BITS, DIGIT)
    b_key = order_key(tl.load(scores_ptr + i_h * stride_h + o_t, mask=m_t, other=0.0))
    if DIGIT > 0:
        m_t = m_t & ((b_key >> (32 - BITS * DIGIT)) == prefix)
    b_digit = (b_key >> (32 - BITS * (DIGIT + 1))) & ((1 << BITS) - 1)
    b_counts = tl.histogram(b_digit.to(tl.int32), 1 << BITS, mask=m_t)
    o_d = tl.arange(0, 1 << BITS)
    tl.atomic_add(p_counts + DIGIT * (1 << BITS) + o_d, b_counts, mask=b_counts > 0, sem="relaxed")


@triton.jit
def compare(scores_ptr, p_counts, T, K, i_t, BITS: tl.constexpr, DIGITS: tl.constexpr, BT: tl.constexpr):
    o_t = i_t * BT + tl.arange(0, BT)
    m_t = o_t < T
    worst, missing = search(p_counts, K, BITS, DIGITS)
    b_key = order_key(tl.load(scores_ptr + o_t, mask=m_t, other=0.0))
    return o_t, (b_key > worst) & m_t, (b_key == worst) & m_t, missing


@triton.jit(do_not_specialize=["T", "K"])
def count_chosen_kernel(
    scores_ptr, counts_ptr, blocks_ptr, T, K, stride_h, BITS: tl.constexpr, DIGITS: tl.constexpr, BT: tl.constexpr
):
    i_t = tl.program_id(0)
    i_h = tl.program_id(1).to(tl.int64)
    p_counts = counts_ptr + i_h * (DIGITS << BITS)
    _, above, equal, _ = compare(scores_ptr + i_h * stride_h, p_counts, T, K, i_t, BITS, DIGITS, BT)
    p_blocks = blocks_ptr + (i_h * tl.num_programs(0) + i_t) * 2
    tl.store(p_blocks, tl.sum(above.to(tl.int32), axis=0))
    tl.store(p_blocks + 1, tl.sum(equal.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["T", "K"])
def scatter_chosen_kernel(
    scores_ptr,
    counts_ptr,
    blocks_ptr,
    out_ptr,
    T,
    K,
    stride_h,
    BITS: tl.constexpr,
    DIGITS: tl.constexpr,
    BT: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    i_t = tl.program_id(0)
    i_h = tl.program_id(1).to(tl.int64)
    o_b = tl.arange(0, BLOCKS)
    p_blocks = blocks_ptr + i_h * tl.num_programs(0) * 2 + o_b * 2
    above_before = tl.sum(tl.load(p_blocks, mask=o_b < i_t, other=0), axis=0)
    equal_before = tl.sum(tl.load(p_blocks + 1, mask=o_b < i_t, other=0), axis=0)
    p_counts = counts_ptr + i_h * (DIGITS << BITS)
    o_t, above, equal, missing = compare(scores_ptr + i_h * stride_h, p_counts, T, K, i_t, BITS, DIGITS, BT)
    chosen = above | (equal & (equal_before + tl.cumsum(equal.to(tl.int32), axis=0) <= missing))
    first = above_before + tl.minimum(equal_before, missing)
    o_out = first + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(out_ptr + i_h * K + o_out, o_t.to(tl.int64), mask=chosen)


def select_top_triton(scores: Tensor, count: int) -> Tensor:
    """See `select.select_top`."""
    heads, length = scores.shape
    if count in (0, length):
        return torch.arange(count, device=scores.device).expand(heads, -1)
    scores = scores.float() if scores.stride(1) == 1 else scores.float().contiguous()
    blocks = triton.cdiv(length, BLOCK_T)
    counts = scores.new_zeros((heads, DIGITS, 1 << BITS), dtype=torch.int32)
    in_blocks = torch.empty((heads, blocks, 2), dtype=torch.int32, device=scores.device)
    out = torch.empty((heads, count), dtype=torch.int64, device=scores.device)
    grid, shared = (blocks, heads), {"BITS": BITS, "DIGITS": DIGITS, "BT": BLOCK_T, "num_warps": 8}
    for digit in range(DIGITS):
        count_digits_kernel[grid](scores, counts, length, count, scores.stride(0), DIGIT=digit, **shared)
    count_chosen_kernel[grid](scores, counts, in_blocks, length, count, scores.stride(0), **shared)
    scatter_chosen_kernel[grid](
        scores,
        counts,
        in_blocks,
        out,
        length,
        count,
        scores.stride(0),
        BLOCKS=triton.next_power_of_2(blocks),
        **shared,
    )
    return out
