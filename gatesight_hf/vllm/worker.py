"""The worker's half: parents' signals gathered over steps, scored, and their entries compacted in the pages."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec, MambaSpec
from vllm.v1.worker.cpu_worker import CPUWorker

from ..compaction.plan import plan_compaction
from ..models.hybrid import HybridSpec
from ..scoring.estimator import Estimator
from ..scoring.interface import Prefill, Scorer, Scores, checked_scores
from .messages import Compaction, Outcome, StepMetadata
from .options import METHODS
from .paged import GateSightAttentionSpec, GateSightStateSpec
from .pages import Pages, check_layout
from .ranks import Ranks
from .recording import Recorded, Recorder
from .support import check_engine

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

logger = init_logger(__name__)


class GateSightWorker(CPUWorker):
    """vLLM's CPU worker with a KV-cache group for each attention layer."""

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        specs = dict(super().get_kv_cache_spec())
        for name, spec in specs.items():
            if type(spec) is FullAttentionSpec:
                specs[name] = GateSightAttentionSpec.of(spec, name)
            elif type(spec) is MambaSpec:
                specs[name] = GateSightStateSpec.of(spec)
        return specs

    def load_model(self, **kwargs: Any) -> None:
        check_engine(self.vllm_config)
        more = self.vllm_config.additional_config
        if isinstance(more, dict):
            # Compiled models are kept on disk by what this says, and ours has more in it than vLLM's own.
            more["gatesight"] = "observed"
        super().load_model(**kwargs)
        spec = HybridSpec.from_config(self.vllm_config.model_config.hf_text_config)
        self._recorder = Recorder(spec, order_of(self.model_runner))
        self._recorder.attach(self.model_runner.get_model())

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        connector: Any = get_kv_transfer_group()
        connector.bind_recorder(self._recorder)

    def execute_model(self, scheduler_output: "SchedulerOutput") -> Any:
        # Before either runner prepares inputs: Model Runner V2 calls the connector's own hooks after that.
        step: Any = scheduler_output.kv_connector_metadata
        if step is not None:
            connector: Any = get_kv_transfer_group()
            connector.begin_step(step)
        return super().execute_model(scheduler_output)


def order_of(runner: Any) -> Callable[[], Sequence[str]]:
    """Gives the ids of the requests of the forward under way, in the order of its rows.

    Args:
        runner: vLLM's, of either kind: the first holds its batch, Model Runner V2 makes one for each step.
    """
    if hasattr(runner, "input_batch"):
        return lambda: runner.input_batch.req_ids
    prepare = runner.prepare_inputs
    order: list[str] = []

    def noting(*args: Any, **kwargs: Any) -> Any:
        batch = prepare(*args, **kwargs)
        order[:] = batch.req_ids
        return batch

    runner.prepare_inputs = noting
    return lambda: order


