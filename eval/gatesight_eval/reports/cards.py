"""Renders `hub_cards/` from results: `python -m gatesight_eval.reports.cards`, anew when results or layouts change.

`hub_cards/<repo>/` is a Hub repo as it is pushed: the bundled estimator complete, and those of large models up to the
weights, with what their training takes at least (`eval/results/training_plans.json`).
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from gatesight_hf.commands.cli import parser
from gatesight_hf.files.cards import estimator_card, eval_entry, metadata, paragraph, render, usage
from gatesight_hf.reference import ESTIMATOR_PATH
from gatesight_hf.training.plan import text_model_without_storage, training_plan

from ..backends.methods import EMPTY, FULL
from .tables import group_means, table_header, table_row

ROOT = Path(__file__).parents[3]
TOY, PLANS = Path("eval/results/toy.json"), Path("eval/results/training_plans.json")
REFERENCE = "gatesight-reference"
_ROTARY = {
    "rope_type": "default",
    "rope_theta": 10_000_000.0,
    "partial_rotary_factor": 0.25,
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
}
_COMMON = {
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "num_attention_heads": 24,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": _ROTARY,
}
PLANNED: dict[str, dict[str, Any]] = {
    "gatesight-qwen3.8-27b": {
        "base_model": "Qwen/Qwen3.8-27B",
        "model_type": "qwen3_5_text",
        "sizes": {
            **_COMMON,
            "num_hidden_layers": 64,
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_key_value_heads": 4,
        },
        "source": "The GateSight paper gives 64 layers, 16 of them attention, 4 KV heads in groups of 6, and 48 value "
        "heads. Width and the remaining sizes are those of copies of the model's configuration in public code.",
    },
    "gatesight-qwen3.8-flash-next": {
        "base_model": "Qwen/Qwen3.8-Flash-Next",
        "model_type": "qwen4_exp_text",
        "sizes": {
            **_COMMON,
            "num_hidden_layers": 48,
            "hidden_size": 2560,
            "num_key_value_heads": 2,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 640,
            "shared_expert_intermediate_size": 640,
            "hc_count": 4,
            "hc_lowrank": 320,
            "ple_layer_ids": [2],
            "ple_embed_dim": 2560,
            "split_ngram_parts": 128,
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 128,
            "indexer_budget": 2048,
            "indexer_compress_ratio": 4,
            "output_gate_type": "sigmoid",
            "eos_token_id": 248044,
        },
        "source": "All sizes are those of copies of the model's configuration in public code; the paper gives only the "
        "indexer's: one compressed key per four tokens, attention to 2,048 tokens.",
    },
}
OPTIONS = {
    "length": 8192,
    "train-documents": 128,
    "eval-documents": 32,
    "continuations": 16,
    "continuation-tokens": 64,
}


def train_command(name: str, base_model: str) -> list[str]:
    """The words of the command that trains an estimator."""
    options = [word for option, value in OPTIONS.items() for word in (f"--{option}", str(value))]
    return ["train", "--model", base_model, "--documents", "texts/", "--out", name, *options]


def plans() -> list[dict[str, Any]]:
    """The contents of `training_plans.json`. The commands are read by the command line's own parser."""
    made = []
    for name, model in PLANNED.items():
        words = train_command(name, model["base_model"])
        text_model = text_model_without_storage(AutoConfig.for_model(model["model_type"], **model["sizes"]))
        plan = training_plan(text_model, model["base_model"], parser().parse_args(words))
        made.append({"repo": name, **model, **plan, "command": ["gatesight", *words]})
    return made


# -- cards -------------------------------------------------------------------------------------------------------------


def reference_card(metrics: Mapping[str, Any], toy: Mapping[str, Any]) -> str:
    """The card of the bundled estimator, with its evaluation on the toy suite."""
    group = toy["groups"]["gated mean"]
    run = toy["runs"][0]
    tasks = len(group["tasks"])
    data = f"toy suite, {run['asked']['length']} tokens, mean over {tasks} tasks"
    own = [("full cache", group["mean"][FULL]["1"]), ("attention cache emptied", group["mean"][EMPTY]["0"])]
    own += [(f"kept fraction {fraction}", cell) for fraction, cell in group["mean"]["gatesight"].items()]
    scores = [{"type": "accuracy", "name": f"accuracy, {name}", "value": cell["mean"]} for name, cell in own]
    backend = run["backend"]
    counted = sum(task["contexts"] for task in toy["gate"]["tasks"] if task["task"] in group["tasks"])
    evaluation = [
        "## Evaluated on the toy suite",
        paragraph(
            f"Accuracy by kept fraction on {counted} of {toy['contexts']} contexts, ± half the 95 % bootstrap "
            "interval. Contexts are scored before the questions are known; `oracle` alone knows them."
        ),
        group_means(group),
        paragraph(
            f"`gatesight evaluate --suite {run['asked']['suite']} --count {run['asked']['count']} --seeds "
            f"{run['asked']['seeds']}` on {backend['hardware']}, {backend['dtype']}, commit `{run['commit']}`, items "
            f"`{run['data']['items_sha256']}`."
        ),
    ]
    model = [
        "## The model",
        paragraph(
            "It is for the reference model that the package `gatesight_hf` carries, a small hybrid trained from "
            "scratch to retrieve from its KV cache: `gatesight_hf.reference.load_model()`. It says how faithfully "
            "entries are kept, and nothing about language."
        ),
    ]
    results = [eval_entry("gatesight-toy", data, scores)]
    return estimator_card(metrics, f"owner/{REFERENCE}", [*model, *evaluation], results)


