"""Session: a document is prefilled and compacted once; every question is answered from a fork of it."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from gatesight_kernels.checks import check_bool, check_whole_number

from ..cache.cache import GateSightCache
from ..cache.report import CacheReport
from ..checks import check_characters, check_model, check_tokenizer
from ..errors import CacheStateError
from ..scoring.estimator import scorer_from
from ..scoring.interface import Scorer
from ..view import Page
from .answering import ONE_DOCUMENT, answer, answer_many, check_question, check_questions, decoded, stream
from .conversation import Conversation
from .document import Document
from .prompts import Message, RawPrompt, prompt_for
from .saving import load, save
from .viewing import page_of

#: Of an answer, unless a call says otherwise.
MAX_NEW_TOKENS = 256


class Session:
    """Text in, answers out, over one compacted document.

    Args:
        model: The hybrid model.
        tokenizer: Its tokenizer.
        cache: A cache of one row that holds the document, compacted. Questions follow it as raw text; `open` is for
            chat templates.

    Raises:
        TypeError, CacheStateError, ValueError: No model, no tokenizer, or see `Document`.
    """

    def __init__(self, model: Any, tokenizer: Any, cache: GateSightCache | Document) -> None:
        check_model(model)
        check_tokenizer(tokenizer)
        self.model = model
        self.tokenizer = tokenizer
        document = cache if isinstance(cache, Document) else Document(cache, RawPrompt(tokenizer, begun=True))
        self._conversation = Conversation(document)

    @classmethod
    def open(
        cls,
        model: Any,
        tokenizer: Any,
        estimator: str | Path | Scorer,
        text: str,
        *,
        system: str | None = None,
        chat: bool | None = None,
        template_options: Mapping[str, Any] | None = None,
        protected_prefix: int = 0,
        prefill_chunk_size: int | None = None,
        **options: Any,
    ) -> "Session":
        """Prefill a document and compact its cache.

        With a chat template the document opens the first user turn, and a question closes it: the ids of both are those
        of `apply_chat_template` for `document + "\\n\\n" + question.strip()`. What the template has before the
        document, the system text too, always stays.

        Args:
            model, tokenizer: The hybrid model and its tokenizer.
            estimator: Folder of an estimator, its repo on the Hub, or a scorer.
            text: The document.
            system: Text of a system message.
            chat: Whether to use the tokenizer's chat template; None does where there is one.
            template_options: Variables of the template, such as `{"enable_thinking": False}`, and `tools`.
            protected_prefix: First tokens of the document that always stay, besides what stands before it.
            prefill_chunk_size: Tokens per forward, of turns too; None reads in one.
            options: The others of `GateSightCache`, and those of `Estimator.from_pretrained`.

        Raises:
            TypeError: The text is no string, or an option is not the template's.
            OSError, ValueError: The document has no tokens, its chat template does not let a question follow a
                document, or see `GateSightCache.from_pretrained`.
        """
        check_characters("text", text, ONE_DOCUMENT)
        check_model(model)
        check_tokenizer(tokenizer)
        prompt = prompt_for(tokenizer, system, chat, template_options)
        given = (prompt, text, prefill_chunk_size, protected_prefix, options)
        return cls(model, tokenizer, Document.read(model, estimator, *given))

    @property
    def cache(self) -> GateSightCache:
        """Of the document; `fork()` it to use it by hand."""
        return self._document.cache

    @property
    def _document(self) -> Document:
        return self._conversation.document

    def add(self, text: str, prefill_chunk_size: int | None = None) -> None:
        """Append a text to the document, for all later questions. If this fails, the session is as before.

        Raises:
            TypeError, ValueError: The text is no string, or has no tokens.
            CacheStateError: A conversation has begun, or `cache` was used itself.
        """
        check_characters("text", text, ONE_DOCUMENT)
        if self._conversation.turns:
            raise CacheStateError("A conversation about the document has begun: call reset_chat() to add to it.")
        self._conversation = Conversation(self._document.added(self.model, text, prefill_chunk_size))

    # -- questions -----------------------------------------------------------------------------------------------------

    def ask(self, question: str, max_new_tokens: int = MAX_NEW_TOKENS, **generate_options: Any) -> str:
        """The answer to a question about the document; greedy unless `generate_options` say otherwise.

        Questions see neither each other nor the conversation: each runs on a fork, with its own GDN states.

        Args:
            question: Its text.
            max_new_tokens: Of the answer, which ends before that where the model's generation config says.
            generate_options: See `generate` of the model; nothing that stands for the question itself.

        Raises:
            TypeError: The question is no string, or an option stands for it.
            ValueError: The question has no tokens, `max_new_tokens` below 1, or options that give several sequences.
            CacheStateError: `cache` was used itself.
        """
        check_question("ask", question, max_new_tokens, generate_options)
        child, ids = self._document.asked(question)
        return decoded(self.tokenizer, answer(self.model, child, ids, max_new_tokens, generate_options))

    def ask_many(
        self,
        questions: Sequence[str],
        max_new_tokens: int = MAX_NEW_TOKENS,
        *,
        batch_size: int = 16,
        **generate_options: Any,
    ) -> list[str]:
        """The answers to many questions, each as by `ask`.

        Those of equally many tokens are answered together, but not with stop strings or stopping criteria.

        Args:
            questions, max_new_tokens, generate_options: See `ask`.
            batch_size: Questions answered together at most; each takes a copy of the kept entries.

        Raises:
            TypeError, ValueError, CacheStateError: See `ask`; nothing is answered if a question is wrong.
        """
        check_whole_number("batch_size", batch_size)
        check_questions("ask_many", questions, max_new_tokens, generate_options)
        ids = [self._document.prompt.turn((), question) for question in questions]
        parent, limits = self._document.fork(), [max_new_tokens] * len(ids)
        with tqdm(total=len(ids), desc="questions", unit="question", leave=False, disable=None) as bar:
            (found,) = answer_many(self.model, parent, ids, limits, batch_size, generate_options, bar.update)
        return [decoded(self.tokenizer, answered) for answered in found]

    def stream(
        self, question: str, max_new_tokens: int = MAX_NEW_TOKENS, *, chat: bool = False, **generate_options: Any
    ) -> Iterator[str]:
        """The answer in pieces, as soon as they are known; joined, they are that of `ask` or `chat`.

        All begins with the first piece. Leave the loop early, and the generation ends and the session is as it was. An
        error of the model is raised in the loop. Do not use the model in the loop: it is at work, in another thread.

        Args:
            question, max_new_tokens, generate_options: See `ask`; no beams.
            chat: Whether it is a turn of the conversation, which is kept once the loop has ended by itself.

        Raises:
            TypeError, ValueError, CacheStateError: See `ask` and `chat`; the last one in the loop.
        """
        check_question("stream", question, max_new_tokens, generate_options, more=("streamer",))
        check_bool("chat", chat)
        return self._pieces(question, chat, max_new_tokens, generate_options)

    def _pieces(self, question: str, chat: bool, *how: Any) -> Iterator[str]:
        begun = self._conversation.begin(self.model, question) if chat else None
        child, ids = (begun.child, begun.ids) if begun else self._document.asked(question)
        text = yield from stream(self.model, self.tokenizer, child, ids, *how)
        if begun:
            self._conversation = begun.ended(text, self._conversation)

    # -- the conversation ----------------------------------------------------------------------------------------------

    def chat(self, question: str, max_new_tokens: int = MAX_NEW_TOKENS, **generate_options: Any) -> str:
        """The answer to the next question of a conversation, which sees those before it.

        What the model reads is what the chat template makes of the whole conversation: turns that it drops or rewrites,
        such as reasoning, are read anew without that. If this fails, the conversation is as before.

        Raises:
            TypeError, ValueError: See `ask`, which has the same arguments; or the template refuses the conversation.
            CacheStateError: See `ask`; or the session was changed by something else before the answer ended, or its
                document has no ids.
        """
        check_question("chat", question, max_new_tokens, generate_options)
        begun = self._conversation.begin(self.model, question)
        text = decoded(self.tokenizer, answer(self.model, begun.child, begun.ids, max_new_tokens, generate_options))
        self._conversation = begun.ended(text, self._conversation)
        return text

    @property
    def history(self) -> list[Message]:
        """The conversation so far, as messages with `role` and `content`; without the document. A copy."""
        return list(self._conversation.messages())

    def reset_chat(self) -> None:
        """Forget the conversation; the document stays."""
        self._conversation = Conversation(self._document)

    # -- files and reports ---------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write document and conversation into one file; see `GateSightCache.save`.

        The file holds the document's cache, and as text its last characters and the conversation, whose own caches are
        made anew with the next turn.

        Raises:
            CacheStateError, OSError, ValueError: See there; or template options that are no JSON.
        """
        save(path, self.tokenizer, self._document, self._conversation.turns)

    @classmethod
    def load(
        cls, path: str | Path, model: Any, tokenizer: Any, estimator: str | Path | Scorer | None = None
    ) -> "Session":
        """Open a saved session: the document is not prefilled again, and answers are the same.

        Args:
            path: The file that `save` wrote.
            model, tokenizer: Those it was saved with.
            estimator: As in `open`: the document must have been compacted with it. `view` needs it, answers do not.

        Raises:
            FileNotFoundError, SessionFileError, SessionMismatchError: See `GateSightCache.load`; or another template.
            OSError, ValueError: See `Estimator.from_pretrained`.
        """
        document, turns = load(path, model, tokenizer, None if estimator is None else scorer_from(estimator))
        session = cls(model, tokenizer, document)
        session._conversation = Conversation(document, tuple(turns))
        return session

    def __repr__(self) -> str:
        return f"Session({self.cache!r}, turns={len(self._conversation.turns)})"

    def report(self) -> CacheReport:
        """Lengths, bytes and seconds of the document's cache."""
        return self.cache.report()

    def view(
        self,
        questions: Sequence[str] = (),
        scorers: Mapping[str, Scorer] | None = None,
        max_new_tokens: int = MAX_NEW_TOKENS,
        prefill_chunk_size: int | None = None,
    ) -> Page:
        """What is kept of the document, as a page: `save("kept.html")` it, or let a notebook show it.

        The document is prefilled again, for all kept fractions and for answers from full, kept and random caches.

        Args:
            questions: To be answered by each of these.
            scorers: By name, methods to show beside the session's own; None shows random eviction.
            max_new_tokens, prefill_chunk_size: See `ask` and `open`.

        Raises:
            CacheStateError: The session was loaded without its estimator, has no ids, or was compacted again.
        """
        asked = (questions, scorers, max_new_tokens, prefill_chunk_size)
        return page_of(self.model, self.tokenizer, self._document, *asked)
