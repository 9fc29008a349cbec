"""GateSightCache: the life of one context. Prefill, compaction, forks, serving."""

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .budget import allocate, check_allocation, check_kept_fraction
from .errors import CacheStateError
from .estimator import Estimator
from .hybrid import HybridSpec
from .layers import GateSightAttentionLayer, GDNStateLayer
from .scoring import Prefill, Scorer
from .selection import select
from .signals import SignalSink, attach


@dataclass(frozen=True)
class CacheReport:
    """What a cache holds and what it cost. Bytes are those of the tensors' own storages.

    Attributes:
        logical_length: Tokens seen, padding included.
        physical_lengths: Per attention layer, entries held per head (of the longest row).
        kept_per_layer: Per row and attention layer, context entries kept per head; empty before compaction.
        kept_fraction: Kept share of the evictable entries that was asked for.
        achieved_fraction: The share that was kept, protected prefix not counted; None before compaction.
        gate_means: Per row and attention layer, mean of sigmoid(output gate); empty if not needed.
        kv_bytes_before: Attention cache just before compaction; None before compaction.
        kv_bytes: Attention cache now.
        gdn_bytes: Convolution and recurrent states now.
        signal_bytes: Signals held for scoring now; 0 after compaction.
        seconds: Wall time of `prefill` (recorded forwards), `score` (with budget and selection) and `compact`.
    """

    logical_length: int
    physical_lengths: list[int]
    kept_per_layer: list[list[int]]
    kept_fraction: float
    achieved_fraction: float | None
    gate_means: list[list[float]]
    kv_bytes_before: int | None
    kv_bytes: int
    gdn_bytes: int
    signal_bytes: int
    seconds: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Recording:
    """What is gathered of the context until compaction."""

    ids: list[Tensor] = field(default_factory=list)
    ids_known: bool = True
    signals: list[list[Tensor]] = field(default_factory=list)
    gate_sums: list[Tensor | None] = field(default_factory=list)
    tokens: int = 0

    def copy(self) -> "_Recording":
        return _Recording(
            list(self.ids), self.ids_known, [list(chunks) for chunks in self.signals], list(self.gate_sums), self.tokens
        )


@dataclass
class _Selection:
    """A decided compaction: carried out layer by layer, and resumed if a layer fails."""

    indices: list[Tensor | None]
    valid: list[Tensor]
    kept: list[list[int]]
    achieved: float
    gate_means: list[list[float]]
    bytes_before: int


