"""What it costs to load tokens from another worker instead of computing them, in predicted time.

Owns the estimate of one kind of link, and that of the sources' answers. A question takes the time until the source answers it,
between two of its steps; then a transfer takes a fixed time, for the lease and the verification, and a time for each byte.
Handoffs teach the second, too. A link of which nothing is known is taken to be fast, so that it is tried; the reader's patience
bounds what the trial costs. What it shows is compared with figures that a loaded 10 Gbit/s network keeps, and so is a trial
that has brought nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_ASKED_MS = 20.0
FIRST_BASE_MS = 10.0
FIRST_BYTES_PER_MS = 500_000.0
TRIAL_SPEED = 20.0  # of an unknown link, times the first figure
MOST_TRIALS = 8  # prompts of a role that try a source before it is known what that saves
MARGIN = 0.8  # a transfer must be predicted to take less than this share of the time that it saves
_MEMORY = 0.9  # the means cover about the last ten transfers
_LEAST_BYTES = 1 << 20  # smaller transfers tell nothing of the speed
_MOST = 4.0
_FAILED = 0.97
_RECOVERY = 0.002  # per prompt that no source was used for


@dataclass(slots=True)
class TransferTime:
    """The recent speed of transfers over one transport.

    Where nothing is handed off, only transfers that pay are made. So figures that a slow spell has left come back by themselves
    while none is made: to the first ones, or to the best that there were.
    """

    base_ms: float = FIRST_BASE_MS
    bytes_per_ms: float = FIRST_BYTES_PER_MS
    num_seen: int = 0
    _best_base_ms: float = FIRST_BASE_MS
    _best_bytes_per_ms: float = FIRST_BYTES_PER_MS

    def ms(self, num_bytes: float) -> float:
        """Return the predicted time of a transfer."""
        return self.base_ms + num_bytes / self.bytes_per_ms / (1.0 if self.num_seen else TRIAL_SPEED)

    def observe(self, num_bytes: int, real_ms: float) -> None:
        """Learn from a transfer; a small one tells of the fixed time only. That is at most half of the time of a larger one.

        The first transfer from a peer also opens it. So one that is much slower than predicted counts as ``_MOST`` times as
        slow; if all are, the estimate follows within ten.
        """
        if num_bytes <= 0 or real_ms <= 0:
            return
        if not self.num_seen:  # the first one says more than a guess
            self.num_seen, self.bytes_per_ms = 1, max(FIRST_BYTES_PER_MS, num_bytes / real_ms)
            self._best_bytes_per_ms = self.bytes_per_ms
        self.num_seen += 1
        real_ms = min(real_ms, _MOST * self.ms(num_bytes))
        fixed_ms = real_ms
        if num_bytes >= _LEAST_BYTES:
            moving_ms = max(real_ms - self.base_ms, real_ms / 2)
            fixed_ms = real_ms - moving_ms
            self.bytes_per_ms = 1 / (_MEMORY / self.bytes_per_ms + (1 - _MEMORY) * moving_ms / num_bytes)
            self._best_bytes_per_ms = max(self._best_bytes_per_ms, self.bytes_per_ms)
        self.base_ms = _MEMORY * self.base_ms + (1 - _MEMORY) * fixed_ms
        self._best_base_ms = min(self._best_base_ms, self.base_ms)

    def fail(self) -> None:
        """Learn from a transfer that has brought nothing: the link, or the source, is slower than predicted."""
        self.num_seen += 1
        self.bytes_per_ms *= _FAILED

    def recover(self) -> None:
        """A prompt was placed without a source, though its worker could have read one over this transport."""
        self.base_ms -= _RECOVERY * (self.base_ms - self._best_base_ms)
        ms_per_byte, best = 1 / self.bytes_per_ms, 1 / self._best_bytes_per_ms
        self.bytes_per_ms = 1 / (ms_per_byte - _RECOVERY * (ms_per_byte - best))


@dataclass(slots=True)
class AskTime:
    """How long sources take to answer.

    Only a source that is asked teaches it, and none is asked while they are taken to be slow. So a high estimate comes down by
    itself while no source is used.
    """

    ms: float = FIRST_ASKED_MS

    def observe(self, real_ms: float) -> None:
        """Learn from one answer."""
        if real_ms > 0:
            self.ms = _MEMORY * self.ms + (1 - _MEMORY) * min(real_ms, _MOST * max(self.ms, FIRST_ASKED_MS))

    def recover(self) -> None:
        """A prompt was placed without a source, though its worker could have read one."""
        self.ms -= _RECOVERY * max(0.0, self.ms - FIRST_ASKED_MS)


@dataclass(slots=True)
class SourceTrust:
    """The share of what sources were said to hold that could be loaded lately.

    A source is named when a prompt is placed and asked when its turn comes: behind a long queue, its blocks may be evicted by
    then. Claims count by this share. It recovers slowly while no source is used, so that sources are tried again.
    """

    share: float = 1.0

    def observe(self, num_claimed: int, num_loaded: int) -> None:
        """Learn from one prompt that had a source."""
        if num_claimed > 0:
            self.share = _MEMORY * self.share + (1 - _MEMORY) * min(1.0, num_loaded / num_claimed)

    def recover(self) -> None:
        """A prompt was placed without a source, though its worker could have read one."""
        self.share = min(1.0, self.share + _RECOVERY)

    def credit(self, num_tokens: int) -> int:
        """Return how many claimed tokens to count on."""
        return int(num_tokens * self.share)


def trial_rest_ms(compute_ms: float, num_computed: int, num_rest: int) -> float:
    """Return the time to compute a part of the tokens, as if each took the same share of ``compute_ms``.

    The first prompts do not show what each token adds to the fixed time of a step. Until they do, all of it counts as time for
    tokens, so a source is tried, at most ``MOST_TRIALS`` times: aggregated workers under load may not show it for long.
    """
    return compute_ms * num_rest / max(1, num_computed)


def pays(transfer_ms: float, compute_ms: float, rest_ms: float, margin: float = MARGIN) -> bool:
    """Return True if a transfer and the rest of the prefill take clearly less than computing all of it."""
    return transfer_ms < margin * (compute_ms - rest_ms)
