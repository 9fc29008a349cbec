"""From a model and a document to what each method keeps at each kept fraction, without moving an entry."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from gatesight_kernels.checks import check_whole_number, described

from ..cache.cache import GateSightCache
from ..cache.prefill import prefill
from ..checks import check_text
from ..compaction.budget import BY_GATES, BY_HEADS, check_kept_fraction
from ..compaction.plan import LayerPlan, Plan, plan_compaction
from ..scoring.interface import Needs, Recorder, Scorer, Scores

#: Kept fractions of the slider, ascending.
FRACTIONS: tuple[float, ...] = tuple(step / 100 for step in range(1, 101))


@dataclass(frozen=True)
class Answered:
    """A question and what caches answered.

    Attributes:
        question: Its text.
        answers: Text by name of the cache, such as `full`, `kept` and `random`; shown in this order.
    """

    question: str
    answers: Mapping[str, str]

    def __post_init__(self) -> None:
        check_text("question", self.question)
        if not isinstance(self.answers, Mapping):
            raise TypeError(f"answers must map names of caches to texts, got {described(self.answers)}.")
        for name, answer in self.answers.items():
            check_text("a name in answers", name)
            check_text(f"the answer of {name!r}", answer)


@dataclass(frozen=True)
class MethodView:
    """What one method keeps at every kept fraction.

    A head keeps its best entries, however many they are, so what it keeps is a chain of sets that grow with their size;
    `kept` gives the size at each kept fraction. It need not grow with it: where a budget is rounded, a layer may keep
    one entry less at a larger fraction.

    Attributes:
        name: Of the method.
        allocation: How it shares the budget, after a model without output gates has been allowed for.
        levels: `[L, H, T]`, uint8: the number of the smallest of its head's sets that holds the entry, counted from 0
            in order of their sizes.
        percentiles: `[L, H, T]`, uint8: percent of its head's other entries with a lower score, rounded down.
        kept: `[fractions, L, H]`, int32: entries kept, protected ones included.
        achieved: By kept fraction, kept share of the evictable entries.
    """

    name: str
    allocation: str
    levels: Tensor = field(repr=False)
    percentiles: Tensor = field(repr=False)
    kept: Tensor = field(repr=False)
    achieved: list[float] = field(repr=False)

    def kept_per_layer(self, step: int) -> list[int]:
        """As `CacheReport.kept_per_layer` has it: of heads that keep different numbers, the fullest.

        Args:
            step: Index into `FRACTIONS`.
        """
        return self.kept[step].amax(-1).tolist()

    def mask(self, step: int) -> Tensor:
        """Which entries stay, `[L, H, T]`, bool.

        Args:
            step: Index into `FRACTIONS`.
        """
        # Sizes below that of this fraction's set, each counted once, are the levels below its own.
        order = self.kept.sort(dim=0).values
        new = torch.cat([torch.ones_like(order[:1]), (order[1:] > order[:-1]).to(order.dtype)])
        level = (new * (order <= self.kept[step])).sum(0) - 1
        return self.levels.to(torch.int32) <= level.unsqueeze(-1)


@dataclass(frozen=True)
class View:
    """A document and what methods keep of it; `dataclasses.replace` adds answers and a title.

    Attributes:
        tokens: Display text of each token.
        layers: Index in the model of each attention layer, by attention ordinal.
        methods: One or more, all of the same model.
        protected_prefix, protected_suffix: First and last tokens that always stay and are not counted.
        title: Of the page.
        model: Name of the model, for the page.
        answered: Questions with their answers.
        answered_at: The kept fraction at which they were answered; None where there are none.

    Raises:
        ValueError: No method, tensors of other sizes, or answers without their kept fraction.
        TypeError: A text that is none.
    """

    tokens: tuple[str, ...] = field(repr=False)
    layers: tuple[int, ...]
    methods: tuple[MethodView, ...]
    protected_prefix: int = 0
    protected_suffix: int = 0
    title: str = "What stays in the KV cache"
    model: str = ""
    answered: tuple[Answered, ...] = ()
    answered_at: float | None = None

    def __post_init__(self) -> None:
        check_text("title", self.title)
        check_text("model", self.model)
        for token in self.tokens:
            check_text("each of tokens", token)
        for name in ("protected_prefix", "protected_suffix"):
            check_whole_number(name, getattr(self, name), least=0)
        if not self.methods or not self.tokens or not self.layers:
            raise ValueError("A view needs tokens, attention layers and at least one method.")
        heads = self.methods[0].levels.shape[1]
        for method in self.methods:
            sizes = [tuple(tensor.shape) for tensor in (method.levels, method.percentiles, method.kept)]
            entries = (len(self.layers), heads, len(self.tokens))
            if sizes != [entries, entries, (len(FRACTIONS), *entries[:2])] or len(method.achieved) != len(FRACTIONS):
                raise ValueError(f"{method.name} has tensors of sizes {sizes} where entries are {list(entries)}.")
        if self.answered_at is not None:
            check_kept_fraction(self.answered_at)
        elif self.answered:
            raise ValueError("answered_at must be the kept fraction that the questions were answered at, got None.")


def collect(
    model: Any,
    ids: Sequence[int],
    scorers: Mapping[str, Scorer],
    *,
    tokens: Sequence[str],
    allocation: str | Mapping[str, str] = "gate",
    block_size: int = 1,
    **options: Any,
) -> View:
    """Prefill a document once, rate it by each scorer, and plan a compaction at each of `FRACTIONS`.

    Args:
        model, ids, scorers, allocation, block_size, options: See `recorded`.
        tokens: Display text of each id.

    Raises:
        TypeError, UnsupportedModelError, EstimatorMismatchError: See `recorded`; or a text is none.
        ValueError: Likewise; or another number of tokens.
    """
    if len(tokens) != len(ids):
        raise ValueError(f"tokens must have a text for each of {len(ids)} ids, got {len(tokens)}.")
    parent = recorded(model, ids, scorers, allocation=allocation, block_size=block_size, **options)
    return view_of(parent, scorers, tokens, allocation, block_size)


def recorded(
    model: Any,
    ids: Sequence[int],
    scorers: Mapping[str, Scorer],
    *,
    allocation: str | Mapping[str, str] = "gate",
    protected_prefix: int = 0,
    protected_suffix: int = 0,
    block_size: int = 1,
    gate_exponent: float = 1.0,
    prefill_chunk_size: int | None = None,
) -> GateSightCache:
    """A cache that has read a document, with what all scorers need, and is not compacted.

    Args:
        model: The hybrid model.
        ids: Of the document's tokens.
        scorers: By the name of the method.
        allocation: Of all methods, or by name.
        protected_prefix, protected_suffix, block_size, gate_exponent: See `GateSightCache`.
        prefill_chunk_size: Tokens per forward; None prefills in one.

    Raises:
        TypeError: Scorers or allocations by name are no mapping.
        ValueError: No ids or scorers, or options that `GateSightCache` refuses.
        UnsupportedModelError, EstimatorMismatchError: See `GateSightCache`.
    """
    if not isinstance(scorers, Mapping):
        raise TypeError(f"scorers must map names of methods to scorers, got {described(scorers)}.")
    if not scorers:
        raise ValueError("scorers must name at least one method.")
    allocations = _by_name(allocation, scorers)
    parent = GateSightCache(
        Recorder(reduce(Needs.__or__, (scorer.needs for scorer in scorers.values()), Needs())),
        model,
        protected_prefix=protected_prefix,
        # Output gates are recorded where an allocation needs them, and serve all.
        allocation="gate" if BY_GATES & set(allocations.values()) else next(iter(allocations.values())),
        block_size=1 if BY_HEADS & set(allocations.values()) else block_size,
        gate_exponent=gate_exponent,
        protected_suffix=protected_suffix,
    )
    prefill(model, torch.tensor([list(ids)], dtype=torch.long, device=model.device), parent, prefill_chunk_size)
    return parent


def view_of(
    parent: GateSightCache,
    scorers: Mapping[str, Scorer],
    tokens: Sequence[str],
    allocation: str | Mapping[str, str] = "gate",
    block_size: int = 1,
) -> View:
    """What each scorer keeps of a cache that `recorded` gave; arguments as of `collect`."""
    allocations = _by_name(allocation, scorers)
    methods = []
    with tqdm(total=len(scorers) * len(FRACTIONS), unit="plan", leave=False, disable=None) as progress:
        for name, scorer in scorers.items():
            progress.set_description(name)
            scores = parent.score(scorer)
            child = parent.fork(scorer=scores, allocation=allocations[name], block_size=block_size)
            plans = _plans(child, scores)
            levels, kept, achieved = _levels(plans, scores.of, progress)
            percentiles = torch.stack([_percentiles(of_layer[0]) for of_layer in scores.of])
            methods.append(MethodView(name, child.options.allocation, levels, percentiles, kept, achieved))
    return View(
        tokens=tuple(tokens),
        layers=tuple(parent.spec.attention_layers),
        methods=tuple(methods),
        protected_prefix=parent.options.protected_prefix,
        protected_suffix=parent.options.protected_suffix,
        model=parent.spec.model_type,
    )


def followed(view: View, tokens: Sequence[str]) -> View:
    """With tokens after it that came when it was compacted, so that every method keeps them at every fraction.

    Args:
        view: Of what was compacted.
        tokens: Display text of each.
    """
    more = len(tokens)
    methods = [
        replace(
            method,
            levels=F.pad(method.levels, (0, more)),
            percentiles=F.pad(method.percentiles, (0, more), value=100),
            kept=method.kept + more,
        )
        for method in view.methods
    ]
    return replace(
        view,
        tokens=(*view.tokens, *tokens),
        methods=tuple(methods),
        protected_suffix=view.protected_suffix + more,
    )


def _by_name(allocation: str | Mapping[str, str], scorers: Mapping[str, Scorer]) -> dict[str, str]:
    """The allocation of each method."""
    if isinstance(allocation, str):
        return dict.fromkeys(scorers, allocation)
    if not isinstance(allocation, Mapping):
        raise TypeError(f"allocation must be one, or map names of methods to one, got {described(allocation)}.")
    if set(allocation) != set(scorers):
        raise ValueError(f"allocation must name {', '.join(scorers)}, got {', '.join(map(str, allocation))}.")
    return dict(allocation)


def _plans(cache: GateSightCache, scores: Scores) -> Iterator[Plan]:
    """Of every kept fraction, as `cache.compact()` would decide it."""
    context, of = cache.prefill(), cache.report().gate_means
    for fraction in FRACTIONS:
        yield plan_compaction(context, scores, of, replace(cache.options, kept_fraction=fraction), 0)


def _levels(plans: Iterator[Plan], scores: list[Tensor], progress: Any) -> tuple[Tensor, Tensor, list[float]]:
    """`levels`, `kept` and `achieved` of a `MethodView`."""
    layers, (heads, length) = len(scores), scores[0].shape[1:]
    # Size of the smallest set that holds the entry; the last plan keeps everything.
    least = torch.full((layers, heads, length), length, dtype=torch.int32)
    sizes, achieved = [], []
    for plan in plans:
        stays = torch.stack([_stays(of_layer, heads, length) for of_layer in plan.layers])
        sizes.append(stays.sum(-1, dtype=torch.int32))
        least = torch.where(stays, torch.minimum(least, sizes[-1].unsqueeze(-1)), least)
        achieved.append(plan.achieved_fraction)
        progress.update()
    kept = torch.stack(sizes)
    levels = torch.empty_like(least, dtype=torch.uint8)
    for layer in range(layers):
        for head in range(heads):
            distinct, of_head = kept[:, layer, head].unique(), least[layer, head]
            # Each set is within what is marked with its size or less, so equal numbers make them the same.
            if not torch.equal(torch.searchsorted(of_head.sort().values, distinct, right=True).int(), distinct):
                raise RuntimeError(f"Attention layer {layer} keeps sets in head {head} that do not hold each other.")
            levels[layer, head] = torch.searchsorted(distinct, of_head)
    return levels, kept, achieved


def _stays(plan: LayerPlan, heads: int, length: int) -> Tensor:
    """Which entries one layer keeps of a context of one row, `[H, T]`, bool, on the CPU."""
    if plan.indices is None:
        return torch.ones(heads, length, dtype=torch.bool)
    valid = plan.valid[0].expand(heads, -1).cpu()
    slots = plan.indices[0].cpu().masked_fill(~valid, length)  # a slot of their own for those that only fill up
    return torch.zeros(heads, length + 1, dtype=torch.bool).scatter_(1, slots, True)[:, :length]


def _percentiles(scores: Tensor) -> Tensor:
    """Of `[H, T]`, how many percent of the head's other entries are lower, uint8; equal ones have the same."""
    scores = scores.float().cpu().contiguous()
    lower = torch.searchsorted(scores.sort(-1).values, scores)
    return (lower * 100 // max(1, scores.shape[-1] - 1)).to(torch.uint8)