class CompactingWorker:
    """See the module.

    Args:
        spec: Layout of the model.
        estimators: Folders or Hub repos of estimators, by name.
        layers: Layer name of each attention group.
        evicted: Filled here, read by the metadata builder: per layer name, evicted entries of the rows that begin with
            a block, `[blocks]`, int64.

    Raises:
        EstimatorMismatchError: An estimator is for another layout.
    """

    def __init__(
        self, spec: HybridSpec, estimators: Mapping[str, str], layers: dict[int, str], evicted: dict[str, Tensor]
    ) -> None:
        self._estimators = {name: Estimator.from_pretrained(source) for name, source in estimators.items()}
        for estimator in self._estimators.values():
            estimator.check(spec)
        self._spec = spec
        self._layers = layers
        #: KV-cache group of each attention ordinal.
        self._groups = sorted(layers, key=lambda group: extract_layer_index(layers[group]))
        self._evicted = evicted
        self._caches: dict[str, Tensor] = {}
        self._outcomes: dict[str, Outcome] = {}
        #: Of the steps with each parent so far.
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._begun = 0.0
        self.recorder: Recorder | None = None

    def register(self, caches: dict[str, Tensor]) -> None:
        self._caches = caches
        for name in self._layers.values():
            check_layout(caches[name])
            self._evicted[name] = torch.zeros(len(caches[name]), dtype=torch.int64)

    def begin(self, step: StepMetadata) -> None:
        """Before the metadata of a step are built."""
        self._begun = time.perf_counter()
        for group, block, evicted in step.evicted:
            self._evicted[self._layers[group]][block] = evicted
        assert self.recorder is not None
        for request_id in step.forgotten:
            self.recorder.of.pop(request_id, None)
            self._seconds.pop(request_id, None)
        self.recorder.begin(step.parents, step.scheduled)

    def copy(self, layers: Iterable[str], source: int, target: int) -> None:
        """A block of all layers of a group."""
        for name in layers:
            self._caches[name][target].copy_(self._caches[name][source])

    def end(self, step: StepMetadata) -> None:
        """After the forward of a step."""
        assert self.recorder is not None
        self.recorder.end()
        passed = time.perf_counter() - self._begun
        for request_id in step.parents:
            self._seconds[request_id] += passed
        for compaction in step.compactions:
            recorded, seconds = self.recorder.of.pop(compaction.request_id), self._seconds.pop(compaction.request_id)
            try:
                outcome = self._compact(compaction, recorded, seconds)
            except Exception as error:
                # One context fails, for example with scores that are not finite; the engine serves all others.
                logger.exception("GateSight: request %s could not be compacted", compaction.request_id)
                outcome = Outcome(error=f"its context could not be compacted: {error}")
            self._outcomes[compaction.request_id] = outcome

    def take_outcomes(self) -> dict[str, Outcome]:
        """Of the parents whose prefill ended since the last call."""
        outcomes, self._outcomes = self._outcomes, {}
        return outcomes

    def _compact(self, compaction: Compaction, recorded: Recorded, prefill_seconds: float) -> Outcome:
        tokens, asked = compaction.tokens, compaction.options
        assert recorded.tokens == tokens, f"{recorded.tokens} of {tokens} tokens were recorded"
        begun = time.perf_counter()
        blocks = {group: torch.tensor(of_group) for group, of_group in compaction.blocks.items()}
        ranks = Ranks.here()
        gates = [ranks.mean([total / tokens for total in recorded.gate_sums])]
        options = asked.compaction(compaction.block_size)
        scorer: Scorer = Scores([])
        prefill = self._prefill(recorded, blocks, ranks, with_entries=asked.scorer in METHODS and not asked.empty)
        with torch.no_grad():
            if options.kept_fraction < 1 and not asked.empty:
                scorer = Scores(checked_scores(self._scorer(compaction), prefill))
            scored = time.perf_counter()
            plan = plan_compaction(prefill, scorer, gates, options, 0) if not asked.empty else None
        kept = dict.fromkeys(self._groups, 0 if asked.empty else tokens)
        if plan is not None:
            for group, layer in zip(self._groups, plan.layers, strict=True):
                if layer.indices is not None:
                    pages = Pages(self._caches[self._layers[group]])
                    pages.compact(blocks[group], ranks.own_kv(layer.indices[0]))
                    kept[group] = layer.indices.shape[2]
        return Outcome(
            kept,
            [kept[group] for group in self._groups],
            0.0 if plan is None else plan.achieved_fraction,
            gates[0],
            {"prefill": prefill_seconds, "score": scored - begun, "compact": time.perf_counter() - scored},
        )

    def _scorer(self, compaction: Compaction) -> Scorer:
        options = compaction.options
        if options.scorer in self._estimators:
            return self._estimators[options.scorer]
        scorer = METHODS[options.scorer](**options.scorer_options)
        scorer.check(self._spec)
        return scorer

    def _prefill(self, recorded: Recorded, blocks: dict[int, Tensor], ranks: Ranks, with_entries: bool) -> Prefill:
        """What was recorded by all workers; entries are read out of the pages only for methods that look at them."""
        signals = [ranks.gathered(torch.cat(chunks), dim=-1).unsqueeze(0) for chunks in recorded.signals]
        tokens, heads = recorded.tokens, self._spec.num_key_value_heads
        keys = values = [torch.empty(1, heads, tokens, 0) for _ in self._groups]
        if with_entries:
            layers = [(Pages(self._caches[self._layers[group]]), blocks[group]) for group in self._groups]
            entries = [pages.read(held, torch.arange(tokens).expand(pages.heads, -1)) for pages, held in layers]
            keys, values = ([ranks.gathered_kv(pair[i].unsqueeze(0), heads) for pair in entries] for i in range(2))
        return Prefill(self._spec, [tokens], signals, keys, values)
