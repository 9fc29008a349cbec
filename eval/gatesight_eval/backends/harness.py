"""The model `gatesight` of lm-evaluation-harness: its generation tasks on a compacted cache, query-agnostic.

    python -m gatesight_eval.backends.harness --model gatesight \\
        --model_args pretrained=MODEL,estimator=FOLDER,method=gatesight,kept_fraction=0.1 \\
        --tasks ruler --metadata '{"max_seq_lengths": [4096]}'

This is the command `lm_eval` with one more model: all of its arguments follow. The plain command cannot know the model,
because lm_eval (read and tried: 0.4.13) has a fixed list of models and no entry points, and `--include_path` is for
tasks. From Python, `import gatesight_eval.backends.harness` and then `lm_eval.simple_evaluate(model="gatesight", …)`.

Each prompt is cut into a context, which is prefilled and compacted without the question, and the rest of the prompt,
which is answered greedily on a fork. Requests with the same context share its prefill. The cut is, in this order,

* where the document's field `context` ends, if its `question` (or else `input`) is in what follows (LongBench);
* where the field `input` ends, if the document's `question` is in what follows (BABILong);
* where the last question in RULER's wording begins (group `ruler`), with and without chat template.

The harness's `ruler` is not the official one: `gatesight evaluate --suite ruler` reads that. `--use_cache` knows
requests only, not the model's arguments: give each method and kept fraction a file of its own.
"""

import logging
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.models.utils_hf import stop_sequences_criteria
from tqdm import tqdm

from gatesight_hf import GateSightCache, Scorer
from gatesight_hf.cache import prefill
from gatesight_hf.compaction.budget import check_kept_fraction
from gatesight_hf.models._compat import cache_argument
from gatesight_hf.scoring import Recorder

from ..suites.prompting import truncate_middle
from ..suites.ruler.templates import CWE, FWE, NIAH, QA, VT
from .controls import empty_attention_cache
from .methods import EMPTY, FULL, ORACLE, Cell, Method, ScorerFactory, calibration_ids

# Below lm_eval's logger, which has the handler.
logger = logging.getLogger("lm_eval.models.gatesight")

#: Generation arguments that say nothing when decoding is greedy, besides those that are honoured.
_KNOWN_ARGUMENTS = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "min_p"}


@dataclass(frozen=True)
class _Job:
    """A request: `name` for messages; `question` is None where the whole prompt is the context."""

    name: str
    context: str
    question: str | None
    stop: list[str]
    max_new_tokens: int


