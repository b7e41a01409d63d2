"""Where a request's time went and what its handoff cost, for clients and metrics.

Owns two splits. The time to the first token, which the prefill worker sends, is encode + queue + prefill + relay; encode is the
wait for encode workers, if the request has images for them. The time from the first token to the second, which the decode
worker sends, is relay + queue + transfer + verification + first step. Workers report their own durations, and the router
measures the totals. *Relay* is the difference: network, this router, and failed attempts. Clocks are never compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from core.wire.messages import TransferUsage


class FirstTokenTiming(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """From submission to the first token, in ms; the parts add up to ``total_ms``."""

    total_ms: float
    encode_ms: float | None = None  # until encode workers answered or timed out; None without encode workers
    queue_ms: float  # on the prefill worker
    prefill_ms: float
    relay_ms: float


class SecondTokenTiming(msgspec.Struct, frozen=True, kw_only=True):
    """From the first token to the second, in ms; the parts add up to ``total_ms``."""

    total_ms: float
    relay_ms: float
    queue_ms: float  # on the decode worker
    transfer_ms: float
    verify_ms: float
    first_step_ms: float


class RoutingReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a prompt was placed where it was, and how true the prediction was. Times in ms, hits in tokens.

    ``reason`` is ``prefix`` if no candidate holds more of the prompt than the worker chosen, ``source`` if the worker loads
    what it lacks from ``source``, which is sooner, ``wait`` if one holds more but would be later or cost more, ``load`` if none
    holds any of it, ``availability`` if a cheaper worker could not take the request, ``session`` if its session prefers the
    worker among about equal ones, and ``local`` if the decode worker computes the prompt, since that is sooner.
    """

    reason: str
    candidates: int
    predicted_hit_tokens: int
    longest_hit_tokens: int  # predicted, of any candidate
    predicted_ttft_ms: float
    source: str = ""  # the worker whose blocks of the prompt are loaded; empty = none
    hit_tokens: int | None = None  # None if no worker reported it; with what was loaded from the source
    pulled_tokens: int = 0  # loaded from the source
    ttft_ms: float | None = None  # without the wait for encode workers


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffReport:
    """What loading the KV of one request cost.

    ``num_replays`` of the ``num_retries`` began after decode tokens. ``num_refusals`` of decode workers are not retries. Both
    timings are None if one worker served alone. ``outcome`` is ``loaded`` or the reason why the handoff was not loaded. It is
    None without a handoff and before the handoff ends; then the report covers blocks lost by tiers.
    """

    cost: TransferUsage
    first_token: FirstTokenTiming | None
    second_token: SecondTokenTiming | None
    outcome: str | None = None
    num_retries: int = 0
    num_replays: int = 0
    num_refusals: int = 0
    routing: RoutingReport | None = None  # None if the route was chosen by load


def first_token_timing(total_s: float, queue_ms: float, prefill_ms: float, encode_s: float | None = None) -> FirstTokenTiming:
    """Split the measured time to the first token by the wait for encode workers and the prefill worker's report."""
    encode, queue, prefill, relay = _split(total_s * 1e3, (encode_s or 0.0) * 1e3, queue_ms, prefill_ms)
    return FirstTokenTiming(
        total_ms=total_s * 1e3,
        encode_ms=None if encode_s is None else encode,
        queue_ms=queue,
        prefill_ms=prefill,
        relay_ms=relay,
    )


def second_token_timing(total_s: float, cost: TransferUsage) -> SecondTokenTiming:
    """Split the measured time between first and second token by the decode worker's report."""
    parts = (cost.queue_ms, cost.transfer_ms, cost.verify_ms, cost.first_step_ms)
    queue, transfer, verify, first_step, relay = _split(total_s * 1e3, *parts)
    return SecondTokenTiming(
        total_ms=total_s * 1e3,
        relay_ms=relay,
        queue_ms=queue,
        transfer_ms=transfer,
        verify_ms=verify,
        first_step_ms=first_step,
    )


def total_cost(costs: Iterable[TransferUsage]) -> TransferUsage:
    """Return the cost of several loads: counts added, times of the slowest, and the first transport and reason named."""
    found = list(costs)
    return TransferUsage(
        transport=next((cost.transport for cost in found if cost.transport), ""),
        transferred_tokens=sum(cost.transferred_tokens for cost in found),
        transferred_bytes=sum(cost.transferred_bytes for cost in found),
        transfer_ms=max((cost.transfer_ms for cost in found), default=0.0),
        verify_ms=max((cost.verify_ms for cost in found), default=0.0),
        queue_ms=max((cost.queue_ms for cost in found), default=0.0),
        first_step_ms=max((cost.first_step_ms for cost in found), default=0.0),
        verified_blocks=sum(cost.verified_blocks for cost in found),
        early_tokens=sum(cost.early_tokens for cost in found),
        early_bytes=sum(cost.early_bytes for cost in found),
        exposed_ms=max((cost.exposed_ms for cost in found), default=0.0),
        recomputed_tokens=sum(cost.recomputed_tokens for cost in found),
        fallback_reason=next((cost.fallback_reason for cost in found if cost.fallback_reason), ""),
    )


def _split(total: float, *parts: float) -> list[float]:
    """Return the parts, then the rest of the total. If clock drift makes the parts exceed the total, the last ones are cut."""
    left = total
    result = []
    for part in parts:
        fitting = min(part, left)
        result.append(fitting)
        left -= fitting
    return [*result, left]
