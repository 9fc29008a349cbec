"""Training on large models: several processes, data sets, half precision, and a dry run on the layout alone."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, PreTrainedTokenizerFast, Qwen3_5Config

from gatesight_eval.reports.cards import PLANNED
from gatesight_hf import Estimator
from gatesight_hf.commands.cli import main, parser
from gatesight_hf.models import HybridSpec
from gatesight_hf.reference import load_tokenizer
from gatesight_hf.training.documents import dataset_texts
from gatesight_hf.training.dry_run import check_shapes, dry_run
from gatesight_hf.training.plan import text_model_without_storage

from ..helpers.models import tiny_model
from ..helpers.paths import ROOT

SMALL = ["--length", "48", "--train-documents", "5", "--eval-documents", "2", "--continuations", "2"]
SMALL += ["--continuation-tokens", "4", "--epochs", "2", "--hidden-size", "4"]

# -- several processes -------------------------------------------------------------------------------------------------

#: The command line; process 1 of a run that is to die is killed at its second document.
PROGRAM = """
import os, signal, sys
from gatesight_hf.commands.cli import main
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


# -- data sets ---------------------------------------------------------------------------------------------------------

TEXTS = ["one two three", "four five", "six"]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The texts in column `body`, in each form that is read."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    rows = datasets.Dataset.from_dict({"body": TEXTS, "number": [1, 2, 3]})
    (tmp_path / "folder").mkdir()
    forms = {"jsonl": rows.to_json, "parquet": rows.to_parquet, "csv": rows.to_csv}
    for suffix, write in forms.items():
        write(tmp_path / f"texts.{suffix}")
    rows.to_parquet(tmp_path / "folder" / "train.parquet")
    rows.select([0]).to_parquet(tmp_path / "folder" / "test.parquet")
    rows.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(tmp_path / "splits")
    paths = {suffix: tmp_path / f"texts.{suffix}" for suffix in forms}
    arrow = next((tmp_path / "saved").glob("*.arrow"))
    return paths | {name: tmp_path / name for name in ("folder", "saved", "splits")} | {"arrow": arrow}


@pytest.mark.parametrize("form", ["jsonl", "parquet", "csv", "arrow", "folder", "saved", "splits"])
def test_texts_of_a_data_set_come_in_its_order(data: dict[str, Path], form: str) -> None:
    assert list(dataset_texts(str(data[form]), column="body")) == TEXTS
    if form in ("folder", "splits"):
        assert list(dataset_texts(str(data[form]), split="test", column="body")) == TEXTS[:1]


def test_errors_of_data_sets_say_what_there_is(data: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no column 'text'; there are 'body', 'number'"):
        next(dataset_texts(str(data["parquet"])))
    with pytest.raises(ValueError, match="holds no text but int"):
        next(dataset_texts(str(data["parquet"]), column="number"))
    with pytest.raises(ValueError, match="no split 'valid'; there are 'train', 'test'"):
        next(dataset_texts(str(data["splits"]), split="valid"))
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match="--documents"):
        next(dataset_texts(str(tmp_path / "a.txt")))
    with pytest.raises(OSError, match="nobody/nothing"):
        next(dataset_texts("nobody/nothing:config"))


# -- half precision ----------------------------------------------------------------------------------------------------


