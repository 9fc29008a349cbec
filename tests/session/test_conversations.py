"""Conversations: what the model has read is what the template makes of them, however it rewrites earlier turns."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from gatesight_hf import CacheStateError, GateSightCache, Session, SessionFileError, SessionMismatchError
from gatesight_hf.files.tensor_files import TensorFile
from gatesight_hf.session.conversation import Begun, Conversation
from gatesight_hf.session.prompts import Turn

from ..helpers import chats
from ..helpers.chats import TEXT, chat_tokenizer, ids_of, messages_of
from ..helpers.models import KeyNorm
from ..helpers.running import random_ids
from ..helpers.saved_files import changed_cache

pytestmark = pytest.mark.core

#: Question, and what is answered, as ids would be chosen: reasoning, or none, or one that never ends.
TURNS = [
    ("Who keeps the ledger?", "It says so at the begin.</think>\n\nThe harbour master."),
    ("What did it bring?", "Tin.</think>Coffee from Santos."),
    ("Nobody knows?", "Nobody knows why"),
    ("412?", "</think>\n\nYes."),
]


class Say(LogitsProcessor):
    """Has `generate` choose the tokens of a text and end."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        ids = tokenizer(text + chats.END, add_special_tokens=False).input_ids
        self.ids = itertools.chain(ids, itertools.repeat(tokenizer.eos_token_id))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -1e9)
        forced[:, next(self.ids)] = 0.0
        return forced


def say(session: Session, question: str, answer: str, **options: Any) -> str:
    return session.chat(question, 60, logits_processor=[Say(session.tokenizer, answer)], **options)


def begun(session: Session, question: str) -> Begun:
    return session._conversation.begin(session.model, question)


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """Tokens of each forward."""
    lengths: list[int] = []
    handle = model.get_input_embeddings().register_forward_hook(lambda _m, given, _o: lengths.append(given[0].shape[1]))
    try:
        yield lengths
    finally:
        handle.remove()


def opened(model: Any, template: str | None = chats.REASONING, **options: Any) -> Session:
    given = {"kept_fraction": 1.0, **options}
    return Session.open(model, chat_tokenizer(template), KeyNorm(), TEXT * 2, **given)


@pytest.mark.parametrize(
    ("name", "options"),
    [("plain", {}), ("reasoning", {}), ("reasoning", {"enable_thinking": False})],
)
def test_logits_of_each_turn_equal_a_fresh_run_on_the_templates_text(model, unhooked, name, options):
    session = opened(model, chats.TEMPLATES[name], template_options=options)
    tokenizer, answers = session.tokenizer, []
    for number, (question, answer) in enumerate([*TURNS, ("Why?", "")]):
        questions = [asked for asked, _ in TURNS[:number]] + [question]
        whole = ids_of(tokenizer, messages_of(TEXT * 2, questions, answers), **options)
        _, _, cache, child, ids = begun(session, question)
        assert child.context.tokens.ids[0].tolist() + ids == whole
        logits = model(torch.tensor([ids]), past_key_values=child).logits[0]
        expected = unhooked(torch.tensor([whole])).logits[0, -len(ids) :]
        assert torch.allclose(logits, expected, atol=2e-4), (logits - expected).abs().max()
        answers.append(say(session, question, answer))
        assert answers[-1] == answer
        # A model's own choice, too: this turn asked again, in a run of transformers alone.
        new = unhooked.generate(torch.tensor([whole]), max_new_tokens=3, do_sample=False)[0, len(whole) :]
        again = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones((1, len(whole))), past_key_values=cache.fork(),
            max_new_tokens=3, do_sample=False,
        )  # fmt: skip
        assert again[0, len(ids) :].tolist() == new.tolist()
    assert [message["content"] for message in session.history[::2]] == [asked for asked, _ in [*TURNS, ("Why?", "")]]


def test_a_turn_reads_what_is_new_and_rewritten_turns_only(model):
    for template in (chats.PLAIN, chats.REASONING):
        session = opened(model, template)
        for number, (question, answer) in enumerate(TURNS):
            with counted(model) as lengths:
                say(session, question, answer)
            read = sum(lengths) - len(session.tokenizer(answer).input_ids)
            again = TURNS[number - 1 : number] if template is chats.REASONING else []
            turns = messages_of("", [*(asked for asked, _ in again), question], [said for _, said in again])
            assert read <= len(ids_of(session.tokenizer, turns)) + 4, (number, lengths)


