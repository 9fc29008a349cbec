"""Chat messages: which of a template's ids are the context of a session, and which follow it.

A document opens a user's turn; a question follows it in the same turn, after an empty line, and later turns come after
it. Offline the tokenizer's template tells the ids (`ChatPrompt`), as in `gatesight_hf.Session`; of a server they are
what vLLM itself makes of messages (`Rendered`).
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from ..session.prompts import PROBES, SEPARATOR, TAILS, ChatPrompt, Turn, common

Messages = Sequence[Mapping[str, Any]]

#: Begins of a text that stands for a document; one of them is unlike the document's.
_UNLIKE = ("Another text. ", "The text. ")


def are_messages(given: Any) -> TypeGuard[Messages]:
    """Whether these are messages, and no text or ids."""
    return isinstance(given, Sequence) and len(given) > 0 and isinstance(given[0], Mapping)


def prompt_of(
    tokenizer: Any, messages: Messages, template_options: Mapping[str, Any] | None
) -> tuple[ChatPrompt, list[int]]:
    """The prompt behind a document, and the ids of the context.

    Args:
        tokenizer: With a chat template.
        messages: A system message or none, and the document as a user's.
        template_options: Variables of the template, such as `enable_thinking`, and `tools`.

    Raises:
        ValueError: Other messages, no template, or one that does not let a question follow a document.
        TypeError: Options that are not the template's.
    """
    said = _said(messages)
    if [role for role, _ in said] not in (["user"], ["system", "user"]):
        raise ValueError(
            "Messages that open a session are the document as a user's, after a system message or none; got "
            f"{_listed(said)}."
        )
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("The tokenizer has no chat template for messages: give the context as text, or as token ids.")
    system = said[0][1] if len(said) > 1 else None
    return ChatPrompt(tokenizer, system, dict(template_options or {})).add(said[-1][1])


def turns_of(messages: Messages) -> tuple[list[Turn], str]:
    """The turns after a document, and the question that they end with.

    Raises:
        ValueError: They are not a user's and an assistant's in turn, the last one a user's.
    """
    said = _said(messages)
    roles = ["user", "assistant"] * (len(said) // 2) + ["user"]
    if [role for role, _ in said] != roles:
        raise ValueError(
            "Messages that ask a session are user's and assistant's in turn, from the first question on, and end with "
            f"a question; got {_listed(said)}."
        )
    texts = [text for _, text in said]
    return [Turn(*pair) for pair in zip(texts[:-1:2], texts[1::2], strict=True)], texts[-1]


def _said(messages: Messages) -> list[tuple[str, str]]:
    """Role and text of each message."""
    for message in messages:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ValueError(f"A message has a role and a content, both texts; got {message!r:.80}.")
    return [(message["role"], message["content"]) for message in messages]


def _listed(said: Sequence[tuple[str, str]]) -> str:
    return ", ".join(role for role, _ in said) or "none"


@dataclass(frozen=True)
class Rendered:
    """A document as a server's vLLM renders it.

    Attributes:
        ids: From the template's begin to the document's end: those that all prompts begin with that have the document
            there and a question behind it.
        before: How many of them stand before the document.
    """

    ids: list[int]
    before: int

    @classmethod
    async def of(cls, messages: Any, render: Callable[[list[Any]], Awaitable[list[int]]]) -> "Rendered":
        """Find it by rendering messages with several questions.

        Args:
            messages: Of a request; the last one is the document.
            render: Ids of messages, with the generation prompt.

        Raises:
            ValueError: The last message is not a user's with text, or the template shows the document in another way
                than once and before the question.
        """
        document = _document(messages)
        shown = [await render(_with(messages, document + SEPARATOR + probe)) for probe in PROBES]
        end = min(common(shown[0], other) for other in shown[1:])
        ids, after = shown[0][:end], shown[0][end:]
        begin = next(text for text in _UNLIKE if text[0] != document.lstrip()[0])
        stand_in = begin + document[-TAILS[-1] :]  # ends as it does, so that the same tokens follow
        other = await render(_with(messages, stand_in + SEPARATOR + PROBES[0]))
        before = common(ids, other)
        if before == end or other[-len(after) :] != after:
            raise ValueError(
                "the chat template does not show the document once with the question behind it, so that no question "
                "can follow it; /v1/completions open sessions without a template"
            )
        return cls(ids, before)


def _document(messages: Any) -> str:
    """Text of the last message; of several parts, of the last part."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict) or last.get("role") != "user":
        raise ValueError("messages that open a session end with the document as a user message")
    content = last.get("content")
    if isinstance(content, list) and content and isinstance(content[-1], dict):
        content = content[-1].get("text")
    if not isinstance(content, str) or not content.strip():
        raise ValueError("the last message, the document, has no text at its end")
    return content


def _with(messages: list[Any], text: str) -> list[Any]:
    """Messages with another text in place of the document."""
    *before, last = messages
    if isinstance(last["content"], list):
        *parts, part = last["content"]
        return [*before, {**last, "content": [*parts, {**part, "text": text}]}]
    return [*before, {**last, "content": text}]
