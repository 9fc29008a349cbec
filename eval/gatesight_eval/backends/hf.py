"""The transformers backend: an uncompacted parent per context, a compacted fork per cell, a fork of it per question."""

import platform
import random
import time
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import transformers

import gatesight_hf
from gatesight_hf import GateSightCache, Scorer
from gatesight_hf.cache import prefill
from gatesight_hf.cache.identity import weights_digest
from gatesight_hf.entries import storage_bytes
from gatesight_hf.methods import OracleScorer
from gatesight_hf.scoring import Needs, Recorder, Scores
from gatesight_hf.session.answering import answer_many

from .base import Answer, Backend, CellResult, ContextResult, Request, check_length
from .controls import empty_attention_cache
from .methods import EMPTY, FULL, ORACLE, Cell, ScorerFactory


class TransformersBackend(Backend):
    """Runs a model of transformers.

    Args:
        model: A hybrid model in evaluation mode.
        tokenizer: Its tokenizer.
        scorers: Makes the scorers.
        name: Of the model, for result files.
        prefill_chunk_size: Tokens per forward of a prefill; None prefills in one.
        rows: Methods and questions that are answered as rows of one batch, where methods keep equally many entries and
            questions have equally many tokens. A batch holds a copy of the context for each row.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        scorers: ScorerFactory,
        name: str,
        prefill_chunk_size: int | None = None,
        rows: int = 1,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.scorers = scorers
        self.name = name
        self.prefill_chunk_size = prefill_chunk_size
        self.rows = rows
        ends = model.generation_config.eos_token_id
        self._ends = set(ends) if isinstance(ends, list) else {ends}

    def describe(self) -> dict[str, Any]:
        device = self.model.device
        hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
        return {
            "backend": "transformers",
            "model": self.name,
            "weights": weights_digest(self.model),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "attention": self.model.config._attn_implementation,
            "prefill_chunk_size": self.prefill_chunk_size,
            "rows": self.rows,
            "hardware": hardware,
            "threads": torch.get_num_threads(),
            "versions": {
                "gatesight_hf": gatesight_hf.__version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }

    def check(self, cells: Sequence[Cell]) -> None:
        for name in self._scorer_names(cells):
            GateSightCache(self.scorers.make(name, seed=0), self.model, allocation="flat")

    @staticmethod
    def _scorer_names(cells: Sequence[Cell]) -> list[str]:
        """Those made by the factory, each once."""
        return list(dict.fromkeys(c.method.scorer for c in cells if c.method.scorer not in (FULL, EMPTY, ORACLE)))

    def run(self, request: Request, cells: Sequence[Cell], check_identity: bool) -> ContextResult:
        check_length(request, getattr(self.model.config, "max_position_embeddings", None))
        scorers: dict[str, Scorer] = {name: self.scorers.make(name, request.seed) for name in self._scorer_names(cells)}
        if any(cell.method.scorer == ORACLE for cell in cells):
            pairs = zip(request.questions, request.answers, strict=True)
            scorers[ORACLE] = OracleScorer(self.model, tuple((*question, *answer) for question, answer in pairs))
        needs = reduce(Needs.__or__, (scorer.needs for scorer in scorers.values()), Needs())
        parent = self._prefilled(Recorder(needs), request)
        seconds: dict[str, float] = {}
        scores: dict[str, Scores] = {}
        for name, scorer in scorers.items():
            begun = self._clock()
            scores[name] = parent.score(scorer)
            seconds[name] = self._clock() - begun

        by_cell: dict[Cell, CellResult] = {}
        for batch in self._batches(cells):
            by_cell |= zip(batch, self._run_batch(parent, scores, request, batch), strict=True)
        results = [by_cell[cell] for cell in cells]
        held = checked = 0
        if check_identity:
            candidates = [result for result in results if result.cell.method.scorer not in (FULL, EMPTY)] or results[:1]
            result = random.Random(request.seed).choice(candidates)
            checked, held = len(result.answers), self._identical(result, scorers, request)
        report = parent.report()
        return ContextResult(
            cells=results,
            kv_bytes=report.kv_bytes,
            gdn_bytes=report.gdn_bytes,
            prefill_seconds=report.seconds["prefill"],
            score_seconds=seconds,
            identity_checked=checked,
            identity_held=held,
        )

    def _clock(self) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _prefilled(self, scorer: Scorer, request: Request, **options: Any) -> GateSightCache:
        prefix = request.context.protected_prefix
        cache = GateSightCache(scorer, self.model, protected_prefix=prefix, **options)
        ids = torch.tensor([request.context.ids], device=self.model.device)
        prefill(self.model, ids, cache, self.prefill_chunk_size)
        return cache

    def _batches(self, cells: Sequence[Cell]) -> list[list[Cell]]:
        """Cells with the same options together, at most `rows`."""
        groups: dict[Any, list[list[Cell]]] = {}
        for cell in cells:
            alone = cell.method.scorer in (FULL, EMPTY)
            key = cell if alone else tuple(cell.options.values())
            batches = groups.setdefault(key, [[]])
            if len(batches[-1]) == self.rows:
                batches.append([])
            batches[-1].append(cell)
        return [batch for batches in groups.values() for batch in batches]

    def _run_batch(
        self, parent: GateSightCache, scores: dict[str, Scores], request: Request, cells: list[Cell]
    ) -> list[CellResult]:
        """Cells with the same options, one row each."""
        scorer: Scorer = Recorder()
        if cells[0].method.scorer not in (FULL, EMPTY):
            of_cells = zip(*(scores[cell.method.scorer].of for cell in cells), strict=True)
            scorer = Scores([torch.cat(of_layer) for of_layer in of_cells])
        child = parent.fork(scorer=scorer, **cells[0].options)
        child.batch_repeat_interleave(len(cells))
        report = child.compact()
        kept, achieved = report.kept_per_layer, report.achieved_fraction
        if cells[0].method.scorer == EMPTY:
            empty_attention_cache(child)
            kept, achieved = [[0] * len(layers) for layers in kept], 0.0
        # Rows that keep less are filled up in a batch; alone they would hold their own entries only.
        held = sum(layer.kept_length for layer in child.attention_layers)
        # Not those of storages, which the rows of a layer that keeps everything share.
        row_bytes = sum(layer.kept_nbytes for layer in child.attention_layers) // len(cells)
        key_bytes = self._key_scale_bytes(child) // len(cells)
        entry_bytes = (row_bytes - key_bytes) // held if held else 0
        answers = self._answers(child, request, len(cells))
        return [
            CellResult(
                cell=cell,
                answers=answers[row],
                achieved_fraction=achieved or 0.0,
                kept_per_layer=kept[row],
                kv_bytes=key_bytes + sum(kept[row]) * entry_bytes,
                seconds=(report.seconds["score"] + report.seconds["compact"]) / len(cells),
            )
            for row, cell in enumerate(cells)
        ]

    @staticmethod
    def _key_scale_bytes(cache: GateSightCache) -> int:
        """Of what quantised keys need however many they are."""
        return storage_bytes(layer.key_scales for layer in cache.attention_layers)

    def _identical(self, result: CellResult, scorers: dict[str, Scorer], request: Request) -> int:
        """How many answers of a cell a fresh prefill, compaction and question give again, token for token."""
        scorer = scorers.get(result.cell.method.scorer, Recorder())
        fresh = self._prefilled(scorer, request, **result.cell.options)
        fresh.compact()
        (again,) = self._answers(fresh, request, rows=1)
        return sum(one.ids == other.ids for one, other in zip(result.answers, again, strict=True))

    def _answers(self, cache: GateSightCache, request: Request, rows: int) -> list[list[Answer]]:
        """By row of the cache, an answer to each question; questions of equal length run together, on a fork."""
        limits = list(request.max_new_tokens)
        found = answer_many(self.model, cache, request.questions, limits, max(self.rows, rows), {})
        return [[self._answer(ids) for ids in of_row] for of_row in found]

    def _answer(self, ids: list[int]) -> Answer:
        ended = bool(ids) and ids[-1] in self._ends
        ids = ids[:-1] if ended else ids
        text = self.tokenizer.decode(ids, skip_special_tokens=True).strip()
        return Answer(tuple(ids), text, "end" if ended else "length")
