"""The router's log lines about misbehaving peers. Peers can trigger them without bound, so each event has a rate limit."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from core.clock import Clock
from core.errors import ProtocolError, VersionMismatch
from core.rate_limit import LimitedLog
from router.dispatch.members import WorkerKey

VERSION_LINE_INTERVAL_S = 3600.0  # a worker of another version keeps reconnecting


class PeerLog:
    """At most one line per event and interval; version, step and worker events count per version, step and worker."""

    def __init__(self, clock: Clock) -> None:
        self._log = LimitedLog(logging.getLogger("router.dispatch.worker_gateway"), clock.now)
        self._version_log = LimitedLog(logging.getLogger("router.dispatch.worker_gateway"), clock.now, VERSION_LINE_INTERVAL_S)
        self._unpaired: set[WorkerKey] = set()

    def handshake_refused(self) -> None:
        """Log a failed handshake: a worker with another cluster key never connects, and retries forever."""
        self._log.warning("handshake_refused", reason="it has not the cluster key of this router, or is no worker")

    def bad_frame(self, peer: bytes, error: ProtocolError) -> None:
        """Log a frame that could not be decoded."""
        if isinstance(error, VersionMismatch):
            key, name = error.theirs, "other_wire_version"
            self._version_log.warning(name, key=key, peer=peer.hex(), ours=error.ours, theirs=error.theirs)
        else:
            self._log.warning("malformed_frame", peer=peer.hex(), message=error.message)

    def bug(self, step: str) -> None:
        """Log the exception being handled, raised by a step of the router core."""
        self._log.exception("router_bug", key=step, step=step)

    def unreachable(self, peer: bytes, error: BaseException) -> None:
        """Log a connection that accepts no messages."""
        self._log.warning("unreachable_peer", peer=peer.hex(), error=str(error))

    def unpaired(self, found: Mapping[WorkerKey, str]) -> None:
        """Log each worker in ``found`` that fits no partner, with the reason, unless it was in the previous call as well."""
        for key, reason in found.items():
            if key not in self._unpaired:
                self._log.warning("unpaired_worker", key=key.engine_id, engine_id=key.engine_id, reason=reason)
        self._unpaired = set(found)
