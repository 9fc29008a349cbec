"""The scores of kvpress on a tiny random Qwen3 model, with everything they are computed from, in one file.

kvpress needs transformers < 5.3, so this half runs in a virtual environment of its own; it imports nothing of
this project. Nothing of a method is written again here: each press runs as its users run it, and its scoring method
is wrapped to keep what it returns.

    python -m venv kvpress-venv
    kvpress-venv/bin/pip install torch kvpress==0.5.5 "transformers<5.3"
    kvpress-venv/bin/python eval/compare_kvpress/dump_kvpress.py --out kvpress-dump
    kvpress-venv/bin/python eval/compare_kvpress/dump_kvpress.py --out kvpress-dump/bf16 --dtype bfloat16
    kvpress-venv/bin/python eval/compare_kvpress/dump_kvpress.py --out kvpress-dump/yarn --yarn

`--out` receives:

    kvpress.safetensors   the tensors below
    kvpress.json          versions, sizes, and per press: class, parameters, entries kept
    model/                the model (config.json, model.safetensors), for whoever wants to run it in another version
    tokenizer-chat/       byte-level tokenizer with a chat template, and tokenizer-plain/ without; both are KVzip's

Sizes: L layers, Hq query heads, H KV heads, T context tokens, d head_dim, D hidden_size, N future positions,
C replay chunks of KVzip, q tokens of one replay. Floats are in the dtype of the model unless said otherwise.

The prefill:

    input_ids                           [1, T]  int64
    layers.{i}.hidden                   [1, T, D]      input of self_attn, after input_layernorm
    layers.{i}.keys                     [1, H, T, d]   as cached, after RoPE
    layers.{i}.values                   [1, H, T, d]
    layers.{i}.queries_pre_rope         [1, Hq, T, d]  after q_norm
    layers.{i}.queries                  [1, Hq, T, d]  after RoPE
    layers.{i}.o_proj                   [D, Hq * d]
    rope.cos, rope.sin                  [T, d]         attention scaling included, as everywhere in transformers
    rope.future_cos, rope.future_sin    [N, d]         positions T … T + N - 1, N = 512
    rope.inv_freq                       [d / 2]        float32
    rope.attention_scaling              [1]            float32

Scores, one tensor for each name under "presses" in kvpress.json:

    scores.{name}                       [L, 1, H, T]
    kept.{name}                         [L, 1, H, T]   bool; of the KVzip presses only, where layers and heads compete

More of each KVzip press (name = kvzip, kvzip_plus, kvzip_plain, kvzip_one_chunk):

    {name}.raw                          [L, 1, H, T]   scores before the sinks get the highest one
    {name}.suffix_ids                   [1, n] int64   what follows the user's text in the template
    {name}.chunks.{c}.ids               [1, m] int64   the part of the context that is rebuilt
    {name}.chunks.{c}.replay_ids        [1, q] int64   the whole input of the replay pass
    {name}.chunks.{c}.bounds            [2]    int64   start and end of the part in the context
    {name}.chunks.{c}.cos, .sin         [q, d]         of the positions of the replay
    {name}.chunks.{c}.{i}.hidden        [1, q, D]      input of self_attn
    {name}.chunks.{c}.{i}.queries       [1, Hq, q, d]  after RoPE
    {name}.chunks.{c}.{i}.keys          [1, H, q, d]   of the replay; it attends these and the cached ones
    {name}.chunks.{c}.{i}.values        [1, H, q, d]

Weights of the learned scorers, random here:

    kvzap_{linear,mlp}.layers.{i}.…     as in KVzapModel.state_dict()
    fastkvzip.{i}.…                     as in FastKVzipGate.state_dict()
"""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import torch
from kvpress.presses.fastkvzip_press import FastKVzipGate
from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel
from kvpress.utils import get_prerope_query_states
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 3, 6, 2, 32, 128
FUTURE = 512
#: Presses score nothing at ratio 0; the ratio shows in the scores of StreamingLLM and in what is kept.
RATIO = 0.5

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte: no merges, so that what KVzip encodes and joins is plain to see."""
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


def tiny_model(vocabulary: int, yarn: bool, dtype: torch.dtype) -> Qwen3ForCausalLM:
    """Random weights, changed so that attention is not flat and queries and keys are not centred on zero."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
    if yarn:
        rope |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        initializer_range=0.1,
        max_position_embeddings=1024,
        rope_parameters=rope,
        attn_implementation="sdpa",
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        # A direction that all tokens share, as in trained models: without it means of queries and keys are noise.
        model.model.embed_tokens.weight += 0.1 * torch.randn(HIDDEN)
        for layer in model.model.layers:
            for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                norm.weight.uniform_(0.5, 2.5)
            layer.input_layernorm.weight.uniform_(0.5, 1.5)
    return model.to(dtype).eval()


