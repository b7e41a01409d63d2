"""What hostile clients can do to a router: the longest callback of its event loop, and how its memory grows.

    python benchmarks/router_attack.py [--only TEXT] [--model smollm2-135m] [--json FILE] [--markdown] [--quick]

A real router in this process, with its HTTP port, and two registered workers that never answer. Another process sends one
attack of ``router_attack_list.py`` after the other. Meanwhile every callback of the router's event loop is timed in CPU
seconds of its thread (``time.thread_time``), which leaves out the waiting for a core or for another thread; the delay of a
timer of 5 ms, which has it, is shown beside it. Memory is the peak of the resident set during the attack, less the set before
the first attack. Exit code 1: a goal was missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import zmq.asyncio
from common import Machine, Outcome, Table, at_most, make_parser, publish
from router_attack_list import ATTACKS, MANY_CONNECTIONS, Attack, Served

from core.config_router import RouterSection
from core.config_types import default_cache_dir
from core.config_workers import ModelSection
from core.gc_freeze import freeze_loaded_objects
from core.model.hub import resolve_model
from core.wire import codec
from core.wire.kv import KVLayoutInfo
from core.wire.messages import Heartbeat, Register
from core.wire.sockets import SocketOptions, dealer_socket
from router.http.server import Router
from router.openai.served_model import ServedModel, served_model

CALLBACK_GOAL_MS = 50.0
MEMORY_GOAL_MB = 320.0  # router.max_upload_bytes, and a quarter for what goes with it
MAX_MODEL_LEN = 8192
_TICK_S = 0.005
_REQUEST_TIMEOUT_S = 2.0
_QUICK = ("tokenize 1 MB", "200 MB of headers")
_LAYOUT = KVLayoutInfo(dtype="float32", order="HND", block_size=64, num_layers=1, num_kv_heads=1, head_dim=4, block_bytes=2048)


@dataclass(slots=True)
class Longest:
    """The longest callback, and the latest timer, since ``reset``."""

    callback_s: float = 0.0
    delay_s: float = 0.0
    what: str = ""

    def reset(self) -> None:
        self.callback_s = self.delay_s = 0.0
        self.what = ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time every callback of any event loop of this process."""
        original: Callable[[asyncio.Handle], None] = asyncio.Handle._run  # type: ignore[attr-defined]

        def timed(handle: asyncio.Handle) -> None:
            before = time.thread_time()
            original(handle)
            spent = time.thread_time() - before
            if spent > self.callback_s:
                self.callback_s, self.what = spent, repr(handle)

        asyncio.Handle._run = timed  # type: ignore[attr-defined]
        try:
            yield
        finally:
            asyncio.Handle._run = original  # type: ignore[attr-defined]

    async def tick(self) -> None:
        """Measure how late a timer is, until cancelled."""
        while True:
            due = time.perf_counter() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self.delay_s = max(self.delay_s, time.perf_counter() - due)


@dataclass(slots=True)
class Result:
    """What one attack did."""

    name: str
    callback_ms: float
    delay_ms: float
    peak_mb: float
    answers: dict[str, int] = field(default_factory=dict)
    what: str = ""


class SilentWorker:
    """Registers with a router and takes requests without ever answering."""

    def __init__(self, context: zmq.asyncio.Context, address: str, role: str) -> None:
        self._socket = dealer_socket(context, SocketOptions(max_message_bytes=codec.MAX_ROUTER_FRAME_BYTES))
        self._socket.connect(address)
        self._role = role
        self._registration = Register(
            engine_id=f"silent-{role}",
            incarnation=1,
            role=role,
            model="attacked",
            model_fingerprint=b"weights",
            layout=_LAYOUT,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=4096,
            num_blocks=1 << 20,
            connector="p2p",
            transports=("tcp",),
            has_digests=True,
        )

    async def live(self) -> None:
        """Send signs of life, and drop what comes."""
        await self._socket.send(codec.encode_worker_message(self._registration))
        await asyncio.gather(self._beat(), self._drop())

    async def _beat(self) -> None:
        beat = codec.encode_worker_message(Heartbeat(engine_id=self._registration.engine_id, incarnation=1))
        while True:
            await asyncio.sleep(0.5)
            await self._socket.send(beat)

    async def _drop(self) -> None:
        while True:
            await self._socket.recv()


