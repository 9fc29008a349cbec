"""Signals and output gates once more, in float64, from the hidden states that a layer was given."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gatesight_hf.entries.view import named_arguments


@contextmanager
def hidden_states(modules: list[nn.Module]) -> Iterator[list[list[Tensor]]]:
    """What each module is given, chunk by chunk."""
    seen: list[list[Tensor]] = [[] for _ in modules]

    def hook_of(chunks: list[Tensor]) -> Any:
        return lambda module, args, kwargs: chunks.append(named_arguments(args, kwargs)["hidden_states"])

    handles = [m.register_forward_pre_hook(hook_of(c), with_kwargs=True) for m, c in zip(modules, seen, strict=True)]
    yield seen
    for handle in handles:
        handle.remove()


def recomputed(gdn: Any, hidden: Tensor) -> Tensor:
    """β, g and ‖v‖ `[B, T, 3, HV]` of a whole context in float64, step by step as the layer's own forward has them."""
    gdn, hidden = copy.deepcopy(gdn).double(), hidden.double()
    batch, length, _ = hidden.shape
    if hasattr(gdn, "in_proj_qkvz"):
        parts = gdn.fix_query_key_value_ordering(gdn.in_proj_qkvz(hidden), gdn.in_proj_ba(hidden))
        q, k, v, _, b, a = (part.reshape(batch, length, -1) for part in parts)
        mixed = torch.cat([q, k, v], dim=-1)
    elif hasattr(gdn, "in_proj_qkv"):
        mixed, b, a = gdn.in_proj_qkv(hidden), gdn.in_proj_b(hidden), gdn.in_proj_a(hidden)
    else:
        mixed = torch.cat([gdn.q_proj(hidden), gdn.k_proj(hidden), gdn.v_proj(hidden)], dim=-1)
        b, a = gdn.b_proj(hidden), gdn.a_proj(hidden) if hasattr(gdn, "a_proj") else None
    convolved = F.silu(gdn.conv1d(mixed.transpose(1, 2))[..., :length]).transpose(1, 2)
    heads = b.shape[-1]
    size = getattr(gdn, "head_v_dim", None) or gdn.head_dim
    value = convolved[..., -heads * size :].reshape(batch, length, heads, size)
    beta = torch.sigmoid(b) * (2 if getattr(gdn, "allow_neg_eigval", False) else 1)
    if a is not None:
        decay = -torch.exp(gdn.A_log) * F.softplus(a + gdn.dt_bias)
    else:
        decay = decay_of_channels(gdn.forget_gate, hidden).mean(-1)
    return torch.stack([beta, decay, value.pow(2).sum(-1).sqrt()], dim=2)


def decay_of_channels(gate: Any, hidden: Tensor) -> Tensor:
    """Log-decay of Kimi Delta Attention `[B, T, HV, channels]`."""
    projected = gate.f_proj(hidden) if hasattr(gate, "f_proj") else gate.f_b_proj(gate.f_a_proj(hidden))
    given = (projected + gate.dt_bias).unflatten(-1, (gate.num_heads, -1))
    rate = torch.exp(gate.A_log).view(-1, 1)
    if getattr(gate, "safe_gate", False):
        return gate.lower_bound * torch.sigmoid(rate * given)
    return -rate * F.softplus(given)


def recomputed_gate(attention: Any, hidden: Tensor) -> Tensor | None:
    """Mean of sigmoid(gate) per token `[B, T]`; None without a gate."""
    if hasattr(attention, "g_proj"):
        return torch.sigmoid(attention.g_proj(hidden)).mean(-1)
    q_proj = attention.q_proj(hidden).view(*hidden.shape[:-1], attention.config.num_attention_heads, -1)
    if q_proj.shape[-1] == (getattr(attention, "qk_head_dim", None) or attention.head_dim):
        return None
    return torch.sigmoid(q_proj.chunk(2, dim=-1)[1]).mean((-1, -2))