def attention_inputs(module: nn.Module, hidden: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Queries before and after RoPE, from the functions of kvpress and transformers."""
    before = get_prerope_query_states(module, hidden)
    after, _ = apply_rotary_pos_emb(before, before, *rope)
    return before, after


class Dump:
    """What goes into the files."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.presses: dict[str, dict[str, Any]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        assert name not in self.tensors, name
        # A copy: presses change their tensors in place, and safetensors refuses shared memory.
        self.tensors[name] = tensor.detach().clone().contiguous()

    def add_press(self, name: str, press: Any, scores: Tensor, **more: Any) -> None:
        assert scores.shape[0] == LAYERS and not scores.isnan().any(), name
        self.add(f"scores.{name}", scores)
        parameters = {field.name: getattr(press, field.name) for field in fields(press) if field.init}
        self.presses[name] = {"class": type(press).__name__, "parameters": parameters, **more}


def wrap(press: Any, method: str, seen: Callable[..., None]) -> None:
    """Call `seen(result, *args, **kwargs)` after each call of a method of this press."""
    original = getattr(press, method)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        seen(result, *args, **kwargs)
        return result

    setattr(press, method, wrapped)


@contextmanager
def nothing_masked(model: Qwen3ForCausalLM) -> Iterator[None]:
    """KVzip and Fast KVzip leave masks in the attention modules; the next press must not meet them."""
    yield
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None


def dump_prefill(dump: Dump, model: Qwen3ForCausalLM, ids: Tensor) -> None:
    """Everything that the presses read, from one prefill without a press."""
    cache, length = DynamicCache(), ids.shape[1]

    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: tuple) -> None:
        name, hidden, rope = f"layers.{module.layer_idx}", kwargs["hidden_states"], kwargs["position_embeddings"]
        before, after = attention_inputs(module, hidden, rope)
        dump.add(f"{name}.hidden", hidden)
        dump.add(f"{name}.queries_pre_rope", before)
        dump.add(f"{name}.queries", after)
        dump.add(f"{name}.keys", cache.layers[module.layer_idx].keys)
        dump.add(f"{name}.values", cache.layers[module.layer_idx].values)
        dump.add(f"{name}.o_proj", module.o_proj.weight)
        if module.layer_idx == 0:
            dump.add("rope.cos", rope[0][0])
            dump.add("rope.sin", rope[1][0])

    hooks = [layer.self_attn.register_forward_hook(hook, with_kwargs=True) for layer in model.model.layers]
    model.model(input_ids=ids, past_key_values=cache)
    for handle in hooks:
        handle.remove()

    rotary = model.model.rotary_emb
    cos, sin = rotary(dump.tensors["layers.0.hidden"], torch.arange(length, length + FUTURE).unsqueeze(0))
    dump.add("input_ids", ids)
    dump.add("rope.future_cos", cos[0])
    dump.add("rope.future_sin", sin[0])
    dump.add("rope.inv_freq", rotary.inv_freq.float())
    dump.add("rope.attention_scaling", torch.tensor([float(rotary.attention_scaling)]))


def dump_scorer(dump: Dump, name: str, press: kvpress.ScorerPress, model: Qwen3ForCausalLM, ids: Tensor) -> None:
    """A press that scores each layer from its own keys, values and hidden states."""
    scores: dict[int, Tensor] = {}

    def seen(result: Tensor, module: nn.Module, *_: Any, **__: Any) -> None:
        scores[module.layer_idx] = result.clone()

    wrap(press, "score", seen)
    cache = DynamicCache()
    with nothing_masked(model), press(model):
        model.model(input_ids=ids, past_key_values=cache)
    stacked = torch.stack([scores[i] for i in range(LAYERS)])
    dump.add_press(name, press, stacked, kept_per_head=[layer.keys.shape[2] for layer in cache.layers])


