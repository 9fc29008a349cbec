"""The vLLM backend: a parent session per cell, and a child of it per question, batched."""

import platform
import random
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
import transformers
from vllm import RequestOutput, SamplingParams

import gatesight_hf
from gatesight_hf.compaction.budget import BY_HEADS
from gatesight_hf.vllm import GateSightLLM, SessionReport
from gatesight_hf.vllm.options import METHODS
from gatesight_hf.vllm.support import vllm_version

from .base import Answer, Backend, CellResult, ContextResult, Request, check_length
from .methods import EMPTY, FULL, Cell


class VLLMBackend(Backend):
    """Runs a model in vLLM.

    A parent is compacted when its prefill ends, so that every cell prefills for itself, where the transformers backend
    compacts forks of one prefill. Budgets are exact unless `whole_blocks` is set, so that methods and engines compare.

    Args:
        llm: The engine; each estimator is the scorer of its name.
        name: Of the model, for result files.
        options: Arguments of methods by name, for example `{"random": {…}}`.
        whole_blocks: Round each layer up to whole blocks, as serving does.
    """

    def __init__(
        self, llm: GateSightLLM, name: str, options: Mapping[str, Mapping[str, Any]], whole_blocks: bool = False
    ) -> None:
        self.llm = llm
        self.name = name
        self._options = options
        self._whole_blocks = whole_blocks
        self.tokenizer = llm.llm.get_tokenizer()

    def describe(self) -> dict[str, Any]:
        config = self.llm.llm.llm_engine.vllm_config
        return {
            "backend": "vllm",
            "model": self.name,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "attention": "paged",
            "whole_blocks": self._whole_blocks,
            "prefill_chunk_size": config.scheduler_config.max_num_batched_tokens,
            "hardware": f"{platform.machine()} CPU",
            "threads": torch.get_num_threads(),
            "versions": {
                "gatesight_hf": gatesight_hf.__version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "vllm": vllm_version(),
            },
        }

    def check(self, cells: Sequence[Cell]) -> None:
        known = (FULL, EMPTY, *self.llm.estimators, *METHODS)
        for cell in cells:
            method = cell.method
            if method.scorer not in known or method.allocation in BY_HEADS or method.entries_dtype is not None:
                raise ValueError(
                    f"vLLM does not run {method.label}: there are {', '.join(known)}, no allocation "
                    f"{' or '.join(sorted(BY_HEADS))} and no quantised entries. The others run with --backend "
                    "transformers."
                )

    def run(self, request: Request, cells: Sequence[Cell], check_identity: bool) -> ContextResult:
        check_length(request, self.llm.llm.llm_engine.model_config.max_model_len)
        pairs = [self._run_cell(cell, request) for cell in cells]
        results, sessions = [result for result, _ in pairs], [session for _, session in pairs]
        scored: dict[str, list[float]] = {}
        for cell, session in zip(cells, sessions, strict=True):
            if cell.method.scorer not in (FULL, EMPTY):
                scored.setdefault(cell.method.scorer, []).append(session.seconds["score"])
        held = checked = 0
        if check_identity:
            candidates = [result for result in results if result.cell.method.scorer not in (FULL, EMPTY)] or results[:1]
            result = random.Random(request.seed).choice(candidates)
            again, _ = self._run_cell(result.cell, request)
            checked = len(result.answers)
            held = sum(one.ids == other.ids for one, other in zip(result.answers, again.answers, strict=True))
        return ContextResult(
            cells=results,
            kv_bytes=sessions[0].kv_bytes_before,
            gdn_bytes=sessions[0].gdn_bytes,
            prefill_seconds=median(session.seconds["prefill"] for session in sessions),
            score_seconds={name: median(seconds) for name, seconds in scored.items()},
            identity_checked=checked,
            identity_held=held,
        )

    def _run_cell(self, cell: Cell, request: Request) -> tuple[CellResult, SessionReport]:
        options = {name: value for name, value in cell.options.items() if name != "entries_dtype"}
        if cell.method.scorer == EMPTY:
            options["empty"] = True
        elif cell.method.scorer != FULL:
            options["scorer"] = cell.method.scorer
            options["scorer_options"] = dict(self._options.get(cell.method.scorer, {}))
            if cell.method.scorer == "random":
                options["scorer_options"]["seed"] = request.seed
        prefix = request.context.protected_prefix
        session = self.llm.open(
            request.context.ids, "evaluated", protected_prefix=prefix, whole_blocks=self._whole_blocks, **options
        )
        limits = [SamplingParams(temperature=0, max_tokens=limit, detokenize=False) for limit in request.max_new_tokens]
        try:
            outputs = self.llm.ask(session, request.questions, limits)
        finally:
            self.llm.drop(session)
        result = CellResult(
            cell=cell,
            answers=[self._answer(output) for output in outputs],
            achieved_fraction=session.achieved_fraction,
            kept_per_layer=session.kept,
            kv_bytes=session.kv_bytes,
            seconds=session.seconds["compact"],
        )
        return result, session

    def _answer(self, output: RequestOutput) -> Answer:
        found = output.outputs[0]
        ended = found.finish_reason == "stop"
        ids = found.token_ids[:-1] if ended else found.token_ids  # without the token that ends
        text = self.tokenizer.decode(ids, skip_special_tokens=True).strip()
        return Answer(tuple(ids), text, "end" if ended else "length")
