"""`gatesight serve`: many clients over loopback, against solo runs of the same server, in processes of their own."""

import asyncio
import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: see `make test-vllm`")

from gatesight_hf.vllm.server import SessionMiddleware

from ..helpers.paths import ROOT
from ..helpers.vllm_server import DOCUMENTS, ORDINARY, Server, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


def test_eight_clients_over_two_sessions_and_plain_requests(server):
    """Every answer is the solo run's; afterwards nothing is held."""
    server.complete(ORDINARY)
    empty = server.metrics()["kv_cache_usage_perc"]
    reports = {name: server.open(name) for name in DOCUMENTS}
    assert all(sum(found["kept"]) < 2 * found["tokens"] == 2048 for found in reports.values())

    def plain(number: int) -> str:
        document = DOCUMENTS["two"]
        return str(server.complete(f"{document.text} {document.questions[number].text}").json()["choices"][0]["text"])

    tasks = [lambda n=n: server.ask("one", n) for n in range(6)] + [lambda n=n: server.ask("two", n) for n in range(6)]
    tasks += [lambda n=n: plain(n) for n in range(4)]
    alone = [task() for task in tasks]
    expected = [" ".join(question.answer) for name in DOCUMENTS for question in DOCUMENTS[name].questions[:6]]
    assert sum(text.strip().startswith(right) for text, right in zip(alone, expected, strict=False)) >= 11
    order = list(range(len(tasks)))
    Random(0).shuffle(order)
    with ThreadPoolExecutor(8) as clients:
        together = dict(zip(order, clients.map(lambda i: tasks[i](), order), strict=True))
    assert [together[i] for i in range(len(tasks))] == alone

    for name in DOCUMENTS:
        assert server.client.get(f"/gatesight/sessions/{name}").json() == {"session": name, **reports[name]}
        assert server.client.delete(f"/gatesight/sessions/{name}").json() == {"session": name, "dropped": True}
    assert server.settled(empty)


def test_a_client_that_goes_in_mid_stream_leaves_nothing(server):
    server.open("one")
    server.complete(ORDINARY)
    held = server.metrics()["kv_cache_usage_perc"]
    document = DOCUMENTS["one"]
    body = {
        "prompt": f"{document.text} {document.questions[0].text}",
        "kv_transfer_params": {"gatesight": "ask", "session": "one"},
        **{"temperature": 0, "max_tokens": 900, "ignore_eos": True, "stream": True},
    }
    for _ in range(3):
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            events = (line for line in response.iter_lines() if line.startswith("data: "))
            assert "error" not in json.loads(next(events).removeprefix("data: "))
    assert server.settled(held)
    assert " ".join(document.questions[1].answer) in server.ask("one", 1)
    server.client.delete("/gatesight/sessions/one")


def test_requests_that_cannot_be_served_say_why(server):
    document = DOCUMENTS["one"]
    prompt = f"{document.text} {document.questions[0].text}"

    def error(status: int, prompt: str, **about: Any) -> str:
        response = server.complete(prompt, about)
        assert response.status_code == status
        found = response.json()["error"]
        assert found["code"] == status
        return str(found["message"])

    assert "no such session" in error(404, prompt, gatesight="ask", session="one")
    assert "one of open, ask" in error(400, prompt, gatesight="asks", session="one")
    assert "one of open, ask" in error(400, prompt, gatesight="ask")
    assert "kept_fraction must be in (0, 1]" in error(400, prompt, gatesight="open", session="one", kept_fraction=2)
    assert "no options ['kept']" in error(400, prompt, gatesight="open", session="one", kept=0.1)
    assert "No scorer 'other'" in error(400, prompt, gatesight="open", session="one", scorer="other")
    server.open("one")
    assert "No scorer 'other'" in error(400, prompt, gatesight="open", session="one", scorer="other")
    assert "one of open, ask" in error(400, prompt, gatesight="open", session=None)
    assert "the same 1024 tokens, and a question" in error(400, "another text", gatesight="ask", session="one")
    about = {"gatesight": "ask", "session": "two"}
    stream = server.complete(prompt, about, stream=True)
    assert "no such session" in stream.text and stream.text.rstrip().endswith("[DONE]")
    refused = [
        ({"prompt": [prompt, "another text"]}, {"gatesight": "open", "session": "two"}, "one prompt opens a session"),
        ({"use_beam_search": True}, {"gatesight": "ask", "session": "one"}, "beam search does not carry"),
        ({"echo": True, "logprobs": 1}, {"gatesight": "ask", "session": "one"}, "no log-probabilities of its prompt"),
        ({"echo": True, "logprobs": 1}, {"gatesight": "ask", "session": "two"}, "no such session"),
    ]
    for options, about, why in refused:
        response = server.complete(**{"prompt": prompt, "about": about, **options})
        assert response.status_code in (400, 404) and why in response.json()["error"]["message"]
    assert server.client.get("/gatesight/sessions/two").status_code == 404
    assert server.client.delete("/gatesight/sessions/two").status_code == 404
    assert server.client.put("/gatesight/sessions/one").status_code == 405
    assert server.client.delete("/gatesight/sessions/one").status_code == 200
    assert server.process.poll() is None


