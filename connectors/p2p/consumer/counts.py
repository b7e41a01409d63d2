"""What a consumer counts, for its metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PullCounts:
    """What has happened since the start."""

    handshakes: int = 0
    failed_handshakes: int = 0
    unexpected_messages: int = 0
    fenced_peers: int = 0
    blocks_read_again: int = 0
    quarantined_blocks: int = 0
    loads_without_transport: int = 0
