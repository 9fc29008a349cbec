"""A saved cache answers as the one it was saved from, in any process, and a file is written whole or not at all."""

import copy
import errno
import gc
import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from safetensors import safe_open
from torch import Tensor

from gatesight_hf import CacheStateError, GateSightCache, Session, SessionFileError, SessionMismatchError
from gatesight_hf.identity import weights_digest
from gatesight_hf.reference import ESTIMATOR_PATH, MODEL_PATH, documents, load_model, load_tokenizer

from .conftest import (
    KeyNorm,
    Oracle,
    assert_same,
    cache_kwargs,
    compacted,
    evicted_of,
    forward,
    generate,
    left_padded,
    padded,
    prefilled,
    random_estimator,
    random_ids,
    tiny_model,
)

pytestmark = pytest.mark.core

LENGTH = 43
CONTEXT, QUESTION = random_ids(LENGTH), random_ids(6, seed=9)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "doc.gatesight"


def last_line_of(code: str, *arguments: str) -> str:
    """What another Python process prints last."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def padded_batch(model: Any, **options: Any) -> GateSightCache:
    ids, mask = left_padded([CONTEXT, random_ids(17, seed=1)])
    return compacted(model, ids, mask=mask, **options)


def after_a_turn(model: Any, **options: Any) -> GateSightCache:
    """With a tail: a question and its answer came after compaction."""
    cache = compacted(model, CONTEXT, **options)
    generate(model, QUESTION, cache)
    return cache


def from_embeddings(model: Any, **options: Any) -> GateSightCache:
    cache = GateSightCache(random_estimator(model), model, **options)
    model(inputs_embeds=model.get_input_embeddings()(CONTEXT), **cache_kwargs(model, cache))
    cache.compact()
    return cache


CASES: dict[str, Callable[[Any], GateSightCache]] = {
    "gate": lambda model: compacted(model, CONTEXT, kept_fraction=0.3),
    "flat, prefix": lambda model: compacted(model, CONTEXT, kept_fraction=0.2, allocation="flat", protected_prefix=4),
    "score, blocks": lambda model: compacted(model, CONTEXT, kept_fraction=0.3, allocation="score", block_size=4),
    "global": lambda model: compacted(model, CONTEXT, kept_fraction=0.3, allocation="global"),
    "everything": lambda model: compacted(model, CONTEXT, kept_fraction=1.0),
    "padded": lambda model: padded_batch(model, kept_fraction=0.3),
    "padded, global": lambda model: padded_batch(model, kept_fraction=0.3, allocation="global"),
    "padded, everything": lambda model: padded_batch(model, kept_fraction=1.0),
    "almost nothing": lambda model: compacted(model, CONTEXT, kept_fraction=1e-9),
    "one token": lambda model: compacted(model, CONTEXT[:, :1], kept_fraction=1.0),
    "after a turn": lambda model: after_a_turn(model, kept_fraction=0.3),
    "embeddings": lambda model: from_embeddings(model, kept_fraction=0.3),
    "no gates": lambda model: compacted(model, CONTEXT, kept_fraction=0.3, scorer=KeyNorm(), allocation="pyramid"),
}


def answers(model: Any, cache: GateSightCache) -> list[Tensor]:
    """Logits of a question's tokens, and of another question after it, on forks."""
    question = QUESTION.expand(cache.batch_size, -1)
    given = {}
    if cache._padding is not None:
        mask = torch.cat([cache._padding.long(), torch.ones_like(question)], dim=1)
        given = padded(mask, question.shape[1])
    child, other = cache.fork(), cache.fork()
    return [forward(model, question, child, **given), forward(model, question[:, :1], child), forward(
        model, question[:, :1], other, **{name: value[:, :-5] for name, value in given.items() if "mask" in name}
    )]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_loaded_answers_as_what_was_saved(dense, path, case):
    cache = CASES[case](dense)
    expected = answers(dense, cache)
    cache.save(path)
    loaded = GateSightCache.load(path, dense)
    assert loaded.is_compacted and loaded.options == cache.options
    assert loaded.report() == cache.report()
    assert all(torch.equal(found, wanted) for found, wanted in zip(answers(dense, loaded), expected, strict=True))
    assert all(torch.equal(found, wanted) for found, wanted in zip(answers(dense, cache), expected, strict=True))
    again = path.with_name("again")
    loaded.save(again)
    assert again.read_bytes() == path.read_bytes()


