"""Scorers made of one small MLP per attention layer and KV head, and their files.

On disk a folder with `config.json` and `model.safetensors`. Both are untrusted input: unknown keys, newer formats,
wrong shapes and wrong sizes are errors before anything is allocated.
"""

import json
from abc import ABC, abstractmethod
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gatesight_kernels import PackedMLP, pack_mlp, packed_dtype, score_entries

from .errors import EstimatorMismatchError
from .hybrid import HybridSpec
from .scoring import Needs, Prefill

CONFIG_NAME, WEIGHTS_NAME = "config.json", "model.safetensors"


class MLPConfig(ABC):
    """What the files of an MLP scorer say of it; subclasses are dataclasses and add what it is made for."""

    base_model: str
    fingerprint: str
    num_key_value_heads: int
    #: Width of the hidden layer.
    hidden_size: int

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Attention layers."""

    @abstractmethod
    def input_size(self, ordinal: int) -> int:
        """Inputs of one MLP."""

    @abstractmethod
    def expected_for(self, spec: HybridSpec) -> "MLPConfig":
        """What this configuration must be equal to for a model of this layout."""

    @classmethod
    @abstractmethod
    def from_dict(cls, data: dict[str, Any]) -> "MLPConfig":
        """Read a configuration strictly; ValueError says what is wrong with it."""

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of everything in `model.safetensors`, float32."""
        shapes: dict[str, tuple[int, ...]] = {}
        heads, width = self.num_key_value_heads, self.hidden_size
        for j in range(self.num_layers):
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


C = TypeVar("C", bound=MLPConfig)
S = TypeVar("S", bound="MLPScorer[Any]")


class MLPScorer(ABC, Generic[C]):
    """See the module; subclasses say what the MLPs read."""

    config_class: ClassVar[type[MLPConfig]]
    #: For messages: what it is, and what to do about one for another model.
    kind: ClassVar[str]
    mend: ClassVar[str]
    needs: ClassVar[Needs]

    def __init__(self, config: C, tensors: dict[str, Tensor]) -> None:
        shapes = config.tensor_shapes()
        if set(tensors) != set(shapes):
            raise ValueError(
                f"Weights: missing {sorted(set(shapes) - set(tensors))[:4]}, unexpected "
                f"{sorted(set(tensors) - set(shapes))[:4]}."
            )
        for name, shape in shapes.items():
            tensor = tensors[name]
            if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
                raise ValueError(f"Weights: {name} must be float32 {shape}, got {tensor.dtype} {tuple(tensor.shape)}.")
            if not torch.isfinite(tensor).all() or (name.endswith("input_std") and not (tensor > 0).all()):
                raise ValueError(f"Weights: {name} holds values that are not finite or not positive.")
        self.config = config
        self.tensors = tensors
        self._packed: dict[tuple[int, torch.device, torch.dtype], tuple[list[Tensor], list[int], PackedMLP]] = {}

    def check(self, spec: HybridSpec) -> None:
        """Raises EstimatorMismatchError unless the scorer was trained for this layout."""
        config = self.config
        if spec.fingerprint != config.fingerprint:
            raise EstimatorMismatchError(
                f"This {self.kind} was trained for {config.base_model!r}, layout {config.fingerprint}. The model is "
                f"{spec.describe()}. {self.mend}"
            )
        if config != config.expected_for(spec):
            raise EstimatorMismatchError(
                f"The {self.kind}'s {CONFIG_NAME} names the layout {config.fingerprint}, but other layers, heads or "
                "GDN windows than that layout has; it was changed by hand or is damaged."
            )

    @abstractmethod
    def inputs(self, prefill: Prefill, ordinal: int, row: int) -> list[Tensor]:
        """What the MLPs read of one row besides ages, padding not counted: views `[length, F_i]`, side by side."""

    # -- scoring -------------------------------------------------------------------------------------------------------

    def score(self, prefill: Prefill) -> list[Tensor]:
        return [self._score_layer(prefill, j) for j in range(self.config.num_layers)]

    def _score_layer(self, prefill: Prefill, ordinal: int) -> Tensor:
        keys = prefill.keys[ordinal]
        scores = keys.new_zeros(keys.shape[:3], dtype=torch.float32)
        for row, length in enumerate(prefill.lengths):
            inputs = self.inputs(prefill, ordinal, row)
            # One device and dtype, which they have already unless layers are spread, or some ran under autocast.
            dtype = reduce(torch.promote_types, [block.dtype for block in inputs])
            inputs = [block.to(keys.device, dtype) for block in inputs]
            mlp = self._mlp(ordinal, keys.device, packed_dtype(inputs[0]))
            scores[row, :, keys.shape[2] - length :] = score_entries(inputs, mlp, prefill.first(row))
        return scores

    def _mlp(self, ordinal: int, device: torch.device, dtype: torch.dtype) -> PackedMLP:
        """The MLPs of one layer on `device`; packed anew only if `tensors` were edited."""
        names = ("weight_in", "bias_in", "weight_out", "bias_out", "input_mean", "input_std")
        tensors = [self.tensors[f"layers.{ordinal}.{name}"] for name in names]
        versions = [0 if tensor.is_inference() else tensor._version for tensor in tensors]
        key = (ordinal, device, dtype)
        if key in self._packed:
            of_tensors, of_versions, packed = self._packed[key]
            if of_versions == versions and all(a is b for a, b in zip(of_tensors, tensors, strict=True)):
                return packed
        packed = pack_mlp(*tensors, ages=True, dtype=dtype, device=device)
        self._packed[key] = (tensors, versions, packed)
        return packed

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_packed": {}}  # copies and pickles pack for themselves

    # -- files ---------------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(cls: type[S], path: str | Path) -> S:
        """Load a scorer from a folder with `config.json` and `model.safetensors`.

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
        config = cls.config_class.from_dict(data)
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
        config = asdict(self.config)  # type: ignore[call-overload]
        (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_parameters:,} parameters)"

    @property
    def num_parameters(self) -> int:
        """Weights and biases of all MLPs; statistics not counted."""
        return sum(tensor.numel() for name, tensor in self.tensors.items() if ".input_" not in name)
