"""The scores of TriAttention for the keys of a `dump_kvpress.py` file, from its authors' own code.

Nothing of their code is here: it is imported from a checkout of https://github.com/WeianMao/triattention, of which the
folder triattention/ with methods/ and common/ is enough. It runs in the virtual environment of kvpress:

    git clone https://github.com/WeianMao/triattention
    kvpress-venv/bin/python eval/compare_kvpress/dump_triattention.py --triattention triattention --dump kvpress-dump

Reads kvpress.safetensors, kvpress.json and model/config.json of `--dump` and adds to it triattention.safetensors.
L layers, Hq query heads, H KV heads, T tokens, F = d / 2 frequencies; float32:

    stats.q_mean_real, stats.q_mean_imag    [L, Hq, F]  E[q], pairs (f, f + F) of pre-RoPE queries as complex numbers
    stats.q_abs_mean                        [L, Hq, F]  E|q|
    offsets                                 [17]        1, 2, 4 … 65536
    scores.{name}                           [L, Hq, T]  per query head, at position T; name: mean, max (over offsets),
                                                        no_mlr (E|q| in place of E|q| - |E[q]|), no_trig (norms only)
    kept.per_layer_head                     [L, H, T]   bool: half the tokens, each layer and KV head on its own:
                                                        scores normalised per query head, the largest of the group

The statistics are those of the dumped queries. They are not taken from the authors' calibrate.py, which leaves out the
q_norm of Qwen3.
"""

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

VARIANTS: dict[str, dict[str, Any]] = {
    "mean": {},
    "max": {"score_aggregation": "max"},
    "no_mlr": {"disable_mlr": True},
    "no_trig": {"disable_trig": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the scores of TriAttention for the keys of a dump.")
    parser.add_argument("--triattention", type=Path, required=True, help="checkout of the authors' repository")
    parser.add_argument("--dump", type=Path, required=True, help="folder that dump_kvpress.py has written")
    args = parser.parse_args()
    sys.path.insert(0, str(args.triattention))
    pruning = importlib.import_module("triattention.methods.pruning_utils")
    triattention = importlib.import_module("triattention.methods.triattention")

    tensors = load_file(args.dump / "kvpress.safetensors")
    description = json.loads((args.dump / "kvpress.json").read_text())
    layers, heads = description["sizes"]["layers"], description["sizes"]["query_heads"]
    tokens = description["sizes"]["tokens"]
    keys = [tensors[f"layers.{i}.keys"] for i in range(layers)]

    stats = {}
    for layer in range(layers):
        for head in range(heads):
            query = pruning.to_complex_pairs(tensors[f"layers.{layer}.queries_pre_rope"][0, head])
            stats[layer, head] = pruning.HeadFrequencyStats(query.mean(dim=0), query.abs().mean(dim=0))

    def compressor(stats_path: Path, **options: Any) -> Any:
        """Their class, as after a prefill of `tokens` tokens that may all be evicted."""
        config = triattention.TriAttentionConfig(
            stats_path=stats_path,
            model_path=args.dump / "model",
            device=torch.device("cpu"),
            dtype=keys[0].dtype,
            budget=tokens // 2,
            allow_prefill_compression=True,
            count_prompt_tokens=True,
            **options,
        )
        method = triattention.TriAttention(config)
        method.absolute_position, method.cache_positions = tokens, list(range(tokens))
        return method

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stats.pt"
        rope = "yarn" if description["yarn"] else "default"
        pruning.save_head_frequency_stats(
            path, list(stats), stats, {"head_dim": keys[0].shape[-1], "rope_style": "half", "rope_type": rope}
        )
        methods = {name: compressor(path, **options) for name, options in VARIANTS.items()}
        selector = compressor(path, per_layer_perhead_pruning=True, normalize_scores=True)

    positions = torch.arange(tokens)
    result: dict[str, Tensor] = {"offsets": selector.offsets}
    for name, method in methods.items():
        # In their class this rebuilt rotary embedding undoes RoPE; wrong frequencies would give wrong scores.
        assert torch.allclose(method.omega, tensors["rope.inv_freq"]), "their RoPE is not the one of the model"
        scores = [method._compute_layer_head_scores(keys[i], positions, i) for i in range(layers)]
        result[f"scores.{name}"] = torch.stack(scores)
    indices = selector.compute_keep_indices([(k, k) for k in keys])
    result["kept.per_layer_head"] = torch.zeros(*indices.shape[:2], tokens).scatter(2, indices, 1).bool()
    means = torch.stack([value.q_mean_complex for value in stats.values()]).unflatten(0, (layers, heads))
    result["stats.q_mean_real"], result["stats.q_mean_imag"] = means.real.contiguous(), means.imag.contiguous()
    result["stats.q_abs_mean"] = torch.stack([value.q_abs_mean for value in stats.values()]).unflatten(
        0, (layers, heads)
    )
    save_file(result, args.dump / "triattention.safetensors")
    print(f"{len(result)} tensors in {args.dump}")


if __name__ == "__main__":
    main()
