"""``kvferry demo``: one question through real processes, and an account of its handling.

Owns the measurements and their display: pretty on a terminal, plain lines otherwise. It is a client of the cluster like any
other: answer and usage come from the HTTP API, block counts from the workers' metrics.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from core.config import KVFerryConfig
from core.errors import KVFerryError
from core.log import configure_logging
from kvferry.demo_vllm import EngineReading, held_blocks, is_settled, read_engine, why_not_verified
from kvferry.local import LocalCluster
from kvferry.server_address import bearer, first_key
from kvferry.vllm_plan import server_name

BLOCK_GAUGES = (
    "kvferry_kv_leaked_blocks",
    "kvferry_kv_leased_blocks",
    "kvferry_kv_loading_blocks",
    "kvferry_kv_parked_blocks",
    "kvferry_kv_quarantined_blocks",
)
_DEMO_POOL_BYTES = 256 << 20  # per worker; plenty for one conversation
_REQUEST_TIMEOUT_S = 300.0
_SETTLE_TIMEOUT_S = 10.0
_SETTLE_POLL_S = 0.1


@dataclass(slots=True)
class StreamResult:
    """The result of one streamed request. Times are seconds of this process's clock."""

    sent_at: float
    text_at: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft_ms(self) -> float:
        """From sending to the first text."""
        return (self.text_at[0] - self.sent_at) * 1e3 if self.text_at else 0.0

    @property
    def mean_gap_ms(self) -> float:
        """Mean time between texts: the inter-token latency as a client sees it."""
        num_gaps = len(self.text_at) - 1
        return (self.text_at[-1] - self.text_at[0]) * 1e3 / num_gaps if num_gaps > 0 else 0.0

    @property
    def second_gap_ms(self) -> float:
        """From the first text, which the prefill worker computed, to the second: handoff and first decode step."""
        return (self.text_at[1] - self.text_at[0]) * 1e3 if len(self.text_at) > 1 else 0.0


def run_demo(config: KVFerryConfig, prompt: str, max_tokens: int) -> int:
    """Run the demo and return the exit code: 0 if the answer came by a handoff after which no block is held.

    Raises:
        ConfigError: a setting is wrong, or the model cannot be found.
        StartFailed: a process did not become ready.
    """
    configure_logging("WARNING", "demo")
    console = Console(soft_wrap=True, highlight=False)
    cache = msgspec.structs.replace(config.cache, memory_bytes=min(config.cache.memory_bytes, _DEMO_POOL_BYTES))
    config = msgspec.structs.replace(config, cache=cache)
    started_at = time.monotonic()
    workers = "a prefill and a decode worker" if config.local.engine == "kvferry" else "two vLLM servers and their agents"
    with console.status(f"starting a router, {workers} with {config.model.name} ..."):
        cluster = LocalCluster(config).start()
    try:
        console.print(f"{_names(cluster)} are ready at {cluster.base_url} after {time.monotonic() - started_at:.1f} s\n")
        console.print(f"[bold]{prompt}[/bold]")
        answer = _ask(cluster.base_url, config, prompt, max_tokens, console)
        if config.local.engine == "vllm":
            return _report_vllm(console, answer, _settled_servers(cluster))
        blocks = _settled_blocks(cluster)
    finally:
        cluster.stop()
    return _report(console, answer, blocks, config.cache.block_size)


def _names(cluster: LocalCluster) -> str:
    return ", ".join(["router", *(worker.engine_id for worker in cluster.workers)])


