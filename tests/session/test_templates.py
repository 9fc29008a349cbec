"""Chat templates: ids of a document and its questions are those of `apply_chat_template` for the whole."""

from datetime import datetime
from typing import Any

import pytest

from gatesight_hf import Session
from gatesight_hf.session.prompts import ChatPrompt, RawPrompt, Turn, prompt_for

from ..helpers import chats
from ..helpers.chats import TEXT, chat_tokenizer, ids_of, messages_of
from ..helpers.models import KeyNorm

pytestmark = [pytest.mark.quick, pytest.mark.core]

QUESTIONS = ["Who keeps the ledger?", " 412 sacks?  ", "(why)", '"Why?"', "…", "\n\nWho?", "7", "东京?", "<think>"]
TOOLS = [{"type": "function", "function": {"name": "weigh", "parameters": {"type": "object", "properties": {}}}}]


def chat_prompt(template: str, system: str | None = None, **options: Any) -> ChatPrompt:
    return ChatPrompt(chat_tokenizer(template), system, options)


DOCUMENTS = {
    "short": "Tin.",
    "long": TEXT * 30,
    "ends with breaks": TEXT + "\n\n\n",
    "begins with spaces": "   \n" + TEXT,
    "ends within a word": TEXT[:-40] + "unfinish",
    "one long word": "x" * 5000,
    "bytes": "Ünïcödé 東京 🙂 " * 90,
    "marks": f"He said {chats.START}user and {chats.THINK} it {chats.NO_THINK}",
}


@pytest.mark.parametrize("document", DOCUMENTS)
@pytest.mark.parametrize("name", chats.TEMPLATES)
def test_ids_are_those_of_the_template_for_the_whole(name, document):
    text = DOCUMENTS[document]
    prompt, context = chat_prompt(chats.TEMPLATES[name]).add(text)
    for question in QUESTIONS:
        whole = messages_of(text, [question.strip()], [])
        expected = ids_of(prompt.tokenizer, whole)
        assert context + prompt.turn((), question) == expected, question


@pytest.mark.parametrize(
    ("name", "system", "options"),
    [
        ("plain", "Be brief.", {}),
        ("reasoning", "Be brief. ", {}),
        ("reasoning", None, {"tools": TOOLS}),
        ("reasoning", "Be brief.", {"tools": TOOLS, "enable_thinking": False}),
        ("dated", None, {}),
    ],
)
def test_variables_pass_and_the_head_is_protected(model, name, system, options):
    tokenizer = chat_tokenizer(chats.TEMPLATES[name])
    session = Session.open(
        model, tokenizer, KeyNorm(), TEXT, system=system, template_options=options, kept_fraction=0.05
    )
    question = QUESTIONS[0]
    expected = ids_of(tokenizer, messages_of(TEXT, [question], [], system), **options)
    ids = session.cache.context.tokens.ids[0].tolist()
    assert expected[: len(ids)] == ids
    shown = tokenizer.decode(ids)
    head = shown[: shown.index(TEXT[:40])]
    assert (system or "").strip() in head and ("weigh" in head) == ("tools" in options) and chats.START in head
    protected = session.cache.options.protected_prefix
    assert tokenizer.decode(ids[:protected]) == head
    for layer in session.cache.attention_layers:
        assert layer.kept_positions[0, :, :protected].tolist() == [list(range(protected))] * 2
        assert layer.kept_positions.shape[2] < protected + 0.1 * len(ids)


def test_first_tokens_of_a_document_are_protected_besides_the_head(model):
    plain, more = (
        Session.open(model, chat_tokenizer(), KeyNorm(), TEXT, protected_prefix=count).cache.options.protected_prefix
        for count in (0, 7)
    )
    assert more == plain + 7 > 7


def test_more_text_belongs_to_the_document(model):
    tokenizer = chat_tokenizer(chats.REASONING)
    session = Session.open(model, tokenizer, KeyNorm(), TEXT, kept_fraction=1.0)
    for text in ("A codicil.", " Another one, " * 60):
        session.add(text)
    ids = session.cache.context.tokens.ids[0].tolist()
    whole = "\n\n".join([TEXT, "A codicil.", " Another one, " * 60])
    expected = ids_of(tokenizer, messages_of(whole, ["Who?"], []))
    assert ids + session._document.prompt.turn((), "Who?") == expected


