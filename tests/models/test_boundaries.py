"""Where the library meets other code: wrappers, other model objects, bad documents and files."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gatesight_hf import CacheStateError, Estimator, GateSightCache, Session
from gatesight_hf.cache.identity import weights_digest
from gatesight_hf.commands.cli import main
from gatesight_hf.methods import RandomScorer
from gatesight_hf.models import attach
from gatesight_hf.models._compat import cache_argument
from gatesight_hf.reference import documents
from gatesight_hf.training import collect as collecting
from gatesight_hf.training.collect import Sampling, document_tensors

pytestmark = [pytest.mark.core, pytest.mark.quick]

IDS = torch.randint(1, 128, (1, 30), generator=torch.Generator().manual_seed(11))


def prefilled(model: Any, **options: Any) -> GateSightCache:
    cache = GateSightCache(RandomScorer(), model, **{"kept_fraction": 0.3, **options})
    model(IDS, past_key_values=cache)
    return cache


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("tokens", [1, 4])
def test_hooks_attached_among_the_arguments_of_generate_compact_too(dense: Any, tokens: int, chunk: int | None) -> None:
    """Python looks `model.generate` up before the cache of the same expression is made."""
    attach(dense)
    options = {"max_new_tokens": tokens, "prefill_chunk_size": chunk}
    expected = dense.generate(IDS, past_key_values=GateSightCache(RandomScorer(), dense, 0.3), **options)
    model = copy.deepcopy(dense)
    attach(model).remove()
    held: list[GateSightCache] = []

    def make() -> GateSightCache:
        held.append(GateSightCache(RandomScorer(), model, kept_fraction=0.3))
        return held[0]

    assert torch.equal(model.generate(IDS, **{cache_argument(model): make()}, **options), expected)
    assert held[0].is_compacted and held[0].report().achieved_fraction == pytest.approx(0.3)


class Wrapper(nn.Module):
    """What adapter libraries do: a module around the model with its config."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.inner.generate(*args, **kwargs)


@pytest.mark.parametrize("first", ["model", "wrapper"])
def test_a_wrapper_around_a_hooked_model_adds_no_second_hooks(dense: Any, first: str) -> None:
    model = copy.deepcopy(dense)
    wrapper = Wrapper(model)
    for module in (model, wrapper) if first == "model" else (wrapper, model):
        attach(module)
    attach(dense)
    expected = dense.generate(IDS, past_key_values=GateSightCache(RandomScorer(), dense, 0.3), max_new_tokens=4)
    for module in (model, wrapper):
        cache = GateSightCache(RandomScorer(), module, kept_fraction=0.3)
        assert torch.equal(module.generate(IDS, past_key_values=cache, max_new_tokens=4), expected)
        assert cache.is_compacted
    attach(model).remove()
    leftovers = [
        m
        for m in wrapper.modules()
        if m._forward_hooks or m._forward_pre_hooks or "generate" in vars(m) or "_prefill" in vars(m)
    ]
    assert not leftovers and not any("_gatesight_hooks" in vars(m) for m in wrapper.modules())


@pytest.mark.parametrize("length", [1, 5])
def test_a_model_object_without_hooks_is_refused_before_it_changes_the_cache(dense: Any, length: int) -> None:
    other = copy.deepcopy(dense)
    attach(other).remove()
    cache = prefilled(dense)
    cache.compact()
    question = IDS[:, :length]
    expected = dense(question, past_key_values=cache.fork()).logits
    with pytest.raises(CacheStateError, match="no GateSight hooks"):
        other(question, **{cache_argument(other): cache})
    assert torch.equal(dense(question, past_key_values=cache.fork()).logits, expected)
    attach(other)
    assert torch.equal(other(question, past_key_values=prefilled_and_compacted(other)).logits, expected)


def prefilled_and_compacted(model: Any) -> GateSightCache:
    cache = prefilled(model)
    cache.compact()
    return cache