def test_every_family(any_model, path):
    cache = compacted(any_model, CONTEXT, chunks=[30, 13], kept_fraction=0.3)
    cache.save(path)
    loaded = GateSightCache.load(path, any_model)
    ids = torch.cat([CONTEXT, QUESTION], 1)
    assert torch.equal(generate(any_model, ids, loaded.fork(), 8), generate(any_model, ids, cache.fork(), 8))
    assert torch.equal(generate(any_model, QUESTION, loaded, 8), generate(any_model, QUESTION, cache, 8))


@pytest.mark.parametrize("allocation", ["gate", "global"])
def test_evicted_entries_are_hidden_from_a_loaded_cache(dense, plain, path, allocation):
    compacted(dense, CONTEXT, kept_fraction=0.3, allocation=allocation).save(path)
    loaded = GateSightCache.load(path, dense)
    with Oracle(plain, evicted_of(loaded, 0, LENGTH)) as oracle:
        assert_same(forward(dense, QUESTION, loaded.fork()), oracle.logits(CONTEXT, QUESTION))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(path, dtype):
    model = tiny_model().to(dtype)
    cache = compacted(model, CONTEXT, kept_fraction=0.3)
    cache.save(path)
    loaded = GateSightCache.load(path, model)
    assert {layer.kept_keys.dtype for layer in loaded.attention_layers} == {dtype}
    assert torch.equal(forward(model, QUESTION, loaded.fork()), forward(model, QUESTION, cache.fork()))
    with pytest.raises(SessionMismatchError, match=r"another model's dtype: '\w*float16' in the file, 'float32' given"):
        GateSightCache.load(path, tiny_model())


def test_a_child_is_saved_whole(dense, path):
    parent = compacted(dense, CONTEXT, kept_fraction=0.3)
    child = parent.fork()
    first = generate(dense, QUESTION, child)
    child.save(path)
    expected = forward(dense, random_ids(5, seed=3), child)
    del parent, child
    loaded = GateSightCache.load(path, dense)
    assert loaded.get_seq_length() == LENGTH + 6 + first.shape[1] - 1
    assert torch.equal(forward(dense, random_ids(5, seed=3), loaded), expected)


def test_beams_are_saved_with_all_rows(dense, path):
    cache = compacted(dense, CONTEXT, kept_fraction=0.3)
    generate(dense, QUESTION, cache, num_beams=3)
    cache.save(path)
    loaded = GateSightCache.load(path, dense)
    assert loaded.batch_size == 3 and loaded.report() == cache.report()
    new = random_ids(2, rows=3, seed=4)
    assert torch.equal(forward(dense, new, loaded), forward(dense, new, cache))


def test_a_loaded_cache_prefills_another_context_with_its_scorer_only(dense, path):
    estimator = random_estimator(dense)
    compacted(dense, CONTEXT, scorer=estimator, kept_fraction=0.3).save(path)
    other = random_ids(30, seed=5)
    expected = compacted(dense, other, scorer=estimator, kept_fraction=0.3)
    loaded = GateSightCache.load(path, dense, scorer=estimator)
    loaded.reset()
    forward(dense, other, loaded)
    loaded.compact()
    assert torch.equal(forward(dense, QUESTION, loaded), forward(dense, QUESTION, expected))
    loaded = GateSightCache.load(path, dense)
    loaded.reset()
    forward(dense, other, loaded)
    with pytest.raises(CacheStateError, match=r"loaded without its scorer \(Estimator [0-9a-f]{16}\)"):
        loaded.compact()


def test_the_file_is_a_safetensors_file(dense, path):
    cache = compacted(dense, CONTEXT, kept_fraction=0.3)
    cache.save(path)
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["format"] == "gatesight-cache"
        assert torch.equal(file.get_tensor("layers.3.kept_keys"), cache.attention_layers[0].kept_keys)
        assert torch.equal(file.get_tensor("layers.0.conv_states.0"), cache.gdn_layers[0].conv_states[0])
        total = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118 - not a mapping
    report = cache.report()
    assert report.kv_bytes + report.gdn_bytes <= total <= path.stat().st_size < total + 8192


