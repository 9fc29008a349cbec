"""Cache layer of sparse attention (QSA), whose indexer picks the entries that each query attends to.

The indexer gives every token one index key, averages the keys of blocks of consecutive tokens that a query sees, and
lets the query attend to the blocks of the highest scores within its token budget, and to the last tokens that fill no
block yet. One index serves all KV heads of a layer. These therefore keep the same entries (`compaction/plan.py`), and
the kept tokens are regrouped into new blocks in position order: what the model's own indexer would do with a full
cache and a mask on the evicted entries.
"""

from itertools import groupby
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import GateSightAttentionLayer
from .view import apply_rotary


class SparseAttentionLayer(GateSightAttentionLayer):
    """KV entries of one QSA layer and its index; C channels of an index key, R rotary ones, r tokens in a block.

    Until compaction the model's own indexer reads the raw keys of all tokens. Compaction turns them into the keys of
    the kept tokens' blocks; from then on the layer itself scores blocks and adds those that new tokens fill.

    Attributes:
        block_keys (`Tensor | None`): `[B, blocks, C]`, averaged, normalised and rotated by the position of the block's
            first token; None before compaction. A row's first blocks are its own, and others may hold anything.
        raw_keys (`Tensor | None`): `[B, T, C]`, keys as the projection gives them: of all tokens before compaction, of
            the last r - 1 after it.
        raw_cos, raw_sin (`Tensor | None`): `[B, T, R]`, rotary angles of the same tokens. All layers share them until
            compaction.
        positions (`Tensor | None`): `[B, axes, T]`, of the context, only on the first layer of the model.
        kept_counts (`Tensor | None`): `[B]`, int64, on the CPU: kept tokens of each row.

    Args:
        indexer: The layer's indexer; its norm of keys and the size of a block are taken from it.
    """

    needs_mask = True
    kind = None
    batched: ClassVar[tuple[str, ...]] = (
        *GateSightAttentionLayer.batched, "block_keys", "raw_keys", "raw_cos", "raw_sin", "positions", "kept_counts"
    )  # fmt: skip

    def __init__(self, indexer: Any) -> None:
        super().__init__()
        self._norm = indexer.k_layernorm
        self._ratio: int = indexer.compress_ratio

    def _clear(self) -> None:
        super()._clear()
        self.block_keys: Tensor | None = None
        self.raw_keys: Tensor | None = None
        self.raw_cos: Tensor | None = None
        self.raw_sin: Tensor | None = None
        self.positions: Tensor | None = None
        self.kept_counts: Tensor | None = None

    @property
    def index_tensors(self) -> list[Tensor]:
        held = (self.block_keys, self.raw_keys, self.raw_cos, self.raw_sin)
        return [tensor for tensor in held if tensor is not None]

    # -- what transformers reads ---------------------------------------------------------------------------------------

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """`[axes, B, T]`; the model appends those of every forward, and makes angles of all of them for its layers."""
        return None if self.positions is None else self.positions.transpose(0, 1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor | None) -> None:
        self.positions = None if positions is None else positions.transpose(0, 1)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Append raw keys `[B, t, C]`; returns those of all tokens. Only until compaction."""
        assert self.block_keys is None
        held = indexer_key_states[:, :0] if self.raw_keys is None else self.raw_keys
        self.raw_keys = torch.cat([held, indexer_key_states], dim=1)
        return self.raw_keys

    def attention_mask(self, *args: Any, **kwargs: Any) -> Tensor | None:
        mask = super().attention_mask(*args, **kwargs)
        assert mask is not None and self.tail_keys is not None
        # The model's own indexer, which runs on until this layer is compacted too, reads the mask of every row.
        return mask.expand(len(self.tail_keys), -1, -1, -1)

    # -- the index after compaction ------------------------------------------------------------------------------------

    def select(self, indexer: Any, hidden: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor | None:
        """Take the coming tokens into the index, and pick what each of them attends to, causality apart.

        Args:
            indexer: The layer's indexer.
            hidden: `[B, T, hidden size]`, the attention layer's input.
            angles: cos and sin `[B, t, R]`, the last T of them those of the coming tokens.

        Returns:
            `[B, 1, T, entries]`, bool, or `[1, 1, 1, 1]` where the budget covers everything; None before compaction,
            when all is left to the indexer.
        """
        if self.block_keys is None:
            # For the whole context, as the model has them: those of the kept tokens are taken from them.
            self.raw_cos, self.raw_sin = angles
            return None
        length, heads, width = hidden.shape[1], indexer.index_n_heads, indexer.index_head_dim
        cos, sin = (table[:, -length:] for table in angles)
        queries, raw = indexer.index_qk_proj(hidden).split([heads * width, width], dim=-1)
        queries = indexer.q_layernorm(queries.unflatten(-1, (heads, width)))
        queries = apply_rotary(queries, cos.unsqueeze(2), sin.unsqueeze(2))
        assert self.kept_counts is not None
        seen = self.kept_counts + self.tail_length
        self._append(raw, cos, sin, seen)
        return self._selected(queries, seen, indexer.block_topk)

    def _append(self, raw: Tensor, cos: Tensor, sin: Tensor, seen: Tensor) -> None:
        """Add tokens, `[B, t, ...]`, and the blocks that they fill; `seen` `[B]` tokens of each row came before."""
        assert self.block_keys is not None and self.raw_keys is not None
        assert self.raw_cos is not None and self.raw_sin is not None
        left, pending, done = self._ratio - 1, seen % self._ratio, seen // self._ratio
        filled = int(((pending + raw.shape[1]) // self._ratio).max())
        raw, cos, sin = (
            torch.cat(pair, dim=1) for pair in ((self.raw_keys, raw), (self.raw_cos, cos), (self.raw_sin, sin))
        )
        if filled:
            device = raw.device
            tokens = (left - pending).unsqueeze(1) + torch.arange(filled * self._ratio)
            # Rows that fill fewer blocks get some that do not count, and that later ones replace.
            keys = self._pooled(raw, cos, sin, tokens.clamp(max=raw.shape[1] - 1).to(device))
            places = (done.unsqueeze(1) + torch.arange(filled)).to(device)
            grown = F.pad(self.block_keys, (0, 0, 0, int(done.max()) + filled - self.block_keys.shape[1]))
            self.block_keys = grown.scatter(1, _wide(places, keys), keys)
        # Cloned, so that they do not hold on to the whole of a long question.
        last = slice(raw.shape[1] - left, None)
        self.raw_keys, self.raw_cos, self.raw_sin = raw[:, last].clone(), cos[:, last].clone(), sin[:, last].clone()

    def _pooled(self, raw: Tensor, cos: Tensor, sin: Tensor, tokens: Tensor) -> Tensor:
        """Keys `[B, n, C]` of blocks whose tokens `[B, n * r]` are at these places of `raw`, `cos` and `sin`."""
        groups = raw.gather(1, _wide(tokens, raw)).unflatten(1, (tokens.shape[1] // self._ratio, self._ratio))
        pooled = self._norm(groups.float().mean(2).to(raw.dtype))
        first = tokens[:, :: self._ratio]
        return apply_rotary(pooled, cos.gather(1, _wide(first, cos)), sin.gather(1, _wide(first, sin)))

    def _selected(self, queries: Tensor, seen: Tensor, budget: int) -> Tensor:
        """What `select` returns, for index queries `[B, T, heads, C]` after `seen` tokens, and a budget of blocks."""
        assert self.block_keys is not None and self.kept_counts is not None
        batch, length, _, width = queries.shape
        full = (seen.unsqueeze(1) + torch.arange(1, length + 1)) // self._ratio  # blocks that each query sees
        if int(full.max()) <= budget:
            return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=queries.device)
        # The last column is the block that is not full yet.
        blocks = torch.ones((batch, length, int(full.max()) + 1), dtype=torch.bool, device=queries.device)
        for row, counts in enumerate(full.tolist()):
            # Queries that see the same blocks, together: so ties fall as in the indexer's own forward.
            for count, same in groupby(range(length), counts.__getitem__):
                places = list(same)
                if count <= budget:
                    continue
                asked, keys = queries[row, places[0] : places[-1] + 1], self.block_keys[row, :count]
                scores = torch.relu(asked.float() @ keys.float().T).sum(1) / width**0.5
                best = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(budget).indices, True)
                blocks[row, places[0] : places[-1] + 1, :count] = best
        return blocks.gather(2, self._block_of_entry(batch, length).unsqueeze(1).expand(-1, length, -1)).unsqueeze(1)

    def _block_of_entry(self, batch: int, length: int) -> Tensor:
        """`[B, entries]`: number of the block that each entry belongs to, `length` coming ones included."""
        assert self.tail_keys is not None and self.kept_counts is not None
        device = self.tail_keys.device
        if self.kept_valid is None:
            kept = torch.arange(self.kept_length, device=device).expand(batch, -1)
        else:
            kept = (self.kept_valid.cumsum(-1) - 1).clamp_min(0)
        tail = self.kept_counts.unsqueeze(1) + torch.arange(self.tail_length + length)
        return torch.cat([kept, tail.to(device)], dim=1) // self._ratio

    # -- compaction ----------------------------------------------------------------------------------------------------

    def _settle(self, keys: Tensor, values: Tensor, positions: Tensor, valid: Tensor, context: int) -> None:
        assert self.raw_keys is not None and self.raw_cos is not None and self.raw_sin is not None
        raw, cos, sin, left = self.raw_keys, self.raw_cos, self.raw_sin, self._ratio - 1
        # Kept tokens of each row one after another, and those that came after the context behind them.
        late = torch.arange(context, raw.shape[1], device=raw.device).expand(len(raw), -1)
        tokens = torch.cat([positions[:, 0].long(), late], dim=1)
        real = torch.cat([valid, torch.ones_like(late, dtype=torch.bool)], dim=1)
        tokens = tokens.gather(1, real.logical_not().to(torch.uint8).argsort(dim=1, stable=True))
        counts = real.sum(1, keepdim=True)
        blocks = self._pooled(raw, cos, sin, tokens[:, : int(counts.max()) // self._ratio * self._ratio])
        # A row may keep fewer tokens than wait for a block at most, or none: what stands before them does not count.
        last = F.pad(tokens, (left, 0)).gather(1, counts + torch.arange(left, device=raw.device))
        raw, cos, sin = (tensor.gather(1, _wide(last, tensor)) for tensor in (raw, cos, sin))
        super()._settle(keys, values, positions, valid, context)
        self.block_keys, self.raw_keys, self.raw_cos, self.raw_sin = blocks, raw, cos, sin
        self.kept_counts = valid.sum(1).cpu()


def _wide(places: Tensor, tensor: Tensor) -> Tensor:
    """Places `[B, n]` as indices into dimension 1 of `[B, t, C]`."""
    return places.unsqueeze(-1).expand(-1, -1, tensor.shape[-1])