class GateSightCache(Cache, SignalSink):
    """A KV cache for hybrid GDN/attention models that keeps a fraction of the context's entries.

    Until compaction it behaves as `DynamicCache` and records GDN signals. `generate` compacts it once, when the prompt
    is prefilled; after direct forwards call `compact()`. Keys keep the rotary angle of their first position, and later
    tokens go on from the logical length.

    Args:
        scorer (`Scorer`): Rates KV entries, for example an `Estimator`.
        model (`PreTrainedModel`): The hybrid model; hooks are attached to it once (`gatesight_hf.signals.attach`).
        kept_fraction (`float`): Share of KV entries outside the protected prefix that stays, in (0, 1].
        protected_prefix (`int`): First tokens of each row that always stay and are not counted.
        allocation (`str`): How layers share the budget: `gate` (mean output gate), `flat` or `pyramid`.
        block_size (`int`): Round each layer's entries up to whole blocks, as paged engines do.

    Raises:
        ValueError: Kept fraction outside (0, 1], negative prefix, unknown allocation.
        UnsupportedModelError: The model is no hybrid of a known family.
        EstimatorMismatchError: The estimator is for another layout.
    """

    def __init__(
        self,
        scorer: Scorer,
        model: Any,
        kept_fraction: float = 0.1,
        protected_prefix: int = 0,
        allocation: str = "gate",
        block_size: int = 1,
    ) -> None:
        if not isinstance(scorer, Scorer):
            raise TypeError(
                f"scorer must be an Estimator or another scorer, got {type(scorer).__name__}; to load one by name use "
                "GateSightCache.from_pretrained(name, model=model)."
            )
        if isinstance(protected_prefix, bool) or not isinstance(protected_prefix, int) or protected_prefix < 0:
            raise ValueError(f"protected_prefix is a number of tokens >= 0, got {protected_prefix!r}.")
        check_allocation(allocation)
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}.")
        spec = HybridSpec.from_config(model.config)
        scorer.check(spec)
        attach(model)
        self._start(spec, scorer, check_kept_fraction(kept_fraction), protected_prefix, allocation, block_size)

    def _start(
        self, spec: HybridSpec, scorer: Scorer, kept_fraction: float, protected_prefix: int, allocation: str, block: int
    ) -> None:
        layers: list[Any] = [None] * (len(spec.gdn_layers) + len(spec.attention_layers))
        for i in spec.gdn_layers:
            layers[i] = GDNStateLayer()
        for i in spec.attention_layers:
            layers[i] = GateSightAttentionLayer()
        Cache.__init__(self, layers=layers)
        self.spec = spec
        self.scorer = scorer
        self.kept_fraction = kept_fraction
        self.protected_prefix = protected_prefix
        self.allocation = allocation
        self.block_size = block
        self._clear()

    def _clear(self) -> None:
        self._recording: _Recording | None = _Recording(
            signals=[[] for _ in self.spec.gdn_layers], gate_sums=[None] * self.spec.num_attention_layers
        )
        self._selection: _Selection | None = None
        self._context_ids: Tensor | None = None
        self._padding: Tensor | None = None
        self._compact_at: int | None = None
        self._rollback: tuple[Any, ...] | None = None
        self._began = 0.0
        self._seconds = {"prefill": 0.0, "score": 0.0, "compact": 0.0}

    @classmethod
    def from_pretrained(cls, estimator: str | Path, *, model: Any, **options: Any) -> "GateSightCache":
        """Load an estimator and make a cache with it.

        Args:
            estimator: Folder of an estimator.
            model: The model it was trained for.
            options: `kept_fraction`, `protected_prefix`, `allocation`, `block_size`.

        Raises:
            FileNotFoundError, ValueError: See `Estimator.from_pretrained`.
            UnsupportedModelError, EstimatorMismatchError: See `GateSightCache`.
        """
        return cls(Estimator.from_pretrained(estimator), model, **options)

    # -- parts ---------------------------------------------------------------------------------------------------------

    @property
    def attention_layers(self) -> list[GateSightAttentionLayer]:
        """By attention ordinal."""
        return [self.layers[i] for i in self.spec.attention_layers]  # type: ignore[misc]

    @property
    def gdn_layers(self) -> list[GDNStateLayer]:
        """By GDN ordinal."""
        return [self.layers[i] for i in self.spec.gdn_layers]  # type: ignore[misc]

    @property
    def is_compacted(self) -> bool:
        return self._recording is None

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        """Rows held; -1 before the first forward."""
        tail = self.attention_layers[0].tail_keys
        return -1 if tail is None else tail.shape[0]

    # -- compaction ----------------------------------------------------------------------------------------------------

    def compact(self) -> CacheReport:
        """Score the context, decide the budgets, keep the best entries and free the rest.

        Nothing changes if scoring or selection fails. Layers are compacted one after another, each at once or not at all;
        if one fails, all the others stay usable and a second call goes on with the rest.

        Raises:
            CacheStateError: Nothing was prefilled, or the cache is compacted already.
            ValueError: The scorer gave NaN, or a model without output gates with `allocation="gate"`.
        """
        if self._recording is None:
            raise CacheStateError(
                "This cache is compacted already; the entries that were evicted are gone. Use fork() to ask several "
                "questions, or reset() to prefill another context."
            )
        self._recover()
        if self.get_seq_length() == 0:
            raise CacheStateError("Nothing to compact: run the model on the context with this cache first.")
        with torch.no_grad():
            if self._selection is None:
                begun = self._clock()
                self._selection = self._select(self._recording)
                self._seconds["score"] = self._clock() - begun
            begun = self._clock()
            for layer, indices, valid in zip(
                self.attention_layers, self._selection.indices, self._selection.valid, strict=True
            ):
                if layer.kept_keys is not None:
                    continue
                if indices is None:
                    layer.keep_all(valid)
                else:
                    layer.compact(indices, valid)
        if self._recording.ids_known:
            self._context_ids = torch.cat(self._recording.ids, dim=1)
        self._recording = None
        self._selection.indices = []
        self._seconds["compact"] = self._clock() - begun
        return self.report()

    def prefill(self) -> Prefill:
        """What has been recorded of the context, as scorers see it.

        Raises:
            CacheStateError: The cache is compacted, and the record gone.
        """
        if self._recording is None:
            raise CacheStateError("The record of the prefill is freed at compaction; read it before.")
        layers = self.attention_layers
        keys, values = [layer.tail_keys for layer in layers], [layer.tail_values for layer in layers]
        if None in keys:
            raise CacheStateError("Nothing recorded: run the model on the context with this cache first.")
        signals = [torch.cat(chunks, dim=1) for chunks in self._recording.signals if chunks]
        return Prefill(self.spec, self._lengths(), signals, keys, values)  # type: ignore[arg-type]

    def gate_means(self) -> list[list[float]]:
        """Per row and attention layer, the mean of sigmoid(output gate) over the context's tokens and channels."""
        sums = self._recording.gate_sums if self._recording is not None else []
        if self._recording is None or any(total is None for total in sums):
            return self._selection.gate_means if self._selection is not None else []
        table = torch.stack([total.cpu() for total in sums if total is not None], dim=1)
        return (table / torch.tensor(self._lengths()).unsqueeze(1)).tolist()

    def _lengths(self) -> list[int]:
        if self._padding is None:
            return [self.get_seq_length()] * self.batch_size
        return self._padding.sum(-1).tolist()

    def _select(self, recording: _Recording) -> _Selection:
        prefill = self.prefill()
        lengths, count = prefill.lengths, self.spec.num_attention_layers
        slots = self.get_seq_length()
        protected = [min(self.protected_prefix, length) for length in lengths]
        means = self.gate_means()
        counts = [
            allocate(
                self.kept_fraction,
                length - first,
                count,
                allocation=self.allocation,
                gate_means=means[row] if means else None,
                block_size=self.block_size,
            )
            for row, (length, first) in enumerate(zip(lengths, protected, strict=True))
        ]
        all_indices: list[Tensor | None] = []
        all_valid: list[Tensor] = []
        for j in range(count):
            of_layer = [counts[row][j] for row in range(len(lengths))]
            if all(k + p == n for k, p, n in zip(of_layer, protected, lengths, strict=True)):
                slot = torch.arange(slots, device=prefill.keys[j].device)
                first_slot = torch.tensor([slots - n for n in lengths], device=slot.device)
                all_indices.append(None)
                all_valid.append(slot >= first_slot.unsqueeze(1))
                continue
            scores = self.scorer.score(prefill, j)
            expected = tuple(prefill.keys[j].shape[:3])
            if tuple(scores.shape) != expected:
                raise ValueError(f"{self.scorer} gave scores of shape {tuple(scores.shape)}, expected {expected}.")
            indices, valid = select(scores.to(prefill.keys[j].device), of_layer, lengths, self.protected_prefix)
            all_indices.append(indices)
            all_valid.append(valid)
        evictable = count * sum(n - p for n, p in zip(lengths, protected, strict=True))
        return _Selection(
            indices=all_indices,
            valid=all_valid,
            kept=[[k + protected[row] for k in counts[row]] for row in range(len(lengths))],
            achieved=sum(map(sum, counts)) / evictable if evictable else 1.0,
            gate_means=means,
            bytes_before=self._kv_bytes(),
        )

    # -- forks ---------------------------------------------------------------------------------------------------------

    def fork(self) -> "GateSightCache":
        """A child session: shares this cache's entries, owns its GDN states and everything appended later.

        The parent is never changed by a child. An uncompacted cache can be forked too; each fork is then compacted on its
        own.
        """
        self._recover()
        child = object.__new__(type(self))
        vars(child).update(vars(self))
        child.layers = [layer.fork() for layer in self.layers]  # type: ignore[union-attr]
        child._recording = None if self._recording is None else self._recording.copy()
        child._seconds = dict(self._seconds)
        child._compact_at = None
        return child

    def reset(self) -> None:
        """Forget the context: the cache is as new, and can prefill another one."""
        super().reset()
        self._clear()

    # -- reports -------------------------------------------------------------------------------------------------------

    def report(self) -> CacheReport:
        """Lengths, bytes and seconds as they are now."""
        selection = self._selection
        chunks = [] if self._recording is None else [c for layer in self._recording.signals for c in layer]
        return CacheReport(
            logical_length=self.get_seq_length(),
            physical_lengths=[layer.physical_length for layer in self.attention_layers],
            kept_per_layer=[] if selection is None else [list(row) for row in selection.kept],
            kept_fraction=self.kept_fraction,
            achieved_fraction=None if selection is None else selection.achieved,
            gate_means=self.gate_means(),
            kv_bytes_before=None if selection is None else selection.bytes_before,
            kv_bytes=self._kv_bytes(),
            gdn_bytes=sum(layer.nbytes for layer in self.gdn_layers),
            signal_bytes=_storage_bytes(chunks),
            seconds=dict(self._seconds),
        )

    def _kv_bytes(self) -> int:
        names = ("kept_keys", "kept_values", "tail_keys", "tail_values")
        return _storage_bytes(getattr(layer, name) for layer in self.attention_layers for name in names)

    def __repr__(self) -> str:
        state = "compacted" if self.is_compacted else "recording"
        held = [layer.physical_length for layer in self.attention_layers]
        return (
            f"GateSightCache({state}, kept_fraction={self.kept_fraction}, allocation={self.allocation!r}, "
            f"logical_length={self.get_seq_length()}, physical_lengths={held})"
        )

    def _clock(self) -> float:
        tail = self.attention_layers[0].tail_keys
        if tail is not None and tail.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    # -- what transformers calls beyond the layers ---------------------------------------------------------------------

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._map_rows(lambda rows: rows.repeat_interleave(repeats, dim=0), lambda row: [row] * repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._select_rows(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._select_rows(beam_idx)

    def _select_rows(self, indices: Tensor) -> None:
        chosen = torch.arange(self._rows())[indices.cpu()].tolist()
        self._map_rows(lambda rows: rows[indices.to(rows.device)], None, chosen)

    def _rows(self) -> int:
        held = self._context_ids if self._context_ids is not None else self._padding
        if held is not None:
            return held.shape[0]
        return len(self._selection.kept) if self._selection is not None else self.batch_size

    def _map_rows(self, function: Any, repeat: Any, chosen: list[int] | None = None) -> None:
        """Carry a change of the batch dimension through everything the cache holds per row besides its layers."""

        def rows_of(table: list[Any]) -> list[Any]:
            if chosen is not None:
                return [table[i] for i in chosen] if table else []
            return [copy for row in table for copy in repeat(row)]

        if self._padding is not None:
            self._padding = function(self._padding)
        if self._context_ids is not None:
            self._context_ids = function(self._context_ids)
        if self._selection is not None:
            old = self._selection
            self._selection = _Selection(
                old.indices, old.valid, rows_of(old.kept), old.achieved, rows_of(old.gate_means), old.bytes_before
            )
        if (recording := self._recording) is not None:
            recording.ids = [function(ids) for ids in recording.ids]
            recording.signals = [[function(chunk) for chunk in chunks] for chunks in recording.signals]
            recording.gate_sums = [None if total is None else function(total) for total in recording.gate_sums]

    def activate_past_recording(self) -> None:
        self.gdn_layers[0].activate_past_recording()

    # -- what the hooks call (SignalSink) ------------------------------------------------------------------------------

    def wants_signals(self) -> bool:
        return self._recording is not None and self.scorer.needs_signals

    def wants_gates(self) -> bool:
        return self._recording is not None and self.allocation == "gate"

    def begin_forward(self, model_inputs: dict[str, Any]) -> dict[str, Any]:
        self._recover()
        ids, embeds = model_inputs.get("input_ids"), model_inputs.get("inputs_embeds")
        new = ids if ids is not None else embeds
        if new is None:
            raise ValueError("The decoder needs input_ids or inputs_embeds.")
        rows, length = new.shape[:2]
        if length == 0:
            raise CacheStateError(
                f"No new tokens: the cache has seen {self.get_seq_length()} tokens, and all of the input is among them. "
                "Append the question to the context."
            )
        self._match_batch(rows)
        padding = self._full_padding(model_inputs.get("attention_mask"), rows, length)

        recording = self._recording
        saved = None if recording is None else recording.copy()
        self._rollback = ([layer.snapshot() for layer in self.layers], saved, self._padding)  # type: ignore[union-attr]
        self._padding = padding
        if recording is not None:
            recording.tokens = length
            if ids is None:
                recording.ids_known = False
            else:
                recording.ids.append(ids)
            self._began = self._clock()
        mask = model_inputs.get("attention_mask") if padding is None else padding.long()
        return {**model_inputs, "attention_mask": mask}

    def end_forward(self, completed: bool) -> None:
        if not completed:
            self._recover()
            return
        self._rollback = None
        if self._recording is not None:
            self._seconds["prefill"] += self._clock() - self._began
            if self._compact_at is not None and self.get_seq_length() >= self._compact_at:
                self.compact()

    def _recover(self) -> None:
        """Undo a forward that did not end (an error, or an interrupt that no hook sees)."""
        if self._rollback is not None:
            snapshots, self._recording, self._padding = self._rollback
            for layer, snapshot in zip(self.layers, snapshots, strict=True):
                layer.restore(snapshot)  # type: ignore[union-attr]
            self._rollback = None

    def _match_batch(self, rows: int) -> None:
        """Beams, several sequences or several questions at once: one held row serves many."""
        held = self.batch_size
        if held in (-1, rows):
            return
        if rows % held:
            raise ValueError(f"The cache holds {held} rows and the input has {rows}: not a multiple.")
        self.batch_repeat_interleave(rows // held)

    def _full_padding(self, mask: Any, rows: int, length: int) -> Tensor | None:
        """The 2-D mask of everything seen and to be seen `[B, seen + length]`, bool, or None if there is no padding."""
        if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
            raise ValueError("GateSightCache needs the 2-D attention mask [batch, tokens], not a prepared mask.")
        seen = self.get_seq_length()
        if mask is not None and mask.shape[1] not in (length, seen + length):
            raise ValueError(
                f"attention_mask covers {mask.shape[1]} tokens; expected {seen + length} (all seen and new) or {length} (new)."
            )
        late = None if mask is None else mask[:, -length:].bool()
        if late is not None and bool(late.all()):
            late = None
        past = self._padding
        if mask is not None and mask.shape[1] > length and seen and past is None and not bool(mask[:, :seen].all()):
            raise ValueError("attention_mask hides tokens that the cache has already seen as real ones.")
        if late is not None and self._recording is not None and not bool((late.int().diff(dim=1) >= 0).all()):
            raise ValueError("Pad the context on the left: tokenizer.padding_side = 'left'.")
        if late is None and past is None:
            return None
        device = (late if late is not None else past).device  # type: ignore[union-attr]
        if late is not None and self._recording is not None and seen:
            before = torch.zeros(rows, dtype=torch.bool) if past is None else past.any(-1).cpu()
            if past is None or bool((before & ~late.cpu().all(-1)).any()):
                raise ValueError("Padding inside the context: pads may only stand before a row's first token.")
        return torch.cat(
            [
                past if past is not None else torch.ones((rows, seen), dtype=torch.bool, device=device),
                late if late is not None else torch.ones((rows, length), dtype=torch.bool, device=device),
            ],
            dim=1,
        )

    def convolution_context(self, gdn: int) -> Tensor | None:
        layer = self.gdn_layers[gdn]
        state = layer.conv_states[0]
        return state.clone() if state is not None and layer.has_previous_state[0] else None

    def record_signals(self, gdn: int, signals: Tensor) -> None:
        if self._recording is not None:
            self._recording.signals[gdn].append(signals)

    def record_gate(self, ordinal: int, gate: Tensor) -> None:
        if self._recording is None:
            return
        per_token = gate.sigmoid().flatten(2).mean(-1, dtype=torch.float32)
        if self._padding is not None:
            per_token = per_token * self._padding[:, -gate.shape[1] :].to(per_token.device)
        total = self._recording.gate_sums[ordinal]
        new = per_token.sum(-1, dtype=torch.float64)
        self._recording.gate_sums[ordinal] = new if total is None else total + new

    def mask_for(self, ordinal: int, mask: Any, query: Tensor, implementation: str) -> Any:
        layer = self.attention_layers[ordinal]
        if layer.kept_keys is None:
            # Layers have one length before compaction, so that the mask all layers share is right.
            return mask
        return layer.attention_mask(query.shape[1], self._padding, implementation, query.dtype)

    def begin_generate(self, model: Any, inputs: Tensor | None, arguments: dict[str, Any]) -> dict[str, Any]:
        self._recover()
        config = arguments.get("generation_config")
        for name in ("assistant_model", "prompt_lookup_num_tokens"):
            if arguments.get(name) is not None or getattr(config, name, None) is not None:
                raise ValueError(
                    f"{name}: GateSightCache does not support assisted decoding, since rejected tokens cannot be taken out "
                    "of GDN states. Generate without it."
                )
        ids = inputs if inputs is not None else arguments.get("input_ids")
        embeds, mask = arguments.get("inputs_embeds"), arguments.get("attention_mask")
        seen = self.get_seq_length()
        if embeds is not None:
            self._compact_at = embeds.shape[1]
        elif ids is not None:
            self._compact_at = ids.shape[1]
            if seen and mask is not None and mask.shape[1] != ids.shape[1]:
                if mask.shape[1] != seen + ids.shape[1]:
                    raise ValueError(
                        f"attention_mask covers {mask.shape[1]} tokens, but the cache has seen {seen} and {ids.shape[1]} "
                        f"are given: pass a mask of {ids.shape[1]} (all tokens given) or {seen + ids.shape[1]}."
                    )
                self._compact_at = mask.shape[1]
            elif seen and self._are_new(ids):
                pad = model.generation_config.pad_token_id
                late = mask if mask is not None else torch.ones_like(ids) if pad is None else ids.ne(pad).long()
                past = torch.ones((len(ids), seen), dtype=late.dtype, device=late.device)
                if self._padding is not None:
                    past = self._padding.to(past).repeat_interleave(len(ids) // self.batch_size, dim=0)
                self._compact_at = seen + ids.shape[1]
                return {**arguments, "attention_mask": torch.cat([past, late], dim=1)}
        return arguments

    def end_generate(self) -> None:
        self._compact_at = None

    def _are_new(self, ids: Tensor) -> bool:
        """Whether ids are new tokens (True) or everything from the context's start (False), by comparing them.

        Raises:
            CacheStateError: They stop inside what the cache has seen, or leave the context half-way.
        """
        seen = self.get_seq_length()
        known = self._known_ids()
        if known is None:
            raise CacheStateError(
                "The context was prefilled from embeddings, so that its ids are unknown: pass an attention_mask over all "
                f"{seen} seen tokens and the new ones."
            )
        length = min(ids.shape[1], known.shape[1])
        rows = ids[:, :length].to(known.device)
        if len(ids) % len(known):
            raise ValueError(f"The cache holds {len(known)} rows and the input has {len(ids)}: not a multiple.")
        same = (rows == known[:, :length].repeat_interleave(len(ids) // len(known), dim=0)).all(0)
        common = length if bool(same.all()) else int(same.int().argmin())
        if common == length:
            if ids.shape[1] > seen:
                return False
            if ids.shape[1] >= known.shape[1] or ids.shape[1] < seen:
                raise CacheStateError(
                    f"The input has {ids.shape[1]} tokens, all of them the start of the {seen} that this cache has seen: a "
                    "session cannot go back to a shorter prefix. Append the question to the whole text seen so far, pass "
                    "the question alone, or fork the parent again."
                )
        if common >= max(8, length // 2) and common < length:
            raise CacheStateError(
                f"The input equals the cached context in its first {common} tokens and differs after that. If it should "
                "repeat the context, tokenize context and question apart and concatenate the ids; if it is new text, pass "
                f"an attention_mask of {seen + ids.shape[1]} tokens."
            )
        return True

    def _known_ids(self) -> Tensor | None:
        if self._recording is None:
            return self._context_ids
        return torch.cat(self._recording.ids, dim=1) if self._recording.ids_known and self._recording.ids else None


def _storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages behind some tensors, each storage once."""
    storages = {}
    for tensor in tensors:
        if tensor is not None and tensor.numel():
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


