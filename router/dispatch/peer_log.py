"""What the router's log says of peers that misbehave: they can cause it as often as they like, so lines are limited.

Owns the events and what each is limited by. Called by ``router.dispatch.worker_gateway``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from core.clock import Clock
from core.errors import ProtocolError, VersionMismatch
from core.rate_limit import LimitedLog
from router.dispatch.members import WorkerKey

VERSION_LINE_INTERVAL_S = 3600.0  # a worker of another version goes on trying


class PeerLog:
    """At most one line per event and interval; of versions, of steps and of workers one for each."""

    def __init__(self, clock: Clock) -> None:
        self._log = LimitedLog(logging.getLogger("router.dispatch.worker_gateway"), clock.now)
        self._version_log = LimitedLog(logging.getLogger("router.dispatch.worker_gateway"), clock.now, VERSION_LINE_INTERVAL_S)
        self._unpaired: set[WorkerKey] = set()

    def handshake_refused(self) -> None:
        """A connection was refused: a worker with another cluster key never gets further, and tries for ever."""
        self._log.warning("handshake_refused", reason="it has not the cluster key of this router, or is no worker")

    def bad_frame(self, peer: bytes, error: ProtocolError) -> None:
        """A frame could not be understood."""
        if isinstance(error, VersionMismatch):
            key, name = error.theirs, "other_wire_version"
            self._version_log.warning(name, key=key, peer=peer.hex(), ours=error.ours, theirs=error.theirs)
        else:
            self._log.warning("malformed_frame", peer=peer.hex(), message=error.message)

    def bug(self, step: str) -> None:
        """A step of the core has raised what is being handled."""
        self._log.exception("router_bug", key=step, step=step)

    def unreachable(self, peer: bytes, error: BaseException) -> None:
        """A connection takes no message."""
        self._log.warning("unreachable_peer", peer=peer.hex(), error=str(error))

    def unpaired(self, found: Mapping[WorkerKey, str]) -> None:
        """These are the workers that no other fits, and why; those that were among them before are not told again."""
        for key, reason in found.items():
            if key not in self._unpaired:
                self._log.warning("unpaired_worker", key=key.engine_id, engine_id=key.engine_id, reason=reason)
        self._unpaired = set(found)
