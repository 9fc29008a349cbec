"""The command `gatesight`. Each verb imports its room when it is called."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import __version__


def _show(args: argparse.Namespace, result: Any, as_text: Callable[[Any], str]) -> None:
    """Print a result: as JSON where that was asked for, or else for people."""
    print(json.dumps(result, indent=2) if args.json else as_text(result))


def _add_demo(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verb = verbs.add_parser("demo", help="prefill once, keep a tenth of the cache, ask many questions (bundled model)")
    verb.add_argument("--kept-fraction", type=float, default=0.1, help="share of KV entries that stays, in (0, 1]")
    verb.add_argument("--length", type=int, default=2048, help="tokens of the document")
    verb.add_argument("--needles", type=int, default=8, help="numbers hidden in it, each asked for")
    verb.add_argument("--seed", type=int, default=0, help="of the document and of random eviction")
    verb.add_argument("--json", action="store_true", help="print JSON")
    verb.set_defaults(run=_demo)


def _demo(args: argparse.Namespace) -> None:
    from .demo import format_demo, run_demo

    result = run_demo(args.kept_fraction, args.length, args.needles, args.seed)
    _show(args, result, format_demo)


def _add_ask(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from .opening import add_source

    verb = verbs.add_parser("ask", help="ask questions to documents, or to a session saved of them")
    add_source(verb, one_of_them=True)
    verb.add_argument("--question", action="append", default=[], help="text; may be repeated")
    verb.add_argument("--save", type=Path, metavar="FILE", help="file to keep the session in")
    verb.add_argument("--max-new-tokens", type=int, default=256, help="of an answer (default: %(default)s)")
    verb.add_argument("--batch-size", type=int, default=16, help="questions answered together (default: %(default)s)")
    verb.add_argument("--json", action="store_true", help="print JSON")
    verb.set_defaults(run=_ask)


def _ask(args: argparse.Namespace) -> None:
    from .ask import ask_from_arguments, format_answers

    result = ask_from_arguments(args)
    _show(args, result, format_answers)


def _add_chat(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from .opening import add_source

    verb = verbs.add_parser("chat", help="talk about documents, in the terminal")
    add_source(verb, one_of_them=False)
    verb.add_argument("--max-new-tokens", type=int, default=1024, help="of an answer (default: %(default)s)")
    verb.add_argument(
        "--sample", action="store_true", help="sample as the model's generation config says, not greedily"
    )
    verb.set_defaults(run=_chat)


def _chat(args: argparse.Namespace) -> None:
    from .chat import chat_from_arguments

    chat_from_arguments(args)


def _add_view(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from .opening import add_source

    verb = verbs.add_parser("view", help="one HTML page that shows what stays of documents")
    add_source(verb, one_of_them=True)
    verb.add_argument("--out", type=Path, required=True, metavar="FILE", help="of the page, such as kept.html")
    verb.add_argument("--method", default="random", help="comma-separated ones to show beside (default: %(default)s)")
    verb.add_argument("--question", action="append", default=[], help="to show answers to; may be repeated")
    verb.add_argument("--max-new-tokens", type=int, default=64, help="of an answer (default: %(default)s)")
    verb.add_argument("--json", action="store_true", help="print JSON")
    verb.set_defaults(run=_view)


def _view(args: argparse.Namespace) -> None:
    from .view import format_view, view_from_arguments

    result = view_from_arguments(args)
    _show(args, result, format_view)


def _add_collection(verb: argparse.ArgumentParser) -> None:
    """Options of what collects documents and fits on them."""
    from .recipes import Recipe

    verb.add_argument("--model", required=True, help="'reference' (bundled), or a folder or Hub id of a hybrid model")
    verb.add_argument("--dtype", help="of the model, such as bfloat16 (default: its own)")
    verb.add_argument("--device-map", help="where its layers go, as transformers takes it (default with GPUs: auto)")
    verb.add_argument(
        "--documents",
        nargs="+",
        action="extend",
        metavar="[NAME[:WEIGHT]=]PATH",
        help="text files (.txt: one document each; .jsonl: a 'text' per line) or folders of them, several corpora each "
        "with a name and a weight (default 1); not needed for the reference model, whose documents are generated",
    )
    verb.add_argument(
        "--dataset",
        action="append",
        metavar="[NAME[:WEIGHT]=]NAME[:CONFIG]",
        help="data set of the Hub, or a folder or file of one; may be repeated",
    )
    verb.add_argument("--split", default="train", help="of the data set (default: train)")
    verb.add_argument("--text-column", default="text", help="of the data set (default: text)")
    verb.add_argument("--data", type=Path, help="folder of the collected data (default: OUT with '-data' appended)")
    verb.add_argument(
        "--recipe", choices=("paper",), action=Recipe, help="2,428 documents to fit on, cut to 1,024 tokens"
    )
    verb.add_argument("--train-documents", type=int, default=96, help="to fit on (default: %(default)s)")
    verb.add_argument("--eval-documents", type=int, default=32, help="others, to measure on (default: %(default)s)")
    verb.add_argument(
        "--length", type=int, default=1024, help="tokens per document; longer ones are cut (default: %(default)s)"
    )
    verb.add_argument(
        "--continuations", type=int, default=16, help="sampled per document and prompt (default: %(default)s)"
    )
    verb.add_argument("--continuation-tokens", type=int, default=24, help="of each (default: %(default)s)")
    verb.add_argument("--rows", type=int, help="continuations sampled at a time; fewer take less memory (default: all)")
    verb.add_argument(
        "--prompt",
        action="append",
        help="text put after each document before sampling; may be repeated (default: none; for the reference model "
        "'question :')",
    )
    verb.add_argument("--epochs", type=int, default=30, help="of fitting (default: %(default)s)")
    verb.add_argument("--window", type=int, default=6, help="nearest GDN layers below an attention layer that are read")
    verb.add_argument("--hidden-size", type=int, default=64)
    verb.add_argument("--seed", type=int, default=0)
    verb.add_argument("--json", action="store_true", help="print JSON")


def _add_train(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verb = verbs.add_parser("train", help="train an estimator for a model, on documents")
    _add_collection(verb)
    verb.add_argument("--out", type=Path, help="folder of the estimator, ready for the Hub")
    verb.add_argument(
        "--dry-run",
        action="store_true",
        help="load no weights: check the shapes of the model's configuration, and say what training takes at least",
    )
    verb.add_argument(
        "--hidden-states",
        action="store_true",
        help="also fit the same MLPs on hidden states, for comparison (KVzap's inputs), into OUT/hidden_states",
    )
    verb.set_defaults(run=_train, goes_on=True)


def _train(args: argparse.Namespace) -> None:
    if args.dry_run:
        from ..training.dry_run import dry_run, format_dry_run

        found = dry_run(args)
        _show(args, found, format_dry_run)
        return
    from ..training.run import format_metrics, train_from_arguments

    metrics = train_from_arguments(args)
    if metrics is not None:
        _show(args, metrics, format_metrics)


def _add_analyze(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verb = verbs.add_parser("analyze", help="why GDN signals tell what will matter, on a model and documents")
    _add_collection(verb)
    verb.add_argument("--out", type=Path, required=True, help="OUT.json, OUT.md and OUT-*.png")
    verb.add_argument(
        "--estimator", help="folder or Hub repo of a trained one to measure too (reference model: the bundled one)"
    )
    verb.add_argument("--longer-documents", type=int, default=8, help="to see what scores do on longer ones; may be 0")
    verb.add_argument("--longer-length", type=int, help="their tokens (default: twice --length)")
    verb.set_defaults(run=_analyze, goes_on=True)


def _analyze(args: argparse.Namespace) -> None:
    from gatesight_eval.observations.analyze import analyze_from_arguments
    from gatesight_eval.observations.tables import markdown

    found = analyze_from_arguments(args)
    if found is not None:
        _show(args, found, lambda result: markdown(result, args.out.name))


def _add_serve(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verb = verbs.add_parser("serve", help="serve a model with sessions through vLLM's OpenAI-compatible server")
    verb.add_argument("model", help="folder or Hub id")
    verb.add_argument("--estimator", required=True, help="folder or Hub repo of an estimator for it")
    verb.add_argument("--kept-fraction", type=float, default=0.1, help="unless a request says another (default: 0.1)")
    verb.add_argument("--protected-prefix", type=int, default=0, help="first tokens of each context that always stay")
    verb.add_argument("--allocation", default="gate", help="layer shares (default: gate)")
    verb.add_argument("--max-sessions", type=int, default=64, help="idle ones beyond that are dropped (default: 64)")
    verb.add_argument("--max-sessions-per-key", type=int, help="of each API key of the server (default: no limit)")
    verb.add_argument("--max-bytes-per-key", type=int, help="likewise, of what its sessions hold (default: no limit)")
    verb.add_argument("--print", action="store_true", help="print the command instead of running it")
    verb.epilog = "What follows -- goes to `vllm serve`, such as: -- --dtype bfloat16 --port 8000"
    verb.set_defaults(run=_serve, takes_more=True)


def _serve(args: argparse.Namespace) -> None:
    from ..vllm.options import serve_command
    from ..vllm.support import require_vllm

    names = ("kept_fraction", "protected_prefix", "allocation", "max_sessions", "max_sessions_per_key")
    config = {name: getattr(args, name) for name in (*names, "max_bytes_per_key")}
    command = serve_command(args.model, args.estimator, *args.more, **config)
    if args.print:
        print(shlex.join(command))
        return
    require_vllm()
    os.execv(command[0], command)


def _add_inspect(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verb = verbs.add_parser("inspect", help="what an estimator holds, or how much memory contexts take in a model")
    verb.add_argument(
        "source",
        metavar="REPO_OR_FOLDER",
        help="an estimator's folder or Hub repo, or a model: 'reference', a folder, a Hub id or a config.json",
    )
    verb.add_argument("--revision", help="branch, tag or commit of the repo")
    of_models = verb.add_argument_group("of models, whose weights are not loaded")
    of_models.add_argument(
        "--context",
        type=int,
        action="append",
        help="tokens; may be repeated (default: 4096, 32768, 131072 and the model's longest)",
    )
    of_models.add_argument("--kept-fraction", type=float, action="append", help="may be repeated (default: 0.1)")
    of_models.add_argument("--dtype", help="of the model (default: its configuration's, or bfloat16)")
    of_models.add_argument("--rows", type=int, help="of a batch (default: 1)")
    verb.add_argument("--json", action="store_true", help="print JSON, with all sizes in bytes")
    verb.set_defaults(run=_inspect)


def _inspect(args: argparse.Namespace) -> None:
    from .memory import format_model, inspect_model, names_a_model
    from .publishing import format_inspection, inspect

    given = {name: getattr(args, name) for name in ("context", "kept_fraction", "dtype", "rows")}
    is_model, commit = names_a_model(args.source, args.revision)
    if is_model:
        rows = 1 if args.rows is None else args.rows
        of_model = inspect_model(
            args.source, args.context or (), args.kept_fraction or (), args.dtype, rows, commit or args.revision
        )
        _show(args, of_model, format_model)
        return
    if unfit := [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None]:
        raise ValueError(f"{', '.join(unfit)}: for models; {args.source} is an estimator.")
    found = inspect(args.source, revision=args.revision)
    _show(args, found, format_inspection)


def _add_push(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verb = verbs.add_parser("push", help="check an estimator's folder and send it to the Hub, in one commit")
    verb.add_argument("folder", type=Path, metavar="FOLDER", help="as `gatesight train` writes it")
    verb.add_argument("repo", metavar="REPO", help="owner/name; made if need be")
    verb.add_argument("--dry-run", action="store_true", help="check all and list what would be sent, without a network")
    verb.add_argument("--also", action="append", default=[], metavar="FILE", help="another file to send; repeatable")
    verb.add_argument("--private", action="store_true", default=None, help="of a repo that is made")
    verb.add_argument("--revision", help="branch, made if need be (default: main)")
    verb.add_argument("--message", help="of the commit")
    verb.add_argument("--json", action="store_true", help="print JSON")
    verb.set_defaults(run=_push)


def _push(args: argparse.Namespace) -> None:
    from .publishing import format_push, push_folder

    result = push_folder(
        args.folder,
        args.repo,
        also=args.also,
        dry_run=args.dry_run,
        private=args.private,
        revision=args.revision,
        commit_message=args.message,
    )
    _show(args, result, format_push)


def _add_evaluation(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from gatesight_eval.cli import add_evaluate, add_report

    add_evaluate(verbs)
    add_report(verbs)


def parser() -> argparse.ArgumentParser:
    """The command line's parser, with all verbs."""
    made = argparse.ArgumentParser(prog="gatesight", description="Keep a tenth of a hybrid model's KV cache.")
    made.add_argument("--version", action="version", version=__version__)
    verbs = made.add_subparsers(required=True, metavar="VERB")
    for add in (
        _add_demo,
        _add_ask,
        _add_chat,
        _add_view,
        _add_train,
        _add_analyze,
        _add_serve,
        _add_inspect,
        _add_push,
        _add_evaluation,
    ):
        add(verbs)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. Errors that a user can mend are one line on stderr."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    own, more = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    command = parser()
    args = command.parse_args(own)
    if more and not hasattr(args, "takes_more"):
        command.error(f"unrecognized arguments: -- {' '.join(more)}")
    args.more = more
    from ..models.loading import REFERENCE
    from .quiet import quiet

    on_cpu = getattr(args, "model", REFERENCE) == REFERENCE
    data_sets = bool(getattr(args, "dataset", None)) or getattr(args, "suite", "toy") != "toy"
    try:
        with quiet(on_cpu, data_sets):
            args.run(args)
    except KeyboardInterrupt:
        goes_on = "; it goes on where it was when it is given again" if getattr(args, "goes_on", False) else ""
        print(f"gatesight: stopped{goes_on}.", file=sys.stderr)
        return 130
    except (ValueError, OSError, RuntimeError) as error:
        print(f"gatesight: {error}", file=sys.stderr)
        return 1
    return 0
