"""The same conversation about a document in a `Session`, in vLLM, over its server, and in transformers' own `generate`.

Of the bundled model, in bf16, on questions that it answers surely; ids are compared with those of the chat template.
"""

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="vLLM is not installed: see `make test-vllm`")

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1")

from vllm import SamplingParams

from gatesight_hf import Session, reference
from gatesight_hf.reference import ESTIMATOR_PATH, MODEL_PATH
from gatesight_hf.session.prompts import ChatPrompt
from gatesight_hf.vllm import GateSightLLM
from gatesight_hf.vllm.chats import Rendered, turns_of
from gatesight_hf.vllm.pages import Pages
from gatesight_hf.vllm.server import SessionMiddleware

from ..helpers import chats
from ..helpers.chats import TEXT, chat_tokenizer, ids_of, messages_of
from ..helpers.vllm_server import DOCUMENTS, Server, serving

SYSTEM = "the text is provided . find the number mentioned in the text ."
DOCUMENT = DOCUMENTS["one"].text
QUESTIONS = [question.text for question in DOCUMENTS["one"].questions[:3]]
RIGHT = [" ".join(question.answer) for question in DOCUMENTS["one"].questions[:3]]
MOST = 6
GREEDY = SamplingParams(temperature=0, max_tokens=MOST)
#: Says who speaks, in words that the model knows; `thinking` is a variable, which the generation prompt depends on.
TEMPLATE = (
    "{%- for m in messages %}{{ m.role|replace('system', 'text')|replace('user', 'question')"
    "|replace('assistant', 'answer') + ' : ' + m.content|trim + ' .\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ 'answer :' }}"
    "{%- if thinking is defined and not thinking %}{{ ' the number is :' }}{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def model() -> Any:
    return reference.load_model(dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return reference.load_tokenizer()


@pytest.fixture(scope="module")
def engine() -> Any:
    sizes = {"max_model_len": 2048, "num_gpu_blocks_override": 128}
    return GateSightLLM(MODEL_PATH, ESTIMATOR_PATH, dtype="bfloat16", enforce_eager=True, **sizes)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--trust-request-chat-template") as running:
        yield running


def opening(document: str = DOCUMENT) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": document}]


def conversation(answers: list[str], document: str = DOCUMENT) -> list[dict[str, str]]:
    """What a user of transformers or vLLM writes before the next answer."""
    return messages_of(document, QUESTIONS[: len(answers) + 1], answers, SYSTEM)


def after_document(answers: list[str]) -> list[dict[str, str]]:
    """The same without the document."""
    return [{"role": "user", "content": QUESTIONS[0]}, *conversation(answers)[2:]]


def told(response: Any) -> tuple[list[int], list[int]]:
    """Ids of prompt and answer of a server's chat completion."""
    assert response.status_code == 200, response.text
    found = response.json()
    return found["prompt_token_ids"], found["choices"][0]["token_ids"]


def offline(output: Any) -> tuple[list[int], list[int]]:
    return list(output.prompt_token_ids), list(output.outputs[0].token_ids)


@contextmanager
def kept_positions() -> Iterator[list[Tensor]]:
    """Of each layer `[H, K]`, as the engine compacts them."""
    found: list[Tensor] = []
    plain = Pages.compact

    def compact(self: Pages, blocks: Tensor, kept: Tensor) -> None:
        found.append(kept)
        plain(self, blocks, kept)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pages, "compact", compact)
        yield found


# -- the same everywhere -----------------------------------------------------------------------------------------------


def test_a_conversation_is_the_same_everywhere(model, tokenizer, engine, server):
    answers: list[str] = []
    session = Session.open(model, tokenizer, ESTIMATOR_PATH, DOCUMENT, system=SYSTEM, kept_fraction=1.0)
    opened = engine.open(opening(), kept_fraction=1.0)
    reply = server.chat(opening(), {"gatesight": "open", "session": "all", "kept_fraction": 1.0}, stream=True)
    assert reply.status_code == 200, reply.text
    assert reply.json()["object"] == "chat.completion" and reply.json()["choices"][0]["message"]["content"] == ""
    about = reply.json()["kv_transfer_params"]
    assert (about["session"], about["tokens"], about["kept"]) == ("all", opened.tokens, opened.kept)
    for number, right in enumerate(RIGHT[:2]):
        ids = ids_of(tokenizer, conversation(answers))
        found = model.generate(torch.tensor([ids]), max_new_tokens=MOST, do_sample=False)[0, len(ids) :].tolist()
        text = tokenizer.decode(found, skip_special_tokens=True).strip()
        assert text == right
        (plain,) = engine.llm.generate([{"prompt_token_ids": ids}], GREEDY, use_tqdm=False)
        (ours,) = engine.ask(opened, [after_document(answers)], GREEDY)
        assert offline(plain) == offline(ours) == (ids, found)
        assert told(server.chat(conversation(answers))) == (ids, found)
        assert told(server.chat(conversation(answers), {"gatesight": "ask", "session": "all"})) == (ids, found)
        assert session.chat(QUESTIONS[number], MOST).strip() == text
        answers.append(text)
    for question, output in zip(QUESTIONS, engine.ask(opened, QUESTIONS, GREEDY), strict=True):
        assert session.ask(question, MOST) == tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)
    assert engine.drop(opened)


