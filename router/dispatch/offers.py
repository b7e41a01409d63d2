"""What a worker would cost for a prompt, and why one of several offers was chosen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from core.wire.kv import KVSource
from router.dispatch.sources import Source
from router.dispatch.timing import RoutingReport


@dataclass(frozen=True, slots=True)
class WorkerOffer:
    """What one worker would cost: predicted hit in tokens, wait and own time in ms, and the score that decides.

    With a ``source`` the worker loads the beginning of the prompt from there, and ``own_ms`` includes the transfer; without, it
    would take ``alone_ms``. A ``declined`` source was there and would not be sooner. ``patience_ms`` is how long shorter
    prompts that come later may be computed first; 0 if it serves in order of arrival.
    """

    hit_tokens: int
    patience_ms: float
    wait_ms: float
    own_ms: float
    score: float
    source: Source | None = None
    alone_ms: float = 0.0
    declined: Source | None = None

    @property
    def ttft_ms(self) -> float:
        """The predicted time from placement to the first token."""
        return self.wait_ms + self.own_ms


def source_of(offer: WorkerOffer) -> KVSource | None:
    """Describe the source to the worker of an offer, whose patience is the longest load that still saves time."""
    return None if offer.source is None else offer.source.as_message(offer.alone_ms - (offer.own_ms - offer.source.transfer_ms))


def report(
    chosen: WorkerOffer, offers: Iterable[WorkerOffer], *, is_local: bool = False, slack_ms: float = 0.0
) -> RoutingReport:
    """Return why one offer was chosen of all. Within ``slack_ms`` of the lowest score the request's session has chosen."""
    every = list(offers)
    longest, lowest = max(offer.hit_tokens for offer in every), min(offer.score for offer in every)
    rules = (
        ("local", is_local),
        ("source", chosen.source is not None),
        ("availability", lowest < chosen.score - slack_ms),
        ("session", lowest < chosen.score),
        ("load", not longest),
        ("prefix", chosen.hit_tokens == longest),
    )
    return RoutingReport(
        reason=next((reason for reason, holds in rules if holds), "wait"),
        candidates=len(every),
        predicted_hit_tokens=chosen.hit_tokens,
        longest_hit_tokens=longest,
        predicted_ttft_ms=chosen.ttft_ms,
        source=chosen.source.holder.worker.key.engine_id if chosen.source is not None else "",
    )
