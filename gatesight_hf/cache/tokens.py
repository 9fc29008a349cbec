"""What a cache knows of the tokens it has seen: ids, padding, positions, rows; and which of given ids are new.

A value: nothing in it is written to, so that a forward is taken back by going on with the value of before.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..errors import CacheStateError
from .inputs import repeats_of


def _no_ids() -> Tensor:
    return torch.empty((1, 0), dtype=torch.long)


@dataclass(frozen=True, eq=False)
class Tokens:
    """Tokens seen, in slots that all rows share: pads stand before a row's first token.

    Attributes:
        count: Slots, pads among them: the logical length.
        ids: `[B, count]`, int64, or `[1, 0]` at the start; None once embeddings were given.
        padding: `[B, count]`, bool, False at pads; None while no pad was seen.
        rope_deltas: `[B]`, by row, how far positions are from numbers of tokens; None until pictures, or the model
            around the text model, say so.
        pictures: Whether there are images or videos among them.
    """

    count: int = 0
    ids: Tensor | None = field(default_factory=_no_ids)
    padding: Tensor | None = None
    rope_deltas: Tensor | None = None
    pictures: bool = False

    def lengths(self, rows: int) -> list[int]:
        """Tokens of each of `rows` rows, padding not counted."""
        return [self.count] * rows if self.padding is None else self.padding.sum(-1).tolist()

    def with_rows(self, rows: Tensor) -> "Tokens":
        """After a change of the batch dimension: `rows` `[B']`, int64, of the ones held."""

        def chosen(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[rows.to(tensor.device)]

        return replace(self, ids=chosen(self.ids), padding=chosen(self.padding), rope_deltas=chosen(self.rope_deltas))

    def followed_by(self, ids: Tensor | None, length: int, padding: Tensor | None) -> "Tokens":
        """With the tokens of one more forward.

        Args:
            ids: Theirs `[B, length]`; None of embeddings.
            length: Of the forward.
            padding: `[B, count + length]`, or None.
        """
        if ids is None or self.ids is None:
            known = None
        else:
            known = torch.cat([self.ids.to(ids.device).expand(len(ids), -1), ids], dim=1)
        return replace(self, count=self.count + length, ids=known, padding=padding)

    def padding_of(self, rows: int) -> Tensor | None:
        """`padding` of `rows` rows, a multiple of those held: `[rows, count]`, or None."""
        padding = self.padding
        return None if padding is None else padding.repeat_interleave(repeats_of(len(padding), rows), dim=0)

    def mask(self, rows: int, like: Tensor) -> Tensor:
        """Of the slots, as `like` is one of later ones: `[rows, count]`, 0 at pads."""
        padding = self.padding_of(rows)
        if padding is None:
            return torch.ones((rows, self.count), dtype=like.dtype, device=like.device)
        return padding.to(like)

    def new_among(self, ids: Tensor, mask: Tensor) -> int:
        """How many tokens of every row follow those that were seen.

        Args:
            ids: `[B', T]`, everything from the context's start, each row padded on the left as it may be; B' is a
                multiple of the rows held.
            mask: `[B', T]`, 0 at pads.

        Raises:
            CacheStateError: A row does not begin with everything seen, adds nothing, or adds more than another row; or
                some ids are unknown, since embeddings were given.
            ValueError: Pads after a row's first token, or a number of rows that does not fit.
        """
        if self.ids is None:
            raise CacheStateError(
                "The context was prefilled from embeddings, so that its ids are unknown: pass an attention_mask over "
                f"all {self.count} seen tokens and the new ones."
            )
        mask = mask.to(ids.device).bool()
        if bool((mask[:, 1:] < mask[:, :-1]).any()):
            raise ValueError(
                "attention_mask hides tokens after a row's first one: pads stand on the left "
                "(tokenizer.padding_side = 'left')."
            )
        repeats = repeats_of(len(self.ids), len(ids))
        held = self.ids.to(ids.device)
        pads = [0] * len(held) if self.padding is None else (~self.padding).sum(-1).tolist()
        new, begun = [], []
        for row, given in enumerate(ids):
            real, known = given[mask[row]], held[row // repeats, pads[row // repeats] :]
            self._check_begins(row, real, known)
            new.append(len(real) - len(known))
            begun.append(len(known) > 0)
        # A row that has not begun may have more pads before its first token.
        most = max(new)
        if any(count < most and known for count, known in zip(new, begun, strict=True)):
            raise CacheStateError(
                f"Rows go on with different numbers of tokens ({', '.join(map(str, new))}), which GDN layers cannot "
                "pad: ask each from a fork of its own row (fork() and batch_select_indices)."
            )
        return most

    def _check_begins(self, row: int, given: Tensor, known: Tensor) -> None:
        """Raise an error unless `given` `[n]` begins with `known` `[m]` and goes on."""
        ways = (
            "generate takes all ids from the context's start. To go back, use a fork made before. To append the ids "
            f"as new text, pass an attention_mask over the {self.count} seen tokens and the new ones."
        )
        length = min(len(given), len(known))
        differs = (given[:length] != known[:length]).nonzero()
        if len(differs):
            at = int(differs[0])
            raise CacheStateError(
                f"Row {row} of the input parts from what this cache has seen at token {at} of {len(known)} (without "
                f"padding): {int(given[at])} is given, {int(known[at])} was seen. {ways}"
            )
        if len(given) <= len(known):
            raise CacheStateError(
                f"Row {row} of the input has {len(given)} tokens, all among the {len(known)} that this cache has seen: "
                f"it cannot go back to a shorter prefix. Append the question to everything seen. {ways}"
            )

    def laid_out(self, ids: Tensor, new: int) -> Tensor:
        """All ids `[B', count + new]` in the slots that they have here; `ids` itself if it is as wide.

        Args:
            ids: As `new_among` has found them right, so that of one width every token has one slot.
            new: What it gave.
        """
        if ids.shape[1] == self.count + new:
            return ids
        assert self.ids is not None
        held = self.ids.to(ids.device).repeat_interleave(repeats_of(len(self.ids), len(ids)), dim=0)
        return torch.cat([held, ids[:, ids.shape[1] - new :]], dim=1)
