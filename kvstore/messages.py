"""Messages between a store and its clients, and their frames.

Owns the messages and their encoding: one frame of version byte, kind byte and msgpack as in ``core.wire.codec``, then one
frame for each block, where a message brings blocks. Fields are checked while they are decoded; a malformed or oversized message
is a ``ProtocolError`` and nothing else, one of another version a ``VersionMismatch``. Keys and seals travel packed, one after
another. The state machines (``kvstore.server_state``, ``kvstore.client_state``) see messages only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Generic, TypeVar

import msgspec

from core.errors import ProtocolError
from core.kv.seals import SEAL_BYTES
from core.wire.limits import Count, Name, Positive, Text, Unsigned64
from core.wire.version import check_version
from kvstore.key import PACKED_KEY_BYTES

WIRE_VERSION: Final = 1  # counted separately from that of core.wire.codec
KIND_TO_STORE: Final = 16  # beyond the kinds of core.wire.codec
KIND_TO_CLIENT: Final = 17
HEADER_BYTES: Final = 2

MAX_KEYS: Final = 8192  # of one message: a prompt of half a million tokens in blocks of 64
MAX_CONTROL_BYTES: Final = 2 << 20
MAX_BLOCK_BYTES: Final = 256 << 20  # one block, and so the largest frame
MAX_BLOCKS_BYTES: Final = 64 << 20  # the blocks of one message together, if they are more than one

PackedKeys = Annotated[bytes, msgspec.Meta(max_length=MAX_KEYS * PACKED_KEY_BYTES)]
PackedSeals = Annotated[bytes, msgspec.Meta(max_length=MAX_KEYS * SEAL_BYTES)]
Flags = Annotated[bytes, msgspec.Meta(max_length=MAX_KEYS)]  # one byte each, 0 or 1
Slots = Annotated[tuple[tuple[int, int, int], ...], msgspec.Meta(max_length=MAX_KEYS)]
SystemNumber = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]

NO_SLOT: Final = (-1, 0, 0)


class ArenaFile(msgspec.Struct, frozen=True, kw_only=True):
    """The memory file of an arena, as a process of the same host can open it: ``/proc/<pid>/fd/<fd>``."""

    pid: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    fd: SystemNumber
    inode: Count
    num_bytes: Positive


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello", omit_defaults=True):
    """Client → store: open a session. Ends an earlier session of this connection."""

    client_id: Name
    session: Unsigned64  # random; comes back with the answer
    block_bytes: Positive


class Attach(msgspec.Struct, frozen=True, kw_only=True, tag="attach", omit_defaults=True):
    """Client → store: I have mapped the arena; the nonce proves it, as it is written nowhere else.

    ``pid`` and ``start_ticks`` (field 22 of ``/proc/<pid>/stat``) name this process, whose death ends its reservations.
    """

    nonce: Nonce
    pid: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    start_ticks: Count


class Lookup(msgspec.Struct, frozen=True, kw_only=True, tag="lookup", omit_defaults=True):
    """Client → store: report which of these blocks exist."""

    number: Count
    keys: PackedKeys


class Get(msgspec.Struct, frozen=True, kw_only=True, tag="get", omit_defaults=True):
    """Client → store: load these blocks into memory and pin them until ``ReleaseBlocks``."""

    number: Count
    keys: PackedKeys


class ReleaseBlocks(msgspec.Struct, frozen=True, kw_only=True, tag="release", omit_defaults=True):
    """Client → store: the gets, puts and reservations of these numbers are over; unknown ones are ignored."""

    numbers: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_KEYS)]


class Reserve(msgspec.Struct, frozen=True, kw_only=True, tag="reserve", omit_defaults=True):
    """Client with the arena → store: reserve slots for these blocks, of these sizes."""

    number: Count
    keys: PackedKeys
    sizes: Annotated[tuple[Positive, ...], msgspec.Meta(max_length=MAX_KEYS)]


class Commit(msgspec.Struct, frozen=True, kw_only=True, tag="commit", omit_defaults=True):
    """Client with the arena → store: the slots reserved by this number are written. One seal per key of the reservation."""

    number: Count
    seals: PackedSeals


class Put(msgspec.Struct, frozen=True, kw_only=True, tag="put", omit_defaults=True):
    """Client without the arena → store: blocks, one frame each."""

    number: Count
    keys: PackedKeys
    seals: PackedSeals


class Corrupt(msgspec.Struct, frozen=True, kw_only=True, tag="corrupt", omit_defaults=True):
    """Client → store: these blocks failed verification; ``code`` is that of the error."""

    keys: PackedKeys
    code: Name


class StoreHeartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="hb", omit_defaults=True):
    """Client → store: of all numbers up to ``last`` only these are open or pinned.

    The store ends all others, so that a lost message leaves nothing open.
    """

    last: Count
    held: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_KEYS)] = ()


class StoreGoodbye(msgspec.Struct, frozen=True, kw_only=True, tag="bye", omit_defaults=True):
    """Client → store: end the session; the client no longer reads or writes."""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome", omit_defaults=True):
    """Store → client: the answer to ``Hello``. ``arena`` is for clients that can open it."""

    session: Unsigned64
    incarnation: Unsigned64
    slot_bytes: Positive
    arena: ArenaFile | None = None


class Attached(msgspec.Struct, frozen=True, kw_only=True, tag="attached", omit_defaults=True):
    """Store → client: the nonce is right, and the process is watched; slots instead of frames from now on."""


class AttachRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused", omit_defaults=True):
    """Store → client: a message could not be processed; ``number`` is that of its call, if it had one."""

    code: Name
    message: Text
    number: Count = 0


class UnknownClient(msgspec.Struct, frozen=True, kw_only=True, tag="unknown", omit_defaults=True):
    """Store → client: the session is unknown, say hello. A restarted store sends this to every client."""

    incarnation: Unsigned64


class LookupReply(msgspec.Struct, frozen=True, kw_only=True, tag="looked_up", omit_defaults=True):
    """Store → client: 1 for each key that the store has."""

    number: Count
    hits: Flags


class GetReply(msgspec.Struct, frozen=True, kw_only=True, tag="got", omit_defaults=True):
    """Store → client: the blocks that the store has, pinned.

    ``present`` has a byte for each key, ``seals`` a row for each present one. With the arena, ``slots`` holds their (slot,
    generation, num_bytes); without it, the blocks follow as frames. ``withheld`` has a byte for each key, 1 for a block that
    the store has but cannot pin now; it is empty if there is none. An answer may come in several messages; ``first`` is the
    index of the first key of this one.
    """

    number: Count
    present: Flags
    seals: PackedSeals
    slots: Slots = ()
    first: Count = 0
    is_last: bool = True
    withheld: Flags = b""


class Reserved(msgspec.Struct, frozen=True, kw_only=True, tag="reserved", omit_defaults=True):
    """Store → client: (slot, generation, 1) to write, for each key; ``NO_SLOT`` = do not write.

    ``stored`` has 1 where the store has the block already.
    """

    number: Count
    slots: Slots
    stored: Flags


class PutReply(msgspec.Struct, frozen=True, kw_only=True, tag="stored", omit_defaults=True):
    """Store → client: 1 for each key that the store has now."""

    number: Count
    stored: Flags


class Alive(msgspec.Struct, frozen=True, kw_only=True, tag="alive", omit_defaults=True):
    """Store → client: the answer to ``StoreHeartbeat``."""

    incarnation: Unsigned64


ToStore = Hello | Attach | Lookup | Get | ReleaseBlocks | Reserve | Commit | Put | Corrupt | StoreHeartbeat | StoreGoodbye
ToClient = Welcome | Attached | AttachRefused | UnknownClient | LookupReply | GetReply | Reserved | PutReply | Alive


M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Parcel(Generic[M]):
    """A message and its blocks."""

    message: M
    blocks: Sequence[memoryview | bytes] = ()


T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_to_store: msgspec.msgpack.Decoder[ToStore] = msgspec.msgpack.Decoder(ToStore)
_to_client: msgspec.msgpack.Decoder[ToClient] = msgspec.msgpack.Decoder(ToClient)


def encode_to_store(message: ToStore, version: int = WIRE_VERSION) -> bytes:
    """Return the first frame of a client's message."""
    return _encode(version, KIND_TO_STORE, message)


