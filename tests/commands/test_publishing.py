"""What is pushed is checked first, arrives byte for byte, and is what a dry run listed; cards say what results say."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, constants

from gatesight_hf import Estimator
from gatesight_hf.commands.cli import main
from gatesight_hf.commands.publishing import inspect, prepare, push_folder
from gatesight_hf.files.cards import estimator_card, held_out_rows
from gatesight_hf.reference import ESTIMATOR_PATH

from ..helpers.hub_server import READER, WRITER, FakeHub, point_to
from ..helpers.models import random_estimator

REPO = "org/gatesight-reference"
BUNDLED = {p.relative_to(ESTIMATOR_PATH).as_posix(): p.read_bytes() for p in ESTIMATOR_PATH.rglob("*") if p.is_file()}
METRICS = json.loads(BUNDLED["metrics.json"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(ESTIMATOR_PATH, tmp_path / "estimator")


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_card(folder: Path, old: str, new: str) -> None:
    path = folder / "README.md"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


# -- push --------------------------------------------------------------------------------------------------------------


def test_what_is_pushed_is_what_is_downloaded(hub, folder):
    result = push_folder(folder, REPO, private=True, token=WRITER)
    repo = hub.repos[REPO]
    assert repo.private and result["commit"].endswith(repo.branches["main"])
    assert {name: repo.commits[repo.branches["main"]][name] for name in BUNDLED} == BUNDLED
    loaded, bundled = Estimator.from_pretrained(REPO, token=READER), Estimator.from_pretrained(ESTIMATOR_PATH)
    assert loaded.config == bundled.config
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in bundled.tensors.items())


def test_an_upload_is_one_commit_of_exactly_the_listed_files(hub, folder):
    listed = push_folder(folder, REPO, dry_run=True)["files"]
    assert not hub.requests and not hub.repos
    sent = push_folder(folder, REPO, token=WRITER)["files"]
    assert sent == listed
    first, last = hub.repos[REPO].commits.values()
    assert set(last) - set(first) == {file["path"] for file in listed} == set(BUNDLED)
    for file in listed:
        assert file["size"] == len(last[file["path"]])
        assert file["sha256"] == hashlib.sha256(last[file["path"]]).hexdigest()


def test_a_branch_is_made_and_the_rest_of_a_repo_stays(hub, folder):
    push_folder(folder, REPO, token=WRITER)
    repo, main_commit = hub.repos[REPO], hub.repos[REPO].branches["main"]
    (folder / "notes.txt").write_text("of mine")
    push_folder(folder, REPO, revision="trial", also=["notes.txt"], commit_message="A trial", token=WRITER)
    assert repo.branches["main"] == main_commit
    assert repo.commits[repo.branches["trial"]]["notes.txt"] == b"of mine"
    assert set(repo.commits[repo.branches["trial"]]) == {*BUNDLED, ".gitattributes", "notes.txt"}
    assert Estimator.from_pretrained(REPO, revision="trial").num_parameters == METRICS["parameters"]


def test_weights_that_the_hub_has_are_not_sent_again(hub, folder):
    push_folder(folder, REPO, token=WRITER)
    assert len(hub.asked("PUT", "/lfs/")) == 2
    push_folder(folder, "org/a-copy", token=WRITER)
    assert len(hub.asked("PUT", "/lfs/")) == 2


@pytest.mark.parametrize(
    ("token", "error", "match"),
    [
        (None, PermissionError, "wants a token for org/.*hf auth login"),
        ("hf_wrong", PermissionError, "invalid or expired"),
        (READER, PermissionError, "may not write to the Hub repo org/"),
        (True, PermissionError, "no token is stored"),
    ],
)
def test_who_may_not_write_is_told(hub, folder, token, error, match):
    with pytest.raises(error, match=match):
        push_folder(folder, REPO, token=token)
    assert REPO not in hub.repos


def test_an_upload_that_fails_commits_nothing(hub, folder, monkeypatch):
    push_folder(folder, REPO, token=WRITER)
    before = dict(hub.repos[REPO].branches)
    hub.lfs.clear()
    hub.cdn = "http://127.0.0.1:9"
    with pytest.raises(ConnectionError, match="nothing was committed"):
        push_folder(folder, REPO, token=WRITER)
    assert hub.repos[REPO].branches == before


def test_without_a_network(hub, folder, monkeypatch):
    point_to(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(ConnectionError, match="cannot be reached"):
        push_folder(folder, REPO, token=WRITER)
    assert push_folder(folder, REPO, dry_run=True)["commit"] is None


def test_offline_nothing_is_pushed(hub, folder, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match=r"Nothing was sent.*HF_HUB_OFFLINE"):
        push_folder(folder, REPO, token=WRITER)
    assert not hub.requests


def test_an_estimator_in_memory_is_pushed(hub, dense):
    estimator = random_estimator(dense)
    url = estimator.push_to_hub(REPO, token=WRITER)
    assert url.startswith(f"{hub.url}/{REPO}/commit/")
    loaded = Estimator.from_pretrained(REPO)
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in estimator.tensors.items())
    card = hub.repos[REPO].commits[url.rpartition("/")[2]]["README.md"].decode()
    assert "No metrics came with these weights" in card and f'"{REPO}"' in card


def test_an_estimator_in_memory_does_not_replace_a_card(hub, folder, dense):
    push_folder(folder, REPO, token=WRITER)
    random_estimator(dense).push_to_hub(REPO, revision="trial", commit_message="Other weights", token=WRITER)
    commits = hub.repos[REPO].commits[hub.repos[REPO].branches["trial"]]
    assert commits["README.md"] == BUNDLED["README.md"]
    assert commits["config.json"] != BUNDLED["config.json"]


@pytest.mark.parametrize("name", ["name", "a/b/c", "https://huggingface.co/org/name", ""])
def test_a_name_that_is_no_repo(folder, dense, name):
    with pytest.raises(ValueError, match="give 'owner/name'"):
        push_folder(folder, name, dry_run=True)
    with pytest.raises(ValueError, match="give 'owner/name'"):
        random_estimator(dense).push_to_hub(name)


# -- what is not pushed ------------------------------------------------------------------------------------------------


def other_metrics(folder: Path) -> None:
    held_out = {**METRICS["held_out"], "mlp": {**METRICS["held_out"]["mlp"], "overlap@10": 0.9}}
    change_json(folder / "metrics.json", held_out=held_out)


WRONG: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "an unknown file": (lambda f: (f / "optimizer.bin").write_bytes(b""), ValueError, r"optimizer\.bin.*--also"),
    "a hidden folder": (lambda f: shutil.copytree(f / "hidden_states", f / ".cache"), ValueError, r"\.cache/config"),
    "a token": (lambda f: (f / ".env").write_text("HF_TOKEN=hf_x"), ValueError, r"\.env"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), FileNotFoundError, r"no model\.safetensors"),
    "no card": (lambda f: (f / "README.md").unlink(), FileNotFoundError, r"no README\.md"),
    "wrong weights": (lambda f: shutil.copy(f / "hidden_states" / "model.safetensors", f), ValueError, "shape|bytes"),
    "an unknown key": (lambda f: change_json(f / "config.json", extra=1), ValueError, "extra"),
    "another fingerprint": (lambda f: change_json(f / "config.json", fingerprint="0" * 16), ValueError, "layout"),
    "a broken scorer": (lambda f: (f / "hidden_states" / "config.json").write_text("{}"), ValueError, "hidden-state"),
    "a card without metadata": (lambda f: (f / "README.md").write_text("# A card\n"), ValueError, "library_name"),
    "a card without licence": (lambda f: change_card(f, "license: apache-2.0\n", ""), ValueError, "license"),
    "a card of no YAML": (lambda f: change_card(f, "tags:", "tags: ["), ValueError, "cannot be read"),
    "a card of another model": (lambda f: change_card(f, "tags:", "base_model: org/other\ntags:"), ValueError,
                                "must agree"),
    "a wrong model-index": (lambda f: change_card(f, "  results:", "  outcomes:"), ValueError, "cannot be read"),
    "metrics of another estimator": (lambda f: change_json(f / "metrics.json", parameters=1), ValueError, "parameters"),
    "metrics of another form": (lambda f: change_json(f / "metrics.json", held_out=[1]), ValueError, "gatesight train"),
    "metrics that are no JSON": (lambda f: (f / "metrics.json").write_text("NaN,"), ValueError, "JSON"),
    "a card that says otherwise": (other_metrics, ValueError, r"0\.900.*is missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_folder_that_is_not_right_is_not_pushed(hub, folder, case):
    spoil, error, match = WRONG[case]
    spoil(folder)
    with pytest.raises(error, match=match):
        push_folder(folder, REPO, token=WRITER)
    assert not hub.requests


def test_files_that_are_named_are_sent_and_must_be_there(folder):
    (folder / "calibration.safetensors").write_bytes(b"x")
    assert "calibration.safetensors" in {upload.path for upload in prepare(folder, ["calibration.safetensors"])}
    with pytest.raises(FileNotFoundError, match="absent"):
        prepare(folder, ["absent"])


# -- inspect -----------------------------------------------------------------------------------------------------------


def test_a_folder_and_its_repo_hold_the_same(hub, folder):
    push_folder(folder, REPO, token=WRITER)
    hub.requests.clear()
    of_folder, of_repo = inspect(folder), inspect(REPO)
    assert of_repo["commit"] == hub.repos[REPO].branches["main"] and of_folder["commit"] is None
    assert {f["path"]: f["size"] for f in of_repo["files"] if f["path"] in BUNDLED} == {
        f["path"]: f["size"] for f in of_folder["files"]
    }
    for key in set(of_folder) - {"source", "commit", "files"}:
        assert of_folder[key] == of_repo[key], key
    assert of_folder["parameters"] == METRICS["parameters"] and of_folder["metrics"] == METRICS
    assert not hub.asked("GET", "/cdn/"), "weights need not be downloaded"


def test_offline_the_cached_files_are_listed(hub, folder, monkeypatch):
    push_folder(folder, REPO, token=WRITER)
    Estimator.from_pretrained(REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert {file["path"] for file in inspect(REPO)["files"]} == {"config.json", "model.safetensors"}


def test_a_repo_without_weights_is_inspected(hub, folder, capsys):
    (folder / "model.safetensors").unlink()
    assert main(["inspect", str(folder)]) == 0
    assert "nothing to load yet" in capsys.readouterr().out


def test_what_a_repo_says_cannot_steer_a_terminal(folder, capsys):
    change_json(folder / "config.json", base_model="evil\x1b[2J")
    change_json(folder / "metrics.json", held_out={"mlp": "\x1b[31m"})
    assert main(["inspect", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "evil" in printed and "\x1b" not in printed and "is not what `gatesight train` writes" in printed


# -- the command line --------------------------------------------------------------------------------------------------


def test_a_dry_run_prints_files_sizes_and_digests(folder, capsys):
    assert main(["push", str(folder), REPO, "--dry-run", "--private"]) == 0
    printed = capsys.readouterr().out
    for name, data in BUNDLED.items():
        line = next(line for line in printed.splitlines() if line.split()[0] == name)
        assert line.split()[1:] == [f"{len(data):,}", hashlib.sha256(data).hexdigest()]
    assert f"{REPO}, private" in printed and f"{sum(map(len, BUNDLED.values())):,} bytes" in printed
    assert "nothing was sent" in printed


def test_errors_are_one_line(folder, capsys):
    (folder / "secret").write_text("")
    assert main(["push", str(folder), REPO, "--dry-run"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("gatesight: ") and error.count("\n") == 1


@pytest.mark.slow
def test_the_command_talks_to_the_hub_of_hf_endpoint(hub, folder, tmp_path):
    """A process of its own, which knows the Hub from its environment alone."""
    kept = {name: value for name, value in os.environ.items() if not name.upper().endswith("_PROXY")}
    environment = {**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": WRITER,
                   "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}  # fmt: skip
    code = (
        "import sys; from gatesight_hf.commands.cli import main; a = sys.argv[1:]; sys.exit(main(a[:3]) or main(a[3:]))"
    )
    command = [sys.executable, "-c", code, "push", str(folder), REPO, "inspect", REPO, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pushed, _, inspected = done.stdout.partition("{")
    assert f"Sent to {REPO}" in pushed and f"{hub.url}/{REPO}/commit/" in pushed
    assert json.loads("{" + inspected)["metrics"] == METRICS


# -- cards -------------------------------------------------------------------------------------------------------------


def test_the_bundled_card_is_rendered_from_the_bundled_metrics():
    assert BUNDLED["README.md"].decode() == estimator_card(METRICS)


def test_a_card_is_metadata_that_huggingface_hub_reads_back():
    card = estimator_card({**METRICS, "base_model": "Qwen/Qwen3.8-27B"})
    data = ModelCard(card).data
    assert data.base_model == "Qwen/Qwen3.8-27B" and data.library_name == "gatesight_hf"
    values = {result.metric_type: result.metric_value for result in data.eval_results}
    assert values == METRICS["held_out"]["mlp"]
    written = yaml.safe_load(card.split("---")[1])
    assert data.to_dict() == written, "nothing is lost or added by the validator"


def test_a_base_model_that_is_no_repo_is_not_named_as_one():
    for name in ("gatesight-reference", "./models/tiny", "/models/tiny"):
        assert ModelCard(estimator_card({**METRICS, "base_model": name})).data.base_model is None


def test_rows_are_those_of_the_metrics():
    assert held_out_rows(METRICS)[0].startswith("| mlp | 0.488 |")
    assert len(held_out_rows(METRICS)) == len(METRICS["held_out"])


def test_a_card_that_the_hub_refuses_is_not_committed(hub: FakeHub, folder: Path) -> None:
    change_card(folder, "license: apache-2.0", "license: mine")
    with pytest.raises(ValueError, match="license"):
        push_folder(folder, REPO, token=WRITER)
    assert len(hub.repos[REPO].commits) == 1
