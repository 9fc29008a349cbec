"""Training on large models: several processes, data sets, half precision, and a dry run on the layout alone."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gatesight_hf.cli import main
from gatesight_hf.training.documents import dataset_texts

ROOT = Path(__file__).parents[1]
SMALL = ["--length", "48", "--train-documents", "5", "--eval-documents", "2", "--continuations", "2"]
SMALL += ["--continuation-tokens", "4", "--epochs", "2", "--hidden-size", "4"]

# -- several processes -------------------------------------------------------------------------------------------------

#: The command line; process 1 of a run that is to die is killed at its second document.
PROGRAM = """
import os, signal, sys
from gatesight_hf.cli import main
from gatesight_hf.training import collect

original, calls = collect.document_tensors, []

def dies(*args, **options):
    calls.append(1)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **options)

if os.environ.get("DIES") == os.environ["RANK"]:
    collect.document_tensors = dies
sys.exit(main(sys.argv[1:]))
"""


def launched(program: Path, arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """The program in two processes, gloo between them."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join(str(ROOT / room) for room in (".", "eval", "kernels"))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    command = [*launcher, str(program), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_two_processes_write_what_one_does_and_go_on_after_a_kill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "--model", "reference", "--json", *SMALL, "--out"]
    assert main([*arguments, str(tmp_path / "one")]) == 0
    alone = json.loads(capsys.readouterr().out)

    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    killed = launched(program, [*arguments, str(tmp_path / "two")], DIES="1")
    assert killed.returncode != 0 and not (tmp_path / "two").exists()
    shards = list((tmp_path / "two-data").rglob("*.safetensors"))
    stamps = {path: path.stat().st_mtime_ns for path in shards}
    assert tmp_path / "two-data" / "train" / "document_00001.safetensors" in stamps
    assert tmp_path / "two-data" / "train" / "document_00003.safetensors" not in stamps

    resumed = launched(program, [*arguments, str(tmp_path / "two")])
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout) == alone, "printed once, by the main process"
    assert all(path.stat().st_mtime_ns == at for path, at in stamps.items())
    assert contents(tmp_path / "two-data") == contents(tmp_path / "one-data")
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
