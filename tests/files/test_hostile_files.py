"""Files from anyone: saved caches that are wrong in one way are refused by a message that says in which."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gatesight_hf import GateSightCache, SessionFileError
from gatesight_hf.files.tensor_files import JSON_LIMIT, TensorFile, parse_json, write_tensor_file

from ..helpers.saved_files import Change, changed_cache

pytestmark = [pytest.mark.core, pytest.mark.quick]


def with_header(path: Path, target: Path, change: Callable[[dict[str, Any]], Any], length: int | None = None) -> Path:
    """A copy whose header is changed and its data left; `length` is what its first bytes claim."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    text = json.dumps(change(header) or header).encode()
    target.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data[end:])
    return target


def test_the_helpers_change_nothing_by_themselves(dense, cache_file, tmp_path):
    same = changed_cache(cache_file, tmp_path / "same", lambda tensors, content: None)
    assert GateSightCache.load(same, dense).report() == GateSightCache.load(cache_file, dense).report()


# -- saved caches: what the header claims ------------------------------------------------------------------------------

KEPT = "layers.3.kept_keys"


def claim(name: str, **changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda header: header[name].update(changes)


WRONG_HEADERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a list": (lambda h: [h], "not one JSON object"),
    "an entry that is no object": (lambda h: h.update({KEPT: 5}), "not told by dtype"),
    "an entry with another key": (claim(KEPT, extra=1), "not told by dtype"),
    "an unknown dtype": (claim(KEPT, dtype="C64"), "dtype 'C64'"),
    "a dtype that is a list": (claim(KEPT, dtype=["F32"]), "which is not read here"),
    "a negative size": (claim(KEPT, shape=[2, 2, -3, 32]), "not whole numbers"),
    "a size that is no whole number": (claim(KEPT, shape=[2, 2, 3.0, 32]), "not whole numbers"),
    "a size that is true": (claim(KEPT, shape=[2, True, 3, 32]), "not whole numbers"),
    "an enormous size": (claim(KEPT, shape=[2, 2, 2**62, 32]), "does not lie"),
    "sizes whose product overflows": (claim(KEPT, shape=[2**62, 2**62, 2**62, 2**62]), "does not lie"),
    "many dimensions": (claim(KEPT, shape=[1] * 10_000), "10000 dimensions"),
    "data beyond the file": (claim(KEPT, data_offsets=[0, 2**60]), "does not lie"),
    "data of another tensor": (lambda h: h[KEPT].update(h["layers.3.kept_values"]), "does not lie"),
    "three offsets": (claim(KEPT, data_offsets=[0, 1, 2]), "3 offsets"),
    "a tensor less": (lambda h: h.pop(KEPT) and None, "does not lie|are there"),
    "metadata that are a list": (lambda h: h.update(__metadata__=[]), "metadata are not texts"),
    "metadata that are numbers": (lambda h: h["__metadata__"].update(format=1), "metadata are not texts"),
    "no metadata": (lambda h: h.pop("__metadata__") and None, "not one of a saved cache"),
    "another format": (lambda h: h["__metadata__"].update(format="pt"), "not one of a saved cache"),
    "a newer version": (lambda h: h["__metadata__"].update(format_version="4"), "version '4'.*upgrade gatesight_hf"),
    "an older version": (lambda h: h["__metadata__"].update(format_version="1"), "version '1'.*save the session anew"),
    "a version that is missing": (lambda h: h["__metadata__"].pop("format_version") and None, "version None"),
    "metadata of others": (lambda h: h["__metadata__"].update(more=""), r"unknown keys \['more'\]"),
    "no checksum": (lambda h: h["__metadata__"].pop("sha256") and None, r"missing keys \['sha256'\]"),
    "a checksum that is none": (lambda h: h["__metadata__"].update(sha256=""), "64 hexadecimal"),
    "another checksum": (lambda h: h["__metadata__"].update(sha256="0" * 64), "damaged or changed"),
    "a cache that is no JSON": (lambda h: h["__metadata__"].update(cache="{"), "not JSON"),
    "a cache of deep lists": (lambda h: h["__metadata__"].update(cache="[" * 100_000), "not JSON"),
    "a cache with NaN": (lambda h: h["__metadata__"].update(cache='{"a": NaN}'), "NaN is not a number"),
    "a key twice": (lambda h: h["__metadata__"].update(cache='{"a": 1, "a": 2}'), "twice"),
    "half a character": (lambda h: h["__metadata__"].update(cache='{"\ud800": 1}'), "not JSON"),
}


