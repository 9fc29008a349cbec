"""The estimator: its file format is strict, and its scores are those of a plain MLP per head."""

import copy
import json
import math
import pickle
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import gatesight_kernels
from gatesight_hf import Estimator, EstimatorConfig, EstimatorMismatchError, GateSightCache, Prefill, Scorer
from gatesight_hf.methods.hidden import HiddenStateConfig, HiddenStateScorer
from gatesight_hf.models import HybridSpec

from ..helpers.models import random_config, random_estimator, random_tensors, tiny_model

pytestmark = [pytest.mark.core, pytest.mark.quick]


@pytest.fixture
def saved(dense: Any, tmp_path: Path) -> Path:
    random_estimator(dense).save_pretrained(tmp_path / "made" / "if need be")
    return tmp_path / "made" / "if need be"


def change_config(folder: Path, **changes: Any) -> None:
    data = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in data.items() if v != "DELETE"}))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def random_prefill(model: Any, lengths: list[int]) -> Prefill:
    spec = HybridSpec.from_config(model.config)
    shape = (len(lengths), max(lengths), 3, spec.num_value_heads)
    entries = [torch.empty(len(lengths), 2, max(lengths), 0) for _ in spec.attention_layers]
    return Prefill(spec, lengths, [torch.randn(shape) for _ in spec.gdn_layers], entries, entries)


def plain_score(estimator: Estimator, prefill: Prefill, ordinal: int, row: int, head: int) -> Tensor:
    """Scores `[length]` of one head of one row, in float64, step by step."""
    config, length = estimator.config, prefill.lengths[row]
    part = {
        name: estimator.tensors[f"layers.{ordinal}.{name}"].double()
        for name in ("input_mean", "input_std", "weight_in", "bias_in", "weight_out", "bias_out")
    }
    scores = []
    for i in range(length):
        slot = prefill.signals[0].shape[1] - length + i
        inputs = [prefill.signals[g][row, slot, k] for g in config.gdn_windows[ordinal] for k in range(3)]
        age, oldest, scale = length - 1 - i, max(1, length - 1), math.log(max(2, length))
        ages = torch.tensor([age / oldest, math.log(1 + age) / scale, math.log(1 + i) / scale], dtype=torch.float64)
        x = torch.cat([torch.cat(inputs).double(), ages])
        x = (x - part["input_mean"]) / part["input_std"]
        hidden = x @ part["weight_in"][head] + part["bias_in"][head]
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        scores.append(hidden @ part["weight_out"][head] + part["bias_out"][head])
    return torch.stack(scores)


# -- scores ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[1], [2], [23], [9, 1, 5]])
def test_scores_are_those_of_a_plain_mlp_per_head(dense, lengths):
    estimator, prefill = random_estimator(dense, window=4), random_prefill(dense, lengths)
    for ordinal in range(2):
        scores = estimator.score(prefill)[ordinal]
        assert scores.dtype == torch.float32
        assert scores.shape == (len(lengths), 2, max(lengths))
        assert not scores.isnan().any()
        for row, length in enumerate(lengths):
            for head in range(2):
                expected = plain_score(estimator, prefill, ordinal, row, head)
                torch.testing.assert_close(scores[row, head, -length:].double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 3, 22, 23, 24])
def test_pieces_do_not_matter(dense, monkeypatch, tokens):
    estimator, prefill = random_estimator(dense), random_prefill(dense, [23, 7])
    whole = estimator.score(prefill)
    monkeypatch.setattr(gatesight_kernels.score, "TOKENS_PER_TILE", tokens)
    torch.testing.assert_close(estimator.score(prefill), whole, rtol=1e-5, atol=1e-5)


def test_signals_in_bf16_are_scored_in_float32(dense):
    estimator, prefill = random_estimator(dense), random_prefill(dense, [11])
    low = replace(prefill, signals=[signal.bfloat16() for signal in prefill.signals])
    same = replace(prefill, signals=[signal.float() for signal in low.signals])
    assert torch.equal(estimator.score(low)[1], estimator.score(same)[1])