def test_a_model_in_bfloat16_from_a_folder_is_trained_for(
    data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Signals stay in the model's dtype; utilities and the estimator are float32, and finite."""
    tokenizer: PreTrainedTokenizerFast = load_tokenizer()
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    source = tmp_path / "documents.jsonl"
    source.write_text("".join(json.dumps({"body": f"{number} " * 60}) + "\n" for number in range(8)))
    arguments = ["train", "--model", str(tmp_path / "model"), "--dataset", str(source), "--text-column", "body"]
    arguments += ["--dtype", "bfloat16", "--device-map", "cpu", "--rows", "1", "--out", str(tmp_path / "estimator")]
    assert main([*arguments, *SMALL]) == 0, capsys.readouterr().err
    stored = load_file(tmp_path / "estimator-data" / "train" / "document_00000.safetensors")
    assert stored["signals.0"].dtype == torch.bfloat16 and stored["utilities"].dtype == torch.float32
    assert torch.isfinite(stored["utilities"]).all() and torch.equal(stored["utilities"].amax(-1), torch.ones(2, 2))
    settings = json.loads((tmp_path / "estimator-data" / "collection.json").read_text())
    assert settings["dtype"] == "bfloat16" and settings["sampling"]["rows"] == 1
    assert Estimator.from_pretrained(tmp_path / "estimator").config.base_model == str(tmp_path / "model")
    assert main([*arguments, *SMALL, "--dtype", "float32"]) == 1 and "other settings" in capsys.readouterr().err


# -- dry runs ----------------------------------------------------------------------------------------------------------


def arguments_for(model: object, *more: str) -> Any:
    return parser().parse_args(["train", "--model", str(model), "--dry-run", *more])


@pytest.mark.parametrize("repo", PLANNED)
def test_shapes_of_large_models_are_checked_without_weights(repo: str, tmp_path: Path) -> None:
    """The 27B as a whole; of the other, whose indexer depends on values, the GDN layers."""
    planned = PLANNED[repo]
    AutoConfig.for_model(planned["model_type"], **planned["sizes"]).save_pretrained(tmp_path)
    found = dry_run(arguments_for(tmp_path, "--hidden-states"))
    assert (found["estimator"]["least_inputs"], found["estimator"]["most_inputs"]) == (435, 867)
    if repo == "gatesight-qwen3.8-27b":
        assert found["estimator"]["parameters"] == 3_448_896
        assert found["checked"] == {"gdn_layers": 48, "attention_layers": 16, "tokens": 128, "whole_model": True}
    else:
        assert "nonzero" in found["checked"]["whole_model"]


def test_every_family_has_the_shapes_that_its_layout_says(any_model: Any) -> None:
    """The whole model runs on shapes, unless it has an indexer, which reads values."""
    checked = check_shapes(text_model_without_storage(any_model.config), arguments_for("m", "--hidden-states"))
    assert (checked["gdn_layers"], checked["attention_layers"]) == (6, 2)
    assert (checked["whole_model"] is True) == (any_model.config.model_type != "qwen4_exp_text")


def test_of_a_multimodal_configuration_the_text_model_is_read(tmp_path: Path) -> None:
    config = Qwen3_5Config(text_config=tiny_model().config.to_dict())
    config.save_pretrained(tmp_path)
    found = dry_run(arguments_for(tmp_path / "config.json", "--length", "64"))
    assert found["config"]["fingerprint"] == HybridSpec.from_config(tiny_model().config).fingerprint
    assert found["layout"]["parameters"] == sum(parameter.numel() for parameter in tiny_model().parameters())


def test_a_model_that_is_not_as_its_configuration_says_is_found() -> None:
    for layer, names, message in ((7, ("self_attn.k_proj",), "keys of attention layer 1"), (-1, (), "logits")):
        model = text_model_without_storage(tiny_model().config)
        for name in names:
            module = model.model.layers[layer].get_submodule(name)
            module.weight, module.bias = (
                torch.nn.Parameter(torch.cat([tensor, tensor[:32]]), requires_grad=False)
                for tensor in (module.weight, module.bias)
            )
        if not names:
            model.lm_head = torch.nn.Linear(64, 100, device="meta", dtype=model.dtype)
        with pytest.raises((ValueError, RuntimeError), match=message):
            check_shapes(model, arguments_for("m"))


def test_the_command_says_it_all_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--model", "reference", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "the whole model" in printed and "disk for the data" in printed and "lower bounds" in printed
    assert main(["train", "--model", "reference", "--dry-run", "--json", "--dtype", "float32"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dtype"] == "float32" and found["layout"]["value_bytes"] == 4
    assert list(tmp_path.iterdir()) == []
    for arguments in (["--model", "./missing", "--dry-run"], ["--model", "reference", "--dry-run", "--dtype", "int"]):
        assert main(["train", *arguments]) == 1
    assert main(["train", "--model", "reference"]) == 1 and "--out is needed" in capsys.readouterr().err
