"""What costs are measured on: a slice of Qwen3.8-27B with random weights; and the least work of each phase."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from gatesight_hf import Estimator, EstimatorConfig, GateSightCache
from gatesight_hf.cache import prefill
from gatesight_hf.models import HybridSpec, attach
from gatesight_hf.scoring import Needs, Prefill, Recorder
from gatesight_hf.scoring.features import age_features

#: Layers of the slice, three GDN layers and the attention layer above them, and of the whole model.
SLICE_LAYERS, WHOLE_LAYERS = 4, 64
#: Width of the estimator's hidden layer.
HIDDEN = 64
#: Tokens that statistics of inputs and queries are taken from.
CALIBRATION_TOKENS = 256


def config(layers: int, tiny: bool = False, narrow: int = 1) -> Qwen3_5TextConfig:
    """Qwen3.8-27B's layers, or very small ones, with a small vocabulary; hidden and MLP sizes divided by `narrow`."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    rope |= {"mrope_section": [2, 1, 1] if tiny else [11, 11, 10], "mrope_interleaved": True}
    gdn, attention = (16, 32) if tiny else (128, 256)
    return Qwen3_5TextConfig(
        vocab_size=128 if tiny else 4096,
        hidden_size=64 if tiny else 5120 // narrow,
        intermediate_size=96 if tiny else 17408 // narrow,
        num_hidden_layers=layers,
        num_attention_heads=6 if tiny else 24,
        num_key_value_heads=2 if tiny else 4,
        head_dim=attention,
        linear_conv_kernel_dim=4,
        linear_num_key_heads=2 if tiny else 16,
        linear_num_value_heads=4 if tiny else 48,
        linear_key_head_dim=gdn,
        linear_value_head_dim=gdn,
        max_position_embeddings=262144,
        rope_parameters=rope,
    )


def build_slice(tiny: bool, dtype: torch.dtype, device: torch.device, seed: int, narrow: int = 1) -> Any:
    """The slice with seeded weights, made on the device: activations of order 1, slow to fast decays."""
    of_slice = config(SLICE_LAYERS, tiny, narrow)
    with torch.device("meta"):
        model: Any = Qwen3_5ForCausalLM(of_slice)
    model = model.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    # Its frequencies are computed when it is made, and float32 in models of any dtype.
    model.model.rotary_emb = type(model.model.rotary_emb)(of_slice).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            # Exp of it below 1: with fast decays the states would hold denormal numbers, which make CPUs slow.
            parameter.normal_(-2.0, 0.5, generator=generator)
        elif name.endswith("dt_bias") or name.endswith("linear_attn.norm.weight"):
            parameter.normal_(1.0, 0.1, generator=generator)
        elif parameter.ndim == 1:
            parameter.normal_(0.0, 0.1, generator=generator)  # norms of this family add one
        elif "conv1d" in name:
            parameter.normal_(0.0, 0.5, generator=generator)
        elif "embed" in name:
            parameter.normal_(generator=generator)
        else:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    return model


def model_name(tiny: bool, narrow: int = 1) -> str:
    """Of what `build_slice` makes, for results."""
    if tiny:
        return "very small random model"
    narrower = f", hidden and MLP sizes divided by {narrow}" if narrow > 1 else ""
    return f"Qwen3.8-27B, {SLICE_LAYERS} of {WHOLE_LAYERS} layers{narrower}"


def random_ids(model: Any, length: int, seed: int) -> Tensor:
    """`[1, length]` on the model's device."""
    ids = torch.randint(2, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))
    return ids.to(model.device)


def word_tokenizer(text: str, add_special_tokens: bool = True) -> SimpleNamespace:
    """For KVzip's prompts: a token a word, by its length, which is near what a real vocabulary makes of them."""
    return SimpleNamespace(input_ids=[2 + len(word) for word in text.split()])


class SliceEstimator(Estimator):
    """An estimator of the whole model's size on a slice.

    All but the first attention layer of Qwen3.8-27B read six GDN layers, two runs of three, which makes 867 inputs; the
    slice has one run. This one names it twice in its window and so has as many inputs, which are read as those of six
    layers would be, though the second reading may be served by a processor's cache. No trained estimator would pass the
    check with such a window; nothing else differs from `Estimator`.
    """

    def check(self, spec: HybridSpec) -> None:
        if spec.fingerprint != self.config.fingerprint:
            raise ValueError(f"This benchmark's estimator is not for {spec.describe()}.")


def window_signals(scorer: Estimator, recorded: Prefill, ordinal: int, row: int = 0) -> list[Tensor]:
    """`[T, 3, HV]` of each GDN layer that attention layer `ordinal` reads, in the order of the inputs."""
    return [recorded.signals[i][row] for i in scorer.config.gdn_windows[ordinal]]


def inputs_of(scorer: Estimator, recorded: Prefill, ordinal: int, start: int, stop: int) -> Tensor:
    """Inputs `[stop - start, F]`, float32, as the format of estimators says, whatever way the scorer takes."""
    blocks = [of_layer[start:stop].flatten(1).float() for of_layer in window_signals(scorer, recorded, ordinal)]
    return torch.cat([*blocks, age_features(start, stop, recorded.lengths[0], blocks[0].device)], dim=-1)


