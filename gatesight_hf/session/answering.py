"""Answers by `generate` on children of a compacted cache: one, a stream of one, or many in batches."""

import copy
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer

from gatesight_kernels.checks import check_whole_number, described

from ..cache.cache import GateSightCache
from ..checks import check_characters
from ..models._compat import CACHE_ARGUMENTS, cache_argument, generation_option

#: For messages about texts.
ONE_DOCUMENT = "; a session holds one document"
#: What `generate` is given here, and callers cannot.
_OWN = frozenset({*CACHE_ARGUMENTS, "inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids"})


def check_question(
    verb: str, question: Any, max_new_tokens: int, options: Mapping[str, Any], more: Sequence[str] = ()
) -> None:
    """Raises TypeError unless a question is text, or for options of `generate` that stand for it, or are `more`."""
    check_characters("question", question, ONE_DOCUMENT)
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
        options: Of `generate`; greedy unless they, or a `generation_config` among them, say otherwise.

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
    if (config := options.get("generation_config")) is None:
        given = {"do_sample": False, "max_new_tokens": max_new_tokens, **options}
    else:
        given = {**options, "generation_config": copy.copy(config)}
        given["generation_config"].max_new_tokens = max_new_tokens
    output = model.generate(
        questions,
        attention_mask=torch.ones((rows, child.get_seq_length() + length), dtype=torch.long, device=questions.device),
        **{**given, cache_argument(model): child},
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
        options: Of `generate`. With stop strings or criteria of one's own, each row of the cache may have one question
            at a time, and must be the only one: what ends an answer is then not in its ids.
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
    if any(generation_option(model, dict(options), name) for name in ("stop_strings", "stopping_criteria")):
        if rows > 1:
            raise ValueError("Stop strings and criteria end rows apart, which answers to several rows do not show.")
        at_once = 1
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
    model: Any,
    tokenizer: Any,
    child: GateSightCache,
    ids: Sequence[int],
    max_new_tokens: int,
    options: Mapping[str, Any],
) -> Generator[str, None, str]:
    """Pieces of the text that a thread generates; joined they are the answer as `decoded` gives it, and returned.

    An error of the thread is raised here. Where the reader leaves, the generation ends at its next token, and is waited
    for; likewise where the program ends.

    Args:
        tokenizer: Decodes.
        model, child, ids, max_new_tokens, options: See `answer`.
    """
    stop, pieces = threading.Event(), _Pieces(tokenizer)
    criteria = StoppingCriteriaList([*(options.get("stopping_criteria") or ()), _Stop(stop)])
    given = {**options, "streamer": pieces, "stopping_criteria": criteria}
    failed: list[BaseException] = []
    device = model.device.type
    modes = (  # those that torch has for each thread apart
        torch.inference_mode(torch.is_inference_mode_enabled()),
        torch.autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)),
    )

    def generate() -> None:
        try:
            with modes[0], modes[1]:
                answer(model, child, ids, max_new_tokens, given)
        except BaseException as error:  # whatever it is, the reader must not wait for ever
            failed.append(error)
        finally:
            pieces.queue.put(None)

    # No daemon, which would be killed within torch where the program ends, and take it down.
    thread = threading.Thread(target=generate, name="gatesight-stream", daemon=False)
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
    return text


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
        # The main thread has ended before others are waited for at the end of a program.
        ended = self.event.is_set() or not threading.main_thread().is_alive()
        return torch.full((len(input_ids),), ended, dtype=torch.bool, device=input_ids.device)