def _memory_mb(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


async def _until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_true():  # noqa: ASYNC110 - the router has no event for it
            await asyncio.sleep(0.02)


async def _run_attack(attack: Attack, router: Router, served: Served, longest: Longest, before_mb: float) -> Result:
    code = "import router_attack_list; router_attack_list.send()"
    arguments = [str(router.port), attack.name, str(served.vocab_size), str(served.max_model_len)]
    longest.reset()
    _forget_peak()
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, *arguments, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parent
    )
    longest.reset()  # the start of the child is none of the router's work
    printed, _ = await child.communicate()
    await _until(lambda: not router.gateway.num_requests)
    return Result(
        attack.name,
        1e3 * longest.callback_s,
        1e3 * longest.delay_s,
        _memory_mb("VmHWM") - before_mb,
        json.loads(printed),
        longest.what,
    )


async def _with_router(model: ServedModel, work: Callable[[Router], Awaitable[list[Result]]]) -> list[Result]:
    section = RouterSection(port=0, worker_address="tcp://127.0.0.1:0", request_timeout_s=_REQUEST_TIMEOUT_S)
    router = Router(section, model)
    await router.start()
    context = zmq.asyncio.Context()
    lives = [asyncio.create_task(SilentWorker(context, router.worker_address, role).live()) for role in ("prefill", "decode")]
    try:
        await _until(lambda: router.endpoints.not_ready_reason is None)
        return await work(router)
    finally:
        for life in lives:
            life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)
        await router.stop()
        context.destroy(linger=0)


async def _attack_all(model: ServedModel, attacks: list[Attack]) -> list[Result]:
    longest = Longest()
    served = Served(model.tokenizer.vocab_size, MAX_MODEL_LEN)

    async def work(router: Router) -> list[Result]:
        freeze_loaded_objects()
        ticking = asyncio.create_task(longest.tick())
        before_mb = _memory_mb("VmRSS")
        with longest.watching():
            results = [await _run_attack(attack, router, served, longest, before_mb) for attack in attacks]
        ticking.cancel()
        return results

    return await _with_router(model, work)


def _goals(results: list[Result]) -> list[dict[str, object]]:
    return [
        at_most(f"{result.name}: {name}", value, goal, unit)
        for result in results
        for name, value, goal, unit in (
            ("longest callback", result.callback_ms, CALLBACK_GOAL_MS, "ms"),
            ("memory", result.peak_mb, MEMORY_GOAL_MB, "MB"),
        )
    ]


def measure(arguments: argparse.Namespace) -> Outcome:
    attacks = [attack for attack in ATTACKS if arguments.only in attack.name]
    if arguments.quick:
        attacks = [attack for attack in attacks if attack.name in _QUICK]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_CONNECTIONS + 1024
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    files = resolve_model(arguments.model, Path(default_cache_dir()))
    model = served_model(ModelSection(name=arguments.model, served_name="attacked"), files)
    results = asyncio.run(_attack_all(model, attacks))
    rows = [
        [
            result.name,
            f"{result.callback_ms:.0f}",
            f"{result.delay_ms:.0f}",
            f"{result.peak_mb:.0f}",
            ", ".join(f"{number} x {answer}" for answer, number in result.answers.items()),
        ]
        for result in results
    ]
    table = Table(["attack", "longest callback, ms CPU", "latest timer, ms", "memory, MB", "answers"], rows)
    notes = [f"goals: {CALLBACK_GOAL_MS:g} ms of CPU in one callback, {MEMORY_GOAL_MB:g} MB; context of {MAX_MODEL_LEN} tokens"]
    worst = max(results, key=lambda result: result.callback_ms)
    notes.append(f"the longest callback of all: {worst.what[:160]}")
    return Outcome([table], notes, goals=_goals(results))


def main() -> int:
    assert __doc__ is not None
    parser = make_parser(__doc__, repeats=1)
    parser.add_argument("--only", default="", help="attacks whose name has this text")
    arguments = parser.parse_args()
    machine = Machine.now()
    outcome = measure(arguments)
    publish(outcome, machine, arguments)
    return 0 if arguments.quick or all(goal["met"] for goal in outcome.goals) else 1


if __name__ == "__main__":
    sys.exit(main())
