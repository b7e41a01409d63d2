"""The format of a segment file: a page that identifies it, then records, each a sealed block.

This module writes and reads the format; it knows no index, capacity or other files. A file only grows and its bytes are never
changed; a record that a crash has cut off is recognised as incomplete.

    file    page 0: magic: u64 | version: u64 | nonce[16] | checksum[16]                  then records, each from a page's start
    record  magic: u64 | num_bytes: u64 | key[36] | seal[64] | checksum[16]      256 bytes, then the block, filled up to a page

A record's checksum is keyed by the file's nonce and covers its offset: neither a block's content nor another file's remains on
the device can be mistaken for a record. The block itself is covered by the digest in its seal.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from core.errors import CorruptBlock, KVFerryError
from core.kv.seals import SEAL_BYTES
from kvstore.key import PACKED_KEY_BYTES, StoreKey
from kvstore.seal_check import BlockVerifier

PAGE_BYTES = 4096
RECORD_HEADER_BYTES = 256
NONCE_BYTES = 16

_FILE_MAGIC = 0x3147_4553_4552_464B  # "KFRESEG1"
_RECORD_MAGIC = 0x3143_4552_4552_464B  # "KFREREC1"
_VERSION = 1
_CHECKSUM_BYTES = 16
_FILE_FIELDS = struct.Struct(f"<QQ{NONCE_BYTES}s")
_RECORD_FIELDS = struct.Struct(f"<QQ{PACKED_KEY_BYTES}s{SEAL_BYTES}s")


class Record(NamedTuple):
    """The offset and the header of a record."""

    offset: int
    num_bytes: int  # of the block
    key: bytes
    seal: bytes

    @property
    def end(self) -> int:
        """Offset of the next record."""
        return self.offset + record_bytes(self.num_bytes)


def record_bytes(num_bytes: int) -> int:
    """Return the bytes that a block of this size takes in a file."""
    return -(-(RECORD_HEADER_BYTES + num_bytes) // PAGE_BYTES) * PAGE_BYTES


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Yield a descriptor, and close it at the end. Raises: OSError."""
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def encode_file_header(nonce: bytes) -> bytes:
    """Return the first page of a file."""
    fields = _FILE_FIELDS.pack(_FILE_MAGIC, _VERSION, nonce)
    return (fields + _checksum(nonce, fields, 0)).ljust(PAGE_BYTES, b"\0")


def decode_file_header(page: bytes) -> bytes | None:
    """Return the nonce of a file; None if its first page is not complete."""
    if len(page) < PAGE_BYTES:
        return None
    fields = page[: _FILE_FIELDS.size]
    magic, version, nonce = _FILE_FIELDS.unpack(fields)
    is_intact = page[_FILE_FIELDS.size :][:_CHECKSUM_BYTES] == _checksum(nonce, fields, 0)
    return nonce if is_intact and (magic, version) == (_FILE_MAGIC, _VERSION) else None


def encode_record_header(nonce: bytes, record: Record) -> bytes:
    """Return the header of a record."""
    fields = _RECORD_FIELDS.pack(_RECORD_MAGIC, record.num_bytes, record.key, record.seal)
    return (fields + _checksum(nonce, fields, record.offset)).ljust(RECORD_HEADER_BYTES, b"\0")


def decode_record_header(nonce: bytes, offset: int, header: bytes | bytearray) -> Record | None:
    """Parse a header; None if it is missing or incomplete."""
    if len(header) < RECORD_HEADER_BYTES:
        return None
    fields = bytes(header[: _RECORD_FIELDS.size])
    magic, num_bytes, key, seal = _RECORD_FIELDS.unpack(fields)
    if magic != _RECORD_MAGIC or bytes(header[_RECORD_FIELDS.size :][:_CHECKSUM_BYTES]) != _checksum(nonce, fields, offset):
        return None
    return Record(offset, num_bytes, key, seal)


def scan_records(fd: int, nonce: bytes, *, check_blocks: bool) -> Iterator[Record]:
    """Yield the complete records of a file, in order.

    A damaged record is skipped page by page, so that the records after it are found. With ``check_blocks`` the blocks are read
    and compared with their digests, for files that a crash may have torn.
    """
    size = os.fstat(fd).st_size
    verifier = BlockVerifier()
    offset = PAGE_BYTES
    while offset < size:
        record = decode_record_header(nonce, offset, os.pread(fd, RECORD_HEADER_BYTES, offset))
        is_whole = record is not None and record.offset + RECORD_HEADER_BYTES + record.num_bytes <= size
        if record is None or not is_whole or (check_blocks and not _is_intact(fd, record, verifier)):
            offset += PAGE_BYTES
            continue
        yield record
        offset = record.end


def read_record(fd: int, nonce: bytes, offset: int, key: bytes, target: memoryview) -> Record:
    """Read the block of this key into the beginning of ``target``, which is large enough. Its digest is not checked.

    Raises:
        CorruptBlock: there is no such record.
    """
    header = bytearray(RECORD_HEADER_BYTES)
    num_read = os.preadv(fd, [header, target], offset)
    record = decode_record_header(nonce, offset, header)
    if record is None or record.key != key or num_read < RECORD_HEADER_BYTES + record.num_bytes:
        raise CorruptBlock(f"no record of the block at offset {offset}")
    return record


def has_record(fd: int, nonce: bytes, record: Record) -> bool:
    """Return whether the header of this record is where it was written; the block itself is not read."""
    return decode_record_header(nonce, record.offset, os.pread(fd, RECORD_HEADER_BYTES, record.offset)) == record


def _is_intact(fd: int, record: Record, verifier: BlockVerifier) -> bool:
    block = os.pread(fd, record.num_bytes, record.offset + RECORD_HEADER_BYTES)
    try:
        verifier.check(StoreKey.unpack(record.key), record.seal, memoryview(block))
    except KVFerryError:
        return False
    return True


def _checksum(nonce: bytes, fields: bytes, offset: int) -> bytes:
    return hashlib.blake2b(fields + offset.to_bytes(8, "little"), digest_size=_CHECKSUM_BYTES, key=nonce).digest()
