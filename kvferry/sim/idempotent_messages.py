"""The messages that may arrive twice, because a repetition changes nothing, and those that may be lost.

ZeroMQ repeats no frame; peers repeat messages without an answer, and a message of one connection may be followed by its
repetition on the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from core.wire.codec import (
    KIND_CONTROL,
    KIND_ROUTER,
    KIND_TOKENS,
    KIND_WORKER,
    decode_control_frame,
    decode_router_frame,
    decode_worker_frame,
)
from core.wire.early import MeetProducer, PrefillProgress, PullEarly
from core.wire.kv import Handshake, LeaseRelease
from core.wire.messages import Abort, Goodbye, Heartbeat, Refused, Register, Registered, Release, Renew

_DECODERS: Mapping[int, Callable[[bytes], object]] = {
    KIND_WORKER: decode_worker_frame,
    KIND_ROUTER: decode_router_frame,
    KIND_CONTROL: decode_control_frame,
}
_REPEATABLE = (
    Abort,
    Goodbye,
    Handshake,
    Heartbeat,
    LeaseRelease,
    MeetProducer,
    PrefillProgress,
    PullEarly,
    Refused,
    Register,
    Registered,
    Release,
    Renew,
)


def may_repeat(frame: bytes) -> bool:
    """True if a second copy right after the frame must change nothing."""
    kind = frame[1]
    if kind == KIND_TOKENS:
        return True  # each has its position
    return kind in _DECODERS and isinstance(_DECODERS[kind](frame), _REPEATABLE)


def may_drop(frame: bytes) -> bool:
    """True if its receiver has to cope without it: an answer of a producer of KV, or what only saves time."""
    kind = frame[1]
    return kind == KIND_CONTROL or (kind == KIND_ROUTER and isinstance(decode_router_frame(frame), MeetProducer | PullEarly))