def test_reasoning_is_gone_from_what_later_turns_see(model):
    session = opened(model)
    for question, answer in TURNS[:2]:
        say(session, question, answer)
    cache = begun(session, "Why?").before
    shown = session.tokenizer.decode(cache.context.tokens.ids[0])
    assert "says so" not in shown and "The harbour master." in shown and "Coffee from Santos." in shown
    assert session.history[1]["content"] == TURNS[0][1], "history is what was said"


@pytest.mark.parametrize("name", ["plain", "reasoning"])
def test_old_turns_never_stay_twice_in_a_cache_that_recompacts(model, name):
    session = opened(model, chats.TEMPLATES[name], kept_fraction=0.3, recompact_every=12)
    for number, (question, answer) in enumerate(TURNS):
        say(session, question, answer)
        said = [asked for asked, _ in TURNS[: number + 1]]
        _, _, cache, _, ids = begun(session, "Why?")
        answers = [answer for _, answer in TURNS[: number + 1]]
        whole = ids_of(session.tokenizer, messages_of(TEXT * 2, [*said, "Why?"], answers))
        assert cache.context.tokens.ids[0].tolist() + ids == whole
        for layer in cache.attention_layers:
            held = layer.kept_positions[0]
            assert bool((held.diff(dim=-1) > 0).all()) and layer.tail_length < 12 + len(whole)
            assert layer.kept_length + layer.tail_length < 0.5 * len(whole) + 40


def test_questions_do_not_see_the_conversation(model):
    session = opened(model)
    before = session.ask("What is it?", 8)
    say(session, *TURNS[0])
    assert session.ask("What is it?", 8) == before
    session.reset_chat()
    assert session.history == []
    other = opened(model)
    assert session.chat("What is it?", 8) == other.chat("What is it?", 8) == before


def test_history_is_a_copy(model):
    session = opened(model)
    say(session, *TURNS[0])
    session.history.clear()
    session.history[0]["content"] = "x"
    assert session.history[0] == {"role": "user", "content": TURNS[0][0]}


def test_raw_text_has_conversations_too(model, unhooked):
    session = opened(model, None)
    say(session, "Who keeps it?", "The harbour master.")
    whole = session.tokenizer(TEXT * 2 + "Who keeps it? The harbour master.\nWhy?").input_ids
    _, _, cache, _, ids = begun(session, "Why?")
    assert cache.context.tokens.ids[0].tolist() + ids == whole
    logits = model(torch.tensor([ids]), past_key_values=cache.fork()).logits[0, -1]
    assert torch.allclose(logits, unhooked(torch.tensor([whole])).logits[0, -1], atol=2e-4)


