"""What a view says is kept, against real compactions of real caches."""

import random
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from gatesight_hf import Estimator, GateSightCache
from gatesight_hf.cache import prefill
from gatesight_hf.compaction import ALLOCATIONS
from gatesight_hf.methods import KeyDiff, RandomScorer, SnapKV
from gatesight_hf.reference import ESTIMATOR_PATH, documents
from gatesight_hf.scoring import Needs, Scorer
from gatesight_hf.view import FRACTIONS, Answered, View, collect

from ..helpers.models import KeyNorm, random_estimator, tiny_model
from ..helpers.oracle import evicted_of
from ..helpers.running import CONTEXT, LENGTH

IDS = CONTEXT[0].tolist()
TEXTS = [str(i) for i in IDS]
#: Around rounding, at both ends, and between.
CHECKED = (0, 1, 9, 36, 49, 86, 98, 99)


def check_against_compactions(
    view: View, model: Any, ids: list[int], scorers: dict[str, Scorer], allocations: dict[str, str], **options: Any
) -> None:
    """Counts, achieved fractions and the very entries are those of caches that are compacted for real."""
    for method in view.methods:
        name = method.name
        parent = GateSightCache(scorers[name], model, allocation=allocations[name], **options)
        prefill(model, torch.tensor([ids]), parent)
        for step in CHECKED:
            child = parent.fork(kept_fraction=FRACTIONS[step])
            report = child.compact()
            assert [method.kept_per_layer(step)] == report.kept_per_layer
            assert method.achieved[step] == report.achieved_fraction
            assert torch.equal(method.mask(step), ~torch.stack(evicted_of(child, 0, len(ids))))
            assert method.allocation == child.options.allocation


@pytest.mark.filterwarnings("ignore:.*no output gates")
@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_counts_and_entries_are_those_of_compactions(any_model: Any, allocation: str) -> None:
    scorers = {"estimator": random_estimator(any_model), "norm": KeyNorm()}
    options: dict[str, Any] = {"protected_prefix": 2, "protected_suffix": 3, "gate_exponent": 2.0}
    view = collect(any_model, IDS, scorers, tokens=TEXTS, allocation=allocation, **options)
    check_against_compactions(view, any_model, IDS, scorers, dict.fromkeys(scorers, allocation), **options)


@pytest.mark.quick
def test_the_bundled_model_with_an_allocation_of_each_method(bundled: tuple[Any, Any]) -> None:
    model, tokenizer = bundled
    ids = tokenizer(documents.needles(random.Random(0), 300, 2, asked=2).text).input_ids
    texts = [tokenizer.decode([i]) for i in ids]
    scorers = {"gatesight": Estimator.from_pretrained(ESTIMATOR_PATH), "keydiff": KeyDiff(), "snapkv": SnapKV()}
    allocations = {"gatesight": "gate", "keydiff": "global", "snapkv": "pyramid"}
    view = collect(
        model, ids, scorers, tokens=texts, allocation=allocations, protected_prefix=4, prefill_chunk_size=100
    )
    check_against_compactions(view, model, ids, scorers, allocations, protected_prefix=4)
    assert view.tokens == tuple(texts)
    assert view.layers == (3, 7)


def test_a_layer_that_keeps_less_of_a_larger_budget_is_exact() -> None:
    """Rounding may take an entry from a layer when the budget grows: sets are then not nested in the kept fraction."""
    model, ids = tiny_model(num_hidden_layers=16), IDS[:16]
    scorers: dict[str, Scorer] = {"norm": KeyNorm()}
    view = collect(model, ids, scorers, tokens=TEXTS[: len(ids)], allocation="pyramid")
    (method,) = view.methods
    assert (method.kept.diff(dim=0) < 0).any()
    check_against_compactions(view, model, ids, scorers, {"norm": "pyramid"})


def test_blocks_are_filled(dense: Any) -> None:
    scorers: dict[str, Scorer] = {"norm": KeyNorm()}
    view = collect(dense, IDS, scorers, tokens=TEXTS, block_size=8)
    check_against_compactions(view, dense, IDS, scorers, {"norm": "gate"}, block_size=8)


