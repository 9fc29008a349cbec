"""`gatesight evaluate` as a command: suites, results, errors that name the mend; and a killed run goes on."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gatesight_eval.backends import ContextResult, TransformersBackend
from gatesight_eval.backends.methods import Method, ScorerFactory, calibration_ids, cells_of
from gatesight_eval.reports.store import RunFolder, read_lines
from gatesight_eval.run import evaluate
from gatesight_eval.suites.items import Item, Question
from gatesight_eval.suites.prompting import Prompter
from gatesight_hf.commands.cli import main
from gatesight_hf.methods import RandomScorer, SnapKV, TriAttention

from ..helpers.models import random_estimator, tiny_model
from ..helpers.paths import DATA
from ..helpers.running import random_ids
from ..helpers.texts import character_tokenizer


@pytest.fixture(scope="module")
def backend(dense: Any) -> TransformersBackend:
    tokenizer = character_tokenizer()
    return TransformersBackend(dense, tokenizer, ScorerFactory(dense, tokenizer, {}), "tiny", rows=16)


# -- going on after a stop ---------------------------------------------------------------------------------------------

ITEMS = [Item(f"t/{n}", "toy", "t", "f", f"{n} facts\u2028", (Question("?", ("\u2028",), 2, "exact_match"),))
         for n in range(5)]  # fmt: skip
MANIFEST = {"asked": {"kept": [0.5]}, "commit": "a"}


def run_all(backend: TransformersBackend, folder: Path, manifest: dict[str, Any] = MANIFEST) -> bytes:
    prompter = Prompter(backend.tokenizer, chat_template=False)
    evaluate(ITEMS, backend, prompter, cells_of([Method("random")], [0.5]), RunFolder(folder, manifest), check_every=2)
    return (folder / "results.jsonl").read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(backend: TransformersBackend, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return run_all(backend, tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("at", range(5))
def test_a_run_goes_on_where_it_was_stopped(
    backend: TransformersBackend, uninterrupted: bytes, tmp_path: Path, monkeypatch: Any, at: int
) -> None:
    original, calls = TransformersBackend.run, []

    def counted(self: Any, *args: Any, **options: Any) -> ContextResult:
        calls.append(args)
        if stopping and len(calls) > at:
            raise KeyboardInterrupt
        return original(self, *args, **options)

    monkeypatch.setattr(TransformersBackend, "run", counted)
    stopping = True
    with pytest.raises(KeyboardInterrupt):
        run_all(backend, tmp_path)
    stopping = False
    calls.clear()
    assert run_all(backend, tmp_path) == uninterrupted
    assert len(calls) == 5 - at
    assert [line["item"] for line in read_lines(tmp_path / "costs.jsonl")] == [item.id for item in ITEMS]
    checked = [json.loads(line)["identity_checked"] for line in uninterrupted.decode().split("\n")[:-1]]
    assert checked == [1, 0, 1, 0, 1]


DAMAGES: dict[str, Callable[[str, str], tuple[str, str]]] = {
    "results cut short": lambda results, costs: (results[:-30], costs),
    "costs cut short": lambda results, costs: (results, costs[:-3]),
    "only the line's end is missing": lambda results, costs: (results[:-1], costs),
    "the last context in results only": lambda results, costs: (results, costs[: costs.rindex('{"item"')]),
    "the last context in costs only": lambda results, costs: (results[: results.rindex('{"item"')], costs),
    "nothing written": lambda results, costs: ("", ""),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_a_kill_leaves_is_mended(
    backend: TransformersBackend, uninterrupted: bytes, tmp_path: Path, damage: str
) -> None:
    run_all(backend, tmp_path)
    files = [tmp_path / name for name in ("results.jsonl", "costs.jsonl")]
    for file, text in zip(files, DAMAGES[damage](*(file.read_text() for file in files)), strict=True):
        file.write_text(text)
    assert run_all(backend, tmp_path) == uninterrupted
    assert [line["item"] for line in read_lines(files[1])] == [item.id for item in ITEMS]


def test_a_damaged_line_in_the_middle_is_an_error(backend: TransformersBackend, tmp_path: Path) -> None:
    run_all(backend, tmp_path)
    file = tmp_path / "results.jsonl"
    lines = file.read_text().split("\n")
    file.write_text("\n".join([lines[0], lines[1][:-9], *lines[2:]]))
    with pytest.raises(ValueError, match=r"results.jsonl, line 2 is damaged"):
        run_all(backend, tmp_path)


def test_another_run_is_not_mixed_in(backend: TransformersBackend, tmp_path: Path) -> None:
    before = run_all(backend, tmp_path)
    with pytest.raises(ValueError, match=r"holds another run: commit was .*, now 'b'; data.* Give another --out"):
        run_all(backend, tmp_path, {**MANIFEST, "commit": "b", "data": {}})
    assert (tmp_path / "results.jsonl").read_bytes() == before
    assert run_all(backend, tmp_path, {**MANIFEST, "asked": {"kept": (0.5,)}}) == before  # a tuple is a list in JSON


def test_a_process_that_was_killed_goes_on(tmp_path: Path) -> None:
    command = "evaluate --suite toy --tasks niah_single_2 --length 256 --count 8 --method random --kept 0.5 --threads 1"
    arguments = [*command.split(), "--out"]
    program = "import sys; from gatesight_hf.commands.cli import main; sys.exit(main(sys.argv[1:]))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    killed = [sys.executable, "-c", program, *arguments, str(tmp_path / "killed")]
    results = tmp_path / "killed" / "results.jsonl"
    with subprocess.Popen(killed, env=environment, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and (not results.exists() or results.read_bytes().count(b"\n") < 2):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    done = len(read_lines(results))
    assert 2 <= done < 8
    for folder in ("killed", "whole"):
        assert main([*arguments, str(tmp_path / folder)]) == 0
    assert results.read_bytes() == (tmp_path / "whole" / "results.jsonl").read_bytes()


# -- methods -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "method"),
    [
        ("snapkv", Method("snapkv")),
        ("kvzip@global", Method("kvzip", "global")),
        ("gatesight@flat", Method("gatesight", "flat")),
        ("key_norm@gate^0.5", Method("key_norm", "gate", 0.5)),
        ("key_norm@gate^0", Method("key_norm", "gate", 0.0)),
        ("a2@gate^0.00001234567", Method("a2", "gate", 0.00001234567)),
        ("gatesight+int8", Method("gatesight", entries_dtype="int8")),
        ("kvzip@global+int8", Method("kvzip", "global", entries_dtype="int8")),
        ("key_norm@gate^0.5+int8", Method("key_norm", "gate", 0.5, "int8")),
    ],
)
def test_labels_are_read_and_written_alike(label: str, method: Method) -> None:
    assert Method.parse(label) == method and method.label == label


def test_labels_have_one_form() -> None:
    assert [Method.parse(label).label for label in ("snapkv@gate", "snapkv@gate^1", "snapkv@gate^1.0")] == [
        "snapkv"
    ] * 3
    cells = cells_of([Method.parse(label) for label in ("snapkv", "full", "snapkv@gate", "empty")], [0.2, 0.5, 0.2])
    rows = [(cell.method.label, cell.kept_fraction) for cell in cells]
    assert rows == [("full", 1.0), ("empty", 0.0), ("snapkv", 0.5), ("snapkv", 0.2)]


@pytest.mark.parametrize(
    "label", ["", "SnapKV", "snapkv@", "snapkv@flat^2", "a@gate^", "a@gate^-1", "a@gate^1.2.3", "a+", "a+int8@flat"]
)
def test_what_is_no_label(label: str) -> None:
    with pytest.raises(ValueError, match="is no method: give a name, name@allocation or name@gate"):
        Method.parse(label)


def test_scorers_are_made_once_and_random_draws_for_each_context(dense: Any, tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    random_estimator(dense).save_pretrained(tmp_path / "estimator")
    TriAttention.calibrate(dense, random_ids(40)).save(tmp_path / "statistics.safetensors")
    factory = ScorerFactory(
        dense, tokenizer, {"mine": tmp_path / "estimator"}, calibration=tmp_path / "statistics.safetensors",
        options={"snapkv": {"window": 8}, "triattention": {"mode": "per_head"}},
    )  # fmt: skip
    assert factory.make("snapkv", 1) is factory.make("snapkv", 2) == SnapKV(window=8)
    assert (factory.make("random", 1), factory.make("random", 2)) == (RandomScorer(1), RandomScorer(2))
    assert factory.make("triattention", 0).mode == "per_head"  # type: ignore[attr-defined]
    assert factory.make("mine", 0).config == random_estimator(dense).config  # type: ignore[attr-defined]
    (tmp_path / "plain.txt").write_text("plain text " * 9)
    assert calibration_ids(tmp_path / "plain.txt", tokenizer, tokens=10).shape == (1, 10)


# -- the command -------------------------------------------------------------------------------------------------------


def evaluated(folder: Path, command: str, *more: str) -> list[dict[str, Any]]:
    assert main(["evaluate", *command.split(), "--threads", "1", "--out", str(folder), *more]) == 0
    return read_lines(folder / "results.jsonl")


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random model and a tokenizer of one token per byte."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options).save_pretrained(folder)
    tiny_model(vocab_size=len(words)).save_pretrained(folder)
    return folder


def test_the_toy_suite(tmp_path: Path) -> None:
    lines = evaluated(
        tmp_path, "--suite toy --tasks niah_single_2,niah_multikey_2 --length 256 --count 1 --seeds 0,3 --kept 0.5",
        "--method", "gatesight,triattention,kvzip@global,oracle",
    )  # fmt: skip
    assert [line["item"] for line in lines] == [
        f"toy/{task}/256/{seed}/0" for task in ("niah_single_2", "niah_multikey_2") for seed in (0, 3)
    ]
    for line in lines:
        rows = [(cell["method"], cell["kept_fraction"]) for cell in line["cells"]]
        measured = ("gatesight", "triattention", "kvzip@global", "oracle")
        assert rows == [("full", 1.0), ("empty", 0.0), *((method, 0.5) for method in measured)]
        assert all(len(cell["answers"]) == len(line["questions"]) for cell in line["cells"])
        assert all(0 <= question["depth"] < 1 for question in line["questions"])
    manifest = json.loads((tmp_path / "run.json").read_text())
    assert (
        manifest["asked"]["method"] == "gatesight,triattention,kvzip@global,oracle" and manifest["data"]["items"] == 4
    )
    assert manifest["options"]["kvzip"]["chunk"] == 64 and manifest["backend"]["model"] == "reference"


def test_ruler_is_generated_for_the_models_tokenizer(byte_model: Path, tmp_path: Path) -> None:
    (line,) = evaluated(
        tmp_path, "--suite ruler --tasks qa_1 --length 1400 --count 1 --method random --kept 0.5 --variants filled",
        "--model", str(byte_model), "--squad", str(DATA / "ruler" / "squad.json"), "--prefill-chunk-size", "512",
    )  # fmt: skip
    # A token per byte: the context is about as long as asked, less question and answer.
    assert (line["task"], len(line["cells"])) == ("qa_1", 3) and 1000 < line["tokens"] < 1400
    assert {(a["tokens"], a["stop"]) for cell in line["cells"] for a in cell["answers"]} == {(32, "length")}


def test_scbench_is_read_from_a_folder(byte_model: Path, tmp_path: Path) -> None:
    lines = evaluated(
        tmp_path, "--suite scbench --tasks scbench_mf,scbench_many_shot --max-turns 2 --count 1 --kept 0.5",
        "--model", str(byte_model), "--data", str(DATA / "scbench"), "--variants", "neutral_prefix",
        "--method", "random,keydiff",
    )  # fmt: skip
    assert [(line["task"], len(line["cells"])) for line in lines] == [("scbench_mf", 4), ("scbench_many_shot", 4)]
    assert [line["details"]["variant"] for line in lines] == ["neutral_prefix", "official"]
    assert not lines[0]["details"]["leak"] and len(lines[0]["questions"]) == 2


def test_scbench_in_kvzips_form_is_read_from_a_folder(
    byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gatesight_eval.suites.scbench.kvzip._max_new_tokens", lambda base: 4)  # of a random model
    lines = evaluated(
        tmp_path, "--suite scbench-kvzip --tasks scbench_kv_tiny,scbench_vt --count 1 --kept 0.5",
        "--model", str(byte_model), "--data", str(DATA / "scbench" / "kvzip"), "--method", "random",
    )  # fmt: skip
    assert [line["task"] for line in lines] == ["scbench_kv_tiny", "scbench_vt"]
    assert all(question["metric"].startswith("kvzip_") for line in lines for question in line["questions"])


TOY = "--suite toy --tasks qa --length 256 --count 1"
ERRORS = {
    f"{TOY} --method best": "No method 'best'; there are gatesight,",
    f"{TOY} --method snapkv@fair": "allocation must be one of gate, flat",
    f"{TOY} --method a.b": "'a.b' is no method: give a name, name@allocation",
    f"{TOY} --method snapkv+int3": "entries_dtype is 'int8', or None for the model's dtype, got 'int3'",
    f"{TOY} --method full+int8": "'full+int8': full is a control, which holds entries in the model's dtype",
    f"{TOY} --kept 0": "--kept 0: kept_fraction must be in (0, 1]",
    f"{TOY} --kept 0.5,1.5": "--kept 0.5,1.5: kept_fraction must be in (0, 1]",
    f"{TOY} --kept half": "--kept half: could not convert",
    f"{TOY} --options {{": "--options {: no JSON",
    f"{TOY} --options [1]": "--options [1]: give a JSON object",
    f'{TOY} --options {{"snapkv":3}}': "Options of snapkv are an object such as",
    f'{TOY} --options {{"best":{{}}}}': "Options for unknown methods ['best']; there are gatesight,",
    f'{TOY} --method snapkv --options {{"snapkv":{{"windows":8}}}}': "Options of snapkv: ",
    f"{TOY} --template-options [": "--template-options [: no JSON",
    f"{TOY} --estimator mine": "--estimator mine: give NAME=FOLDER",
    f"{TOY} --estimator mine=nowhere": "--estimator mine=nowhere: no such folder",
    f"{TOY} --method mine --estimator mine=nowhere": "nowhere",
    f"{TOY} --method hidden_states --hidden-states nowhere": "nowhere",
    f"{TOY} --method triattention --calibration nowhere": "nowhere",
    f"{TOY} --method random --rows 0": "--rows must be at least 1",
    f"{TOY} --method random --threads -1": "--threads must be at least 1",
    f"{TOY} --method random --prefill-chunk-size 0": "--prefill-chunk-size must be at least 1",
    f"{TOY} --method random --variants filled": "--data and --variants are for ruler and scbench",
    f"{TOY} --method random --data x": "--data and --variants are for ruler and scbench",
    "--suite toy --method random --tasks vt,cwe": "No toy tasks ['cwe']; there are niah_single_1",
    "--suite toy --method random --length 100": "at least 256 tokens",
    "--suite toy --method random --count 0": "a generator needs a number",
    "--suite toy --method random --count -1": "--count is a number of contexts",
    "--suite toy --method random --seeds 1,b": "--seeds 1,b: give whole numbers",
    "--suite ruler --method random --tasks vt --variants spicy": "No RULER variant 'spicy'; take any of filled",
    "--suite ruler --method random --tasks niah": "niah_single_1",
    "--suite ruler --method random --tasks qa_1": "squad",
    "--suite ruler --method random --tasks vt --seeds 1,2": "give one to --seeds",
    "--suite ruler --method random --data x.jsonl --variants filled": "--variants belong to generated items",
    "--suite scbench --method random --tasks scbench_best": "its tasks are scbench_kv",
    "--suite scbench --method random --tasks scbench_kv --data no/such/folder": "no/such/folder is no file or folder",
    "--suite scbench --method random --tasks scbench_kv --variants neutral_prefix": "for scbench_mf alone",
    "--suite scbench --method random --variants filled": "SCBench has neutral_prefix alone",
    "--suite scbench --method random --max-turns 0": "max_turns is a number of questions",
    "--suite scbench-kvzip --method random": "needs --tasks",
    "--model ./nowhere --suite toy": "--model ./nowhere: no such folder",
    f"{TOY} --method random --whole-blocks": "are for --backend vllm",
    f"{TOY} --backend vllm": "use an environment for it alone, as `make vllm` does",
}


@pytest.mark.parametrize("command", ERRORS)
def test_errors_are_one_line_that_names_the_mend(
    command: str, bundled: tuple[Any, Any], tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--model" not in command:
        monkeypatch.setattr("gatesight_hf.models.load_named", lambda name, dtype: bundled)
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", "--out", "run", *command.split()]) == 1
    *before, line = capsys.readouterr().err.splitlines()
    assert not before and line.startswith("gatesight: ") and ERRORS[command] in line
    assert not (tmp_path / "run" / "results.jsonl").exists()


@pytest.mark.parametrize(
    ("method", "mend"),
    [
        ("gatesight", "--estimator gatesight=FOLDER"),
        ("triattention", "give --calibration"),
        ("hidden_states", "then --hidden-states FOLDER"),
    ],
)
def test_what_a_method_needs_of_another_model_is_asked_for(
    byte_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, mend: str
) -> None:
    command = ["evaluate", *TOY.split(), "--out", str(tmp_path / "run"), "--model", str(byte_model), "--method", method]
    assert main(command) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("gatesight: ") and mend in line


def test_rows_that_cannot_run_are_left_out_of_the_default(
    byte_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another model without an estimator, a hidden-state scorer or calibration text still gets the other methods."""
    lines = evaluated(
        tmp_path, "--suite scbench --tasks scbench_many_shot --count 1 --max-turns 1 --kept 0.5",
        "--model", str(byte_model), "--data", str(DATA / "scbench"),
    )  # fmt: skip
    rows = {cell["method"] for cell in lines[0]["cells"]}
    assert {"snapkv", "kvzip@global", "oracle"} <= rows and not {"gatesight", "triattention", "hidden_states"} & rows
    left_out = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Left out ")]
    assert [line.split()[2] for line in left_out] == ["gatesight:", "triattention:", "hidden_states:"]


