"""Generates RULER's 13 tasks for any tokenizer and length."""

import random
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..items import Item, Question
from .aggregation import common_words_extraction, frequent_words_extraction
from .qa import questions_on_documents
from .retrieval import niah, variable_tracking
from .sampling import Sample, Setting
from .sources import Sources, sha256
from .templates import TASKS, Task, find_task

#: Departures from RULER, each answering to a flaw of it, with the tasks that they apply to.
VARIANTS = {
    "filled": tuple(name for name in TASKS if name != "fwe"),
    "qa_shuffled": ("qa_1", "qa_2"),
    "qa_sampled": ("qa_1", "qa_2"),
    "essay_offset": ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery"),
    "task_hidden": ("vt", "cwe", "fwe"),
}


def generate(
    task: str,
    tokenizer: Any,
    length: int,
    count: int,
    seed: int = 42,
    sources: Sources | None = None,
    variants: Sequence[str] = (),
) -> Iterator[Item]:
    """Items of one task as RULER's scripts make them (arXiv 2404.06654; NVIDIA/RULER at c3f5e3b), one question each.

    With NLTK's Punkt as `Sources.sentences`, a Hugging Face tokenizer and RULER's own files they are RULER's byte for
    byte. The first n items of a longer run are those of a run of n.

    Variants, which are applied to the tasks that they concern and named in `Item.details["variants"]`:
        filled: Items are as long as the length allows. RULER takes 500 words of prose or 10 documents at once from an
            item that is a token too long, so that items of one length differ in it.
        qa_shuffled: The order of documents differs between items. RULER's depends on their number alone, which puts
            the gold document of `qa_1` near the end of every context of 4,096 tokens.
        qa_sampled: Questions from all over the file. RULER takes them in its order, the first hundred of SQuAD from
            one or two articles.
        essay_offset: Prose begins at a sentence of the item's own. RULER's always begins with the first.
        task_hidden: The context of `vt`, `cwe` and `fwe` holds data only, without the instruction and the one-shot
            example that tell a query-agnostic method what will be asked.

    Args:
        task: For example `niah_multikey_1`.
        tokenizer: Has `encode(text)` or is called with the text and gives `input_ids`. Special tokens do not count.
        length: Most tokens of context, question, answer prefix and answer.
        count: Number of items.
        sources: Files to generate from.

    Raises:
        ValueError: Unknown task or variant, no positive count, a source that is missing or of another schema, or a
            length that is too small. The last may come as late as at an item that is longer than those before.
        FileNotFoundError: A source that does not exist.
        ImportError: wonderwords is not installed.
        TypeError: Not a tokenizer.
    """
    found, sources = find_task(task), sources or Sources()
    unknown = [variant for variant in variants if variant not in VARIANTS]
    if unknown:
        raise ValueError(f"No RULER variant {', '.join(map(repr, unknown))}; take any of {', '.join(VARIANTS)}.")
    if count < 1:
        raise ValueError(f"count is {count}; ask for at least one item.")
    if length <= found.max_new_tokens:
        raise ValueError(f"length {length} has to exceed the {found.max_new_tokens} tokens that {task} generates.")
    setting = Setting(
        task=task,
        length=length,
        max_new_tokens=found.max_new_tokens,
        count_tokens=token_counter(tokenizer),
        stream=random.Random(seed),
        seed=seed,
        variants=tuple(variant for variant in VARIANTS if variant in variants and task in VARIANTS[variant]),
    )
    details = _provenance(found, setting, tokenizer, sources)
    sample = _sampler(found, setting, sources, count)
    return (_item(found, setting, details, i, sample(i)) for i in range(count))


def _sampler(task: Task, setting: Setting, sources: Sources, count: int) -> Callable[[int], Sample]:
    if task.needles is not None:
        return niah(task, setting, sources)
    if task.family == "qa":
        return questions_on_documents(task, setting, sources, count)
    make = {"vt": variable_tracking, "cwe": common_words_extraction, "fwe": frequent_words_extraction}[task.name]
    return make(task, setting, sources)


def _provenance(task: Task, setting: Setting, tokenizer: Any, sources: Sources) -> dict[str, Any]:
    """Details that all items of a run share."""
    prose = task.needles is not None and task.needles.haystack == "essay"
    names = {"qa_1": "squad", "qa_2": "hotpotqa"}
    if sources.english_words is not None:
        names["cwe"] = "english_words"
    name = "haystack" if prose else names.get(task.name)
    details: dict[str, Any] = {
        "leak": task.leak and "task_hidden" not in setting.variants,
        "variants": list(setting.variants),
        "max_length": setting.length,
        "seed": setting.seed,
        "tokenizer": str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__),
        "sources": {},
    }
    if name is not None:
        path = sources.path(name, task.name)
        details["sources"] = {name: {"file": path.name, "sha256": sha256(path)}}
    if prose:
        details["sentences"] = f"{sources.sentences.__module__}.{getattr(sources.sentences, '__qualname__', '?')}"
    if task.needles is not None or task.name == "cwe":
        details["wonderwords"] = installed_version("wonderwords")
    return details


def installed_version(package: str) -> str | None:
    """Version of an installed package, None where it is missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _item(task: Task, setting: Setting, details: dict[str, Any], index: int, sample: Sample) -> Item:
    question = Question(
        text=sample.question,
        references=sample.answers,
        max_new_tokens=task.max_new_tokens,
        metric=task.metric,
        answer_prefix=sample.answer_prefix,
        depth=sample.depth,
    )
    tokens = setting.count_tokens(sample.prompt) + task.max_new_tokens
    return Item(
        id="/".join([task.name, str(setting.length), str(details["seed"]), *details["variants"], str(index + 1)]),
        benchmark="ruler",
        task=task.name,
        family=task.family,
        context=sample.context,
        questions=(question,),
        details={**details, "length": tokens},
    )


def token_counter(tokenizer: Any) -> Callable[[str], int]:
    """The function that counts a text's tokens, without special ones.

    Raises:
        TypeError: The object has no `encode` and does not give `input_ids` when called.
    """
    if not hasattr(tokenizer, "encode") and not callable(tokenizer):
        raise TypeError(f"{type(tokenizer).__name__} is no tokenizer: it needs encode(text), or to give input_ids.")

    def encode(text: str, **options: Any) -> Any:
        if hasattr(tokenizer, "encode"):
            return tokenizer.encode(text, **options)
        return tokenizer(text, **options)["input_ids"]

    options = {"add_special_tokens": False}
    try:
        encode("a", **options)
    except TypeError:  # tiktoken and the like know no such option, and add none
        options = {}

    def tokens(text: str) -> int:
        encoded = encode(text, **options)
        return len(getattr(encoded, "ids", encoded))

    return tokens