@pytest.mark.parametrize("variables", [{}, {"thinking": False}, {"thinking": True}], ids=str)
def test_variables_of_a_template_reach_it(engine, server, monkeypatch, variables):
    tokenizer = reference.load_tokenizer()
    tokenizer.chat_template = TEMPLATE
    monkeypatch.setattr(engine.llm, "get_tokenizer", lambda: tokenizer)  # the engine's is many copies
    options = {"chat_template": TEMPLATE, "chat_template_kwargs": variables}
    opened = engine.open(opening(), kept_fraction=1.0, template_options=variables)
    about = {"gatesight": "open", "session": "variables", "kept_fraction": 1.0}
    assert server.chat(opening(), about, **options).json()["kv_transfer_params"]["tokens"] == opened.tokens
    for answers in ([], ["7 8"], ["7 8", "the number is 4"]):
        ids = ids_of(tokenizer, conversation(answers), **variables)
        about = {"gatesight": "ask", "session": "variables"}
        (ours,) = engine.ask(opened, [after_document(answers)], GREEDY)
        assert offline(ours)[0] == told(server.chat(conversation(answers), about, **options))[0] == ids
    engine.drop(opened)


def test_what_stands_before_the_document_stays(engine, tokenizer, server):
    head = len(tokenizer(SYSTEM).input_ids)
    options = {"kept_fraction": 0.05, "whole_blocks": False}
    kept = {}
    for own in (0, 5):
        with kept_positions() as positions:
            session = engine.open(opening(), protected_prefix=own, **options)
        for of_layer in positions:
            assert all(set(range(head + own)) <= set(of_head.tolist()) for of_head in of_layer)
        about = {"gatesight": "open", "session": "head", "protected_prefix": own, **options}
        assert server.chat(opening(), about).json()["kv_transfer_params"]["kept"] == session.kept
        kept[own] = sum(session.kept)
        engine.drop(session)
    with kept_positions() as positions:
        engine.drop(engine.open(session.token_ids, **options))
    assert not all(set(range(head)) <= set(of_head.tolist()) for of_layer in positions for of_head in of_layer)
    assert kept[5] > kept[0]


def test_answers_of_compacted_documents_are_those_of_a_session(model, tokenizer, engine, server):
    """The budget is exact, so that both keep as much."""
    options = {"kept_fraction": 0.5, "whole_blocks": False}
    session = Session.open(model, tokenizer, ESTIMATOR_PATH, DOCUMENT, system=SYSTEM, kept_fraction=0.5)
    opened = engine.open(opening(), **options)
    server.chat(opening(), {"gatesight": "open", "session": "half", **options})
    assert opened.kept == [layer.kept_length for layer in session.cache.attention_layers]
    for question, right in zip(QUESTIONS, RIGHT, strict=True):
        messages = messages_of(DOCUMENT, [question], [], SYSTEM)
        _, served = told(server.chat(messages, {"gatesight": "ask", "session": "half"}))
        (ours,) = engine.ask(opened, [question], GREEDY)
        assert offline(ours)[1] == served
        assert (
            session.ask(question, MOST).strip() == tokenizer.decode(served, skip_special_tokens=True).strip() == right
        )
    engine.drop(opened)


# -- what cannot be ----------------------------------------------------------------------------------------------------


def test_messages_that_are_no_document_or_no_question_are_errors_that_say_so(engine, monkeypatch):
    user, assistant = {"role": "user", "content": "the boat"}, {"role": "assistant", "content": "7"}
    for messages in ([assistant], [user, user], [opening()[0]], [user, assistant, user]):
        with pytest.raises(ValueError, match="Messages that open a session are the document"):
            engine.open(messages)
    with pytest.raises(ValueError, match="A message has a role and a content"):
        engine.open([{"role": "user", "content": [{"type": "text", "text": "the boat"}]}])
    with pytest.raises(ValueError, match="template_options: text and token ids"):
        engine.open(DOCUMENT, template_options={"thinking": False})
    with pytest.raises(TypeError, match="add_generation_prompt is not a variable"):
        engine.open(opening(), template_options={"add_generation_prompt": False})
    raw = engine.open(DOCUMENT)
    with pytest.raises(ValueError, match="Messages ask sessions that messages opened"):
        engine.ask(raw, [[user]])
    engine.drop(raw)
    opened = engine.open(opening())
    for messages in ([assistant], [user, assistant], [user, user, user], [opening()[0], user]):
        with pytest.raises(ValueError, match="Messages that ask a session are"):
            engine.ask(opened, [messages])
    engine.drop(opened)
    monkeypatch.setattr(engine.llm.get_tokenizer(), "chat_template", None)
    with pytest.raises(ValueError, match="has no chat template for messages"):
        engine.open(opening())


