"""The options of a store's client, and the actions of its state machines, which its driver carries out in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore import messages
from kvstore.messages import Parcel, ToStore


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """``client_id`` is never used by another client. ``process`` is (pid, start_ticks), None = never map the arena."""

    client_id: str
    block_bytes: int
    request_timeout_s: float = 2.0
    heartbeat_interval_s: float = 0.5
    process: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class SendToStore:
    """Send this; if it cannot be sent at once, call ``ClientState.on_link_lost``."""

    parcel: Parcel[ToStore]


@dataclass(frozen=True, slots=True)
class MapArena:
    """Map this file, then call ``ClientState.on_mapped`` with the view or None."""

    file: messages.ArenaFile
    incarnation: int


@dataclass(frozen=True, slots=True)
class CopyIn:
    """Copy each source to its target, then call ``ClientCalls.on_copied(number)``.

    Nothing else may happen to the session meanwhile.
    """

    number: int
    copies: Sequence[tuple[memoryview, memoryview]]


ClientAction = SendToStore | MapArena | CopyIn
