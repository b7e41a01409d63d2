"""``kvferry serve``: a supervised local cluster in the foreground.

Owns the messages at start and end, and the signals: the first SIGINT, SIGTERM or SIGHUP lets requests finish, the second
SIGINT or SIGTERM ends everything at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import TextIO

from core.config import KVFerryConfig
from core.errors import ConfigError, StartFailed
from core.log import configure_logging
from core.process_signals import SIGNALS, own_signals
from kvferry.local import LocalCluster
from kvferry.machine import format_bytes, memory_limit_bytes

CHECK_INTERVAL_S = 1.0  # between two looks whether the processes are still kept
_MARGIN_S = 5.0  # on top of a process's own drain timeout


class _Hurry(BaseException):
    """A second signal has arrived."""


def serve_forever(config: KVFerryConfig) -> int:
    """Start the cluster, print its address, and serve until a signal arrives; returns the exit code.

    Raises:
        ConfigError: a setting is wrong, or the model cannot be found.
        StartFailed: a process did not become ready, or the thread that keeps the processes has died.
    """
    configure_logging(config.log.level, "serve", is_json=config.log.format == "json")
    cluster = LocalCluster(config, supervise=True, inherit_logs=True)
    cluster.prepare()  # before a signal is handled here: until then there is no process to end
    _print_reserved(cluster)
    is_leaving = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if is_leaving.is_set():
            _ignore_signals()
            raise _Hurry
        is_leaving.set()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a terminal that closes often sends two

    for number in own_signals():
        signal.signal(number, on_signal)
    grace_s, router_grace_s = config.worker.drain_timeout_s + _MARGIN_S, config.router.drain_timeout_s + _MARGIN_S
    try:
        cluster.start(is_cancelled=is_leaving.is_set)
        if not is_leaving.is_set():
            _print_address(cluster, config)
            while not is_leaving.wait(CHECK_INTERVAL_S):
                cluster.check()
            _say("draining; press Ctrl-C again to stop at once")
    except _Hurry:
        grace_s = router_grace_s = 0.0
    except (StartFailed, ConfigError):
        if not is_leaving.is_set():  # otherwise a process received the same signal as this one
            raise
    finally:
        with contextlib.suppress(_Hurry):
            cluster.stop(grace_s=grace_s, router_grace_s=router_grace_s)
            _ignore_signals()
    _print_failures(cluster)
    return 0


def _ignore_signals() -> None:
    """Ignore further signals while the cluster ends."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _say(text: str, file: TextIO | None = None) -> None:
    """Print a line. If its reader is gone (``| tee`` gets Ctrl-C too) or the disk is full, the cluster goes on without it."""
    file = file or sys.stdout
    try:
        print(text, file=file, flush=True)
    except OSError:
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), file.fileno())  # takes what is left, which would fail again at the exit


def _print_reserved(cluster: LocalCluster) -> None:
    parts = cluster.reserved_bytes
    if parts:
        total, limit = format_bytes(sum(parts.values())), format_bytes(memory_limit_bytes())
        _say(f"memory beside the model: {', '.join(parts)}; {total} of {limit}")


def _print_address(cluster: LocalCluster, config: KVFerryConfig) -> None:
    model = config.model.served_name or config.model.name
    workers = ", ".join(worker.engine_id for worker in cluster.workers)
    _say(f"serving {model} at {cluster.base_url}/v1 ({workers})")


def _print_failures(cluster: LocalCluster) -> None:
    """Name the processes that have ended on their own."""
    for name, ends in cluster.ends.items():
        count = f" {len(ends)} times, at last" if len(ends) > 1 else ""
        _say(f"kvferry: {name} ended by itself{count}: it {ends[-1]}", sys.stderr)
