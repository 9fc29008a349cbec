"""The oracle of growing caches: a whole conversation in one forward, where each eviction holds from its time on."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gatesight_hf import Estimator, GateSightCache
from gatesight_hf.compaction import allocate
from gatesight_hf.methods import HiddenStateScorer
from gatesight_hf.models import HybridModules, HybridSpec, find_modules

from .models import random_estimator
from .oracle import assert_same, evicted_of
from .recomputed_signals import hidden_states, recomputed, recomputed_gate
from .running import forward, left_padded, padded, steps


def modules_of(model: Any) -> HybridModules:
    return find_modules(model, HybridSpec.from_config(model.config))


@contextmanager
def hiding(model: Any, evicted_at: list[Tensor]) -> Iterator[None]:
    """The model hides a token from every query at or after its `[H, n]` time, per attention layer."""

    def hook_of(times: Tensor) -> Callable[..., Any]:
        def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            query = torch.arange(times.shape[1])[:, None]
            hidden = (query < query.T) | (query >= times[:, None])
            mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
            groups = 1 if len(mask) == 1 else module.num_key_value_groups
            return args, {**kwargs, "attention_mask": mask.repeat_interleave(groups, 0)[None]}

        return hook

    modules: tuple[nn.Module, ...] = modules_of(model).attention
    handles = [
        module.register_forward_pre_hook(hook_of(times), with_kwargs=True)
        for module, times in zip(modules, evicted_at, strict=True)
    ]
    yield
    for handle in handles:
        handle.remove()


@dataclass(frozen=True)
class Row:
    """One conversation: its tokens, logits by position, and after each compaction what is gone, with the length."""

    ids: Tensor
    logits: tuple[tuple[int, Tensor], ...] = ()
    compactions: tuple[tuple[int, list[Tensor]], ...] = ()

    def evicted_at(self, heads: int) -> list[Tensor]:
        times = [torch.full((heads, self.ids.shape[1]), math.inf) for _ in range(2)]
        for length, gone in self.compactions:
            for of_layer, evicted in zip(times, gone, strict=True):
                assert bool((evicted | of_layer[:, :length].isinf()).all()), "an entry came back"
                of_layer[:, :length] = of_layer[:, :length].where(~evicted, of_layer[:, :length].clamp_max(length))
        return times


class Watched(GateSightCache):
    """Tells its talk of every compaction, also of those within `generate`."""

    talk: "Talk | None" = None

    def compact(self) -> Any:
        report = super().compact()
        if self.talk is not None:
            self.talk.note_compaction()
        return report


class Talk:
    """A cache and what its rows have said."""

    def __init__(self, model: Any, cache: Watched, rows: list[Row], pads: list[int]) -> None:
        self.model, self.cache, self.rows, self.pads = model, cache, rows, pads
        cache.talk = self

    @classmethod
    def begin(cls, model: Any, contexts: list[Tensor], chunks: list[int] | None = None, **options: Any) -> "Talk":
        scorer = options.pop("scorer", None) or random_estimator(model)
        cache = Watched(scorer, model, **{"kept_fraction": 0.3, "growing": True, **options})
        ids, mask = left_padded(contexts)
        talk = cls(model, cache, [Row(c[:, :0]) for c in contexts], [ids.shape[1] - c.shape[1] for c in contexts])
        seen = 0
        for length in chunks or [ids.shape[1]]:
            logits = forward(model, ids[:, seen : seen + length], cache, **padded(mask[:, : seen + length], length))
            talk.note(ids[:, seen : seen + length], logits)
            seen += length
        return talk

    def note(self, ids: Tensor, logits: Tensor) -> None:
        """New ids, and the logits of the last of them."""
        rows = []
        for row, new, found, pads in zip(self.rows, ids, logits, self.pads, strict=True):
            before = self.cache.get_seq_length() - ids.shape[1]
            fresh = ids.shape[1] - min(ids.shape[1], max(0, pads - before))
            whole = torch.cat([row.ids, new[None, len(new) - fresh :]], 1)
            count = min(len(found), fresh)
            logits_of_row = (whole.shape[1] - count, found[len(found) - count :])
            rows.append(replace(row, ids=whole, logits=(*row.logits, logits_of_row)))
        self.rows = rows

    def note_compaction(self) -> None:
        rows = []
        for r, (row, pads) in enumerate(zip(self.rows, self.pads, strict=True)):
            length = self.cache.get_seq_length() - pads
            rows.append(replace(row, compactions=(*row.compactions, (length, evicted_of(self.cache, r, length)))))
        self.rows = rows

    def feed(self, ids: Tensor) -> None:
        self.note(ids, forward(self.model, ids, self.cache))

    def ask(self, ids: Tensor, tokens: int = 4) -> None:
        found, logits = steps(self.model, ids, self.cache, tokens, new=True)
        self.note(torch.cat([ids, found[:, :-1]], 1), logits)

    def fork(self) -> "Talk":
        return Talk(self.model, self.cache.fork(), list(self.rows), list(self.pads))

    def select(self, indices: list[int]) -> None:
        self.cache.batch_select_indices(torch.tensor(indices))
        self.rows, self.pads = [self.rows[i] for i in indices], [self.pads[i] for i in indices]

    def check(self, plain: Any) -> None:
        """Logits of everything said, and every eviction."""
        gdn, attention = modules_of(plain).gdn, modules_of(plain).attention
        heads = self.cache.spec.num_key_value_heads
        for row in self.rows:
            with hiding(plain, row.evicted_at(heads)), hidden_states([*gdn, *attention]) as seen:
                expected = plain(row.ids, use_cache=False).logits[0]
            for start, found in row.logits:
                assert_same(found, expected[start : start + len(found)])
            gates = [recomputed_gate(m, hidden) for m, (hidden,) in zip(attention, seen[6:], strict=True)]
            if isinstance(self.cache.scorer, HiddenStateScorer):
                self._check_evictions(row, [hidden[0] for (hidden,) in seen[6:]], gates)
            elif isinstance(self.cache.scorer, Estimator):
                signals = [
                    recomputed(m, hidden)[0].flatten(1).float() for m, (hidden,) in zip(gdn, seen[:6], strict=True)
                ]
                windows = self.cache.scorer.config.gdn_windows
                self._check_evictions(row, [torch.cat([signals[i] for i in w], 1) for w in windows], gates)

    def _check_evictions(self, row: Row, inputs: list[Tensor], gates: list[Tensor | None]) -> None:
        """The whole policy again, from inputs of the scorer `[n, F]` and gates `[1, n]` of each attention layer."""
        options, begun, heads = self.cache.options, 0, self.cache.spec.num_key_value_heads
        scores = [torch.full((heads, row.ids.shape[1]), -math.inf) for _ in gates]
        for length, gone in row.compactions:
            for j, of_layer in enumerate(scores):
                of_layer[:, begun:length] = rated(self.cache.scorer, j, inputs[j], begun, length)
            first = min(options.protected_prefix, length)
            end = max(first, length - options.protected_suffix)
            candidates = torch.stack(scores)[..., first:end]
            if options.allocation == "global":
                total = heads * sum(allocate(options.kept_fraction, end - first, 2, allocation="flat"))
                best = candidates.flatten().topk(min(total, int(candidates.isfinite().sum()))).indices
                kept = torch.zeros(candidates.numel(), dtype=torch.bool).scatter(0, best, True).view_as(candidates)
            else:
                means = [float(gate[0, :length].mean()) for gate in gates if gate is not None]
                shares = "gate" if options.allocation == "head" else options.allocation
                counts = allocate(options.kept_fraction, end - first, 2, allocation=shares,
                                  gate_means=means)  # fmt: skip
                kept = torch.zeros_like(candidates, dtype=torch.bool)
                for of_layer, best, count in zip(kept, candidates, counts, strict=True):
                    if options.allocation == "head":
                        most = min(heads * count, int(best.isfinite().sum()))
                        of_layer.view(-1)[best.flatten().topk(most).indices] = True
                        continue
                    held = int(best[0].isfinite().sum())
                    of_layer.scatter_(1, best.topk(min(count, held)).indices, True)
            for of_layer, mask, evicted in zip(scores, kept, gone, strict=True):
                assert torch.equal(evicted[:, first:end], ~mask)
                assert not evicted[:, :first].any() and not evicted[:, end:].any()
                of_layer[:, first:end].masked_fill_(~mask, -math.inf)
            begun = length


def rated(scorer: Any, ordinal: int, inputs: Tensor, start: int, stop: int) -> Tensor:
    """The formula of MLP scorers for the tokens `start … stop-1` of `stop` that were said, `[H, stop - start]`."""
    position = torch.arange(start, stop).float()
    age, oldest, scale = stop - 1 - position, max(1, stop - 1), math.log(max(2, stop))
    ages = torch.stack([age / oldest, (1 + age).log() / scale, (1 + position).log() / scale], 1)
    inputs = torch.cat([inputs[start:stop], ages], 1)
    w = {name: scorer.tensors[f"layers.{ordinal}.{name}"] for name in
         ("input_mean", "input_std", "weight_in", "bias_in", "weight_out", "bias_out")}  # fmt: skip
    hidden = ((inputs - w["input_mean"]) / w["input_std"]) @ w["weight_in"] + w["bias_in"][:, None]
    return (F.gelu(hidden) * w["weight_out"][:, None]).sum(-1) + w["bias_out"][:, None]
