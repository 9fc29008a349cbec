"""Estimators load from the Hub: over real HTTP, from a server on loopback that answers as the Hub does."""

import hashlib
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from gatesight_hf import Estimator, GateSightCache, Session
from gatesight_hf.commands.cli import main
from gatesight_hf.methods.hidden import HiddenStateConfig, HiddenStateScorer
from gatesight_hf.models import HybridSpec
from gatesight_hf.reference import ESTIMATOR_PATH

from ..helpers.hub_server import READER, STRANGER, FakeHub, FakeRepo, point_to
from ..helpers.models import random_estimator, random_tensors
from ..helpers.paths import ROOT

pytestmark = pytest.mark.core

REPO = "org/gatesight-tiny"


@pytest.fixture
def estimator(dense: Any) -> Estimator:
    return random_estimator(dense)


def files_of(scorer: Any, folder: Path) -> dict[str, bytes]:
    scorer.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def files(estimator: Estimator, tmp_path: Path) -> dict[str, bytes]:
    return files_of(estimator, tmp_path / "saved")


@pytest.fixture
def repo(hub: FakeHub, files: dict[str, bytes]) -> FakeRepo:
    hub.repos[REPO] = FakeRepo()
    hub.repos[REPO].commit({"README.md": b"---\nlicense: apache-2.0\n---\n", "evil.py": b"raise SystemExit", **files})
    return hub.repos[REPO]


def same(a: Any, b: Any) -> bool:
    return a.config == b.config and all(torch.equal(tensor, b.tensors[name]) for name, tensor in a.tensors.items())


# -- what is loaded ----------------------------------------------------------------------------------------------------


def test_a_repo_gives_the_estimator_that_was_saved(hub, repo, estimator):
    assert same(Estimator.from_pretrained(REPO), estimator)


def test_two_named_files_are_asked_for_and_no_other(hub, repo):
    Estimator.from_pretrained(REPO)
    paths = {path.rpartition("/")[2] for method, path, _ in hub.requests if "/resolve/" in path}
    assert paths == {"config.json", "model.safetensors"}


def test_both_files_are_of_one_commit(hub, repo, dense, tmp_path, monkeypatch):
    """A push between both downloads does not mix two estimators."""
    first, other = repo.branches["main"], random_estimator(dense, seed=1, hidden_size=8)
    from_dict = type(other.config).from_dict

    def pushed_meanwhile(data: dict[str, Any]) -> Any:
        repo.commit(files_of(other, tmp_path / "other"))
        return from_dict(data)

    monkeypatch.setattr(type(other.config), "from_dict", pushed_meanwhile)
    loaded = Estimator.from_pretrained(REPO)
    monkeypatch.undo()
    assert loaded.config.hidden_size == 16
    assert all(first in path for method, path, _ in hub.requests if path.endswith("safetensors"))


def test_what_is_cached_is_not_downloaded_again(hub, repo, estimator):
    Estimator.from_pretrained(REPO)
    hub.requests.clear()
    assert same(Estimator.from_pretrained(REPO), estimator)
    assert not hub.asked("GET", "/")


def test_a_cache_and_a_session_open_from_a_repo(hub, dense, bundled, tmp_path):
    shipped = {name: (ESTIMATOR_PATH / name).read_bytes() for name in ("config.json", "model.safetensors")}
    hub.repos["org/reference"] = FakeRepo()
    hub.repos["org/reference"].commit(shipped, "v1")
    model, tokenizer = bundled
    cache = GateSightCache.from_pretrained("org/reference", model=model, revision="v1", kept_fraction=0.5)
    assert same(cache.scorer, Estimator.from_pretrained(ESTIMATOR_PATH))
    text = "one of the special magic numbers for amber-river is : 4 8 2 1 . " * 4
    asked = "question : what is the special magic number for amber-river ? answer :"
    session = Session.open(model, tokenizer, "org/reference", text, kept_fraction=0.5, revision="v1")
    assert session.ask(asked, max_new_tokens=4) == "4 8 2 1"
    session.save(tmp_path / "doc")
    loaded = Session.load(tmp_path / "doc", model, tokenizer, Estimator.from_pretrained("org/reference", revision="v1"))
    assert loaded.ask(asked, max_new_tokens=4) == "4 8 2 1"
    hub.repos["org/reference"].commit(shipped)
    (tmp_path / "text").write_text(text)
    assert main(["ask", "--document", str(tmp_path / "text"), "--estimator", "org/reference", "--question", asked]) == 0