def planned_card(plan: Mapping[str, Any]) -> str:
    """The card of an estimator that is still to be trained."""
    base, layout, sizes, bounds = plan["base_model"], plan["layout"], plan["estimator"], plan["bounds"]
    machine = plan["machine"]
    layout_rows = [
        ("layers", f"{layout['attention_layers']:,} attention, {layout['gdn_layers']:,} GDN"),
        ("KV heads of a layer", f"{layout['key_value_heads']:,}, each read by {layout['group']:,} query heads"),
        ("value heads of a GDN layer", f"{layout['value_heads']:,}"),
        ("parameters of the text model", f"{layout['parameters']:,}"),
        ("attention cache", f"{layout['cache_kib_per_token']:g} KiB per token in bf16"),
        (
            "MLPs of the estimator",
            f"{sizes['mlps']:,}, of {sizes['least_inputs']:,} to {sizes['most_inputs']:,} inputs",
        ),
        ("its parameters", f"{sizes['parameters']:,}"),
    ]
    bound_rows = [
        *((f"{step}, {bounds['documents']} documents", f"{value:g} min") for step, value in bounds["minutes"].items()),
        ("all of these", f"{bounds['minutes_in_all']:g} min"),
        ("accelerator memory", f"{bounds['accelerator_gb']:g} GB: {bounds['accelerators']} × {machine['name']}"),
        ("fit, on the CPU", f"{bounds['fit_pflop']:g} PFLOP and {bounds['fit_reads_gb']:g} GB read"),
        ("memory of the fit", f"{bounds['host_gb']:g} GB"),
        ("disk for the collected data", f"{bounds['disk_gb']:g} GB"),
    ]
    counted = (
        "Counted are the matrix products of prefill, and the weights and cache that sampling and utilities read, at "
        f"the rates of the data sheet ({machine['bf16_flops'] / 1e12:g} TFLOP/s bf16, "
        f"{machine['bytes_per_second'] / 1e12:g} TB/s, {machine['memory_bytes'] / 1e9:g} GB)."
    )
    return render(
        metadata(base),
        f"GateSight estimator for {base}",
        [
            paragraph(
                "**Weights not trained yet.** This repo holds the configuration that training will give them. Nothing "
                "here has been measured."
            ),
            "## Layout",
            _table(("what", "size"), layout_rows),
            paragraph(
                f"{plan['source']} The model itself was not at hand. Loading compares layouts and refuses an estimator "
                "for another one."
            ),
            "## Training",
            f"```bash\n{_shell(plan['command'])}\n```",
            paragraph(
                f"`texts/` holds at least {bounds['documents']} documents (.txt, or .jsonl with a `text` per line) "
                "like those that the model is to read; longer ones are cut. After a kill the same command goes on. It "
                "writes weights, metrics and the card that replaces this one."
            ),
            paragraph(
                f"No run can take less than this; expect several times the minutes. {counted} Formulas: "
                "`gatesight_hf/training/plan.py`."
            ),
            _table(("step", "at least"), bound_rows),
            "## Use, once trained",
            usage(f"owner/{plan['repo']}"),
        ],
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([table_header(header), *map(table_row, rows)])


def _shell(words: Sequence[str]) -> str:
    return " ".join(words).replace(" --length", " \\\n    --length")


# -- files -------------------------------------------------------------------------------------------------------------


def files(root: Path = ROOT) -> dict[Path, bytes]:
    """Everything that belongs into `hub_cards/`, by path below the repository's root."""
    folder = Path("hub_cards")
    made = {
        folder / REFERENCE / path.relative_to(ESTIMATOR_PATH): path.read_bytes()
        for path in ESTIMATOR_PATH.rglob("*")
        if path.is_file()
    }
    metrics, toy = json.loads((ESTIMATOR_PATH / "metrics.json").read_text()), json.loads((root / TOY).read_text())
    made[folder / REFERENCE / "README.md"] = reference_card(metrics, toy).encode()
    for plan in json.loads((root / PLANS).read_text()):
        made[folder / plan["repo"] / "README.md"] = planned_card(plan).encode()
        made[folder / plan["repo"] / "config.json"] = (json.dumps(plan["config"], indent=2) + "\n").encode()
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Write plans and cards."""
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    (ROOT / PLANS).write_text(json.dumps(plans(), indent=2) + "\n", encoding="utf-8")
    for path, data in files().items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_bytes(data)
        print(path)


if __name__ == "__main__":
    main()