def test_a_stop_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(name: str, dtype: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("gatesight_hf.models.load_named", stop)
    assert main(["evaluate", "--suite", "toy", "--out", "never"]) == 130
    assert capsys.readouterr().err.splitlines()[-1].startswith("gatesight: stopped")


def test_data_types_are_those_of_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--suite", "toy", "--dtype", "nn", "--out", "never"]) == 1
    assert "--dtype nn: no data type of torch" in capsys.readouterr().err


def test_serving_without_vllm_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "model", "--estimator", "folder", "--", "--port", "8000"]) == 1
    assert "use an environment for it alone, as `make vllm` does" in capsys.readouterr().err


def test_the_command_that_serves_is_printed_without_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--kept-fraction", "0.2", "--max-sessions-per-key", "3", "--print", "--", "--port", "8000"]
    assert main(["serve", "a model", "--estimator", "folder", *given]) == 0
    command = shlex.split(capsys.readouterr().out)
    assert command[command.index("--model") + 1] == "a model" and command[-2:] == ["--port", "8000"]
    extra = json.loads(command[command.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
    assert extra["estimators"] == {"gatesight": "folder"}
    assert (extra["kept_fraction"], extra["max_sessions_per_key"], extra["max_bytes_per_key"]) == (0.2, 3, None)
    assert main(["serve", "m", "--estimator", "e", "--max-bytes-per-key", "0", "--print"]) == 1
    assert "max_bytes_per_key" in capsys.readouterr().err


def test_only_serving_takes_options_of_another_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--", "--port", "8000"])
    assert "unrecognized arguments: -- --port 8000" in capsys.readouterr().err
