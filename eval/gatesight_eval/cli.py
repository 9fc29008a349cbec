"""The verbs `gatesight evaluate` and `gatesight report`. Rooms are imported when a verb is called."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gatesight_hf.models.loading import REFERENCE

if TYPE_CHECKING:
    from .backends import Backend

Verbs = "argparse._SubParsersAction[argparse.ArgumentParser]"
FRACTIONS = "0.9,0.8,0.7,0.6,0.5,0.4,0.3,0.2,0.1"
METHODS = (
    "gatesight,snapkv,triattention,keydiff,kvzip,kvzip@global,expected_attention,hidden_states,lagkv,key_norm,"
    "streaming_llm,random,oracle"
)
#: KVzip's prompts in the words that the reference model knows, and the chunk that it does best with there.
REFERENCE_OPTIONS = {
    "kvzip": {
        "chunk": 64,
        "prompts": (
            "repeat the previous context exactly .",
            "repeat the part of the previous context exactly , starting with",
        ),
        "suffix": "",
    }
}


def add_evaluate(verbs: Verbs) -> None:  # type: ignore[valid-type]
    verb = verbs.add_parser(  # type: ignore[attr-defined]
        "evaluate", help="answer a benchmark with several eviction methods at several kept fractions"
    )
    verb.add_argument("--model", default="reference", help="'reference' (bundled), or a folder or Hub id")
    verb.add_argument("--suite", choices=("ruler", "scbench", "scbench-kvzip", "toy"), required=True)
    verb.add_argument(
        "--method",
        help="comma-separated rows: name, name@allocation or name@gate^exponent, each with +int8 for quantised entries "
        f"(default: each --estimator, and what can run of {METHODS})",
    )
    verb.add_argument("--kept", default=FRACTIONS, help="comma-separated kept fractions (default: %(default)s)")
    verb.add_argument("--out", type=Path, required=True, help="folder; the same command goes on after a stop")
    verb.add_argument("--tasks", help="comma-separated (default: all of the suite)")
    verb.add_argument(
        "--length", type=int, default=1024, help="tokens of a context that is generated (default: %(default)s)"
    )
    verb.add_argument(
        "--count", type=int, default=20, help="contexts per task and seed; 0: all of a data set (default: 20)"
    )
    verb.add_argument("--seeds", help="comma-separated data seeds (default 0; RULER: one, by default 42)")
    verb.add_argument(
        "--estimator",
        action="append",
        metavar="NAME=FOLDER",
        help="estimator of a row, a folder or Hub repo; may be repeated (default for the reference model: "
        "gatesight=the bundled one)",
    )
    verb.add_argument("--hidden-states", type=Path, metavar="FOLDER", help="scorer for the row hidden_states")
    verb.add_argument("--calibration", type=Path, metavar="FILE", help="TriAttention: saved statistics, or plain .txt")
    verb.add_argument("--options", default="{}", help='of scorers, JSON: {"snapkv": {"window": 32}}')
    verb.add_argument("--max-length", type=int, help="longer sequences lose the middle of their context")
    verb.add_argument("--chat-template", action="store_true", help="put contexts and questions into the chat template")
    verb.add_argument("--template-options", default="{}", help='JSON: {"enable_thinking": false}')
    verb.add_argument("--prefill-chunk-size", type=int, help="tokens per forward of a prefill")
    verb.add_argument("--backend", choices=("transformers", "vllm"), default="transformers", help="what runs the model")
    verb.add_argument(
        "--dtype", help="of the model, such as bfloat16 (default: the checkpoint's; vLLM: see its option)"
    )
    verb.add_argument(
        "--engine-options", default="{}", help='of vllm.LLM, JSON: {"max_model_len": 65536, "max_num_seqs": 8}'
    )
    verb.add_argument(
        "--whole-blocks", action="store_true", help="vLLM: round layers up to whole blocks, as serving does"
    )
    verb.add_argument("--rows", type=int, help="methods answered in one batch (default: reference model 16, else 1)")
    verb.add_argument("--threads", type=int, help="of torch on the CPU")
    verb.add_argument("--data", help="SCBench: Hub id or folder; RULER: official JSONL or a kvpress data set to read")
    verb.add_argument("--data-config", help="configuration of a kvpress data set, such as 4096")
    verb.add_argument("--revision", help="of a data set on the Hub")
    verb.add_argument("--haystack", type=Path, help="RULER: prose (.txt, .txt.gz, or RULER's PaulGrahamEssays.json)")
    verb.add_argument("--squad", type=Path, help="RULER: SQuAD v2 JSON")
    verb.add_argument("--hotpotqa", type=Path, help="RULER: HotpotQA distractor JSON")
    verb.add_argument("--variants", default="", help="RULER and SCBench: comma-separated named variants")
    verb.add_argument("--max-turns", type=int, help="SCBench: questions per context, -1: all (official 5, KVzip's all)")
    verb.set_defaults(run=_evaluate, goes_on=True)


def add_report(verbs: Verbs) -> None:  # type: ignore[valid-type]
    verb = verbs.add_parser("report", help="tables and plots of runs")  # type: ignore[attr-defined]
    verb.add_argument(
        "runs", type=Path, nargs="+", help="folders that evaluate wrote; methods of equal items are joined"
    )
    verb.add_argument("--out", type=Path, help="OUT.json, OUT.md and OUT-*.png (default: RUN/report)")
    verb.add_argument("--kept", help="comma-separated kept fractions to report (default: all)")
    verb.add_argument("--against", default="gatesight", help="the row that others are compared with")
    verb.add_argument("--depth-fraction", type=float, help="kept fraction of the table by depth (default: next to 0.1)")
    verb.add_argument("--revised", action="store_true", help="read the revised scores of SCBench's faulty scorers")
    verb.add_argument("--json", action="store_true", help="print JSON")
    verb.set_defaults(run=_report)


def _evaluate(args: argparse.Namespace) -> None:
    import torch

    from .backends.methods import Method, cells_of
    from .reports.store import RunFolder
    from .run import evaluate
    from .suites import arguments as suites
    from .suites.prompting import Prompter

    for name in ("threads", "rows", "prefill_chunk_size"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}.")
    if args.threads:
        torch.set_num_threads(args.threads)
    for name in ("options", "template_options", "engine_options"):
        setattr(args, name, _json_object(name, getattr(args, name)))
    fractions = _fractions(args.kept)
    asked = None if args.method is None else [Method.parse(label) for label in args.method.split(",")]
    backend, rows, options = _vllm_backend(args) if args.backend == "vllm" else _transformers_backend(args)
    cells = cells_of(asked or [Method.parse(label) for label in rows()], fractions)
    backend.check(cells)
    items, data = suites.load(args, backend.tokenizer)
    prompter = Prompter(backend.tokenizer, args.chat_template, args.max_length, args.template_options)
    folder = RunFolder(args.out, _manifest(args, data, backend.describe(), options))
    evaluate(items, backend, prompter, cells, folder)
    print(f"{len(items)} contexts are in {args.out}; tables and plots: gatesight report {args.out}")


def _transformers_backend(args: argparse.Namespace) -> "tuple[Backend, Callable[[], list[str]], dict[str, Any]]":
    """The backend, its default rows, and the options of its scorers."""
    from gatesight_hf.models import load_named

    from .backends import TransformersBackend

    if args.engine_options or args.whole_blocks:
        raise ValueError("--engine-options and --whole-blocks are for --backend vllm.")
    model, tokenizer = load_named(args.model, args.dtype)
    scorers = _scorers(args, model, tokenizer)
    rows = args.rows or (16 if args.model == REFERENCE else 1)
    backend = TransformersBackend(model, tokenizer, scorers, args.model, args.prefill_chunk_size, rows)
    return backend, lambda: _runnable(scorers), dict(scorers.options)


def _vllm_backend(args: argparse.Namespace) -> "tuple[Backend, Callable[[], list[str]], dict[str, Any]]":
    """Likewise."""
    from gatesight_hf import reference
    from gatesight_hf.vllm.support import require_vllm

    require_vllm()
    from gatesight_hf.vllm import GateSightLLM
    from gatesight_hf.vllm.options import METHODS

    from .backends.paged import VLLMBackend

    for name in ("hidden_states", "calibration", "rows", "prefill_chunk_size"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is for --backend transformers.")
    estimators, engine = _estimators(args), dict(args.engine_options)
    if not estimators:
        raise ValueError("--backend vllm needs an estimator of this model: --estimator gatesight=FOLDER.")
    if args.max_length is not None:
        engine.setdefault("max_model_len", args.max_length)
    is_reference = args.model == REFERENCE
    if args.dtype or is_reference:
        engine.setdefault("dtype", args.dtype or "bfloat16")  # vLLM's GDN layers run in nothing else on CPUs
    model = reference.MODEL_PATH if is_reference else args.model
    backend = VLLMBackend(GateSightLLM(model, estimators, **engine), args.model, args.options, args.whole_blocks)
    return backend, lambda: [*estimators, *METHODS], dict(args.options)


def _runnable(scorers: Any) -> list[str]:
    """The default rows that have what they need; says which are left out."""
    rows = list(dict.fromkeys([*scorers.estimators, *METHODS.split(",")]))
    left_out = []
    for row in rows:
        name = row.partition("@")[0]
        try:
            if name != "oracle":
                scorers.make(name, seed=0)
        except (ValueError, FileNotFoundError) as error:
            left_out.append(row)
            print(f"Left out {row}: {error}", file=sys.stderr)
    return [row for row in rows if row not in left_out]


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--{name.replace('_', '-')} {text}: no JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"--{name.replace('_', '-')} {text}: give a JSON object, {{…}}.")
    return value


def _fractions(text: str) -> list[float]:
    from gatesight_hf.compaction.budget import check_kept_fraction

    try:
        return [check_kept_fraction(float(part)) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--kept {text}: {error}") from error


def _estimators(args: argparse.Namespace) -> dict[str, str | Path]:
    """Folders or Hub repos by the name of their row."""
    from gatesight_hf import reference

    estimators: dict[str, str | Path] = {}
    for pair in args.estimator or []:
        name, _, folder = pair.partition("=")
        if not folder:
            raise ValueError(f"--estimator {pair}: give NAME=FOLDER, for example gatesight=my-estimator.")
        estimators[name] = folder
    if args.model == REFERENCE:
        estimators.setdefault("gatesight", reference.ESTIMATOR_PATH)
    return estimators


def _scorers(args: argparse.Namespace, model: Any, tokenizer: Any) -> Any:
    import torch

    from gatesight_hf import reference
    from gatesight_hf.methods.hidden import HIDDEN_STATES_FOLDER
    from gatesight_hf.training.documents import reference_texts

    from .backends.methods import ScorerFactory, calibration_ids

    hidden, calibration, options = args.hidden_states, args.calibration, dict(args.options)
    if args.model == REFERENCE:
        hidden = hidden or reference.ESTIMATOR_PATH / HIDDEN_STATES_FOLDER
        options = {**REFERENCE_OPTIONS, **options}
        if calibration is None:
            # Documents of the estimator's training, not of the suite.
            text = next(reference_texts(2048, seed=0))
            calibration = torch.tensor([tokenizer(text).input_ids])
    elif calibration is not None and calibration.suffix == ".txt":
        calibration = calibration_ids(calibration, tokenizer)
    return ScorerFactory(model, tokenizer, _estimators(args), hidden, calibration, options)


def _manifest(
    args: argparse.Namespace, data: dict[str, Any], backend: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """What a result file says of the run; equal when the run goes on."""
    from .reports.store import commit

    asked = {name: value for name, value in vars(args).items() if name not in ("run", "out", "options")}
    return {
        "asked": {name: str(value) if isinstance(value, Path) else value for name, value in asked.items()},
        "options": options,
        "data": data,
        "backend": backend,
        "commit": commit(),
    }


def _report(args: argparse.Namespace) -> None:
    from .reports.summary import Results, summarise
    from .reports.tables import markdown, plot_costs, plot_curves, plot_depths, require_matplotlib

    require_matplotlib()
    fractions = _fractions(args.kept) if args.kept else None
    try:
        results = Results(args.runs, args.revised, fractions)
    except (KeyError, TypeError, AttributeError) as error:
        runs = ", ".join(map(str, args.runs))
        raise ValueError(f"{runs}: not results as `gatesight evaluate` writes them ({error!r}).") from error
    depth_fraction = args.depth_fraction
    if depth_fraction is None:
        depth_fraction = min(results.fractions, key=lambda fraction: abs(fraction - 0.1))
    summary = summarise(results, args.against, depth_fraction)
    out = args.out or args.runs[0] / "report"
    out.parent.mkdir(parents=True, exist_ok=True)
    text = markdown(summary, args.against)
    record = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False)
    out.with_name(out.name + ".json").write_text(record + "\n", encoding="utf-8")
    out.with_name(out.name + ".md").write_text(text, encoding="utf-8")
    if summary["groups"]["gated mean"]["tasks"]:
        plot_curves(summary, "gated mean", out.with_name(out.name + "-curves.png"))
    plot_costs(summary, out.with_name(out.name + "-costs.png"))
    plot_depths(summary, args.against, out.with_name(out.name + "-depths.png"))
    print(record if args.json else text)
    print(f"Wrote {out}.json, {out.name}.md and {out.name}-*.png.", file=sys.stderr)
