"""Train the tokenizer on the training split, and turn the splits into tokens.

    python eval/language_model/tokens.py --data runs/language-data --train     # writes eval/language_model/tokenizer
    python eval/language_model/tokens.py --data runs/language-data             # tokens of every split and kind

Byte-level BPE of 6,144 tokens, every digit a token of its own, and a chat template as ChatML has it.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "tokenizer"
SIZE = 6144
END, TURN, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KINDS = ("documentation", "book", "code")
#: Characters that the merges are learned from.
SAMPLE = 40_000_000


def read(data: Path, split: str) -> Iterator[dict[str, str]]:
    """Documents of a split, in the corpus's order."""
    with (data / f"{split}.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def train(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE, special_tokens=[END, TURN, TURN_END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=END, chat_template=CHAT_TEMPLATE,
        additional_special_tokens=[TURN], model_max_length=4096, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def load(folder: Path = FOLDER) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(folder)


def sample(data: Path) -> Iterator[str]:
    """Training documents in random order, `SAMPLE` characters in all."""
    texts = [document["text"] for document in read(data, "training")]
    random.Random(0).shuffle(texts)
    left = SAMPLE
    for text in texts:
        left -= len(text)
        if left < 0:
            return
        yield text


def encode(data: Path, tokenizer: PreTrainedTokenizerFast) -> dict[str, dict[str, int]]:
    """Writes `<split>.<kind>.bin`, uint16, every document followed by its end mark; returns the numbers of tokens."""
    end = tokenizer.convert_tokens_to_ids(END)
    counts: dict[str, dict[str, int]] = {}
    for split in ("training", "estimator", "evaluation"):
        outs = {kind: (data / f"{split}.{kind}.partial").open("wb") for kind in KINDS}
        counts[split] = dict.fromkeys(KINDS, 0)
        documents = list(read(data, split))
        random.Random(1).shuffle(documents)
        for start in range(0, len(documents), 64):
            some = documents[start : start + 64]
            for document, ids in zip(some, tokenizer([d["text"] for d in some]).input_ids, strict=True):
                outs[document["kind"]].write(np.array([*ids, end], dtype=np.uint16).tobytes())
                counts[split][document["kind"]] += len(ids) + 1
        for kind, out in outs.items():
            out.close()
            Path(out.name).replace(data / f"{split}.{kind}.bin")
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the corpus")
    parser.add_argument("--train", action="store_true", help="train the tokenizer first")
    args = parser.parse_args()
    if args.train:
        train(sample(args.data)).save_pretrained(FOLDER)
    counts = encode(args.data, load())
    (args.data / "tokens.json").write_text(json.dumps(counts, indent=1) + "\n")
    print(json.dumps(counts, indent=1))


if __name__ == "__main__":
    main()
