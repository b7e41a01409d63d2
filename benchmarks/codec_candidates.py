"""Lossless codecs for KV blocks: what ``benchmarks/codec.py`` compares. No codec here is used by kvferry.

Floating-point numbers compress in their exponents: signs and mantissas of KV are nearly random. Two filters put the exponents
beside each other. ``bytes`` groups the first bytes of all numbers, then the second ones, and so on. ``exponents`` rotates each
number left by one bit first, so that the highest byte is the whole exponent; only those bytes are compressed, the others are
stored. blosc2 has filters of its own, in SIMD: ``shuffle`` is ``bytes``, ``bitshuffle`` the same with bits.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Pack = Callable[[Bytes], bytes]
Unpack = Callable[[bytes], bytes]

LIBRARIES = ("zstandard", "lz4", "blosc2")  # measured where they are installed


@dataclass(frozen=True, slots=True)
class Codec:
    """``encode`` gives the stored parts of a block; ``decode`` makes the block of them."""

    name: str
    encode: Callable[[Bytes], list[bytes]]
    decode: Callable[[list[bytes]], Bytes]


def candidates(itemsize: int) -> Iterator[Codec]:
    """Yield the codecs for numbers of ``itemsize`` bytes, bf16 or fp32, of the libraries that are installed."""
    packers = dict(_packers())
    for name, (pack, unpack) in packers.items():
        yield _grouped(f"bytes, {name}", itemsize, pack, unpack)
        yield _exponents(f"exponents, {name}", itemsize, pack, unpack)
    yield _exponents("exponents, stored", itemsize, bytes, bytes)  # what the filter costs
    yield from _blosc2(itemsize)


def _packers() -> Iterator[tuple[str, tuple[Pack, Unpack]]]:
    yield "zlib 1", (lambda content: zlib.compress(content, 1), zlib.decompress)
    if (zstandard := _library("zstandard")) is not None:
        for level in (-5, 1, 3):
            compressor, decompressor = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
            yield f"zstd {level}", (compressor.compress, decompressor.decompress)
    if _library("lz4") is not None:
        block = importlib.import_module("lz4.block")
        yield "lz4", (block.compress, block.decompress)


def _blosc2(itemsize: int) -> Iterator[Codec]:
    blosc2 = _library("blosc2")
    if blosc2 is None:
        return
    blosc2.set_nthreads(1)
    for codec in ("LZ4", "ZSTD"):
        for filter_ in ("SHUFFLE", "BITSHUFFLE"):
            settings = {"typesize": itemsize, "clevel": 1, "codec": getattr(blosc2.Codec, codec)}
            settings["filter"] = getattr(blosc2.Filter, filter_)

            def encode(block: Bytes, settings: dict[str, Any] = settings) -> list[bytes]:
                return [blosc2.compress(block, **settings)]

            def decode(parts: list[bytes]) -> Bytes:
                return np.frombuffer(blosc2.decompress(parts[0]), np.uint8)

            yield Codec(f"blosc2 {codec.lower()}, {filter_.lower()}", encode, decode)


def _library(name: str) -> Any:  # noqa: ANN401
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _grouped(name: str, itemsize: int, pack: Pack, unpack: Unpack) -> Codec:
    def encode(block: Bytes) -> list[bytes]:
        return [pack(np.ascontiguousarray(block.reshape(-1, itemsize).T).ravel())]

    def decode(parts: list[bytes]) -> Bytes:
        return np.ascontiguousarray(np.frombuffer(unpack(parts[0]), np.uint8).reshape(itemsize, -1).T).ravel()

    return Codec(name, encode, decode)


def _exponents(name: str, itemsize: int, pack: Pack, unpack: Unpack) -> Codec:
    dtype = np.dtype(f"<u{itemsize}")
    bits = 8 * itemsize

    def encode(block: Bytes) -> list[bytes]:
        numbers = block.view(dtype)
        rotated = ((numbers << dtype.type(1)) | (numbers >> dtype.type(bits - 1))).view(np.uint8).reshape(-1, itemsize)
        return [pack(np.ascontiguousarray(rotated[:, -1])), rotated[:, :-1].tobytes()]

    def decode(parts: list[bytes]) -> Bytes:
        exponents = np.frombuffer(unpack(parts[0]), np.uint8)
        rotated = np.empty((len(exponents), itemsize), np.uint8)
        rotated[:, -1] = exponents
        rotated[:, :-1] = np.frombuffer(parts[1], np.uint8).reshape(-1, itemsize - 1)
        numbers = rotated.view(dtype)
        return ((numbers >> dtype.type(1)) | (numbers << dtype.type(bits - 1))).view(np.uint8).ravel()

    return Codec(name, encode, decode)
