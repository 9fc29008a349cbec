"""The trained scorer: one small MLP per attention layer and KV head, from GDN signals and age to predicted utility.

On disk: `config.json` (this module's `EstimatorConfig`) and `model.safetensors`; see `mlp` for how they are read.
"""

import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from gatesight_kernels.checks import check_whole_number, described

from ..checks import check_text
from ..files.cards import estimator_card
from ..files.hub import Upload, check_repo_id, push
from ..models.hybrid import HybridSpec, check_spec
from .features import AGES, SIGNALS
from .interface import Needs, Prefill, Scorer
from .mlp import CONFIG_NAME, FORMAT_VERSION, MLPConfig, MLPScorer, check_format

COMMIT_MESSAGE = "GateSight estimator"


@dataclass(frozen=True)
class EstimatorConfig(MLPConfig):
    """What an estimator is made for and of.

    Attributes:
        base_model: Hub id or name of the model it was trained on.
        model_type: Of its text decoder.
        fingerprint: The layout it fits (`HybridSpec`).
        num_key_value_heads: H.
        num_value_heads: HV of the GDN layers.
        gdn_windows: For each attention layer the GDN ordinals it reads, ascending, at most `window` of them.
        window: Nearest GDN layers below an attention layer that are read.
        hidden_size: Width of the hidden layer.
        signals: Order of the inputs of each GDN layer and head.
        ages: Order of the inputs that follow them.
        format_version: Of this file.
    """

    base_model: str
    model_type: str
    fingerprint: str
    num_key_value_heads: int
    num_value_heads: int
    gdn_windows: tuple[tuple[int, ...], ...]
    window: int = 6
    hidden_size: int = 64
    signals: tuple[str, ...] = SIGNALS
    ages: tuple[str, ...] = AGES
    format_version: int = FORMAT_VERSION

    @classmethod
    def for_model(cls, spec: HybridSpec, base_model: str, window: int = 6, hidden_size: int = 64) -> "EstimatorConfig":
        """Of an estimator for models of a layout.

        Raises:
            TypeError, ValueError: No layout, no name, or sizes below 1.
        """
        check_spec(spec)
        check_text("base_model", base_model)
        check_whole_number("window", window)
        check_whole_number("hidden_size", hidden_size)
        return cls(
            base_model=base_model,
            model_type=spec.model_type,
            fingerprint=spec.fingerprint,
            num_key_value_heads=spec.num_key_value_heads,
            num_value_heads=spec.num_value_heads,
            gdn_windows=tuple(spec.gdn_below(j, window) for j in range(spec.num_attention_layers)),
            window=window,
            hidden_size=hidden_size,
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "EstimatorConfig":
        """Read a configuration strictly.

        Raises:
            ValueError: Another format, missing or unknown keys, other signals than this version computes, wrong sizes.
        """
        if not isinstance(data, dict):
            raise ValueError(f"data must be the object of a {CONFIG_NAME}, got {described(data)}.")
        if "kind" in data:
            raise ValueError(f"{CONFIG_NAME} is that of a scorer of kind {data['kind']!r}, not of an estimator.")
        check_format("Estimator", data.get("format_version"))
        names = {f.name for f in fields(cls)}
        if set(data) != names:
            raise ValueError(
                f"Estimator {CONFIG_NAME}: missing keys {sorted(names - set(data))}, unknown keys "
                f"{sorted(set(data) - names)}."
            )
        for name in ("base_model", "model_type", "fingerprint"):
            if not isinstance(data[name], str):
                raise ValueError(f"Estimator {CONFIG_NAME}: {name} must be text, got {data[name]!r}.")
        for name in ("signals", "ages", "gdn_windows"):
            if not isinstance(data[name], (list, tuple)):
                raise ValueError(f"Estimator {CONFIG_NAME}: {name} must be a list, got {data[name]!r}.")
        windows = data["gdn_windows"]
        if not all(isinstance(w, (list, tuple)) and all(type(i) is int and i >= 0 for i in w) for w in windows):
            raise ValueError(f"Estimator {CONFIG_NAME}: gdn_windows must be lists of GDN ordinals, got {windows!r}.")
        data = {**data, "signals": tuple(data["signals"]), "ages": tuple(data["ages"])}
        config = cls(**{**data, "gdn_windows": tuple(map(tuple, windows))})
        if config.signals != SIGNALS or config.ages != AGES:
            raise ValueError(
                f"Estimator reads {config.signals} + {config.ages}; this version computes {SIGNALS} + {AGES}."
            )
        sizes = (config.num_key_value_heads, config.num_value_heads, config.hidden_size, config.window)
        if not all(type(n) is int and 1 <= n <= 65536 for n in sizes) or not config.gdn_windows:
            raise ValueError(f"Estimator {CONFIG_NAME}: implausible sizes {sizes}.")
        if not all(1 <= len(window) <= config.window for window in config.gdn_windows):
            raise ValueError(f"Estimator {CONFIG_NAME}: every attention layer reads 1 to {config.window} GDN layers.")
        return config

    def input_size(self, ordinal: int) -> int:
        """Inputs of one MLP: 3 signals per value head and GDN layer of the window, and 3 ages."""
        return len(self.gdn_windows[ordinal]) * len(self.signals) * self.num_value_heads + len(self.ages)

    def expected_for(self, spec: HybridSpec) -> "EstimatorConfig":
        return EstimatorConfig.for_model(spec, self.base_model, self.window, self.hidden_size)

    @property
    def num_layers(self) -> int:
        return len(self.gdn_windows)


class Estimator(MLPScorer[EstimatorConfig]):
    """Predicted utility of KV entries from a prefill's GDN signals: the `Scorer` that users load.

    Args:
        config: Layout and sizes.
        tensors: As `EstimatorConfig.tensor_shapes` says: the statistics that standardise the inputs, and one MLP with a
            GELU per attention layer and KV head.

    Raises:
        ValueError: A tensor is missing, not expected, of another shape or dtype, or not finite.
    """

    config_class = EstimatorConfig
    kind = "estimator"
    mend = "Load this model's estimator, or train one with `gatesight train`."
    needs: ClassVar[Needs] = Needs(signals=True)

    def inputs(self, prefill: Prefill, ordinal: int, row: int) -> list[Tensor]:
        first = prefill.keys[ordinal].shape[2] - prefill.lengths[row]
        return [prefill.signals[i][row, first:].flatten(1) for i in self.config.gdn_windows[ordinal]]

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        revision: str | None = None,
        commit_message: str = COMMIT_MESSAGE,
        token: str | bool | None = None,
    ) -> str:
        """Send configuration and weights to a repo on the Hub in one commit. Returns the commit's URL.

        A repo without a card gets one that names what the estimator is for; `gatesight push` sends a folder as
        `gatesight train` writes it, with its metrics.

        Args:
            repo_id: `owner/name`; the repo is made if need be.
            private: Of a repo that is made; None is the owner's default.
            revision: Branch, made if need be; None is `main`.
            commit_message: Of the commit.
            token: A token with the right to write; None or True: the one logged in with.

        Raises:
            ValueError: A name that is none of a repo.
            PermissionError: No token, or one without the right.
            ConnectionError: The Hub cannot be reached, or the upload failed.
        """
        check_repo_id(repo_id)
        config = self.config
        about = {"base_model": config.base_model, "fingerprint": config.fingerprint, "parameters": self.num_parameters}
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            files = [Upload(path.name, path.read_bytes()) for path in sorted(Path(folder).iterdir())]
        return push(
            repo_id,
            files,
            private=private,
            revision=revision,
            commit_message=commit_message,
            token=token,
            default_card=estimator_card(about, repo_id),
        )


#: Of `Estimator.from_pretrained`.
HUB_OPTIONS = frozenset({"revision", "token", "cache_dir", "local_files_only"})


def scorer_from(estimator: str | Path | Scorer, **hub_options: Any) -> Scorer:
    """A scorer itself, or the estimator of a folder or Hub repo; see `Estimator.from_pretrained`."""
    return estimator if isinstance(estimator, Scorer) else Estimator.from_pretrained(estimator, **hub_options)
