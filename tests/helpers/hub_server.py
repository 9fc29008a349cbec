"""A Hub on loopback: the endpoints that huggingface_hub calls to read and to write a model repo, over real HTTP.

Large files go through LFS and are served from another origin, as the Hub's are from its CDN. Small ones are git blobs.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
import yaml
from huggingface_hub import constants

READER, WRITER, STRANGER = "hf_reader", "hf_writer", "hf_stranger"


@dataclass
class FakeRepo:
    """Commits by hash, branches by name; what it takes to read it."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        files = {**self.commits.get(self.branches.get(branch, ""), {}), **files}
        listing = sorted((name, hashlib.sha256(data).hexdigest()) for name, data in files.items())
        sha = hashlib.sha1(repr((len(self.commits), listing)).encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha
        return sha


@dataclass
class FakeHub:
    """State of the server, and all that it was asked."""

    repos: dict[str, FakeRepo] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)
    lfs: dict[str, bytes] = field(default_factory=dict)
    #: `(method, path, headers)` of each request.
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    #: Answer of every request to `resolve`, if set.
    failing: int | None = None
    #: Downloads from the CDN that break off half-way before one goes through.
    cuts: int = 0
    #: Added to the sizes of large files that the Hub announces.
    lie: int = 0
    url: str = ""
    cdn: str = ""

    def asked(self, method: str, part: str) -> list[dict[str, str]]:
        """Headers of the requests of a kind."""
        return [headers for m, path, headers in self.requests if m == method and part in path]


