"""One safetensors file: read as hostile input, written at once or not at all.

A reader first checks the header against the file's size, and then lets its caller compare every declared tensor with
what it expects; only after that is anything of the data's size allocated. Bytes go straight from the file into the
tensors that stay.
"""

import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..checks import check_path

#: Bytes of the longest JSON that is parsed: two hundred tensors take 25 KB, and Python needs some 20 times as much.
JSON_LIMIT = 2**20
#: Of a tensor, or far more.
MOST_DIMENSIONS = 8
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: Key of the metadata; the digest is of the whole file, with zeros in its own place.
CHECKSUM = "sha256"
NO_CHECKSUM = "0" * 64


@dataclass(frozen=True)
class TensorInfo:
    """What a file says, or must say, of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorInfo":
        return cls(tensor.dtype, tuple(tensor.shape))

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


def parse_json(text: bytes) -> dict[str, Any]:
    """Read one JSON object strictly: UTF-8, no key twice, only finite numbers.

    Raises:
        ValueError: It is something else.
    """

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not a number in JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key stands twice in one object")
        return found

    try:
        data = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON that can be read: {str(error)[:200]}") from error
    if not isinstance(data, dict):
        raise ValueError("not one JSON object")
    return data


class TensorFile:
    """A safetensors file that is open, its header checked and nothing of its data read.

    Attributes:
        metadata: `__metadata__` of the header.
        infos: What the header says of each tensor, in the order of their data.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: No such file.
        ValueError: It is not a safetensors file, or one whose header is over `JSON_LIMIT`. Errors do not name the file.
    """

    def __init__(self, path: str | Path) -> None:
        check_path("path", path)
        path = Path(path)
        if not path.is_file():  # and no pipe, which would block
            what = "a folder, and no such file" if path.is_dir() else "no such file"
            raise FileNotFoundError(f"{path}: {what}.")
        self._file = path.open("rb", buffering=0)
        try:
            self._header = self._read_header()
            self.metadata, self.infos = self._parse_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    @staticmethod
    def _not_safetensors(what: str) -> ValueError:
        return ValueError(f"not a safetensors file, or a damaged one: {what}")

    def _read_header(self) -> bytes:
        self._size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(8), "little")
        if self._size < 8 or length > self._size - 8:
            raise self._not_safetensors(f"{self._size} bytes cannot hold a header of {length} bytes")
        if length > JSON_LIMIT:
            raise ValueError(f"its header has {length} bytes, more than the {JSON_LIMIT} that are read")
        header = self._file.read(length)
        if len(header) != length:
            raise self._not_safetensors("it ends inside its header")
        return header

    def _parse_header(self) -> tuple[dict[str, str], dict[str, TensorInfo]]:
        try:
            header = parse_json(self._header)
        except ValueError as error:
            raise self._not_safetensors(f"its header is {error}") from error
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise self._not_safetensors("its metadata are not texts by name")
        entries = [(*self._entry(name, entry), name) for name, entry in header.items()]
        entries.sort(key=lambda entry: entry[:2])
        position, infos = 0, {}
        for start, end, info, name in entries:
            if start != position or end - start != info.nbytes:
                raise self._not_safetensors(f"tensor {name[:80]!r} does not lie where its size and the others' say")
            position, infos[name] = end, info
        if position != self._size - 8 - len(self._header):
            raise self._not_safetensors(
                f"its header tells of {position} bytes of data, {self._size - 8 - len(self._header)} are there"
            )
        return metadata, infos

    def _entry(self, name: str, entry: Any) -> tuple[int, int, TensorInfo]:
        """Begin, end, dtype and shape."""
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise self._not_safetensors(f"tensor {name[:80]!r} is not told by dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError(f"tensor {name[:80]!r} has dtype {str(dtype)[:80]!r}, which is not read here")
        for numbers in (shape, offsets):
            if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
                raise self._not_safetensors(f"tensor {name[:80]!r} has sizes that are not whole numbers >= 0")
        if len(offsets) != 2 or len(shape) > MOST_DIMENSIONS:
            raise self._not_safetensors(f"tensor {name[:80]!r} has {len(shape)} dimensions, {len(offsets)} offsets")
        return offsets[0], offsets[1], TensorInfo(DTYPES[dtype], tuple(shape))

    def check(self, expected: Mapping[str, TensorInfo]) -> None:
        """Compare what the file declares with what it must hold, before anything is read.

        Raises:
            ValueError: A tensor is missing, not expected, or of another dtype or shape.
        """
        if set(self.infos) != set(expected):
            missing, unexpected = sorted(set(expected) - set(self.infos)), sorted(set(self.infos) - set(expected))
            raise ValueError(f"missing tensors {missing[:4]}, unexpected ones {[name[:80] for name in unexpected[:4]]}")
        for name, info in expected.items():
            if self.infos[name] != info:
                raise ValueError(f"{name} must be {info}, got {self.infos[name]}")

    def read(self, device_of: Callable[[str], torch.device | str] = lambda name: "cpu") -> dict[str, Tensor]:
        """All tensors, each read into memory of its own and moved to its device; call `check` first.

        If the metadata have a checksum, it is compared when all bytes were seen: the tensors are those that it is of.

        Raises:
            ValueError: The file ends early, a bool is neither 0 nor 1, or the checksum is not that of the file.
        """
        told = self.metadata.get(CHECKSUM)
        if told is not None and not re.fullmatch("[0-9a-f]{64}", told):
            raise ValueError("its checksum is not 64 hexadecimal digits")
        digest = hashlib.sha256(self._header.replace((told or NO_CHECKSUM).encode(), NO_CHECKSUM.encode(), 1))
        tensors = {}
        self._file.seek(8 + len(self._header))
        for name, info in self.infos.items():
            raw = torch.empty(info.nbytes, dtype=torch.uint8, device="cpu")
            self._fill(raw.numpy().data)
            if told is not None:
                digest.update(raw.numpy().data)
            if info.dtype == torch.bool and info.nbytes and int(raw.max()) > 1:
                raise ValueError(f"{name} holds bytes that are no bools")
            tensors[name] = raw.view(info.dtype).view(info.shape).to(device_of(name))
        if told is not None and told != digest.hexdigest():
            raise ValueError("its checksum is not that of its content; it was damaged or changed")
        return tensors

    def _fill(self, view: memoryview) -> None:
        filled = 0
        while filled < len(view):
            count = self._file.readinto(view[filled:])
            if not count:
                raise ValueError("it ended while it was read")
            filled += count


def write_tensor_file(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file with a checksum; one that is there is replaced whole, or stays if writing fails.

    Tensors are brought to the CPU one after another.

    Args:
        path: The file.
        tensors: By name, on any device.
        metadata: More for the header.

    Raises:
        OSError: It cannot be written.
        ValueError: A header over `JSON_LIMIT`, which no reader would take.
    """
    # Wide dtypes first, as other readers expect, so that all data are aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {CHECKSUM: NO_CHECKSUM, **metadata}}  # the first zeros of the text
    position = 0
    for name in order:
        info = TensorInfo.of(tensors[name])
        offsets = [position, position := position + info.nbytes]
        header[name] = {"dtype": DTYPE_NAMES[info.dtype], "shape": list(info.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > JSON_LIMIT:
        raise ValueError(f"A header of {len(text)} bytes for {len(tensors)} tensors; at most {JSON_LIMIT} can be read.")
    digest = hashlib.sha256(text)
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            data = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            digest.update(data)
            file.write(data)
        file.seek(8)
        file.write(text.replace(NO_CHECKSUM.encode(), digest.hexdigest().encode(), 1))


def check_target(path: str | Path, name: str = "path") -> Path:
    """Where a file that is written to `path` will be; messages call it `name`.

    Raises:
        TypeError: No path.
        OSError: A folder is there, or none to put it in.
    """
    check_path(name, path)
    target = Path(os.path.realpath(path))  # what a link names is replaced, not the link
    if target.is_dir():
        raise IsADirectoryError(f"{name}: {target} is a folder; give the name of a file.")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{name}: there is no folder {target.parent} for {target.name}.")
    return target


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when all of it is on the disk; until then, or on errors, nothing does.

    Raises:
        OSError: It cannot be written there.
    """
    target = check_target(path)
    temporary = target.with_name(f".gatesight-{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    if os.name == "posix":
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name
        finally:
            os.close(folder)
