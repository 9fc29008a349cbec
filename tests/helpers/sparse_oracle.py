"""The oracle of sparse attention, on explicit tensors: hidden states of all tokens, kept tokens given, and no cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from gatesight_hf import GateSightCache
from gatesight_hf.entries.view import named_arguments

from .models import tiny_model
from .oracle import assert_same, evicted_of
from .running import forward, left_padded, padded, random_ids, steps

CONTEXT, BUDGET, RATIO, WIDTH, ROTARY = 43, 8, 4, 16, 8
LENGTHS = (CONTEXT, 17, 5)


def eager(**options: Any) -> Any:
    model = tiny_model("qwen4_exp", **options)
    model.set_attn_implementation("eager")
    return model


def row_of(length: int) -> Tensor:
    return random_ids(length, seed=length)


def questions_of(count: int, length: int) -> list[Tensor]:
    return [random_ids(length, seed=100 + row) for row in range(count)]


def norm(states: Tensor, module: Any) -> Tensor:
    return states * (states.square().mean(-1, keepdim=True) + module.eps).rsqrt() * (1 + module.weight)


def rope(states: Tensor, positions: Tensor) -> Tensor:
    """Of `[n, ..., channels]`, at `[n]`: channel i of the first 8 turns with channel i + 4."""
    angles = positions[:, None] / 10000.0 ** (torch.arange(0, ROTARY, 2) / ROTARY)
    cos, sin = (table.view(len(positions), *[1] * (states.ndim - 2), -1) for table in (angles.cos(), angles.sin()))
    a, b = states[..., : ROTARY // 2], states[..., ROTARY // 2 : ROTARY]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, states[..., ROTARY:]], dim=-1)


def attend(module: Any, hidden: Tensor, new: int, kept: list[int], context: int) -> Tensor:
    """What an attention layer gives its last `new` tokens, `[new, hidden size]`, of one row without padding.

    Args:
        module: Its weights are read.
        hidden: `[tokens, hidden size]`, the layer's inputs so far.
        new: Tokens of the forward.
        kept: What later tokens see of the context.
        context: Its tokens, which all see each other.
    """
    total, width, index = len(hidden), module.head_dim, module.indexer
    ratio, blocks_at_most = index.compress_ratio, index.token_budget // index.compress_ratio
    places = torch.arange(total)
    queries, gate = module.q_proj(hidden).view(total, -1, 2 * width).chunk(2, dim=-1)
    queries = rope(norm(queries, module.q_norm), places)
    keys = rope(norm(module.k_proj(hidden).view(total, -1, width), module.k_norm), places)
    keys = keys.repeat_interleave(module.num_key_value_groups, dim=1)
    values = module.v_proj(hidden).view(total, -1, width).repeat_interleave(module.num_key_value_groups, dim=1)
    projected = index.index_qk_proj(hidden).view(total, -1, WIDTH)
    index_queries, index_keys = rope(norm(projected[:, :-1], index.q_layernorm), places), projected[:, -1]
    outputs = []
    for t in range(total - new, total):
        seen = [s for s in range(t + 1) if t < context or s >= context or s in kept]
        whole = len(seen) // ratio
        attended = seen[whole * ratio :]
        if whole:
            blocks = torch.tensor(seen[: whole * ratio]).view(whole, ratio)
            block_keys = rope(norm(index_keys[blocks].mean(1), index.k_layernorm), blocks[:, 0])
            scores = (index_queries[t] @ block_keys.T).relu().sum(0)
            attended = attended + blocks[scores.topk(min(blocks_at_most, whole)).indices].flatten().tolist()
        mask = torch.full((total,), -torch.inf)
        mask[attended] = 0
        weights = (torch.einsum("hd,shd->hs", queries[t], keys) * width**-0.5 + mask).softmax(-1)
        outputs.append(module.o_proj((torch.einsum("hs,shd->hd", weights, values) * gate[t].sigmoid()).flatten()))
    return torch.stack(outputs)


def kept_of(cache: GateSightCache, row: int, length: int) -> list[list[int]]:
    """Tokens of a row that each layer keeps, the same for all heads."""
    gone = evicted_of(cache, row, length)
    assert all(torch.equal(of_layer, of_layer[:1].expand_as(of_layer)) for of_layer in gone)
    return [(~of_layer[0]).nonzero().flatten().tolist() for of_layer in gone]


@contextmanager
def explicit(model: Any, kept: list[list[int]], *contexts: int) -> Iterator[Any]:
    """Have `attend` give the outputs of the attention layers of one run of one row, which starts here.

    `contexts` are the layers' own, or one for both.
    """
    modules = [layer.self_attn for layer in model.model.layers if hasattr(layer, "self_attn")]

    def hook_of(of_layer: list[int], context: int) -> Any:
        history: list[Tensor] = []

        def hook(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
            history.append(named_arguments(args, kwargs)["hidden_states"][0])
            return attend(module, torch.cat(history), len(history[-1]), of_layer, context)[None], None

        return hook

    hooks = map(hook_of, kept, contexts if len(contexts) == 2 else contexts * 2)
    handles = [m.register_forward_hook(hook, with_kwargs=True) for m, hook in zip(modules, hooks, strict=True)]
    yield DynamicCache(config=model.config)
    for handle in handles:
        handle.remove()


def check_rows(model: Any, plain: Any, cache: GateSightCache, rows: list[Tensor], new: list[Tensor]) -> None:
    """Direct forwards of a question and generation, row by row against the oracle."""
    ids, mask = left_padded(rows)
    question = torch.cat(new)
    whole, whole_mask = torch.cat([ids, question], 1), torch.cat([mask, torch.ones_like(question)], 1)
    logits = forward(model, question, cache.fork(), **padded(whole_mask, question.shape[1]))
    tokens, step_logits = steps(model, whole, cache.fork(), tokens=6, attention_mask=whole_mask)
    for r, (row, asked) in enumerate(zip(rows, new, strict=True)):
        kept = kept_of(cache, r, row.shape[1])
        with explicit(plain, kept, row.shape[1]) as fresh:
            expected = forward(plain, torch.cat([row, asked], 1), fresh)
            assert_same(logits[r : r + 1], expected[:, row.shape[1] :])
        with explicit(plain, kept, row.shape[1]) as fresh:
            expected_tokens, expected_logits = steps(plain, torch.cat([row, asked], 1), fresh, tokens=6)
        assert_same(step_logits[r : r + 1], expected_logits)
        assert torch.equal(tokens[r : r + 1], expected_tokens)
