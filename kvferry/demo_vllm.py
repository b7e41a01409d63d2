"""What ``kvferry demo`` reads from the two vLLM servers of a cluster after an answer, and what it says of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """Sums over all engines of one server, since its start, as its ``/metrics`` says them; ``held`` is of this moment.

    ``held`` are blocks that are kept for readers or may still be written; ``is_used`` also says whether requests use the pool.
    """

    num_loads: int
    num_verified_blocks: int
    num_bytes: int
    transfer_s: float
    verify_s: float
    problems: dict[str, int]  # failed and refused loads by their reasons
    num_held_blocks: int
    is_used: bool


def read_engine(text: str) -> EngineReading:
    """Return what a server's metrics say."""
    sums: dict[str, float] = {}
    problems: dict[str, int] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
            if sample.name in ("vllm:kvferry_failures_total", "vllm:kvferry_refusals_total") and sample.value:
                reason = sample.labels.get("reason", "unknown")
                problems[reason] = problems.get(reason, 0) + int(sample.value)
    return EngineReading(
        num_loads=int(sums.get("vllm:kvferry_loads_total", 0)),
        num_verified_blocks=int(sums.get("vllm:kvferry_verified_blocks_total", 0)),
        num_bytes=int(sums.get("vllm:kvferry_bytes_total", 0)),
        transfer_s=sums.get("vllm:kvferry_transfer_seconds_total", 0.0),
        verify_s=sums.get("vllm:kvferry_verify_seconds_total", 0.0),
        problems=problems,
        num_held_blocks=int(sums.get("vllm:kvferry_held_blocks", 0)),
        is_used=bool(sums.get("vllm:kv_cache_usage_perc", 0.0)),
    )


def is_settled(readings: dict[str, EngineReading]) -> bool:
    """Return True if the decode server has counted the load, or its failure, and no server holds a block."""
    has_result = any(reading.num_loads or reading.problems for reading in readings.values())
    return has_result and not any(reading.num_held_blocks or reading.is_used for reading in readings.values())


def why_not_verified(decode: EngineReading) -> str:
    """Return why the answer did not come by a verified handoff; "" if it did."""
    if decode.problems:
        return f"blocks were computed instead of transferred: {', '.join(sorted(decode.problems))}"
    if not decode.num_loads or not decode.num_verified_blocks:
        return "the answer did not come by a handoff of KV blocks"
    return ""


def held_blocks(readings: dict[str, EngineReading]) -> dict[str, int]:
    """Return the blocks that servers still hold, by server; a server whose pool is in use has at least one."""
    return {
        name: max(1, reading.num_held_blocks)
        for name, reading in readings.items()
        if reading.num_held_blocks or reading.is_used
    }
