"""Write the reference model's tokenizer, lower-cased words, punctuation and single digits, and its chat template.

python eval/reference_model/build_tokenizer.py gatesight_hf/reference/model
"""

import sys

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gatesight_hf.reference.words import END, PAD, UNKNOWN, vocabulary

#: A conversation as the model was trained on it: a document, questions and answers, each ended by `<eos>`.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {{- message['content'] }}{{ ' ' + eos_token if message['role'] == 'assistant' }}{{ '\\n' }}
{%- endfor -%}
"""


def build() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary())}, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(r"[0-9.,:;?=]"), "isolated")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
        model_input_names=["input_ids", "attention_mask"],
        chat_template=CHAT_TEMPLATE,
    )


if __name__ == "__main__":
    build().save_pretrained(sys.argv[1])