@register_model("gatesight")
class GateSightLM(HFLM):
    """A hybrid model that answers from compacted contexts, one request at a time.

    Args:
        pretrained: Folder or Hub id of the model, or the model itself.
        method: A row of `gatesight evaluate`, such as `gatesight`, `snapkv` or `kvzip@global`; `full` keeps all entries
            and `empty` none, GDN states alone.
        kept_fraction: Share of the entries that stays.
        estimator: Folder, for `gatesight`.
        hidden_states: Folder, for `hidden_states`.
        calibration: For `triattention`: saved statistics, or plain text (.txt) to gather them from.
        options: Of scorers by name, `{"snapkv": {"window": 32}}`; needs `--model_args` in JSON.
        protected_prefix: First tokens of each context that always stay, for example those of a chat template's header,
            which `gatesight evaluate` protects by itself.
        prefill_chunk_size: Tokens per forward of a prefill; None prefills in one.
        whole_prompt: Compact all of every prompt, the question included, but for the last token, which begins the
            answer. This is query-aware, and works for any generation task.
        truncation: Cut the middle out of contexts that are too long for `max_length`, rather than raise an error.
        arguments: Of `HFLM`.

    Raises:
        ValueError: An argument is wrong or missing, or not supported here.
        FileNotFoundError, UnsupportedModelError, EstimatorMismatchError: See `GateSightCache.from_pretrained`.
    """

    def __init__(
        self,
        pretrained: Any,
        method: str = "gatesight",
        kept_fraction: float = 0.1,
        estimator: str | None = None,
        hidden_states: str | None = None,
        calibration: str | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        protected_prefix: int = 0,
        prefill_chunk_size: int | None = None,
        whole_prompt: bool = False,
        truncation: bool = False,
        **arguments: Any,
    ) -> None:
        self.method = Method.parse(method)
        self.kept_fraction = check_kept_fraction(kept_fraction)
        if self.method.scorer in (FULL, EMPTY):
            self.kept_fraction = float(self.method.scorer == FULL)
        if self.method.scorer == "gatesight" and estimator is None:
            raise ValueError("method=gatesight needs estimator=FOLDER, which `gatesight train` writes.")
        if self.method.scorer == ORACLE:
            raise ValueError("method=oracle needs the right answers, which requests do not hold.")
        if prefill_chunk_size is not None and prefill_chunk_size < 1:
            raise ValueError(f"prefill_chunk_size is a number of tokens >= 1, got {prefill_chunk_size}.")
        super().__init__(pretrained, truncation=truncation, **arguments)
        if self.mixed_precision_dtype is not None or isinstance(self.think_end_token, int):
            raise ValueError("Not supported: mixed_precision_dtype (use dtype), and think_end_token as a number.")
        if str(self.batch_size) != "1":
            logger.warning("Requests are answered one by one: batch_size=%s has no effect.", self.batch_size)
        statistics = None if calibration is None else Path(calibration)
        self._scorers = ScorerFactory(
            self.model,
            self.tokenizer,
            {} if estimator is None else {"gatesight": Path(estimator)},
            None if hidden_states is None else Path(hidden_states),
            calibration_ids(statistics, self.tokenizer) if statistics and statistics.suffix == ".txt" else statistics,
            options or {},
        )
        self.protected_prefix = protected_prefix
        self.prefill_chunk_size = prefill_chunk_size
        self.whole_prompt = whole_prompt
        #: Contexts so far: prefilled; of these with their middle cut out; and the sum of their achieved fractions.
        self.prefilled, self.truncated, self._achieved = 0, 0, 0.0
        self._cache(seed=0)  # so that what is wrong with the method shows now

    # -- what the harness calls ----------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The answers, in the order of the requests.

        Raises:
            ValueError: A prompt that cannot be cut, generation arguments other than greedy ones, or a sequence that is
                longer than `max_length`.
        """
        jobs = [self._job(request) for request in requests]
        self._log_cuts(requests, jobs)
        groups: dict[str, list[int]] = {}
        for number, job in enumerate(jobs):
            groups.setdefault(job.context, []).append(number)
        answers = [""] * len(jobs)
        before = self.truncated
        with tqdm(
            total=len(jobs), desc="Running generate_until requests", disable=disable_tqdm or self.rank != 0 or None
        ) as progress:
            # The longest first, as in HFLM: what is too long, or does not fit into memory, fails at once.
            for members in sorted(groups.values(), key=lambda numbers: len(jobs[numbers[0]].context), reverse=True):
                cache, questions = self._compacted([jobs[number] for number in members])
                for number, question in zip(members, questions, strict=True):
                    answers[number] = self._answer(cache.fork(), question, jobs[number])
                    self.cache_hook.add_partial("generate_until", requests[number].args, answers[number])
                    progress.update()
        if self.truncated > before:
            logger.warning("%d of %d contexts lost their middle.", self.truncated - before, len(groups))
        return answers

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Refused: HFLM's would be of the full cache, and pass for a result of the method."""
        raise _no_likelihoods(requests)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Refused, see `loglikelihood`."""
        raise _no_likelihoods(requests)

    def get_model_info(self) -> dict[str, Any]:
        """What a result file says of the model, and of the contexts so far."""
        achieved = self._achieved / self.prefilled if self.prefilled else None
        return {
            **super().get_model_info(),
            "gatesight": {
                "method": self.method.label,
                "kept_fraction": self.kept_fraction,
                "achieved_fraction": achieved,
                "protected_prefix": self.protected_prefix,
                "whole_prompt": self.whole_prompt,
                "max_length": self.max_length,
                "contexts": self.prefilled,
                "truncated": self.truncated,
            },
        }

    # -- one request ---------------------------------------------------------------------------------------------------

    def _job(self, request: Any) -> _Job:
        prompt, asked = request.args
        name = f"{request.task_name}, document {request.doc_id}"
        arguments = normalize_gen_kwargs(asked, self.max_gen_toks)
        unknown = sorted(set(arguments) - _KNOWN_ARGUMENTS)
        if arguments["do_sample"] or unknown:
            wrong = ", ".join(unknown) or "sampling (do_sample=true, or a temperature without do_sample=false)"
            raise ValueError(f"{name}: answers are greedy; generation arguments that are not supported: {wrong}.")
        end = self.tokenizer.eos_token
        stop, limit = handle_stop_sequences(arguments["until"], eos=end), arguments["max_gen_toks"]
        if self.whole_prompt:
            return _Job(name, prompt, None, stop, limit)
        cut = find_cut(prompt, request.doc or {})
        if cut is None:
            raise ValueError(
                f"{name}: this prompt cannot be cut into context and question. It can in RULER's wording (group ruler),"
                " and where the document's field `context` (or `input`, if it has a `question`) stands in the prompt "
                "before the question. whole_prompt=True compacts whole prompts, questions included."
            )
        return _Job(name, prompt[:cut], prompt[cut:], stop, limit)

    def _log_cuts(self, requests: Sequence[Any], jobs: Sequence[_Job]) -> None:
        """One line per task, so that a wrong cut is seen."""
        first = {request.task_name: job for request, job in zip(requests[::-1], jobs[::-1], strict=True)}
        for task, job in first.items():
            if job.question is not None:
                logger.info("%s: the context ends with %r, then %r", task, job.context[-40:], job.question[:80])

    def _compacted(self, jobs: Sequence[_Job]) -> tuple[GateSightCache, list[list[int]]]:
        """The compacted cache of the jobs' context, and the tokens of their questions."""
        name, text = jobs[0].name, jobs[0].context
        ids: list[int] = self.tok_encode(text)
        questions = [
            ids[-1:] if job.question is None else self.tok_encode(job.question, add_special_tokens=False)
            for job in jobs
        ]
        ids = ids[:-1] if self.whole_prompt else ids
        if not ids or not all(questions):
            raise ValueError(f"{name}: the context or the question has no tokens.")
        reserved = max(len(asked) + job.max_new_tokens for asked, job in zip(questions, jobs, strict=True))
        budget = self.max_length - reserved
        if len(ids) > budget:
            what = f"{name}: context {len(ids)}, question and answer {reserved} tokens"
            if not self.truncation:
                raise ValueError(
                    f"{what}, more than max_length={self.max_length}. Give a larger max_length, or truncation=True to "
                    "cut the middle out of contexts."
                )
            if budget // 2 <= self.protected_prefix:
                raise ValueError(f"{what}: max_length={self.max_length} leaves no room for the context.")
            ids = truncate_middle(ids, budget)
            self.truncated += 1

        cache = self._cache(seed=zlib.crc32(text.encode()))
        prefill(self.model, torch.tensor([ids], device=self.model.device), cache, self.prefill_chunk_size)
        achieved = cache.compact().achieved_fraction or 0.0
        if self.method.scorer == EMPTY:
            empty_attention_cache(cache)
            achieved = 0.0
        self.prefilled += 1
        self._achieved += achieved
        return cache, questions

    def _cache(self, seed: int) -> GateSightCache:
        """A new cache; `seed` is for the method `random`."""
        is_control = self.method.scorer in (FULL, EMPTY)
        scorer: Scorer = Recorder() if is_control else self._scorers.make(self.method.scorer, seed)
        options = Cell(self.method, self.kept_fraction).options
        return GateSightCache(scorer, self.model, protected_prefix=self.protected_prefix, **options)

    def _answer(self, child: GateSightCache, question: Sequence[int], job: _Job) -> str:
        ids = torch.tensor([list(question)], device=self.model.device)
        seen = child.get_seq_length()
        output = self.model.generate(
            ids,
            attention_mask=torch.ones((1, seen + len(question)), dtype=torch.long, device=ids.device),
            max_new_tokens=job.max_new_tokens,
            do_sample=False,
            pad_token_id=self.tokenizer.pad_token_id,
            stopping_criteria=stop_sequences_criteria(self.tokenizer, job.stop, len(question), 1),
            **{cache_argument(self.model): child},
        )
        return postprocess_generated_text(
            self.tok_decode(output[0, len(question) :].tolist()), job.stop, self.think_end_token
        )


