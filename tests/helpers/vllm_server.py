"""A server of `gatesight serve` in processes of its own, with the bundled model."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx
import pytest

from gatesight_hf.reference import ESTIMATOR_PATH, MODEL_PATH, documents

DOCUMENTS = {name: documents.needles(Random(seed), 1024, count=8, asked=8) for seed, name in enumerate(("one", "two"))}
#: More than one token: vLLM 0.32 fails on prompts of one on some CPUs.
ORDINARY = "the quick bird"
OPTIONS = "--dtype bfloat16 --max-model-len 2048 --host 127.0.0.1 --served-model-name reference --max-num-seqs 16"
#: A minute sooner.
OPTIONS += " --enforce-eager"


class Server:
    def __init__(self, port: int, process: "subprocess.Popen[bytes]") -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.process = process
        self.client = httpx.Client(base_url=self.url, timeout=120)

    def of(self, key: str) -> "Server":
        """The same one, for who has an API key."""
        other = Server.__new__(Server)
        other.url, other.process = self.url, self.process
        other.client = httpx.Client(base_url=self.url, timeout=120, headers={"Authorization": f"Bearer {key}"})
        return other

    def complete(self, prompt: str, about: dict[str, Any] | None = None, **options: Any) -> httpx.Response:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 6, "kv_transfer_params": about, **options}
        return self.client.post("/v1/completions", json=body)

    def chat(self, messages: list[Any], about: dict[str, Any] | None = None, **options: Any) -> httpx.Response:
        """Its JSON has the ids of prompt and answer."""
        body = {"messages": messages, "temperature": 0, "max_tokens": 6, "kv_transfer_params": about, **options}
        return self.client.post("/v1/chat/completions", json={"return_token_ids": True, **body})

    def open(self, name: str, **options: Any) -> dict[str, Any]:
        about = {"gatesight": "open", "session": name, **options}
        response = self.complete(DOCUMENTS[name].text, about, max_tokens=50, stream=True)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()["kv_transfer_params"]
        return found

    def ask(self, name: str, number: int, document_name: str | None = None, **options: Any) -> str:
        document = DOCUMENTS[document_name or name]
        about = {"gatesight": "ask", "session": name}
        response = self.complete(f"{document.text} {document.questions[number].text}", about, **options)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    def metrics(self) -> dict[str, float]:
        """By name, without labels."""
        lines = self.client.get("/metrics").text.splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if line.startswith("vllm:")]
        return {name.partition("{")[0].removeprefix("vllm:"): float(value) for name, value in pairs}

    def settled(self, usage: float) -> bool:
        """Whether the block pool is as full as it was, soon."""
        for _ in range(100):
            self.complete(ORDINARY)  # a step, after which vLLM tells its metrics
            if self.metrics()["kv_cache_usage_perc"] == pytest.approx(usage):
                return True
            time.sleep(0.1)
        return False


@contextlib.contextmanager
def serving(*more: str, ours: str = "") -> Iterator[Server]:
    """A server with further options of vLLM's, and of ours."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-c",
        "import sys; from gatesight_hf.commands.cli import main; sys.exit(main())",
        "serve",
    ]
    command += [str(MODEL_PATH), "--estimator", str(ESTIMATOR_PATH), "--kept-fraction", "0.25", *ours.split(), "--"]
    # vLLM's processes spin on their cores.
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    command += [*OPTIONS.split(), *more, "--port", str(port)]
    # A group of its own, so that its engine does not outlive it.
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        running = Server(port, process)
        try:
            deadline = time.monotonic() + 600
            while not _healthy(running):
                assert process.poll() is None, "the server ended"
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(1)
            yield running
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _healthy(server: Server) -> bool:
    try:
        return server.client.get("/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
