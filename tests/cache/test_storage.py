"""A saved cache answers as the one it was saved from, in any process."""

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from safetensors import safe_open
from torch import Tensor

from gatesight_hf import CacheStateError, GateSightCache, Prefill, Session, SessionFileError, SessionMismatchError
from gatesight_hf.cache.identity import weights_digest
from gatesight_hf.entries import Extent, GateSightAttentionLayer
from gatesight_hf.files import TensorInfo
from gatesight_hf.models.families import Qwen35Adapter
from gatesight_hf.reference import ESTIMATOR_PATH, documents, load_tokenizer

from ..helpers.models import KeyNorm, random_estimator, tiny_model
from ..helpers.oracle import Oracle, assert_same, evicted_of
from ..helpers.paths import DATA
from ..helpers.running import (
    CONTEXT,
    LENGTH,
    QUESTION,
    cache_kwargs,
    compacted,
    forward,
    generate,
    left_padded,
    padded,
    random_ids,
)
from ..helpers.saved_files import lines_of

pytestmark = pytest.mark.core


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "doc.gatesight"


def padded_batch(model: Any, **options: Any) -> GateSightCache:
    ids, mask = left_padded([CONTEXT, random_ids(17, seed=1)])
    return compacted(model, ids, mask=mask, **options)


def after_a_turn(model: Any, **options: Any) -> GateSightCache:
    """With a tail: a question and its answer came after compaction."""
    cache = compacted(model, CONTEXT, **options)
    generate(model, QUESTION, cache, new=True)
    return cache


def from_embeddings(model: Any, **options: Any) -> GateSightCache:
    cache = GateSightCache(random_estimator(model), model, **options)
    model(inputs_embeds=model.get_input_embeddings()(CONTEXT), **cache_kwargs(model, cache))
    cache.compact()
    return cache


class SecondLayerFirst(KeyNorm):
    """All entries of the second attention layer before any of the first."""

    def score(self, prefill: Prefill) -> list[Tensor]:
        first, second = super().score(prefill)
        return [first - 1000, second]


CASES: dict[str, Callable[[Any], GateSightCache]] = {
    "gate": lambda model: compacted(model, CONTEXT, kept_fraction=0.3),
    "flat, prefix": lambda model: compacted(model, CONTEXT, kept_fraction=0.2, allocation="flat", protected_prefix=4),
    "score, blocks": lambda model: compacted(model, CONTEXT, kept_fraction=0.3, allocation="score", block_size=4),
    "global": lambda model: compacted(model, CONTEXT, kept_fraction=0.3, allocation="global"),
    "an empty layer": lambda model: compacted(
        model, CONTEXT, kept_fraction=0.2, allocation="global", scorer=SecondLayerFirst()
    ),
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
    if cache.context.tokens.padding is not None:
        mask = torch.cat([cache.context.tokens.padding.long(), torch.ones_like(question)], dim=1)
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
    if cache.spec.indexed or cache.spec.sliding_layers:
        with pytest.raises(CacheStateError, match="cannot be saved: files hold no such layers"):
            cache.save(path)
        assert not path.exists()
        return
    cache.save(path)
    loaded = GateSightCache.load(path, any_model)
    ids = torch.cat([CONTEXT, QUESTION], 1)
    assert torch.equal(generate(any_model, ids, loaded.fork(), 8), generate(any_model, ids, cache.fork(), 8))
    assert torch.equal(
        generate(any_model, QUESTION, loaded, 8, new=True), generate(any_model, QUESTION, cache, 8, new=True)
    )


@pytest.mark.parametrize("allocation", ["gate", "head", "global"])
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
    first = generate(dense, QUESTION, child, new=True)
    child.save(path)
    expected = forward(dense, random_ids(5, seed=3), child)
    del parent, child
    loaded = GateSightCache.load(path, dense)
    assert loaded.get_seq_length() == LENGTH + 6 + first.shape[1] - 1
    assert torch.equal(forward(dense, random_ids(5, seed=3), loaded), expected)


def test_beams_are_saved_with_all_rows(dense, path):
    cache = compacted(dense, CONTEXT, kept_fraction=0.3)
    generate(dense, QUESTION, cache, new=True, num_beams=3)
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

    monkeypatch.setattr("gatesight_hf.files.tensor_files.torch.empty", counted)
    loaded = GateSightCache.load(path, dense)
    held = [tensor for layer in loaded.layers for tensor in layer.state().values()]
    assert sum(made) <= path.stat().st_size
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in held)


