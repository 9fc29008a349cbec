"""From documents to training data: one shard per document with its signals and the utilities of its entries.

Each document is prefilled once, some continuations are sampled from it, and the utilities are computed from the
queries of those continuations. A shard is a safetensors file; shards that exist are not made again, so that a run that
was killed goes on where it stopped, and memory does not grow with the number of documents.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from gatesight_kernels.checks import INTEGERS, check_tensor, check_whole_number, described

from ..cache.cache import GateSightCache
from ..models._compat import cache_argument
from ..models.hybrid import HybridSpec
from ..scoring.interface import Needs, Recorder
from ..scoring.utility import continuation_utilities, normalise

#: Of files that are not whole.
PARTIAL = ".partial"


@dataclass(frozen=True)
class Sampling:
    """How continuations are drawn.

    Attributes:
        continuations: Per document and prompt.
        tokens: New tokens of each.
        temperature: Of sampling.
        prompts: Ids put after the document before sampling, each a list; one empty list samples straight on.
        seed: Of the whole collection; document k uses seed + k.
        rows: Continuations sampled at a time; None is all. They share the document's entries, but each has its own GDN
            states, and a copy of the entries of the attention layer that is running.
    """

    continuations: int = 8
    tokens: int = 32
    temperature: float = 1.0
    prompts: tuple[tuple[int, ...], ...] = ((),)
    seed: int = 0
    rows: int | None = None

    def __post_init__(self) -> None:
        check_whole_number("continuations", self.continuations)
        check_whole_number("tokens", self.tokens)
        check_whole_number("seed", self.seed, least=None)
        check_whole_number("rows", self.rows, or_none=True)
        if not isinstance(self.temperature, (int, float)) or not 0 < self.temperature < inf:
            raise ValueError(f"temperature must be a finite number above 0, got {described(self.temperature)}.")
        if not isinstance(self.prompts, (list, tuple)) or not self.prompts:
            raise ValueError(f"prompts must be a tuple of tuples of ids, got {described(self.prompts)}.")


def document_tensors(
    model: Any, ids: Tensor, sampling: Sampling, seed: int, hidden_states: bool = False
) -> dict[str, Tensor]:
    """What a shard holds of one document, besides its ids.

    Args:
        model: A hybrid model in evaluation mode.
        ids: `[1, T]`.
        sampling: See `Sampling`.
        seed: Of this document.
        hidden_states: Whether to take the inputs of attention layers too.

    Returns:
        `signals.{i}` `[T, 3, HV]` per GDN ordinal; `hidden.{j}` `[T, C]` per attention ordinal if asked for; and
        `utilities` `[L, H, T]`, float32, max-normalised per layer and head.
    """
    spec = HybridSpec.of(model)
    check_tensor("ids", ids, "[1, T]", INTEGERS)
    if len(ids) != 1 or not isinstance(sampling, Sampling):
        raise ValueError(
            f"ids must be one row, and sampling a Sampling, got {described(ids)} and {described(sampling)}."
        )
    name = cache_argument(model)
    needs = Needs(signals=True, hidden=hidden_states)
    parent = GateSightCache(Recorder(needs), model, kept_fraction=1.0, allocation="flat")
    utilities = torch.zeros(spec.num_attention_layers, spec.num_key_value_heads, ids.shape[1])
    with torch.no_grad():
        logits = model(ids, **{name: parent}, use_cache=True, logits_to_keep=1).logits[0, -1]
        record = parent.prefill()
        tensors = {f"signals.{i}": signal[0].cpu().contiguous() for i, signal in enumerate(record.signals)}
        tensors |= {f"hidden.{j}": hidden[0].cpu().contiguous() for j, hidden in enumerate(record.hidden)}
        del record
        # All entries stay: forks then share them, and append to tails of their own.
        parent.compact()
        for k, prompt in enumerate(sampling.prompts):
            with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if ids.is_cuda else []):
                torch.manual_seed(seed * 1009 + k)
                sampled = _continuations(model, parent, ids, logits, prompt, sampling)
            for row in sampled:
                found = continuation_utilities(model, parent.fork(), row.unsqueeze(0), ids.shape[1], spec.scale)
                for j, new in enumerate(found):
                    utilities[j] = torch.maximum(utilities[j], new.cpu())
    return {**tensors, "utilities": normalise(utilities)}


def _continuations(
    model: Any, parent: GateSightCache, ids: Tensor, logits: Tensor, prompt: Sequence[int], sampling: Sampling
) -> list[Tensor]:
    """What follows the document in each continuation: the prompt and sampled tokens, up to the end of sequence.

    The document is not prefilled again: without a prompt the first tokens are drawn from the logits that its prefill
    ended with, and forks go on from there.

    Args:
        model: The model.
        parent: The document's cache, of one row, with all entries.
        ids: `[1, T]`, the document.
        logits: `[vocabulary]`, after its last token.
        prompt: Ids.
        sampling: See `Sampling`.
    """
    options: dict[str, Any] = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0}
    if not prompt:
        # The model's own defaults would narrow what follows, but not the first token.
        options |= {"top_p": 1.0, "repetition_penalty": 1.0}
    start = torch.tensor([prompt], dtype=torch.long, device=ids.device)
    end, at_once, found = model.generation_config.eos_token_id, sampling.rows or sampling.continuations, []
    for first in range(0, sampling.continuations, at_once):
        rows = min(at_once, sampling.continuations - first)
        given, left = torch.cat([ids, start], dim=1), sampling.tokens
        if not prompt:
            chances = (logits.float() / sampling.temperature).softmax(-1)
            drawn = torch.multinomial(chances, rows, replacement=True).to(ids.device)
            given, left = torch.cat([given.expand(rows, -1), drawn.unsqueeze(1)], dim=1), left - 1
        if left:
            given = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                **{cache_argument(model): parent.fork()},
                **options,
                max_new_tokens=left,
                num_return_sequences=rows if prompt else 1,
            )
        for row in given[:, ids.shape[1] + len(prompt) :]:
            found.append(torch.cat([start[0], _until_end(row, end)]))
    return found


def _until_end(row: Tensor, end: int | list[int] | None) -> Tensor:
    """The tokens up to and with the first one that ends a sequence; what follows is padding."""
    ends = torch.isin(row, torch.tensor([] if end is None else end, dtype=row.dtype, device=row.device)).nonzero()
    return row if len(ends) == 0 else row[: int(ends[0]) + 1]


def _ids_of(shard: Path) -> Tensor | None:
    """The document that a shard was made from; None if there is no whole shard."""
    if not shard.exists():
        return None
    try:
        with safe_open(shard, framework="pt") as made:
            return made.get_tensor("ids")
    except SafetensorError:
        return None


def collect(
    model: Any,
    documents: Iterable[Sequence[int]],
    folder: Path,
    sampling: Sampling,
    label: str,
    total: int | None = None,
    hidden_states: bool = False,
    share: tuple[int, int] = (0, 1),
) -> list[Path]:
    """Write one shard per document into `folder`; returns the shards of all documents, in their order.

    Args:
        model: A hybrid model in evaluation mode.
        documents: Token ids of each document.
        folder: For `document_00000.safetensors` and so on.
        sampling: How continuations are drawn.
        label: Of the progress bar.
        total: Documents expected, for the progress bar.
        hidden_states: See `document_tensors`.
        share: Index of this process and number of processes: document k is collected by process k modulo their number.
            Others may still be at theirs when this returns.

    Raises:
        ValueError: A shard that is there already was made from another document.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards, (index, processes) = [], share
    for k, ids in enumerate(tqdm(documents, desc=label, unit="document", total=total, disable=index > 0 or None)):
        shard = folder / f"document_{k:05}.safetensors"
        shards.append(shard)
        if k % processes != index:
            continue
        tensor = torch.tensor([list(ids)], dtype=torch.long, device=model.device)
        made = _ids_of(shard)
        if made is not None:
            if not torch.equal(made, tensor[0].cpu()):
                raise ValueError(
                    f"{shard} was made from another document: the documents or options have changed. Give another "
                    f"--data folder, or remove {folder}."
                )
            continue
        stored = document_tensors(model, tensor, sampling, sampling.seed + k, hidden_states)
        _store(shard, {**stored, "ids": tensor[0].cpu()})
    return shards


