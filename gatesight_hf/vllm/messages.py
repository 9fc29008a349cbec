"""What requests ask of GateSight, and what scheduler and worker tell each other in a step.

A request says what it is in `kv_transfer_params`:

- `{"gatesight": "open", "session": ID}`, with those of `OpenOptions` that are not to be the engine's: a parent, whose
  prompt is the context, and which generates one token that is thrown away. Of chat messages the context ends with the
  document, which is the last of them (`chats`).
- `{"gatesight": "ask", "session": ID}`: a child, whose prompt is context and question. As chat messages they are those
  that opened it, with the question in the document's message, after an empty line, and the turns that follow.
- `"report"` and `"drop"`: what a session is, and its end. The answer is in `kv_transfer_params` of the response, and
  their prompt does not matter.
"""

import hashlib
import inspect
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from gatesight_kernels.checks import check_whole_number

from ..compaction.plan import CompactionOptions
from ..methods.named import BY_ENTRIES

if TYPE_CHECKING:
    from vllm.v1.request import Request

OPEN, ASK, REPORT, DROP = KINDS = ("open", "ask", "report", "drop")
#: Prompt of requests that are only about a session. Two tokens: vLLM 0.32 fails on prompts of one on some CPUs.
NO_PROMPT = [0, 0]
LONGEST_ID = 256
#: Name of the scorer where an engine has one estimator.
GATESIGHT = "gatesight"
#: Methods by their names.
METHODS = BY_ENTRIES


@dataclass(frozen=True)
class OpenOptions:
    """How a parent is compacted.

    Attributes:
        kept_fraction: As in `GateSightCache`.
        before_document: Tokens of a chat template before the document: they always stay, and the protected prefix
            begins behind them.
        protected_prefix, protected_suffix: Likewise.
        allocation: Likewise, without `global`.
        gate_exponent: Likewise.
        whole_blocks: Round each layer, its protected entries included, up to whole blocks: it costs no memory, and
            children copy no partial block.
        scorer: Name of one of the engine's estimators, or of one of `METHODS`.
        scorer_options: Arguments of a method.
        empty: Drop the whole attention cache and keep the GDN states alone, as a control.

    Raises:
        ValueError: Values out of range, or heads that would keep different numbers.
    """

    kept_fraction: float = 0.1
    before_document: int = 0
    protected_prefix: int = 0
    protected_suffix: int = 0
    allocation: str = "gate"
    gate_exponent: float = 1.0
    whole_blocks: bool = True
    scorer: str = GATESIGHT
    scorer_options: Mapping[str, Any] = field(default_factory=dict)
    empty: bool = False

    def __post_init__(self) -> None:
        check_whole_number("before_document", self.before_document, 0)
        check_whole_number("protected_prefix", self.protected_prefix, 0)
        self.compaction(block_size=1)
        if self.allocation == "global":
            raise ValueError(
                "allocation='global' keeps different numbers in the heads of a layer, which share a block table."
            )
        if not isinstance(self.whole_blocks, bool) or not isinstance(self.empty, bool):
            raise ValueError(f"whole_blocks and empty are true or false, got {self.whole_blocks!r}, {self.empty!r}.")
        if not isinstance(self.scorer, str) or not isinstance(self.scorer_options, Mapping):
            raise ValueError("scorer is a name, and scorer_options an object.")
        if self.scorer_options:
            self._check_scorer_options()

    def _check_scorer_options(self) -> None:
        if self.scorer not in METHODS:
            raise ValueError(f"scorer {self.scorer!r} has no options; {', '.join(METHODS)} may have.")
        try:
            inspect.signature(METHODS[self.scorer]).bind(**self.scorer_options)
        except TypeError as error:
            raise ValueError(f"scorer_options of {self.scorer!r}: {error}.") from error

    def updated(self, given: Mapping[str, Any]) -> "OpenOptions":
        """With other values for some.

        Raises:
            ValueError: Unknown names, or as above.
        """
        names = [f.name for f in fields(self)]
        if unknown := sorted(set(given) - set(names)):
            raise ValueError(f"GateSight has no options {unknown}; there are {', '.join(names)}.")
        if given.get("scorer", self.scorer) != self.scorer:
            given = {"scorer_options": {}, **given}  # those were the other scorer's
        return replace(self, **given)

    def check_scorer(self, estimators: Sequence[str]) -> None:
        """Raise ValueError unless the scorer is one that an engine with these estimators has."""
        if self.scorer not in (*estimators, *METHODS):
            raise ValueError(f"No scorer {self.scorer!r}; this engine has {', '.join([*estimators, *METHODS])}.")

    def compaction(self, block_size: int) -> CompactionOptions:
        size = block_size if self.whole_blocks else 1
        return CompactionOptions(
            self.kept_fraction,
            self.before_document + self.protected_prefix,
            self.allocation,
            size,
            self.gate_exponent,
            protected_suffix=self.protected_suffix,
        )

    def to_json(self) -> dict[str, Any]:
        """Those that are not the default."""
        plain = asdict(OpenOptions())
        return {name: value for name, value in asdict(self).items() if value != plain[name]}