def test_generate_without_a_cache_in_use_is_refused(dense: Any) -> None:
    cache = prefilled_and_compacted(dense)
    with pytest.raises(ValueError, match="use_cache=False"):
        dense.generate(IDS, past_key_values=cache, use_cache=False)
    assert cache.get_seq_length() == 30


def test_rows_may_be_repeated_before_anything_is_seen(dense: Any) -> None:
    cache = GateSightCache(RandomScorer(), dense, kept_fraction=0.5)
    cache.batch_repeat_interleave(3)
    dense(IDS.repeat(2, 1), past_key_values=cache)
    assert sum(cache.compact().physical_lengths) == 30


def test_a_prompt_with_an_end_token_keeps_its_continuations(dense: Any, monkeypatch: Any) -> None:
    rows: list[int] = []
    original = collecting._until_end

    def watched(row: Tensor, end: Any) -> Tensor:
        rows.append(len(row))
        return original(row, end)

    monkeypatch.setattr(collecting, "_until_end", watched)
    monkeypatch.setattr(dense.generation_config, "eos_token_id", 1)
    document_tensors(dense, IDS, Sampling(continuations=2, tokens=6, prompts=((5, 1, 7),)), 0)
    assert len(rows) == 2 and all(1 <= length <= 6 for length in rows)


def test_a_damaged_shard_is_made_again(dense: Any, tmp_path: Path) -> None:
    sampling = Sampling(continuations=1, tokens=2)
    (shard,) = collecting.collect(dense, [IDS[0].tolist()], tmp_path, sampling, "documents")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:100])
    collecting.collect(dense, [IDS[0].tolist()], tmp_path, sampling, "documents")
    assert shard.read_bytes() == whole


def test_the_digest_of_weights_sees_every_parameter(dense: Any) -> None:
    before = weights_digest(dense)
    for name in ("q_proj", "in_proj_b", "embed_tokens"):
        changed = copy.deepcopy(dense)
        next(p for n, p in changed.named_parameters() if name in n).data.mul_(3)
        assert weights_digest(changed) != before
    assert weights_digest(copy.deepcopy(dense)) == before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\nnot json\n', r"a\.jsonl, line 2"),
        ("a.txt", b"\xff\xfe\x00", r"a\.txt: .*utf-8"),
        ("missing", None, "missing: no such file or folder"),
    ],
)
def test_bad_documents_are_named(
    name: str, content: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    arguments = ["train", "--model", "reference", "--documents", str(tmp_path / name), "--out", str(tmp_path / "out")]
    assert main(arguments) == 1
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("option", ["--window", "--epochs", "--hidden-size", "--continuations"])
def test_options_are_checked_before_any_work(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--model", "reference", "--out", str(tmp_path / "out"), option, "0"]) == 1
    assert f"{option} must be at least 1" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["--needles", "0"], ["--length", "10"]])
def test_demo_names_a_document_that_cannot_be(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *arguments]) == 1
    assert "needles in" in capsys.readouterr().err


def test_session_names_what_it_cannot_do(bundled: Any) -> None:
    model, tokenizer = bundled
    text = " ".join(documents.NOISE)
    with pytest.raises(ValueError, match="no tokens"):
        Session.open(model, tokenizer, RandomScorer(), "")
    with pytest.raises(ValueError, match="prefill_chunk_size"):
        Session.open(model, tokenizer, RandomScorer(), text, prefill_chunk_size=0)
    session = Session.open(model, tokenizer, RandomScorer(), text)
    with pytest.raises(ValueError, match="no tokens"):
        session.ask("")
    with pytest.raises(ValueError, match="one answer"):
        session.ask("the sky", max_new_tokens=2, do_sample=True, num_return_sequences=2)
    plain = session.ask("the sky", max_new_tokens=2)
    assert session.ask("the sky", max_new_tokens=2, return_dict_in_generate=True) == plain


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format_version": ' + "9" * 5000 + "}", '{"format_version": true}'])
def test_hostile_estimator_configurations_are_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"config\.json|format"):
        Estimator.from_pretrained(tmp_path)
