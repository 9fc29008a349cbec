"""Estimator folders and the Hub: what a folder would send, whether that is right, and what a folder or repo holds."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..checks import check_path
from ..files.cards import held_out_rows, held_out_table
from ..files.hub import CARD_NAME, REPO_ID, Folder, Repo, Upload, card_metadata, check_repo_id, open_source, push
from ..methods.hidden import HIDDEN_STATES_FOLDER, HiddenStateScorer
from ..scoring.estimator import COMMIT_MESSAGE, Estimator, EstimatorConfig
from ..scoring.mlp import CONFIG_NAME, WEIGHTS_NAME, read_config

METRICS_NAME = "metrics.json"
LARGEST_METRICS = 1 << 20
#: What metrics of another form raise when a table is made of them.
UNREADABLE = (AttributeError, KeyError, TypeError, ValueError)
SCORER_FILES = (CONFIG_NAME, WEIGHTS_NAME)
#: All that an estimator's folder holds; anything else is sent only if it is named.
KNOWN_FILES = (*SCORER_FILES, CARD_NAME, METRICS_NAME, *(f"{HIDDEN_STATES_FOLDER}/{name}" for name in SCORER_FILES))


def read_metrics(files: Folder | Repo) -> dict[str, Any]:
    """What `metrics.json` holds.

    Raises:
        OSError, ValueError: It cannot be read, or holds no JSON object.
    """
    path = files.get(METRICS_NAME, LARGEST_METRICS)
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON that can be read: {error}") from error
    if not isinstance(metrics, dict):
        raise ValueError(f"{path} must hold one JSON object.")
    return metrics


def prepare(folder: str | Path, also: Sequence[str] = ()) -> list[Upload]:
    """What a push of an estimator's folder would send, once all of it has been checked; needs no network.

    Args:
        folder: With weights, configuration and card; metrics and a hidden-state scorer may be there too.
        also: Other files of the folder that are to be sent.

    Raises:
        FileNotFoundError: Weights, configuration, card, or a file of `also` is missing.
        ValueError: Files that are not known, that are not what their format says, or that contradict each other.
    """
    check_path("folder", folder)
    files = Folder(Path(folder).expanduser())
    found = [file.path for file in files.files()]
    missing = [name for name in (*SCORER_FILES, CARD_NAME, *also) if name not in found]
    if missing:
        raise FileNotFoundError(f"{files} has no {', '.join(missing)}: there is nothing to push before that is there.")
    unknown = [name for name in found if name not in KNOWN_FILES and name not in also]
    if unknown:
        raise ValueError(
            f"{files} holds files that are no part of an estimator: {', '.join(unknown[:8])}"
            f"{' …' if len(unknown) > 8 else ''}. Move them away, or name each that is to be sent: --also {unknown[0]}"
        )
    config = Estimator.from_pretrained(files.path).config
    if any(name.startswith(f"{HIDDEN_STATES_FOLDER}/") for name in found):
        hidden = HiddenStateScorer.from_pretrained(files.path, subfolder=HIDDEN_STATES_FOLDER).config
        if hidden.fingerprint != config.fingerprint:
            raise ValueError(f"{files}: the scorer in {HIDDEN_STATES_FOLDER} is for another layout than the estimator.")
    card = (files.path / CARD_NAME).read_text(encoding="utf-8")
    _check_card(card, config)
    if METRICS_NAME in found:
        _check_metrics(read_metrics(files), config, card)
    return [Upload(name, (files.path / name).read_bytes()) for name in found]


def _check_card(card: str, config: EstimatorConfig) -> None:
    named = card_metadata(card).get("base_model")
    if named != config.base_model and (named is not None or REPO_ID.fullmatch(config.base_model)):
        raise ValueError(
            f"{CARD_NAME} names the base model {named!r}, {CONFIG_NAME} {config.base_model!r}: they must agree."
        )


def _check_metrics(metrics: Mapping[str, Any], config: EstimatorConfig, card: str) -> None:
    expected = {
        "base_model": config.base_model,
        "fingerprint": config.fingerprint,
        "parameters": config.num_parameters,
    }
    wrong = [name for name, value in expected.items() if metrics.get(name) != value]
    if wrong:
        raise ValueError(f"{METRICS_NAME} is of another estimator than {CONFIG_NAME}: {', '.join(wrong)} differ.")
    try:
        rows = held_out_rows(metrics)
    except UNREADABLE as error:
        raise ValueError(f"{METRICS_NAME} is not what `gatesight train` writes: {error!r}") from error
    lines = set(card.splitlines())
    absent = [row for row in rows if row not in lines]
    if absent:
        raise ValueError(f"{CARD_NAME} does not show what {METRICS_NAME} says: {absent[0]} is missing. Render it anew.")


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    also: Sequence[str] = (),
    dry_run: bool = False,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    token: str | bool | None = None,
) -> dict[str, Any]:
    """Check an estimator's folder and send it to the Hub in one commit. Returns what was, or would be, sent and where.

    Args:
        folder, also: See `prepare`.
        repo_id: `owner/name`; the repo is made if need be.
        dry_run: Only check and list; needs no network.
        private, revision, commit_message, token: See `files.hub.push`.

    Raises:
        OSError, ValueError: See `prepare` and `files.hub.push`.
    """
    check_repo_id(repo_id)
    uploads = prepare(folder, also)
    message = commit_message or COMMIT_MESSAGE
    url = None
    if not dry_run:
        url = push(repo_id, uploads, private=private, revision=revision, commit_message=message, token=token)
    return {
        "repo": repo_id,
        "revision": revision or "main",
        "private": private,
        "commit_message": message,
        "files": [asdict(upload.info) for upload in uploads],
        "bytes": sum(len(upload.data) for upload in uploads),
        "commit": url,
    }


def inspect(source: str | Path, *, revision: str | None = None, **options: Any) -> dict[str, Any]:
    """What a folder or repo holds; of a repo only configuration and metrics are downloaded.

    Args:
        source, revision, options: See `Estimator.from_pretrained`.

    Raises:
        OSError, ValueError: See `Estimator.from_pretrained`.
    """
    files = open_source(source, revision=revision, **options)
    config = read_config(EstimatorConfig, files, CONFIG_NAME)
    listed = files.files()
    inputs = [config.input_size(j) for j in range(config.num_layers)]
    return {
        "source": str(files),
        "commit": files.commit,
        "base_model": config.base_model,
        "model_type": config.model_type,
        "fingerprint": config.fingerprint,
        "attention_layers": config.num_layers,
        "key_value_heads": config.num_key_value_heads,
        "gdn_value_heads": config.num_value_heads,
        "window": config.window,
        "hidden_size": config.hidden_size,
        "inputs": {"least": min(inputs), "most": max(inputs)},
        "parameters": config.num_parameters,
        "has_weights": any(file.path == WEIGHTS_NAME for file in listed),
        "files": [asdict(file) for file in listed],
        "metrics": read_metrics(files) if any(file.path == METRICS_NAME for file in listed) else None,
    }


# -- as text -----------------------------------------------------------------------------------------------------------


def _listed(files: Sequence[Mapping[str, Any]]) -> list[str]:
    width = max((len(file["path"]) for file in files), default=0)
    return [f"  {file['path']:{width}} {file['size']:12,}  {file['sha256'] or ''}".rstrip() for file in files]


def format_push(result: Mapping[str, Any]) -> str:
    """What `gatesight push` prints."""
    sent = "Sent" if result["commit"] else "Would be sent"
    kind = {True: ", private", False: ", public", None: ""}[result["private"]]
    return "\n".join(
        [
            f"{sent} to {result['repo']}{kind}, branch {result['revision']}: {result['commit_message']}",
            *_listed(result["files"]),
            f"{len(result['files'])} files, {result['bytes']:,} bytes",
            result["commit"] or "Dry run: all of it was checked, nothing was sent.",
        ]
    )


def format_inspection(found: Mapping[str, Any]) -> str:
    """What `gatesight inspect` prints."""
    inputs = found["inputs"]
    lines = [
        f"{found['source']}" + (f" at {found['commit']}" if found["commit"] else ""),
        f"base model       {found['base_model']} ({found['model_type']}, layout {found['fingerprint']})",
        f"attention        {found['attention_layers']} layers of {found['key_value_heads']} KV heads",
        f"GDN              {found['gdn_value_heads']} value heads, window of {found['window']} layers",
        f"MLPs             {inputs['least']} to {inputs['most']} inputs, hidden size {found['hidden_size']}, "
        f"{found['parameters']:,} parameters",
        f"weights          {'there' if found['has_weights'] else 'not there: nothing to load yet'}",
        "files",
        *_listed(found["files"]),
    ]
    if found["metrics"] is not None:
        lines += ["on held-out documents", *(f"  {line}" for line in _held_out_table(found["metrics"]))]
    # A repo's texts may hold anything, escape sequences of terminals too.
    return "\n".join("".join(c if c.isprintable() else "�" for c in line) for line in lines)


def _held_out_table(metrics: Mapping[str, Any]) -> list[str]:
    try:
        return held_out_table(metrics)
    except UNREADABLE as error:
        return [f"{METRICS_NAME} is not what `gatesight train` writes: {error!r}"]