def slice_estimator(model: Any, seed: int) -> SliceEstimator:
    """Random MLPs whose inputs are standardised by what a short prefill gives, as trained ones are."""
    spec = HybridSpec.from_config(model.config)
    of_slice = EstimatorConfig(
        base_model="random",
        model_type=spec.model_type,
        fingerprint=spec.fingerprint,
        num_key_value_heads=spec.num_key_value_heads,
        num_value_heads=spec.num_value_heads,
        gdn_windows=(2 * tuple(range(len(spec.gdn_layers))),),
        hidden_size=HIDDEN,
    )
    generator = torch.Generator().manual_seed(seed)
    shapes = of_slice.tensor_shapes()
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        if name.endswith(("weight_in", "weight_out")):
            tensor *= shapes[name][1] ** -0.5
        elif name.endswith("input_std"):
            tensor.fill_(1.0)
    scorer = SliceEstimator(of_slice, tensors)
    with attach(model):
        cache = GateSightCache(Recorder(Needs(signals=True)), model, allocation="flat")
        prefill(model, random_ids(model, CALIBRATION_TOKENS, seed), cache)
        recorded = cache.prefill()
    inputs = inputs_of(scorer, recorded, 0, 0, CALIBRATION_TOKENS).cpu()
    statistics = {"layers.0.input_mean": inputs.mean(0), "layers.0.input_std": inputs.std(0).clamp_min(1e-3)}
    return SliceEstimator(of_slice, {**tensors, **statistics})


# -- the least work ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What a phase cannot do without.

    Attributes:
        bytes: Read and written, each number once.
        flop: Operations on numbers; an exponential, a root or a division counts as one.
    """

    bytes: int
    flop: int


def signals_work(spec: HybridSpec, tokens: int, itemsize: int, kernel: int) -> Work:
    """Signals of all GDN layers.

    Bytes: for every token and layer the HV·D value channels, b and a are read, and 3·HV numbers written. FLOPs: a
    channel takes 2·kernel in the convolution, 3 in SiLU, 2 in the sum of squares; a head 3 for β, 6 for g, 1 for ‖v‖.
    """
    heads, channels = spec.num_value_heads, spec.num_value_heads * spec.value_head_dim
    count = len(spec.gdn_layers) * tokens
    return Work(count * (channels + 5 * heads) * itemsize, count * (channels * (2 * kernel + 5) + 10 * heads))


def gates_work(spec: HybridSpec, tokens: int, itemsize: int) -> Work:
    """Mean output gates: heads·D logits are read for every token and attention layer; 4 FLOPs each (σ and the sum)."""
    logits = spec.num_attention_layers * tokens * spec.num_attention_heads * spec.head_dim
    return Work(logits * itemsize, 4 * logits)


def scoring_work(estimator: EstimatorConfig, tokens: int, itemsize: int) -> Work:
    """Scores and selection.

    Bytes: for every token and attention layer its F - 3 signals are read (ages are computed), and H float32 scores
    written, and read by the selection. FLOPs: 2·F·H·W for the first layer of the MLPs and 2·H·W for the second.
    """
    heads, width, total = estimator.num_key_value_heads, estimator.hidden_size, Work(0, 0)
    for j in range(estimator.num_layers):
        inputs = estimator.input_size(j)
        signals = inputs - len(estimator.ages)
        total = Work(
            total.bytes + tokens * (signals * itemsize + 2 * heads * 4),
            total.flop + tokens * 2 * heads * width * (inputs + 1),
        )
    return total


def compaction_work(spec: HybridSpec, kept: int, itemsize: int) -> Work:
    """Of `kept` entries per head: their keys and values are read and written, and their int64 slots read."""
    entries = spec.num_attention_layers * spec.num_key_value_heads * kept
    return Work(entries * (2 * 2 * spec.head_dim * itemsize + 8), 0)


def prefill_work(model: Any, spec: HybridSpec, tokens: int) -> Work:
    """The forward: weights are read once; nothing else, which is little beside the FLOPs.

    FLOPs: 2 for every weight of the layers' matrices and token; 4·heads·D for every attention layer and pair of a query
    and a key that it sees; 7·HV·Dk·Dv for every GDN layer and token (the delta rule as a recurrence: decay 1, read 2,
    update 2, output 2).
    """
    matrices = [p for name, p in model.model.layers.named_parameters() if p.ndim == 2 and "conv1d" not in name]
    pairs = tokens * (tokens + 1) // 2
    attention = 4 * spec.num_attention_layers * spec.num_attention_heads * spec.head_dim * pairs
    states = spec.num_value_heads * spec.key_head_dim * spec.value_head_dim
    delta = 7 * len(spec.gdn_layers) * states * tokens
    weights = sum(p.nbytes for p in matrices)
    return Work(weights, 2 * tokens * sum(p.numel() for p in matrices) + attention + delta)


def signal_bytes_per_token(spec: HybridSpec, itemsize: int) -> int:
    """β, g and ‖v‖ of all GDN layers."""
    return len(spec.gdn_layers) * 3 * spec.num_value_heads * itemsize


def kv_bytes_per_token(spec: HybridSpec, itemsize: int) -> int:
    """Keys and values of all attention layers."""
    return spec.num_attention_layers * 2 * spec.num_key_value_heads * spec.head_dim * itemsize
