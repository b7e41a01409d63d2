"""How loads and saves of a request end: what the threads of a connector report to its worker side."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from core.wire.messages import ErrorInfo, TransferUsage


class AllBlocks(enum.Enum):
    """The type of ``ALL_BLOCKS``."""

    ALL_BLOCKS = "all blocks"


ALL_BLOCKS: Final = AllBlocks.ALL_BLOCKS
"""In place of block ids: every block of the load is invalid."""


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """The load of a request has ended. Reported once per load, as soon as it ends or fails.

    Without an error every block is verified. With an error the blocks in ``invalid_block_ids`` must not be used, and all others
    are verified. ``usage`` is None if the request was aborted. A late read can still write ``quarantined_block_ids``, and no
    other block, until the connector reports the end of their quarantine. ``peer`` is the address of the worker that held the
    blocks, for the log; empty if no peer held them. Raises ValueError for an error without invalid blocks, or the reverse.
    """

    request_id: str
    usage: TransferUsage | None
    error: ErrorInfo | None = None
    invalid_block_ids: tuple[int, ...] | AllBlocks = ()
    quarantined_block_ids: tuple[int, ...] = ()
    peer: str = ""

    def __post_init__(self) -> None:
        if (self.error is None) != (self.invalid_block_ids == ()):
            raise ValueError(
                f"the load of {self.request_id}: an error and invalid blocks come together; ALL_BLOCKS if none may be used"
            )


@dataclass(frozen=True, slots=True)
class SendingEnded:
    """No reader needs the blocks of a finished request any more; they are free."""

    request_id: str