@dataclass(frozen=True)
class Asked:
    """What a request is.

    Attributes:
        kind: One of `KINDS`, something unknown, or None for ordinary requests.
        session_id: Of the session that it is about; empty unless it is text of at most `LONGEST_ID` characters.
        options: The rest of its parameters.
    """

    kind: Any
    session_id: str
    options: Mapping[str, Any]

    @classmethod
    def of(cls, parameters: Mapping[str, Any] | None) -> "Asked":
        rest = dict(parameters or {})
        kind = rest.pop("gatesight", None)
        session_id = rest.pop("session", "")
        usable = isinstance(session_id, str) and len(session_id) <= LONGEST_ID
        return cls(kind, session_id if usable else "", rest)

    @classmethod
    def by(cls, request: "Request") -> "Asked":
        return cls.of(request.kv_transfer_params)


def digest(ids: Sequence[int]) -> bytes:
    """Of token ids: whether a child's prompt begins as its parent's."""
    return hashlib.sha256(array("q", ids).tobytes()).digest()


@dataclass(frozen=True)
class Compaction:
    """A parent whose prefill ends in this step: its blocks in each attention group, and how much is to stay."""

    request_id: str
    tokens: int
    blocks: dict[int, list[int]]
    block_size: int
    options: OpenOptions


@dataclass
class StepMetadata(KVConnectorMetadata):
    """From the scheduler to the worker, for one step.

    Attributes:
        scheduled: Tokens of each request in the step.
        parents: Requests whose tokens are recorded.
        forgotten: Requests that are parents no more, or begin again.
        compactions: Of parents whose prefill ends.
        copies: Group, source and target block.
        evicted: Group, first block, and how many entries per head are gone from the row that begins with it.
        failed: Requests that cannot be served.
    """

    scheduled: dict[str, int] = field(default_factory=dict)
    parents: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    compactions: list[Compaction] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    evicted: list[tuple[int, int, int]] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Outcome:
    """Of one compaction.

    Attributes:
        kept: Entries per head that stay, by group; empty if it failed.
        kept_per_layer: The same by attention ordinal.
        achieved_fraction: Kept share of the evictable entries.
        gate_means: By attention ordinal.
        seconds: Of the steps that the prefill took part in (`prefill`), of scoring (`score`), and of budget, selection
            and moving entries (`compact`).
        error: Why it failed.
    """

    kept: dict[int, int] = field(default_factory=dict)
    kept_per_layer: list[int] = field(default_factory=list)
    achieved_fraction: float = 1.0
    gate_means: list[float] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    error: str | None = None


@dataclass
class Outcomes(KVConnectorWorkerMetadata):
    """From the worker to the scheduler: what became of each parent whose prefill ended."""

    of: dict[str, Outcome]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Outcomes":
        """Of one more worker: a session needs all of them."""
        assert isinstance(other, Outcomes)
        return Outcomes({name: _worse(self.of[name], outcome) for name, outcome in other.of.items()})


def _worse(one: Outcome, other: Outcome) -> Outcome:
    """Of two workers' outcomes the one that failed; that of the first, if they agree."""
    if one.error is None and other.error is None and one.kept != other.kept:
        return Outcome(error=f"its workers kept different numbers of entries: {one.kept} and {other.kept}")
    return one if other.error is None or one.error is not None else other