class IndexedLayer(GateSightAttentionLayer):
    """A further kind of layer: it keeps one number per two entries besides them."""

    kind = "indexed"

    def state(self) -> dict[str, Tensor]:
        held = super().state()
        return held if self.kept_keys is None else {**held, "index": self.kept_keys[:, :, ::2, 0].half()}

    def expected_state(self, extent: Extent, found: Any) -> dict[str, TensorInfo]:
        expected = super().expected_state(extent, found)
        rows, heads, kept = expected["kept_positions"].shape
        return {**expected, "index": TensorInfo(torch.float16, (rows, heads, (kept + 1) // 2))}

    def load_state(self, tensors: Any, extent: Extent) -> None:
        super().load_state({name: tensor for name, tensor in tensors.items() if name != "index"}, extent)
        self.loaded_index = tensors["index"]


def test_a_further_kind_of_layer_brings_its_own_tensors(dense, path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Qwen35Adapter, "cache_layer", IndexedLayer)
        cache = compacted(dense, CONTEXT, kept_fraction=0.3)
        cache.save(path)
        loaded = GateSightCache.load(path, dense)
        for layer, saved in zip(loaded.attention_layers, cache.attention_layers, strict=True):
            assert isinstance(layer, IndexedLayer) and torch.equal(layer.loaded_index, saved.state()["index"])
        assert torch.equal(forward(dense, QUESTION, loaded), forward(dense, QUESTION, cache.fork()))
    with pytest.raises(SessionFileError, match=r"kinds .*'indexed'.* do not fit"):
        GateSightCache.load(path, dense)


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
def document() -> Any:
    return documents.needles(random.Random(3), 512, count=6, asked=6)


@pytest.fixture(scope="module")
def session(bundled: tuple[Any, Any], document: Any) -> Session:
    return Session.open(*bundled, ESTIMATOR_PATH, document.text, kept_fraction=0.2)


def test_another_process_gives_the_same_answers(session, document, path):
    questions = [question.text for question in document.questions]
    session.save(path)
    found = json.loads(lines_of(ANOTHER_PROCESS, path, json.dumps(questions))[-1])
    assert found == [session.ask(question, max_new_tokens=8) for question in questions]
    assert [answer.split()[:4] for answer in found] == [q.expected.split() for q in document.questions]


def test_a_loaded_session_goes_on_with_the_conversation_and_is_saved_again(session, bundled, document, path):
    first, second = (question.text for question in document.questions[:2])
    assert session.chat(first, max_new_tokens=8).split()[:4] == document.questions[0].expected.split()
    session.save(path)
    loaded = Session.load(path, *bundled)
    assert loaded.history == session.history and loaded.report() == session.report()
    assert loaded.chat(second, max_new_tokens=8) == session.chat(second, max_new_tokens=8)
    loaded.save(path)
    assert Session.load(path, *bundled).history == session.history


def test_a_file_of_an_earlier_release_is_read(bundled):
    """Format 2, written on the commit before the library was divided into rooms: these were its answers there."""
    document = documents.needles(random.Random(5), 220, 3, asked=3)
    loaded = Session.load(DATA / "session_format_2.gatesight", *bundled)
    opened = Session.open(*bundled, ESTIMATOR_PATH, document.text, kept_fraction=0.2)
    answers = [loaded.ask(q.text, max_new_tokens=len(q.answer) + 1) for q in document.questions]
    assert answers == ["5 8 0 7", "5 7 3 6", "3 0 2 1"]
    assert loaded.report().kept_per_layer == opened.report().kept_per_layer
    for layer, of_opened in zip(loaded.cache.attention_layers, opened.cache.attention_layers, strict=True):
        assert torch.equal(layer.kept_positions, of_opened.kept_positions)


def test_another_tokenizer_is_refused(session, bundled, path):
    session.save(path)
    model, tokenizer = bundled
    other = load_tokenizer()
    other.add_tokens(["gatesight"])
    with pytest.raises(SessionMismatchError, match=r"another tokenizer: '\w{16}' in the file, '\w{16}' given"):
        Session.load(path, model, other)
    assert Session.load(path, model, tokenizer).report() == session.report()
    session.cache.save(path)
    with pytest.raises(SessionMismatchError, match="another tokenizer: 'None' in the file"):
        Session.load(path, model, tokenizer)


def test_another_estimator_is_refused_where_one_is_named(session, bundled, path):
    session.save(path)
    other = random_estimator(bundled[0])
    with pytest.raises(SessionMismatchError, match=r"another scorer: 'Estimator.*without one, as answers need none"):
        Session.load(path, *bundled, other)
    assert Session.load(path, *bundled).report() == session.report()
    session = Session.load(path, *bundled, ESTIMATOR_PATH)
    session.save(path)
    with pytest.raises(SessionMismatchError, match="another scorer"):
        Session.load(path, *bundled, other)


# -- which model -------------------------------------------------------------------------------------------------------


def other_weights(model: Any) -> None:
    model.model.layers[5].mlp.up_proj.weight.add_(1e-3)


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "weights": (lambda: (model := tiny_model(), other_weights(model))[0], "weights"),
    "a layer more": (lambda: tiny_model(num_hidden_layers=12), "layout"),
    "family": (lambda: tiny_model("qwen3_next"), "model_type"),
    "another epsilon": (lambda: tiny_model(rms_norm_eps=1e-3), "configuration"),
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
        "configuration",
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
