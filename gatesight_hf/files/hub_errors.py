"""What can go wrong on the Hub, as built-in errors whose messages say the mend."""

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import get_token
from huggingface_hub.errors import (
    DisabledRepoError,
    FileMetadataError,
    GatedRepoError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

LOG_IN = "log in with `hf auth login`, set HF_TOKEN or pass a token"


@contextmanager
def explaining(
    repo_id: str, revision: str | None, token: str | bool | None, offline: bool, name: str | None = None
) -> Iterator[None]:
    """Turn what huggingface_hub raises into built-in errors with a mend; `name`: of the file read, None for writing."""
    try:
        yield
    except (HTTPError, HFValidationError, OSError) as error:
        explained = _explained(error, repo_id, revision or "main", token, offline, name)
        if explained is None:
            raise
        raise explained from error


def _explained(
    error: BaseException, repo_id: str, revision: str, token: str | bool | None, offline: bool, name: str | None
) -> Exception | None:
    """None for an error that is not of the Hub's making, such as a full disk."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    has_token = bool(token) if isinstance(token, str) or token is False else get_token() is not None
    meant = "" if name is None else f"{repo_id!r} is no folder here, so a Hub repo is meant, but "
    if isinstance(error, LocalTokenNotFoundError):
        return PermissionError(f"token=True, but no token is stored: {LOG_IN}.")
    if isinstance(error, GatedRepoError):
        mend = "with the account of your token" if has_token else f"then {LOG_IN}"
        return PermissionError(f"The Hub repo {repo_id} is gated: ask for access on its page, {mend}.")
    if isinstance(error, RepositoryNotFoundError):
        seen = "your token can see" if has_token else "can be seen without a token"
        mend = "use a token of an account that may read it" if has_token else LOG_IN
        return FileNotFoundError(
            f"{meant}there is no {repo_id} on the Hub that {seen}. Check the name; if the repo is private, {mend}."
        )
    if isinstance(error, DisabledRepoError):
        return PermissionError(f"The Hub repo {repo_id} has been disabled by the Hub or its owner.")
    if isinstance(error, RevisionNotFoundError):
        return FileNotFoundError(
            f"The Hub repo {repo_id} has no revision {revision!r}: give a branch, a tag or a commit of it."
        )
    if isinstance(error, RemoteEntryNotFoundError):
        return FileNotFoundError(
            f"The Hub repo {repo_id} has no {name} at revision {revision!r}: an estimator has config.json and "
            "model.safetensors. Check the name and the revision."
        )
    if isinstance(error, (LocalEntryNotFoundError, OfflineModeIsEnabled)):
        if offline and name is None:
            return ConnectionError(f"Nothing was sent to {repo_id}: HF_HUB_OFFLINE=1 keeps the Hub from being asked.")
        if offline:
            return FileNotFoundError(
                f"{meant}{name} at revision {revision!r} is not in the cache, and offline the Hub is not "
                "asked. Load it once without HF_HUB_OFFLINE and local_files_only, or give the cache_dir that has it."
            )
        if error.__cause__ is None:
            return ConnectionError(f"{meant}{error}")
        error = error.__cause__
        status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, HFValidationError):
        return ValueError(f"{repo_id!r} is neither a folder here nor a valid name of a Hub repo: {error}")
    if status == 401 and not has_token:
        return PermissionError(f"The Hub wants a token for {repo_id}: {LOG_IN}.")
    if status == 401:
        return PermissionError(
            f"The Hub refused the token for {repo_id} as invalid or expired: give one that is valid."
        )
    if status == 403:
        return PermissionError(
            f"The token may not {'write to' if name is None else 'read'} the Hub repo {repo_id}: use one with that "
            "right, of an account that has it too."
        )
    if status is not None:
        later = "Try again later. " if status == 429 or status >= 500 else ""
        return ConnectionError(f"The Hub answered {status} for {repo_id}. {later}{str(error).strip()}")
    if isinstance(error, HTTPError):
        return ConnectionError(
            f"{meant}the Hub cannot be reached ({str(error) or type(error).__name__}). Check the network, or "
            "HF_ENDPOINT if you use a mirror; what is in the cache loads offline too."
        )
    if isinstance(error, FileMetadataError):
        return ConnectionError(f"{meant}{error}")
    if type(error) is OSError and error.errno is None:
        return ConnectionError(f"What the Hub sent of {name} in {repo_id} is not what it announced. Try again. {error}")
    return None