class LargestTensor(TorchDispatchMode):
    """How many numbers the largest tensor has that is made within, views not counted."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in given:
            self.numbers = max(self.numbers, out.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_matrix_of_features_is_built(dense, dtype):
    length = 3 * gatesight_kernels.score.TOKENS_PER_TILE + 5
    estimator, prefill = random_estimator(dense), random_prefill(dense, [length])
    prefill = replace(prefill, signals=[signal.to(dtype) for signal in prefill.signals])
    with LargestTensor() as largest:
        estimator.score(prefill)
    assert largest.numbers <= gatesight_kernels.score.TOKENS_PER_TILE * estimator.config.input_size(1)


@pytest.mark.parametrize("part", ["weight_in", "weight_out", "bias_out", "input_mean"])
@pytest.mark.parametrize("replaced", [False, True])
def test_edited_tensors_are_scored_with(dense, part, replaced):
    estimator, prefill = random_estimator(dense), random_prefill(dense, [9])
    before, name = estimator.score(prefill), f"layers.1.{part}"
    twin, shallow = copy.deepcopy(estimator), copy.copy(estimator)
    if replaced:
        estimator.tensors = {**estimator.tensors, name: estimator.tensors[name] + 1}
    else:
        estimator.tensors[name].add_(1)
    after = estimator.score(prefill)
    assert torch.equal(after[0], before[0]) and not torch.allclose(after[1], before[1])
    assert torch.equal(after[1], Estimator(estimator.config, estimator.tensors).score(prefill)[1])
    assert torch.equal(twin.score(prefill)[1], before[1])
    assert torch.equal(shallow.score(prefill)[1], before[1]) == replaced
    assert len(pickle.dumps(estimator)) == len(pickle.dumps(Estimator(estimator.config, estimator.tensors)))


def test_windows_of_two_dtypes_are_scored_in_the_wider_one(dense):
    estimator, prefill = random_estimator(dense), random_prefill(dense, [9])
    mixed = [signal.bfloat16() if i < 3 else signal for i, signal in enumerate(prefill.signals)]
    widened = [signal.float() for signal in mixed]
    found, expected = (estimator.score(replace(prefill, signals=signals))[1] for signals in (mixed, widened))
    assert torch.equal(found, expected)


def test_an_estimator_is_a_scorer(dense):
    assert isinstance(random_estimator(dense), Scorer)


def test_sizes_are_those_of_the_paper():
    """arXiv: 435 inputs at the first attention layer of the 27B, 867 at the others; 3.4 M parameters."""
    layers = range(64)
    spec = HybridSpec(
        model_type="qwen3_5_text",
        gdn_layers=tuple(i for i in layers if i % 4 != 3),
        attention_layers=tuple(i for i in layers if i % 4 == 3),
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        num_value_heads=48,
        num_key_heads=16,
        value_head_dim=128,
        key_head_dim=128,
    )
    config = EstimatorConfig.for_model(spec, "27B")
    assert [config.input_size(j) for j in range(16)] == [435] + [867] * 15
    assert config.gdn_windows[:3] == ((0, 1, 2), (0, 1, 2, 3, 4, 5), (3, 4, 5, 6, 7, 8))
    assert round(Estimator(config, random_tensors(config)).num_parameters / 1e6, 1) == 3.4


# -- files -------------------------------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded(dense, tmp_path):
    estimator = random_estimator(dense)
    estimator.tensors["layers.0.weight_in"] = estimator.tensors["layers.0.weight_in"].mT.contiguous().mT
    estimator.save_pretrained(tmp_path)
    for path in (tmp_path, str(tmp_path)):
        loaded = Estimator.from_pretrained(path)
        assert loaded.config == estimator.config
        assert loaded.tensors.keys() == estimator.tensors.keys()
        assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in estimator.tensors.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_cache_is_made_from_a_folder(dense, saved):
    cache = GateSightCache.from_pretrained(saved, model=dense, kept_fraction=0.3, allocation="flat")
    assert cache.report().kept_fraction == 0.3


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(saved, name):
    (saved / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        Estimator.from_pretrained(saved)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Estimator.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"format_version": 1', "\x00\x01"])
def test_a_config_that_is_no_json_object_is_refused(saved, text):
    (saved / "config.json").write_text(text)
    with pytest.raises(ValueError, match="JSON"):
        Estimator.from_pretrained(saved)


@pytest.mark.parametrize("version", [0, 3, 99, "1", "2", True, None, "DELETE"])
def test_another_format_is_refused(saved, version):
    change_config(saved, format_version=version)
    with pytest.raises(ValueError, match=r"format .*Upgrade gatesight_hf"):
        Estimator.from_pretrained(saved)


#: What an estimator with ages of another scale is answered: what is wrong with it, and all ways on.
OLDER = r"format 1 scales ages by a constant.*`gatesight train`.*--data.*newer revision.*older gatesight_hf"


def test_the_older_format_says_to_train_again(saved):
    change_config(saved, format_version=1)
    with pytest.raises(ValueError, match=rf"^Estimator {OLDER}"):
        Estimator.from_pretrained(saved)


@pytest.mark.parametrize(("version", "match"), [
    ("DELETE", rf"^Hidden-state scorer {OLDER}"), (1, rf"^Hidden-state scorer {OLDER}"),
    (3, r"^Hidden-state scorer format 3.*Upgrade gatesight_hf"), (None, r"format None.*Upgrade gatesight_hf"),
])  # fmt: skip
def test_other_formats_of_the_scorer_on_hidden_states(dense, tmp_path, version, match):
    config = HiddenStateConfig.for_model(HybridSpec.from_config(dense.config), "tiny", 64, hidden_size=8)
    HiddenStateScorer(config, random_tensors(config)).save_pretrained(tmp_path)
    assert HiddenStateScorer.from_pretrained(tmp_path).config == config
    change_config(tmp_path, format_version=version)
    with pytest.raises(ValueError, match=match):
        HiddenStateScorer.from_pretrained(tmp_path)


@pytest.mark.parametrize(("key", "value"), [("new_option", 1), ("window", "DELETE"), ("fingerprint", "DELETE")])
def test_unknown_and_missing_keys_are_named(saved, key, value):
    change_config(saved, **{key: value})
    with pytest.raises(ValueError, match=key):
        Estimator.from_pretrained(saved)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("signals", ["log_decay", "write_gate", "write_magnitude"]),
        ("signals", ["write_gate"]),
        ("signals", 5),
        ("ages", ["relative_age"]),
        ("ages", None),
        ("hidden_size", 0),
        ("hidden_size", 10**9),
        ("hidden_size", "16"),
        ("num_key_value_heads", -2),
        ("num_value_heads", 4.0),
        ("window", 0),
        ("gdn_windows", []),
        ("gdn_windows", [[], [0]]),
        ("gdn_windows", [[0, 1, 2], [0, 1, 2, 3, 4, 5, 6]]),
        ("gdn_windows", [[0, 1, 2], [-1, 1, 2, 3, 4, 5]]),
        ("gdn_windows", [0, 1]),
        ("gdn_windows", 3),
    ],
)
def test_values_that_make_no_sense_are_refused(saved, key, value):
    change_config(saved, **{key: value})
    with pytest.raises(ValueError, match=r"Estimator"):
        Estimator.from_pretrained(saved)


WRONG_WEIGHTS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "missing": (lambda t: t.pop("layers.1.bias_in"), r"missing.*layers\.1\.bias_in"),
    "unexpected": (lambda t: t.update(extra=torch.zeros(1)), "extra"),
    "of another shape": (lambda t: t.update({"layers.0.bias_in": torch.zeros(2, 15)}), r"layers\.0\.bias_in"),
    "transposed": (lambda t: t.update({"layers.0.weight_in": t["layers.0.weight_in"].mT.contiguous()}), "weight_in"),
    "in half precision": (lambda t: t.update({"layers.0.bias_in": t["layers.0.bias_in"].half()}), "float32"),
    "NaN": (lambda t: t["layers.1.weight_out"].fill_(torch.nan), r"layers\.1\.weight_out"),
    "infinite": (lambda t: t["layers.0.bias_out"].fill_(torch.inf), r"layers\.0\.bias_out"),
    "a spread of zero": (lambda t: t["layers.0.input_std"].fill_(0), r"layers\.0\.input_std"),
    "a negative spread": (lambda t: t["layers.0.input_std"].fill_(-1), r"layers\.0\.input_std"),
}


@pytest.mark.parametrize("case", WRONG_WEIGHTS)
def test_wrong_weights_are_named(saved, case):
    change, match = WRONG_WEIGHTS[case]
    change_weights(saved, change)
    with pytest.raises(ValueError, match=match):
        Estimator.from_pretrained(saved)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(saved, keep):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="not a safetensors file"):
        Estimator.from_pretrained(saved)


def test_a_pickle_in_disguise_is_not_run(saved):
    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (saved / "exploded",))

    (saved / "model.safetensors").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match="not a safetensors file"):
        Estimator.from_pretrained(saved)
    assert not (saved / "exploded").exists()


# -- which model -------------------------------------------------------------------------------------------------------


def test_another_layout_is_refused_by_name(dense):
    estimator = random_estimator(dense)
    for other in (tiny_model("qwen3_next"), tiny_model(num_hidden_layers=12), tiny_model(linear_num_value_heads=8)):
        with pytest.raises(EstimatorMismatchError, match=r"trained for 'tiny'.*gatesight train"):
            GateSightCache(estimator, other)
        assert not any(name.startswith("_gatesight") for name in vars(other)), "nothing may be attached"


@pytest.mark.parametrize(
    "changes",
    [
        {"gdn_windows": ((0, 1, 2), (0, 1, 2, 3, 4, 99))},
        {"gdn_windows": ((0, 1, 2),)},
        {"num_key_value_heads": 3},
        {"num_value_heads": 5},
    ],
)
def test_a_layout_that_contradicts_its_own_fingerprint_is_refused(dense, changes):
    config = replace(random_config(dense), **changes)
    with pytest.raises(ValueError, match=r"[Ee]stimator"):
        GateSightCache(Estimator(config, random_tensors(config)), dense)


def test_the_config_survives_json(dense):
    config = random_config(dense)
    assert EstimatorConfig.from_dict(json.loads(json.dumps(asdict(config)))) == config