@pytest.mark.parametrize("case", WRONG_HEADERS)
def test_a_wrong_header_is_refused(dense, cache_file, tmp_path, case):
    change, match = WRONG_HEADERS[case]
    path = with_header(cache_file, tmp_path / "bad", change)
    with pytest.raises(SessionFileError, match=match) as caught:
        GateSightCache.load(path, dense)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize("length", [0, 1, 2**20, 2**30, 2**40, 2**63, 2**64 - 1])
def test_a_header_of_another_length_is_refused(dense, cache_file, tmp_path, length):
    path = with_header(cache_file, tmp_path / "bad", lambda header: None, length)
    with pytest.raises(SessionFileError, match=r"cannot hold a header|not JSON"):
        GateSightCache.load(path, dense)


def test_a_long_header_is_not_parsed(dense, tmp_path):
    path = tmp_path / "long"
    path.write_bytes((JSON_LIMIT + 1).to_bytes(8, "little") + b"[" * (JSON_LIMIT + 1))
    with pytest.raises(SessionFileError, match="more than the 1048576 that are read"):
        GateSightCache.load(path, dense)


def test_a_header_too_long_to_be_read_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="at most 1048576 can be read"):
        write_tensor_file(tmp_path / "long", {}, {"cache": " " * JSON_LIMIT})
    assert not list(tmp_path.iterdir())


# -- saved caches: what a right checksum does not make right -----------------------------------------------------------


def put(name: str, **values: Any) -> Change:
    return lambda tensors, content: content[name].update(values)


def edit(name: str, function: Callable[[Tensor], Tensor]) -> Change:
    """Replace a tensor."""
    return lambda tensors, content: tensors.update({name: function(tensors[name]).contiguous()})


def write(name: str, function: Callable[[Tensor], Any]) -> Change:
    """Write to a tensor in place."""
    return lambda tensors, content: function(tensors[name])


def shorter(layer: int, entries: slice) -> Change:
    """One layer with fewer entries, all its tensors agreeing."""

    def change(tensors: dict[str, Tensor], content: dict[str, Any]) -> None:
        for name in ("kept_keys", "kept_values", "kept_positions"):
            tensors[f"layers.{layer}.{name}"] = tensors[f"layers.{layer}.{name}"][:, :, entries].contiguous()
        tensors[f"layers.{layer}.kept_valid"] = tensors[f"layers.{layer}.kept_valid"][:, entries].contiguous()

    return change


def swap_positions(positions: Tensor) -> None:
    positions[0, 0, :2] = positions[0, 0, :2].flip(0)


