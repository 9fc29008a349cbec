"""From texts to token ids: a document's, which are read once, and those that follow it for a question or a turn.

`ChatPrompt` is the tokenizer's chat template, in which the document opens the first user turn; `RawPrompt` joins texts
as they are. A prompt is a value: `add` gives another one, so that a failure takes nothing with it.
"""

import copy
import hashlib
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from jinja2 import TemplateError

from gatesight_kernels.checks import described

from ..checks import check_characters

Message = dict[str, str]
Ids = list[int]

RAW, CHAT = "raw", "chat"
#: Between a document and what follows it in the same turn.
SEPARATOR = "\n\n"
#: Characters of a document's end that are tokenized again with each question, to see where its tokens end: the first
#: number that suffices, else all of it.
TAILS = (512, 4096, 32768)
#: Tokens before that border that must come out as they did in the whole document.
AGREEING = 16
#: Questions that begin in ways that tokenizers treat differently.
PROBES = ("What does it say?", "7 words", "(a) or (b)?", '"Why?"')
#: In place of a question, to see what stands before one. Two, as a question may begin like one of them.
OTHERS = ("What?", "(7)")
#: What `apply_chat_template` is given by a session itself, and what would change its ids behind the session's back.
_OWN = frozenset(
    "conversation messages tokenize add_generation_prompt continue_final_message return_tensors return_dict padding "
    "truncation max_length return_assistant_tokens_mask tokenizer_kwargs sanitize_control_tokens chat_template".split()
)
_WITHOUT = " Raw text needs no template: chat=False of Session.open."


class Turn(NamedTuple):
    """A question of a conversation and its answer."""

    question: str
    answer: str

    def messages(self) -> list[Message]:
        return [_user(self.question.strip()), {"role": "assistant", "content": self.answer}]


class Prompt(ABC):
    """How texts become ids.

    Attributes:
        tokenizer: Of the model.
    """

    tokenizer: Any

    @abstractmethod
    def add(self, text: str) -> tuple["Prompt", Ids]:
        """With one more text in the document: the prompt after it, and the new ids; the first one is the document.

        Raises:
            ValueError: The text has no tokens, or joins with what stands before it.
        """

    @abstractmethod
    def protected(self, ids: Sequence[int]) -> int:
        """How many of a document's first ids are no text of it, but an instruction that must stay."""

    @abstractmethod
    def turn(self, turns: Sequence[Turn], text: str) -> Ids:
        """Ids that follow the document's: of the turns before a question, and of it, up to where the answer begins.

        Raises:
            ValueError: There are none, or the template refuses the conversation, or joins its begin with the document.
        """

    @abstractmethod
    def border(self, turns: Sequence[Turn], ids: Sequence[int]) -> int:
        """How many of the `ids` that `turn` gives stand before its question, whichever that is."""

    @abstractmethod
    def saved(self) -> dict[str, Any]:
        """What `saving` keeps of it; JSON values."""

    def _ids(self, text: str, special: bool = False) -> Ids:
        # verbose=False: long contexts are the purpose here, no warning is due.
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


@dataclass(frozen=True)
class RawPrompt(Prompt):
    """Texts one after another, as they are; the document with the special tokens that the tokenizer adds.

    In a conversation a space stands before an answer, and a line break after it.
    """

    tokenizer: Any
    begun: bool = False

    def add(self, text: str) -> tuple["RawPrompt", Ids]:
        ids = self._ids(text, special=not self.begun)
        if not ids:
            raise ValueError("The text has no tokens." if self.begun else "The document, text, has no tokens.")
        return replace(self, begun=True), ids

    def protected(self, ids: Sequence[int]) -> int:
        return 0

    def turn(self, turns: Sequence[Turn], text: str) -> Ids:
        ids = self._ids(self._turns(turns) + text)
        if not ids or not text.strip():
            raise ValueError("The question has no tokens.")
        return ids

    def border(self, turns: Sequence[Turn], ids: Sequence[int]) -> int:
        return min(common(ids, self._ids(self._turns(turns) + other)) for other in OTHERS)

    @staticmethod
    def _turns(turns: Sequence[Turn]) -> str:
        return "".join(f"{turn.question.rstrip()} {turn.answer}\n" for turn in turns)

    def saved(self) -> dict[str, Any]:
        return {"kind": RAW}