def masks(model: Qwen3ForCausalLM, length: int) -> Tensor:
    """`[L, 1, H, T]`: the entries that a press with masks has kept."""
    kept = torch.ones(LAYERS, 1, KV_HEADS, length, dtype=torch.bool)
    for i, layer in enumerate(model.model.layers):
        kept[i][tuple(layer.self_attn.masked_key_indices)] = False
    return kept


def dump_kvzip(dump: Dump, name: str, tokenizer: Path, model: Qwen3ForCausalLM, ids: Tensor, **options: Any) -> None:
    """KVzip scores after the prefill, by replaying the context in chunks."""
    press = kvpress.KVzipPress(compression_ratio=RATIO, **options)
    chunks: list[str] = []  # those replayed so far
    final: dict[str, Any] = {}

    def prepared(pairs: list[tuple[Tensor, Tensor]], *_: Any) -> None:
        dump.add(f"{name}.suffix_ids", press._suffix_ids)
        final["prefix_length"] = press.prefix_length
        final["chunks"] = len(pairs)
        for c, (part, replay) in enumerate(pairs):
            dump.add(f"{name}.chunks.{c}.ids", part)
            dump.add(f"{name}.chunks.{c}.replay_ids", replay)

    def scored(
        result: tuple[Tensor, Tensor], module: nn.Module, hidden: Tensor, keys: Tensor, values: Tensor, *rest: Any
    ) -> None:
        rope = rest[-1]["position_embeddings"]
        if module.layer_idx == 0:
            chunks.append(f"{name}.chunks.{len(chunks)}")
            dump.add(f"{chunks[-1]}.bounds", torch.tensor([press.start_idx, press.end_idx]))
            dump.add(f"{chunks[-1]}.cos", rope[0][0])
            dump.add(f"{chunks[-1]}.sin", rope[1][0])
        layer, replayed = f"{chunks[-1]}.{module.layer_idx}", hidden.shape[1]
        assert keys.shape[2] == ids.shape[1] + replayed, "the replay follows the whole context"
        dump.add(f"{layer}.hidden", hidden)
        dump.add(f"{layer}.queries", attention_inputs(module, hidden, rope)[1])
        dump.add(f"{layer}.keys", keys[:, :, -replayed:])
        dump.add(f"{layer}.values", values[:, :, -replayed:])

    def compress(model: Qwen3ForCausalLM) -> None:
        # Before and after: the sinks get their score in here, and KVzip forgets its scores right after.
        dump.add(f"{name}.raw", press.score_val)
        type(press).compress_post(press, model)
        final["scores"], final["kept"] = press.score_val.clone(), masks(model, ids.shape[1])

    wrap(press, "prepare", prepared)
    wrap(press, "score_kvzip", scored)
    press.compress_post = compress
    model.config.name_or_path = str(tokenizer)  # where KVzip looks for the tokenizer
    with nothing_masked(model), press(model):
        model.model(input_ids=ids, past_key_values=DynamicCache())
    dump.add(f"kept.{name}", final.pop("kept"))
    dump.add_press(name, press, final.pop("scores"), tokenizer=tokenizer.name, **final)


def dump_kvzap(dump: Dump, kind: str, model: Qwen3ForCausalLM, ids: Tensor) -> None:
    hidden = None if kind == "linear" else 48
    net = KVzapModel(KVzapConfig(input_dim=HIDDEN, output_dim=KV_HEADS, n_modules=LAYERS, hidden_dim=hidden))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(std=0.2)
    press = kvpress.KVzapPress(compression_ratio=RATIO, model_type=kind)
    # The press loads weights from the hub unless it holds those of this model already.
    model.config.name_or_path = "tiny"
    press.kvzap_model_name, press.kvzap_model = f"nvidia/KVzap-{kind}-tiny", net.to(model.dtype)
    for key, tensor in net.state_dict().items():
        dump.add(f"kvzap_{kind}.{key}", tensor)
    dump_scorer(dump, f"kvzap_{kind}", press, model, ids)


