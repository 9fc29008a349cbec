"""A surrogate on hidden states, as KVzap and Fast KVzip have it: the ablation of GateSight's signals."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor

from gatesight_kernels.checks import check_whole_number, described

from ..checks import check_text
from ..models.hybrid import HybridSpec, check_spec
from ..scoring.features import AGES
from ..scoring.interface import Needs, Prefill
from ..scoring.mlp import CONFIG_NAME, FORMAT_VERSION, MLPConfig, MLPScorer, check_format

KIND = "hidden_states"
#: Folder of such a scorer within an estimator's.
HIDDEN_STATES_FOLDER = "hidden_states"


@dataclass(frozen=True)
class HiddenStateConfig(MLPConfig):
    """What a hidden-state scorer is made for and of.

    Attributes:
        base_model: Hub id or name of the model it was trained on.
        fingerprint: The layout it fits (`HybridSpec`).
        num_attention_layers: L.
        num_key_value_heads: H.
        model_width: C, channels of a hidden state.
        hidden_size: Width of the MLPs' hidden layer.
        kind: Tells this format from others.
        format_version: Of this file.
    """

    base_model: str
    fingerprint: str
    num_attention_layers: int
    num_key_value_heads: int
    model_width: int
    hidden_size: int = 64
    kind: str = KIND
    format_version: int = FORMAT_VERSION

    @classmethod
    def for_model(
        cls, spec: HybridSpec, base_model: str, model_width: int, hidden_size: int = 64
    ) -> "HiddenStateConfig":
        """Of a scorer for models of a layout.

        Raises:
            TypeError, ValueError: No layout, no name, or sizes below 1.
        """
        check_spec(spec)
        check_text("base_model", base_model)
        check_whole_number("model_width", model_width)
        check_whole_number("hidden_size", hidden_size)
        return cls(
            base_model=base_model,
            fingerprint=spec.fingerprint,
            num_attention_layers=spec.num_attention_layers,
            num_key_value_heads=spec.num_key_value_heads,
            model_width=model_width,
            hidden_size=hidden_size,
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "HiddenStateConfig":
        if not isinstance(data, dict):
            raise ValueError(f"data must be the object of a {CONFIG_NAME}, got {described(data)}.")
        if data.get("kind") == KIND:
            # Format 1 did not say its version.
            check_format("Hidden-state scorer", data.get("format_version", 1))
        names = {f.name for f in fields(cls)}
        if set(data) != names or data["kind"] != KIND:
            raise ValueError(
                f"{CONFIG_NAME} is not that of a hidden-state scorer (kind {data.get('kind')!r}): missing keys "
                f"{sorted(names - set(data))}, unknown keys {sorted(set(data) - names)}."
            )
        config = cls(**data)
        if not isinstance(config.base_model, str) or not isinstance(config.fingerprint, str):
            raise ValueError(f"{CONFIG_NAME}: base_model and fingerprint must be text.")
        sizes = (config.num_attention_layers, config.num_key_value_heads, config.model_width, config.hidden_size)
        if not all(type(n) is int and 1 <= n <= 65536 for n in sizes):
            raise ValueError(f"{CONFIG_NAME}: implausible sizes {sizes}.")
        return config

    def expected_for(self, spec: HybridSpec) -> "HiddenStateConfig":
        return HiddenStateConfig.for_model(spec, self.base_model, self.model_width, self.hidden_size)

    @property
    def num_layers(self) -> int:
        return self.num_attention_layers

    def input_size(self, ordinal: int) -> int:
        """Inputs of one MLP: the hidden state and 3 ages."""
        return self.model_width + len(AGES)


class HiddenStateScorer(MLPScorer[HiddenStateConfig]):
    """Predicted utility of KV entries from the attention layer's own input, as KVzap has it (arXiv 2601.07891).

    The network, the ages, the target and the training documents are those of `Estimator`; only the inputs differ. So
    the difference between both is what GDN signals are worth.
    """

    config_class = HiddenStateConfig
    kind = "hidden-state scorer"
    mend = "Train one with `gatesight train --hidden-states`."
    needs: ClassVar[Needs] = Needs(hidden=True)

    def inputs(self, prefill: Prefill, ordinal: int, row: int) -> list[Tensor]:
        hidden = prefill.hidden[ordinal][row]
        return [hidden[len(hidden) - prefill.lengths[row] :]]