@dataclass(frozen=True)
class ChatPrompt(Prompt):
    """The tokenizer's chat template: a system text, then the document and a question as the first user turn.

    Ids are those of `apply_chat_template` for all messages; what it says before the document, such as a date, stays as
    it was when that was read. A text is tokenized with the last characters before it, since a tokenizer may join both;
    where it does at the border of document and question, the joined tokens count as the question's, and a question
    that joins more is an error.

    Attributes:
        tokenizer: With a chat template.
        system: Text of a system message, or None for no such message.
        options: Variables of the template, such as `enable_thinking`, and `tools`.
        tail: Text before what comes next: the document's last characters; None before a document.
        tail_ids: How these begin, tokenized by themselves, up to the border.
    """

    tokenizer: Any
    system: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    tail: str | None = None
    tail_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.options, Mapping):
            raise TypeError(f"template_options must be a mapping, got {described(self.options)}.")
        if given := sorted(_OWN & set(self.options)):
            raise TypeError(f"template_options: {given[0]} is not a variable of the template; leave it out.")

    def add(self, text: str) -> tuple["ChatPrompt", Ids]:
        first = self.tail is None
        if not text.strip():
            raise ValueError("The document, text, has no tokens." if first else "The text has no tokens.")
        whole = (self._shown(text) if self.tail is None else self.tail + text) + SEPARATOR
        ids, after = self._ids(whole), self._ids(whole + PROBES[0])
        for tail in (*(whole[-length:] for length in TAILS if length < len(whole)), whole):
            of_tail = self._ids(tail)
            border = min(common(of_tail, self._ids(tail + question)) for question in PROBES)
            known = ids[: len(ids) - (len(of_tail) - border)]
            same = min(AGREEING, len(known))
            if border >= same and of_tail[border - same : border] == known[-same:] == after[: len(known)][-same:]:
                break
        if after[: len(known)] != known or tuple(known[: len(self.tail_ids)]) != self.tail_ids:
            raise ValueError("The tokenizer joins the text with what stands before or after it: begin it with a word.")
        prompt = replace(self, tail=tail, tail_ids=tuple(of_tail[:border]))
        return prompt, known[len(self.tail_ids) :]

    def _shown(self, text: str) -> str:
        """The template's text up to a document's end. It may trim what a user says, and must not change it."""
        _, after = self._parts([], PROBES[0])
        shown = self._render([*self._system(), _user(text + SEPARATOR + PROBES[0])])
        end = SEPARATOR + after
        if not shown.endswith((text + end, text.lstrip() + end)):
            raise ValueError(f"The chat template changes the document, so that a question cannot follow it.{_WITHOUT}")
        return shown.removesuffix(end)

    def protected(self, ids: Sequence[int]) -> int:
        return common(ids, self._ids(self._parts([], PROBES[0])[0]))

    def turn(self, turns: Sequence[Turn], text: str) -> Ids:
        if not text.strip():
            raise ValueError("The question has no tokens.")
        head, after = self._parts(turns, text)
        if turns and head != self._parts([], text)[0]:
            raise ValueError("The chat template changes what stands before the document with the turns after it.")
        ids = self._behind_document(after)
        if ids is None:
            raise ValueError(
                f"The tokenizer joins the begin of the question {text[:40]!r} with the document's end: begin it with a "
                "word."
            )
        return ids

    def border(self, turns: Sequence[Turn], ids: Sequence[int]) -> int:
        others = (self._behind_document(self._parts(turns, other)[1]) for other in OTHERS)
        return min(0 if other is None else common(ids, other) for other in others)

    def _behind_document(self, text: str) -> Ids | None:
        """Ids of a text behind the document; None where the tokenizer joins both."""
        assert self.tail is not None
        ids, known = self._ids(self.tail + text), len(self.tail_ids)
        return ids[known:] if tuple(ids[:known]) == self.tail_ids else None

    # -- rendering -----------------------------------------------------------------------------------------------------

    def _system(self) -> list[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _render(self, messages: list[Message]) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self.options
            )
        except TemplateError as error:
            raise ValueError(f"The chat template refuses these messages: {error}.{_WITHOUT}") from error
        assert isinstance(text, str)
        return text

    def _parts(self, turns: Sequence[Turn], text: str) -> tuple[str, str]:
        """What the template has before the document, and after it."""
        messages = [*self._system(), *(message for turn in turns for message in turn.messages()), _user(text.strip())]
        stand_in = f"[[the document {secrets.token_hex(8)}]]"  # in no message but by a guess
        first = messages[len(self._system())]
        first["content"] = stand_in + SEPARATOR + first["content"]
        shown = self._render(messages)
        begin, *rest = shown.split(stand_in + SEPARATOR)
        if len(rest) != 1:
            raise ValueError(
                f"The chat template shows the document {len(rest)} times in place of once, so that a question cannot "
                f"follow it.{_WITHOUT}"
            )
        return begin, rest[0]

    # -- files ---------------------------------------------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        try:
            options = json.loads(json.dumps(dict(self.options)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"template_options cannot be saved, as they are not JSON: {error}.") from error
        return {
            "kind": CHAT,
            "system": self.system,
            "options": options,
            "tail": self.tail,
            "tail_tokens": len(self.tail_ids),
            "template": self._digest(),
        }

    def _digest(self) -> str:
        """Of what the template makes of two turns after a document: tells templates apart."""
        _, after = self._parts([Turn(PROBES[0], "It does.")], PROBES[0])
        return hashlib.sha256(after.encode()).hexdigest()[:16]

    def is_template(self, digest: str) -> bool:
        """Whether the tokenizer's template is the one that `saved` tells of."""
        try:
            return self._digest() == digest
        except ValueError:
            return False

    def behind(self, tail: str, border: int, ids: Sequence[int]) -> "ChatPrompt":
        """This prompt behind a document that was read before.

        Args:
            tail, border: Its `tail`, and how many `tail_ids` there were.
            ids: Of the document.

        Raises:
            ValueError: They do not fit together.
        """
        of_tail = self._ids(tail + PROBES[0])[:border]
        same = min(AGREEING, border)
        if same < 1 or len(of_tail) < border or of_tail[-same:] != list(ids[-same:]):
            raise ValueError("its text and its tokens do not fit together")
        return replace(self, tail=tail, tail_ids=tuple(of_tail))


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading ids are equal."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def prompt_for(
    tokenizer: Any, system: str | None, chat: bool | None, template_options: Mapping[str, Any] | None
) -> Prompt:
    """A prompt that has no document yet; arguments as of `Session.open`.

    Raises:
        ValueError: A template is asked for, and there is none.
        TypeError: Options that are not the template's.
    """
    if system is not None:
        check_characters("system", system)
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if chat is None:
        chat = has_template
    if chat and not has_template:
        raise ValueError("chat=True: the tokenizer has no chat template. Set tokenizer.chat_template, or leave it out.")
    if chat:
        return ChatPrompt(tokenizer, system, copy.deepcopy(template_options or {}))
    if system is not None or template_options:
        given = "system" if system is not None else "template_options"
        raise ValueError(f"{given}: raw text has no chat template to put it in; put the text before the document.")
    return RawPrompt(tokenizer)
