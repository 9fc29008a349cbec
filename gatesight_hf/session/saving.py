"""A session's part of the file that holds its document's cache: how texts became ids, and the conversation.

In the metadata of `gatesight_hf.cache.storage`, `session` is a JSON object of `prompt`, see `Prompt.saved`, and
`turns`, a list of pairs of question and answer. The file is untrusted.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..cache import saving
from ..cache.cache import GateSightCache
from ..checks import check_characters
from ..errors import SessionFileError, SessionMismatchError
from ..scoring.interface import Scorer
from .document import Document
from .prompts import CHAT, RAW, ChatPrompt, RawPrompt, Turn

#: What `ChatPrompt.saved` gives, and of which type.
_OF_CHAT: dict[str, tuple[type, ...]] = {
    "kind": (str,),
    "system": (str, type(None)),
    "options": (dict,),
    "tail": (str,),
    "tail_tokens": (int,),
    "template": (str,),
}


def save(path: str | Path, tokenizer: Any, document: Document, turns: Sequence[Turn]) -> None:
    """See `Session.save`."""
    session = {"prompt": document.prompt.saved(), "turns": [list(turn) for turn in turns]}
    saving.save(document.cache.context, path, tokenizer, session)


def load(path: str | Path, model: Any, tokenizer: Any, scorer: Scorer | None) -> tuple[Document, list[Turn]]:
    """See `Session.load`. Files of caches without a session are of raw text."""
    cache, session = saving.load(GateSightCache, path, model, tokenizer, scorer)
    raw = Document(cache, RawPrompt(tokenizer, begun=True))
    if session is None:
        return raw, []
    try:
        _check(session)
        turns, saved, ids = [Turn(*pair) for pair in session["turns"]], session["prompt"], cache.context.tokens.ids
        if saved["kind"] == RAW:
            return raw, turns
        if ids is None:
            raise ValueError("it holds no ids")
        prompt = ChatPrompt(tokenizer, saved["system"], saved["options"])
        same = bool(getattr(tokenizer, "chat_template", None)) and prompt.is_template(saved["template"])
        if same:
            return Document(cache, prompt.behind(saved["tail"], saved["tail_tokens"], ids[0].tolist())), turns
    except (ValueError, TypeError) as error:
        raise SessionFileError(f"{path}: what it says of its session cannot be: {error}") from error
    raise SessionMismatchError(
        f"{path}: saved with another chat template than the tokenizer has now. Set tokenizer.chat_template to that "
        "one, or prefill the document again."
    )


def _check(session: dict[str, Any]) -> None:
    """Raises ValueError unless it has the form that the format says."""
    if set(session) != {"prompt", "turns"} or not isinstance(session["prompt"], dict):
        raise ValueError(f"its parts are {sorted(session)[:5]}")
    turns = session["turns"]
    pairs = isinstance(turns, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in turns)
    if not pairs:
        raise ValueError("turns are pairs of texts")
    for pair in turns:
        for text in pair:
            check_characters("a text of its turns", text)
    prompt = session["prompt"]
    kinds: dict[str, dict[str, tuple[type, ...]]] = {RAW: {"kind": (str,)}, CHAT: _OF_CHAT}
    expected = kinds.get(str(prompt.get("kind")))
    if expected is None or set(prompt) != set(expected):
        raise ValueError(f"a prompt of {sorted(prompt)[:8]}")
    for text in (prompt.get("tail"), prompt.get("system")):
        if isinstance(text, str):
            check_characters("a text of its prompt", text)
    if wrong := [name for name, types in expected.items() if type(prompt[name]) not in types]:
        raise ValueError(f"{wrong[0]} of its prompt is a {type(prompt[wrong[0]]).__name__}")
