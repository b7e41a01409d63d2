"""A worker with our own engine: its thread, its connectors, and the process around them.

Owns the order in which they are started. The role's ``worker.py`` passes a function that loads the model and puts the parts
together.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from core.clock import SystemClock
from core.config import KVFerryConfig
from core.connector import Connector, WorkerContext
from core.ec_connector import ECConnector
from core.engine.build import apply_cpu_threads, device_of
from core.engine.step_watch import FirstSteps
from core.engine.thread import EngineThread
from core.freed_memory import return_freed_memory
from core.gc_freeze import freeze_loaded_objects
from core.ids import RandomIds, new_incarnation
from core.log import event
from core.metrics import WorkerMetrics
from core.tracing import open_tracer
from core.wire.messages import Role
from core.worker.builder import Assembled, load_in_thread
from core.worker.parts import Announce, EngineEvents, WorkerParts, WorkerSource
from core.worker.process import WorkerProcess
from core.worker.registration import admission_limits, registration
from core.worker.stats import WorkerStats

logger = logging.getLogger(__name__)


class EngineWorker(WorkerSource):
    """Our own engine. ``assemble`` loads the model and takes seconds; it runs on a thread of its own."""

    def __init__(self, context: WorkerContext, assemble: Callable[[], Assembled]) -> None:
        self._context = context
        self._assemble = assemble
        self._assembled: Assembled | None = None

    async def load(self) -> None:
        """See ``WorkerSource``."""
        self._assembled = await asyncio.wrap_future(load_in_thread(self._assemble))

    async def open(self, events: EngineEvents) -> WorkerParts:
        """See ``WorkerSource``."""
        context, assembled = self._context, self._assembled
        assert assembled is not None, "it is loaded first"
        engine = self._new_thread(assembled, events)
        for connector in self._connectors():
            connector.worker.set_wakeup(engine.wake)
            await connector.start()
        if assembled.built.image_decode_thread is not None:
            assembled.built.image_decode_thread.start(engine.wake)
        if assembled.built.grammars is not None:
            assembled.built.grammars.set_wakeup(engine.wake)
        stats = WorkerStats(assembled, engine, events.state)
        metrics = WorkerMetrics(context.metrics, stats.readings())
        stats.count_fallbacks(context.metrics)
        return WorkerParts(
            engine=engine,
            handler=assembled.handler,
            register=lambda ops_address: registration(context, assembled, ops_address),
            limits=admission_limits(context, assembled),
            load=stats.load,
            metrics=metrics,
            connector=assembled.connector,
            ec_connector=assembled.ec_connector,
            contents=assembled.built.contents,
        )

    async def close(self) -> None:
        """See ``WorkerSource``."""
        for connector in self._connectors():
            await connector.stop()

    def _new_thread(self, assembled: Assembled, events: EngineEvents) -> EngineThread:
        config = self._context.config
        return EngineThread(
            assembled.built.engine,
            on_outputs=events.on_outputs,
            on_death=events.on_death,
            prepare=lambda: _log_threads(apply_cpu_threads(config.worker)),
            clock=self._context.clock,
            first_steps=FirstSteps(
                bound_s=config.worker.stuck_step_s,
                compiles_shapes=device_of(config.model).type != "cpu",
                known=assembled.built.known_step,
            ),
        )

    def _connectors(self) -> list[Connector | ECConnector]:
        assert self._assembled is not None, "it is loaded first"
        found = (self._assembled.connector, self._assembled.ec_connector)
        return [connector for connector in found if connector is not None]


def _log_threads(num_threads: int) -> None:
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    logger.info(event("engine_thread", torch_threads=num_threads, cores=cores))


def run_worker(config: KVFerryConfig, role: Role, assemble: Callable[[WorkerContext], Assembled], announce: Announce) -> int:
    """Run a worker process with the system's clock and randomness until it leaves; returns its exit code.

    ``assemble`` loads the model and puts the parts together.

    Raises:
        KVFerryError: it cannot start.
    """
    ids = RandomIds()
    clock = SystemClock()
    tracer = open_tracer(config.tracing, role, config.worker.engine_id, clock)
    context = WorkerContext(
        config=config,
        role=role,
        engine_id=config.worker.engine_id,
        incarnation=new_incarnation(ids),
        clock=clock,
        ids=ids,
        metrics=CollectorRegistry(),
        tracer=tracer,
    )

    def load() -> Assembled:
        assembled = assemble(context)
        freeze_loaded_objects()
        return_freed_memory()
        return assembled

    try:
        return asyncio.run(WorkerProcess(context, EngineWorker(context, load)).run(announce))
    finally:
        if tracer is not None:
            tracer.close()
