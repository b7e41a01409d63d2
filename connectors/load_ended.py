"""How a load ends: the report of connectors p2p, tier and LMCache to the engine."""

from __future__ import annotations

from dataclasses import dataclass

from core.wire.messages import ErrorInfo, TransferUsage


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """The load of a request is over; said once, and at once whatever ended it.

    Without an error every block is verified. With one, those in ``invalid_block_ids`` must not be used and the others are
    verified; if it names none, nothing may be used. ``usage`` is None if the request was aborted: nobody wants to know then.
    Nothing is written for the load any more, except into ``quarantined_block_ids``, which the connector reports again.
    ``peer`` is the address of the worker whose blocks were wanted, for the log; empty if they were of no peer.
    """

    request_id: str
    usage: TransferUsage | None
    error: ErrorInfo | None = None
    invalid_block_ids: tuple[int, ...] = ()
    quarantined_block_ids: tuple[int, ...] = ()
    peer: str = ""