def test_a_failing_turn_leaves_the_conversation_as_it_was(model, monkeypatch):
    session, other = opened(model), opened(model)
    for one in (session, other):
        say(one, *TURNS[0])
    with monkeypatch.context() as patch:
        patch.setattr(model.lm_head, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            session.chat("Why?", 5)
        with pytest.raises(ZeroDivisionError):
            list(session.stream("Why?", 5, chat=True))
    with pytest.raises(ValueError, match="one answer"):
        session.chat("Why?", 5, do_sample=True, num_return_sequences=2)
    assert session.history == other.history and session.chat("Why?", 5) == other.chat("Why?", 5)


def test_beams_go_on_too(model):
    session = opened(model)
    for question, _ in TURNS[:3]:
        session.chat(question, 4, num_beams=3)
    assert len(session.history) == 6 and begun(session, "Why?").before.batch_size == 1


@pytest.mark.parametrize("change", ["chat", "stream", "add", "reset_chat"])
def test_a_turn_that_the_session_has_left_behind_is_no_part_of_it(model, change):
    session = opened(model, kept_fraction=0.4)
    pieces = session.stream("Who?", 6, chat=True)
    next(pieces)
    changes = {
        "chat": lambda: session.chat("Why?", 4),
        "stream": lambda: list(session.stream("Why?", 4, chat=True)),
        "add": lambda: session.add("A codicil says that all is otherwise."),
        "reset_chat": session.reset_chat,
    }
    changes[change]()
    before = session.history
    with pytest.raises(CacheStateError, match="changed before the answer"):
        list(pieces)
    assert session.history == before
    say(session, *TURNS[0])
    text = TEXT * 2 + ("\n\nA codicil says that all is otherwise." if change == "add" else "")
    asked = [message["content"] for message in session.history[::2]]
    answers = [message["content"] for message in session.history[1::2]]
    *_, child, ids = begun(session, "7?")
    whole = ids_of(session.tokenizer, messages_of(text, [*asked, "7?"], answers))
    assert child.context.tokens.ids[0].tolist() + ids == whole


def test_what_is_made_and_not_read_has_not_begun(model):
    session, other = opened(model, kept_fraction=0.4), opened(model, kept_fraction=0.4)
    streams = [session.stream(question, 6, chat=True) for question in ("Who?", "Why?")]
    for one in (session, other):
        one.add(" A codicil says that all is otherwise.")
    assert ["".join(pieces) for pieces in streams] == [other.chat(question, 6) for question in ("Who?", "Why?")]
    assert session.history == other.history


def test_a_cache_that_was_used_itself_is_refused(model):
    session = opened(model, kept_fraction=0.4)
    model(torch.tensor([[5, 6]]), past_key_values=session.cache)
    for use in (session.ask, session.chat, lambda text: session.ask_many([text]), session.add):
        with pytest.raises(CacheStateError, match=r"Use forks of session\.cache"):
            use("Who?")
    with pytest.raises(CacheStateError, match=r"Use forks of session\.cache"):
        next(session.stream("Who?"))


def test_a_document_of_embeddings_has_questions_and_no_turns(model):
    cache = GateSightCache(KeyNorm(), model, kept_fraction=0.5)
    embedded = model.get_input_embeddings()(random_ids(40))
    with torch.no_grad():
        model(inputs_embeds=embedded, past_key_values=cache)
    cache.compact()
    session = Session(model, chat_tokenizer(None), cache)
    for use in (session.chat, lambda text: list(session.stream(text, chat=True))):
        with pytest.raises(CacheStateError, match="embeddings"):
            use("Who?")
    assert session.history == [] and session.ask("Who?", 4)


@pytest.mark.parametrize("question", ["\n\nWho keeps it?", "Who keeps it?\n\n", "  412? "])
@pytest.mark.parametrize("template", ["plain", "reasoning"])
def test_spaces_around_a_question_block_no_later_turn(model, question, template):
    session = opened(model, chats.TEMPLATES[template])
    say(session, question, "The harbour master.")
    assert session.history[0]["content"] == question.strip()
    *_, child, ids = begun(session, "Why?")
    whole = ids_of(session.tokenizer, messages_of(TEXT * 2, [question.strip(), "Why?"], ["The harbour master."]))
    assert child.context.tokens.ids[0].tolist() + ids == whole


def test_turns_are_read_in_chunks_of_the_document(model, tmp_path):
    session = opened(model, prefill_chunk_size=16)
    session._conversation = Conversation(session._document, (Turn("Who keeps the ledger? " * 9, "None of them. " * 9),))
    with counted(model) as lengths:
        session.chat("Why?", 1)
    assert max(lengths[:-1]) == 16 and len(lengths) > 4


def test_a_document_is_not_added_to_within_a_conversation(model):
    session = opened(model)
    say(session, *TURNS[0])
    with pytest.raises(CacheStateError, match="reset_chat"):
        session.add("More.")
    session.reset_chat()
    session.add("More.")


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [None, chats.REASONING])
def test_a_conversation_goes_on_from_a_file(model, tmp_path, template):
    path, system = tmp_path / "doc.gatesight", None if template is None else "Be brief."
    options = {} if template is None else {"template_options": {"enable_thinking": False}, "system": system}
    session = opened(model, template, kept_fraction=0.4, **options)
    for question, answer in TURNS[:2]:
        say(session, question, answer)
    session.save(path)
    loaded = Session.load(path, model, chat_tokenizer(template))
    assert loaded.history == session.history
    assert loaded.ask("What is it?", 6) == session.ask("What is it?", 6)
    assert loaded._document.prompt.turn((), "Why?") == session._document.prompt.turn((), "Why?")
    for question, answer in TURNS[2:]:
        assert say(loaded, question, answer) == say(session, question, answer)
    ours, theirs = (begun(one, "Why?") for one in (session, loaded))
    assert ours.ids == theirs.ids and ours.before.context.tokens.ids.equal(theirs.before.context.tokens.ids)
    loaded.reset_chat()
    loaded.add("More of it.")


def test_another_template_is_refused(model, tmp_path):
    path = tmp_path / "doc.gatesight"
    opened(model, chats.PLAIN).save(path)
    for template in (chats.REASONING, None, chats.TWICE):
        with pytest.raises(SessionMismatchError, match="another chat template"):
            Session.load(path, model, chat_tokenizer(template))
    opened(model, None).save(path)
    assert Session.load(path, model, chat_tokenizer(chats.PLAIN)).ask("Who?", 2) is not None, "raw text needs none"