def test_no_copy_of_all_entries_is_made(dense, path, monkeypatch):
    """Each tensor is read into memory once; nothing of the size of several is made beside them."""
    compacted(dense, random_ids(600), kept_fraction=1.0).save(path)
    made = []
    empty = torch.empty

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        out = empty(*args, **kwargs)
        made.append(out.nbytes)
        return out

    monkeypatch.setattr("gatesight_hf.tensor_files.torch.empty", counted)
    loaded = GateSightCache.load(path, dense)
    held = [tensor for layer in loaded.layers for tensor in layer.state().values()]
    assert sum(made) <= path.stat().st_size
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in held)


# -- sessions ----------------------------------------------------------------------------------------------------------

ANOTHER_PROCESS = """
import json, sys, torch
from gatesight_hf import Session
from gatesight_hf.reference import ESTIMATOR_PATH, load_model, load_tokenizer
torch.set_num_threads(1)
path, questions = sys.argv[1], json.loads(sys.argv[2])
session = Session.load(path, load_model(), load_tokenizer(), ESTIMATOR_PATH)
print(json.dumps([session.ask(question, max_new_tokens=8) for question in questions]))
"""


@pytest.fixture(scope="module")
def reference() -> tuple[Any, Any]:
    return load_model(), load_tokenizer()


@pytest.fixture(scope="module")
def document() -> Any:
    return documents.needles(random.Random(3), 512, count=6, asked=6)


@pytest.fixture(scope="module")
def session(reference: tuple[Any, Any], document: Any) -> Session:
    return Session.open(*reference, ESTIMATOR_PATH, document.text, kept_fraction=0.2)


def test_another_process_gives_the_same_answers(session, document, path):
    questions = [question.text for question in document.questions]
    session.save(path)
    found = json.loads(last_line_of(ANOTHER_PROCESS, str(path), json.dumps(questions)))
    assert found == [session.ask(question, max_new_tokens=8) for question in questions]
    assert [answer.split()[:4] for answer in found] == [q.expected.split() for q in document.questions]


def test_another_tokenizer_is_refused(session, reference, path):
    session.save(path)
    model, tokenizer = reference
    other = load_tokenizer()
    other.add_tokens(["gatesight"])
    with pytest.raises(SessionMismatchError, match=r"another tokenizer: '\w{16}' in the file, '\w{16}' given"):
        Session.load(path, model, other)
    assert Session.load(path, model, tokenizer).report() == session.report()
    session.cache.save(path)
    with pytest.raises(SessionMismatchError, match="another tokenizer: 'None' in the file"):
        Session.load(path, model, tokenizer)


def test_another_estimator_is_refused_where_one_is_named(session, reference, path):
    session.save(path)
    other = random_estimator(reference[0])
    with pytest.raises(SessionMismatchError, match="another scorer: 'Estimator"):
        Session.load(path, *reference, other)
    session = Session.load(path, *reference, ESTIMATOR_PATH)
    session.save(path)
    with pytest.raises(SessionMismatchError, match="another scorer"):
        Session.load(path, *reference, other)


# -- which model -------------------------------------------------------------------------------------------------------


def other_weights(model: Any) -> None:
    model.model.layers[5].mlp.up_proj.weight.add_(1e-3)


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "weights": (lambda: (model := tiny_model(), other_weights(model))[0], "weights"),
    "a layer more": (lambda: tiny_model(num_hidden_layers=12), "layout"),
    "family": (lambda: tiny_model("qwen3_next"), "model_type"),
    "RoPE": (
        lambda: tiny_model(
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.25,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            }
        ),
        "rotary",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_another_model_is_refused(dense, path, case):
    make, match = OTHERS[case]
    compacted(dense, CONTEXT, kept_fraction=0.3).save(path)
    with pytest.raises(SessionMismatchError, match=f"another model's {match}"):
        GateSightCache.load(path, make())
    GateSightCache.load(path, copy.deepcopy(dense))


