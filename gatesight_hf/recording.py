"""What a cache gathers of a context until compaction: GDN signals and output gates."""

from collections.abc import Callable

import torch
from torch import Tensor

from .hybrid import HybridSpec


class Recording:
    """Grows by one chunk per forward. Chunks are joined only when a scorer asks for them."""

    def __init__(self, spec: HybridSpec) -> None:
        self._signals: list[list[Tensor]] = [[] for _ in spec.gdn_layers]
        self._gate_sums: list[Tensor | None] = [None] * spec.num_attention_layers

    def copy(self) -> "Recording":
        """An independent record; tensors are shared, since none is ever written to."""
        twin = object.__new__(Recording)
        twin._signals = [list(chunks) for chunks in self._signals]
        twin._gate_sums = list(self._gate_sums)
        return twin

    def add_signals(self, gdn: int, signals: Tensor) -> None:
        """Take `[B, T, 3, HV]` of GDN ordinal `gdn`."""
        self._signals[gdn].append(signals)

    def add_gate(self, ordinal: int, gate: Tensor, padding: Tensor | None) -> None:
        """Take the logits `[B, T, heads, head_dim]` of an output gate; `padding` `[B, T]` is False at pads."""
        per_token = gate.sigmoid().flatten(2).mean(-1, dtype=torch.float32)
        if padding is not None:
            per_token = per_token * padding.to(per_token.device)
        new, total = per_token.sum(-1, dtype=torch.float64), self._gate_sums[ordinal]
        self._gate_sums[ordinal] = new if total is None else total + new

    @property
    def signals(self) -> list[Tensor]:
        """Per GDN ordinal `[B, T, 3, HV]`; empty if none were recorded."""
        return [chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=1) for chunks in self._signals if chunks]

    @property
    def signal_chunks(self) -> list[Tensor]:
        return [chunk for chunks in self._signals for chunk in chunks]

    def gate_means(self, lengths: list[int]) -> list[list[float]]:
        """Per row and attention layer, the mean of sigmoid(output gate); empty if no gates were recorded."""
        sums = [total.cpu() for total in self._gate_sums if total is not None]
        return (torch.stack(sums, dim=1) / torch.tensor(lengths).unsqueeze(1)).tolist() if sums else []

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        """Carry a change of the batch dimension through the record."""
        self._signals = [[function(chunk) for chunk in chunks] for chunks in self._signals]
        self._gate_sums = [None if total is None else function(total) for total in self._gate_sums]