def _ask(base_url: str, config: KVFerryConfig, prompt: str, max_tokens: int, console: Console) -> StreamResult:
    """Stream one chat completion to the console."""
    body = {
        "model": config.model.served_name or config.model.name,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = StreamResult(sent_at=time.monotonic())
    for event in _events(f"{base_url}/v1/chat/completions", body, bearer(first_key(config.router.api_key))):
        if event.get("usage"):
            answer.usage = event["usage"]
        for choice in event["choices"]:
            text = choice["delta"].get("content")
            if text:
                answer.text_at.append(time.monotonic())
                console.print(text, end="", markup=False)
    console.print("\n")
    return answer


def _events(url: str, body: dict[str, Any], headers: dict[bytes, bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON events of a stream.

    Raises:
        KVFerryError: the router refused the request, or it failed later.
    """
    with httpx.stream(  # the cluster is on this machine: no proxy
        "POST", url, json=body, headers=headers, timeout=_REQUEST_TIMEOUT_S, trust_env=False
    ) as response:
        if response.status_code != httpx.codes.OK:
            response.read()
            raise KVFerryError(f"the request was refused: {response.text}")
        for line in response.iter_lines():
            content = line.removeprefix("data: ")
            if not line.startswith("data: ") or content == "[DONE]":
                continue
            event: dict[str, Any] = json.loads(content)
            if "error" in event:
                raise KVFerryError(f"the request failed: {event['error'].get('message')}")
            yield event


def _settled_blocks(cluster: LocalCluster) -> dict[str, dict[str, float]]:
    """Return the block gauges by worker, after they read 0 or a timeout."""
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    while True:
        blocks = {worker.engine_id: _block_gauges(cluster.metrics(worker.engine_id)) for worker in cluster.workers}
        if time.monotonic() > deadline or not any(any(gauges.values()) for gauges in blocks.values()):
            return blocks
        time.sleep(_SETTLE_POLL_S)


def _block_gauges(text: str) -> dict[str, float]:
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {sample.name: sample.value for sample in samples if sample.name in BLOCK_GAUGES}


def _report(console: Console, answer: StreamResult, blocks: dict[str, dict[str, float]], block_size: int) -> int:
    """Show the account and return the exit code."""
    transfer = answer.usage.get("kv_transfer")
    if not transfer:
        console.print("FAILED: the answer did not come by a handoff of KV blocks")
        return 1
    if transfer["recomputed_tokens"] or not transfer["verified_blocks"]:
        console.print(f"FAILED: blocks were computed instead of transferred: {transfer['fallback_reason']}")
        return 1
    for title, rows in _sections(answer, transfer, block_size):
        _show(console, title, rows)
    held = {f"{name} on {worker}": value for worker, gauges in blocks.items() for name, value in gauges.items() if value}
    if held:
        console.print(f"FAILED: blocks are still held: {held}")
        return 1
    console.print("no block is leaked, leased, loading, parked or quarantined on any worker")
    return 0


def _sections(answer: StreamResult, transfer: dict[str, Any], block_size: int) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    num_tokens = transfer["transferred_tokens"]
    yield (
        "handoff of the KV cache",
        [
            ("transport", transfer["transport"]),
            ("tokens", f"{num_tokens} of {answer.usage['prompt_tokens']} prompt tokens"),
            ("blocks", f"{-(-num_tokens // block_size)} of {block_size} tokens"),
            ("bytes", f"{transfer['transferred_bytes']:,}"),
            ("verified blocks", str(transfer["verified_blocks"])),
        ],
    )
    first, second = transfer["timing"]["first_token"], transfer["timing"]["second_token"]
    yield (
        "time",
        [
            ("queue of the prefill worker", _ms(first["queue_ms"])),
            ("prefill and first token", _ms(first["prefill_ms"])),
            ("queue of the decode worker", _ms(second["queue_ms"])),
            ("transfer", _ms(second["transfer_ms"])),
            ("verification", _ms(second["verify_ms"])),
            ("first decode step", _ms(second["first_step_ms"])),
            ("relay to the router and the client", _ms(first["relay_ms"] + second["relay_ms"])),
            ("client: first token", _ms(answer.ttft_ms)),
            ("client: second token (handoff + first decode step)", _ms(answer.second_gap_ms)),
            ("client: mean inter-token latency", _ms(answer.mean_gap_ms)),
        ],
    )


def _settled_servers(cluster: LocalCluster) -> dict[str, EngineReading]:
    """Return the readings of the vLLM servers by worker, after they hold nothing or a timeout."""
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    while True:
        names = [worker.engine_id for worker in cluster.workers]
        readings = {name: read_engine(cluster.metrics(server_name(name))) for name in names}
        if time.monotonic() > deadline or is_settled(readings):
            return readings
        time.sleep(_SETTLE_POLL_S)


def _report_vllm(console: Console, answer: StreamResult, readings: dict[str, EngineReading]) -> int:
    """Show the account of a handoff between vLLM servers and return the exit code."""
    decode = readings["decode-0"]
    failure = why_not_verified(decode)
    if failure:
        console.print(f"FAILED: {failure}")
        return 1
    handoff = [
        ("prompt", f"{answer.usage['prompt_tokens']} tokens"),
        ("bytes", f"{decode.num_bytes:,}"),
        ("verified blocks", str(decode.num_verified_blocks)),
    ]
    times = [
        ("transfer", _ms(decode.transfer_s * 1e3)),
        ("verification", _ms(decode.verify_s * 1e3)),
        ("client: first token (prefill, handoff, first decode step)", _ms(answer.ttft_ms)),
        ("client: mean inter-token latency", _ms(answer.mean_gap_ms)),
    ]
    _show(console, "handoff of the KV cache between two vLLM engines", handoff)
    _show(console, "time", times)
    held = held_blocks(readings)
    if held:
        console.print(f"FAILED: blocks are still held: {held}")
        return 1
    console.print("no block is held on either engine")
    return 0


def _ms(value: float) -> str:
    return f"{value:.1f} ms"


def _show(console: Console, title: str, rows: list[tuple[str, str]]) -> None:
    if not console.is_terminal:
        console.print(f"{title}:")
        for label, value in rows:
            console.print(f"  {label}: {value}")
        return
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column(justify="right")
    for label, value in rows:
        table.add_row(label, value)
    console.print(table)
