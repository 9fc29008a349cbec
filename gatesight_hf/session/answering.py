"""Answers by `generate` on children of a compacted cache: one, a stream of one, or many in batches."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer

from gatesight_kernels.checks import check_whole_number, described

from ..cache.cache import GateSightCache
from ..checks import check_text
from ..models._compat import CACHE_ARGUMENTS, cache_argument, generation_option

#: For messages about texts.
ONE_DOCUMENT = "; a session holds one document"
#: What `generate` is given here, and callers cannot.
_OWN = frozenset({*CACHE_ARGUMENTS, "inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids"})


def check_question(
    verb: str, question: Any, max_new_tokens: int, options: Mapping[str, Any], more: Sequence[str] = ()
) -> None:
    """Raises TypeError unless a question is text, or for options of `generate` that stand for it, or are `more`."""
    check_text("question", question, ONE_DOCUMENT)
    check_whole_number("max_new_tokens", max_new_tokens)
    if given := sorted({*_OWN, *more}.intersection(options)):
        raise TypeError(
            f"{verb}() makes {given[0]} by itself: leave it out, or call generate of the model with "
            "session.cache.fork()."
        )


def check_questions(verb: str, questions: Any, max_new_tokens: int, options: Mapping[str, Any]) -> None:
    """Likewise, of several."""
    if isinstance(questions, str) or not isinstance(questions, Sequence):
        raise TypeError(f"questions must be a list of strings, got {described(questions)}; ask() takes one.")
    for question in questions:
        check_question(verb, question, max_new_tokens, options, more=("streamer",))


def answer(
    model: Any, child: GateSightCache, ids: Sequence[int], max_new_tokens: int, options: Mapping[str, Any]
) -> list[int]:
    """Let a child read a question and answer it.

    Args:
        model: Of the cache.
        child: Takes question and answer, but for the answer's last token, which was chosen and not read.
        ids: Of the question.
        max_new_tokens: Of the answer.
        options: Of `generate`; greedy unless they say otherwise.

    Returns:
        Ids of the answer, the one that ends it among them.

    Raises:
        ValueError: Options that give several sequences.
    """
    output = _generate(model, child, torch.tensor([list(ids)]), max_new_tokens, options)
    if len(output) > 1:
        raise ValueError(
            "A session gives one answer; for num_return_sequences call generate with a fork of session.cache."
        )
    return output[0].tolist()


def _generate(
    model: Any, child: GateSightCache, questions: Tensor, max_new_tokens: int, options: Mapping[str, Any]
) -> Tensor:
    """New ids `[rows, new]` after questions `[rows, length]`."""
    questions = questions.to(model.device)
    rows, length = questions.shape
    output = model.generate(
        questions,
        attention_mask=torch.ones((rows, child.get_seq_length() + length), dtype=torch.long, device=questions.device),
        max_new_tokens=max_new_tokens,
        **{"do_sample": False, **options, cache_argument(model): child},
    )
    sequences: Tensor = getattr(output, "sequences", output)
    return sequences[:, length:]


def answer_many(
    model: Any,
    cache: GateSightCache,
    questions: Sequence[Sequence[int]],
    max_new_tokens: Sequence[int],
    batch_size: int,
    options: Mapping[str, Any],
    progress: Callable[[int], object] = lambda count: None,
) -> list[list[list[int]]]:
    """Answer questions, those of equal length and limit as rows of one batch: GDN layers cannot skip pads.

    Args:
        model: Of the cache.
        cache: Compacted, of any number of rows; it is forked.
        questions: Ids of each.
        max_new_tokens: Of each answer.
        batch_size: Rows of a batch at most, but those of the cache at least; each holds a copy of the kept entries.
        options: Of `generate`.
        progress: Called with the number of questions that have been answered since the last call.

    Returns:
        By row of the cache and by question, ids of the answer, the one that ends it among them.
    """
    ends = generation_option(model, dict(options), "eos_token_id")
    ending = set(ends) if isinstance(ends, (list, tuple)) else {ends}
    pad = generation_option(model, dict(options), "pad_token_id")
    if pad is None and ends is not None:
        options = {**options, "pad_token_id": min(ending)}
    alike: dict[tuple[int, int], list[int]] = {}
    for number, (ids, limit) in enumerate(zip(questions, max_new_tokens, strict=True)):
        alike.setdefault((len(ids), limit), []).append(number)
    rows = cache.batch_size
    at_once = max(1, batch_size // rows)
    found: list[list[list[int]]] = [[[] for _ in questions] for _ in range(rows)]
    for (_, limit), numbers in alike.items():
        for begin in range(0, len(numbers), at_once):
            batch = numbers[begin : begin + at_once]
            given = torch.tensor([list(questions[number]) for number in batch]).repeat(rows, 1)
            output = _generate(model, cache.fork(), given, limit, options).tolist()
            if len(output) != len(given):
                raise ValueError("Each question has one answer here: leave num_return_sequences out.")
            for place, ids in enumerate(output):
                row, question = divmod(place, len(batch))
                end = next((i + 1 for i, token in enumerate(ids) if token in ending), len(ids))
                found[row][batch[question]] = ids[:end]
            progress(len(batch))
    return found


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of an answer."""
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text.strip()


def stream(
    tokenizer: Any,
    options: Mapping[str, Any],
    run: Callable[[Mapping[str, Any]], object],
    end: Callable[[str], object] | None,
) -> Iterator[str]:
    """Pieces of the text that `run` generates in a thread; joined they are the answer as `decoded` gives it.

    An error of the thread is raised here. Where the reader leaves, the generation ends at its next token, and is waited
    for.

    Args:
        tokenizer: Decodes.
        options: Of `generate`.
        run: Generates with the options that it is given.
        end: Called with the whole text, unless it failed or was left; or None.
    """
    stop, pieces = threading.Event(), _Pieces(tokenizer)
    criteria = StoppingCriteriaList([*(options.get("stopping_criteria") or ()), _Stop(stop)])
    failed: list[BaseException] = []

    def generate() -> None:
        try:
            run({**options, "streamer": pieces, "stopping_criteria": criteria})
        except BaseException as error:  # whatever it is, the reader must not wait for ever
            failed.append(error)
        finally:
            pieces.queue.put(None)

    thread = threading.Thread(target=generate, name="gatesight-stream", daemon=True)
    thread.start()
    try:
        text, spaces = "", ""
        while (piece := pieces.queue.get()) is not None:
            piece = spaces + piece if text else piece.lstrip()
            shown = piece.rstrip()  # what may be the end's spaces waits for more
            spaces = piece[len(shown) :]
            if shown:
                text += shown
                yield shown
    finally:
        stop.set()
        thread.join()
    if failed:
        raise failed[0]
    if end is not None:
        end(text)


class _Pieces(TextStreamer):
    """Puts whole words into a queue; None, put by others, is the end."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.queue: SimpleQueue[str | None] = SimpleQueue()

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.queue.put(text)


class _Stop(StoppingCriteria):
    def __init__(self, event: threading.Event) -> None:
        self.event = event

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), self.event.is_set(), dtype=torch.bool, device=input_ids.device)
