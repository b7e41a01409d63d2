"""Log lines and counters for workers that join, leave, stall or resume."""

from __future__ import annotations

import logging

from core.log import event
from router.dispatch.membership import Joined, Left, Resumed, Stalled, Switched
from router.metrics import RouterMetrics

logger = logging.getLogger("router.dispatch.worker_gateway")


class WorkerLog:
    """Logs and counts changes of the membership."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics

    def note(self, change: Joined | Left | Stalled | Resumed | Switched) -> None:
        """Log and count a change."""
        worker = change.worker
        role, engine_id = worker.role, worker.key.engine_id
        match change:
            case Joined():
                logger.info(event("worker_joined", role=role, engine_id=engine_id, incarnation=f"{worker.key.incarnation:x}"))
            case Stalled():
                self._metrics.count_stalled(role)
                logger.warning(event("worker_stalled", role=role, engine_id=engine_id, reason=worker.progress.why))
            case Resumed():
                logger.warning(event("worker_resumed", role=role, engine_id=engine_id))
            case Switched():
                self._metrics.count_switched(role)
                logger.info(event("worker_switched", role=role, before=change.before, engine_id=engine_id))
            case Left(is_back=True):
                logger.warning(event("worker_reconnected", role=role, engine_id=engine_id))
            case Left():
                if not change.is_orderly:
                    self._metrics.count_lost(role)
                write = logger.info if change.is_orderly else logger.warning
                write(event("worker_left", role=role, engine_id=engine_id, reason=change.reason))
