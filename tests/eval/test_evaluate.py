"""`gatesight evaluate`: forks answer what a fresh cache answers, controls are in order, and a killed run goes on."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from gatesight_eval.backends import ContextResult, Request, TransformersBackend
from gatesight_eval.backends.methods import Cell, Method, ScorerFactory, cells_of
from gatesight_eval.reports.store import RunFolder, read_lines
from gatesight_eval.run import evaluate
from gatesight_eval.suites.items import Item, Question
from gatesight_eval.suites.prompting import PreparedContext, Prompter
from gatesight_hf import GateSightCache, Scorer, Session, reference
from gatesight_hf.methods import OracleScorer
from gatesight_hf.reference.documents import Document, needles
from gatesight_hf.scoring import Recorder, Scores

from ..helpers.models import random_estimator, tiny_model
from ..helpers.oracle import Oracle
from ..helpers.running import compacted, generate, random_ids
from ..helpers.texts import FOOTER, HEADER, character_tokenizer, text_of

LENGTH, NEW = 48, 4
CONTEXT = random_ids(LENGTH)
QUESTIONS = [random_ids(n, seed=n)[0].tolist() for n in (5, 3)]
AGNOSTIC = (
    "gatesight,snapkv,triattention,keydiff,kvzip,kvzip@global,expected_attention@flat,keydiff@pyramid,lagkv,key_norm,"
    "key_norm@gate^0.5,streaming_llm,random,gatesight+int8,keydiff@global+int8"
)
METHODS = [Method.parse(label) for label in f"{AGNOSTIC},oracle".split(",")]
CELLS = cells_of(METHODS, [0.3])
OPTIONS = {"snapkv": {"window": 8}, "lagkv": {"lag": 8}, "kvzip": {"chunk": 20, "prompts": ["ab", "cd"]}}


def request_of(questions: list[list[int]] = QUESTIONS, protected: int = 0, new: int = NEW) -> Request:
    context = PreparedContext(CONTEXT[0].tolist(), LENGTH, False, protected)
    return Request(context, questions, [new] * len(questions), [q[::-1] for q in questions], seed=11)


@pytest.fixture(scope="module")
def scorers(dense: Any, tmp_path_factory: pytest.TempPathFactory) -> ScorerFactory:
    folder = tmp_path_factory.mktemp("estimator")
    random_estimator(dense).save_pretrained(folder)
    return ScorerFactory(dense, character_tokenizer(), {"gatesight": folder}, None, random_ids(40, seed=3), OPTIONS)


@pytest.fixture(scope="module")
def backend(dense: Any, scorers: ScorerFactory) -> TransformersBackend:
    return TransformersBackend(dense, scorers.tokenizer, scorers, "tiny", rows=16)


@pytest.fixture(scope="module")
def result(backend: TransformersBackend) -> ContextResult:
    with torch.no_grad():
        return backend.run(request_of(protected=3), CELLS, check_identity=True)


def ids_of(result: ContextResult) -> list[list[tuple[int, ...]]]:
    return [[answer.ids for answer in cell.answers] for cell in result.cells]


def sizes_of(result: ContextResult) -> list[tuple[Any, ...]]:
    return [(cell.cell, cell.achieved_fraction, cell.kept_per_layer, cell.kv_bytes) for cell in result.cells]


def scorer_of(scorers: ScorerFactory, cell: Cell, request: Request) -> Scorer:
    if cell.method.scorer != "oracle":
        return scorers.make(cell.method.scorer, request.seed)
    pairs = zip(request.questions, request.answers, strict=True)
    return OracleScorer(scorers.model, tuple((*question, *answer) for question, answer in pairs))


# -- protocol ----------------------------------------------------------------------------------------------------------


def test_every_cell_answers_as_a_fresh_cache_does(dense: Any, scorers: ScorerFactory, result: ContextResult) -> None:
    request = request_of(protected=3)
    assert [cell.cell for cell in result.cells] == CELLS
    for cell in result.cells[2:]:
        method = cell.cell.method
        cache = compacted(
            dense, CONTEXT, scorer=scorer_of(scorers, cell.cell, request), kept_fraction=cell.cell.kept_fraction,
            protected_prefix=3, allocation=method.allocation, gate_exponent=method.gate_exponent,
            entries_dtype=method.entries_dtype,
        )  # fmt: skip
        report = cache.report()
        assert (cell.achieved_fraction, [cell.kept_per_layer]) == (report.achieved_fraction, report.kept_per_layer)
        assert cell.kv_bytes == report.kv_bytes, method.label
        for question, answer in zip(QUESTIONS, cell.answers, strict=True):
            expected = generate(dense, torch.tensor([question]), cache.fork(), tokens=NEW, new=True)
            assert list(answer.ids) == expected[0].tolist(), (method.label, cell.cell.kept_fraction)
            assert answer.stop == "length" and answer.text == scorers.tokenizer.decode(answer.ids, True).strip()
    assert len({str(answers) for answers in ids_of(result)}) > 10, "the methods keep the same: this test proves nothing"


def test_controls_are_the_whole_and_no_attention_cache(dense: Any, plain: Any, result: ContextResult) -> None:
    full, empty = result.cells[:2]
    assert (full.achieved_fraction, full.kept_per_layer, full.kv_bytes) == (1.0, [LENGTH] * 2, result.kv_bytes)
    assert (empty.achieved_fraction, empty.kept_per_layer, empty.kv_bytes) == (0.0, [0, 0], 0)
    gone = torch.ones(2, LENGTH, dtype=torch.bool)
    for question, whole, nothing in zip(QUESTIONS, full.answers, empty.answers, strict=True):
        ids = torch.cat([CONTEXT, torch.tensor([question])], dim=1)
        assert list(whole.ids) == generate(dense, ids, DynamicCache(config=dense.config), NEW)[0].tolist()
        with Oracle(plain, [gone, gone]) as oracle:
            assert list(nothing.ids) == oracle.generate(ids, NEW)[0].tolist()
        assert whole.ids != nothing.ids


def test_rows_chunks_and_order_of_questions_change_nothing(
    dense: Any, scorers: ScorerFactory, backend: TransformersBackend
) -> None:
    labels = "gatesight,snapkv,random,oracle,keydiff@global,random@global,keydiff@score,snapkv@score"
    labels += ",gatesight+int8,random+int8,keydiff@score+int8,snapkv@score+int8"
    cells = cells_of([Method.parse(label) for label in labels.split(",")], [0.3])
    expected = backend.run(request_of(protected=3), cells, check_identity=False)
    for options in ({"rows": 1}, {"rows": 3, "prefill_chunk_size": 13}):
        other = TransformersBackend(dense, scorers.tokenizer, scorers, "tiny", **options)
        found = other.run(request_of(protected=3), cells, check_identity=False)
        assert ids_of(found) == ids_of(expected), options
        assert sizes_of(found) == sizes_of(expected), options
    turned = backend.run(request_of(QUESTIONS[::-1], protected=3), cells, check_identity=False)
    assert ids_of(turned) == [answers[::-1] for answers in ids_of(expected)]


def test_neither_cells_nor_questions_touch_the_parent(backend: TransformersBackend, monkeypatch: Any) -> None:
    held: list[tuple[GateSightCache, list[Tensor]]] = []
    prefilled = TransformersBackend._prefilled

    def tensors(cache: GateSightCache) -> list[Tensor]:
        found = [t for layer in cache.attention_layers for t in (layer.tail_keys, layer.tail_values)]
        for layer in cache.gdn_layers:
            found += [*layer.conv_states.values(), *layer.recurrent_states.values()]
        return [tensor for tensor in found if tensor is not None]

    def watched(self: Any, *args: Any, **options: Any) -> GateSightCache:
        cache = prefilled(self, *args, **options)
        held.append((cache, [tensor.clone() for tensor in tensors(cache)]))
        return cache

    monkeypatch.setattr(TransformersBackend, "_prefilled", watched)
    backend.run(request_of(), cells_of(METHODS, [0.5]), check_identity=False)
    ((parent, before),) = held
    assert not parent.is_compacted and parent.get_seq_length() == LENGTH and len(before) == 6 * 2 + 2 * 2
    assert all(torch.equal(one, other) for one, other in zip(before, tensors(parent), strict=True))


def test_identity_check_holds_and_detects_a_difference(
    backend: TransformersBackend, result: ContextResult, monkeypatch: Any
) -> None:
    assert result.identity_checked == result.identity_held == len(QUESTIONS)
    prefilled, calls = TransformersBackend._prefilled, []

    def later_ones_differ(self: Any, scorer: Any, request: Request, **options: Any) -> GateSightCache:
        calls.append(options)
        if len(calls) > 1:
            request = replace(request, context=replace(request.context, ids=request.context.ids[::-1]))
        return prefilled(self, scorer, request, **options)

    monkeypatch.setattr(TransformersBackend, "_prefilled", later_ones_differ)
    found = backend.run(request_of(), cells_of(METHODS[:1], [0.5]), check_identity=True)
    assert found.identity_checked == len(QUESTIONS) and found.identity_held < found.identity_checked
    assert calls[1]["kept_fraction"] == 0.5
    assert backend.run(request_of(), cells_of(METHODS[:1], [0.5]), check_identity=False).identity_checked == 0


@pytest.mark.parametrize("several", [False, True])
def test_answers_stop_at_any_end_token(scorers: ScorerFactory, result: ContextResult, several: bool) -> None:
    """The end tokens are taken from answers that were given without any, so that each of them must cut one."""
    cells, before = CELLS[:6], ids_of(result)[:6]
    ends = [before[0][0][1], before[1][1][2]] if several else [before[0][0][1]]
    model = tiny_model()
    model.generation_config.eos_token_id = ends if several else ends[0]
    backend = TransformersBackend(model, scorers.tokenizer, scorers, "tiny", rows=16)
    met = set()
    for cell, whole in zip(backend.run(request_of(protected=3), cells, False).cells, before, strict=True):
        for answer, ids in zip(cell.answers, whole, strict=True):
            first = next((n for n, token in enumerate(ids) if token in ends), None)
            assert (answer.ids, answer.stop) == (ids[:first], "length" if first is None else "end")
            met.add(None if first is None else ids[first])
    assert met == {None, *ends}, "not every way to stop was met"


def test_a_templates_header_is_kept_and_questions_are_the_templates(
    dense: Any, scorers: ScorerFactory, backend: TransformersBackend, monkeypatch: Any, tmp_path: Path
) -> None:
    seen: list[tuple[Request, list[Tensor]]] = []
    answers = TransformersBackend._answers

    def watched(self: Any, cache: GateSightCache, request: Request, rows: int) -> Any:
        seen.append((request, [layer.kept_positions for layer in cache.attention_layers]))  # type: ignore[misc]
        return answers(self, cache, request, rows)

    monkeypatch.setattr(TransformersBackend, "_answers", watched)
    item = Item("i", "toy", "t", "f", "facts . " * 12, (Question("why?", ("x",), 2, "exact_match", " So"),))
    prompter = Prompter(scorers.tokenizer, chat_template=True)
    cells = cells_of([Method.parse("random"), Method.parse("key_norm@global")], [0.05])
    evaluate([item], backend, prompter, cells, RunFolder(tmp_path, {}))
    header = len(scorers.tokenizer(HEADER, add_special_tokens=False).input_ids)
    for request, positions in seen[2:]:
        assert request.context.protected_prefix == header
        assert text_of(scorers.tokenizer, request.questions[0]) == f"why?{FOOTER} So"
        assert all((layer[..., :header] == torch.arange(header)).all() for layer in positions)
    (line,) = read_lines(tmp_path / "results.jsonl")
    random_cell = next(cell for cell in line["cells"] if cell["method"] == "random")
    assert line["protected_prefix"] == header and min(random_cell["kept_per_layer"]) > header
    assert random_cell["achieved_fraction"] == pytest.approx(0.05, abs=0.01)


def test_only_the_oracle_knows_the_questions(backend: TransformersBackend, monkeypatch: Any) -> None:
    """What a method keeps of a context is the same whatever is asked of it."""
    kept: list[list[Tensor]] = []
    answers = TransformersBackend._answers

    def watched(self: Any, cache: GateSightCache, request: Request, rows: int) -> Any:
        kept.append([layer.kept_positions for layer in cache.attention_layers])  # type: ignore[misc]
        return answers(self, cache, request, rows)

    monkeypatch.setattr(TransformersBackend, "_answers", watched)
    for questions in (QUESTIONS, [random_ids(9, seed=99)[0].tolist()]):
        for label in f"{AGNOSTIC},oracle".split(","):
            backend.run(request_of(questions, new=1), [Cell(Method.parse(label), 0.3)], check_identity=False)
    pairs = list(zip(kept[: len(kept) // 2], kept[len(kept) // 2 :], strict=True))
    same = [all(torch.equal(a, b) for a, b in zip(one, other, strict=True)) for one, other in pairs]
    assert same == [True] * len(AGNOSTIC.split(",")) + [False]


# -- the reference model -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def solver(bundled: tuple[Any, Any]) -> TransformersBackend:
    model, tokenizer = bundled
    estimators = {"gatesight": reference.ESTIMATOR_PATH}
    return TransformersBackend(model, tokenizer, ScorerFactory(model, tokenizer, estimators), "reference", rows=16)


def asked_of(document: Document, questions: int | None = None) -> Request:
    def ids(text: str) -> list[int]:
        return list(reference.load_tokenizer()(text).input_ids)

    asked = document.questions[:questions]
    context = PreparedContext(ids(document.text), len(document.words), False, 0)
    return Request(context, [ids(q.text) for q in asked], [4] * len(asked), [ids(q.expected) for q in asked], seed=7)


def accuracies(result: ContextResult, document: Document) -> dict[Cell, float]:
    expected = [question.expected for question in document.questions]
    return {c.cell: sum(a.text == e for a, e in zip(c.answers, expected, strict=False)) / len(c.answers)
            for c in result.cells}  # fmt: skip


def test_controls_bound_the_methods_on_needles(solver: TransformersBackend) -> None:
    methods = [Method.parse(label) for label in ("oracle", "gatesight", "keydiff", "snapkv", "random")]
    fractions = [0.9, 0.5, 0.1]
    total: dict[tuple[str, float], float] = {}
    documents = [needles(random.Random(seed), 256, 4, asked=2) for seed in range(3)]
    for document in documents:
        result = solver.run(asked_of(document), cells_of(methods, fractions), check_identity=False)
        for cell, accuracy in accuracies(result, document).items():
            row = (cell.method.label, cell.kept_fraction)
            total[row] = total.get(row, 0) + accuracy / len(documents)
    assert total["full", 1.0] >= 0.9 and total["empty", 0.0] == 0
    for fraction in fractions:
        assert total["full", 1.0] >= total["oracle", fraction] >= 0.9
        assert all(total["oracle", fraction] >= total[method.label, fraction] for method in methods)
    assert total["random", 0.9] > total["random", 0.5] >= total["random", 0.1]
    assert total["gatesight", 0.1] > total["random", 0.1]


def test_dense_records_leave_no_way_around_the_budget(solver: TransformersBackend) -> None:
    """32 records "key is : d d d d .", and nothing else; each is asked for. A method that does not know the question
    cannot answer more of them than its budget holds.

    How much is that? Not the kept fraction: an entry of a word holds what the GDN layers below carried there, so that
    the digits' entries know their key, and those of "is", ":", "." and the key itself may go; nor need all layers be
    read. What a record needs is therefore measured: a role in a layer is needed if accuracy falls to less than half
    without the entries of all words in that role. Records that are answered then number at most the layer's entries
    per head over its needed roles. A tenth is added, since one lost digit is guessed in one of ten cases. The oracle,
    told four questions, shows that knowledge of the question would break this bound.
    """
    document = needles(random.Random(1), 256, 32, asked=32, short=True)
    cells = [Cell(Method.parse("full"), 1.0)]
    cells += [Cell(Method.parse(m), 0.25) for m in ("gatesight", "keydiff", "snapkv", "lagkv", "key_norm", "random")]
    cells += [Cell(Method.parse(f"{m}@global"), 0.125) for m in ("gatesight", "keydiff", "random")]
    needed = needed_roles(solver, document)
    found = solver.run(asked_of(document), cells, check_identity=False)
    full, *measured = accuracies(found, document).values()
    assert full >= 0.9

    def bound(kept: list[int]) -> float:
        return min(entries / (32 * roles) for entries, roles in zip(kept, needed, strict=True) if roles)

    for cell, accuracy in zip(found.cells[1:], measured, strict=True):
        limit = bound(cell.kept_per_layer)
        assert limit + 0.1 < full, "this budget proves nothing"
        assert accuracy <= limit + 0.1, (cell.cell, limit)
    assert max(measured) >= 0.2
    told = solver.run(asked_of(document, 4), [Cell(Method.parse("oracle"), 0.125)], check_identity=False)
    (accuracy,) = accuracies(told, document).values()
    assert accuracy > bound(told.cells[0].kept_per_layer) + 0.1


def needed_roles(backend: TransformersBackend, document: Document) -> list[int]:
    """Per attention layer, how many of the eight words of a record cannot go, asked with eight questions."""
    request, roles = asked_of(document, 8), 8
    parent = backend._prefilled(Recorder(), request)
    layers, heads = parent.spec.num_attention_layers, parent.spec.num_key_value_heads
    of = [torch.ones(layers * roles, heads, len(document.words)) for _ in range(layers)]
    for row in range(layers * roles):
        of[row // roles][row, :, row % roles :: roles] = 0
    child = parent.fork(scorer=Scores(of), allocation="global", kept_fraction=1 - 1 / (layers * roles))
    child.batch_repeat_interleave(layers * roles)
    child.compact()
    expected = [question.expected for question in document.questions[:8]]
    answers = backend._answers(child, request, layers * roles)
    right = [sum(a.text == e for a, e in zip(of_row, expected, strict=True)) for of_row in answers]
    needed = [sum(n < 4 for n in right[layer * roles :][:roles]) for layer in range(layers)]
    assert any(needed), f"the model needs no word of a record by itself: {right}"
    return needed


def test_answers_are_those_of_a_session(solver: TransformersBackend) -> None:
    document = needles(random.Random(3), 256, 6, asked=3)
    cells = [Cell(Method.parse(label), p) for label in ("gatesight", "keydiff@flat") for p in (0.5, 0.1)]
    found = solver.run(asked_of(document), cells, check_identity=False)
    for cell in found.cells:
        session = Session.open(
            solver.model, solver.tokenizer, solver.scorers.make(cell.cell.method.scorer, 7), document.text,
            kept_fraction=cell.cell.kept_fraction, allocation=cell.cell.method.allocation,
        )  # fmt: skip
        assert [a.text for a in cell.answers] == [session.ask(q.text, max_new_tokens=4) for q in document.questions]


def test_sequences_beyond_the_models_positions_are_refused() -> None:
    model = tiny_model(max_position_embeddings=LENGTH + 6)
    backend = TransformersBackend(model, character_tokenizer(), ScorerFactory(model, None, {}), "tiny")
    with pytest.raises(ValueError, match=f"--max-length {LENGTH + 6}"):
        backend.run(request_of(), cells_of([], []), check_identity=False)
    fitting = tiny_model(max_position_embeddings=LENGTH + 9)
    backend = TransformersBackend(fitting, character_tokenizer(), ScorerFactory(fitting, None, {}), "tiny")
    assert len(backend.run(request_of(), cells_of([], []), check_identity=False).cells) == 2


def test_bytes_are_those_of_a_row_also_where_a_layer_keeps_everything(dense: Any, scorers: ScorerFactory) -> None:
    """Rows of a batch share the storage of such a layer."""
    cells = cells_of([Method("keydiff"), Method("key_norm"), Method("random")], [0.95])
    found = []
    for rows in (1, 16):
        backend = TransformersBackend(dense, scorers.tokenizer, scorers, "tiny", rows=rows)
        found.append([cell.kv_bytes for cell in backend.run(request_of(), cells, False).cells])
    assert found[0] == found[1]
    heads, width = 2, 32
    whole = backend.run(request_of(), cells[:1], False).cells[0]
    assert whole.kv_bytes == sum(whole.kept_per_layer) * heads * 2 * width * 4
