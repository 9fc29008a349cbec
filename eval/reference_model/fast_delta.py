"""The chunked gated delta rule of transformers, arranged for a fast backward pass on the CPU.

Same maths as `torch_chunk_gated_delta_rule` (arXiv 2412.06464, section 3). Chunks are unbound and stacked instead of
being written into slices: the gradient of a slice is a zero tensor of the full size, which makes the backward pass
of the original quadratic in the number of chunks.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5


def chunk_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk_size: int = 32, **_: Any
) -> tuple[Tensor, None]:
    """Training form: no initial state, no final state. Shapes as in transformers, `[B, T, heads, dim]`, float32."""
    batch, length, key_heads, key_dim = key.shape
    value_heads, value_dim = value.shape[-2:]
    pad = -length % chunk_size
    groups = value_heads // key_heads

    def chunks(x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        x = F.pad(x, (0, 0, 0, pad)) if pad else x
        return x.reshape(batch, x.shape[1], -1, chunk_size, x.shape[-1])

    query = chunks(F.normalize(query, dim=-1, eps=1e-6) * key_dim**-0.5)
    key = chunks(F.normalize(key, dim=-1, eps=1e-6))
    value, gates = chunks(value), chunks(torch.stack([beta, g], dim=-1))
    beta, decay = gates[..., :1], gates[..., 1].cumsum(-1)

    causal = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=g.device).tril()
    pairwise = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~causal, float("-inf")).exp()
    products = torch.cat([key, query], dim=-2) @ key.transpose(-1, -2)
    products = products.repeat_interleave(groups, dim=1)
    system = products[..., :chunk_size, :] * pairwise * beta
    within = products[..., chunk_size:, :] * pairwise

    query, key = query.repeat_interleave(groups, dim=1), key.repeat_interleave(groups, dim=1)
    decay_in = decay.exp().unsqueeze(-1)
    right = torch.cat([value * beta, key * (beta * decay_in)], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    read = torch.cat([solved[..., value_dim:], query * decay_in], dim=-2).unbind(2)
    new_values = solved[..., :value_dim].unbind(2)
    write = (key * (decay[..., -1:] - decay).exp().unsqueeze(-1)).transpose(-1, -2).unbind(2)
    carry = decay[..., -1].exp()[..., None, None].unbind(2)

    state = value.new_zeros(batch, value_heads, key_dim, value_dim)
    written, read_out = [], []
    for read_c, value_c, write_c, carry_c in zip(read, new_values, write, carry, strict=True):
        old = read_c @ state
        new = value_c - old[..., :chunk_size, :]
        written.append(new)
        read_out.append(old[..., chunk_size:, :])
        state = state * carry_c + write_c @ new
    out = torch.stack(read_out, dim=2) + within @ torch.stack(written, dim=2)
    return out.flatten(2, 3)[:, :, :length].transpose(1, 2), None


@contextlib.contextmanager
def fast_delta_rule() -> Iterator[None]:
    """Use the fast form in every Qwen3.5 GDN layer while the context lasts."""
    original = modeling_qwen3_5.torch_chunk_gated_delta_rule
    modeling_qwen3_5.torch_chunk_gated_delta_rule = chunk_gated_delta_rule
    try:
        yield
    finally:
        modeling_qwen3_5.torch_chunk_gated_delta_rule = original
