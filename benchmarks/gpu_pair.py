"""A prefill and a decode worker as two processes on one device, with no router between them.

Owns both workers: engine, connector and their threads are those of a real worker (``core.engine.thread``, ``connectors.p2p``).
This process is the decode worker, and tells the other by a pipe what to compute; blocks go the way they go in a cluster.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from common import quantile
from gpu_ceilings import best_s
from gpu_engine import EngineSize, Prompts, Tokens, release_memory, settings
from gpu_models import Shape
from gpu_process import TIMEOUT_S, other_process, receive

from connectors.p2p.connector import P2PConnector
from connectors.p2p.transport.nixl import installed_module
from connectors.testing.contexts import worker_context
from core.config import load_config
from core.connector import ConnectorContext
from core.engine.build import build_engine
from core.engine.thread import EngineThread
from core.ids import RandomIds, new_incarnation
from core.request import EngineCoreOutput, NewRequest
from core.wire.kv import KVHandoff, KVLayoutInfo
from core.wire.messages import Role, TransferUsage
from core.wire.sampling import SamplingParams

TEXT_TOKENS = 16  # after the first one, of a prompt with a handoff


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSize:
    """The settings and the work of the pair."""

    engine: EngineSize
    prompt: int  # of a handoff
    repeats: int
    streams: int  # that decode while the other prefills
    stream_prompt: int
    stream_tokens: int
    busy_prompt: int  # of what the other prefills meanwhile


@dataclass(frozen=True, slots=True)
class PairResult:
    """Times in milliseconds. ``added`` is the handoff's part of the way to the second token."""

    transport: str
    transferred_bytes: int
    handoff_bytes_per_s: float
    device_copy_bytes_per_s: float  # of as many bytes, each counted once
    ttft_ms: float
    ttft_alone_ms: float
    added_ms: float
    itl_alone_p50_ms: float
    itl_alone_p99_ms: float
    itl_busy_p50_ms: float
    itl_busy_p99_ms: float
    num_fallbacks: int
    num_texts: int
    num_same_texts: int  # of those, as the decode worker computes them by itself


@dataclass(slots=True)
class Heard:
    """What has come of a request."""

    times: list[float] = field(default_factory=list)
    tokens: Tokens = field(default_factory=list)
    handoff: KVHandoff | None = None
    usage: TransferUsage | None = None
    error: str = ""
    is_done: threading.Event = field(default_factory=threading.Event)


