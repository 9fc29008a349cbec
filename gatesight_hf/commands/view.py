"""`gatesight view`: what stays of a document, as one HTML page."""

import argparse
from dataclasses import replace
from typing import Any

from ..methods.named import READY
from ..view import FRACTIONS, Page
from .opening import check_output, estimator_of, open_session


def view_from_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Write the page.

    Returns:
        A JSON object: `out`, `tokens`, `kept_fraction`, and by method `kept_per_layer` and `achieved_fraction`, at the
        session's kept fraction in whole percents.

    Raises:
        FileNotFoundError, ValueError: Arguments that do not fit together, or files that cannot be used.
    """
    methods = [name for name in args.method.split(",") if name]
    if unknown := [name for name in methods if name not in READY]:
        raise ValueError(f"--method: there is no {', '.join(unknown)} here; there are {', '.join(sorted(READY))}.")
    check_output(args, args.out, "--out")
    args.estimator = estimator_of(args)  # a saved session is loaded without one otherwise, and has no scores
    session = open_session(args)
    scorers = {name: READY[name]() for name in methods}
    page = session.view(args.question, scorers, args.max_new_tokens, args.prefill_chunk_size)
    names = [path.name for path in args.document or [args.session]]
    page = Page(replace(page.view, title=f"What stays of {', '.join(names)}", model=args.model))
    page.save(args.out)
    fraction = session.cache.options.kept_fraction
    step = min(range(len(FRACTIONS)), key=lambda i: abs(FRACTIONS[i] - fraction))
    return {
        "out": str(args.out),
        "tokens": len(page.view.tokens),
        "kept_fraction": FRACTIONS[step],
        "methods": {
            method.name: {"kept_per_layer": method.kept_per_layer(step), "achieved_fraction": method.achieved[step]}
            for method in page.view.methods
        },
    }


def format_view(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [f"{result['tokens']} tokens; at kept fraction {result['kept_fraction']:.2f}, entries per head by layer:"]
    lines += [f"  {name}: {', '.join(map(str, of['kept_per_layer']))}" for name, of in result["methods"].items()]
    return "\n".join([*lines, f"Written: {result['out']}; open it in a browser."])