def test_the_server_says_which_messages_open_no_session(server):
    def error(messages: list[Any], about: dict[str, Any] | None = None, **options: Any) -> str:
        response = server.chat(messages, {"gatesight": "open", "session": "none", **(about or {})}, **options)
        assert response.status_code == 400, response.text
        return str(response.json()["error"]["message"])

    assistant = {"role": "assistant", "content": "7"}
    assert "end with the document as a user message" in error([*opening(), assistant])
    assert "the document, has no text" in error([{"role": "user", "content": " "}])
    assert "the document, has no text" in error([{"role": "user", "content": []}])
    assert "messages" in error([])
    assert "kept_fraction must be in (0, 1]" in error(opening(), {"kept_fraction": 2})
    assert "does not show the document once" in error(opening(), chat_template="{{ messages[0].content }}")
    refused = "{{ raise_exception('No system messages.') }}"
    assert "No system messages." in error(opening(), chat_template=refused)
    assert "maximum context length" in error(opening(DOCUMENT * 3))
    assert server.chat(opening(), {"gatesight": "open", "session": "none"}, model="other").status_code == 404
    assert server.client.get("/gatesight/sessions/none").status_code == 404
    parts = [{"type": "text", "text": SYSTEM}, {"type": "text", "text": DOCUMENT}]
    assert (
        server.chat([{"role": "user", "content": parts}], {"gatesight": "open", "session": "parts"}).status_code == 200
    )
    parts[1]["text"] += f"\n\n{QUESTIONS[0]}"
    _, found = told(server.chat([{"role": "user", "content": parts}], {"gatesight": "ask", "session": "parts"}))
    assert len(found) > 1


def test_a_server_without_tokenize_says_so():
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps({"detail": "Not Found"}).encode()})

    async def receive() -> Any:
        body = {"messages": opening(), "kv_transfer_params": {"gatesight": "open", "session": "one"}}
        return {"type": "http.request", "body": json.dumps(body).encode()}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    asyncio.run(SessionMiddleware(app)(scope, receive, send))
    assert sent[0]["status"] == 400 and b"this server has no /tokenize" in sent[1]["body"]


# -- contexts of templates ---------------------------------------------------------------------------------------------

DOCUMENTS_TOLD = [TEXT, "  A ledger.", "412 sacks", "The text. (It was raining.)\n\n", "Another text.\n" * 300]


def rendered(tokenizer: Any, messages: list[Any], **options: Any) -> Rendered:
    async def render(messages: list[Any]) -> list[int]:
        return ids_of(tokenizer, messages, **options)

    return asyncio.run(Rendered.of(messages, render))


@pytest.mark.parametrize("document", DOCUMENTS_TOLD, ids=range(len(DOCUMENTS_TOLD)))
@pytest.mark.parametrize("name", ["plain", "reasoning", "dated"])
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}], ids=str)
def test_what_a_server_renders_is_what_the_prompt_of_a_session_is(name, document, options):
    tokenizer, system = chat_tokenizer(chats.TEMPLATES[name]), None if name == "dated" else "Be brief."
    found = rendered(tokenizer, [*messages_of(document, [""], [], system)[:-1], user(document)], **options)
    prompt, ids = ChatPrompt(tokenizer, system, options).add(document)
    assert found.ids == ids and found.before == prompt.protected(ids) > 0
    for answers in ([], ["Tin."], ["Tin.", "So </think>Coffee."]):
        questions = ["Who keeps the ledger?", "Why?", "(412?)"][: len(answers) + 1]
        whole = messages_of(document, questions, answers, system)
        after = [{**whole[system is not None], "content": questions[0]}, *whole[1 + (system is not None) :]]
        assert ids + prompt.turn(*turns_of(after)) == ids_of(tokenizer, whole, **options)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    "template", [chats.TWICE, "{{ messages[-1].content[-40:] }}", "{{ start + messages[0].role }}"]
)
def test_a_template_in_which_no_question_can_follow_is_refused(template):
    with pytest.raises(ValueError, match="does not show the document once"):
        rendered(chat_tokenizer(template), [user(TEXT)])
