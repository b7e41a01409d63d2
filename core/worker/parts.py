"""The parts of a worker process, and where they come from: the interface between ``core.worker.process`` and an engine.

An engine is our own (``core.worker.engine_worker``), or one that runs as a process of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from core.connector import Connector
from core.ec_connector import ECConnector
from core.engine.step_watch import StepReading
from core.kv.content_feed import ContentFeed
from core.metrics import WorkerMetrics
from core.request import EngineCoreOutput, NewRequest
from core.wire.engine_calls import EngineCall, EngineReply
from core.wire.messages import Register, RegisterEncoder, RequestFailed
from core.worker.actions import AdmissionLimits, EngineLoad
from core.worker.role import RoleHandler
from core.worker.state import WorkerState


class EnginePort(Protocol):
    """An engine as its worker process uses it."""

    def start(self) -> None:
        """Begin to serve."""

    def stop(self, timeout_s: float) -> bool:
        """End; return False if it has not ended in this time. May block."""

    def is_alive(self) -> bool:
        """Return False once it serves nothing any more."""

    def reading(self) -> StepReading:
        """Return whether it makes progress."""

    def submit_add(self, requests: Sequence[NewRequest]) -> None:
        """Begin requests; raises EngineDead."""

    def submit_abort(self, request_ids: Sequence[str]) -> None:
        """End requests and calls; raises EngineDead."""


class EngineApiPort(Protocol):
    """The API of an engine that has one of its own."""

    def submit_call(self, call: EngineCall) -> None:
        """Begin a call; raises EngineDead. ``EnginePort.submit_abort`` ends it."""

    def submit_release(self, transfer_ids: Sequence[str]) -> None:
        """Free the blocks of handoffs that no engine will read; those of unknown ones are ignored."""


@dataclass(frozen=True, slots=True)
class EngineEvents:
    """What an engine tells the worker process, on any thread. ``state`` returns the process's state, None at the start."""

    on_outputs: Callable[[list[EngineCoreOutput]], None]
    on_call_reply: Callable[[EngineReply | RequestFailed], None]
    on_death: Callable[[BaseException], None]
    state: Callable[[], WorkerState | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """A worker that is ready to serve. ``register`` takes the address of the operations port."""

    engine: EnginePort
    handler: RoleHandler
    register: Callable[[str], Register | RegisterEncoder]
    limits: AdmissionLimits
    load: Callable[[], EngineLoad]
    metrics: WorkerMetrics
    api: EngineApiPort | None = None
    connector: Connector | None = None
    ec_connector: ECConnector | None = None
    contents: ContentFeed | None = None  # what routers learn of the engine's prefix cache


class WorkerSource(ABC):
    """Brings the parts of a worker, in this order: ``load``, ``open``, ``close``."""

    @abstractmethod
    async def load(self) -> None:
        """Load what takes seconds. May be cancelled.

        Raises:
            KVFerryError: the worker cannot start.
        """

    @abstractmethod
    async def open(self, events: EngineEvents) -> WorkerParts:
        """Start what serves peers, and return the parts; the engine is not started.

        Raises:
            KVFerryError: the worker cannot start.
        """

    @abstractmethod
    async def close(self) -> None:
        """End what ``open`` has started, after the engine."""


Announce = Callable[[Mapping[str, str]], None]
