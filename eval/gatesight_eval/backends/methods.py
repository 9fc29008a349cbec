"""Rows of the tables: which scorer, and how its budget is shared; and the scorers themselves, made by name."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gatesight_hf import Estimator, Scorer
from gatesight_hf.compaction.budget import check_allocation, check_gate_exponent
from gatesight_hf.entries.quantised import check_entries_dtype
from gatesight_hf.files import hub
from gatesight_hf.methods import (
    ExpectedAttention,
    HiddenStateScorer,
    KeyDiff,
    KeyNorm,
    KVzip,
    LagKV,
    RandomScorer,
    SnapKV,
    StreamingLLM,
    TriAttention,
)

#: Controls that have no scorer of their own: everything kept; GDN states alone; the true utility for the questions.
FULL, EMPTY, ORACLE = "full", "empty", "oracle"

_LABEL = re.compile(r"([a-z][a-z0-9_]*)(?:@([a-z]+)(?:\^([0-9]+(?:\.[0-9]+)?))?)?(?:\+([a-z0-9]+))?")


@dataclass(frozen=True)
class Method:
    """One row: `snapkv`, `kvzip@global`, `gatesight@flat`, `gatesight@gate^0.5`, `gatesight+int8`.

    Attributes:
        scorer: Name of a scorer or control.
        allocation: How layers share the budget; `gate` is the same for all methods unless a row says otherwise.
        gate_exponent: Of `gate`.
        entries_dtype: Of kept entries; None for the model's.
    """

    scorer: str
    allocation: str = "gate"
    gate_exponent: float = 1.0
    entries_dtype: str | None = None

    @classmethod
    def parse(cls, label: str) -> "Method":
        """Read a label.

        Raises:
            ValueError: It is none, or its allocation or dtype is unknown.
        """
        match = _LABEL.fullmatch(label)
        if match is None or (match[3] and match[2] != "gate"):
            raise ValueError(
                f"{label!r} is no method: give a name, name@allocation or name@gate^exponent, and +int8 after it for "
                "quantised entries, such as snapkv, kvzip@global, gatesight@gate^0.5, gatesight+int8."
            )
        method = cls(match[1], match[2] or "gate", float(match[3] or 1), match[4])
        check_allocation(method.allocation)
        check_gate_exponent(method.gate_exponent)
        check_entries_dtype(method.entries_dtype)
        if method.entries_dtype is not None and method.scorer in (FULL, EMPTY):
            raise ValueError(f"{label!r}: {method.scorer} is a control, which holds entries in the model's dtype.")
        return method

    @property
    def label(self) -> str:
        label = self.scorer
        if self.gate_exponent != 1:
            label += f"@{self.allocation}^{np.format_float_positional(self.gate_exponent, trim='-')}"
        elif self.allocation != "gate":
            label += f"@{self.allocation}"
        return label if self.entries_dtype is None else f"{label}+{self.entries_dtype}"


@dataclass(frozen=True)
class Cell:
    """A method at a kept fraction; 1 for `full` and 0 for `empty`."""

    method: Method
    kept_fraction: float

    @property
    def options(self) -> dict[str, Any]:
        """Of compaction; the controls keep everything, and `empty` drops it afterwards."""
        if self.method.scorer in (FULL, EMPTY):
            return {"kept_fraction": 1.0, "allocation": "flat"}
        return {
            "kept_fraction": self.kept_fraction,
            "allocation": self.method.allocation,
            "gate_exponent": self.method.gate_exponent,
            "entries_dtype": self.method.entries_dtype,
        }


def cells_of(methods: list[Method], kept_fractions: list[float]) -> list[Cell]:
    """Both controls, then every other method at every kept fraction, largest first; each cell once."""
    controls = [Cell(Method(FULL), 1.0), Cell(Method(EMPTY), 0.0)]
    rows = [method for method in dict.fromkeys(methods) if method.scorer not in (FULL, EMPTY)]
    return controls + [Cell(m, p) for m in rows for p in sorted(set(kept_fractions), reverse=True)]


@dataclass
class ScorerFactory:
    """Makes each scorer by name, once.

    Attributes:
        model, tokenizer: What is evaluated.
        estimators: Folders or Hub repos of estimators by the name of their row.
        hidden_states: Folder of a scorer on hidden states, for `hidden_states`.
        calibration: Statistics for `triattention`, or token ids `[B, T]` of plain text to gather them from.
        options: Arguments of scorers by name, for example `{"snapkv": {"window": 32}}`.
    """

    model: Any
    tokenizer: Any
    estimators: Mapping[str, str | Path]
    hidden_states: Path | None = None
    calibration: Path | Tensor | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._made: dict[str, Scorer] = {}
        unknown = sorted(set(self.options) - set(self.names))
        if unknown:
            raise ValueError(f"Options for unknown methods {unknown}; there are {', '.join(self.names)}.")
        for name, folder in self.estimators.items():
            if not Path(folder).is_dir() and not hub.is_repo_id(str(folder)):
                raise FileNotFoundError(f"--estimator {name}={folder}: no such folder.")
        taken = sorted({FULL, EMPTY, ORACLE, *self._makers()} & set(self.estimators))
        if taken:
            raise ValueError(f"--estimator {taken[0]}=…: this row has a meaning of its own; choose another name.")
        for name, options in self.options.items():
            if name == "random" or name in self.estimators:
                raise ValueError(f"{name} has no options.")
            if not isinstance(options, Mapping):
                raise ValueError(f'Options of {name} are an object such as {{"window": 32}}, got {options!r}.')

    @property
    def names(self) -> list[str]:
        return [*self.estimators, *self._makers()]

    def make(self, name: str, seed: int) -> Scorer:
        """The scorer of that name; `seed` is for `random`, which draws anew for every context.

        Raises:
            ValueError: There is none, or something that it needs was not given.
        """
        if name == "gatesight" and name not in self.estimators:
            raise ValueError("gatesight needs an estimator of this model: --estimator gatesight=FOLDER.")
        if name not in self.names:
            raise ValueError(
                f"No method {name!r}; there are {', '.join([*self.names, ORACLE])}, and each --estimator NAME=FOLDER."
            )
        if name == "random":
            return RandomScorer(seed)
        if name not in self._made:
            options = dict(self.options.get(name, {}))
            try:
                made = self._makers()[name](**options) if name not in self.estimators else self._estimator(name)
            except TypeError as error:
                raise ValueError(f"Options of {name}: {error}") from error
            self._made[name] = made
        return self._made[name]

    def _estimator(self, name: str) -> Scorer:
        return Estimator.from_pretrained(self.estimators[name])

    def _makers(self) -> dict[str, Callable[..., Scorer]]:
        return {
            "expected_attention": ExpectedAttention,
            "hidden_states": self._hidden_states,
            "key_norm": KeyNorm,
            "keydiff": KeyDiff,
            "kvzip": lambda **options: KVzip(self.model, self.tokenizer, **options),
            "lagkv": LagKV,
            "random": RandomScorer,
            "snapkv": SnapKV,
            "streaming_llm": StreamingLLM,
            "triattention": self._triattention,
        }

    def _hidden_states(self) -> Scorer:
        if self.hidden_states is None:
            raise ValueError(
                "hidden_states needs a trained scorer: `gatesight train --hidden-states`, then --hidden-states FOLDER."
            )
        return HiddenStateScorer.from_pretrained(self.hidden_states)

    def _triattention(self, **options: Any) -> Scorer:
        if isinstance(self.calibration, Tensor):
            return TriAttention.calibrate(self.model, self.calibration.to(self.model.device), **options)
        if self.calibration is None:
            raise ValueError(
                "triattention needs statistics of the model's queries: give --calibration a file that "
                "TriAttention.calibrate(model, ids).save(…) wrote, or plain text (.txt) to gather them from."
            )
        return TriAttention.load(self.calibration, **options)


def calibration_ids(path: Path, tokenizer: Any, tokens: int = 32768) -> Tensor:
    """The first tokens of a plain text, `[1, T]`."""
    return torch.tensor([tokenizer(path.read_text(encoding="utf-8")).input_ids[:tokens]])
