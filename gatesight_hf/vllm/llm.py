"""Offline API: a vLLM engine in which documents are opened once and asked any number of times."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import LLM, RequestOutput, SamplingParams
from vllm.config import KVTransferConfig

from . import register
from .connector import ASK, DROP, KEPT_FRACTION, OPEN, OPTIONS, GateSightConnector, checked_options
from .worker import GateSightWorker


@dataclass(frozen=True)
class SessionReport:
    """A session that was opened.

    Attributes:
        session_id: For `ask` and `drop`.
        token_ids: Of the context.
        kept: Entries per KV head that stay, by attention layer.
        achieved_fraction: Share of the evictable entries that stays.
        gate_means: By attention layer, the mean output gate.
        seconds: Of scoring and compaction.
    """

    session_id: str
    token_ids: tuple[int, ...]
    kept: list[int]
    achieved_fraction: float
    gate_means: list[float]
    seconds: dict[str, float]


class GateSightLLM:
    """A vLLM engine with sessions.

    Args:
        model: Of `vllm.LLM`.
        estimator: Folder of an estimator for it.
        kept_fraction, protected_prefix, allocation, gate_exponent: As in `GateSightCache`; layers are rounded up to
            whole blocks.
        max_sessions: Idle sessions beyond that are dropped, the least recently used one first; so are idle ones where
            blocks run out.
        options: Of `vllm.LLM`.

    Raises:
        UnsupportedVLLMError: A version or mode of vLLM that has not been run.
        EstimatorMismatchError: The estimator is for another layout.
    """

    def __init__(
        self,
        model: str | Path,
        estimator: str | Path,
        *,
        max_sessions: int = 64,
        kept_fraction: float = KEPT_FRACTION,
        **options: Any,
    ) -> None:
        ours = {name: options.pop(name) for name in OPTIONS if name in options}
        config = engine_options(estimator, max_sessions=max_sessions, kept_fraction=kept_fraction, **ours)
        register()
        self.llm = LLM(model=str(model), **config, **options)
        self._ids = itertools.count()

    def open(self, context: str | Sequence[int], session_id: str | None = None, **options: Any) -> SessionReport:
        """Prefill a context, compact it, and keep it for questions.

        Args:
            context: Text, or token ids.
            session_id: A session of that id is replaced.
            options: Of this compaction, in place of the engine's.

        Raises:
            RuntimeError: The engine could not serve it, for example because no block is free.
        """
        session_id = f"session-{next(self._ids)}" if session_id is None else session_id
        ids = self._ids_of(context)
        params = {"gatesight": OPEN, "session": session_id, **checked_options(options)}
        self._generate([ids], SamplingParams(max_tokens=1, temperature=0), params)
        (report,) = self.llm.collective_rpc("gatesight_report", args=(session_id,))
        return SessionReport(session_id, tuple(ids), **{name: report[name] for name in _REPORTED})

    def ask(
        self, session: SessionReport, questions: Sequence[str | Sequence[int]], sampling: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Answer questions, each from a child of its own, batched.

        Raises:
            RuntimeError: The session is gone.
        """
        prompts = [[*session.token_ids, *self._ids_of(question)] for question in questions]
        return self._generate(prompts, sampling, {"gatesight": ASK, "session": session.session_id})

    def drop(self, session: SessionReport) -> None:
        """End a session: its blocks go back to the pool."""
        # Two tokens: vLLM 0.32 fails on prompts of one on some CPUs.
        self._generate([[0, 0]], SamplingParams(max_tokens=1), {"gatesight": DROP, "session": session.session_id})

    def _ids_of(self, text: str | Sequence[int]) -> list[int]:
        return list(self.llm.get_tokenizer()(text).input_ids) if isinstance(text, str) else list(text)

    def _generate(
        self, prompts: list[list[int]], sampling: SamplingParams | None, params: dict[str, Any]
    ) -> list[RequestOutput]:
        sampling = SamplingParams() if sampling is None else sampling.clone()
        sampling.extra_args = {**(sampling.extra_args or {}), "kv_transfer_params": params}
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        failed = [output for output in outputs if output.outputs[0].finish_reason == "error"]
        if failed:
            raise RuntimeError(
                f"GateSight: session {params['session']!r} could not be served ({params['gatesight']}); it may have "
                "been dropped, or have made room for others. The engine's log says why."
            )
        return outputs


_REPORTED = ("kept", "achieved_fraction", "gate_means", "seconds")


def engine_options(estimator: str | Path, **config: Any) -> dict[str, Any]:
    """Options of `vllm.LLM` and of its server that GateSight needs; `config` as in `GateSightLLM`.

    Raises:
        ValueError: Unknown options, or values out of range.
    """
    checked_options({name: value for name, value in config.items() if name != "max_sessions"})
    return {
        "worker_cls": f"{GateSightWorker.__module__}.{GateSightWorker.__name__}",
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "async_scheduling": False,
        "kv_transfer_config": KVTransferConfig(
            kv_connector=GateSightConnector.__name__,
            kv_connector_module_path=GateSightConnector.__module__,
            kv_role="kv_both",
            kv_connector_extra_config={"estimator": str(estimator), **config},
        ),
    }