REFUSED = {
    "upper": (chats.UPPER, {}, r"shows the document 0 times"),
    "twice": (chats.TWICE, {}, "shows the document 2 times"),
    "no system": (chats.DATED, {"system": "Be brief."}, "refuses these messages: No system messages"),
    "edits": ("{{ messages[0].content|replace('a', 'b') if messages[0].content|length > 60 else messages[0].content }}",
              {}, "changes the document"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_template_that_does_not_let_questions_follow_is_an_error_that_says_so(model, case):
    template, options, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"{message}.*chat=False"):
        Session.open(model, chat_tokenizer(template), KeyNorm(), TEXT, **options)
    assert Session.open(model, chat_tokenizer(template), KeyNorm(), TEXT, chat=False).ask("Who?", 2) is not None


LATER = {
    "{% if messages|length > 2 %}{{ raise_exception('One turn only.') }}{% endif %}" + chats.PLAIN: "One turn only",
    chats.LAST_ONLY: "shows the document 0 times",
    chats.COUNTING: "changes what stands before the document",
}


@pytest.mark.parametrize("template", LATER)
def test_a_template_that_does_not_let_turns_follow_says_so_then(model, template):
    session = Session.open(model, chat_tokenizer(template), KeyNorm(), TEXT)
    session.chat("Who?", 2)
    with pytest.raises(ValueError, match=LATER[template]):
        session.chat("Why?", 2)
    assert len(session.history) == 2 and session.ask("Why?", 2) is not None


def test_raw_text_is_joined_as_it_is(model):
    tokenizer = chat_tokenizer(None)
    assert isinstance(prompt_for(tokenizer, None, None, None), RawPrompt)
    assert isinstance(prompt_for(chat_tokenizer(), None, False, None), RawPrompt)
    session = Session.open(model, tokenizer, KeyNorm(), TEXT)
    assert session.cache.context.tokens.ids[0].tolist() == tokenizer(TEXT).input_ids
    prompt = session._document.prompt
    assert prompt.turn((), " Who?") == tokenizer(" Who?").input_ids
    assert prompt.turn((Turn("Who? ", "He"),), "Why?") == tokenizer("Who? He\nWhy?").input_ids


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"chat": True}, ValueError, "has no chat template"),
        ({"system": "x"}, ValueError, "system: raw text has no chat template"),
        ({"template_options": {"a": 1}}, ValueError, "template_options: raw text"),
        ({"system": 3}, TypeError, "system must be one string"),
    ],
)
def test_what_only_a_template_has_is_an_error_without_one(model, arguments, error, message):
    with pytest.raises(error, match=message):
        Session.open(model, chat_tokenizer(None), KeyNorm(), TEXT, **arguments)


@pytest.mark.parametrize("name", ["tokenize", "add_generation_prompt", "chat_template", "continue_final_message"])
def test_options_that_are_no_variables_of_the_template_are_refused(model, name):
    with pytest.raises(TypeError, match=f"template_options: {name} is not a variable"):
        Session.open(model, chat_tokenizer(), KeyNorm(), TEXT, template_options={name: True})
    with pytest.raises(TypeError, match="must be a mapping"):
        Session.open(model, chat_tokenizer(), KeyNorm(), TEXT, template_options=[name])


def test_a_date_in_the_head_stays_that_of_the_opening(model, tmp_path, monkeypatch):
    class Later(datetime):
        @classmethod
        def now(cls, tz=None):  # type: ignore[override]
            return cls(2051, 5, 9)

    tokenizer, path = chat_tokenizer(chats.DATED), tmp_path / "dated.gatesight"
    session = Session.open(model, tokenizer, KeyNorm(), TEXT)
    ids = session.cache.context.tokens.ids[0].tolist()
    session.chat("Who?", 3)
    with monkeypatch.context() as patch:
        patch.setattr("transformers.utils.chat_template_utils.datetime", Later)
        assert "2051" in tokenizer.apply_chat_template(messages_of(TEXT, ["Who?"], []), tokenize=False)
        session.chat("Who?", 3)
        session.save(path)
        loaded = Session.load(path, model, tokenizer)
        assert loaded.chat("Why?", 3) == session.chat("Why?", 3)
    assert session.cache.context.tokens.ids[0].tolist() == ids and "2051" not in tokenizer.decode(ids)


def test_a_document_beyond_the_model_is_said(model):
    most = model.config.max_position_embeddings
    model.config.max_position_embeddings = 100
    try:
        with pytest.warns(UserWarning, match=r"tokens, and the model was made for 100"):
            Session.open(model, chat_tokenizer(), KeyNorm(), TEXT * 3)
    finally:
        model.config.max_position_embeddings = most
