"""``kvferry serve``: a supervised local cluster in the foreground.

Owns the signals: the first SIGINT or SIGTERM lets requests finish, the second ends everything at once.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from types import FrameType

from core.config import KVFerryConfig
from core.log import configure_logging
from kvferry.local import LocalCluster

_MARGIN_S = 5.0  # on top of a process's own drain timeout


class _Hurry(BaseException):
    """A second signal has come."""


def serve_forever(config: KVFerryConfig) -> int:
    """Start the cluster, say where it is, and serve until a signal comes; returns the exit code.

    Raises:
        ConfigError: a setting is wrong, or the model cannot be found.
        StartFailed: a process did not become ready.
    """
    configure_logging(config.log.level, "serve", is_json=config.log.format == "json")
    is_leaving = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if is_leaving.is_set():
            raise _Hurry
        is_leaving.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    cluster = LocalCluster(config, supervise=True, inherit_logs=True)
    try:
        cluster.start(is_cancelled=is_leaving.is_set)
        if not is_leaving.is_set():
            _say_where(cluster, config)
            is_leaving.wait()
            print("draining; press Ctrl-C again to stop at once", flush=True)
    except _Hurry:
        cluster.stop(grace_s=0.0)
        return 0
    with contextlib.suppress(_Hurry):
        cluster.stop(
            grace_s=config.worker.drain_timeout_s + _MARGIN_S, router_grace_s=config.router.drain_timeout_s + _MARGIN_S
        )
    return 0


def _say_where(cluster: LocalCluster, config: KVFerryConfig) -> None:
    model = config.model.served_name or config.model.name
    workers = ", ".join(worker.engine_id for worker in cluster.workers)
    print(f"serving {model} at {cluster.base_url}/v1 ({workers})", flush=True)
