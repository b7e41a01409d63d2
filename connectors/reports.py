"""How loads and saves of a request end: what the threads of a connector report to its worker side."""

from __future__ import annotations

from dataclasses import dataclass

from core.wire.messages import ErrorInfo, TransferUsage


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """The load of a request has ended. Reported once per load, as soon as it ends or fails.

    Without an error every block is verified. With an error the blocks in ``invalid_block_ids`` must not be used and the others
    are verified; if it is empty, no block of the load may be used. ``usage`` is None if the request was aborted. A late read
    can still write ``quarantined_block_ids``, and no other block, until the connector reports the end of their quarantine.
    ``peer`` is the address of the worker that held the blocks, for the log; empty if no peer held them.
    """

    request_id: str
    usage: TransferUsage | None
    error: ErrorInfo | None = None
    invalid_block_ids: tuple[int, ...] = ()
    quarantined_block_ids: tuple[int, ...] = ()
    peer: str = ""


@dataclass(frozen=True, slots=True)
class SendingEnded:
    """No reader needs the blocks of a finished request any more; they are free."""

    request_id: str
