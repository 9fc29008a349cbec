"""Clients of a server: whose a request is, which session it is about, and what it may not ask."""

import hashlib
import json
import os
import secrets
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from .options import ASK, KINDS, LONGEST_ID, OPEN, Asked

Scope = MutableMapping[str, Any]

COMPLETIONS, CHATS = ASKED_HERE = "/v1/completions", "/v1/chat/completions"
#: In bytes: what a digest of an API key has.
OWNER_SIZE = 16
#: Characters of a session's id, besides that.
LONGEST_NAME = LONGEST_ID - 2 * OWNER_SIZE - 1
KIND_OF_ERROR = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    409: "ConflictError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class RefusedError(Exception):
    """A response that ends a request: status and JSON."""

    def __init__(self, status: int, response: dict[str, Any]) -> None:
        super().__init__(status, response)
        self.status, self.response = status, response


@dataclass(frozen=True)
class About:
    """A session that a request is about, as the engine knows it.

    Attributes:
        name: Its id, for the client.
        owner: Digest of the client's API key, empty where the server has none.
        token: Of the request, or empty.
    """

    name: str
    owner: str
    token: str = ""

    @classmethod
    def of(cls, scope: Scope, asked: Asked) -> "About":
        """Of a request; without an id it gets one that cannot be guessed."""
        token = secrets.token_hex(OWNER_SIZE) if asked.kind in (OPEN, ASK) else ""
        return cls(asked.session_id or secrets.token_urlsafe(), owner_of(scope), token)

    def parameters(self, kind: str, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """`kv_transfer_params`, with more of a client's."""
        session = f"{self.owner}/{self.name}" if self.owner else self.name
        return {**(more or {}), "gatesight": kind, "session": session, "owner": self.owner, "token": self.token}


def owner_of(scope: Scope) -> str:
    """Of whom a request comes."""
    arguments = getattr(getattr(scope.get("app"), "state", None), "args", None)
    if not (getattr(arguments, "api_key", None) or os.environ.get("VLLM_API_KEY")):
        return ""
    # A wrong key is refused by vLLM, whose application is asked with it.
    key = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
    return hashlib.blake2b(key.partition(b" ")[2], digest_size=OWNER_SIZE, person=b"gatesight").hexdigest()


def check_asked(asked: Asked, given: Mapping[str, Any], path: str) -> None:
    """Raises RefusedError for what no engine is to be asked."""
    if path not in ASKED_HERE:
        raise bad(f"GateSight: sessions are opened and asked by {' and '.join(ASKED_HERE)} alone.")
    named = asked.session_id or (asked.kind == OPEN and "session" not in given["kv_transfer_params"])
    if asked.kind not in KINDS or not named or len(asked.session_id) > LONGEST_NAME:
        raise bad(
            f'GateSight: kv_transfer_params are {{"gatesight": one of {", ".join(KINDS)}, "session": its id, a text of '
            f"at most {LONGEST_NAME} characters}}; without an id, open makes one."
        )
    if given.get("use_beam_search"):
        raise bad("GateSight: vLLM's beam search does not carry kv_transfer_params: leave use_beam_search out.")


def is_json(scope: Scope) -> bool:
    """Whether a request may be JSON; vLLM takes those that do not say."""
    said = next((value for name, value in scope["headers"] if name.lower() == b"content-type"), b"json")
    return b"json" in said.lower()


def asked_of(body: bytes) -> tuple[Asked | None, dict[str, Any]]:
    """What a request's JSON asks of GateSight, and all of it; None for ordinary ones.

    Every body is parsed: a search for words would miss those that are escaped, or in another encoding.
    """
    try:
        given = json.loads(body)
        asked = Asked.of(given["kv_transfer_params"])
    except (ValueError, TypeError, KeyError):
        return None, {}
    return (asked, given) if asked.kind is not None else (None, {})


def error_of(status: int, text: str) -> dict[str, Any]:
    """As vLLM gives errors."""
    return {"error": {"message": text, "type": KIND_OF_ERROR[status], "param": None, "code": status}}


def bad(text: str) -> RefusedError:
    return RefusedError(400, error_of(400, text))
