"""Offline API: a vLLM engine in which documents are opened once and asked any number of times."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from vllm import LLM, RequestOutput, SamplingParams
from vllm.config import KVTransferConfig

from ..session.prompts import ChatPrompt
from . import register
from .chats import Messages, are_messages, prompt_of, turns_of
from .options import ASK, DROP, NO_PROMPT, OPEN, REPORT, Limits, OpenOptions, engine_settings


@dataclass(frozen=True)
class SessionReport:
    """A session that was opened.

    Attributes:
        session_id: For `ask` and `drop`.
        token_ids: Of the context.
        tokens: Their number.
        kept: Entries per KV head that stay, by attention layer.
        achieved_fraction: Share of the evictable entries that stays.
        gate_means: By attention layer, the mean output gate.
        blocks_before: Held after the prefill, those of GDN states included.
        blocks: Held since.
        kv_bytes_before: Of the blocks of attention layers after the prefill.
        kv_bytes: Likewise since.
        gdn_bytes: Of the blocks of GDN states.
        seconds: Of the engine's steps with its prefill (`prefill`), of scoring (`score`), and of budget, selection and
            moving entries (`compact`).
    """

    session_id: str
    token_ids: tuple[int, ...]
    tokens: int
    kept: list[int]
    achieved_fraction: float
    gate_means: list[float]
    blocks_before: int
    blocks: int
    kv_bytes_before: int
    kv_bytes: int
    gdn_bytes: int
    seconds: dict[str, float]


class GateSightLLM:
    """A vLLM engine with sessions.

    Args:
        model: Of `vllm.LLM`.
        estimator: Folder or Hub repo of an estimator for it; or several by name, of which the first one is used unless
            `scorer` names another.
        max_sessions: Idle sessions beyond that are dropped, the least recently used one first; so are idle ones where
            blocks run out.
        options: Those of `OpenOptions`, such as `kept_fraction`; the others are `vllm.LLM`'s.

    Attributes:
        llm: The engine, for ordinary requests.
        estimators: Names of its estimators.

    Raises:
        UnsupportedVLLMError: A version or mode of vLLM that has not been run.
        EstimatorMismatchError: The estimator is for another layout.
        ValueError: Options out of range.
    """

    def __init__(
        self,
        model: str | Path,
        estimator: str | Path | Mapping[str, str | Path],
        *,
        max_sessions: int = Limits.max_sessions,
        **options: Any,
    ) -> None:
        ours = {name: options.pop(name) for name in vars(OpenOptions()) if name in options}
        settings = engine_settings(estimator, max_sessions=max_sessions, **ours)
        transfer = KVTransferConfig(**settings.pop("kv_transfer_config"))
        self.estimators = list(transfer.kv_connector_extra_config["estimators"])
        self._options = OpenOptions(scorer=self.estimators[0]).updated(ours)
        register()
        self.llm = LLM(model=str(model), kv_transfer_config=transfer, **settings, **options)
        self._ids = itertools.count()
        self._most = max_sessions
        #: By session, of those that messages opened; the least recently used one first, as the engine drops them.
        self._prompts: dict[str, ChatPrompt] = {}

    def open(
        self,
        context: str | Sequence[int] | Messages,
        session_id: str | None = None,
        *,
        template_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> SessionReport:
        """Prefill a context, compact it, and keep it for questions.

        As messages, the context goes through the chat template, up to the document's end: what the template has before
        the document, the system text too, always stays, and a question closes the document's turn.

        Args:
            context: Text, or token ids; or messages, which are the document as a user's, after a system message or
                none.
            session_id: A session of that id is replaced.
            template_options: Of messages: variables of the template, such as `{"enable_thinking": False}`, and
                `tools`.
            options: Those of `OpenOptions`, in place of the engine's.

        Raises:
            TypeError: An option is not the template's.
            ValueError: Options out of range, other messages, or a template that does not let a question follow a
                document.
            RuntimeError: The engine could not serve it, for example because no block is free.
        """
        session_id = f"session-{next(self._ids)}" if session_id is None else session_id
        prompt = None
        if are_messages(context):
            prompt, ids = prompt_of(self.llm.get_tokenizer(), context, template_options)
            options["before_document"] = prompt.protected(ids)
        elif template_options:
            raise ValueError("template_options: text and token ids do not go through the template; give messages.")
        else:
            ids = self._ids_of(context)
        given = self._options.updated(options)
        parameters = {name: getattr(given, name) for name in options}
        self._run([ids], SamplingParams(max_tokens=1, temperature=0), OPEN, session_id, parameters)
        found = self._about(session_id, REPORT)
        if found["report"] is None:
            why = found["refusal"] or "it made room for others at once"
            raise RuntimeError(f"GateSight: session {session_id!r} could not be served ({OPEN}): {why}.")
        self._prompts.pop(session_id, None)
        if prompt is not None:
            self._prompts[session_id] = prompt
            while len(self._prompts) > self._most:
                self._prompts.pop(next(iter(self._prompts)))
        return SessionReport(session_id, tuple(ids), **found["report"])

    def ask(
        self,
        session: SessionReport,
        questions: Sequence[str | Sequence[int] | Messages],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer questions, each from a child of its own, batched.

        Args:
            session: As `open` returned it.
            questions: Text, or token ids. Where messages opened the session, text is a question in the document's
                turn; or each is messages, from the first question about the document to the last one.
            sampling: For all questions, or one for each.

        Raises:
            ValueError: Messages that are no such turns, that the template refuses, or for a session that text or ids
                opened; or a question that has no tokens or joins with the document's end.
            RuntimeError: The session is gone.
        """
        prompt = self._prompts.pop(session.session_id, None)
        if prompt is not None:
            self._prompts[session.session_id] = prompt  # as the last one
        prompts = [[*session.token_ids, *self._ids_of(question, prompt)] for question in questions]
        return self._run(prompts, sampling, ASK, session.session_id)

    def drop(self, session: SessionReport) -> bool:
        """End a session: its blocks go back to the pool. False if it was gone already."""
        self._prompts.pop(session.session_id, None)
        return bool(self._about(session.session_id, DROP)["dropped"])

    def _about(self, session_id: str, kind: str) -> dict[str, Any]:
        (output,) = self._run([NO_PROMPT], SamplingParams(max_tokens=1), kind, session_id)
        assert output.kv_transfer_params is not None
        return output.kv_transfer_params

    def _ids_of(self, text: str | Sequence[int] | Messages, prompt: ChatPrompt | None = None) -> list[int]:
        """Of a context, or of a question behind a prompt's document."""
        if are_messages(text):
            if prompt is None:
                raise ValueError("Messages ask sessions that messages opened, and that were not dropped.")
            return prompt.turn(*turns_of(text))
        if isinstance(text, str):
            return list(self.llm.get_tokenizer()(text).input_ids) if prompt is None else prompt.turn((), text)
        return list(cast(Sequence[int], text))

    def _run(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        kind: str,
        session_id: str,
        options: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        parameters = {"gatesight": kind, "session": session_id, **dict(options or {})}
        given = [sampling] * len(prompts) if sampling is None or isinstance(sampling, SamplingParams) else sampling
        tagged = []
        for one in given:
            clone = SamplingParams() if one is None else one.clone()
            clone.extra_args = {**dict(clone.extra_args or {}), "kv_transfer_params": parameters}
            tagged.append(clone)
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], tagged, use_tqdm=False)
        if any(output.outputs[0].finish_reason == "error" for output in outputs):
            why = self._about(session_id, REPORT)["refusal"] or "the engine's log may say why"
            raise RuntimeError(f"GateSight: session {session_id!r} could not be served ({kind}): {why}.")
        return outputs