def find_cut(prompt: str, document: Mapping[str, Any]) -> int | None:
    """Where a prompt's context ends and its question begins, see the head of this module; None if it is not known.

    A field `input` without a `question` is not taken for a context: RULER's holds the question too.
    """
    fields = {name: text.strip() for name, text in document.items() if isinstance(text, str)}
    question = fields.get("question")
    for name, asked in (("context", fields.get("input", "") if question is None else question), ("input", question)):
        if fields.get(name) and asked is not None and (start := prompt.rfind(fields[name])) >= 0:
            end = start + len(fields[name])
            if asked in prompt[end:] and prompt[end:].strip():
                return end
    cuts = []
    for wording in (NIAH, VT, CWE, FWE, QA):
        starts = [match.start() for match in re.finditer(wording.begins, prompt)]
        # QA's instruction opens the prompt, too; where it stands only once, the prompt is not RULER's.
        if len(starts) > (wording is QA):
            cuts.append(starts[-1])
    return max(cuts, default=None) or None


def _no_likelihoods(requests: Sequence[Any]) -> NotImplementedError:
    return NotImplementedError(
        f"The task {requests[0].task_name} asks for likelihoods; the model gatesight answers generation tasks "
        "(output_type: generate_until), such as ruler. For likelihoods use --model hf."
    )


def main() -> None:
    """The command line of lm_eval; importing this module has registered the model."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