def test_a_model_that_is_offloaded_or_without_its_head_is_the_same(dense, path):
    cache = compacted(dense, CONTEXT, kept_fraction=0.3)
    cache.save(path)
    loaded = GateSightCache.load(path, dense.model)
    assert torch.equal(forward(dense, QUESTION, loaded), forward(dense, QUESTION, cache.fork()))
    model = tiny_model()
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert weights_digest(model) == weights_digest(dense)


# -- what is not saved -------------------------------------------------------------------------------------------------


def test_an_uncompacted_cache_is_not_saved(dense, path):
    for cache in (GateSightCache(random_estimator(dense), dense), prefilled(dense, CONTEXT)):
        with pytest.raises(CacheStateError, match=r"call compact\(\) first"):
            cache.save(path)
    assert not path.exists()


def test_states_that_are_not_finite_are_not_saved(dense, path):
    cache = compacted(dense, CONTEXT, kept_fraction=0.3)
    cache.gdn_layers[2].recurrent_states[0][0, 1, 2, 3] = torch.nan
    with pytest.raises(ValueError, match=r"layers\.2\.recurrent_states\.0 holds NaN"):
        cache.save(path)
    assert not path.exists()


def test_a_cache_whose_model_is_gone_is_not_saved(path):
    model = tiny_model()
    cache = compacted(model, CONTEXT, kept_fraction=0.3)
    copied = copy.deepcopy(cache)
    copied.save(path)
    pickled = pickle.loads(pickle.dumps(cache))
    del model
    gc.collect()
    for of_no_model in (cache, pickled):
        with pytest.raises(CacheStateError, match="model is gone"):
            of_no_model.save(path)


# -- whole or not at all -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [b"what was there before", None])
@pytest.mark.parametrize("call", ["os.fsync", "pathlib.Path.replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file(dense, path, monkeypatch, old, call, error):
    def fail(*_: Any) -> None:
        raise error

    if old is not None:
        path.write_bytes(old)
    cache = compacted(dense, CONTEXT, kept_fraction=0.3)
    monkeypatch.setattr(call, fail)
    with pytest.raises(type(error)):
        cache.save(path)
    monkeypatch.undo()
    assert {p.name: p.read_bytes() for p in path.parent.iterdir()} == ({} if old is None else {path.name: old})
    cache.save(path)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    GateSightCache.load(path, dense)


DISK_FULL = """
import resource, sys, torch
from gatesight_hf import Session
from gatesight_hf.reference import ESTIMATOR_PATH, load_model, load_tokenizer
torch.set_num_threads(1)
session = Session.open(load_model(), load_tokenizer(), ESTIMATOR_PATH, "The sky is blue . " * 100)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    session.save(sys.argv[1])
except OSError as error:
    print(type(error).__name__, error.errno, session.ask("The", max_new_tokens=1) != "")
"""


def test_a_full_disk_leaves_the_old_file(path):
    path.write_bytes(b"what was there before")
    assert last_line_of(DISK_FULL, str(path)) == f"OSError {errno.EFBIG} True"
    assert [(p.name, p.read_bytes()) for p in path.parent.iterdir()] == [(path.name, b"what was there before")]


def test_where_a_file_goes(dense, path):
    cache = compacted(dense, CONTEXT, kept_fraction=0.3)
    with pytest.raises(FileNotFoundError):
        cache.save(path / "no" / "such" / "folder")
    with pytest.raises(IsADirectoryError):
        cache.save(path.parent)
    path.symlink_to(path.parent / "real")
    cache.save(str(path))
    assert path.is_symlink() and (path.parent / "real").is_file()
    GateSightCache.load(str(path), dense)
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_missing_file_is_named(dense, tmp_path):
    for name in ("nowhere", "."):
        with pytest.raises(FileNotFoundError, match="no such file"):
            GateSightCache.load(tmp_path / name, dense)
    with pytest.raises(SessionFileError, match="not one of a saved cache"):
        GateSightCache.load(MODEL_PATH / "model.safetensors", dense)
