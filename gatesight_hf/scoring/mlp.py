"""Scorers made of one small MLP per attention layer and KV head, and their files.

On disk, or on the Hub, `config.json` and `model.safetensors`. Both are untrusted input: unknown keys, newer formats,
wrong shapes and wrong sizes are errors before weights are downloaded or anything is allocated.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import asdict
from functools import reduce
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from gatesight_kernels import PackedMLP, pack_mlp, packed_dtype, score_entries
from gatesight_kernels.checks import described

from ..checks import check_path
from ..errors import EstimatorMismatchError
from ..files.hub import Folder, Repo, open_source
from ..files.tensor_files import JSON_LIMIT, TensorFile, TensorInfo, parse_json
from ..models.hybrid import HybridSpec, check_spec
from .interface import Needs, Prefill, check_prefill

CONFIG_NAME, WEIGHTS_NAME = "config.json", "model.safetensors"
#: Of `config.json`. In 1 two of the ages were logarithms of tokens, scaled by a constant; in 2 all are scaled by the
#: context's length.
FORMAT_VERSION = 2
#: More than any model has; bounds what a configuration makes us allocate.
MOST_LAYERS = 4096


M = TypeVar("M", bound="MLPConfig")


def check_format(kind: str, version: Any) -> None:
    """Raises ValueError unless a configuration's version is the one that is read here.

    Args:
        kind: What the configuration is of, to begin the message with.
        version: What it says, of any type.
    """
    if type(version) is int and version == FORMAT_VERSION:
        return
    if type(version) is int and version == 1:
        raise ValueError(
            f"{kind} format 1 scales ages by a constant; this gatesight_hf reads format {FORMAT_VERSION}, which scales "
            "them by the context's length. Train it again with `gatesight train` (what its --data folder holds stays "
            "good), choose a newer revision of it, or use the older gatesight_hf that it was made with."
        )
    raise ValueError(
        f"{kind} format {version!r}; this gatesight_hf reads format {FORMAT_VERSION}. Upgrade gatesight_hf, or choose "
        "another revision of the estimator."
    )


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
    def from_dict(cls: type[M], data: dict[str, Any]) -> M:
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

    @property
    def num_parameters(self) -> int:
        """Weights and biases of all MLPs; statistics not counted."""
        return sum(prod(shape) for name, shape in self.tensor_shapes().items() if ".input_" not in name)

    @property
    def largest_weights(self) -> int:
        """Bytes that `model.safetensors` may have at most: the tensors, and a header of ample size."""
        shapes = self.tensor_shapes().values()
        return 4 * sum(map(prod, shapes)) + 256 * len(shapes) + 4096


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
        if not isinstance(config, self.config_class):
            raise TypeError(f"config must be a {self.config_class.__name__}, got {described(config)}.")
        if not isinstance(tensors, dict):
            raise TypeError(f"tensors must be a dict of tensors by name, got {described(tensors)}.")
        shapes = config.tensor_shapes()
        if set(tensors) != set(shapes):
            raise ValueError(
                f"Weights (tensors): missing {sorted(set(shapes) - set(tensors))[:4]}, unexpected "
                f"{sorted(set(tensors) - set(shapes))[:4]}."
            )
        for name, shape in shapes.items():
            tensor = tensors[name]
            fits = isinstance(tensor, Tensor) and tuple(tensor.shape) == shape and tensor.dtype == torch.float32
            if not fits or tensor.is_meta:
                raise ValueError(f"Weights (tensors): {name} must be float32 {shape}, got {described(tensor)}.")
            if not torch.isfinite(tensor).all() or (name.endswith("input_std") and not (tensor > 0).all()):
                raise ValueError(f"Weights (tensors): {name} holds values that are not finite or not positive.")
        self.config = config
        self.tensors = tensors
        self._packed: dict[tuple[int, torch.device, torch.dtype], tuple[list[Tensor], list[int], PackedMLP]] = {}

    def check(self, spec: HybridSpec) -> None:
        """Raises EstimatorMismatchError unless the scorer was trained for this layout."""
        check_spec(spec)
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
        check_prefill(prefill)
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
    def from_pretrained(
        cls: type[S],
        source: str | Path,
        *,
        subfolder: str = "",
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
    ) -> S:
        """Load a scorer from `config.json` and `model.safetensors`, in a folder or a repo on the Hub.

        Args:
            source: A folder, or a repo as `owner/name`; a folder of that name goes first.
            subfolder: Of the folder or repo.
            revision: Branch, tag or commit of the repo; None is `main`. Both files come from one commit.
            token: For the Hub; True: the one logged in with, False: none, None: one if there is one.
            cache_dir: Of downloads; None is huggingface_hub's.
            local_files_only: Ask the cache alone, as `HF_HUB_OFFLINE=1` does.

        Raises:
            FileNotFoundError: No such folder, repo, revision or file; or offline, and it is not in the cache.
            PermissionError: The repo is gated, or the token does not work.
            ConnectionError: The Hub cannot be reached.
            ValueError: A file is not what its format says, or has more bytes than it can have.
        """
        files = open_source(
            source, revision=revision, token=token, cache_dir=cache_dir, local_files_only=local_files_only
        )
        inside = f"{subfolder}/" if subfolder else ""
        config = read_config(cls.config_class, files, inside + CONFIG_NAME)
        weights = files.get(inside + WEIGHTS_NAME, config.largest_weights)
        try:
            with TensorFile(weights) as file:
                file.check({name: TensorInfo(torch.float32, shape) for name, shape in config.tensor_shapes().items()})
                tensors = file.read()
        except ValueError as error:
            raise ValueError(f"{weights}: {error}.") from error
        return cls(config, tensors)

    @property
    def identity(self) -> str:
        """Class, and a digest of configuration and weights."""
        digest = hashlib.sha256(json.dumps(asdict(self.config), sort_keys=True).encode())  # type: ignore[call-overload]
        for name in sorted(self.tensors):
            digest.update(name.encode() + self.tensors[name].detach().cpu().contiguous().numpy().tobytes())
        return f"{type(self).__name__} {digest.hexdigest()[:16]}"

    def save_pretrained(self, path: str | Path) -> None:
        """Write `config.json` and `model.safetensors` into a folder, which is made if need be."""
        check_path("path", path)
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
        return self.config.num_parameters


def read_config(config_class: type[M], files: Folder | Repo, name: str) -> M:
    """Read a configuration strictly.

    Raises:
        FileNotFoundError, PermissionError, ConnectionError: See `MLPScorer.from_pretrained`.
        ValueError: It is not what its format says.
    """
    path = files.get(name, JSON_LIMIT)
    try:
        with path.open("rb") as text:
            data = parse_json(text.read(JSON_LIMIT))
    except ValueError as error:
        raise ValueError(f"{path}: {error}.") from error
    config = config_class.from_dict(data)
    if config.num_layers > MOST_LAYERS:
        raise ValueError(f"{path}: {config.num_layers} attention layers, more than {MOST_LAYERS}.")
    return config
