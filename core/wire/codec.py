"""Bytes ↔ messages for the three planes: worker → router, router → worker, and KV control.

A frame is one version byte, one kind byte, and msgpack. The kind names the plane, so a frame that lands on the wrong socket
is refused like any other malformed one. Decoding never executes anything and raises only ``ProtocolError``: types and ranges
are those of ``core.wire.limits``, unknown fields are ignored (a newer peer may send more), and a frame above its plane's cap is
not decoded. A frame of another version is a ``VersionMismatch``. Sockets and the reaction to a bad peer belong to the callers.
``version`` is an argument so that two versions can meet in one test.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from core.errors import ProtocolError
from core.wire.kv import ControlMessage
from core.wire.limits import Name
from core.wire.messages import RouterMessage, Tokens, WorkerMessage
from core.wire.version import check_version

WIRE_VERSION = 2  # of all three planes; 0 is no version (core.wire.version)

KIND_WORKER = 1
KIND_TOKENS = 2
KIND_ROUTER = 3
KIND_CONTROL = 4

HEADER_BYTES = 2

# The largest message of each plane: log-probabilities of a whole prompt; a prompt of a million tokens with its images,
# handoff and output so far; a handshake with the agent metadata of a transport.
MAX_WORKER_FRAME_BYTES = 64 << 20
MAX_ROUTER_FRAME_BYTES = 64 << 20
MAX_CONTROL_FRAME_BYTES = 4 << 20

T = TypeVar("T")


class _Named(msgspec.Struct):
    request_id: Name


_encoder = msgspec.msgpack.Encoder()
_worker_decoder: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)
_tokens_decoder: msgspec.msgpack.Decoder[list[Tokens]] = msgspec.msgpack.Decoder(list[Tokens])
_router_decoder: msgspec.msgpack.Decoder[RouterMessage] = msgspec.msgpack.Decoder(RouterMessage)
_name_decoder: msgspec.msgpack.Decoder[_Named] = msgspec.msgpack.Decoder(_Named)
_control_decoder: msgspec.msgpack.Decoder[ControlMessage] = msgspec.msgpack.Decoder(ControlMessage)


def encode_worker_message(message: WorkerMessage, version: int = WIRE_VERSION) -> bytes:
    """Return the frame of one message from a worker to a router.

    Raises:
        ProtocolError: the frame would exceed ``MAX_WORKER_FRAME_BYTES``.
    """
    return _encode(version, KIND_WORKER, message, MAX_WORKER_FRAME_BYTES)


def encode_tokens(tokens: Sequence[Tokens], version: int = WIRE_VERSION) -> bytes:
    """Return the frame of all tokens of one engine step for one router.

    Raises:
        ProtocolError: the frame would exceed ``MAX_WORKER_FRAME_BYTES``.
    """
    return _encode(version, KIND_TOKENS, tokens, MAX_WORKER_FRAME_BYTES)


def encode_router_message(message: RouterMessage, version: int = WIRE_VERSION) -> bytes:
    """Return the frame of one message from a router to a worker.

    Raises:
        ProtocolError: the frame would exceed ``MAX_ROUTER_FRAME_BYTES``.
    """
    return _encode(version, KIND_ROUTER, message, MAX_ROUTER_FRAME_BYTES)


def encode_control_message(message: ControlMessage, version: int = WIRE_VERSION) -> bytes:
    """Return the frame of one message of the KV control plane.

    Raises:
        ProtocolError: the frame would exceed ``MAX_CONTROL_FRAME_BYTES``.
    """
    return _encode(version, KIND_CONTROL, message, MAX_CONTROL_FRAME_BYTES)


def decode_worker_frame(frame: bytes | memoryview, version: int = WIRE_VERSION) -> WorkerMessage | list[Tokens]:
    """Return a worker's message: one message, or the tokens of one engine step.

    Raises:
        ProtocolError: the frame is not a valid one of this plane.
    """
    kind = _check_header(frame, MAX_WORKER_FRAME_BYTES, version)
    if kind == KIND_TOKENS:
        return _decode(_tokens_decoder, frame)
    if kind == KIND_WORKER:
        return _decode(_worker_decoder, frame)
    raise _unexpected_kind(kind, "worker to router")


def decode_router_frame(frame: bytes | memoryview, version: int = WIRE_VERSION) -> RouterMessage:
    """Return a router's message to a worker.

    Raises:
        ProtocolError: the frame is not a valid one of this plane.
    """
    kind = _check_header(frame, MAX_ROUTER_FRAME_BYTES, version)
    if kind != KIND_ROUTER:
        raise _unexpected_kind(kind, "router to worker")
    return _decode(_router_decoder, frame)


def request_of_frame(frame: bytes | memoryview) -> str:
    """Return which request a router's frame is about that is no valid message; empty if it names none."""
    if len(frame) > MAX_ROUTER_FRAME_BYTES:
        return ""
    try:
        return _decode(_name_decoder, frame).request_id
    except ProtocolError:
        return ""


def decode_control_frame(frame: bytes | memoryview, version: int = WIRE_VERSION) -> ControlMessage:
    """Return a message of the KV control plane.

    Raises:
        ProtocolError: the frame is not a valid one of this plane.
    """
    kind = _check_header(frame, MAX_CONTROL_FRAME_BYTES, version)
    if kind != KIND_CONTROL:
        raise _unexpected_kind(kind, "KV control")
    return _decode(_control_decoder, frame)


def _encode(version: int, kind: int, message: object, max_bytes: int) -> bytes:
    frame = bytearray((version, kind))
    _encoder.encode_into(message, frame, HEADER_BYTES)
    if len(frame) > max_bytes:
        name = "tokens take" if isinstance(message, Sequence) else f"{type(message).__name__} takes"
        raise ProtocolError(f"{name} {len(frame)} bytes on the wire, more than the cap of {max_bytes}")
    return bytes(frame)


def _check_header(frame: bytes | memoryview, max_bytes: int, version: int) -> int:
    """Return the kind byte of a frame of acceptable size and version."""
    if len(frame) <= HEADER_BYTES:
        raise ProtocolError(f"frame of {len(frame)} bytes is too short to hold a message")
    if len(frame) > max_bytes:
        raise ProtocolError(f"frame of {len(frame)} bytes exceeds the cap of {max_bytes}")
    check_version(frame, version)
    return frame[1]


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes | memoryview) -> T:
    try:
        return decoder.decode(memoryview(frame)[HEADER_BYTES:])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise ProtocolError(f"malformed frame: {error}") from None


def _unexpected_kind(kind: int, plane: str) -> ProtocolError:
    return ProtocolError(f"frame kind {kind} does not belong on the {plane} plane")
