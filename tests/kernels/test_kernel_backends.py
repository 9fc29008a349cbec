"""Which implementation runs, what is refused, and that a whole compaction is the same with either."""

import ast
import importlib
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import gatesight_kernels as kernels
from gatesight_hf.scoring.features import assemble
from gatesight_hf.training.fit import mlp_scores
from gatesight_kernels import backend

from ..helpers.kernel_fixtures import NO_TRITON
from ..helpers.models import random_estimator, tiny_model
from ..helpers.running import forward, left_padded, padded, prefilled, random_ids

pytestmark = pytest.mark.core

PACKAGE = Path(kernels.__file__).parent
CPU = torch.zeros(2)


def on_a_gpu(dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor that says so, where there is none."""
    with FakeTensorMode():
        return torch.empty(2, dtype=dtype, device="cuda")


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(backend.VARIABLE, raising=False)


# -- which one ---------------------------------------------------------------------------------------------------------


@NO_TRITON
def test_a_gpu_gets_the_kernels_and_a_cpu_the_twins():
    assert backend.runs_triton(on_a_gpu(), on_a_gpu(torch.int64))
    assert backend.runs_triton(on_a_gpu(torch.bfloat16))
    assert not backend.runs_triton(CPU)
    assert not backend.runs_triton(on_a_gpu(torch.float64))


def test_without_triton_a_gpu_gets_the_twins(monkeypatch):
    monkeypatch.setattr(backend, "_importable", lambda: False)
    assert not backend.runs_triton(on_a_gpu())


def test_a_triton_that_cannot_be_imported_is_found_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton.language", None)
    assert not backend._importable.__wrapped__()


def test_one_can_be_forced(monkeypatch):
    monkeypatch.setattr(backend, "_obstacle", lambda tensors: None)
    for name, expected in (("triton", True), ("torch", False), ("auto", False)):
        with kernels.use_backend(name):
            assert backend.runs_triton(CPU) is expected
        monkeypatch.setenv(backend.VARIABLE, name)
        assert backend.runs_triton(CPU) is expected
        monkeypatch.delenv(backend.VARIABLE)
    monkeypatch.setenv(backend.VARIABLE, "")
    assert not backend.runs_triton(CPU)


def test_use_backend_goes_before_the_variable_nests_and_ends(monkeypatch):
    monkeypatch.setattr(backend, "_obstacle", lambda tensors: None)
    monkeypatch.setenv(backend.VARIABLE, "triton")
    with kernels.use_backend("torch"):
        assert not backend.runs_triton(CPU)
        with kernels.use_backend("triton"):
            assert backend.runs_triton(CPU)
        with pytest.raises(KeyError), kernels.use_backend("triton"):
            raise KeyError
        assert not backend.runs_triton(CPU)
    assert backend.runs_triton(CPU)


def test_another_thread_is_not_concerned(monkeypatch):
    monkeypatch.setattr(backend, "_obstacle", lambda tensors: None)
    found: list[bool] = []
    with kernels.use_backend("triton"):
        thread = threading.Thread(target=lambda: found.append(backend.runs_triton(CPU)))
        thread.start()
        thread.join()
    assert found == [False]


def test_unknown_names_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"use_backend must be one of auto, triton, torch, got 'cuda'"):
        kernels.use_backend("cuda").__enter__()
    monkeypatch.setenv(backend.VARIABLE, "Triton")
    with pytest.raises(ValueError, match=r"GATESIGHT_BACKEND must be one of .* got 'Triton'"):
        kernels.gate_means(torch.zeros(1, 1, 1, 1))


@NO_TRITON
@pytest.mark.parametrize(
    ("missing", "tensors", "reason"),
    [
        ("_interpreted", [CPU], "the tensors are on cpu, not on a GPU"),
        ("_importable", [CPU], "triton cannot be imported"),
        ("_importable", [on_a_gpu()], "triton cannot be imported"),
        ("", [on_a_gpu(), CPU], "on different devices: cpu, cuda:0"),
        ("", [on_a_gpu(torch.float64)], "do not compute in torch.float64"),
    ],
)
def test_forcing_what_cannot_run_is_an_error_that_says_why(monkeypatch, missing, tensors, reason):
    if missing:
        monkeypatch.setattr(backend, missing, lambda: False)
    with (
        kernels.use_backend("triton"),
        pytest.raises(RuntimeError, match=rf"forced, but .*{reason}.*\. Choose backend 'auto' or 'torch'"),
    ):
        backend.runs_triton(*tensors)


def test_importing_the_package_does_not_import_triton():
    code = "import sys, gatesight_kernels; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_package_imports_nothing_but_torch_and_triton_and_itself_relatively():
    """So that its folder can be published as it is."""
    for path in PACKAGE.rglob("*.py"):
        names: set[str | None] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module)
        roots = {str(name).split(".")[0] for name in names}
        assert roots <= {"torch", "triton"} | sys.stdlib_module_names, path.name
        if "triton_ops" not in path.parts:
            assert "triton" not in roots or path.name == "backend.py", path.name


# -- what is refused ---------------------------------------------------------------------------------------------------


def signals_with(**changes: Tensor) -> Tensor:
    given = {"b": torch.zeros(2, 5, 4), "a": torch.zeros(2, 5, 4), "values": torch.zeros(2, 5, 2, 6)}
    given |= {"log_a": torch.zeros(4), "dt_bias": torch.zeros(4), "weight": torch.zeros(12, 3)}
    return kernels.gdn_signals(**{**given, **changes})


def scores_of(*shapes: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    mlp = random_mlp(6, dtype)
    return kernels.score_entries([torch.zeros(shape) for shape in shapes], mlp)


def random_mlp(size: int, dtype: torch.dtype) -> kernels.PackedMLP:
    layers = torch.randn(2, size, 4), torch.randn(2, 4), torch.randn(2, 4), torch.randn(2)
    return kernels.pack_mlp(*layers, torch.zeros(size), torch.ones(size), ages=False, dtype=dtype, device="cpu")


ROWS = torch.zeros(2, 3, 5, 4)
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a": (lambda: signals_with(a=torch.zeros(2, 4, 4)), r"a must have shape \(2, 5, 4\), got .* \[2, 4, 4\]"),
    "values": (lambda: signals_with(values=torch.zeros(1, 5, 2, 6)), r"values must have shape \(2, 5, 2, 6\)"),
    "log_a": (lambda: signals_with(log_a=torch.zeros(5)), r"log_a must have shape \(4,\)"),
    "dt_bias": (lambda: signals_with(dt_bias=torch.zeros(1, 4)), r"dt_bias must have shape \(4,\)"),
    "bias": (lambda: signals_with(bias=torch.zeros(4)), r"bias must have shape \(12,\)"),
    "context": (lambda: signals_with(context=torch.zeros(2, 12, 3)), r"context must have shape \(2, 12, 2\)"),
    "channels": (lambda: signals_with(weight=torch.zeros(16, 3)), "16 channels .* not 4 whole heads in 2 groups of 6"),
    "half heads": (lambda: signals_with(values=torch.zeros(2, 5, 3, 4)), "not 4 whole heads in 3 groups of 4"),
    "no inputs": (lambda: scores_of(), "read 6 inputs"),
    "few inputs": (lambda: scores_of((5, 3), (5, 2)), r"read 6 inputs .* got blocks of shapes \[\(5, 3\), \(5, 2\)\]"),
    "lengths": (lambda: scores_of((5, 3), (4, 3)), "read 6 inputs"),
    "too many": (lambda: kernels.select_top(torch.zeros(2, 5), 6), "Cannot select 6 of 5"),
    "less than none": (lambda: kernels.select_top(torch.zeros(2, 5), -1), "Cannot select -1 of 5"),
    "heads": (lambda: kernels.compact_rows(ROWS, torch.zeros(2, 2, 1, dtype=torch.long)), r"must be \[B, H, N\]"),
    "dimensions": (lambda: kernels.compact_rows(ROWS, torch.zeros(2, 3, dtype=torch.long)), r"must be \[B, H, N\]"),
    "more rows": (lambda: kernels.compact_rows(ROWS, torch.zeros(2, 3, 6, dtype=torch.long)), r"must be \[B, H, N\]"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("name", ["torch", pytest.param("triton", marks=NO_TRITON)])
def test_wrong_shapes_are_refused(monkeypatch, case, name):
    monkeypatch.setattr(backend, "_interpreted", lambda: True)
    call, message = WRONG[case]
    with kernels.use_backend(name), pytest.raises(ValueError, match=message):
        call()


@NO_TRITON
def test_what_only_a_kernel_cannot_do_is_refused(monkeypatch):
    monkeypatch.setattr(backend, "_interpreted", lambda: True)
    with kernels.use_backend("triton"):
        with pytest.raises(ValueError, match=r"float32 need MLPs packed in it, got torch.bfloat16: see packed_dtype"):
            scores_of((5, 6), dtype=torch.bfloat16)
        indices = torch.zeros(2, 3, 1, dtype=torch.long)
        with pytest.raises(ValueError, match="must lie side by side"):
            kernels.compact_rows(ROWS.mT, indices, in_place=True)


# -- all together ------------------------------------------------------------------------------------------------------

LAUNCHERS = {"signals": "gdn_signals", "gates": "gate_means", "score": "score_entries", "select": "select_top",
             "compact": "compact_rows"}  # fmt: skip


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the operations whose kernels ran, in larger blocks: an interpreted program takes milliseconds."""
    monkeypatch.setattr("gatesight_kernels.triton_ops.signals.BLOCK_T", 32)
    monkeypatch.setattr("gatesight_kernels.triton_ops.signals.BLOCK_H", 4)
    names: set[str] = set()

    def noted(name: str, launch: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args: (names.add(name), launch(*args))[1]

    for module, name in LAUNCHERS.items():
        of_module = importlib.import_module(f"gatesight_kernels.triton_ops.{module}")
        monkeypatch.setattr(of_module, f"{name}_triton", noted(name, getattr(of_module, f"{name}_triton")))
    return names


@NO_TRITON
@pytest.mark.parametrize(
    ("family", "lengths", "chunks", "allocation"),
    [
        pytest.param("qwen3_5", [21], [21], "gate", id="one row in one shot"),
        pytest.param("qwen3_next", [21], [12, 8, 1], "gate", id="one row in chunks"),
        pytest.param("qwen3_next", [21, 5, 1], [21], "gate", id="ragged rows in one shot"),
        pytest.param("qwen3_5", [21, 5, 1], [20, 1], "global", id="ragged rows in chunks"),
    ],
)
def test_a_cache_is_the_same_with_kernels_and_twins(family, lengths, chunks, allocation, device, launched):
    model = tiny_model(family).to(device)
    scorer = random_estimator(model)
    ids, mask = (tensor.to(device) for tensor in left_padded([random_ids(n, seed=n) for n in lengths]))
    later = padded(torch.nn.functional.pad(mask, (0, 3), value=1), 3)
    operations = set(LAUNCHERS.values()) - ({"gate_means"} if allocation == "global" else set())
    seen = []
    for name in ("torch", "triton"):
        with kernels.use_backend(name):
            cache = prefilled(model, ids, chunks, mask, scorer=scorer, allocation=allocation, kept_fraction=0.4)
            signals, means = cache.prefill().signals, cache.report().gate_means
            cache.compact()
        kept = [(layer.kept_positions, layer.kept_keys, layer.kept_values) for layer in cache.attention_layers]
        logits = forward(model, random_ids(3, len(lengths)).to(device), cache, **later)
        seen.append((signals, kept, means, logits))
        assert launched == (set() if name == "torch" else operations)
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-5, atol=1e-5)


@NO_TRITON
def test_scores_from_bf16_signals_agree_as_well_as_plain_bf16_does(device):
    model = tiny_model().bfloat16().to(device)
    scorer = random_estimator(model)
    with kernels.use_backend("torch"):
        prefill = prefilled(model, random_ids(40).to(device), scorer=scorer).prefill()
        twin = scorer.score(prefill)
    with kernels.use_backend("triton"):
        kernel = scorer.score(prefill)
    for j, (found, expected) in enumerate(zip(kernel, twin, strict=True)):
        window = [prefill.signals[i][0] for i in scorer.config.gdn_windows[j]]
        names = ("input_mean", "input_std", "weight_in", "bias_in", "weight_out", "bias_out")
        layer = {name: scorer.tensors[f"layers.{j}.{name}"].bfloat16().to(device) for name in names}
        plain = mlp_scores(layer, assemble(window).bfloat16())
        assert 0 < (found - expected).norm() <= 2 * (plain - expected).norm()