def dump_fastkvzip(dump: Dump, model: Qwen3ForCausalLM, ids: Tensor) -> None:
    press = kvpress.FastKVzipPress(compression_ratio=RATIO)
    press.gates = [
        FastKVzipGate(i, HIDDEN, KV_HEADS, QUERY_HEADS // KV_HEADS, dtype=model.dtype) for i in range(LAYERS)
    ]
    for i, gate in enumerate(press.gates):
        with torch.no_grad():
            for parameter in gate.parameters():
                parameter.normal_(std=0.3)
            for norm in (gate.q_norm, gate.k_norm):
                norm.weight.uniform_(0.5, 1.5)
        for key, tensor in gate.state_dict().items():
            dump.add(f"fastkvzip.{i}.{key}", tensor)
    with nothing_masked(model):
        with press(model):
            model.model(input_ids=ids, past_key_values=DynamicCache())
        dump.add("kept.fastkvzip", masks(model, ids.shape[1]))
    dump.add_press("fastkvzip", press, press.score_val)


def scorers() -> dict[str, kvpress.ScorerPress]:
    """The presses that need nothing but the prefill, by the name of their scores."""
    snapkv, expected, lagkv = kvpress.SnapKVPress, kvpress.ExpectedAttentionPress, kvpress.LagKVPress
    return {
        "snapkv": snapkv(RATIO),
        "snapkv_w16_k7": snapkv(RATIO, window_size=16, kernel_size=7),
        "keydiff": kvpress.KeyDiffPress(RATIO),
        "knorm": kvpress.KnormPress(RATIO),
        "streaming_llm": kvpress.StreamingLLMPress(RATIO),
        "expected_attention": expected(RATIO, n_future_positions=FUTURE),
        "expected_attention_e2": expected(RATIO, n_future_positions=FUTURE, epsilon=1e-2),
        "expected_attention_no_cov": expected(RATIO, n_future_positions=FUTURE, use_covariance=False),
        "expected_attention_no_vnorm": expected(RATIO, n_future_positions=FUTURE, use_vnorm=False),
        "lagkv_l32": lagkv(RATIO, lag_size=32),
        "lagkv_l32_cross": lagkv(RATIO, lag_size=32, cross_scoring=True),
        "lagkv": lagkv(RATIO),
        "lagkv_too_short": lagkv(RATIO, lag_size=160),  # fewer than two lags of tokens: no comparison is possible
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the scores of kvpress on a tiny model, and their inputs.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    parser.add_argument("--length", type=int, default=300, help="tokens of the context")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--yarn", action="store_true", help="scale RoPE with YaRN: attention scaling is not 1 then")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)

    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(args.out / "tokenizer-plain")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(args.out / "tokenizer-chat")
    vocabulary = len(tokenizer) + args.length
    model = tiny_model(vocabulary, args.yarn, getattr(torch, args.dtype))
    model.save_pretrained(args.out / "model")

    # The user turn of the template, then tokens that are all different: equal ones would tie in the first layer.
    prefix = tokenizer.encode("<|im_start|>user\n", add_special_tokens=False)
    context = len(tokenizer) + torch.randperm(args.length - len(prefix))
    ids = torch.cat([torch.tensor(prefix), context]).unsqueeze(0)

    dump = Dump()
    chat, plain = args.out / "tokenizer-chat", args.out / "tokenizer-plain"
    with torch.no_grad():
        dump_prefill(dump, model, ids)
        for name, press in scorers().items():
            dump_scorer(dump, name, press, model, ids)
        dump_kvzip(dump, "kvzip", chat, model, ids, chunk_size=128)
        dump_kvzip(dump, "kvzip_plus", chat, model, ids, chunk_size=128, kvzip_plus_normalization=True)
        dump_kvzip(dump, "kvzip_plain", plain, model, ids, chunk_size=128, layerwise=True)
        dump_kvzip(dump, "kvzip_one_chunk", chat, model, ids)
        dump_kvzap(dump, "linear", model, ids)
        dump_kvzap(dump, "mlp", model, ids)
        dump_fastkvzip(dump, model, ids)

    save_file(dump.tensors, args.out / "kvpress.safetensors")
    description = {
        "versions": {name: version(name) for name in ("kvpress", "transformers", "torch")},
        "sizes": {
            "layers": LAYERS,
            "query_heads": QUERY_HEADS,
            "kv_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "hidden_size": HIDDEN,
            "tokens": args.length,
            "future_positions": FUTURE,
        },
        "dtype": args.dtype,
        "yarn": args.yarn,
        "seed": args.seed,
        "presses": dump.presses,
    }
    (args.out / "kvpress.json").write_text(json.dumps(description, indent=2) + "\n")
    print(f"{len(dump.tensors)} tensors of {len(dump.presses)} presses in {args.out}")


if __name__ == "__main__":
    main()
