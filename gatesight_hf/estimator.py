"""The trained scorer: one small MLP per attention layer and KV head, from GDN signals and age to predicted utility.

On disk: `config.json` (this module's `EstimatorConfig`) and `model.safetensors`. Both are untrusted input: unknown
keys, newer formats, wrong shapes and wrong sizes are errors before anything is allocated.
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .errors import EstimatorMismatchError
from .features import AGES, SIGNALS, assemble
from .hybrid import HybridSpec
from .scoring import Needs, Prefill

FORMAT_VERSION = 1
CONFIG_NAME, WEIGHTS_NAME = "config.json", "model.safetensors"
#: Tokens scored at a time: bounds the scratch memory, whatever the context's length.
TOKENS_PER_CHUNK = 4096


@dataclass(frozen=True)
class EstimatorConfig:
    """What an estimator is made for and of.

    Attributes:
        base_model: Hub id or name of the model it was trained on.
        model_type, fingerprint: The layout it fits (`HybridSpec`).
        num_key_value_heads: H.
        num_value_heads: HV of the GDN layers.
        gdn_windows: For each attention layer the GDN ordinals it reads, ascending, at most `window` of them.
        window: Nearest GDN layers below an attention layer that are read.
        hidden_size: Width of the hidden layer.
        signals, ages: Order of the inputs.
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
            ValueError: Newer format, missing or unknown keys, other signals than this version computes, wrong sizes.
        """
        version = data.get("format_version")
        if type(version) is not int or version != FORMAT_VERSION:
            raise ValueError(
                f"Estimator format {version!r}; this gatesight_hf reads format {FORMAT_VERSION}. Upgrade gatesight_hf, "
                "or choose another revision of the estimator."
            )
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

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of everything in `model.safetensors`, float32."""
        shapes: dict[str, tuple[int, ...]] = {}
        heads, width = self.num_key_value_heads, self.hidden_size
        for j in range(len(self.gdn_windows)):
            inputs = self.input_size(j)
            shapes |= {
                f"layers.{j}.input_mean": (inputs,),
                f"layers.{j}.input_std": (inputs,),
                f"layers.{j}.weight_in": (heads, inputs, width),
                f"layers.{j}.bias_in": (heads, width),
                f"layers.{j}.weight_out": (heads, width),
                f"layers.{j}.bias_out": (heads,),
            }
        return shapes


