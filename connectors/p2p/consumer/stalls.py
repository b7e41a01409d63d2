"""Peers that answer control messages while no bytes of their reads arrive.

Watches the peers with reads in progress. Twice per ``stall_s`` it asks the transport whether any bytes have come
(``AskProgress``), and sends the peer a question on its control connection. A peer has *stalled* after two looks in a row
without bytes, if it has answered meanwhile: then its data path is dead. A peer that does not answer is frozen or cut off,
which the control connection finds out. Two looks are required so that a pause of this worker is not mistaken for the peer's.

Does no I/O and reads no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from connectors.p2p.actions import PeerProgress
from connectors.p2p.transport.interface import PeerId

_LOOKS = 2


@dataclass(slots=True)
class _Watched:
    look_at: float
    silent_since: float
    num_silent_looks: int = 0


class StallWatch:
    """Watched peers by their ids."""

    def __init__(self, stall_s: float) -> None:
        self.stall_s = stall_s
        self._watched: dict[PeerId, _Watched] = {}
        self._uncounted: set[PeerId] = set()  # those whose transport does not count what arrives

    def watch(self, peers: Iterable[PeerId], now: float) -> None:
        """Watch exactly these peers, which have reads in progress; new ones have ``stall_s`` from now."""
        reading = set(peers) - self._uncounted
        for peer in self._watched.keys() - reading:
            del self._watched[peer]
        for peer in reading - self._watched.keys():
            self._begin(peer, now)

    def begin_again(self, peer: PeerId, now: float) -> None:
        """A read of a peer has ended: the others have ``stall_s`` from now."""
        if peer in self._watched:
            self._begin(peer, now)

    def _begin(self, peer: PeerId, now: float) -> None:
        self._watched[peer] = _Watched(now + self.stall_s / _LOOKS, now)

    def forget(self, peer: PeerId) -> None:
        """Stop watching a closed peer."""
        self._watched.pop(peer, None)
        self._uncounted.discard(peer)

    def due(self, now: float) -> list[PeerId]:
        """Return the peers to ask about; each is due again after the answer."""
        found = [peer for peer, watched in self._watched.items() if watched.look_at <= now]
        for peer in found:
            self._watched[peer].look_at = math.inf
        return found

    def on_progress(self, progress: PeerProgress, heard_at: float, now: float) -> bool:
        """Process the answer to a look; True if the peer has stalled. ``heard_at`` is when the peer last answered anything."""
        watched = self._watched.get(progress.peer)
        if watched is None or watched.look_at < math.inf:
            return False  # a read has ended meanwhile
        if progress.has_advanced is None:
            self._uncounted.add(progress.peer)
            del self._watched[progress.peer]
            return False
        if progress.has_advanced:
            self._begin(progress.peer, now)
            return False
        watched.num_silent_looks += 1
        watched.look_at = now + self.stall_s / _LOOKS
        return watched.num_silent_looks >= _LOOKS and heard_at > watched.silent_since

    def next_timer(self) -> float:
        """Return when the next look is due; infinite if none is."""
        return min((watched.look_at for watched in self._watched.values()), default=math.inf)
