"""KVzip: the context is repeated to the model, and entries are rated by the attention that the repetition pays them."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from gatesight_kernels.checks import check_whole_number, described

from ..checks import check_text, check_tokenizer
from ..entries.view import AttentionView
from ..errors import CacheStateError
from ..models._compat import cache_argument
from ..models.hybrid import HybridSpec
from ..scoring.interface import Needs, Prefill, check_prefill
from .base import protect

FIRST_PROMPT = "\n\nRepeat the previous context exactly."
LATER_PROMPT = "\n\nRepeat the part of the previous context exactly, starting with"
#: Tokens of the previous chunk that the later prompt quotes.
QUOTED = 8
#: Replayed queries handled at a time: bounds the scratch memory.
QUERIES_PER_STEP = 256


@dataclass(frozen=True)
class KVzip:
    """Largest attention of a teacher-forced repetition of the context (arXiv 2505.23416).

    Each chunk of the context is fed once more, after a prompt to repeat it, to a fork of the cache that holds the whole
    context and GDN states of its own. Of the replay's attention over (first entries, this chunk, the replay itself) an
    entry's score is the largest over replayed tokens and the GQA group. It costs one to two more forwards.
    In the paper all heads of all layers share one budget: `allocation="global"`.

    Args:
        model: The model that the cache belongs to.
        tokenizer: Its tokenizer, for the prompts.
        chunk: Context tokens of one replay.
        sinks: First entries, in the softmax of every chunk and always kept.
        prompts: To repeat the first chunk, and a later one; the tokens that it starts with are appended.
        suffix: Between prompt and repetition. None is what the tokenizer's chat template puts there, as the authors do:
            the end of the user's turn and the assistant's header; without a template a line break.
    """

    model: Any = field(repr=False)
    tokenizer: Any = field(repr=False)
    chunk: int = 2000
    sinks: int = 4
    prompts: tuple[str, str] = (FIRST_PROMPT, LATER_PROMPT)
    suffix: str | None = None
    needs: ClassVar[Needs] = Needs(whole=True)

    def __post_init__(self) -> None:
        check_whole_number("chunk", self.chunk)
        check_whole_number("sinks", self.sinks, least=0)
        if self.suffix is not None:
            check_text("suffix", self.suffix)
        if not isinstance(self.prompts, (list, tuple)) or [type(text) for text in self.prompts] != [str, str]:
            raise ValueError(f"prompts must be two texts, got {described(self.prompts)}.")

    def __deepcopy__(self, memo: dict[int, Any]) -> "KVzip":
        # It never changes, and a copied cache should not bring a copy of the model.
        return self

    def check(self, spec: HybridSpec) -> None:
        """Raises TypeError unless there are a model and its tokenizer, and ValueError if it is of another layout."""
        own = HybridSpec.of(self.model)
        check_tokenizer(self.tokenizer)
        if own.fingerprint != spec.fingerprint:
            raise ValueError(f"KVzip was given {own.describe()}, but the cache is for {spec.describe()}.")

    def score(self, prefill: Prefill) -> list[Tensor]:
        check_prefill(prefill)
        if prefill.ids is None or prefill.fork is None:
            raise CacheStateError(
                "KVzip repeats the context by its token ids, but the cache was given embeddings, or images or videos."
            )
        scores = [keys.new_zeros(keys.shape[:3], dtype=torch.float32) for keys in prefill.keys]
        slots = prefill.ids.shape[1]
        for row, length in enumerate(prefill.lengths):
            parent = prefill.fork()
            if len(prefill.lengths) > 1:
                parent.batch_select_indices(torch.tensor([row]))
            ids = prefill.ids[row, slots - length :]
            for start in range(0, length, self.chunk):
                stop = min(length, start + self.chunk)
                self._replay(prefill, parent.fork(), row, ids, start, stop, scores)
            for of_layer in scores:
                of_layer[row, :, slots - length :] = protect(of_layer[row, :, slots - length :], first=self.sinks)
        return scores

    def _replay(
        self, prefill: Prefill, child: Any, row: int, ids: Tensor, start: int, stop: int, scores: list[Tensor]
    ) -> None:
        """Repeat the tokens `start … stop-1` of a row on `child` and write down their scores in every layer."""
        replay = torch.cat([self._prompt(ids, start), ids[start:stop]]).unsqueeze(0)
        first = prefill.keys[0].shape[2] - len(ids)

        def rate(ordinal: int, view: AttentionView) -> None:
            keys = prefill.keys[ordinal][row]
            sinks, chunk = keys[:, first : first + min(self.sinks, start)], keys[:, first + start : first + stop]
            scores[ordinal][row, :, first + start : first + stop] = replay_scores(
                view.queries[0], sinks, chunk, view.keys[0].transpose(0, 1), prefill.spec.scale
            )

        with torch.no_grad(), child.watch_attention(rate):
            self.model(replay, **{cache_argument(self.model): child}, use_cache=True, logits_to_keep=1)

    def _prompt(self, ids: Tensor, start: int) -> Tensor:
        def encoded(text: str) -> Tensor:
            # Without any text some tokenizers give floats.
            return torch.tensor(
                self.tokenizer(text, add_special_tokens=False).input_ids, dtype=torch.long, device=ids.device
            )

        parts = [encoded(self.prompts[1]), ids[max(0, start - QUOTED) : start]] if start else [encoded(self.prompts[0])]
        return torch.cat([*parts, encoded(answer_header(self.tokenizer) if self.suffix is None else self.suffix)])


def answer_header(tokenizer: Any) -> str:
    """What a chat template puts between a user's text and the assistant's; a line break if there is no template.

    Raises:
        ValueError: The template changes what the user says.
    """
    if not getattr(tokenizer, "chat_template", None):
        return "\n"
    said = "Repeat."
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": said}], tokenize=False, add_generation_prompt=True
    )
    _, found, after = text.rpartition(said)
    if not found:
        raise ValueError("The chat template changes what the user says; give KVzip the suffix, suffix='…'.")
    return after


def replay_scores(queries: Tensor, sinks: Tensor, chunk: Tensor, replay: Tensor, scale: float) -> Tensor:
    """Largest attention that any query pays to each key of the chunk.

    Args:
        queries: `[Q, heads, D]`, with RoPE.
        sinks, chunk: `[H, s, D]` and `[H, c, D]`, keys that every query sees.
        replay: `[H, Q, D]`, the queries' own keys, seen causally.
        scale: Of the logits.

    Returns:
        `[H, c]`, float32.
    """
    heads, count = chunk.shape[0], queries.shape[0]
    keys = torch.cat([sinks, chunk, replay], dim=1).float()
    seen, own = sinks.shape[1] + chunk.shape[1], torch.arange(count, device=keys.device)
    best = keys.new_zeros(heads, chunk.shape[1])
    for head in range(heads):
        group = queries.float().unflatten(1, (heads, -1))[:, head]
        for start in range(0, count, QUERIES_PER_STEP):
            steps = own[start : start + QUERIES_PER_STEP]
            logits = torch.einsum("qgd,td->qgt", group[steps], keys[head]) * scale
            logits[..., seen:].masked_fill_(own > steps[:, None, None], float("-inf"))
            weights = logits.softmax(-1)[..., sinks.shape[1] : seen]
            best[head] = torch.maximum(best[head], weights.amax((0, 1)))
    return best