@pytest.mark.parametrize("length", [1, 2])
def test_a_document_that_is_protected_as_a_whole_stays(dense: Any, length: int) -> None:
    view = collect(dense, IDS[:length], {"norm": KeyNorm()}, tokens=TEXTS[:length], protected_prefix=8)
    assert all(view.methods[0].mask(step).all() for step in range(len(FRACTIONS)))
    assert view.methods[0].achieved == [1.0] * len(FRACTIONS)


def test_percentiles_rank_the_scores_of_a_head(dense: Any) -> None:
    class Ordered(KeyNorm):
        """The later, the better; the first two are equal."""

        def score(self, prefill: Any) -> list[torch.Tensor]:
            return [torch.arange(k.shape[2]).clamp(min=1).float().expand(k.shape[:3]) for k in prefill.keys]

    view = collect(dense, IDS, {"ordered": Ordered()}, tokens=TEXTS)
    of_head = view.methods[0].percentiles[1, 1].tolist()
    assert of_head == [0, 0, *(100 * lower // (LENGTH - 1) for lower in range(2, LENGTH))]
    assert of_head[-1] == 100


def test_one_prefill_serves_all_methods(dense: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = []
    handle = dense.register_forward_pre_hook(lambda *_: forwards.append(1))
    try:
        collect(dense, IDS, {"a": random_estimator(dense), "b": SnapKV(), "c": RandomScorer()}, tokens=TEXTS)
    finally:
        handle.remove()
    assert len(forwards) == 1


def test_a_model_without_output_gates_says_how_it_shares() -> None:
    model = tiny_model("olmo_hybrid")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        view = collect(model, IDS, {"norm": KeyNorm()}, tokens=TEXTS)
    assert view.methods[0].allocation == "flat"


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"scorers": {}}, ValueError, "at least one"),
        ({"scorers": KeyNorm()}, TypeError, "map names"),
        ({"tokens": TEXTS[1:]}, ValueError, "43 ids, got 42"),
        ({"tokens": [0] * LENGTH}, TypeError, "tokens"),
        ({"allocation": "even"}, ValueError, "allocation must be one of"),
        ({"allocation": {"other": "gate"}}, ValueError, "allocation must name norm"),
        ({"allocation": 3}, TypeError, "allocation"),
        ({"ids": [], "tokens": []}, ValueError, "ids must hold tokens"),
        ({"protected_prefix": -1}, ValueError, "protected_prefix"),
    ],
)
def test_what_cannot_be_collected_is_refused(dense: Any, changes: dict[str, Any], error: type, said: str) -> None:
    given: dict[str, Any] = {"ids": IDS, "scorers": {"norm": KeyNorm()}, "tokens": TEXTS, **changes}
    with pytest.raises(error, match=said):
        collect(dense, given.pop("ids"), given.pop("scorers"), **given)


def test_a_view_is_checked(dense: Any) -> None:
    view = collect(dense, IDS, {"norm": KeyNorm()}, tokens=TEXTS)
    with pytest.raises(ValueError, match="answered_at"):
        replace(view, answered=(Answered("?", {"full": "!"}),))
    with pytest.raises(ValueError, match="kept_fraction"):
        replace(view, answered_at=2.0)
    with pytest.raises(ValueError, match="norm has tensors of sizes"):
        replace(view, tokens=view.tokens[1:])
    with pytest.raises(ValueError, match="at least one method"):
        replace(view, methods=())
    with pytest.raises(TypeError, match="the answer of 'full'"):
        Answered("?", {"full": 4821})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="answers must map"):
        Answered("?", ["4821"])  # type: ignore[arg-type]


def test_what_scorers_need_is_recorded_for_all(dense: Any) -> None:
    needy = SnapKV()
    assert needy.needs != Needs()
    view = collect(dense, IDS, {"norm": KeyNorm(), "snapkv": needy}, tokens=TEXTS)
    assert [method.name for method in view.methods] == ["norm", "snapkv"]
