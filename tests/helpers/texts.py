"""Tokenizers of one token per character."""

from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "<|im_start|>system\nbe brief<|im_end|>\n"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if not thinking %}<think></think>{% endif %}{% endif %}"
)
HEADER = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n"
FOOTER = "<|im_end|>\n<|im_start|>assistant\n<think></think>"


def character_tokenizer(template: str | None = TEMPLATE, begin: bool = True) -> Any:
    """One token per character, a begin and an end of sequence around texts, and a chat template."""
    characters = sorted({chr(code) for code in range(32, 127)} | {"\n"})
    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(SPECIAL + characters)}, unk_token="<pad>"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = Split("", "isolated")
    if begin:
        tokenizer.post_processor = TemplateProcessing(
            single="<s> $A </s>", special_tokens=[(token, SPECIAL.index(token)) for token in ("<s>", "</s>")]
        )
    options = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)
    fast.chat_template = template
    return fast


def text_of(tokenizer: Any, ids: list[int]) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(ids))
