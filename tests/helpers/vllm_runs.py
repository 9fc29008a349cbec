"""Tiny models that vLLM runs on CPUs, and what its answers are measured by."""

from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams

from gatesight_hf import GateSightCache

from .models import EXPERTS, FAMILIES, SHARED

#: Tokens of a context, and of a step.
CONTEXT, STEP = 1024, 512
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1, detokenize=False)
#: So few blocks that sessions make room and children are preempted.
SIZES = {"max_model_len": 2048, "max_num_seqs": 8, "max_num_batched_tokens": STEP, "num_gpu_blocks_override": 48}


def tiny(family: str, kv_heads: int = 2) -> Any:
    """Head sizes that vLLM's CPU kernels know: 64; in bf16."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8}
    attention = {"num_attention_heads": 4, "num_key_value_heads": kv_heads, "head_dim": 64}
    attention |= {"max_position_embeddings": 8192}
    linear = {f"linear_num_{kind}_heads": n for kind, n in (("key", 2), ("value", 4))}
    linear |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4}
    model_class, config_class = FAMILIES[family]
    sizes |= {} if family == "qwen3_5" else {**EXPERTS, **SHARED}
    model = model_class(config_class(**sizes, **attention, **linear, tie_word_embeddings=False))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(4)  # unlike tokens, so that what is evicted matters
    return model.bfloat16().eval().requires_grad_(False)


def scheduler(engine: Any) -> Any:
    return engine.llm.llm_engine.engine_core.engine_core.scheduler


def free_blocks(engine: Any) -> int:
    return scheduler(engine).kv_cache_manager.block_pool.get_num_free_blocks()


def ordinary(engine: Any, context: list[int], questions: list[list[int]]) -> list[Any]:
    """Outputs of requests one by one, whose context ran as a session's does.

    That matters bit by bit. With prefix caching a prompt has a step that ends with its last whole block but one token,
    so that here the context runs as a prompt of its own, and then stands in the cache.
    """
    engine.llm.reset_prefix_cache()
    once = SamplingParams(temperature=0, max_tokens=1)
    prompts = [{"prompt_token_ids": context + question} for question in questions]
    engine.llm.generate([{"prompt_token_ids": context}], once, use_tqdm=False)
    return [engine.llm.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in prompts]


def ids(length: int, seed: int) -> list[int]:
    return torch.randint(2, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def answer(output: Any) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities."""
    tokens = list(output.outputs[0].token_ids)
    pairs = zip(tokens, output.outputs[0].logprobs, strict=True)
    return tokens, [found[token].logprob for token, found in pairs]


def teacher_forced(model: Any, cache: Any, question: list[int], tokens: list[int]) -> Tensor:
    """Log-probabilities `[n]` that transformers gives an answer, after the context that `cache` holds."""
    new = torch.tensor([question + tokens[:-1]])
    logits = model(new, past_key_values=cache).logits[0, len(question) - 1 :].float().log_softmax(-1)
    return logits[torch.arange(len(tokens)), torch.tensor(tokens)]


def against(model: Any, cache: GateSightCache, output: Any, question: list[int]) -> Tensor:
    """|Δ log-probability| `[n]` of vLLM's answer in transformers."""
    tokens, logprobs = answer(output)
    return (teacher_forced(model, cache.fork(), question, tokens) - torch.tensor(logprobs)).abs()


def prefilled(model: Any, context: list[int], scorer: Any, kept_fraction: float, **options: Any) -> GateSightCache:
    """A cache that has seen a context in the steps of `SIZES`."""
    cache = GateSightCache(scorer, model, kept_fraction, **options)
    for start in range(0, len(context), STEP):
        model(torch.tensor([context[start : start + STEP]]), past_key_values=cache)
    return cache
