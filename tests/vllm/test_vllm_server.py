"""`gatesight serve`: many clients over loopback, against solo runs of the same server, in processes of their own."""

import asyncio
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
