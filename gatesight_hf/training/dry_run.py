"""`gatesight train --dry-run`: a model's shapes and what training would take, from its configuration alone.

The model is built on the device `meta`, where tensors have shapes and no memory, so that any size is checked on any
machine in seconds: what the hooks hand over, what the cache holds, and what the estimator would read.
"""

import argparse
from typing import Any

import torch

from ..cache.cache import GateSightCache
from ..models._compat import cache_argument
from ..models.families import adapter_for
from ..models.hybrid import HybridSpec, find_modules
from ..models.loading import load_config, model_dtype
from ..scoring.estimator import EstimatorConfig
from ..scoring.features import assemble
from ..scoring.interface import Needs, Recorder
from .plan import estimator_words, text_model_without_storage, training_plan

#: Of the forward on shapes.
TOKENS = 128


def dry_run(args: argparse.Namespace) -> dict[str, Any]:
    """Check the shapes and estimate disk, memory and time.

    Args:
        args: As `gatesight train` has them. `model` may also be a folder or repo that holds a `config.json` alone, or
            the file itself.

    Returns:
        What `training_plan` says, `model`, and `checked`: what was run on shapes.

    Raises:
        FileNotFoundError: No such folder.
        UnsupportedModelError: The model is no hybrid of a known family.
        ValueError: No such dtype, or a shape is not what the estimator needs.
    """
    config = load_config(args.model)
    dtype = model_dtype(config, args.dtype)
    model = text_model_without_storage(config, dtype)
    plan = training_plan(model, args.model, args)
    return {
        "model": args.model,
        "dtype": str(dtype).removeprefix("torch."),
        "checked": check_shapes(model, args),
        **plan,
    }


def check_shapes(model: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Run what runs on shapes: GDN projections and signals of each layer, then the whole model with a cache.

    Args:
        model: On the device `meta`.
        args: `window` and `hidden_size` are read.

    Returns:
        `gdn_layers` and `attention_layers` of the layout, `tokens` run, and `whole_model`: True, or why its forward,
        which depends on values (that of an indexer does), does not run on shapes.

    Raises:
        ValueError: A shape is not what the layout says.
    """
    spec = HybridSpec.of(model)
    config = EstimatorConfig.for_model(spec, "", args.window, args.hidden_size)
    modules, adapter = find_modules(model, spec), adapter_for(spec)
    hidden = torch.empty((1, TOKENS, model.config.hidden_size), dtype=model.dtype, device="meta")
    signals = []
    with torch.no_grad():
        for layer in modules.gdn:
            outputs = {name: getattr(layer, name)(hidden) for name in adapter.projections}
            signals.append(adapter.signals(layer, outputs, None))
    _check_signals(signals, spec, config)
    checked = {"gdn_layers": len(signals), "attention_layers": spec.num_attention_layers, "tokens": TOKENS}
    cache = GateSightCache(Recorder(Needs(signals=True, hidden=args.hidden_states)), model, allocation="flat")
    try:
        with torch.no_grad():
            ids = torch.zeros((1, TOKENS), dtype=torch.long, device="meta")
            logits = model(ids, **{cache_argument(model): cache}, use_cache=True, logits_to_keep=1).logits
    except (NotImplementedError, RuntimeError) as error:
        if not (isinstance(error, NotImplementedError) or "meta tensor" in str(error)):
            raise
        return {**checked, "whole_model": str(error).split(":")[0].split(". ")[0]}
    prefill = cache.prefill()
    _check_signals(prefill.signals, spec, config)
    _check("logits", logits, (1, 1, model.config.vocab_size))
    for j, (keys, values) in enumerate(zip(prefill.keys, prefill.values, strict=True)):
        _check(f"keys of attention layer {j}", keys, (1, spec.num_key_value_heads, TOKENS, spec.head_dim))
        _check(f"values of attention layer {j}", values[..., 0], (1, spec.num_key_value_heads, TOKENS))
    for j, of_layer in enumerate(prefill.hidden):
        _check(f"hidden states of attention layer {j}", of_layer, (1, TOKENS, model.config.hidden_size))
    return {**checked, "whole_model": True}


def _check_signals(signals: list[torch.Tensor], spec: HybridSpec, config: EstimatorConfig) -> None:
    for i, signal in enumerate(signals):
        _check(f"signals of GDN layer {i}", signal, (1, TOKENS, 3, spec.num_value_heads))
    for j, window in enumerate(config.gdn_windows):
        inputs = assemble([signals[i][0] for i in window])
        _check(f"estimator inputs of attention layer {j}", inputs, (TOKENS, config.input_size(j)))


def _check(what: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"The {what} have the shape {tuple(tensor.shape)}, and the layout says {shape}.")


def format_dry_run(found: dict[str, Any]) -> str:
    """Lines for the terminal."""
    layout, sizes, bounds, checked = found["layout"], found["estimator"], found["bounds"], found["checked"]
    whole = checked["whole_model"]
    ran = "the whole model" if whole is True else f"GDN layers alone; the whole model does not run on shapes: {whole}"
    rows = [
        ("model", f"{found['model']}, {layout['parameters']:,} parameters in {found['dtype']}"),
        ("layers", f"{layout['attention_layers']} attention, {layout['gdn_layers']} GDN"),
        ("estimator", estimator_words(sizes)),
        ("its parameters", f"{sizes['parameters']:,}"),
        ("shapes checked", ran),
        *((f"{step}, {bounds['documents']} documents", f"{value:g} min") for step, value in bounds["minutes"].items()),
        (
            "accelerator memory",
            f"{bounds['accelerator_gb']:g} GB: {bounds['accelerators']} × {found['machine']['name']}",
        ),
        ("fit, on the CPU", f"{bounds['fit_pflop']:g} PFLOP, {bounds['fit_reads_gb']:g} GB read"),
        ("memory of the fit", f"{bounds['host_gb']:g} GB"),
        ("disk for the data", f"{bounds['disk_gb']:g} GB"),
    ]
    lines = [f"{name:28} {value}" for name, value in rows]
    return "\n".join([*lines, "Nothing was loaded or trained. Times, memory and disk are lower bounds."])
