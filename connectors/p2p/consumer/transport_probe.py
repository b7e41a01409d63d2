"""Probes: one read of 64 bytes of a peer, to find out whether a transport works again.

Owned by the transfer thread (``connectors.p2p.transfer.thread``). A probe opens the peer on the transport, reads its first
seal into a row that belongs to no block, and fences the peer again in any case. The bytes are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from connectors.p2p.actions import EndProbe, OpenPeer, ProbeEnded, StartProbe
from connectors.p2p.transport.interface import SEAL_REGION, ReadResult, Transport
from core.errors import KVFerryError, ProtocolError

_ANY_ROW = 0  # every table of seals has it


@dataclass(frozen=True, slots=True)
class _Probe:
    probe_id: int
    how_to_open: OpenPeer
    handle: int


class Probes:
    """Probes in progress. ``landing_row`` is the row of the seals' region that they write."""

    def __init__(self, transports: Mapping[str, Transport], landing_row: int) -> None:
        self._transports = transports
        self._landing_row = landing_row
        self._probes: dict[tuple[str, int], _Probe] = {}  # by transport and handle
        self._given_up: set[tuple[str, int]] = set()  # abandoned and not terminal

    def start(self, command: StartProbe) -> ProbeEnded | None:
        """Begin a probe; returns its end if it failed at once."""
        how = command.how_to_open
        transport = self._transports[how.transport]
        try:
            transport.add_peer(how.peer, how.metadata)
            handle = transport.post_read(how.peer, SEAL_REGION, [_ANY_ROW], [self._landing_row])
        except Exception as error:  # a peer's bytes may make a transport fail: the peer's failure, not the worker's
            transport.remove_peer(how.peer)
            known = error if isinstance(error, KVFerryError) else ProtocolError(f"{type(error).__name__}: {error}")
            return ProbeEnded(command.probe_id, known)
        self._probes[transport.name, handle] = _Probe(command.probe_id, how, handle)
        return None

    def end(self, command: EndProbe) -> None:
        """Abandon a probe; ignored if it is over."""
        for key, probe in list(self._probes.items()):
            if probe.probe_id == command.probe_id:
                del self._probes[key]
                self._given_up.add(key)
                self._transports[probe.how_to_open.transport].remove_peer(probe.how_to_open.peer)

    def is_one(self, transport: str, handle: int) -> bool:
        """True if this is the read of a probe."""
        return (transport, handle) in self._probes or (transport, handle) in self._given_up

    def take(self, transport: str, result: ReadResult) -> ProbeEnded | None:
        """Process the end of a probe's read; return its report, None if the probe was abandoned."""
        self._given_up.discard((transport, result.handle))
        probe = self._probes.pop((transport, result.handle), None)
        if probe is None:
            return None
        self._transports[transport].remove_peer(probe.how_to_open.peer)
        return ProbeEnded(probe.probe_id, result.error)
