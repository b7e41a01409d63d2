"""The wire protocol of the LMCache multi-process server, as far as this client needs it.

    request   msgpack(uid) | msgpack(operation) | msgpack(argument) ...        DEALER → ROUTER, one frame each
    reply     msgpack(uid) | msgpack(operation) | [msgpack(result)]            no third frame = None

There is no version in the frames, no handshake and no error reply: a request that the server fails to handle is never
answered. So a client asks the server's admin port for its version first and speaks to those that it was tested with
(``TESTED_VERSIONS``), and every request has a deadline. Owns operations, keys and descriptors; knows neither sockets nor
requests.
Facts from LMCache 0.5.6: ``v1/multiprocess/transport``, ``custom_types``, ``group_view``, ``platform/base/ipc_wire``.
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
MAX_MESSAGE_BYTES = 1 << 20  # of the server's replies, which are small

_EVENT = b"stub_ipc_handle"  # stands for a device event; a server that copies host memory does not look at it
_TENSOR_EXTENSION = 1
_DTYPE = "float32"  # words of 4 bytes, copied as they are
WORD_BYTES = 4
_SALT_DOMAIN = b"lmcache salt v1\0"
_MEDIA_DOMAIN = b"kvferry lmcache media v1"

_encode = msgspec.msgpack.Encoder().encode


class Operation(IntEnum):
    """Numbers of operations, frozen in the server's source."""

    REGISTER_KV_CACHE = 1
    UNREGISTER_KV_CACHE = 2
    STORE = 6
    RETRIEVE = 7
    LOOKUP = 8
    QUERY_PREFETCH_STATUS = 9
    FREE_LOOKUP_LOCKS = 12
    END_SESSION = 13
    CLEAR = 20
    PING = 22


class CacheKey(msgspec.Struct, frozen=True, kw_only=True):
    """What a request is about: tokens [start, end) of a sequence, in one session of the server.

    ``request_id`` names the session. The server keeps the hashes of a session's tokens and never compares them with the tokens
    again, so two sequences must never share one. ``worker_id`` None asks for all ranks (lookups).
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
    """One KV cache group: which of the registered tensors it is. ``sw_size_tokens`` -1 = full attention."""

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
    """Pages of equal size in a named segment of shared memory; ``page_bytes`` a multiple of ``block_size`` words."""

    shm_name: str
    num_pages: int
    page_bytes: int
    block_size: int  # tokens


@dataclass(frozen=True, slots=True)
class Namespace:
    """Under which name one model's blocks are kept. Everything that makes bytes incompatible must be in it."""

    model_name: str

    @classmethod
    def of(cls, model_fingerprint: bytes, layout: KVLayoutInfo, page_version: int) -> Namespace:
        """Return the namespace of a model, its weights, the layout of its blocks and the format of a page.

        The server's own keys know neither dtype nor layout nor weights.
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
    """Return what stands for a tenant's salt, and for a request's media, in the server's keys; empty for neither.

    The server knows token ids only, and images of one size have the same ones: with ``media_keys``, a request's extra keys for
    its media, what was computed over other media has other keys. 32 hexadecimal digits: keys end up in file names.
    """
    if media_keys:
        content = _MEDIA_DOMAIN + encode_extra_keys((("cache_salt", cache_salt), *media_keys))
    elif cache_salt:
        content = _SALT_DOMAIN + cache_salt.encode()
    else:
        return ""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def encode_call(uid: int, operation: Operation, *arguments: object) -> list[bytes]:
    """Return the frames of a request."""
    return [_encode(uid), _encode(int(operation)), *map(_encode, arguments)]


def decode_reply(frames: Sequence[bytes]) -> tuple[int, object]:
    """Return the number of the request and its result, None for a reply without one.

    Raises:
        ProtocolError: this is no reply.
    """
    try:
        uid = msgspec.msgpack.decode(frames[0], type=int)
        result = msgspec.msgpack.decode(frames[2]) if len(frames) > 2 else None
    except (msgspec.DecodeError, IndexError) as error:
        raise ProtocolError(f"the LMCache server sent something that is no reply: {error}") from None
    return uid, result


def register_call(
    uid: int, instance_id: int, namespace: Namespace, pages: SharedPages, groups: Sequence[GroupInfo]
) -> list[bytes]:
    """Return the request that makes pages known, once per group.

    To the server every group is one layer of 3-dimensional pages ``[num_pages, block_size, words]``, its form of a layer
    without heads: a page is copied as one contiguous run, whatever is in it.
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
    arguments = (instance_id, tensors, namespace.model_name, 1, "vllm", {"kv_layout": "NHD"}, groups)
    return encode_call(uid, Operation.REGISTER_KV_CACHE, *arguments)


def store_call(uid: int, key: CacheKey, instance_id: int, pages: Sequence[Sequence[int]]) -> list[bytes]:
    """Return the request to keep these pages, one list per group."""
    return encode_call(uid, Operation.STORE, key, instance_id, pages, _EVENT)


def retrieve_call(
    uid: int, key: CacheKey, instance_id: int, pages: Sequence[Sequence[int]], num_skipped_tokens: int
) -> list[bytes]:
    """Return the request to fill these pages, one list per group, those of the first skipped tokens left out."""
    return encode_call(uid, Operation.RETRIEVE, key, instance_id, pages, _EVENT, num_skipped_tokens)


def is_done(result: object) -> bool:
    """Say whether the result of a store or a retrieve is a good one: ``[event, True]``."""
    return isinstance(result, list) and len(result) == 2 and result[1] is True