def test_each_of_two_opens_of_one_id_has_its_own_report(server):
    texts = [document.text for document in DOCUMENTS.values()]
    texts += [" ".join(text.split()[:length]) for text, length in zip(texts, (300, 500), strict=True)]
    about = {"gatesight": "open", "session": "shared"}
    for _ in range(3):
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda text: server.complete(text, about), texts))
        last = server.client.get("/gatesight/sessions/shared").json()["tokens"]
        of_200 = [(text, one) for text, one in zip(texts, found, strict=True) if one.status_code == 200]
        assert last in [one.json()["usage"]["prompt_tokens"] for _, one in of_200]
        for text, one in zip(texts, found, strict=True):
            if one.status_code == 200:
                assert one.json()["kv_transfer_params"]["tokens"] == len(text.split())
            else:
                assert one.status_code == 409 and "another request opened" in one.text
    server.client.delete("/gatesight/sessions/shared")


def test_a_session_without_an_id_gets_one(server):
    names = set()
    for _ in range(2):
        opened = server.complete(DOCUMENTS["one"].text, {"gatesight": "open"}).json()["kv_transfer_params"]
        names.add(opened["session"])
        assert len(opened["session"]) > 40 and opened["tokens"] == 1024
        assert server.client.get(f"/gatesight/sessions/{opened['session']}").status_code == 200
    assert len(names) == 2
    for name in names:
        assert server.client.delete(f"/gatesight/sessions/{name}").json() == {"session": name, "dropped": True}


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keyed() -> Iterator[Server]:
    with serving("--api-key", "first", "second", ours="--max-sessions-per-key 2") as running:
        yield running


def test_a_key_has_sessions_of_its_own(keyed):
    first, second, other = keyed.of("first"), keyed.of("second"), keyed.of("third")
    assert first.complete(DOCUMENTS["one"].text, {"gatesight": "open", "session": "doc"}).status_code == 200
    hidden = hashlib.blake2b(b"first", digest_size=16, person=b"gatesight").hexdigest()
    document = DOCUMENTS["one"]
    prompt = f"{document.text} {document.questions[0].text}"
    for name in ("doc", f"{hidden}/doc"):
        assert second.client.get(f"/gatesight/sessions/{name}").status_code == 404
        assert second.client.delete(f"/gatesight/sessions/{name}").status_code == 404
        for about in ({}, {"owner": hidden}, {"owner": hidden, "token": ""}):
            response = second.complete(prompt, {"gatesight": "ask", "session": name, **about})
            assert response.status_code == 404, response.text
    # What hides what it asks, from a search for words, is found too.
    given = {"prompt": prompt, "kv_transfer_params": {"gatesight": "ask", "session": f"{hidden}/doc"}}
    text = json.dumps(given)
    for body in (text.replace("gatesight", "g\\u0061tesight").encode(), text.encode("utf-16")):
        response = second.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert response.status_code == 404 and "no such session" in response.text
    for path in ("/v1/responses", "/v1/messages", "/inference/v1/generate"):
        assert second.client.post(path, json=given).status_code == 400
    assert other.client.get("/gatesight/sessions/doc").status_code == 401
    assert other.complete(prompt, {"gatesight": "ask", "session": "doc"}).status_code == 401
    assert second.complete(ORDINARY).status_code == 200
    assert first.ask("doc", 0, "one") == f" {document.questions[0].expected}"
    assert first.client.delete("/gatesight/sessions/doc").status_code == 200


