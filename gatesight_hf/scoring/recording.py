"""What a cache gathers of a context until compaction: GDN signals, output gates, and what scorers need of attention."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from gatesight_kernels import gate_means

from ..entries.view import AttentionView
from ..models.hybrid import HybridSpec
from .interface import Needs, QueryMoments

#: Tokens whose queries are summed at a time: bounds the scratch memory in float64.
TOKENS_PER_SUM = 1024
#: Chunks up to this length are joined as they come: of single tokens, the objects would cost more than the numbers.
SHORT_CHUNK = 1024


@dataclass(frozen=True)
class _QuerySums:
    """Sums over queries, float64: means of long contexts would lose digits in less."""

    count: Tensor
    first: Tensor
    second: Tensor

    def moments(self) -> QueryMoments:
        count = self.count.clamp_min(1)
        mean = self.first / count[:, None, None]
        second = self.second / count[:, None, None, None]
        covariance = second - torch.einsum("bhi,bhj->bhij", mean, mean)
        return QueryMoments(self.count, mean.float(), covariance.float())


class Recording:
    """Grows by one chunk per forward. Chunks are joined when a scorer asks for them; tensors are never written to.

    Args:
        spec: Layout of the model.
        needs: What is gathered of attention layers besides gates.
    """

    def __init__(self, spec: HybridSpec, needs: Needs) -> None:
        layers = spec.num_attention_layers
        self._needs = needs
        #: GDN ordinals from one attention layer to the next.
        self._runs = tuple(
            [i for i, layer in enumerate(spec.gdn_layers) if first < layer < last]
            for first, last in pairwise((-1, *spec.attention_layers, spec.gdn_layers[-1] + 1))
        )
        self._signals: list[list[Tensor]] = [[] for _ in spec.gdn_layers]
        self._signals_joined = True
        self._hidden: list[list[Tensor]] = [[] for _ in range(layers)]
        self._queries: list[Tensor | None] = [None] * layers
        self._query_sums: list[_QuerySums | None] = [None] * layers
        #: `[B, 2]`: sum over tokens and their number.
        self._gate_sums: list[Tensor | None] = [None] * layers

    def copy(self, needs: Needs | None = None) -> "Recording":
        """An independent record that shares all tensors and goes on with `needs`, the same unless given.

        What `needs` do not name is let go.
        """
        twin = object.__new__(Recording)
        vars(twin).update(vars(self))
        twin._needs = needs or self._needs
        for name, value in vars(self).items():
            if isinstance(value, list):
                setattr(twin, name, [list(part) if isinstance(part, list) else part for part in value])
        if not twin._needs.signals:
            twin._signals = [[] for _ in self._signals]
        if not twin._needs.hidden:
            twin._hidden = [[] for _ in self._hidden]
        if not twin._needs.queries:
            twin._queries = [None] * len(self._queries)
        if not twin._needs.query_moments:
            twin._query_sums = [None] * len(self._query_sums)
        return twin

    def after_compaction(self) -> "Recording":
        """A record of what comes next, whose gate means go on over all tokens."""
        twin = self.copy(Needs())
        twin._needs = self._needs
        return twin

    def add_signals(self, gdn: int, signals: Tensor) -> None:
        """Take `[B, T, 3, HV]` of GDN ordinal `gdn`."""
        _append(self._signals[gdn], signals)
        self._signals_joined = False

    def add_attention(self, ordinal: int, view: AttentionView, first: int, padding: Tensor | None) -> None:
        """Take one forward of an attention layer.

        Args:
            ordinal: Of the layer.
            view: Of the forward.
            first: Slot of its first token.
            padding: `[B, tokens seen]`, this forward's included; False at pads.
        """
        real = None if padding is None else padding.to(view.hidden.device)
        if self._needs.hidden:
            _append(self._hidden[ordinal], view.hidden.detach())
        if self._needs.queries:
            self._add_queries(ordinal, view.queries.detach())
        if self._needs.query_moments:
            self._add_moments(ordinal, view.queries_before_rope.detach(), first, real)
        if view.gate is None:
            return
        per_token = gate_means(view.gate.detach())
        counted = torch.ones_like(per_token) if real is None else real[:, -per_token.shape[1] :].to(per_token.dtype)
        new = torch.stack([per_token * counted, counted], dim=-1).sum(1, dtype=torch.float64)
        total = self._gate_sums[ordinal]
        self._gate_sums[ordinal] = new if total is None else total + new

    def _add_queries(self, ordinal: int, queries: Tensor) -> None:
        """Keep the last ones. Cloned, so that they do not hold on to a whole chunk."""
        held = self._queries[ordinal]
        joined = queries if held is None else torch.cat([held, queries], dim=1)
        self._queries[ordinal] = joined[:, -self._needs.queries :].clone()

    def _add_moments(self, ordinal: int, queries: Tensor, first: int, real: Tensor | None) -> None:
        length = queries.shape[1]
        if real is None:
            position = torch.arange(first, first + length, device=queries.device).expand(len(queries), -1)
        else:
            position = real.cumsum(-1)[:, -length:] - 1
        counted = position >= QueryMoments.SKIPPED
        held = self._query_sums[ordinal]
        pairs = zip(queries.split(TOKENS_PER_SUM, dim=1), counted.split(TOKENS_PER_SUM, dim=1), strict=True)
        for part, real_ones in pairs:
            chosen = part.double() * real_ones[:, :, None, None]
            new = _QuerySums(real_ones.sum(-1), chosen.sum(1), torch.einsum("bthi,bthj->bhij", chosen, chosen))
            if held is not None:
                new = _QuerySums(held.count + new.count, held.first + new.first, held.second + new.second)
            held = new
        self._query_sums[ordinal] = held

    @property
    def signals(self) -> list[Tensor]:
        """Per GDN ordinal `[B, T, 3, HV]`; empty if none were recorded."""
        self.join_signals()
        return [chunks[0] for chunks in self._signals if chunks]

    def join_signals(self) -> None:
        """Lay layers of a run side by side in one tensor, so that a scorer reads them at once without a copy.

        Runs are joined one after another, and the chunks of each let go: at no time more than one run is held twice.
        """
        if self._signals_joined:
            return
        for run in self._runs:
            chunks = [self._signals[i] for i in run if self._signals[i]]
            for i, joined in zip(run, _side_by_side(chunks), strict=False):
                self._signals[i] = [joined]
        self._signals_joined = True

    @property
    def hidden(self) -> list[Tensor]:
        """Per attention ordinal `[B, T, C]`; empty if not needed."""
        return _joined(self._hidden)

    @property
    def queries(self) -> list[Tensor]:
        """Per attention ordinal `[B, t, heads, D]` of the last t tokens; empty if not needed."""
        return [queries for queries in self._queries if queries is not None]

    @property
    def query_moments(self) -> list[QueryMoments]:
        """Per attention ordinal; empty if not needed."""
        return [sums.moments() for sums in self._query_sums if sums is not None]

    @property
    def tensors(self) -> list[Tensor | None]:
        """Everything held for scoring; gate sums, one number a row, not counted."""
        chunks = [chunk for layers in (self._signals, self._hidden) for of_layer in layers for chunk in of_layer]
        sums = [tensor for of_layer in self._query_sums if of_layer is not None for tensor in vars(of_layer).values()]
        return [*chunks, *self._queries, *sums]

    @property
    def gate_means(self) -> list[list[float]]:
        """Per row and attention layer, the mean of sigmoid(output gate); empty if no gates were recorded."""
        sums = [total.cpu() for total in self._gate_sums if total is not None]
        if not sums:
            return []
        return [[gates / max(tokens, 1) for gates, tokens in row] for row in torch.stack(sums, dim=1).tolist()]

    def lengths(self, needs: Needs) -> set[int]:
        """Tokens recorded of each layer, of what is recorded token by token: one number where none is missing."""
        recorded = [*(self._signals if needs.signals else ()), *(self._hidden if needs.hidden else ())]
        return {sum(chunk.shape[1] for chunk in chunks) for chunks in recorded}

    def has_gates_of(self, lengths: list[int]) -> bool:
        """Whether the output gates of all tokens were recorded, whose numbers by row these are."""
        return all(total is not None and total[:, 1].tolist() == lengths for total in self._gate_sums)

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        """Carry a change of the batch dimension through the record."""
        self._signals = [[function(chunk) for chunk in chunks] for chunks in self._signals]
        self._signals_joined = False
        self._hidden = [[function(chunk) for chunk in chunks] for chunks in self._hidden]
        self._queries = [None if queries is None else function(queries) for queries in self._queries]
        self._query_sums = [
            None if sums is None else _QuerySums(function(sums.count), function(sums.first), function(sums.second))
            for sums in self._query_sums
        ]
        self._gate_sums = [None if total is None else function(total) for total in self._gate_sums]


def _append(chunks: list[Tensor], new: Tensor) -> None:
    """Add a chunk; short ones are joined with one no longer, as in a binary counter."""
    chunks.append(new)
    while len(chunks) > 1 and chunks[-2].shape[1] <= chunks[-1].shape[1] <= SHORT_CHUNK // 2:
        chunks[-2:] = [torch.cat(chunks[-2:], dim=1)]


def _joined(layers: list[list[Tensor]]) -> list[Tensor]:
    return [chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=1) for chunks in layers if chunks]


def _side_by_side(layers: list[list[Tensor]]) -> list[Tensor]:
    """The chunks of each layer joined; views of one tensor `[B, T, layers, 3, HV]` if of one device and dtype."""
    if len({(chunk.device, chunk.dtype) for chunks in layers for chunk in chunks}) != 1:
        return _joined(layers)  # or there are none
    (batch, _, *sizes), length = layers[0][0].shape, sum(chunk.shape[1] for chunk in layers[0])
    assert all(sum(chunk.shape[1] for chunk in chunks) == length for chunks in layers)
    together = layers[0][0].new_empty((batch, length, len(layers), *sizes))
    for i, chunks in enumerate(layers):
        start = 0
        for chunk in chunks:
            together[:, start : (start := start + chunk.shape[1]), i] = chunk
    return list(together.unbind(2))