def test_a_hidden_state_scorer_loads_from_its_subfolder(hub, repo, dense, tmp_path):
    config = HiddenStateConfig.for_model(HybridSpec.from_config(dense.config), "tiny", 64, 8)
    scorer = HiddenStateScorer(config, random_tensors(config))
    repo.commit({f"hidden_states/{name}": data for name, data in files_of(scorer, tmp_path / "hidden").items()})
    assert same(HiddenStateScorer.from_pretrained(REPO, subfolder="hidden_states"), scorer)
    shutil.copytree(tmp_path / "hidden", tmp_path / "saved" / "hidden_states")
    assert same(HiddenStateScorer.from_pretrained(tmp_path / "saved", subfolder="hidden_states"), scorer)


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub, repo, dense, estimator, tmp_path):
    first = repo.branches["main"]
    other = random_estimator(dense, seed=1)
    repo.commit(files_of(other, tmp_path / "other"))
    repo.branches["feature/window"] = first
    assert same(Estimator.from_pretrained(REPO), other)
    assert same(Estimator.from_pretrained(REPO, revision=first), estimator)
    assert same(Estimator.from_pretrained(REPO, revision="feature/window"), estimator)


def test_a_renamed_repo_is_followed(hub, repo, estimator):
    hub.moved["org/old-name"] = REPO
    assert same(Estimator.from_pretrained("org/old-name"), estimator)


def test_a_token_opens_a_private_repo_and_stays_on_the_hub(hub, repo, estimator):
    repo.private = True
    assert same(Estimator.from_pretrained(REPO, token=READER), estimator)
    assert all(headers["authorization"] == f"Bearer {READER}" for headers in hub.asked("HEAD", "/resolve/"))
    assert hub.asked("GET", "/cdn/") and not any("authorization" in headers for headers in hub.asked("GET", "/cdn/"))