def _store(shard: Path, tensors: dict[str, Tensor]) -> None:
    partial = partial_of(shard)
    save_file(tensors, partial)
    try:
        partial.replace(shard)
    except FileNotFoundError:
        # Another run on the same folder was faster, and cleared up.
        if not shard.exists():
            raise
    for left_over in shard.parent.glob(f"{shard.stem}.*{PARTIAL}"):
        left_over.unlink(missing_ok=True)


def partial_of(path: Path) -> Path:
    """Where to write a file before it takes its place whole: a name that no other process has."""
    return path.with_name(f"{path.stem}.{uuid4().hex}{PARTIAL}")


@dataclass(frozen=True)
class Shard:
    """One document of training data.

    Attributes:
        signals: Per GDN ordinal `[T, 3, HV]`.
        hidden: Per attention ordinal `[T, C]`; empty if not collected.
        utilities: `[L, H, T]`.
    """

    signals: list[Tensor]
    hidden: list[Tensor]
    utilities: Tensor

    @property
    def length(self) -> int:
        return self.utilities.shape[-1]


def read_shards(paths: Sequence[Path]) -> Iterator[Shard]:
    """One shard in memory at a time."""
    for path in paths:
        tensors = load_file(path)

        def numbered(kind: str, tensors: dict[str, Tensor] = tensors) -> list[Tensor]:
            count = sum(name.startswith(f"{kind}.") for name in tensors)
            return [tensors[f"{kind}.{i}"] for i in range(count)]

        yield Shard(numbered("signals"), numbered("hidden"), tensors["utilities"])
