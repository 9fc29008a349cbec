"""A byte-level BPE tokenizer, and chat templates with the behaviours of public ones, written for the tests."""

import functools
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

START, END, THINK, NO_THINK = "<|start|>", "<|end|>", "<think>", "</think>"
#: Words apart, numbers by digit, punctuation together with the line breaks behind it: as in the public ones.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = (
    "The harbour master keeps a ledger of every ship, its cargo and the day it came.\n\n"
    "On the third of May the Ostrava brought 412 sacks of coffee from Santos; on the ninth, the Meridian brought tin.\n"
    "What did it bring? Who keeps the ledger? Nobody knows why. (It was raining.)\n\n"
)

#: A head with a system text; turns between marks; the assistant's header as generation prompt.
PLAIN = (
    "{%- for m in messages %}{{ start + m.role + '\n' + m.content + end + '\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ start + 'assistant\n' }}{% endif %}"
)
#: Trims what is said; lists tools in the head; keeps reasoning of turns after the last question only; its generation
#: prompt opens the reasoning, or closes it at once.
REASONING = (
    "{%- if tools %}{{ start + 'system\n' }}"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content|trim + '\n\n' }}{% endif %}"
    "{{- 'Tools:' }}{% for tool in tools %}{{ '\n' + tool|tojson }}{% endfor %}{{ end + '\n' }}"
    "{%- elif messages[0].role == 'system' %}"
    "{{- start + 'system\n' + messages[0].content|trim + end + '\n' }}{% endif %}"
    "{%- set ns = namespace(last=0) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages if m.role != 'system' %}"
    "{%- set content = m.content|trim %}"
    "{%- if m.role == 'assistant' and '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{- start + m.role + '\n' + content + end + '\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ start + 'assistant\n<think>\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '\n</think>\n\n' }}{% endif %}{% endif %}"
)
#: Says the date in its head, and has no system messages.
DATED = (
    "{%- if messages[0].role == 'system' %}{{ raise_exception('No system messages.') }}{% endif %}"
    "{{- start + 'Now: ' + strftime_now('%d %B %Y') + end + '\n' }}" + PLAIN
)
#: Tells how many messages there are before the first: everything moves with each turn.
COUNTING = "{{ start + messages|length|string + '\n' + end }}" + PLAIN
#: Shows the last message only: no question can follow a document there.
LAST_ONLY = "{{ start + messages[-1].content + end }}"
UPPER = "{%- for m in messages %}{{ start + m.content|upper + end }}{% endfor %}"
TWICE = "{%- for m in messages %}{{ start + m.content + m.content + end }}{% endfor %}"
TEMPLATES = {"plain": PLAIN, "reasoning": REASONING, "dated": DATED, "counting": COUNTING}


@functools.cache
def _trained() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECES), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=508, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.add_special_tokens([START, END])
    tokenizer.add_tokens([AddedToken(THINK, normalized=False), AddedToken(NO_THINK, normalized=False)])
    return tokenizer


#: Enough for the tokenizer.
VOCAB = 512


def chat_tokenizer(template: str | None = PLAIN) -> PreTrainedTokenizerFast:
    """A tokenizer of its own for each call."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_trained(), eos_token=END, pad_token=END)
    if template is not None:
        tokenizer.chat_template = f"{{%- set start, end = '{START}', '{END}' %}}" + template
    return tokenizer


def messages_of(document: str, questions: list[str], answers: list[str], system: str | None = None) -> list[Any]:
    """As a user of transformers writes them: the document before the first question."""
    said = [f"{document}\n\n{questions[0]}", *questions[1:]]
    found = [] if system is None else [{"role": "system", "content": system}]
    for number, question in enumerate(said):
        found.append({"role": "user", "content": question})
        if number < len(answers):
            found.append({"role": "assistant", "content": answers[number]})
    return found


def ids_of(tokenizer: Any, messages: list[Any], **options: Any) -> list[int]:
    """Of `apply_chat_template`, with the generation prompt."""
    found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, **options)
    return list(found["input_ids"])