def test_options_that_are_no_json_are_not_saved(model, tmp_path):
    def weigh(ship: str) -> int:
        """Weigh a ship.

        Args:
            ship: Its name.
        """
        return len(ship)

    session = opened(model, template_options={"tools": [weigh]})
    with pytest.raises(ValueError, match="template_options cannot be saved"):
        session.save(tmp_path / "x")


PROMPT = {"kind": "chat", "system": None, "options": {}, "tail": "x", "tail_tokens": 1, "template": "0"}
HOSTILE = [
    {},
    {"prompt": [], "turns": []},
    {"prompt": {"kind": "raw"}, "turns": {}},
    {"prompt": {"kind": "raw"}, "turns": [["a"]]},
    {"prompt": {"kind": "raw"}, "turns": [["a", 3]]},
    {"prompt": {"kind": "raw", "more": 1}, "turns": []},
    {"prompt": {"kind": "odd"}, "turns": []},
    {"prompt": {"kind": ["raw"]}, "turns": []},
    {"prompt": {**PROMPT, "tail_tokens": True}, "turns": []},
    {"prompt": {**PROMPT, "system": 3}, "turns": []},
    {"prompt": {**PROMPT, "options": {"chat_template": "{{ 1 }}"}}, "turns": []},
    {"prompt": {**PROMPT, "options": {"tools": 3}}, "turns": []},
    {"prompt": "same", "turns": [], "more": 1},
    {"prompt": "same", "tail_tokens": 10**9},
    {"prompt": "same", "tail_tokens": -5},
    {"prompt": "same", "tail": ""},
    {"prompt": "same", "tail": "Another document's end.\n\n"},
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(HOSTILE)))
def test_files_that_say_what_cannot_be_are_refused(model, tmp_path, case, monkeypatch):
    path, session = tmp_path / "doc.gatesight", opened(model, chats.PLAIN)
    prompt, content = session._document.prompt, dict(HOSTILE[case])
    if content.get("prompt") == "same":
        changes = {name: content.pop(name) for name in ("tail", "tail_tokens") if name in content}
        content = {"turns": [], **content, "prompt": {**prompt.saved(), **changes}}
    monkeypatch.setattr("gatesight_hf.session.session.save", _saving(content))
    session.save(path)
    with TensorFile(path) as file:
        assert "session" in file.infos
    with pytest.raises((SessionFileError, SessionMismatchError), match=str(path)):
        Session.load(path, model, session.tokenizer)


def _bytes(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


RAW = b'{"prompt": {"kind": "raw"}, "turns": [["a", "%s"]]}'
TENSORS = {
    "floats": torch.ones(4),
    "two dimensions": _bytes(RAW).view(1, -1),
    "empty": _bytes(b" ")[:0],
    "no JSON": _bytes(b"{"),
    "no object": _bytes(b"[]"),
    "no UTF-8": _bytes(RAW.replace(b"%s", b"\xff")),
    "surrogates": _bytes(RAW.replace(b"%s", rb"\ud800")),
    "a key twice": _bytes(b'{"turns": [], "turns": [], "prompt": {"kind": "raw"}}'),
    "no number": _bytes(RAW.replace(b'"%s"', b"NaN")),
    "nested": _bytes(b'{"turns": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
}


@pytest.mark.parametrize("what", TENSORS)
def test_bytes_that_are_no_session_are_refused(model, tmp_path, what):
    path, session = tmp_path / "doc.gatesight", opened(model, chats.PLAIN)
    session.save(path)
    Session.load(path, model, session.tokenizer)
    changed_cache(path, path, lambda tensors, _: tensors.update(session=TENSORS[what]))
    with pytest.raises(SessionFileError, match=str(path)):
        Session.load(path, model, session.tokenizer)


def test_a_longer_session_than_is_read_is_not_written(model, tmp_path, monkeypatch):
    monkeypatch.setattr("gatesight_hf.cache.storage.SESSION_LIMIT", 100)
    with pytest.raises(ValueError, match="at most 100 can be read"):
        opened(model).save(tmp_path / "x")


def _saving(content: dict[str, Any]) -> Any:
    from gatesight_hf.cache import saving

    return lambda path, tokenizer, document, turns: saving.save(document.cache.context, path, tokenizer, content)