def is_lfs(name: str) -> bool:
    return name.endswith(".safetensors")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, status: int, body: bytes | dict[str, Any] = b"", **headers: str) -> None:
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def refuse(self, status: int, code: str | None, message: str, **headers: str) -> None:
        headers = {**headers, "X_Error_Message": message, **({"X_Error_Code": code} if code else {})}
        self.answer(status, {"error": message}, **headers)

    @property
    def token(self) -> str | None:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

    def readable(self, name: str) -> FakeRepo | None:
        """The repo, unless this request may not read it and has been told so, with the Hub's status and headers."""
        repo = self.hub.repos.get(name)
        if self.token is not None and self.token not in (READER, WRITER, STRANGER):
            self.refuse(401, None, "Invalid credentials in Authorization header")
        elif repo is None or (repo.private and self.token not in (READER, WRITER)):
            self.refuse(404 if self.token else 401, "RepoNotFound", "Repository not found")
        elif repo.gated and self.token not in (READER, WRITER):
            self.refuse(403 if self.token else 401, "GatedRepo", f"Access to model {name} is restricted.")
        else:
            return repo
        return None

    def files(self, repo: FakeRepo, revision: str) -> tuple[str, dict[str, bytes]] | None:
        sha = repo.branches.get(revision, revision)
        if sha not in repo.commits:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return sha, repo.commits[sha]

    def route(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length)
        self.hub.requests.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}))
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        match parts:
            case ["cdn", sha]:
                self.cdn(self.hub.lfs[sha])
            case [owner, name, "resolve", revision, *path]:
                self.resolve(f"{owner}/{name}", revision, "/".join(path))
            case ["api", "models", owner, name]:
                self.info(f"{owner}/{name}", "main")
            case ["api", "models", owner, name, "revision", revision]:
                self.info(f"{owner}/{name}", revision)
            case ["api", "validate-yaml"]:
                self.validate(json.loads(self.body)["content"])
            case ["lfs", sha] if self.command == "PUT":
                assert hashlib.sha256(self.body).hexdigest() == sha
                self.hub.lfs[sha] = self.body
                self.answer(200)
            case ["api", "repos", "create"]:
                asked = json.loads(self.body)
                self.create(f"{asked['organization']}/{asked['name']}", asked.get("visibility") == "private")
            case [owner, name, "info", "lfs", "objects", "batch"]:
                self.batch(json.loads(self.body)["objects"])
            case ["api", "models", owner, name, "branch", branch]:
                repo = self.hub.repos[f"{owner}/{name}"]
                known = branch in repo.branches
                repo.branches.setdefault(branch, repo.branches.get("main", ""))
                self.answer(409 if known else 200, {})
            case ["api", "models", owner, name, "preupload", revision]:
                self.preupload(self.hub.repos[f"{owner}/{name}"], revision, json.loads(self.body)["files"])
            case ["api", "models", owner, name, "commit", revision]:
                self.commit(f"{owner}/{name}", revision)
            case _:
                self.answer(404, {"error": f"This Hub does not know {self.command} {self.path}."})

    do_GET = do_HEAD = do_POST = do_PUT = route  # noqa: N815 - named by http.server

    # -- reading -------------------------------------------------------------------------------------------------------

    def resolve(self, name: str, revision: str, path: str) -> None:
        if self.hub.failing is not None:
            return self.refuse(self.hub.failing, None, "Out of order")
        if name in self.hub.moved:
            return self.answer(307, Location=f"/{self.hub.moved[name]}/resolve/{revision}/{path}")
        repo = self.readable(name)
        found = self.files(repo, revision) if repo else None
        if found is None:
            return None
        sha, files = found
        if path not in files:
            return self.refuse(404, "EntryNotFound", "Entry not found", X_Repo_Commit=sha)
        data = files[path]
        if is_lfs(path):
            size = str(len(data) + self.hub.lie)
            digest = hashlib.sha256(data).hexdigest()
            self.hub.lfs[digest] = data
            linked = {"X_Linked_Size": size, "X_Linked_ETag": f'"{digest}"', "ETag": '"a pointer"'}
            return self.answer(302, X_Repo_Commit=sha, Location=f"{self.hub.cdn}/cdn/{digest}", **linked)
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        return self.answer(200, data, X_Repo_Commit=sha, ETag=f'"{blob}"')

    def cdn(self, data: bytes) -> None:
        asked = self.headers.get("Range")
        first = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        headers = {"Content_Length": str(len(data) - first), "ETag": '"cdn"'}
        if asked:
            headers["Content_Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        if self.hub.cuts:
            self.hub.cuts -= 1
            half = data[first : first + (len(data) - first) // 2]
            self.answer(206 if asked else 200, half, **headers)
            self.wfile.flush()
            self.close_connection = True
        else:
            self.answer(206 if asked else 200, data[first:], **headers)

    def info(self, name: str, revision: str) -> None:
        repo = self.readable(name)
        found = self.files(repo, revision) if repo else None
        if found is None or repo is None:
            return
        siblings = []
        for path, data in found[1].items():
            of_file: dict[str, Any] = {"rfilename": path, "size": len(data)}
            if is_lfs(path):
                of_file["lfs"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 134}
            siblings.append(of_file)
        self.answer(200, {"id": name, "sha": found[0], "private": repo.private, "siblings": siblings, "tags": []})

    # -- writing -------------------------------------------------------------------------------------------------------

    def create(self, name: str, private: bool) -> None:
        if self.token is None:
            self.refuse(401, None, "Invalid username or password.")
        elif self.token not in (READER, WRITER, STRANGER):
            self.refuse(401, None, "Invalid credentials in Authorization header")
        elif self.token != WRITER:
            self.refuse(403, None, f"You don't have the rights to create a model under {name}")
        elif name in self.hub.repos:
            self.answer(409, {"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"})
        else:
            self.hub.repos[name] = FakeRepo(private=private)
            self.hub.repos[name].commit({".gitattributes": b"*.safetensors filter=lfs\n"})
            self.answer(200, {"url": f"{self.hub.url}/{name}", "name": name})

    def validate(self, content: str) -> None:
        """The Hub's check of a card's metadata, as far as this test needs it: the names of some fields and licences."""
        metadata = yaml.safe_load(content.split("---")[1]) if content.startswith("---") else None
        errors = [] if metadata and metadata.get("license") == "apache-2.0" else [{"message": '"license" is not valid'}]
        self.answer(400 if errors else 200, {"errors": errors, "warnings": []})

    def preupload(self, repo: FakeRepo, revision: str, files: list[dict[str, Any]]) -> None:
        modes = [
            {"path": f["path"], "uploadMode": "lfs" if is_lfs(f["path"]) else "regular", "shouldIgnore": False}
            for f in files
        ]
        self.answer(200, {"files": modes})

    def batch(self, objects: list[dict[str, Any]]) -> None:
        answers = []
        for item in objects:
            known = item["oid"] in self.hub.lfs
            actions = {} if known else {"actions": {"upload": {"href": f"{self.hub.cdn}/lfs/{item['oid']}"}}}
            answers.append({**item, **actions})
        self.answer(200, {"transfer": "basic", "objects": answers})

    def commit(self, name: str, revision: str) -> None:
        if self.token != WRITER:
            return self.refuse(403, None, "You have no write access")
        files: dict[str, bytes] = {}
        for line in self.body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.hub.lfs[value["oid"]]
        sha = self.hub.repos[name].commit(files, revision)
        url = f"{self.hub.url}/{name}/commit/{sha}"
        return self.answer(200, {"commitUrl": url, "commitOid": sha, "pullRequestUrl": None})


@contextmanager
def serve() -> Iterator[FakeHub]:
    """A Hub that runs until the block ends, at `url`; its CDN is the same server under another name."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    hub.url, hub.cdn = (f"http://{host}:{server.server_port}" for host in ("127.0.0.1", "localhost"))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A Hub that huggingface_hub takes for the real one, with an empty cache and nobody logged in."""
    with serve() as hub:
        point_to(monkeypatch, hub.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        yield hub
    huggingface_hub.close_session()


def point_to(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    huggingface_hub.close_session()
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    # The client waits between tries, which takes half a minute where there is no network.
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