def test_a_key_has_as_many_sessions_as_it_may(keyed):
    first, second = keyed.of("first"), keyed.of("second")
    second.open("one")
    for name in ("a", "b", "c"):
        first.complete(DOCUMENTS["one"].text, {"gatesight": "open", "session": name})
    found = [first.client.get(f"/gatesight/sessions/{name}").status_code for name in ("a", "b", "c")]
    assert found == [404, 200, 200], "the least recently used one made room"
    assert second.client.get("/gatesight/sessions/one").status_code == 200
    document = DOCUMENTS["one"]
    prompt = f"{document.text} {document.questions[0].text}"
    body = {"prompt": prompt, "stream": True, "max_tokens": 900, "min_tokens": 900, "temperature": 0}
    with contextlib.ExitStack() as stack:
        streams = []  # kept: an iterator that is gone closes its stream
        for name in ("b", "c"):
            given = {**body, "kv_transfer_params": {"gatesight": "ask", "session": name}}
            response = stack.enter_context(first.client.stream("POST", "/v1/completions", json=given))
            streams.append(response.iter_lines())
            assert "data" in next(streams[-1])
        refused = first.complete(document.text, {"gatesight": "open", "session": "d"})
        assert refused.status_code == 429 and "more than 2 sessions of one key" in refused.text
        assert first.complete(document.text, {"gatesight": "open", "session": "b"}).status_code in (200, 429)
    assert second.ask("one", 0) == f" {document.questions[0].expected}"
    for name in ("b", "c"):
        first.client.delete(f"/gatesight/sessions/{name}")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_has_the_words_of_an_error_is_passed_on(stream):
    says = {"choices": [{"text": "Internal server error"}]}
    body = b"data: " + json.dumps(says).encode() + b"\n\n" if stream else json.dumps(says).encode()
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def receive() -> Any:
        about = {"gatesight": "ask", "session": "one"}
        return {"type": "http.request", "body": json.dumps({"kv_transfer_params": about}).encode()}

    async def send(message: Any) -> None:
        sent.append(message)

    async def refused(*args: Any) -> Any:
        return 200, {"report": None, "refusal": "of somebody else"}

    middleware = SessionMiddleware(app)
    middleware._about = refused  # type: ignore[method-assign]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(middleware(scope, receive, send))
    assert sent[-1]["body"] == body


def test_the_metrics_count_what_happened(server):
    before = server.metrics()
    report = server.open("one", kept_fraction=0.5, whole_blocks=False)
    server.ask("one", 0)
    server.complete(ORDINARY)
    after = server.metrics()
    grown = {name: after[name] - before.get(name, 0) for name in after if name.startswith("gatesight_")}
    assert grown["gatesight_compactions_total"] == grown["gatesight_children_total"] == 1
    assert grown["gatesight_entries_kept_total"] == 2 * sum(report["kept"]) == 2048
    assert grown["gatesight_blocks_freed_total"] == report["blocks_before"] - report["blocks"]
    assert grown["gatesight_score_seconds_total"] > 0
    assert after["gatesight_sessions"] == 1 and after["gatesight_session_blocks"] == report["blocks"]
    server.client.delete("/gatesight/sessions/one")


def test_the_client_example_runs(server):
    command = [sys.executable, str(ROOT / "examples" / "vllm_client.py"), server.url]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    answers = [line.partition("-> ")[2].split(" | expected: ") for line in run.stdout.splitlines() if "-> " in line]
    assert len(answers) == 4 and all(found == right for found, right in answers)
    assert "'dropped': True" in run.stdout


def test_the_offline_example_runs():
    """In processes of its own: the engine, and the worker that compacts."""
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    command = [sys.executable, str(ROOT / "examples" / "vllm_offline.py")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert run.returncode == 0, run.stderr
    answers = [line.partition("-> ")[2].split(" | expected: ") for line in run.stdout.splitlines() if "-> " in line]
    assert len(answers) == 4 and all(found == right for found, right in answers)