def encode_to_client(message: ToClient, version: int = WIRE_VERSION) -> bytes:
    """Return the first frame of a store's message."""
    return _encode(version, KIND_TO_CLIENT, message)


def decode_to_store(frame: bytes | memoryview, version: int = WIRE_VERSION) -> ToStore:
    """Return a client's message.

    Raises:
        ProtocolError: the frame is not such a message.
    """
    return _decode(_to_store, KIND_TO_STORE, frame, version)


def decode_to_client(frame: bytes | memoryview, version: int = WIRE_VERSION) -> ToClient:
    """Return a store's message.

    Raises:
        ProtocolError: the frame is not such a message.
    """
    return _decode(_to_client, KIND_TO_CLIENT, frame, version)


def split_seals(packed: bytes) -> list[bytes]:
    """Split packed seals into single rows.

    Raises:
        ProtocolError: the length is not a multiple of a row's.
    """
    if len(packed) % SEAL_BYTES:
        raise ProtocolError(f"{len(packed)} bytes are no whole number of seals")
    return [packed[start : start + SEAL_BYTES] for start in range(0, len(packed), SEAL_BYTES)]


def _encode(version: int, kind: int, message: object) -> bytes:
    frame = bytearray((version, kind))
    _encoder.encode_into(message, frame, HEADER_BYTES)
    if len(frame) > MAX_CONTROL_BYTES:
        raise ProtocolError(f"{type(message).__name__} takes {len(frame)} bytes on the wire, more than {MAX_CONTROL_BYTES}")
    return bytes(frame)


def _decode(decoder: msgspec.msgpack.Decoder[T], kind: int, frame: bytes | memoryview, version: int) -> T:
    if not HEADER_BYTES < len(frame) <= MAX_CONTROL_BYTES:
        raise ProtocolError(f"a message of {len(frame)} bytes; allowed are {HEADER_BYTES + 1} to {MAX_CONTROL_BYTES}")
    check_version(frame, version)
    if frame[1] != kind:
        raise ProtocolError(f"frame kind {frame[1]} instead of {kind}")
    try:
        return decoder.decode(memoryview(frame)[HEADER_BYTES:])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise ProtocolError(f"malformed frame: {error}") from None