def test_a_download_that_breaks_off_goes_on_where_it_stopped(hub, repo, estimator, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.cuts = 2
    assert same(Estimator.from_pretrained(REPO), estimator)
    ranges = [headers.get("range") for headers in hub.asked("GET", "/cdn/")]
    starts = [int(r.removeprefix("bytes=").rstrip("-")) for r in ranges[1:]]
    assert ranges[0] is None and len(starts) == 2 and 0 < starts[0] < starts[1]


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_weights_that_are_too_large_are_not_downloaded(hub, repo):
    repo.commit({"model.safetensors": b"x" * 10**6})
    with pytest.raises(ValueError, match=r"1,000,000 bytes.*not downloaded"):
        Estimator.from_pretrained(REPO)
    assert not hub.asked("GET", "/cdn/")


def test_a_config_that_is_too_large_is_not_downloaded(hub, repo):
    repo.commit({"config.json": b" " * (1 << 20) + b"{}"})
    with pytest.raises(ValueError, match=r"config\.json in the Hub repo .*not downloaded"):
        Estimator.from_pretrained(REPO)
    assert not hub.asked("GET", "config.json")


def test_a_pickle_under_the_name_of_weights_is_not_run(hub, repo):
    repo.commit({"model.safetensors": b"\x80\x04cos\nsystem\n(S'false'\ntR."})
    with pytest.raises(ValueError, match="not a safetensors file"):
        Estimator.from_pretrained(REPO)


def test_weights_of_another_shape_are_refused(hub, repo, dense, tmp_path):
    repo.commit(
        {"model.safetensors": files_of(random_estimator(dense, hidden_size=8), tmp_path / "o")["model.safetensors"]}
    )
    with pytest.raises(ValueError, match=r"layers\.0\.weight_in must be .* \(2, 39, 16\), got .* \(2, 39, 8\)"):
        Estimator.from_pretrained(REPO)


Wrong = Callable[[FakeHub, FakeRepo], Any]
FAILURES: dict[str, tuple[Wrong, dict[str, Any], type[OSError], str]] = {
    "a missing repo": (lambda hub, repo: hub.repos.clear(), {}, FileNotFoundError,
                       r"no folder here, so a Hub repo is meant, but there is no .* without a token.*hf auth login"),
    "a missing repo, with a token": (lambda hub, repo: hub.repos.clear(), {"token": READER}, FileNotFoundError,
                                     "there is no .* your token can see"),
    "a private repo": (lambda hub, repo: setattr(repo, "private", True), {}, FileNotFoundError,
                       "if the repo is private, log in"),
    "another's private repo": (lambda hub, repo: setattr(repo, "private", True), {"token": STRANGER},
                               FileNotFoundError, "if the repo is private, use a token of an account"),
    "a gated repo": (lambda hub, repo: setattr(repo, "gated", True), {}, PermissionError,
                     "gated: ask for access .*then log in"),
    "a gated repo, with a token": (lambda hub, repo: setattr(repo, "gated", True), {"token": STRANGER},
                                   PermissionError, "gated: ask for access .*account of your token"),
    "an invalid token": (lambda hub, repo: None, {"token": "hf_wrong"}, PermissionError, "invalid or expired"),
    "no stored token": (lambda hub, repo: None, {"token": True}, PermissionError, "no token is stored"),
    "a wrong revision": (lambda hub, repo: None, {"revision": "v9"}, FileNotFoundError, "no revision 'v9'"),
    "a missing config": (lambda hub, repo: repo.commits[repo.branches["main"]].pop("config.json"), {},
                         FileNotFoundError, r"no config\.json at revision 'main'"),
    "missing weights": (lambda hub, repo: repo.commits[repo.branches["main"]].pop("model.safetensors"), {},
                        FileNotFoundError, r"no model\.safetensors at revision"),
    "a Hub out of order": (lambda hub, repo: setattr(hub, "failing", 503), {}, ConnectionError,
                           "answered 503.*Try again"),
    "too many requests": (lambda hub, repo: setattr(hub, "failing", 429), {}, ConnectionError, "answered 429"),
    "the cache alone": (lambda hub, repo: None, {"local_files_only": True}, FileNotFoundError,
                        "not in the cache, and offline"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILURES)
def test_every_failure_has_its_own_message(hub, repo, case):
    break_it, options, error, match = FAILURES[case]
    break_it(hub, repo)
    with pytest.raises(error, match=match) as caught:
        Estimator.from_pretrained(REPO, **options)
    assert REPO in str(caught.value) or "token" in options


def test_the_messages_differ(hub, files, tmp_path):
    """Each says what it is about. Whether a repo is missing or private, the Hub does not tell who may not see it."""
    messages = []
    for case, (break_it, options, error, _) in FAILURES.items():
        hub.failing, hub.repos[REPO] = None, FakeRepo()
        hub.repos[REPO].commit(files)
        break_it(hub, hub.repos[REPO])
        with pytest.raises(error, match=r"Hub|token") as caught:
            Estimator.from_pretrained(REPO, cache_dir=tmp_path / case, **options)
        messages.append(str(caught.value))
    assert len(set(messages)) == len(messages) - 2


def test_a_download_of_another_length_than_announced_is_refused(hub, repo):
    hub.lie = 3
    with pytest.raises(ConnectionError, match="not what it announced"):
        Estimator.from_pretrained(REPO)
    hub.lie = 0
    Estimator.from_pretrained(REPO)


def test_a_hub_that_cannot_be_reached(hub, repo, estimator, monkeypatch):
    Estimator.from_pretrained(REPO)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        point_to(monkeypatch, f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(ConnectionError, match=r"no folder here.* cannot be reached .*HF_ENDPOINT"):
            Estimator.from_pretrained("org/another")
        assert same(Estimator.from_pretrained(REPO), estimator), "what is cached loads without the network"


def test_a_server_that_is_no_hub(hub, repo, monkeypatch):
    monkeypatch.setattr("tests.helpers.hub_server.Handler.resolve", lambda self, *of_file: self.answer(200, b"hello"))
    with pytest.raises(ConnectionError, match="HF_ENDPOINT"):
        Estimator.from_pretrained(REPO)


@pytest.mark.parametrize("how", ["environment", "argument"])
def test_offline_the_cache_is_read_and_nothing_is_asked(hub, repo, estimator, monkeypatch, how):
    Estimator.from_pretrained(REPO)
    hub.requests.clear()
    if how == "environment":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    options = {"local_files_only": how == "argument"}
    assert same(Estimator.from_pretrained(REPO, **options), estimator)
    with pytest.raises(FileNotFoundError, match="not in the cache, and offline"):
        Estimator.from_pretrained("org/another", **options)
    with pytest.raises(FileNotFoundError, match="v9"):
        Estimator.from_pretrained(REPO, revision="v9", **options)
    assert not hub.requests


def test_a_cache_dir_is_used(hub, repo, estimator, tmp_path):
    Estimator.from_pretrained(REPO, cache_dir=tmp_path / "mine")
    hub.requests.clear()
    assert same(Estimator.from_pretrained(REPO, cache_dir=tmp_path / "mine", local_files_only=True), estimator)
    with pytest.raises(FileNotFoundError):
        Estimator.from_pretrained(REPO, local_files_only=True)


# -- folder or repo ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source", ["./org/name", "/org/name", "~/name", "name", "a/b/c", "org/", "org/na me", "org\\name", Path("org/name")]
)
def test_other_forms_are_folders(hub, tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no such folder.*'owner/name'"):
        Estimator.from_pretrained(source)
    assert not hub.requests


def test_a_folder_goes_before_a_repo_of_its_name(hub, repo, dense, tmp_path, monkeypatch):
    other = random_estimator(dense, seed=1)
    other.save_pretrained(tmp_path / REPO)
    monkeypatch.chdir(tmp_path)
    assert same(Estimator.from_pretrained(REPO), other)
    assert not hub.requests


def test_a_folder_has_no_revision(tmp_path, estimator):
    estimator.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"revision='v1' is for Hub repos"):
        Estimator.from_pretrained(tmp_path, revision="v1")


@pytest.mark.parametrize("source", ["org/a--b", "org/a..b", "-org/name", "org/name.git"])
def test_a_name_that_the_hub_does_not_allow(hub, source):
    with pytest.raises(ValueError, match="neither a folder here nor a valid name"):
        Estimator.from_pretrained(source)


def test_only_the_hub_modules_import_huggingface_hub():
    modules = [path for room in ("gatesight_hf", "kernels", "eval") for path in (ROOT / room).rglob("*.py")]
    lines = [(path.name, line.strip()) for path in modules for line in path.read_text(encoding="utf-8").splitlines()]
    assert {name for name, line in lines if re.match("(import|from) huggingface_hub", line)} == {
        "hub.py", "hub_errors.py", "quiet.py",  # the last turns its bars off
    }  # fmt: skip


def test_bytes_of_a_download_are_those_of_the_repo(hub, repo, files):
    Estimator.from_pretrained(REPO)
    blobs = {path.name: path.read_bytes() for path in Path(constants.HF_HUB_CACHE).rglob("blobs/*")}
    digest = hashlib.sha256(files["model.safetensors"]).hexdigest()
    assert blobs[digest] == files["model.safetensors"]