WRONG_CONTENT: dict[str, tuple[Change, str]] = {
    "a tensor is missing": (lambda t, c: t.pop(KEPT), r"missing tensors \['layers.3.kept_keys'\]"),
    "a state is missing": (lambda t, c: t.pop("layers.1.recurrent_states.0"), "missing tensors"),
    "positions are missing": (lambda t, c: t.pop("layers.3.kept_positions"), "missing tensors"),
    "a tensor is unknown": (lambda t, c: t.update(extra=torch.zeros(1)), r"unexpected ones \['extra'\]"),
    "a layer too many": (lambda t, c: t.update({"layers.8.x": torch.zeros(1)}), r"unexpected ones \['layers.8.x'\]"),
    "a layer by another name": (lambda t, c: t.update({"layers.03.kept_keys": t.pop(KEPT)}), "missing tensors"),
    "keys in another dtype": (edit(KEPT, Tensor.double), r"layers\.3\.kept_keys must be float32 .* got float64"),
    "states in another dtype": (edit("layers.0.recurrent_states.0", Tensor.bfloat16), "must be float32"),
    "positions in int64": (edit("layers.3.kept_positions", Tensor.long), "must be int32"),
    "a head less": (edit(KEPT, lambda x: x[:, :1]), r"layers\.3\.kept_keys must be"),
    "a channel less": (edit(KEPT, lambda x: x[..., :-1]), r"layers\.3\.kept_keys must be"),
    "a dimension less": (edit(KEPT, lambda x: x[0]), r"layers\.3\.kept_keys must be"),
    "an entry less in keys alone": (edit(KEPT, lambda x: x[:, :, 1:]), r"layers\.3\.kept_keys must be"),
    "an entry less in the tail of one layer": (
        edit("layers.7.tail_values", lambda x: x[:, :, 1:]),
        r"layers\.7\.tail_values must be float32 \(2, 2, 3, 32\)",
    ),
    "a row less in one state": (edit("layers.2.conv_states.0", lambda x: x[:1]), r"conv_states\.0 must be"),
    "a larger convolution": (edit("layers.2.conv_states.0", lambda x: x.repeat(1, 1, 2)), r"conv_states\.0 must be"),
    "more entries than slots": (
        lambda t, c: t.update({f"layers.3.kept_{n}": t[f"layers.3.kept_{n}"].repeat(1, 1, 9, *[1] * d)
                               for n, d in (("keys", 1), ("values", 1), ("positions", 0))}),
        r"must be \w+ \(2, 2, 43",
    ),
    "ids of fewer tokens": (edit("ids", lambda x: x[:, 1:]), r"ids must be int64 \(2, 46\)"),
    "flags that are no bools": (edit("layers.3.kept_valid", lambda x: x.view(torch.uint8)), "must be bool"),
    "fewer entries than were kept": (shorter(3, slice(1, None)), "attention layer 0 does not keep as many"),
    "NaN in keys": (write(KEPT, lambda x: x[0, 0, 0].fill_(torch.nan)), r"kept_keys holds NaN"),
    "infinity in the tail": (
        write("layers.7.tail_keys", lambda x: x[0, 0, 0].fill_(-torch.inf)), "tail_keys holds NaN or infinite"
    ),
    "NaN in a state": (
        write("layers.0.recurrent_states.0", lambda x: x[1].fill_(torch.nan)),
        r"layers\.0\.recurrent_states\.0 holds NaN",
    ),
    "NaN in gate means": (write("gate_means", lambda x: x.fill_(torch.nan)), "gate_means holds NaN"),
    "positions out of order": (write("layers.3.kept_positions", swap_positions), "not ascending"),
    "a position twice": (
        write("layers.3.kept_positions", lambda x: x[0, 1, 1:2].copy_(x[0, 1, :1])), "not ascending"
    ),
    "a negative position": (write("layers.3.kept_positions", lambda x: x[0, 0, :1].fill_(-1)), "outside the 43"),
    "a position beyond the context": (
        write("layers.7.kept_positions", lambda x: x[0, 1, -1:].fill_(43)), "layer 1 keeps positions outside"
    ),
    "the position of a pad": (
        write("layers.3.kept_positions", lambda x: x[1, 0, :1].fill_(3)), "outside the 43 slots, or of pads"
    ),
    "flags that hide an entry": (
        write("layers.3.kept_valid", lambda x: x[0, :1].fill_(False)), "does not keep as many"
    ),
    "a pad after a token": (write("padding", lambda x: x[0, 9:10].fill_(False)), "pads after"),
    "a row of pads alone": (write("padding", lambda x: x[0, :43].fill_(False)), "pads after"),
    "another count": (write("kept", lambda x: x.add_(1)), "does not keep as many"),
    "another number of rows": (put("extent", rows=1), "must be"),
    "no rows": (put("extent", rows=0), "implausible sizes"),
    "another context": (put("extent", context=42, tail=4), "must be|outside"),
    "an enormous context": (put("extent", context=2**30), "must be"),
    "a context beyond all": (put("extent", context=2**80), "implausible sizes"),
    "a context of text": (put("extent", context="43"), "implausible sizes"),
    "a context of true": (put("extent", context=True), "implausible sizes"),
    "a negative tail": (put("extent", tail=-3, context=49), "implausible sizes"),
    "a size more": (put("extent", more=1), r"extent: .*unknown keys \['more'\]"),
    "an option more": (put("options", more=1), r"options: .*unknown keys \['more'\]"),
    "an option less": (lambda t, c: c["options"].pop("allocation"), r"options: missing keys \['allocation'\]"),
    "a kept fraction of 7": (put("options", kept_fraction=7), r"kept_fraction must be in \(0, 1\]"),
    "an unknown allocation": (put("options", allocation="all"), "allocation must be one of"),
    "an allocation that is a list": (put("options", allocation=[]), "allocation must be one of"),
    "a growing cache": (put("options", growing=True), "a growing cache, which no file holds"),
    "an interval": (put("options", recompact_every=9), "a growing cache, which no file holds"),
    "an interval of 0": (put("options", recompact_every=0), "recompact_every must be a whole number"),
    "growth that is a number": (put("options", growing=0), "growing must be True or False"),
    "a seconds more": (put("seconds", more=1), "unknown keys"),
    "negative seconds": (put("seconds", score=-1), "seconds must be numbers"),
    "seconds beyond all": (put("seconds", score=10**400), "seconds must be numbers"),
    "a fraction above 1": (put("plan", achieved_fraction=1.5), "implausible plan"),
    "a fraction of nothing": (put("plan", achieved_fraction=None), "implausible plan"),
    "bytes of true": (put("plan", kv_bytes_before=True), "implausible plan"),
    "a model less": (lambda t, c: c["model"].pop("weights"), r"model: missing keys \['weights'\]"),
    "a model of numbers": (put("model", weights=5), "must be texts"),
    "a model that is a list": (lambda t, c: c.update(model=[]), "model: missing keys"),
    "a scorer of null": (lambda t, c: c.update(scorer=None), "must be texts"),
    "a tokenizer that is a number": (lambda t, c: c.update(tokenizer=5), "must be texts"),
    "layers that are a number": (lambda t, c: c.update(layers=8), "layers a list"),
    "layers of another kind": (lambda t, c: c["layers"].__setitem__(3, "gdn"), "kinds"),
    "layers that are too many": (lambda t, c: c["layers"].extend(["gdn"] * 99), "kinds"),
    "a key more": (lambda t, c: c.update(more=1), r"cache: .*unknown keys \['more'\]"),
    "a key less": (lambda t, c: c.pop("plan"), r"cache: missing keys \['plan'\]"),
    "no cache": (lambda t, c: c["metadata"].pop("cache"), r"missing keys \['cache'\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_CONTENT)
def test_wrong_content_is_refused(dense, cache_file, tmp_path, case):
    change, match = WRONG_CONTENT[case]
    path = changed_cache(cache_file, tmp_path / "bad", change)
    with pytest.raises(SessionFileError, match=match) as caught:
        GateSightCache.load(path, dense)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 1000


def test_bytes_that_are_no_bools_are_refused(dense, cache_file, tmp_path):
    path = tmp_path / "bad"
    data = bytearray(cache_file.read_bytes())
    with TensorFile(cache_file) as file:
        assert list(file.infos)[-1] == "padding"  # bools come last
    data[-1] = 2
    path.write_bytes(data)
    with pytest.raises(SessionFileError, match="padding holds bytes that are no bools"):
        GateSightCache.load(path, dense)


# -- JSON --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ['{"a": NaN}', '{"a": Infinity}', '{"a": 1, "a": 1}', "[" * 100_000, '"x"', "\ufeff{}"]
)
def test_json_is_read_strictly(text):
    with pytest.raises(ValueError, match=r"not JSON that can be read|not one JSON object"):
        parse_json(text.encode())
