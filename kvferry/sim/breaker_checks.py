"""An independent account of one agent's circuit breakers: which transports must not be used.

A transport by which no byte arrived during the whole deadline of a load is not used for that incarnation of a peer until a
probe has succeeded, or the control connection has ended. A transport whose probe has succeeded may be used. The agent's driver
reports the agent's actions and events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from connectors.p2p.actions import (
    Action,
    CloseControl,
    EndProbe,
    OpenPeer,
    PostRead,
    PostSealRead,
    ReadEnded,
    StartProbe,
    TransferEvent,
)
from connectors.p2p.consumer.load import Load, LoadPhase
from connectors.p2p.transport.interface import PeerId
from connectors.reports import LoadEnded
from core.errors import TransferTimeout


@dataclass(slots=True)
class _Reading:
    """A load with reads, and the transport of the last ones."""

    load: Load
    transport: str


class BreakerChecks:
    """The reader's side of one agent. ``complain`` receives violations."""

    def __init__(self, name: str, patience_s: float, now: Callable[[], float], complain: Callable[[str], None]) -> None:
        self._name = name
        self._patience_s = patience_s
        self._now = now
        self._complain = complain
        self._opened: dict[PeerId, str] = {}  # by which transport each peer was last opened
        self._loads: dict[str, _Reading] = {}
        self._reads: dict[int, PeerId] = {}
        self._ended_at: dict[PeerId, float] = {}  # the last successful read
        self._silent: set[tuple[PeerId, str]] = set()
        self._probes: dict[int, OpenPeer] = {}

    def on_action(self, action: Action) -> None:
        """Process an action of the agent."""
        match action:
            case OpenPeer(peer=peer, transport=transport):
                self._opened[peer] = transport
                if (peer, transport) in self._silent:
                    self._complain(f"{self._name}: {peer.address} is opened by {transport} again, by which nothing came")
            case PostRead(read_id=read_id, peer=peer) | PostSealRead(read_id=read_id, peer=peer):
                self._reads[read_id] = peer
            case StartProbe(probe_id=probe_id, how_to_open=how_to_open):
                self._probes[probe_id] = how_to_open
            case EndProbe(probe_id=probe_id):
                self._probes.pop(probe_id, None)
            case CloseControl(address=address):
                self.forget_at(address)
            case LoadEnded():
                self._on_load_ended(action)
            case _:
                pass

    def on_read(self, load: Load) -> None:
        """A read of blocks is ordered for a load."""
        self._loads[load.request.request_id] = _Reading(load, self._opened[load.producer])

    def on_transfer(self, event: TransferEvent) -> None:
        """Process an event of the transfers."""
        if isinstance(event, ReadEnded):
            peer = self._reads.pop(event.read_id, None)
            if peer is not None and event.error is None and not event.has_no_room:
                self._ended_at[peer] = self._now()

    def take_probe(self, probe_id: int) -> OpenPeer | None:
        """Process a successful probe; return the transport that may be used again, None if the probe is unknown."""
        restored = self._probes.pop(probe_id, None)
        if restored is not None:
            self._silent.discard((restored.peer, restored.transport))
        return restored

    def check_restored(self, restored: OpenPeer, broken: object) -> None:
        """Check that the transport is used again. ``broken``: why the agent does not use it; None if it does."""
        if broken is not None:
            self._complain(f"{self._name}: {restored.transport} to {restored.peer.address} was probed well, and is not used")

    def forget_at(self, address: str, but_for: int | None = None) -> None:
        """Forget the incarnations at an address, except one."""
        self._silent = {each for each in self._silent if each[0].address != address or each[0].incarnation == but_for}

    def _on_load_ended(self, ended: LoadEnded) -> None:
        reading = self._loads.pop(ended.request_id, None)
        if (
            reading is None
            or ended.error is None
            or ended.error.code != TransferTimeout.code
            or not ended.quarantined_block_ids
        ):
            return
        load = reading.load
        has_waited = load.phase is not LoadPhase.CONNECTING and self._now() >= load.asked_since + self._patience_s
        is_silent = self._ended_at.get(load.producer, load.asked_since) <= load.asked_since
        if has_waited and is_silent and self._opened.get(load.producer) == reading.transport:
            self._silent.add((load.producer, reading.transport))
