"""The worker process around an engine: I/O thread, operations port, start-up and shutdown order.

Carries out the actions of ``core.worker.state``. Knows nothing of roles, of connectors, and of how an engine is built: a
``WorkerSource`` brings them. Runs in the event loop of the process's main thread; the engine's thread reaches it by
``call_soon_threadsafe`` only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from core.connector import WorkerContext
from core.descriptors import report_full_table
from core.errors import EngineDead, ProtocolError
from core.log import event
from core.machine_driver import ActionHandler, ByType, EventHandler, LoopTimers, MachineDriver, TimerDue
from core.process_signals import handled_signals
from core.rate_limit import LimitedLog
from core.release import package_version
from core.request import EngineCoreOutput
from core.wire.codec import WIRE_VERSION, decode_router_frame, request_of_frame
from core.wire.engine_calls import EngineReply
from core.wire.messages import EncodeDone, EncodeFailed, PrefillDone, RequestFailed
from core.worker.actions import (
    Action,
    EndUnanswered,
    ExpectTransfer,
    MeetWorker,
    ReleaseEmbeddings,
    ReleaseTransfers,
    RenewTransfers,
    Send,
    Stop,
    SubmitAbort,
    SubmitAdd,
    SubmitCall,
)
from core.worker.link_monitor import SILENT
from core.worker.ops_http import OpsResponse, OpsServer, Query
from core.worker.parts import Announce, EngineEvents, WorkerParts, WorkerSource
from core.worker.reply_frames import encode_reply
from core.worker.role_ops import show_role, switch_role
from core.worker.router_sockets import RouterSockets
from core.worker.router_watch import RouterWatch
from core.worker.state import WorkerState
from core.worker.traces import WorkerTraces

logger = logging.getLogger(__name__)

ENGINE_STOP_TIMEOUT_S = 10.0
LINGER_S = 1.0  # for the last replies and the goodbye
_NOT_REGISTERED = "not registered"


class _LeaveSignal:
    """Leave in good order, or at once if the worker is leaving already."""


class WorkerProcess:
    """One worker process, whose engine comes from ``source``."""

    def __init__(self, context: WorkerContext, source: WorkerSource) -> None:
        self._context = context
        self._source = source
        self._clock = context.clock
        self._limited_log = LimitedLog(logger, context.clock.now)
        self._ops = OpsServer(
            {
                ("GET", "/health"): self._health,
                ("GET", "/started"): self._started,
                ("GET", "/ready"): self._ready,
                ("GET", "/metrics"): self._metrics,
                ("GET", "/version"): self._version,
                ("POST", "/drain"): self._drain,
                ("GET", "/role"): self._role,
            },
            query_routes={("POST", "/role"): self._switch_role},
        )
        self._ops_address = ""
        self._sockets = RouterSockets(context.config.worker.router_addresses, self, keys=context.keys)
        self._router_watch = RouterWatch()
        self._parts: WorkerParts | None = None
        self._is_opening = False
        self._state: WorkerState | None = None
        self._traces = WorkerTraces(context.tracer, context.engine_id)
        self._driver: MachineDriver[None] | None = None
        self._exit_code: asyncio.Future[int] | None = None

    # ---- start and stop ----------------------------------------------------------------------------------------------

    async def run(self, announce: Announce) -> int:
        """Serve until told to leave; returns the exit code: 0 after a drain, 1 after the engine's death.

        Raises:
            KVFerryError: the worker cannot start.
        """
        loop = asyncio.get_running_loop()
        self._exit_code = loop.create_future()
        report_full_table(loop)
        with handled_signals(loop, self._on_signal):
            return await self._live(loop, announce)

    async def _live(self, loop: asyncio.AbstractEventLoop, announce: Announce) -> int:
        assert self._exit_code is not None
        section = self._context.config.worker
        self._ops_address = await self._ops.start(section.ops_host, section.ops_port)
        logger.info(event("ops_port_open", address=self._ops_address))
        announce({"ops_address": self._ops_address})
        try:
            if not await self._start(loop):
                return 0
            return await self._exit_code
        finally:
            await self._shut_down()

    async def _start(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Load, then connect; returns False if a signal asked the worker to leave in the meantime.

        In that case a load on a thread goes on until ``exit_process`` ends it.
        """
        assert self._exit_code is not None
        loading = asyncio.ensure_future(self._source.load())
        pending: list[asyncio.Future[Any]] = [loading, self._exit_code]
        await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if self._exit_code.done():
            loading.cancel()
            return False
        loading.result()
        events = EngineEvents(
            on_outputs=lambda outputs: self._from_engine(loop, self._on_outputs, outputs),
            on_call_reply=lambda reply: self._from_engine(loop, self._on_call_reply, reply),
            on_death=lambda error: self._from_engine(loop, self._on_engine_death, error),
            state=lambda: self._state,
        )
        self._is_opening = True
        parts = self._parts = await self._source.open(events)
        self._state = WorkerState(
            parts.register(self._ops_address), parts.handler, parts.limits, parts.load, parts.metrics, contents=parts.contents
        )
        self._driver = self._make_driver(self._state, parts)
        parts.engine.start()
        self._sockets.start()
        return True

    async def _shut_down(self) -> None:
        """Engine first, so that no step uses what the connector takes down; sockets late, so that the last replies leave."""
        if self._driver is not None:
            self._driver.cancel_timer()
        if self._parts is not None:
            has_ended = await asyncio.to_thread(self._parts.engine.stop, ENGINE_STOP_TIMEOUT_S)
            if not has_ended:
                logger.error(event("engine_stuck", timeout_s=ENGINE_STOP_TIMEOUT_S))
        if self._is_opening:
            await self._source.close()
        await self._sockets.close(LINGER_S)
        await self._ops.stop()
        logger.info(event("stopped", engine_id=self._context.engine_id))

    def _on_signal(self) -> None:
        """Leave in good order at the first signal, at once at the second."""
        assert self._exit_code is not None
        if self._driver is None:
            self._stop(0)
        else:
            self._driver.handle(_LeaveSignal())

    # ---- what the links tell (LinkEvents) ------------------------------------------------------------------------------

    def on_connect(self, link: str) -> None:
        """Introduce the worker at a router address."""
        if self._state is not None:
            self._perform(self._state.connect(link, self._clock.now()))

    def on_disconnect(self, link: str) -> None:
        """A router address is gone."""
        if self._state is not None:
            self._perform(self._state.disconnect(link, self._clock.now()))

    def on_frame(self, link: str, frames: list[bytes]) -> None:
        """Handle what a router has sent; nothing it sends may end the worker."""
        if self._state is None:
            return
        try:
            if len(frames) != 1:
                raise ProtocolError(f"message of {len(frames)} frames, expected 1")
            message = decode_router_frame(frames[0])
        except ProtocolError as error:
            request_id = request_of_frame(frames[0]) if frames else ""
            self._perform(self._state.on_bad_frame(link, error, self._clock.now(), request_id))
            return
        now = self._clock.now()
        actions = self._state.on_router_message(link, message, now)
        self._traces.on_message(message, now, is_taken=bool(actions))  # first: an action may be the reply that ends a span
        self._perform(actions)

    def on_links_death(self, error: BaseException) -> None:
        """End the process as after the engine's death: a worker that heartbeats but receives nothing is useless."""
        self._on_engine_death(error)

    # ---- what the engine tells -----------------------------------------------------------------------------------------

    def _from_engine(self, loop: asyncio.AbstractEventLoop, handler: Callable[..., None], news: object) -> None:
        """Pass an event of the engine's thread on to the event loop, in order."""
        if not loop.is_closed():
            loop.call_soon_threadsafe(handler, news)

    def _on_outputs(self, outputs: list[EngineCoreOutput]) -> None:
        if self._driver is not None:
            self._driver.handle(outputs)

    def _on_call_reply(self, reply: EngineReply | RequestFailed) -> None:
        if self._driver is not None:
            self._driver.handle(reply)

    def _on_engine_death(self, error: BaseException) -> None:
        if self._state is not None:
            self._perform(self._state.on_engine_death(error))

    # ---- carrying actions out ------------------------------------------------------------------------------------------

    def _make_driver(self, state: WorkerState, parts: WorkerParts) -> MachineDriver[None]:
        """Route events to the state, and its actions to engine, connectors and sockets."""
        engine, connector, ec_connector = parts.engine, parts.connector, parts.ec_connector
        events: ByType[EventHandler] = ByType(
            {
                list: state.on_outputs,
                EngineReply: state.on_call_reply,
                RequestFailed: state.on_call_reply,
                TimerDue: lambda event, now: self._on_timer(state, now),
                _LeaveSignal: lambda event, now: state.start_drain(now, 0.0) if state.is_draining else state.start_drain(now),
            }
        )
        actions: ByType[ActionHandler[None]] = ByType(
            {
                Send: self._send,
                SubmitAdd: lambda action: self._submit(engine.submit_add, action.requests),
                SubmitAbort: lambda action: self._submit(engine.submit_abort, action.engine_request_ids),
                EndUnanswered: lambda action: self._traces.on_unanswered(action.request_ids, action.outcome, self._clock.now()),
                Stop: lambda action: self._stop(action.exit_code),
                object: lambda action: None,  # of a connector that this worker lacks
            }
        )
        if (api := parts.api) is not None:
            actions[SubmitCall] = lambda action: self._submit(api.submit_call, action.call)
            actions[ReleaseTransfers] = lambda action: api.submit_release(action.transfer_ids)
        if connector is not None:
            actions[ExpectTransfer] = lambda action: connector.expect(action.handoff)
            actions[MeetWorker] = lambda action: connector.meet(action.producer)
            actions[ReleaseTransfers] = lambda action: connector.release(action.transfer_ids)
            actions[RenewTransfers] = lambda action: connector.renew(action.transfer_ids)
        if ec_connector is not None:
            actions[ReleaseEmbeddings] = lambda action: ec_connector.release(action.sources)
        timers = LoopTimers(self._clock)
        return MachineDriver(events, actions, lambda: state.next_timer(timers.now()), timers, self._on_bug)

    def _on_timer(self, state: WorkerState, now: float) -> Sequence[Action]:
        self._sockets.note_events()
        is_well = state.is_draining or state.num_registered_routers > 0
        self._router_watch.look(now, is_well=is_well, reasons=self._why_unreachable)
        return state.on_timer(now)

    def _why_unreachable(self) -> dict[str, str]:
        """Return the reasons why routers do not take the worker in, without refusals, which are logged as they come."""
        reasons = self._why_not_registered()
        return {address: reason for address, (reason, is_refusal) in reasons.items() if not is_refusal}

    def _refusals(self) -> dict[str, str]:
        """Return the reasons of routers that refuse the worker, without those that have gone since."""
        return {address: reason for address, (reason, is_refusal) in self._why_not_registered().items() if is_refusal}

    def _why_not_registered(self) -> dict[str, tuple[str, bool]]:
        """Return the reasons by address, each with whether a router has given it."""
        assert self._state is not None
        reasons = {}
        for address, reason in self._sockets.why_unusable().items():
            refusal = "" if reason else self._state.refusals.get(address, "")
            reasons[address] = (reason or refusal or SILENT, bool(refusal))
        return reasons

    def _on_bug(self, bug: Exception) -> None:
        """End the process, as the engine's death does: the state is unknown, and the event loop would only log the bug."""
        logger.error(event("worker_bug"), exc_info=bug)
        try:
            self._on_engine_death(bug)
        finally:
            self._stop(1)

    def _perform(self, actions: Sequence[Action]) -> None:
        assert self._driver is not None
        self._driver.carry_out(actions)

    def _submit(self, submit: Callable[[Any], None], what: object) -> None:
        try:
            submit(what)
        except EngineDead:
            logger.debug(event("engine_dead_already"))  # its death is on the way here and answers every request

    def _send(self, action: Send) -> None:
        assert self._state is not None
        message = action.message
        frames, errors = encode_reply(message)
        self._traces.on_reply(message, self._clock.now(), unsendable=errors)
        sent = [self._sockets.send(action.link, frame) for frame in frames]
        for request_id, error in errors.items():
            self._perform(self._state.on_unsendable(action.link, request_id, error))
        if not all(sent) and isinstance(message, list | PrefillDone | RequestFailed | EncodeDone | EncodeFailed | EngineReply):
            name = "tokens of a step" if isinstance(message, list) else type(message).__name__
            self._limited_log.warning("undeliverable", key=action.link, router=action.link, message=name)

    def _stop(self, exit_code: int) -> None:
        if self._exit_code is not None and not self._exit_code.done():
            self._exit_code.set_result(exit_code)

    # ---- operations port -------------------------------------------------------------------------------------------------

    def _health(self) -> OpsResponse:
        """Answer the liveness probe: 503 if only a restart helps. Routers and other workers must not affect the status."""
        reason = self._why_not_alive()
        if reason is not None:
            logger.error(event("unhealthy", reason=reason))
            return OpsResponse.of_json(HTTPStatus.SERVICE_UNAVAILABLE, {"status": reason})
        answer: dict[str, object] = {"status": "ok", "engine_id": self._context.engine_id}
        refusals = self._refusals() if self._state is not None else {}
        if refusals:
            answer["refused_by"] = refusals
        return OpsResponse.of_json(HTTPStatus.OK, answer)

    def _started(self) -> OpsResponse:
        """Answer the start-up probe: 200 once the model is loaded. Routers must not affect the answer."""
        if self._state is None:
            return OpsResponse.of_json(HTTPStatus.SERVICE_UNAVAILABLE, {"status": "loading"})
        return OpsResponse.of_json(HTTPStatus.OK, {"status": "started"})

    def _ready(self) -> OpsResponse:
        reason = self._why_not_ready()
        if reason is None:
            return OpsResponse.of_json(HTTPStatus.OK, {"status": "ready"})
        answer: dict[str, object] = {"status": reason}
        if reason == _NOT_REGISTERED:
            answer["routers"] = {address: why for address, (why, _) in self._why_not_registered().items()}
        return OpsResponse.of_json(HTTPStatus.SERVICE_UNAVAILABLE, answer)

    def _why_not_alive(self) -> str | None:
        if self._parts is None:
            return None  # still loading
        if not self._parts.engine.is_alive():
            return "engine dead"
        progress = self._parts.engine.reading()
        if progress.is_restart_due:
            return f"engine stuck: no progress for {progress.stalled_s:.0f} s, bound {progress.restart_bound_s:.0f} s"
        return None

    def _why_not_ready(self) -> str | None:
        if self._state is None:
            return "loading"
        reason = self._why_not_alive()
        if reason is not None:
            return reason
        if self._state.is_draining:
            return "draining"
        return None if self._state.num_registered_routers else _NOT_REGISTERED

    def _metrics(self) -> OpsResponse:
        return OpsResponse(HTTPStatus.OK, generate_latest(self._context.metrics), CONTENT_TYPE_LATEST)

    def _version(self) -> OpsResponse:
        return OpsResponse.of_json(HTTPStatus.OK, {"version": package_version(), "wire_version": WIRE_VERSION})

    def _role(self) -> OpsResponse:
        if self._state is None:
            return OpsResponse.of_json(HTTPStatus.SERVICE_UNAVAILABLE, {"status": "loading"})
        return show_role(self._state)

    def _switch_role(self, query: Query) -> OpsResponse:
        if self._state is None:
            return OpsResponse.of_json(HTTPStatus.SERVICE_UNAVAILABLE, {"status": "loading"})
        return switch_role(self._state, query, self._clock.now(), self._perform)

    def _drain(self) -> OpsResponse:
        """Begin to leave; a second request does not hurry it."""
        if self._state is None:
            self._stop(0)
            return OpsResponse.of_json(HTTPStatus.ACCEPTED, {"status": "stopping"})
        if not self._state.is_draining:
            self._perform(self._state.start_drain(self._clock.now()))
        return OpsResponse.of_json(HTTPStatus.ACCEPTED, {"status": "draining", "requests": self._state.num_requests})