class Host:
    """A worker without a router: an engine on its thread, a connector in its event loop."""

    def __init__(self, role: Role, overrides: dict[str, object]) -> None:
        config = load_config(overrides=overrides)
        if config.model.device == "cpu":
            torch.set_num_threads(1)  # two processes whose threads wait for each other get nowhere
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._heard: dict[str, Heard] = {}
        self._death: BaseException | None = None
        context = replace(worker_context(role, incarnation=new_incarnation(RandomIds())), config=config)

        def factory(layout: KVLayoutInfo, fingerprint: bytes) -> P2PConnector:
            return P2PConnector(ConnectorContext(**vars(context), layout=layout, model_fingerprint=fingerprint))

        self.built = build_engine(
            config, context.clock, factory, incarnation=context.incarnation, has_readers=role == "prefill"
        )
        self._connector = self.built.connector
        self._thread = EngineThread(self.built.engine, self._on_outputs, self._on_death)
        self._connector.worker.set_wakeup(self._thread.wake)
        self._loop_thread.start()
        asyncio.run_coroutine_threadsafe(self._connector.start(), self._loop).result(TIMEOUT_S)
        self._thread.start()

    @property
    def transports(self) -> tuple[str, ...]:
        return tuple(self._connector.transports)

    def submit(self, *requests: NewRequest) -> list[Heard]:
        """Submit requests; the engine's thread fills in their results."""
        heard = [Heard() for _ in requests]
        self._heard |= {request.request_id: one for request, one in zip(requests, heard, strict=True)}
        self._thread.submit_add(requests)
        return heard

    def expect(self, handoff: KVHandoff) -> None:
        """Say that a request with this handoff comes, as a worker does when it has read it."""
        self._loop.call_soon_threadsafe(self._connector.expect, handoff)

    def wait(self, heard: Sequence[Heard]) -> None:
        """Return once all have ended.

        Raises: RuntimeError if one has failed, or the engine has died.
        """
        for one in heard:
            if not one.is_done.wait(TIMEOUT_S) or one.error or self._death is not None:
                raise RuntimeError(one.error or f"no answer in {TIMEOUT_S:g} s: {self._death!r}")

    def stop(self) -> None:
        self._thread.stop(TIMEOUT_S)
        asyncio.run_coroutine_threadsafe(self._connector.stop(), self._loop).result(TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop_thread.join()
        self._loop.close()
        self.built.pool.close()

    def _on_outputs(self, outputs: list[EngineCoreOutput]) -> None:
        now = time.perf_counter()
        for output in outputs:
            one = self._heard[output.request_id]
            one.times += [now] * len(output.new_token_ids)
            one.tokens += output.new_token_ids
            one.handoff = output.kv_handoff or one.handoff
            one.usage = output.transfer_usage or one.usage
            one.error = output.error.message if output.error is not None else ""
            if output.finish_reason is not None:
                one.is_done.set()

    def _on_death(self, error: BaseException) -> None:
        self._death = error
        for one in self._heard.values():
            one.is_done.set()


def transports_here(device: str) -> tuple[str, ...]:
    """Return the transports that a pair on one host would use, the best first."""
    if device == "cpu":
        return ("shm",)
    return ("shm", "nixl", "tcp") if installed_module() else ("shm", "tcp")


def measure_pair(model: Path, shape: Shape, size: PairSize, device: str, transport: str) -> PairResult:
    """Start the other process, measure, and end it."""
    overrides = settings(model, size.engine, device) | {
        "connector.transports": [transport],
        "worker.control_address": "tcp://127.0.0.1:0",
    }
    try:
        with other_process(serve_prefill, overrides) as pipe:
            return _measure_as_decode_worker(overrides, pipe, shape, size, device)
    finally:
        release_memory()  # this worker's engine is unreachable by now


def _measure_as_decode_worker(
    overrides: dict[str, object], pipe: Connection, shape: Shape, size: PairSize, device: str
) -> PairResult:
    host = Host("decode", overrides)
    try:
        _expect(pipe, "ready")
        return _Pair(host, pipe, shape, size, device).measure()
    finally:
        host.stop()


def serve_prefill(pipe: Connection, overrides: dict[str, object]) -> None:
    """Be the prefill worker until the other end is closed."""
    host = Host("prefill", overrides)
    pipe.send(("ready", None))
    prompts: Prompts | None = None
    count = 0
    while True:
        try:
            command, argument = pipe.recv()
        except EOFError:
            break
        if command == "prefill":
            count += 1
            (heard,) = host.submit(_prefill_request(f"p{count}", argument, needs_handoff=True))
            host.wait([heard])
            pipe.send(("done", (heard.tokens, heard.handoff)))
        else:  # be busy: prompts of this length, one after another, until the next command
            prompts = prompts or Prompts(argument[1])
            num_prompts = 0
            while not pipe.poll():
                count += 1
                num_prompts += 1
                host.wait(host.submit(_prefill_request(f"p{count}", prompts.new(argument[0]), needs_handoff=False)))
            pipe.recv()
            pipe.send(("done", num_prompts))
    host.stop()


class _Pair:
    """The measurements, as the decode worker makes them."""

    def __init__(self, host: Host, pipe: Connection, shape: Shape, size: PairSize, device: str) -> None:
        self._same_texts: list[bool] = []
        self._host, self._pipe, self._size, self._device = host, pipe, size, device
        self._vocab = shape.vocab
        self._prompts = Prompts(shape.vocab)
        self._count = 0

    def measure(self) -> PairResult:
        size = self._size
        first = [self._make_handoff() for _ in range(size.repeats + 1)][1:]  # the first one shakes hands
        alone = [self._first_token_ms() for _ in range(size.repeats + 1)][1:]
        usages = [usage for _, _, usage in first]
        num_bytes = usages[0].transferred_bytes
        rates = [usage.transferred_bytes / max(usage.transfer_ms, 1e-3) * 1e3 for usage in usages]
        quiet = self._intervals_ms()
        self._pipe.send(("busy", (size.busy_prompt, self._vocab)))
        busy = self._intervals_ms()
        self._pipe.send(("rest", None))
        _expect(self._pipe, "done")
        step_ms = statistics.median(quiet)
        return PairResult(
            transport=usages[0].transport,
            transferred_bytes=num_bytes,
            handoff_bytes_per_s=statistics.median(rates),
            device_copy_bytes_per_s=self._copy_rate(num_bytes),
            ttft_ms=statistics.median(ttft for ttft, _, _ in first),
            ttft_alone_ms=statistics.median(alone),
            added_ms=statistics.median(second for _, second, _ in first) - step_ms,
            itl_alone_p50_ms=step_ms,
            itl_alone_p99_ms=quantile(quiet, 0.99),
            itl_busy_p50_ms=statistics.median(busy),
            itl_busy_p99_ms=quantile(busy, 0.99),
            num_fallbacks=sum(bool(usage.fallback_reason) for usage in usages),
            num_texts=len(self._same_texts),
            num_same_texts=sum(self._same_texts),
        )

    def _make_handoff(self) -> tuple[float, float, TransferUsage]:
        """Return the milliseconds to the first token, there, and to the second, here; and what the transfer was."""
        prompt = self._prompts.new(self._size.prompt)
        begin = time.perf_counter()
        self._pipe.send(("prefill", prompt))
        tokens, handoff = _expect(self._pipe, "done")
        middle = time.perf_counter()
        self._host.expect(handoff)
        (heard,) = self._host.submit(self._request(prompt, 1 + TEXT_TOKENS, output_token_ids=tokens, kv_handoff=handoff))
        self._host.wait([heard])
        if heard.usage is None:
            raise RuntimeError("no handoff was made")
        (alone,) = self._host.submit(self._request(prompt, 1 + TEXT_TOKENS, cache_salt="alone"))  # nothing of it is cached
        self._host.wait([alone])
        self._same_texts.append(tokens + heard.tokens == alone.tokens)
        return 1e3 * (middle - begin), 1e3 * (heard.times[0] - middle), heard.usage

    def _first_token_ms(self) -> float:
        """Return how long this worker takes for a prompt by itself."""
        begin = time.perf_counter()
        (heard,) = self._host.submit(self._request(self._prompts.new(self._size.prompt), 1))
        self._host.wait([heard])
        return 1e3 * (heard.times[0] - begin)

    def _intervals_ms(self) -> list[float]:
        """Return the times between the tokens of some streams once all of them decode."""
        size = self._size
        requests = [self._request(self._prompts.new(size.stream_prompt), size.stream_tokens) for _ in range(size.streams)]
        heard = self._host.submit(*requests)
        self._host.wait(heard)
        start = max(one.times[0] for one in heard)
        return [
            1e3 * (later - earlier)
            for one in heard
            for earlier, later in zip(one.times, one.times[1:], strict=False)
            if earlier >= start
        ]

    def _request(self, prompt: Tokens, num_tokens: int, **changes: Any) -> NewRequest:  # noqa: ANN401
        self._count += 1
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
        return NewRequest(request_id=f"d{self._count}", prompt_token_ids=prompt, sampling=sampling, **changes)

    def _copy_rate(self, num_bytes: int) -> float:
        """Return bytes per second of a copy of as many bytes on the device."""
        source = torch.ones(num_bytes, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        return num_bytes / best_s(lambda: target.copy_(source), self._device, 5)


def _prefill_request(name: str, prompt: Tokens, needs_handoff: bool) -> NewRequest:
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    return NewRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, needs_handoff=needs_handoff)


def _expect(pipe: Connection, wanted: str) -> Any:  # noqa: ANN401
    name, answer = receive(pipe)
    assert name == wanted
    return answer
