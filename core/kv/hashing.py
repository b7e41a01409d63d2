"""Block hashes: the identity of a prompt prefix, equal in every process that serves the same model.

A 128-bit chain of keyed BLAKE2b with one value per ``HASH_BLOCK_SIZE`` tokens, independent of a pool's block size: a block's
hash is the chain's value at its end. Cryptographic, because with a fast hash one tenant could forge another's prefix.

    value  = blake2b(digest_size=16, key=model_fingerprint, person=DOMAIN, data)
    data   = parent[16] | len(extra): u32 | extra | tokens: int32[n]                 full block
    data   = parent[16] | len(extra): u32 | extra | n: u32 | tokens: int32[n]        partial tail, n < block
    parent = the value before, or 16 zero bytes

A media item has an identifier of its own, which the hashes of the blocks that it overlaps hold as an extra key:

    identifier = blake2b(digest_size=16, key=model_fingerprint, person=DOMAIN, len(processing): u32 | processing | file)

All integers are little-endian. Full blocks and tails have different domains (BLAKE2's ``person``), so that a tail can never
collide with a full block. Knows nothing about requests or pools.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import TypeAlias

from core.constants import HASH_BLOCK_SIZE
from core.hash_chain import CompiledChain, compiled_library

BLOCK_HASH_BYTES = 16
ROOT_HASH = bytes(BLOCK_HASH_BYTES)

TokenIds: TypeAlias = "array[int] | bytes"
ExtraKey = tuple[str | int | bytes, ...]

_TOKEN_BYTES = 4
MAX_FINGERPRINT_BYTES = 64
_DOMAIN_FULL = b"kvferry full v1"
_DOMAIN_TAIL = b"kvferry tail v1"
_DOMAIN_MEDIA = b"kvferry media v1"
_U32 = struct.Struct("<I")
_NO_EXTRA = _U32.pack(0)
_MIN_COMPILED_BLOCKS = 3  # for fewer, calling the compiled chain takes longer than hashlib


class RequestKeys(tuple[ExtraKey, ...]):
    """The extra keys of a request, in which those of a block are found without a look at all media of the prompt."""

    @classmethod
    def of(cls, keys: Sequence[ExtraKey]) -> RequestKeys:
        """Return the keys as such ones."""
        return keys if isinstance(keys, cls) else cls(keys)

    def near(self, start: int, end: int) -> Sequence[ExtraKey]:
        """Return the keys, in their order, without media that lie wholly before or after the tokens [start, end)."""
        others, media, offsets, ends = self._index
        if not media:
            return self
        first, last = bisect_right(ends, start), bisect_left(offsets, end)
        return [self[position] for position in sorted(others + media[first:last])]

    @cached_property
    def _index(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """The positions of other keys, and those of media by offset, with the offset of each and the last end up to it.

        Media may overlap and come in any order: a hash must not leave one out, whoever wrote the request.
        """
        media = sorted((*place, position) for position, key in enumerate(self) if (place := _place(key)) is not None)
        positions = [position for _, _, position in media]
        others = sorted(set(range(len(self))).difference(positions))
        return others, positions, [offset for offset, _, _ in media], list(accumulate((end for _, end, _ in media), max))


def _place(key: ExtraKey) -> tuple[int, int] | None:
    """Return where a media item begins and ends; None for another key."""
    match key:
        case ("mm", bytes(), int(offset), int(length)):
            return offset, offset + length
    return None


def block_extra_keys(request_keys: Sequence[ExtraKey], start: int, end: int) -> tuple[ExtraKey, ...]:
    """Return the keys that enter the hash of the tokens [start, end), out of those of the whole request.

    Request keys: ``("lora", name)`` enters every block; ``("mm", identifier, offset, length)`` every block that the item
    overlaps, as ``("mm", identifier, offset - start)``; ``("cache_salt", salt)`` only at token 0: the chain carries it on.
    Raises: ValueError for another tag.
    """
    keys: list[ExtraKey] = []
    for key in request_keys.near(start, end) if isinstance(request_keys, RequestKeys) else request_keys:
        match key:
            case ("lora", str()):
                keys.append(key)
            case ("mm", bytes() as identifier, int(offset), int(length)):
                if offset < end and offset + length > start:
                    keys.append(("mm", identifier, offset - start))
            case ("cache_salt", str()):
                if start == 0:
                    keys.append(key)
            case _:
                raise ValueError(f"unknown extra key {key!r}")
    return tuple(keys)


def encode_extra_keys(keys: Sequence[ExtraKey]) -> bytes:
    """Encode tagged keys so that two different sequences never give the same bytes (every part carries its length)."""
    if not keys:
        return b""
    parts = [_U32.pack(len(keys))]
    for key in keys:
        parts.append(_U32.pack(len(key)))
        parts += [_encode_part(part) for part in key]
    return b"".join(parts)


def _encode_part(part: str | int | bytes) -> bytes:
    if isinstance(part, str):
        body, tag = part.encode(), b"s"
    elif isinstance(part, bytes):
        body, tag = part, b"b"
    else:
        body, tag = part.to_bytes(8, "little", signed=True), b"i"
    return tag + _U32.pack(len(body)) + body


def _token_bytes(token_ids: TokenIds, start: int, end: int) -> bytes:
    """Little-endian int32 bytes of the tokens [start, end)."""
    if isinstance(token_ids, bytes):
        return token_ids[start * _TOKEN_BYTES : end * _TOKEN_BYTES]
    part = token_ids[start:end]
    if sys.byteorder == "big":
        part.byteswap()
    return part.tobytes()


def _num_tokens(token_ids: TokenIds) -> int:
    if isinstance(token_ids, bytes):
        if len(token_ids) % _TOKEN_BYTES:
            raise ValueError(f"{len(token_ids)} bytes are no whole number of int32 token ids")
        return len(token_ids) // _TOKEN_BYTES
    if token_ids.itemsize != _TOKEN_BYTES:
        raise ValueError(f"token ids must be 4-byte integers, not array({token_ids.typecode!r})")
    return len(token_ids)


def hash_media(model_fingerprint: bytes, processing: bytes, media: bytes) -> bytes:
    """Return the 16-byte identifier of a media file, as the model sees it.

    ``processing`` are the parameters of the conversion to pixels: everything that changes the embeddings except the file and
    the model. The identifier is the same for every tenant: an embedding reveals nothing that the file does not.
    Raises: ValueError for a fingerprint that is empty or longer than 64 bytes.
    """
    _check_fingerprint(model_fingerprint)
    state = hashlib.blake2b(digest_size=BLOCK_HASH_BYTES, key=model_fingerprint, person=_DOMAIN_MEDIA)
    state.update(_with_length(processing))
    state.update(media)
    return state.digest()


def _check_fingerprint(model_fingerprint: bytes) -> None:
    if not 0 < len(model_fingerprint) <= MAX_FINGERPRINT_BYTES:
        raise ValueError(f"model fingerprint must have 1 to {MAX_FINGERPRINT_BYTES} bytes, not {len(model_fingerprint)}")


class BlockHasher:
    """Hashes token sequences of one model.

    Token ids come as ``array('i')`` or as little-endian int32 bytes.
    Raises: ValueError for a fingerprint that is empty or longer than 64 bytes, or a block size below 1.
    """

    def __init__(self, model_fingerprint: bytes, hash_block_size: int = HASH_BLOCK_SIZE) -> None:
        _check_fingerprint(model_fingerprint)
        if hash_block_size < 1:
            raise ValueError(f"hash_block_size must be positive, not {hash_block_size}")
        self.hash_block_size = hash_block_size
        # Copying a keyed state is cheaper than keying a new one for each block.
        self._full = hashlib.blake2b(digest_size=BLOCK_HASH_BYTES, key=model_fingerprint, person=_DOMAIN_FULL)
        self._tail = hashlib.blake2b(digest_size=BLOCK_HASH_BYTES, key=model_fingerprint, person=_DOMAIN_TAIL)
        self._compiled = CompiledChain(model_fingerprint, _DOMAIN_FULL) if compiled_library() is not None else None

    def hash_request_blocks(self, token_ids: TokenIds, extra_keys: Sequence[ExtraKey] = ()) -> list[bytes]:
        """Return the chain of ``token_ids``: one 16-byte value per full hash block; a partial tail gives none."""
        block_hashes: list[bytes] = []
        self.extend(block_hashes, token_ids, extra_keys)
        return block_hashes

    def extend(self, block_hashes: list[bytes], token_ids: TokenIds, extra_keys: Sequence[ExtraKey] = ()) -> None:
        """Append the values of the full blocks of ``token_ids`` that ``block_hashes`` does not cover yet.

        ``token_ids`` is the whole sequence from token 0; the values already there are trusted. ``extra_keys`` are those of the
        request, see ``block_extra_keys``.
        """
        size = self.hash_block_size
        first, end = len(block_hashes), _num_tokens(token_ids) // size
        if first >= end:
            return
        parent = block_hashes[-1] if first else ROOT_HASH
        tokens = _token_bytes(token_ids, first * size, end * size)
        if self._compiled is not None and not extra_keys and end - first >= _MIN_COMPILED_BLOCKS:
            block_hashes += self._compiled.hashes(parent, tokens, size * _TOKEN_BYTES)
            return
        extra, keys = _NO_EXTRA, RequestKeys.of(extra_keys)
        copy, append, step = self._full.copy, block_hashes.append, size * _TOKEN_BYTES
        for index in range(end - first):
            if keys:
                start = (first + index) * size
                extra = _with_length(encode_extra_keys(block_extra_keys(keys, start, start + size)))
            state = copy()
            state.update(parent + extra + tokens[index * step : index * step + step])
            parent = state.digest()
            append(parent)

    def partial_hash(self, parent: bytes | None, tail_token_ids: TokenIds, extra_keys: Sequence[ExtraKey] = ()) -> bytes:
        """Return the identity of a tail shorter than a hash block: H(parent, tail tokens, count).

        ``parent`` is the chain value before the tail, None if there is none; ``extra_keys`` are those of the tail itself.
        Raises: ValueError if the tail is empty or as long as a full block, which the chain itself names.
        """
        num_tokens = _num_tokens(tail_token_ids)
        if not 0 < num_tokens < self.hash_block_size:
            raise ValueError(f"a tail has 1 to {self.hash_block_size - 1} tokens, not {num_tokens}")
        state = self._tail.copy()
        state.update(ROOT_HASH if parent is None else parent)
        state.update(_with_length(encode_extra_keys(extra_keys)))
        state.update(_U32.pack(num_tokens) + _token_bytes(tail_token_ids, 0, num_tokens))
        return state.digest()

    def prefix_hash(
        self,
        block_hashes: Sequence[bytes],
        token_ids: TokenIds,
        num_tokens: int,
        extra_keys: Sequence[ExtraKey] = (),
    ) -> bytes:
        """Return the identity of the first ``num_tokens`` tokens; with a block's end as ``num_tokens``, that block's hash.

        Raises: ValueError if ``num_tokens`` is not within the sequence, or its chain is not in ``block_hashes``.
        """
        num_full, num_tail = divmod(num_tokens, self.hash_block_size)
        if not 0 < num_tokens <= _num_tokens(token_ids) or num_full > len(block_hashes):
            raise ValueError(
                f"no hash of {num_tokens} tokens in {_num_tokens(token_ids)} tokens with {len(block_hashes)} hashes"
            )
        parent = block_hashes[num_full - 1] if num_full else None
        if parent is not None and not num_tail:
            return parent
        tail = _token_bytes(token_ids, num_tokens - num_tail, num_tokens)
        return self.partial_hash(parent, tail, block_extra_keys(extra_keys, num_tokens - num_tail, num_tokens))


def _with_length(extra: bytes) -> bytes:
    return _U32.pack(len(extra)) + extra
