"""Where the files of estimators come from and go to: folders, and repos on the Hub.

Only this module and `hub_errors` know huggingface_hub. A repo is read one named file at a time, all from one commit,
each size checked before the download; nothing of it is run or unpickled. Every way to fail has a message that says the
mend.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, hf_hub_download, is_offline_mode

from gatesight_kernels.checks import described

from .hub_errors import explaining

CARD_NAME = "README.md"
REPO_ID = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}", re.ASCII)


@dataclass(frozen=True)
class FileInfo:
    """A file of a folder or a repo: path within it, bytes, and its SHA-256 where that is known without reading it."""

    path: str
    size: int
    sha256: str | None = None


class Folder:
    """Files of a local folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.commit: str | None = None

    def __str__(self) -> str:
        return str(self.path)

    def get(self, name: str, most: int) -> Path:
        """Path of a file.

        Raises:
            FileNotFoundError: There is none.
            ValueError: It has more than `most` bytes.
        """
        path = self.path / name
        if not path.is_file():
            form = "no such folder" if not self.path.is_dir() else f"no {name} in that folder"
            raise FileNotFoundError(
                f"{str(self.path)!r}: {form}. An estimator is a folder with config.json and model.safetensors, as "
                "`gatesight train` writes it, or a Hub repo, given as 'owner/name'."
            )
        if path.stat().st_size > most:
            raise ValueError(f"{path} has {path.stat().st_size:,} bytes, where at most {most:,} make sense.")
        return path

    def files(self) -> list[FileInfo]:
        """All files below the folder."""
        paths = sorted(path for path in self.path.rglob("*") if path.is_file())
        return [FileInfo(path.relative_to(self.path).as_posix(), path.stat().st_size) for path in paths]


class Repo:
    """Files of one commit of a model repo on the Hub; the commit is fixed by the first file.

    Args:
        repo_id: `owner/name`.
        revision: Branch, tag or commit; None is `main`.
        token: A token, True for the one logged in with, False for none; None uses one if there is one.
        cache_dir: Folder of the cache; None is huggingface_hub's.
        local_files_only: Read the cache alone. `HF_HUB_OFFLINE=1` does the same.
    """

    def __init__(
        self,
        repo_id: str,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
    ) -> None:
        self.repo_id = repo_id
        self.commit: str | None = None
        self._revision = revision
        self._token = token
        self._offline = local_files_only or is_offline_mode()
        self._options: dict[str, Any] = {
            "token": token,
            "cache_dir": cache_dir,
            "local_files_only": local_files_only,
            "library_name": "gatesight_hf",
        }

    def __str__(self) -> str:
        return self.repo_id

    def get(self, name: str, most: int) -> Path:
        """Path of a file in the cache, downloaded if need be. Its size is asked for first.

        Raises:
            FileNotFoundError: No such repo, revision or file; or offline, and the file is not in the cache.
            PermissionError: A gated or disabled repo, or a token that does not work.
            ConnectionError: The Hub cannot be reached, or does not answer as it should.
            ValueError: The file has more than `most` bytes.
        """
        revision = self.commit or self._revision
        with self._explaining(name):
            asked = hf_hub_download(self.repo_id, name, revision=revision, dry_run=True, **self._options)
        if asked.file_size is None or asked.file_size > most:
            size = "an unknown number of" if asked.file_size is None else f"{asked.file_size:,}"
            raise ValueError(
                f"{name} in the Hub repo {self.repo_id} has {size} bytes, where at most {most:,} make sense; it was "
                "not downloaded."
            )
        with self._explaining(name):
            path = Path(hf_hub_download(self.repo_id, name, revision=revision, **self._options))
        # The cache's layout is documented: snapshots/<commit>/<name>.
        self.commit = path.parents[name.count("/")].name
        return path

    def files(self) -> list[FileInfo]:
        """All files of the commit; offline, those of it that are in the cache.

        Raises:
            FileNotFoundError, PermissionError, ConnectionError: See `get`.
        """
        if self._offline:
            snapshot = Folder(self.get("config.json", 1 << 20).parent)
            return snapshot.files()
        with self._explaining("config.json"):
            info = HfApi(token=self._token).model_info(
                self.repo_id, revision=self.commit or self._revision, files_metadata=True
            )
        self.commit = info.sha
        return [
            FileInfo(file.rfilename, file.size or 0, file.lfs.sha256 if file.lfs else None)
            for file in sorted(info.siblings or [], key=lambda file: file.rfilename)
        ]

    def _explaining(self, name: str) -> AbstractContextManager[None]:
        return explaining(self.repo_id, self._revision, self._token, self._offline, name)


