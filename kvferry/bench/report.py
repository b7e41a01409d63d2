"""Turns results into figures: percentiles, throughput, goodput. Pure; ``kvferry.bench.run`` prints them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from core.errors import ConfigError
from kvferry.bench.client import RequestResult

PERCENTILES = (50, 90, 95, 99)
SLO_NAMES = ("ttft", "tpot", "e2e")


class Distribution(msgspec.Struct, frozen=True):
    """Mean and percentiles of one quantity in milliseconds; NaN-free: absent quantities have no ``Distribution``."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one run."""

    num_requests: int
    num_failed: int
    duration_s: float
    request_throughput_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    ttft_ms: Distribution | None
    itl_ms: Distribution | None
    tpot_ms: Distribution | None
    e2e_ms: Distribution | None
    slo_ms: dict[str, float] = {}
    goodput_per_s: float | None = None  # requests per second that met every SLO
    errors: dict[str, int] = {}
    seed: int | None = None  # of the workload


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the percentile of sorted values by linear interpolation between closest ranks."""
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def distribution(seconds: Sequence[float]) -> Distribution | None:
    """Summarise durations given in seconds, in milliseconds; None if there are none."""
    if not seconds:
        return None
    ordered = sorted(value * 1000 for value in seconds)
    p50, p90, p95, p99 = (percentile(ordered, percent) for percent in PERCENTILES)
    return Distribution(sum(ordered) / len(ordered), p50, p90, p95, p99, ordered[-1])


def parse_slos(items: Sequence[str]) -> dict[str, float]:
    """Parse ``["ttft:500", "tpot:50"]`` (milliseconds).

    Raises:
        ConfigError: an unknown name or a value that is not a positive number.
    """
    slos: dict[str, float] = {}
    for item in items:
        name, _, value = item.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = 0.0
        if name not in SLO_NAMES or limit <= 0:
            allowed = ", ".join(SLO_NAMES)
            raise ConfigError(f"--goodput {item!r}: expected NAME:MILLISECONDS with NAME one of {allowed}", param="goodput")
        slos[name] = limit
    return slos


def make_report(results: Sequence[RequestResult], duration_s: float, slo_ms: Mapping[str, float]) -> Report:
    """Compute the figures of a run. Failed requests enter no other figure than their count."""
    good = [result for result in results if not result.error]
    errors: dict[str, int] = {}
    for result in results:
        if result.error:
            errors[result.error] = errors.get(result.error, 0) + 1
    num_prompt = sum(result.num_prompt_tokens for result in good)
    num_output = sum(result.num_output_tokens for result in good)
    met = sum(_meets(result, slo_ms) for result in good)
    return Report(
        num_requests=len(results),
        num_failed=len(results) - len(good),
        duration_s=duration_s,
        request_throughput_per_s=len(good) / duration_s,
        output_tokens_per_s=num_output / duration_s,
        total_tokens_per_s=(num_prompt + num_output) / duration_s,
        num_prompt_tokens=num_prompt,
        num_cached_tokens=sum(result.num_cached_tokens for result in good),
        num_output_tokens=num_output,
        ttft_ms=distribution([result.ttft_s for result in good if result.ttft_s is not None]),
        itl_ms=distribution([gap for result in good for gap in result.itl_s]),
        tpot_ms=distribution([result.tpot_s for result in good if result.tpot_s is not None]),
        e2e_ms=distribution([result.e2e_s for result in good]),
        slo_ms=dict(slo_ms),
        goodput_per_s=met / duration_s if slo_ms else None,
        errors=errors,
    )


def _meets(result: RequestResult, slo_ms: Mapping[str, float]) -> bool:
    """Return True if a request met every limit; without a first token it met none of the first two.

    An answer of one token has no time per output token, and so meets any limit on it.
    """
    no_tpot = 0.0 if result.ttft_s is not None and result.num_output_tokens == 1 else math.inf
    tpot_s = no_tpot if result.tpot_s is None else result.tpot_s
    measured = {"ttft": math.inf if result.ttft_s is None else result.ttft_s, "tpot": tpot_s, "e2e": result.e2e_s}
    return all(measured[name] * 1000 <= limit for name, limit in slo_ms.items())
