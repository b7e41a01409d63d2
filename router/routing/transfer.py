"""What it costs to load tokens from another worker instead of computing them, in predicted time.

Owns the estimate of one kind of link. A transfer takes a fixed time, for the question, the answer between two steps of the
source, and the verification, and a time for each byte. Before the first transfer both are figures that a loaded 10 Gbit/s
network keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_BASE_MS = 30.0
FIRST_BYTES_PER_MS = 500_000.0
MARGIN = 0.8  # a transfer must be predicted to take less than this share of the time that it saves
_MEMORY = 0.9  # the means cover about the last ten transfers
_LEAST_BYTES = 1 << 20  # smaller transfers tell nothing of the speed
_MOST = 4.0


@dataclass(slots=True)
class TransferTime:
    """The recent speed of transfers over one transport."""

    base_ms: float = FIRST_BASE_MS
    bytes_per_ms: float = FIRST_BYTES_PER_MS
    num_seen: int = 0

    def ms(self, num_bytes: float) -> float:
        """Return the predicted time of a transfer."""
        return self.base_ms + num_bytes / self.bytes_per_ms

    def observe(self, num_bytes: int, real_ms: float) -> None:
        """Learn from a transfer; a small one tells of the fixed time only.

        The first transfer from a peer also opens it. So one much slower than predicted counts as ``_MOST`` times as slow;
        if all are, the estimate follows within ten.
        """
        if num_bytes <= 0 or real_ms <= 0:
            return
        self.num_seen += 1
        real_ms = min(real_ms, _MOST * self.ms(num_bytes))
        if num_bytes < _LEAST_BYTES:
            self.base_ms = _MEMORY * self.base_ms + (1 - _MEMORY) * real_ms
            return
        moving_ms = max(real_ms - self.base_ms, real_ms / 2)
        ms_per_byte = _MEMORY / self.bytes_per_ms + (1 - _MEMORY) * moving_ms / num_bytes
        self.bytes_per_ms = 1 / ms_per_byte


def pays(transfer_ms: float, compute_ms: float, rest_ms: float, margin: float = MARGIN) -> bool:
    """Return True if a transfer and the rest of the prefill take clearly less than computing all of it."""
    return transfer_ms < margin * (compute_ms - rest_ms)
