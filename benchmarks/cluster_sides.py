"""The two ways to run two workers that are compared, on the same cores: 1P1D, or two aggregated ones; and requests for them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from core.config import load_config
from kvferry.bench.client import RequestResult, Target
from kvferry.bench.load import run_load
from kvferry.bench.workload import FIRST_TOKEN_ID, BenchRequest
from kvferry.local import LocalCluster

UNCHUNKED = 2048  # tokens: no prompt here is longer
TIMEOUT_S = 200.0


class RequestsFailed(Exception):
    """A side has not answered all requests."""


@dataclass(frozen=True, slots=True)
class Side:
    """A cluster. ``chunk``: tokens of a step; of the prefill worker for 1P1D."""

    name: str
    chunk: int
    is_aggregated: bool

    def assignments(self, model: str) -> list[str]:
        shape = ["local.aggregated=true", "local.num_prefill=0"] if self.is_aggregated else ["local.num_prefill=1"]
        num_decode = 2 if self.is_aggregated else 1
        return [
            *shape,
            f"local.num_decode={num_decode}",
            f"model.name={model}",
            f"scheduler.max_num_batched_tokens={self.chunk}",
            "model.dtype=float32",
            "worker.cpu_threads=1",
            f"cache.memory_bytes={512 << 20}",
            "router.port=0",
        ]

    @contextmanager
    def running(self, model: str) -> Iterator[str]:
        """Yield the address of the cluster, which serves the model."""
        with LocalCluster(load_config(assignments=self.assignments(model))) as cluster:
            yield cluster.base_url


PAIR = Side("1P1D", UNCHUNKED, False)


def aggregated(chunk: int) -> Side:
    """Return two aggregated workers that compute so many tokens of prompts in a step."""
    return Side(f"2 aggregated, {chunk}", chunk, True)


class Load:
    """Sends requests with prompts that no two share."""

    def __init__(self, base_url: str, model: str, seed: int) -> None:
        self._target = Target(base_url=base_url, model=model)
        self.random = random.Random(seed)

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self.random.randrange(FIRST_TOKEN_ID, 10_000) for _ in range(num_tokens))

    def send(self, requests: Sequence[BenchRequest]) -> list[RequestResult]:
        """Return the results.

        Raises:
            RequestsFailed: not all were answered.
        """
        results, _ = asyncio.run(run_load(self._target, requests, concurrency=None, timeout_s=TIMEOUT_S))
        errors = [result.error for result in results if result.error]
        if errors:
            raise RequestsFailed(f"{len(errors)} of {len(results)} requests failed: {errors[0]}")
        return results
