"""From items to token ids: the context that is prefilled once, and each question that is fed to a fork of it.

Both are tokenized by themselves, because the border between them has to be one between tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gatesight_hf.session.prompts import common

from .items import Item, Question

_PLACEHOLDER = "[SEPSEPSEP]"


@dataclass(frozen=True)
class PreparedContext:
    """A context as tokens.

    Attributes:
        ids: What is prefilled.
        tokens_before: Their number before truncation.
        truncated: Whether the middle was cut out.
        protected_prefix: Leading tokens that belong to the chat template and not to the context; 0 without template.
    """

    ids: list[int]
    tokens_before: int
    truncated: bool
    protected_prefix: int


def truncate_middle(ids: Sequence[int], max_tokens: int) -> list[int]:
    """All ids if they are at most `max_tokens`, else the first and the last `max_tokens // 2`: SCBench's truncation.

    Raises:
        ValueError: `max_tokens` is below 2, which leaves nothing.
    """
    if max_tokens < 2:
        raise ValueError(f"Truncation keeps at least 2 tokens, max_tokens is {max_tokens}.")
    half = max_tokens // 2
    return list(ids) if len(ids) <= max_tokens else [*ids[:half], *ids[-half:]]


class Prompter:
    """Token ids of items for one tokenizer.

    With a chat template the context is the template's text before the user's message, then the context; the question is
    its text, then the end of the user's turn, the assistant's header and the answer prefix. The template is rendered
    once, around a placeholder, so that it neither trims nor reads the texts. Special tokens are the template's own.

    Without one the context is the tokenizer's begin-of-sequence token, if it adds one, and the context; the question is
    its text and the answer prefix, concatenated plainly as in RULER's `base` template: no space or line break between
    context, question and prefix unless the item has it. (kvpress puts a line break before the prefix.)

    Args:
        tokenizer: Of Transformers.
        chat_template: Whether to use the tokenizer's chat template.
        max_length: Tokens of a whole sequence: context, question and answer. A longer context loses its middle, down to
            `budget`. None truncates nothing.
        template_options: Passed to the chat template, for example `{"enable_thinking": False}`.

    Raises:
        ValueError: The tokenizer has no chat template, or one that does not show the user's message exactly once.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: bool,
        max_length: int | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.max_length = max_length
        self._header, self._footer = _template_parts(tokenizer, template_options or {}) if chat_template else ("", "")
        self._leading_ids = [] if chat_template else _begin_of_sequence(tokenizer)

    def context_ids(self, item: Item) -> PreparedContext:
        """The tokens of an item's context, truncated to its budget.

        Raises:
            ValueError: The context has no tokens, or `max_length` leaves too few for it.
        """
        ids = self._leading_ids + self._tokenize(self._header + item.context)
        # A tokenizer may join the end of the header with the begin of the context.
        protected = common(ids, self._tokenize(self._header))
        if len(ids) <= protected + len(self._leading_ids):
            raise ValueError(f"The context of item {item.id!r} has no tokens.")
        budget = self.budget(item)
        if budget is None or len(ids) <= budget:
            return PreparedContext(ids, len(ids), False, protected)
        if budget // 2 <= protected:
            raise ValueError(
                f"max_length={self.max_length} leaves {budget} tokens for the context of item {item.id!r}, of which "
                f"{protected} go to the chat template. Raise max_length or ask fewer questions."
            )
        return PreparedContext(truncate_middle(ids, budget), len(ids), True, protected)

    def budget(self, item: Item) -> int | None:
        """How many tokens the context may have; None for any number.

        `max_length` without details["reserved_tokens"] of the item, which benchmarks with a rule of their own set, or
        else without its longest question and answer.
        """
        if self.max_length is None:
            return None
        reserved = item.details.get("reserved_tokens")
        if reserved is None:
            reserved = max((len(self.question_ids(q)) + q.max_new_tokens for q in item.questions), default=0)
        return self.max_length - int(reserved)

    def question_ids(self, question: Question) -> list[int]:
        """The tokens that follow the context's, up to where the answer begins.

        Raises:
            ValueError: There are none.
        """
        ids = self._tokenize(question.text + self._footer + question.answer_prefix)
        if not ids:
            raise ValueError(f"The question has no tokens: {question.text!r}.")
        return ids

    def answer_ids(self, question: Question) -> list[int]:
        """The tokens of the references: a right answer, for controls that know it."""
        return self._tokenize(" ".join(question.references))

    def _tokenize(self, text: str) -> list[int]:
        # verbose=False: long contexts are the purpose here, no warning is due.
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _template_parts(tokenizer: Any, options: Mapping[str, Any]) -> tuple[str, str]:
    """The rendered template before and after the user's message, with the assistant's header."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("The tokenizer has no chat template: use chat_template=False, or set tokenizer.chat_template.")
    messages = [{"role": "user", "content": _PLACEHOLDER}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
    parts = text.split(_PLACEHOLDER)
    if len(parts) != 2:
        raise ValueError(
            f"The chat template shows the user's message {len(parts) - 1} times instead of once: {text!r}."
        )
    return parts[0], parts[1]


def _begin_of_sequence(tokenizer: Any) -> list[int]:
    """The begin-of-sequence token if the tokenizer puts one before a text; what it puts after a text is left out."""
    added = list(tokenizer("")["input_ids"])
    return added[:1] if added and added[0] == tokenizer.bos_token_id else []
