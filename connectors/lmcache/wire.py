"""The part of the LMCache multi-process server's wire protocol that this client uses.

    request   msgpack(uid) | msgpack(operation) | msgpack(argument) ...        DEALER → ROUTER, one frame each
    reply     msgpack(uid) | msgpack(operation) | [msgpack(result)]            no third frame = None

The frames carry no version, and there is no handshake and no error reply: a request that the server fails to handle is never
answered. So the client reads the server's version from its admin port first, uses only ``TESTED_VERSIONS``, and gives every
request a deadline. Owns operations, keys and descriptors.
Sources in LMCache 0.5.6: ``v1/multiprocess/transport``, ``custom_types``, ``group_view``, ``platform/base/ipc_wire``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import msgspec

from core.errors import ProtocolError
from core.kv.hashing import ExtraKey, encode_extra_keys
from core.kv.seals import layout_fingerprint
from core.wire.kv import KVLayoutInfo

TESTED_VERSIONS = ("0.5.6",)
MAX_MESSAGE_BYTES = 1 << 20  # limit for replies, which are small

EVENT = b"stub_ipc_handle"  # in place of a device event, which the server ignores for host memory
_TENSOR_EXTENSION = 1
_DTYPE = "float32"  # words of 4 bytes; the server copies them unchanged
WORD_BYTES = 4
_SALT_DOMAIN = b"lmcache salt v1\0"
_MEDIA_DOMAIN = b"kvferry lmcache media v1"

_encode = msgspec.msgpack.Encoder().encode


class RequestType(IntEnum):
    """The numbers of the server's request types, declared frozen in its source."""

    REGISTER_KV_CACHE = 1
    UNREGISTER_KV_CACHE = 2
    STORE = 6
    RETRIEVE = 7
    LOOKUP = 8
    QUERY_PREFETCH_STATUS = 9
    FREE_LOOKUP_LOCKS = 12
    END_SESSION = 13
    PING = 22


class CacheKey(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens [start, end) of a sequence in one session of the server.

    ``request_id`` names the session. The server hashes a session's tokens once and does not compare later tokens with them, so
    every sequence needs a session of its own. ``worker_id`` None means all ranks (lookups).
    """

    model_name: str
    world_size: int = 1
    worker_id: int | None
    token_ids: Sequence[int]
    start: int
    end: int
    request_id: str
    cache_salt: str = ""
    request_configs: dict[str, str] | None = None
    num_kv_readers: int = 1


class GroupInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One KV cache group and the indices of its registered tensors. ``sw_size_tokens`` -1 = full attention."""

    engine_group_id: int
    layer_indices: tuple[int, ...]
    tokens_per_block: int
    sw_size_tokens: int = -1


class _TensorMetadata(msgspec.Struct, frozen=True, kw_only=True):
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int = 0
    device_uuid: str = "cpu"


class _SharedTensor(msgspec.Struct, frozen=True, kw_only=True, tag="cpu_shm"):
    version: int = 1
    metadata: _TensorMetadata
    shm_name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class SharedPages:
    """Pages of equal size in a named segment of shared memory. ``page_bytes`` is a multiple of ``block_size`` words."""

    shm_name: str
    num_pages: int
    page_bytes: int
    block_size: int  # tokens


@dataclass(frozen=True, slots=True)
class Namespace:
    """The name under which the server stores one model's blocks. Everything that makes bytes incompatible is part of it."""

    model_name: str

    @classmethod
    def of(cls, model_fingerprint: bytes, layout: KVLayoutInfo, page_version: int) -> Namespace:
        """Return the namespace of a model, its weights, its block layout and the page format.

        The server's own keys contain neither dtype nor layout nor weights.
        """
        model = hashlib.blake2b(model_fingerprint, digest_size=16).hexdigest()
        return cls(f"kvferry-{page_version}-{model}-{layout_fingerprint(layout):016x}")

    def key(self, session: TokenSpan, start: int, end: int, worker_id: int | None = 0) -> CacheKey:
        """Return the key of tokens [start, end) of a session."""
        return CacheKey(
            model_name=self.model_name,
            worker_id=worker_id,
            token_ids=session.token_ids,
            start=start,
            end=end,
            request_id=session.session_id,
            cache_salt=session.salt,
        )


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """A sequence of tokens in a session of the server. ``salt`` is ``wire_salt`` of its request."""

    session_id: str
    token_ids: Sequence[int]
    salt: str = ""


def wire_salt(cache_salt: str, media_keys: Sequence[ExtraKey] = ()) -> str:
    """Return the digest of a tenant's salt and a request's media for the server's keys; empty without either.

    The server compares token ids only, and images of one size have the same token ids. ``media_keys``, the request's extra keys
    for its media, keep them apart. 32 hexadecimal digits, since keys become file names.
    """
    if media_keys:
        content = _MEDIA_DOMAIN + encode_extra_keys((("cache_salt", cache_salt), *media_keys))
    elif cache_salt:
        content = _SALT_DOMAIN + cache_salt.encode()
    else:
        return ""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def encode_call(uid: int, operation: RequestType, *arguments: object) -> list[bytes]:
    """Return the frames of a request."""
    return [_encode(uid), _encode(int(operation)), *map(_encode, arguments)]


def decode_reply(frames: Sequence[bytes]) -> tuple[int, object]:
    """Return the number of the request and its result; None for a reply without a result.

    Raises:
        ProtocolError: the frames are not a reply.
    """
    try:
        uid = msgspec.msgpack.decode(frames[0], type=int)
        result = msgspec.msgpack.decode(frames[2]) if len(frames) > 2 else None
    except (msgspec.DecodeError, IndexError) as error:
        raise ProtocolError(f"the LMCache server sent something that is no reply: {error}") from None
    return uid, result


def registration(instance_id: int, namespace: Namespace, pages: SharedPages, groups: Sequence[GroupInfo]) -> tuple[object, ...]:
    """Return the arguments of the request that registers the pages, once per group.

    Every group is registered as one layer of shape ``[num_pages, block_size, words]``, the server's form of a layer without
    heads: it copies a page as one contiguous run of bytes.
    """
    words = pages.page_bytes // pages.block_size // WORD_BYTES
    assert words * pages.block_size * WORD_BYTES == pages.page_bytes, "pages are whole rows of words"
    shape = (pages.num_pages, pages.block_size, words)
    tensor = _SharedTensor(
        metadata=_TensorMetadata(dtype=_DTYPE, shape=shape, stride=(pages.block_size * words, words, 1)),
        shm_name=f"/{pages.shm_name}",
        nbytes=pages.num_pages * pages.page_bytes,
    )
    tensors = [msgspec.msgpack.Ext(_TENSOR_EXTENSION, _encode(tensor)) for _ in groups]
    return instance_id, tensors, namespace.model_name, 1, "vllm", {"kv_layout": "NHD"}, groups


def is_done(result: object) -> bool:
    """Return whether a store or retrieve succeeded: ``[event, True]``."""
    return isinstance(result, list) and len(result) == 2 and result[1] is True