def open_source(source: str | Path, *, revision: str | None = None, **options: Any) -> Folder | Repo:
    """The folder or the Hub repo that is meant.

    A folder that exists is one. So is every `Path`, and text of any form but `owner/name`.

    Args:
        source: Folder or repo.
        revision, options: See `Repo`; a folder takes no revision.

    Raises:
        TypeError: The source is no text and no path.
        ValueError: A revision of a folder.
    """
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            f"source: an estimator is given as a folder, or a Hub repo 'owner/name', got {described(source)}."
        )
    path = Path(source).expanduser()
    if isinstance(source, str) and REPO_ID.fullmatch(source) and not path.is_dir():
        return Repo(source, revision, **options)
    if revision is not None:
        raise ValueError(f"revision={revision!r} is for Hub repos, given as 'owner/name'; {str(source)!r} is a folder.")
    return Folder(path)


# -- writing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Upload:
    """A file to be sent: its path in the repo and its bytes."""

    path: str
    data: bytes

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def info(self) -> FileInfo:
        return FileInfo(self.path, len(self.data), self.sha256)


def check_repo_id(repo_id: str) -> None:
    """Raises ValueError unless `repo_id` has the form `owner/name`."""
    if not is_repo_id(repo_id):
        raise ValueError(f"repo_id {described(repo_id)} is no name of a Hub repo: give 'owner/name'.")


def is_repo_id(source: str) -> bool:
    """Whether a text has the form of a repo's id, `owner/name`."""
    return isinstance(source, str) and REPO_ID.fullmatch(source) is not None


def push(
    repo_id: str,
    files: list[Upload],
    *,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str,
    token: str | bool | None = None,
    default_card: str | None = None,
) -> str:
    """Send files in one commit to a model repo, which is made if need be, and its branch too. Returns the commit's URL.

    Args:
        repo_id: `owner/name`.
        files: All that is sent; what else the repo holds stays.
        private: Of a repo that is made; None is the owner's default.
        revision: Branch; None is `main`.
        commit_message: Of the commit.
        token: See `Repo`.
        default_card: A card for a repo that has none.

    Raises:
        ValueError: A name that is none of a repo, or a card that the Hub refuses.
        PermissionError, ConnectionError, FileNotFoundError: See `Repo.get`.
    """
    check_repo_id(repo_id)
    api = HfApi(token=token, library_name="gatesight_hf")
    with explaining(repo_id, revision, token, is_offline_mode()):
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        if default_card is not None and not api.file_exists(repo_id, CARD_NAME, revision=revision):
            files = [*files, Upload(CARD_NAME, default_card.encode())]
        operations = [CommitOperationAdd(file.path, file.data) for file in files]
        try:
            commit = api.create_commit(repo_id, operations, commit_message=commit_message, revision=revision)
        except RuntimeError as error:  # of the threads that upload
            raise ConnectionError(f"The upload to {repo_id} failed; nothing was committed. {error}") from error
    return str(commit.commit_url)


def card_metadata(text: str) -> Mapping[str, Any]:
    """The metadata of a card, checked as far as that goes without the Hub.

    Raises:
        ValueError: No metadata, no YAML, no licence, another library, or evaluation results of the wrong form.
    """
    try:
        data = ModelCard(text).data
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise ValueError(f"{CARD_NAME}: its metadata cannot be read: {error}") from error
    metadata: dict[str, Any] = data.to_dict()
    if metadata.get("library_name") != "gatesight_hf" or not metadata.get("license"):
        raise ValueError(f"{CARD_NAME}: its metadata must have `library_name: gatesight_hf` and a `license`.")
    return metadata
