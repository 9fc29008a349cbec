"""Cards of estimators in folders and on the Hub: rendered from results, without a number of their own."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from .hub import REPO_ID

LIBRARY = "gatesight_hf"
TAGS = ("kv-cache", "gated-deltanet", "gatesight")
#: What the metrics of held-out documents are called in tables.
HEADINGS = {"overlap@10": "overlap@10", "mass@10": "utility mass in the top 10 %", "spearman": "Spearman"}


def metadata(base_model: str, **more: Any) -> dict[str, Any]:
    """What a card's front matter says; a base model that is none of the Hub's is left to the text."""
    named = {"base_model": base_model} if REPO_ID.fullmatch(base_model) else {}
    return {"library_name": LIBRARY, "license": "apache-2.0", **named, "tags": list(TAGS), **more}


def render(metadata: Mapping[str, Any], title: str, sections: Sequence[str]) -> str:
    """A card: front matter, title, and sections apart by blank lines."""
    front = yaml.safe_dump(dict(metadata), sort_keys=False, allow_unicode=True, width=1000)
    return f"---\n{front}---\n\n" + "\n\n".join([f"# {title}", *(section.strip() for section in sections)]) + "\n"


def paragraph(text: str) -> str:
    """Prose in lines of at most 120 characters."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def model_index(name: str, results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The `model-index` of a card: one entry per data set, as `eval_entry` makes them."""
    return [{"name": name, "results": [dict(result) for result in results]}]


def eval_entry(data_type: str, data_name: str, metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Results on one data set; each metric has `type`, `name` and `value`."""
    return {
        "task": {"type": "text-generation", "name": "KV cache eviction"},
        "dataset": {"type": data_type, "name": data_name},
        "metrics": [dict(metric) for metric in metrics],
    }


def held_out_rows(metrics: Mapping[str, Any]) -> list[str]:
    """Rows of the table of metrics on held-out documents."""
    return [
        "| " + " | ".join([name, *(f"{row[metric]:.3f}" for metric in HEADINGS)]) + " |"
        for name, row in metrics["held_out"].items()
    ]


def held_out_table(metrics: Mapping[str, Any]) -> list[str]:
    """That table: header, rule and rows."""
    header = "| " + " | ".join(["scores", *HEADINGS.values()]) + " |"
    return [header, "|---" * (len(HEADINGS) + 1) + "|", *held_out_rows(metrics)]


def held_out_entry(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The estimator's own row of that table, for the `model-index`."""
    values = metrics["held_out"]["mlp"]
    described = [{"type": name, "name": heading, "value": values[name]} for name, heading in HEADINGS.items()]
    return eval_entry("held-out-documents", _held_out(metrics), described)


def _held_out(metrics: Mapping[str, Any]) -> str:
    return f"{metrics['eval_documents']} held-out documents of up to {metrics['document_tokens']} tokens"


def estimator_card(
    metrics: Mapping[str, Any],
    source: str = "path/to/this/folder",
    sections: Sequence[str] = (),
    results: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The card of an estimator.

    Args:
        metrics: What `metrics.json` holds; without `held_out` the card says that nothing was measured.
        source: Folder or repo that the snippet loads.
        sections: More sections, such as an evaluation.
        results: More entries of the `model-index`.
    """
    base = metrics["base_model"]
    title = f"GateSight estimator for {base}"
    measured = _measured(metrics) if "held_out" in metrics else "No metrics came with these weights."
    entries = [held_out_entry(metrics)] if "held_out" in metrics else []
    index = {"model-index": model_index(title, [*entries, *results])} if entries or results else {}
    return render(
        metadata(base, **index),
        title,
        [
            "Predicts from Gated-DeltaNet signals which KV entries of a context will matter later.\n"
            f"{metrics['parameters']:,} parameters; model layout `{metrics['fingerprint']}`.",
            usage(source),
            *sections,
            measured,
        ],
    )


def usage(source: str) -> str:
    """How an estimator is used."""
    return f"""```python
from gatesight_hf import GateSightCache

cache = GateSightCache.from_pretrained("{source}", model=model, kept_fraction=0.1)
model.generate(**inputs, past_key_values=cache)
```"""


def _measured(metrics: Mapping[str, Any]) -> str:
    table = "\n".join(held_out_table(metrics))
    sampling, versions = metrics["sampling"], (" ".join(pair) for pair in metrics["versions"].items())
    trained = paragraph(
        f"Means over documents, attention layers and KV heads. Trained on {metrics['train_documents']} other "
        f"documents, seed {metrics['seed']}, with {sampling['continuations']} sampled continuations of "
        f"{sampling['tokens']} tokens each. Versions: {', '.join(versions)}."
    )
    return f"## Measured on {_held_out(metrics)}\n\n{table}\n\n{trained}"
