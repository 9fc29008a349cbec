"""Compacted caches as files: one safetensors file with all layers' tensors, and what they belong to in its metadata.

Format 3. Metadata (`header`): `format` and `format_version`; `sha256` of everything else (`files.tensor_files`); and
`cache`, a JSON object:

- `model`, `tokenizer`, `scorer`: what the cache was made with (`identity`); the tokenizer may be null.
- `options`: of `CompactionOptions`, none of a cache that grows. `layers`: each layer's `kind`, by absolute index.
- `extent`: `rows`, `context` and `tail` (`entries.Extent`). The logical length is context + tail.
- `plan`: `achieved_fraction`, `kv_bytes_before`; `seconds`: as in the report.

Tensors: `ids` int64 and `padding` bool `[B, context + tail]`, where known; `kept` int64 and, where known, `gate_means`
float64 `[B, L]`; `layers.{index}.{name}` for each tensor of a layer's `state`; and of a session `session`, uint8, the
bytes of a JSON object (`gatesight_hf.session.saving`), which format 2 had not.

A further kind of layer brings its own tensors by `kind`, `state`, `expected_state` and `load_state` (`entries`).

A file is untrusted: nothing is allocated before every declared size was compared with the file's, and with those of a
cache that has seen one token of the model. A file's content takes its own size in memory, once. The checksum tells of
damage; who can write the file can also write its checksum.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checks import check_path
from ..entries.attention import GateSightAttentionLayer
from ..entries.states import GDNStateLayer
from ..errors import CacheStateError, SessionFileError, SessionMismatchError
from ..files.tensor_files import TensorFile, TensorInfo, parse_json, write_tensor_file
from ..models.hybrid import HybridSpec
from ..scoring.interface import Needs, Prefill
from .header import FORMAT, FORMAT_VERSION, SavedCache, parse_header, short
from .identity import Identity

Layer = GateSightAttentionLayer | GDNStateLayer
#: Bytes of a session's JSON.
SESSION_LIMIT = 2**28


@dataclass(frozen=True)
class AbsentScorer:
    """Stands for the scorer of a cache that was loaded without it: the cache is compacted and needs none.

    Attributes:
        identity: Of the scorer that is absent.
    """

    identity: str | None
    needs = Needs()

    def check(self, spec: HybridSpec) -> None:
        """Fits every hybrid."""

    def score(self, prefill: Prefill) -> list[Tensor]:
        raise CacheStateError(
            f"This cache was loaded without its scorer ({self.identity}), which another context needs: give it to load."
        )


def save_cache(path: str | Path, saved: SavedCache, layers: Sequence[Layer]) -> None:
    """Write a compacted cache to `path`, whole or not at all.

    Raises:
        OSError: It cannot be written; an old file stays.
        ValueError: A state holds NaN or infinite values, with which the file could not be loaded.
    """
    tensors = {f"layers.{i}.{name}": tensor for i, layer in enumerate(layers) for name, tensor in layer.state().items()}
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise ValueError(f"{name} holds NaN or infinite values: the cache gives no answers, and is not saved.")
    tensors |= {name: tensor for name in ("ids", "padding") if (tensor := getattr(saved, name)) is not None}
    tensors["kept"] = torch.tensor(saved.plan.kept, dtype=torch.int64)
    if saved.plan.gate_means:
        tensors["gate_means"] = torch.tensor(saved.plan.gate_means, dtype=torch.float64)
    content = {
        **asdict(saved.identity),
        "options": asdict(saved.options),
        "layers": [layer.kind for layer in layers],
        "extent": asdict(saved.extent),
        "plan": {name: getattr(saved.plan, name) for name in ("achieved_fraction", "kv_bytes_before")},
        "seconds": saved.seconds,
    }
    metadata = {"format": FORMAT, "format_version": str(FORMAT_VERSION), "cache": json.dumps(content)}
    if saved.session is not None:
        # No part of the header, which is kept short: a conversation may be long.
        text = json.dumps(saved.session, ensure_ascii=False).encode()
        if len(text) > SESSION_LIMIT:
            raise ValueError(f"A session of {len(text):,} bytes of text; at most {SESSION_LIMIT:,} can be read.")
        tensors["session"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    write_tensor_file(path, tensors, metadata)


class CacheFile:
    """A saved cache whose header was checked and whose tensors are still in the file; a context manager.

    Attributes:
        saved: What the header says; `kept`, `gate_means`, `ids` and `padding` come with the tensors.

    Raises:
        FileNotFoundError: No such file.
        SessionFileError: The file is not such a file, is damaged, or of another version.
    """

    def __init__(self, path: str | Path) -> None:
        check_path("path", path)  # before errors are said to be the file's
        self._path = path
        with _errors_of(path):
            self._file = TensorFile(path)
            try:
                self.saved, self._kinds = parse_header(self._file.metadata)
            except BaseException:
                self._file.close()
                raise

    def __enter__(self) -> "CacheFile":
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()

    def check(self, wanted: Identity) -> None:
        """Raises SessionMismatchError if the file is for another model, tokenizer or scorer; None is not compared."""
        difference = self.saved.identity.difference(wanted)
        if difference is not None:
            name, own, text = difference
            # One of an older format cannot be loaded, and is not missed: what is kept was chosen before.
            without = "without one, as answers need none, or " if name == "scorer" else ""
            raise SessionMismatchError(
                f"{self._path}: saved with another {name}: {short(own)} in the file, {short(text)} given. Load it "
                f"{without}with what it was saved with, or prefill the document again."
            )

    def load_layers(self, layers: Sequence[Layer], device: torch.device) -> SavedCache:
        """Read all tensors into layers that have seen one token of the model.

        Args:
            layers: Of a new cache; their dtypes, shapes and devices are those that the file's must have, or get. On
                errors they are of no use any more.
            device: For ids and padding.

        Raises:
            SessionFileError: A tensor is missing, not expected, of another dtype or shape, holds values that cannot
                be, or the checksum is wrong.
        """
        extent = self.saved.extent
        with _errors_of(self._path):
            if self._kinds != [layer.kind for layer in layers]:
                raise ValueError(f"layers of kinds {short(self._kinds)} do not fit the model's")
            of_layers = self._by_layer(self._file.infos)
            expected = self._expected_of_all(layers)
            for i, layer in enumerate(layers):
                of_layer = layer.expected_state(extent, of_layers.get(i, {}))
                expected |= {f"layers.{i}.{name}": info for name, info in of_layer.items()}
            self._file.check(expected)
            devices = [next(iter(layer.state().values())).device for layer in layers]

            def device_of(name: str) -> torch.device:
                first, _, rest = name.partition(".")
                return devices[int(rest.partition(".")[0])] if first == "layers" else device

            tensors = self._file.read(device_of)
            for name, tensor in tensors.items():
                if not is_finite(tensor):
                    raise ValueError(f"{name} holds NaN or infinite values")
            for i, loaded in self._by_layer(tensors).items():
                layers[i].load_state(loaded, extent)
            return self._with_tensors(tensors, layers)

    @staticmethod
    def _by_layer(named: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """`layers.{index}.{name}` apart by index."""
        found: dict[int, dict[str, Any]] = {}
        for name, value in named.items():
            first, _, rest = name.partition(".")
            index, _, rest = rest.partition(".")
            if first == "layers" and index.isascii() and index.isdigit() and len(index) < 8:
                found.setdefault(int(index), {})[rest] = value
        return found

    def _expected_of_all(self, layers: Sequence[Layer]) -> dict[str, TensorInfo]:
        extent = self.saved.extent
        tokens = (extent.rows, extent.context + extent.tail)
        attention = sum(isinstance(layer, GateSightAttentionLayer) for layer in layers)
        known = {
            "ids": TensorInfo(torch.int64, tokens),
            "padding": TensorInfo(torch.bool, tokens),
            "gate_means": TensorInfo(torch.float64, (extent.rows, attention)),
        }
        of_session = self._file.infos.get("session")
        if of_session is not None and of_session.nbytes <= SESSION_LIMIT:
            known["session"] = TensorInfo(torch.uint8, (of_session.nbytes,))
        expected = {name: info for name, info in known.items() if name in self._file.infos}
        return expected | {"kept": TensorInfo(torch.int64, (extent.rows, attention))}

    def _with_tensors(self, tensors: Mapping[str, Tensor], layers: Sequence[Layer]) -> SavedCache:
        """Check what the tensors say of all layers, and take it in."""
        extent, padding = self.saved.extent, tensors.get("padding")
        lengths = torch.full((extent.rows,), extent.context)
        if padding is not None:
            if not bool(padding[:, extent.context - 1 :].all()) or bool((padding[:, 1:] < padding[:, :-1]).any()):
                raise ValueError("padding marks pads after a row's first token")
            lengths = padding[:, : extent.context].sum(-1).cpu()
        kept = tensors["kept"].cpu()
        attention = [layer for layer in layers if isinstance(layer, GateSightAttentionLayer)]
        for j, layer in enumerate(attention):
            counted = _check_entries(j, layer, extent.context - lengths, extent.context)
            if not torch.equal(counted, kept[:, j]):
                raise ValueError(f"attention layer {j} does not keep as many entries as `kept` says")
        gate_means = tensors["gate_means"].tolist() if "gate_means" in tensors else []
        plan = replace(self.saved.plan, kept=kept.tolist(), gate_means=gate_means)
        session = parse_json(tensors["session"].cpu().numpy().tobytes()) if "session" in tensors else None
        return replace(self.saved, plan=plan, ids=tensors.get("ids"), padding=padding, session=session)


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor of any dtype holds no NaN and no infinity, without a tensor of its size besides it."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # 8-bit floats have no aminmax
    return all(bool(end.isfinite()) for end in torch.aminmax(wide))


def _check_entries(ordinal: int, layer: GateSightAttentionLayer, first: Tensor, context: int) -> Tensor:
    """Check one attention layer's positions, and count what each row keeps in its fullest head, `[B]`.

    Args:
        ordinal: For messages.
        layer: As it was loaded.
        first: `[B]`, each row's first slot that is no pad.
        context: Slots.

    Raises:
        ValueError: Positions of kept entries are outside the row's tokens, or not ascending.
    """
    positions, valid = layer.kept_positions, layer.kept_valid
    assert positions is not None
    rows, _, count = positions.shape
    if valid is None:
        valid = torch.ones((rows, count), dtype=torch.bool, device=positions.device)
    of_heads = valid if valid.ndim == 3 else valid.unsqueeze(1)
    least = first.to(positions).view(-1, 1, 1)
    if bool(((positions < 0) | (positions >= context) | (of_heads & (positions < least))).any()):
        raise ValueError(f"attention layer {ordinal} keeps positions outside the {context} slots, or of pads")
    # Ascending among real entries, whatever stands between them.
    reached = positions.masked_fill(~of_heads, -1).cummax(-1).values
    if bool(((positions[..., 1:] <= reached[..., :-1]) & of_heads[..., 1:]).any()):
        raise ValueError(f"attention layer {ordinal} keeps positions that are not ascending")
    return of_heads.sum(-1).amax(-1).cpu()


@contextmanager
def _errors_of(path: str | Path) -> Iterator[None]:
    """Errors in what a file holds, as one kind that names the file."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise SessionFileError(f"{path}: {error}") from error
