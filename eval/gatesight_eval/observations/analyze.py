"""`gatesight analyze`: documents in, the observations on a model out."""

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

import gatesight_hf
from gatesight_hf import Estimator, EstimatorConfig, reference
from gatesight_hf.models import find_modules
from gatesight_hf.models.loading import REFERENCE
from gatesight_hf.training.fit import FitOptions
from gatesight_hf.training.run import collect_from_arguments

from ..reports.store import commit
from ..reports.tables import require_matplotlib, save_figure
from .observe import checkpoint_log_decay, observe
from .tables import PLOTTERS, markdown


def analyze_from_arguments(args: argparse.Namespace) -> dict[str, Any] | None:
    """Collect, measure and write OUT.json, OUT.md and OUT-*.png. Returns what the JSON holds; None in all processes
    but the main one.

    Raises:
        ValueError: See `collect_from_arguments`.
    """
    require_matplotlib()
    if args.longer_documents < 0:
        raise ValueError(f"--longer-documents must be at least 0, got {args.longer_documents}.")
    longer_length = args.longer_length or 2 * args.length
    args.hidden_states = False
    collected = collect_from_arguments(args, args.longer_documents, longer_length)
    if not collected.is_main:
        return None
    config = EstimatorConfig.for_model(collected.spec, collected.name, args.window, args.hidden_size)
    folder = args.estimator or (reference.ESTIMATOR_PATH if args.model == REFERENCE else None)
    estimator = None if folder is None else Estimator.from_pretrained(folder)
    if estimator is not None:
        estimator.check(collected.spec)
        if estimator.config.gdn_windows != config.gdn_windows:
            raise ValueError(f"The estimator reads other GDN layers: give --window {estimator.config.window}.")
    found = {
        "model": collected.name,
        "weights": collected.settings["weights"],
        "documents": {name: len(getattr(collected, name)) for name in ("train", "held_out", "longer")},
        "tokens": {"held_out": args.length, "longer": longer_length},
        "sampling": collected.settings["sampling"],
        "seed": args.seed,
        **observe(
            collected.train,
            collected.held_out,
            collected.longer,
            config,
            checkpoint_log_decay(find_modules(collected.model, collected.spec).gdn),
            FitOptions(epochs=args.epochs, seed=args.seed),
            estimator,
        ),
        "versions": {
            "gatesight_hf": gatesight_hf.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "commit": commit(),
    }
    write(found, args.out)
    return found


def write(found: dict[str, Any], out: Path) -> None:
    """JSON, tables and plots."""
    out.parent.mkdir(parents=True, exist_ok=True)
    record = json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False)
    out.with_name(out.name + ".json").write_text(record + "\n", encoding="utf-8")
    out.with_name(out.name + ".md").write_text(markdown(found, out.name), encoding="utf-8")
    for name, plot in PLOTTERS.items():
        save_figure(plot(found), out.with_name(f"{out.name}-{name}.png"))