class Estimator:
    """Predicted utility of KV entries from a prefill's GDN signals: the `Scorer` that users load.

    Args:
        config: Layout and sizes.
        tensors: As `EstimatorConfig.tensor_shapes` says: the statistics that standardise the inputs, and one MLP with a
            GELU per attention layer and KV head.

    Raises:
        ValueError: A tensor is missing, not expected, of another shape or dtype, or not finite.
    """

    needs = Needs(signals=True)

    def __init__(self, config: EstimatorConfig, tensors: dict[str, Tensor]) -> None:
        shapes = config.tensor_shapes()
        if set(tensors) != set(shapes):
            raise ValueError(
                f"Estimator weights: missing {sorted(set(shapes) - set(tensors))[:4]}, unexpected "
                f"{sorted(set(tensors) - set(shapes))[:4]}."
            )
        for name, shape in shapes.items():
            tensor = tensors[name]
            if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
                raise ValueError(
                    f"Estimator weights: {name} must be float32 {shape}, got {tensor.dtype} {tuple(tensor.shape)}."
                )
            if not torch.isfinite(tensor).all() or (name.endswith("input_std") and not (tensor > 0).all()):
                raise ValueError(f"Estimator weights: {name} holds values that are not finite or not positive.")
        self.config = config
        self.tensors = tensors

    # -- scoring -------------------------------------------------------------------------------------------------------

    def check(self, spec: HybridSpec) -> None:
        """Raises EstimatorMismatchError unless the estimator was trained for this layout."""
        if spec.fingerprint != self.config.fingerprint:
            raise EstimatorMismatchError(
                f"This estimator was trained for {self.config.base_model!r}: {self.config.model_type}, layout "
                f"{self.config.fingerprint}. The model is {spec.describe()}. Load this model's estimator, or train one "
                "with `gatesight train`."
            )
        config = self.config
        if config != EstimatorConfig.for_model(spec, config.base_model, config.window, config.hidden_size):
            raise EstimatorMismatchError(
                f"The estimator's {CONFIG_NAME} names the layout {config.fingerprint}, but other heads or GDN windows "
                "than that layout has; it was changed by hand or is damaged."
            )

    def score(self, prefill: Prefill) -> list[Tensor]:
        return [self._score_layer(prefill, j) for j in range(len(self.config.gdn_windows))]

    def _score_layer(self, prefill: Prefill, ordinal: int) -> Tensor:
        signals = [prefill.signals[i] for i in self.config.gdn_windows[ordinal]]
        batch, slots = signals[0].shape[:2]
        scores = signals[0].new_zeros((batch, self.config.num_key_value_heads, slots), dtype=torch.float32)
        layer = self._folded(ordinal, scores.device)
        for row, length in enumerate(prefill.lengths):
            pads = slots - length
            of_row = [signal[row] for signal in signals]
            for start in range(0, length, TOKENS_PER_CHUNK):
                stop = min(length, start + TOKENS_PER_CHUNK)
                inputs = assemble(of_row, start, stop, pads, length)
                scores[row, :, pads + start : pads + stop] = _mlp(inputs, *layer)
        return scores

    def _folded(self, ordinal: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The MLPs of one layer with the standardisation folded into the first layer, on `device`."""
        mean, std, weight_in, bias_in, weight_out, bias_out = (
            self.tensors[name].to(device)
            for name in self.config.tensor_shapes()
            if name.startswith(f"layers.{ordinal}.")
        )
        weight = weight_in / std.unsqueeze(-1)
        return weight, bias_in - (mean.unsqueeze(-1) * weight).sum(1), weight_out, bias_out

    # -- files ---------------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "Estimator":
        """Load an estimator from a folder with `config.json` and `model.safetensors`.

        Raises:
            FileNotFoundError: A file is missing.
            ValueError: A file is not what its format says.
        """
        folder = Path(path)
        for name in (CONFIG_NAME, WEIGHTS_NAME):
            if not (folder / name).is_file():
                raise FileNotFoundError(
                    f"No {name} in {str(folder)!r}: an estimator is a folder with {CONFIG_NAME} and {WEIGHTS_NAME}, as "
                    "`gatesight train` writes it. Hub ids are not read yet: give "
                    "huggingface_hub.snapshot_download(repo_id)."
                )
        try:
            data = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{folder / CONFIG_NAME} is not JSON that can be read: {error}") from error
        if not isinstance(data, dict):
            raise ValueError(f"{folder / CONFIG_NAME} must hold one JSON object.")
        config = EstimatorConfig.from_dict(data)
        shapes = config.tensor_shapes()
        try:
            with safe_open(folder / WEIGHTS_NAME, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    shape = tuple(file.get_slice(name).get_shape())
                    if shape != shapes.get(name):
                        raise ValueError(
                            f"{folder / WEIGHTS_NAME}: {name} has shape {shape}, {CONFIG_NAME} says {shapes.get(name)}."
                        )
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{folder / WEIGHTS_NAME} is not a safetensors file: {error}") from error
        return cls(config, tensors)

    def save_pretrained(self, path: str | Path) -> None:
        """Write `config.json` and `model.safetensors` into a folder, which is made if need be."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_NAME).write_text(json.dumps(asdict(self.config), indent=2) + "\n", encoding="utf-8")
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})

    @property
    def num_parameters(self) -> int:
        """Weights and biases of all MLPs; statistics not counted."""
        return sum(tensor.numel() for name, tensor in self.tensors.items() if ".input_" not in name)


def _mlp(inputs: Tensor, weight_in: Tensor, bias_in: Tensor, weight_out: Tensor, bias_out: Tensor) -> Tensor:
    """All KV heads at once: `[T, F]` -> `[H, T]`, one matrix product for the first layer."""
    heads, size, width = weight_in.shape
    hidden = inputs @ weight_in.transpose(0, 1).reshape(size, heads * width)
    hidden = F.gelu(hidden.unflatten(-1, (heads, width)) + bias_in)
    return (torch.einsum("thw,hw->th", hidden, weight_out) + bias_out).transpose(0, 1)
