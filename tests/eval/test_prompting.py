"""Items become token ids: plain or in a chat template, truncated in the middle, with the template's header whole."""

from typing import Any

import pytest

from gatesight_eval.suites.items import Item, Question
from gatesight_eval.suites.prompting import Prompter, truncate_middle
from gatesight_hf.reference import load_tokenizer

from ..helpers.texts import FOOTER, HEADER, character_tokenizer, text_of

pytestmark = pytest.mark.quick

CONTEXT = "one needle is 4821 . " * 6
QUESTION = Question("What is it?", ("4821",), 7, "exact_match", answer_prefix=" It is")


def item(context: str = CONTEXT, *questions: Question, **details: Any) -> Item:
    return Item("an-item", "toy", "t", "f", context, questions or (QUESTION,), details)


def test_truncation_keeps_head_and_tail():
    for length in range(12):
        ids = list(range(length))
        for maximum in range(2, 13):
            kept = truncate_middle(ids, maximum)
            if length <= maximum:
                assert kept == ids
            else:
                half = maximum // 2
                assert len(kept) == 2 * half
                assert kept[:half] == ids[:half]
                assert kept[half:] == ids[length - half :]
    with pytest.raises(ValueError, match="at least 2"):
        truncate_middle([1, 2, 3], 1)


def test_without_a_template_texts_are_concatenated():
    tokenizer = character_tokenizer()
    prompter = Prompter(tokenizer, chat_template=False)
    context = prompter.context_ids(item())
    assert text_of(tokenizer, context.ids) == "<s>" + CONTEXT
    assert (context.tokens_before, context.truncated, context.protected_prefix) == (len(CONTEXT) + 1, False, 0)
    assert text_of(tokenizer, prompter.question_ids(QUESTION)) == "What is it? It is"


def test_no_token_is_put_before_where_the_tokenizer_puts_none():
    tokenizer = character_tokenizer(begin=False)
    assert text_of(tokenizer, Prompter(tokenizer, chat_template=False).context_ids(item()).ids) == CONTEXT


def test_with_a_template_the_border_lies_within_the_users_message():
    tokenizer = character_tokenizer()
    prompter = Prompter(tokenizer, chat_template=True)
    context = prompter.context_ids(item())
    question = prompter.question_ids(QUESTION)
    assert text_of(tokenizer, context.ids[: context.protected_prefix]) == HEADER
    assert text_of(tokenizer, context.ids) == HEADER + CONTEXT
    assert text_of(tokenizer, question) == "What is it?" + FOOTER + " It is"
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": CONTEXT + QUESTION.text}], add_generation_prompt=True, tokenize=False
    )
    assert text_of(tokenizer, context.ids + question) == whole + " It is"


def test_options_reach_the_template_and_texts_do_not():
    tokenizer = character_tokenizer()
    prompter = Prompter(tokenizer, chat_template=True, template_options={"thinking": True})
    assert text_of(tokenizer, prompter.question_ids(QUESTION)).endswith("assistant\n It is")
    odd = "  {{ 1 + 1 }} [SEPSEPSEP] "
    assert text_of(tokenizer, prompter.context_ids(item(odd)).ids) == HEADER + odd


def test_a_header_that_joins_the_context_is_protected_as_far_as_it_goes():
    class Joining:
        """Takes two line breaks for one token, as many tokenizers do."""

        chat_template = "given"
        bos_token_id = None

        def apply_chat_template(self, messages, **_):
            return f"user\n{messages[0]['content']}\nassistant\n"

        def __call__(self, text, **_):
            return {"input_ids": [ord(c) for c in text.replace("\n\n", "¶")]}

    context = Prompter(Joining(), chat_template=True).context_ids(item("\nlamp"))
    assert "".join(map(chr, context.ids)) == "user¶lamp"
    assert context.protected_prefix == 4


@pytest.mark.parametrize(("chat_template", "max_length"), [(False, 140), (True, 190)])
def test_a_long_context_loses_its_middle(chat_template, max_length):
    tokenizer = character_tokenizer()
    full = Prompter(tokenizer, chat_template).context_ids(item())
    prompter = Prompter(tokenizer, chat_template, max_length)
    prepared = prompter.context_ids(item())
    half = (max_length - len(prompter.question_ids(QUESTION)) - QUESTION.max_new_tokens) // 2
    assert prepared.truncated
    assert prepared.ids == full.ids[:half] + full.ids[-half:]
    assert prepared.tokens_before == len(full.ids)
    assert prepared.protected_prefix == full.protected_prefix
    assert text_of(tokenizer, prepared.ids).startswith(HEADER if chat_template else "<s>one needle")


def test_the_budget_is_the_benchmarks_or_leaves_room_for_the_longest_question():
    tokenizer = character_tokenizer()
    long = Question("Which?", ("a",), 50, "exact_match")
    prompter = Prompter(tokenizer, chat_template=False, max_length=1000)
    assert prompter.budget(item(CONTEXT, QUESTION, long)) == 1000 - 6 - 50
    assert prompter.budget(item(CONTEXT, QUESTION, long, reserved_tokens=300)) == 700
    assert Prompter(tokenizer, chat_template=False).budget(item()) is None


def test_the_reference_tokenizer():
    tokenizer = load_tokenizer()
    prompter = Prompter(tokenizer, chat_template=False, max_length=16)
    question = Question("the special magic number is", ("4 8",), 2, "exact_match", answer_prefix=" :")
    assert tokenizer.decode(prompter.question_ids(question)) == "the special magic number is :"
    words = "the grass is green . the sky is blue . the sun is yellow ."
    prepared = prompter.context_ids(item(words, question))
    assert prepared.tokens_before == 15
    assert tokenizer.decode(prepared.ids) == "the grass is green" + " sun is yellow ."
    assert prepared.truncated


def test_mistakes_are_named():
    tokenizer = character_tokenizer()
    with pytest.raises(ValueError, match="chat_template=False"):
        Prompter(character_tokenizer(None), chat_template=True)
    with pytest.raises(ValueError, match="2 times"):
        Prompter(character_tokenizer("{{ messages[0]['content'] }}{{ messages[0]['content'] }}"), chat_template=True)
    for template in (False, True):
        with pytest.raises(ValueError, match="no tokens"):
            Prompter(tokenizer, template).context_ids(item(""))
    with pytest.raises(ValueError, match="no tokens"):
        Prompter(tokenizer, chat_template=False).question_ids(Question("", ("a",), 1, "exact_match"))
    with pytest.raises(ValueError, match="Raise max_length"):
        Prompter(tokenizer, chat_template=True, max_length=100).context_ids(item())
    with pytest.raises(ValueError, match="Raise max_length"):
        Prompter(tokenizer, chat_template=False, max_length=10).context_ids(item())
