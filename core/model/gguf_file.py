"""Reads a GGUF file: its metadata, and its tensors as views of a memory map.

Owns the file format; the meaning of names and values is ``core.model.gguf``'s. The reader of the ``gguf`` package keeps every
string of a vocabulary as an array of its own: ten seconds for 262,144 tokens, a quarter of one here.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from core.errors import ConfigError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # struct's letters
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor as stored: ``rows`` uint8 ``[..., bytes per row]``; ``shape`` counts elements, outermost dimension first."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    rows: npt.NDArray[np.uint8]

    def dequantized(self) -> npt.NDArray[np.float32]:
        """Return the values, fp32, of ``shape``."""
        values: npt.NDArray[np.float32] = dequantize(self.rows, self.kind).astype(np.float32, copy=False)
        return values.reshape(self.shape)


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The content of a file; the tensors stay valid as long as they are referenced."""

    metadata: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]


def can_dequantize(kind: GGMLQuantizationType) -> bool:
    """Return whether values of this type can be computed: of some, the ``gguf`` package knows the size only."""
    _, block_bytes = GGML_QUANT_SIZES[kind]
    try:
        dequantize(np.zeros(block_bytes, dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def read_gguf(path: Path) -> GGUFFile:
    """Map a file and read its header.

    Raises:
        ConfigError: it cannot be opened, is not a GGUF file, or ends too early.
    """
    try:
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return _parse(content)
    except (OSError, ValueError, KeyError, struct.error, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as a GGUF file: {error}", param="model") from error


def _parse(content: mmap.mmap) -> GGUFFile:
    cursor = _Cursor(content)
    magic, version = cursor.take_bytes(4), cursor.scalar("I")
    if magic != _MAGIC or version not in _VERSIONS:
        raise ValueError(f"it begins with {magic!r} and version {version}")
    num_tensors, num_fields = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(num_fields)}
    heads = [_tensor_head(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    data = np.frombuffer(content, dtype=np.uint8)[start:]
    return GGUFFile(metadata, tuple(_tensor(*head, data) for head in heads))


class _Cursor:
    """Reads one value after the other."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self.position = 0

    def take_bytes(self, size: int) -> bytes:
        start, self.position = self.position, self.position + size
        if self.position > len(self._content):
            raise ValueError("it ends in its head")
        return self._content[start : self.position]

    def scalar(self, letter: str) -> Any:  # noqa: ANN401 - what the letter says
        layout = "<" + letter
        return struct.unpack(layout, self.take_bytes(struct.calcsize(layout)))[0]

    def string(self) -> str:
        return self.take_bytes(self.scalar("Q")).decode()

    def value(self, kind: int) -> Any:  # noqa: ANN401 - what the file says
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        return self.scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind not in _SCALARS:
            return [self.value(kind) for _ in range(count)]
        layout = np.dtype("<" + _SCALARS[kind])
        values: list[Any] = np.frombuffer(self.take_bytes(count * layout.itemsize), dtype=layout).tolist()
        return values


def _tensor_head(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    """Return name, shape, type and offset of a tensor; the file names the innermost dimension first."""
    name, num_dimensions = cursor.string(), cursor.scalar("I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise ValueError(f"tensor {name!r} has {num_dimensions} dimensions")
    sizes = [cursor.scalar("Q") for _ in range(num_dimensions)]
    return name, tuple(reversed(sizes)), GGMLQuantizationType(cursor.scalar("I")), cursor.scalar("Q")


def _tensor(
    name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, offset: int, data: npt.NDArray[np.uint8]
) -> GGUFTensor:
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    row_bytes = shape[-1] // block_elements * block_bytes
    end = offset + math.prod(shape[:-1]) * row_bytes
    if end > len(data):
        raise ValueError(f"it ends in tensor {name!r}")
    return GGUFTensor(name, shape, kind, data[offset:end].reshape(*shape[:-1], row_bytes))
