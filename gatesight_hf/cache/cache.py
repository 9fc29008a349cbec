"""GateSightCache: the life of one context. Prefill, compaction, forks, serving, files."""

from pathlib import Path
from typing import Any

from ..compaction.growing import check_can_grow
from ..compaction.plan import CompactionOptions
from ..entries.sparse import SparseAttentionLayer
from ..entries.states import GDNStateLayer, SlidingAttentionLayer
from ..errors import CacheStateError
from ..models.families import adapter_for
from ..models.hooks import attach
from ..models.hybrid import HybridSpec, find_modules
from ..scoring.estimator import Estimator
from ..scoring.interface import Prefill, Recorder, Scorer, Scores, checked_scores
from . import saving
from .compacting import compact
from .context import Context, check_scorer
from .hooked import HookedCache
from .report import CacheReport, report_of


class GateSightCache(HookedCache):
    """A KV cache for hybrid GDN/attention models that keeps a fraction of the context's entries.

    Until compaction it behaves as `DynamicCache` and records GDN signals. `generate` compacts it once, when the prompt
    is prefilled; after direct forwards call `compact()`. Keys keep the rotary angle of their first position, and later
    tokens go on from the logical length. With sparse attention, all KV heads of a layer keep the same entries, those
    with the best score of any head, and the layer's index shrinks with them (`entries.sparse`). A forward that fails
    leaves the cache as it was before.

    Args:
        scorer: Rates KV entries, for example an `Estimator`.
        model: The hybrid model; hooks are attached to it once (`gatesight_hf.models.attach`).
        kept_fraction: Share of the KV entries that are not protected that stays, in (0, 1].
        protected_prefix: First tokens of each row that always stay and are not counted.
        allocation: How layers share the budget: `gate` (mean output gate; without output gates as `flat`, and a
            warning says so), `flat` or `pyramid`; `score`: in proportion to how many of a layer's entries are among the
            best of all layers; `head`: shares of `gate`, for which the heads of a layer compete by their scores; or
            `global`: entries of all layers and heads compete, as in KVzip. With these two, layers are filled up to
            their fullest head, so that less memory is freed than entries are evicted.
        block_size: Round each layer's entries up to whole blocks, as paged engines do.
        gate_exponent: Power of the mean output gate in `gate` shares.
        growing: Whether tokens after a compaction are recorded, so that `compact()` can be called again; see
            `compaction.growing` for what it keeps. It holds signals of new tokens, and 4 bytes per kept entry and head.
        recompact_every: Compact a growing cache again at the end of a forward after which this many
            tokens or more have come since the last compaction; a question is evicted like any text, so let it be more
            than a question with its answer. A number implies `growing`. The first compaction is not by itself: it is
            that of `generate`, or a call of `compact()`.
        entries_dtype: `int8` holds kept entries as 8-bit integers, see `entries.quantised`; later tokens stay
            in the model's dtype, and so do a layer's entries if NaN or infinity is among them. Every forward turns them
            back, one layer after another, each for as long as it runs. None: the model's dtype.
        protected_suffix: Last tokens of each row at a compaction that always stay and are not counted, such as those of
            a question in the prompt of `generate`, which is compacted as a whole.

    Raises:
        ValueError: Kept fraction outside (0, 1], negative prefix or suffix, unknown allocation or dtype of entries, or
            a scorer that rates a context only as a whole for a cache that grows.
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
        gate_exponent: float = 1.0,
        growing: bool = False,
        recompact_every: int | None = None,
        entries_dtype: str | None = None,
        protected_suffix: int = 0,
    ) -> None:
        options = CompactionOptions(
            kept_fraction,
            protected_prefix,
            allocation,
            block_size,
            gate_exponent,
            growing,
            recompact_every,
            entries_dtype,
            protected_suffix,
        )
        spec = HybridSpec.of(model)
        check_scorer(scorer, spec)
        if options.grows:
            check_can_grow(scorer, spec)
        attach(model)
        super().__init__(Context(model, scorer, options, _layers_for(model, spec)))

    @classmethod
    def from_pretrained(
        cls,
        estimator: str | Path,
        *,
        model: Any,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        **options: Any,
    ) -> "GateSightCache":
        """Load an estimator and make a cache with it.

        Args:
            estimator: Folder of an estimator, or its repo on the Hub.
            model: The model it was trained for.
            revision, token, cache_dir, local_files_only: See `Estimator.from_pretrained`.
            options: Those of `GateSightCache`.

        Raises:
            OSError, ValueError: See `Estimator.from_pretrained`.
            UnsupportedModelError, EstimatorMismatchError: See `GateSightCache`.
        """
        scorer = Estimator.from_pretrained(
            estimator, revision=revision, token=token, cache_dir=cache_dir, local_files_only=local_files_only
        )
        return cls(scorer, model, **options)

    # -- compaction ----------------------------------------------------------------------------------------------------

    def compact(self) -> CacheReport:
        """Score the context, decide the budgets, keep the best entries and free the rest.

        Nothing changes if scoring or selection fails. Layers are then compacted one after another, each at once or not
        at all; if one fails, the cache stays usable, and a second call goes on with the rest. Tokens that came in
        between stay too. A growing cache is compacted as a whole or not at all, and again whenever this is called.

        Raises:
            CacheStateError: Nothing was prefilled, or a cache that does not grow is compacted already.
            ValueError: The scorer gave NaN, or a model without output gates with `allocation="gate"`.
        """
        compact(self.context, self._replay)
        return self.report()

    def _replay(self) -> "GateSightCache":
        """A fork on which a scorer may run the context again."""
        return self.fork(scorer=Recorder(), allocation="flat")

    def prefill(self) -> Prefill:
        """What was recorded of the context, or since the compaction of a growing cache, as scorers see it.

        Raises:
            CacheStateError: Nothing was prefilled, or the cache is compacted and the record gone.
        """
        return self.context.prefill(self._replay)

    def score(self, scorer: Scorer | None = None) -> Scores:
        """Rate the context once, for any number of forks: `fork(scorer=cache.score(), kept_fraction=…)`.

        Args:
            scorer: In place of the cache's own; what it needs must have been recorded.

        Raises:
            CacheStateError: Nothing was prefilled, the cache is compacted, or something needed was not recorded.
            ValueError: Scores of a wrong shape.
        """
        prefill = self.prefill()
        self.context.check_not_begun()
        if self.is_compacted:
            raise CacheStateError("This cache is compacted already: score the context before, for forks of it.")
        if scorer is not None:
            self.context.check_recorded(scorer)
        return Scores(checked_scores(scorer or self.scorer, prefill))

    # -- forks ---------------------------------------------------------------------------------------------------------

    def fork(self, *, scorer: Scorer | None = None, **options: Any) -> "GateSightCache":
        """A child session: shares this cache's entries, owns its GDN states and everything appended later.

        The parent is never changed by a child. An uncompacted cache can be forked too; each fork is then compacted on
        its own, if need be with another scorer or other options, so that one prefill serves many comparisons.

        Args:
            scorer: In place of the parent's; only for an uncompacted parent, whose own scorer has the same needs or
                more (`scoring.Recorder` has a parent record for several).
            options: Those of `GateSightCache`, likewise. A child of a growing cache grows by itself.

        Raises:
            CacheStateError: Another scorer or other options for a compacted parent, or one that needs what was not
                recorded.
            TypeError, ValueError: Options that `GateSightCache` does not have, or values that they cannot have.
        """
        child = object.__new__(type(self))
        vars(child).update(vars(self))
        child.context = self.context.fork(scorer, options)
        child.calls = type(self.calls)(child.context)
        return child

    def reset(self) -> None:
        """Forget the context: the cache is as new, and can prefill another one."""
        with self.context.all_or_nothing():
            super().reset()
            self.context.clear()
        self.calls = type(self.calls)(self.context)

    def tie(self, model: Any) -> None:
        """Go on with another object of the same model: one that was loaded or copied again, or after pickling.

        Args:
            model: Its weights are compared by a sample (`identity`) where those of the cache's model are known.

        Raises:
            SessionMismatchError: It is another model.
            UnsupportedModelError: It is no hybrid of a known family.
        """
        self.context.tie(model)

    # -- files ---------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, *, tokenizer: Any = None) -> None:
        """Write the compacted cache into one file, from which `load` goes on in any process.

        The file (`gatesight_hf.cache.storage`) holds all entries, those shared with a parent too, GDN states, the ids
        of all tokens seen, options, report, and which model, scorer and tokenizer they belong to. It is written beside
        `path` and then takes its place, so that a failure leaves an old file as it was.

        Args:
            path: The file.
            tokenizer: Noted, so that `load` can compare.

        Raises:
            CacheStateError: The cache is not compacted, it grows, or its model is gone.
            OSError: The file cannot be written.
            ValueError: A state holds NaN or infinite values.
        """
        saving.save(self.context, path, tokenizer)

    @classmethod
    def load(
        cls, path: str | Path, model: Any, *, tokenizer: Any = None, scorer: Scorer | None = None
    ) -> "GateSightCache":
        """Read a compacted cache that `save` wrote; it answers as the one that was saved.

        The file may come from anyone: its sizes are checked before memory is taken, and its values before they are
        used. The model runs on one token, whose cache says what the file's tensors must be and where they go.

        Args:
            path: The file.
            model: The model it was saved with: same layout, dtype and weights (of which a sample is compared).
            tokenizer: Compared with the one noted in the file; None is not compared.
            scorer: Likewise. Only needed to prefill another context after `reset()`.

        Raises:
            FileNotFoundError: No such file.
            SessionFileError: The file is not a saved cache, damaged, or of another version.
            SessionMismatchError: It belongs to another model, tokenizer or scorer.
            UnsupportedModelError, EstimatorMismatchError: See `GateSightCache`.
        """
        cache, _ = saving.load(cls, path, model, tokenizer, scorer)
        return cache

    # -- reports -------------------------------------------------------------------------------------------------------

    def report(self) -> CacheReport:
        """Lengths, bytes and seconds as they are now."""
        return report_of(self.context)

    def __repr__(self) -> str:
        state = "compacted" if self.is_compacted else "recording"
        held = [layer.physical_length for layer in self.attention_layers]
        return (
            f"GateSightCache({state}, kept_fraction={self.options.kept_fraction}, "
            f"allocation={self.options.allocation!r}, logical_length={self.get_seq_length()}, physical_lengths={held})"
        )


def _layers_for(model: Any, spec: HybridSpec) -> list[Any]:
    """New layers of a cache, by absolute index."""
    adapter, modules = adapter_for(spec), find_modules(model, spec)
    states = getattr(model.config.get_text_config(decoder=True), "number_of_conv_states", 1)
    layers: dict[int, Any] = {i: GDNStateLayer(states) for i in spec.gdn_layers}
    for i, attention in zip(spec.attention_layers, modules.attention, strict=True):
        layers[i] = SparseAttentionLayer(attention.indexer) if spec.indexed else adapter.cache_layer()
    layers |= {i: SlidingAttentionLayer(spec.sliding_window or 0) for i in spec.sliding_layers or ()}
    return [layers[i] for i in sorted(layers)]
