"""``kvferry router`` with ``router.processes`` above 1: starts the processes, restarts one that dies, and drains all.

Owns the order of start and end. The settings of each process are ``kvferry.router_plan``'s.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable, Mapping
from types import FrameType

import msgspec

from core.clock import SystemClock
from core.config import KVFerryConfig, dump_config
from core.config_tree import STDIN
from core.errors import StartFailed
from core.log import event
from core.process_signals import SIGNALS, own_signals
from kvferry.processes import Child, ChildSpec, ProcessKeeper, RestartBackoff
from kvferry.router_plan import RouterPlan

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_MARGIN_S = 5.0  # on top of a process's own drain timeout


class _Stop(BaseException):
    """A signal has arrived: the first ends the wait, the second the drain."""


class RouterGroup:
    """The router processes of one port, as children of this process. ``start`` before anything else; then ``stop``."""

    def __init__(self, config: KVFerryConfig) -> None:
        self._config = config
        self._plan = RouterPlan(config.router)
        local = config.local
        self._backoffs = {
            name: RestartBackoff(local.restart_backoff_s, local.restart_backoff_max_s) for name in self._plan.names
        }
        self._is_started = False
        self._keeper = ProcessKeeper(SystemClock(), self._on_exit)

    @property
    def pids(self) -> dict[str, int]:
        """The live processes by name."""
        children = {name: self._keeper.current(name) for name in self._plan.names}
        return {name: child.pid for name, child in children.items() if child is not None}

    def start(self) -> dict[str, str]:
        """Start all processes; return the clients' address, and those for workers and operators, separated by commas.

        Raises:
            StartFailed: one of them has ended, or was not up within ``local.ready_timeout_s``.
        """
        deadline = time.monotonic() + self._config.local.ready_timeout_s
        first, *others = self._plan.names
        children = [self._keeper.start(self._spec(first))]
        found = [self._addresses(children[0], deadline)]
        children += [self._keeper.start(self._spec(name)) for name in others]
        found += [self._addresses(child, deadline) for child in children[1:]]
        self._is_started = True  # from here on a death is followed by a restart; what follows finds one before
        for child in children:
            if child.ended.is_set():
                raise _failed(child)
        several = {key: ",".join([addresses[key] for addresses in found]) for key in ("worker_address", "ops_address")}
        return {"http_address": found[0]["http_address"], **several}

    def wait(self) -> None:
        """Wait for a signal, whose handler must raise.

        Raises:
            StartFailed: an error has ended the thread that keeps the processes, and all of them with it.
        """
        self._keeper.has_failed.wait()
        self._keeper.check()

    def stop(self, grace_s: float) -> None:
        """Let all processes drain, and kill those that take longer than ``grace_s``. Idempotent."""
        self._keeper.end(self._plan.names, grace_s)

    def close(self) -> None:
        """Kill what is left, and end the thread that keeps the processes. Idempotent."""
        self._keeper.close()

    def _addresses(self, child: Child, deadline: float) -> Mapping[str, str]:
        while not child.addresses.done() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if not child.addresses.done():
            raise StartFailed(f"{child.spec.name} did not tell its address in time")
        if child.addresses.exception() is not None:
            raise _failed(child)
        addresses = child.addresses.result()
        self._plan.pin(child.spec.name, addresses)
        return addresses

    def _spec(self, name: str) -> ChildSpec:
        """Return the start options of a process; settings go through standard input, so that no key is in a file."""
        command = [sys.executable, "-P", "-m", "kvferry", "router", "--config", str(STDIN)]
        return ChildSpec(name, command, None, lambda: dump_config(self._config_of(name)))

    def _config_of(self, name: str) -> KVFerryConfig:
        return msgspec.structs.replace(self._config, router=self._plan.section(name))

    def _on_exit(self, child: Child, lived_s: float) -> float | None:
        return self._backoffs[child.spec.name].next_delay_s(lived_s) if self._is_started else None


def _failed(child: Child) -> StartFailed:
    return StartFailed(f"{child.spec.name} did not start: it {child.describe_end()}")


def run_group(config: KVFerryConfig, announce: Callable[[Mapping[str, str]], None]) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP; a second one of the first two stops at once. Returns the exit code.

    Raises:
        StartFailed: a process could not start, or the thread that keeps them has died.
    """
    group = RouterGroup(config)

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a terminal that closes often sends two
        raise _Stop

    try:
        try:
            for number in own_signals():
                signal.signal(number, on_signal)
            addresses = group.start()
            announce(addresses)
            logger.info(event("routers_started", **addresses))
            group.wait()
        except _Stop:
            group.stop(config.router.drain_timeout_s + _MARGIN_S)
    except _Stop:
        pass  # what has not drained is killed
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        group.close()
    return 0
