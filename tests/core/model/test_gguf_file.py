"""The GGUF file format, against the reader of the ``gguf`` package on files that its writer has written."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest

from core.errors import ConfigError
from core.model.gguf_file import read_gguf

FIELDS = {
    "uint8": 200,
    "int8": -100,
    "uint16": 60000,
    "int16": -30000,
    "uint32": 4_000_000_000,
    "int32": -2_000_000_000,
    "uint64": 2**63 + 5,
    "int64": -(2**62),
    "float32": 1.5,
    "float64": 0.1,
    "bool": True,
    "string": "naïve ▁日本 \n",
}
ARRAYS = {"texts": ["", "▁a", "日本"], "numbers": [3, -4, 5], "reals": [0.25, -1000.0], "flags": [True, False, True]}
QUANTIZED = gguf.GGMLQuantizationType.Q8_0


@pytest.fixture(params=[32, 64])
def path(request, tmp_path):
    path = tmp_path / "some.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for kind, value in FIELDS.items():
        getattr(writer, f"add_{kind}")(f"some.{kind}", value)
    for name, values in ARRAYS.items():
        writer.add_array(f"some.{name}", values)
    writer.add_custom_alignment(request.param)
    generator = np.random.default_rng(0)
    writer.add_tensor("vector", generator.standard_normal(7, dtype=np.float32))
    writer.add_tensor("half", generator.standard_normal((3, 5)).astype(np.float16))
    weights = generator.standard_normal((6, 64), dtype=np.float32)
    writer.add_tensor("quantized", gguf.quants.quantize(weights, QUANTIZED), raw_dtype=QUANTIZED)
    writer.add_tensor("cube", generator.standard_normal((2, 3, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_of_every_type_is_read(path):
    metadata = read_gguf(path).metadata
    assert {kind: metadata[f"some.{kind}"] for kind in FIELDS} == FIELDS
    assert {name: metadata[f"some.{name}"] for name in ARRAYS} == ARRAYS
    theirs = {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items() if not key.startswith("GGUF.")}
    assert metadata == theirs


def test_tensors_are_dequantized_to_what_the_other_reader_finds(path):
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    tensors = read_gguf(path).tensors
    assert [tensor.name for tensor in tensors] == ["vector", "half", "quantized", "cube"]
    for tensor in tensors:
        values = tensor.dequantized()
        expected = gguf.quants.dequantize(theirs[tensor.name].data, theirs[tensor.name].tensor_type)
        assert values.dtype == np.float32
        assert tensor.shape == values.shape == expected.shape
        assert np.array_equal(values, expected)


def test_a_file_that_ends_anywhere_too_early_is_refused(path):
    content = path.read_bytes()
    unpadded = len(content.rstrip(b"\x00"))
    for size in [*range(0, unpadded, 37), unpadded - 1]:
        path.write_bytes(content[:size])
        with pytest.raises(ConfigError, match=r"some\.gguf cannot be read as a GGUF file"):
            read_gguf(path)


@pytest.mark.parametrize(
    ("offset", "change"),
    [(0, b"JUNK"), (4, b"\x01\x00\x00\x00"), (4, b"\x00\x00\x00\x03"), (8, b"\xff" * 8), (16, b"\xff" * 8)],
    ids=["magic", "version 1", "big-endian", "tensor count", "field count"],
)
def test_a_head_that_makes_no_sense_is_refused(path, offset, change):
    content = bytearray(path.read_bytes())
    content[offset : offset + len(change)] = change
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"some\.gguf cannot be read as a GGUF file"):
        read_gguf(path)


def test_lists_in_each_other_without_end_are_refused(tmp_path):
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 4) + b"deep" + struct.pack("<I", 9)
    (tmp_path / "some.gguf").write_bytes(head + struct.pack("<IQ", 9, 1) * 100_000)
    with pytest.raises(ConfigError, match=r"some\.gguf cannot be read as a GGUF file"):
        read_gguf(tmp_path / "some.gguf")
