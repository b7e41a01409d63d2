"""How soon a lost prompt is computed anew: the part of ``benchmarks/handoff.py`` in which prefill workers are killed.

A request streams through a prefill and a decode worker over TCP. When its first token is at the client, the prefill worker
gets SIGKILL, so that its blocks are lost before or during the read. The decode worker then computes the prompt by itself. It
says how long it computed until its first token, so the computation began so long before the client got that: what is shown is
the time from the kill until then. Requests whose blocks had all arrived before the kill are sent again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
from common import Spread, Table, at_most

from kvferry.local import LocalCluster

GOAL_S = 1.0
OWNER = "prefill-0"
TIMEOUT_S = 120.0
MAX_TRIES = 8  # for each figure

NewPrompt = Callable[[int], tuple[int, ...]]


def measure_restarts_of_prompts(cluster: LocalCluster, new_prompt: NewPrompt, num_tokens: int, repeats: int) -> list[float]:
    """Return the seconds from the kill until the decode worker computes, once for each of ``repeats`` requests.

    Raises:
        RuntimeError: the blocks of no request in ``MAX_TRIES`` were lost.
    """
    return [_until_recomputed(cluster, new_prompt, num_tokens) for _ in range(repeats)]


def _until_recomputed(cluster: LocalCluster, new_prompt: NewPrompt, num_tokens: int) -> float:
    for _ in range(MAX_TRIES):
        found = _kill_owner_of(cluster, new_prompt(num_tokens))
        cluster.restart(OWNER)
        if found is not None:
            return found
    raise RuntimeError(f"all blocks arrived before the kill, {MAX_TRIES} times")


def _kill_owner_of(cluster: LocalCluster, prompt: Sequence[int]) -> float | None:
    """Send a request and kill the prefill worker at its first token; None if nothing had to be computed anew."""
    body = {
        "prompt": prompt,
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    times: list[float] = []
    usage: dict[str, Any] = {}
    killed_at = 0.0
    with httpx.stream("POST", f"{cluster.base_url}/v1/completions", json=body, timeout=TIMEOUT_S) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk.get("usage") or usage
            if any(choice["text"] for choice in chunk["choices"]):
                times.append(time.monotonic())
            if times and not killed_at:
                cluster.kill(OWNER)
                killed_at = time.monotonic()
    transfer = usage["kv_transfer"]
    if not transfer["recomputed_tokens"] or len(times) < 2:  # a first token within a character comes with the second
        return None
    computed_s = float(transfer["timing"]["second_token"]["first_step_ms"]) / 1e3
    return times[1] - computed_s - killed_at


def goal_of(seconds: Sequence[float]) -> dict[str, object]:
    """Return the aim."""
    return at_most("killed prefill worker: until its prompt is computed anew", Spread.of(seconds).median, GOAL_S, "s")


def make_table(seconds: Sequence[float], num_tokens: int) -> Table:
    """Return one row."""
    columns = (f"{num_tokens:,} tokens, prefill worker killed", "computed anew after, ms", "goal, at most")
    shown = Spread.of([1e3 * each for each in seconds]).show()
    return Table(columns, [("tcp", shown, f"{1e3 * GOAL_S:,.0f} ms")])
