"""The router's socket, timer and streams: carries messages between workers, the router core and HTTP handlers.

Owns the ZeroMQ socket, the tasks that read it and call the timer, and the pending updates of each HTTP request. All decisions
are in ``router.dispatch.core``.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from core.clock import Clock
from core.config_router import RouterSection
from core.errors import Cancelled, KVFerryError, NoWorker, ProtocolError, RequestError
from core.log import event
from core.tracing import TraceContext, Tracer
from core.wire import codec
from core.wire.connections import ServerConnections, monitor_of
from core.wire.contexts import started_context
from core.wire.curve import ClusterKeys
from core.wire.engine_calls import EngineCall
from core.wire.messages import ErrorInfo, Generate, RouterMessage
from core.wire.sockets import AsyncContext, AsyncSocket, SocketOptions, bind, router_socket
from router.dispatch.core import Action, RefuseVersion, RouterCore, RouterLimits, Transmit, requests_of
from router.dispatch.engine_api import SHUTS_DOWN, EngineApi
from router.dispatch.engine_calls import Answered
from router.dispatch.frame_reader import FrameReader
from router.dispatch.gauges import add_gauges
from router.dispatch.membership import Joined, Left, Resumed, Stalled, Switched
from router.dispatch.observer import ObservedRequest, RequestObserver
from router.dispatch.peer_log import PeerLog
from router.dispatch.policy import unpaired
from router.dispatch.request_state import Deliver, DeliverTokens, EncodeEnded, Ended, Moved, RequestState, Retried
from router.dispatch.route_waits import Place, RouteWaits
from router.dispatch.types import Submission, Update, token_update
from router.dispatch.worker_log import WorkerLog
from router.metrics import RouterMetrics
from router.planner.gauges import add_planner_gauges

logger = logging.getLogger(__name__)

_PROMPTS_PER_TURN = 8  # prompts of one HTTP request that are started without a pause
_EVENTS_PER_TURN = 256  # of connections
RECONNECT_S = 0.25  # a worker that only lost its connection has reconnected by then


class UpdateTaker(Protocol):
    """Takes updates at once, without a task; returns False for those that a task has to handle. Neither may raise."""

    def take(self, prompt_index: int, update: Update) -> bool:
        """Take any update."""
        ...

    def take_tokens(self, prompt_index: int, token_ids: Sequence[int]) -> bool:
        """Take tokens that end nothing, of a prompt with one choice."""
        ...


class Generation:
    """The updates of all prompts of one HTTP request, in the order of their arrival."""

    def __init__(self, gateway: WorkerGateway, client_id: str, request_ids: Sequence[str]) -> None:
        self.client_id = client_id
        self.request_ids = tuple(request_ids)
        self._gateway = gateway
        self._updates: list[tuple[int, Update]] = []
        self._has_updates = asyncio.Event()
        self._taker: UpdateTaker | None = None

    async def updates(self, taker: UpdateTaker | None = None) -> list[tuple[int, Update]]:
        """Wait for updates and return all pending ones, as (index of the prompt, update).

        Those that come during the wait are offered to ``taker`` first; the wait ends with one that it does not take.
        """
        self._taker = taker
        try:
            await self._has_updates.wait()
        finally:
            self._taker = None
        self._has_updates.clear()
        updates, self._updates = self._updates, []
        return updates

    def finish_choice(self, prompt_index: int, choice_index: int) -> None:
        """End a choice at a stop string, here and at its worker."""
        self._gateway.finish_choice(self.request_ids[prompt_index], choice_index)

    def abort(self, reason: str) -> None:
        """Abort the prompts that still run; does nothing after the end."""
        for request_id in self.request_ids:
            self._gateway.abort(request_id, reason)

    def put(self, prompt_index: int, update: Update) -> None:
        """Add an update, unless it is taken at once."""
        if self._taker is not None and not self._updates and self._taker.take(prompt_index, update):
            return
        self._updates.append((prompt_index, update))
        self._has_updates.set()

    def put_tokens(self, prompt_index: int, token_ids: tuple[int, ...]) -> None:
        """Add tokens that end nothing, of a prompt with one choice, unless they are taken at once."""
        if self._taker is None or self._updates or not self._taker.take_tokens(prompt_index, token_ids):
            self.put(prompt_index, token_update(token_ids))


@dataclass(slots=True)
class _Listener:
    """Where the updates of a request go, and what is measured of it."""

    generation: Generation
    prompt_index: int
    observed: ObservedRequest


class WorkerGateway:
    """Runs a ``RouterCore`` on a ZeroMQ socket. All methods belong to one event loop."""

    def __init__(
        self,
        config: RouterSection,
        model: str,
        router_id: str,
        clock: Clock,
        metrics: RouterMetrics,
        keys: ClusterKeys | None = None,
    ) -> None:
        limits = RouterLimits.of(config)
        self.core = RouterCore(model, router_id, limits)
        self.engine_api = EngineApi(self.core, clock, self._perform, self.wait_for_change)
        self.worker_address = config.worker_address
        self._keys = keys
        self._clock = clock
        self._peer_log = PeerLog(clock)
        self._worker_log = WorkerLog(metrics)
        self._metrics = metrics
        self.observer = RequestObserver(self.core, model, clock, metrics)
        self._tick_s = limits.tick_s
        self._heartbeat_interval_s = limits.heartbeat_interval_s
        self._listeners: dict[str, _Listener] = {}
        self._context: AsyncContext | None = None
        self._socket: AsyncSocket | None = None
        self._monitor: AsyncSocket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopped = False
        self._waits = RouteWaits()
        self._num_refused = 0  # HTTP requests with a prompt that was refused and may yet be served
        self._num_openings = 0  # of the core, at the latest change that the waiting tasks were told of
        self._death: asyncio.Future[BaseException] | None = None
        add_gauges(metrics, self.core, clock)
        metrics.watch("router_processes", "Routers behind this one's port, itself included.", lambda: config.processes_at_port)
        add_planner_gauges(metrics, self.core, clock)

    def trace_with(self, tracer: Tracer) -> None:
        """Record spans of all requests from now on."""
        self.observer.trace_with(tracer)

    # ---- lifecycle ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bind the workers' socket and start the tasks.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._is_stopped = self.engine_api.is_closed = False
        self._context = started_context(AsyncContext)
        options = SocketOptions(max_message_bytes=codec.MAX_WORKER_FRAME_BYTES, keys=self._keys)
        self._socket = router_socket(self._context, options)
        try:
            self.worker_address = bind(self._socket, self.worker_address)
        except KVFerryError:
            self._close()
            raise
        self._monitor = monitor_of(self._socket, ServerConnections.EVENTS)
        reader = FrameReader(self._socket, self._clock, self._on_parts)
        work = (reader.run(), self._tick(reader), self._watch_connections(self._monitor))
        self._death = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(task) for task in work]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)

    async def stop(self) -> None:
        """Fail the remaining requests, send their aborts, and close the socket; later requests are refused. Idempotent."""
        self._is_stopped = True
        self._waits.note_change()
        self.engine_api.close()
        for request_id in list(self._listeners):
            self._give_up(request_id, NoWorker(SHUTS_DOWN))
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._close()

    async def wait_dead(self) -> BaseException:
        """Wait until a bug of the router has ended one of the tasks, and return the error."""
        assert self._death is not None, "the gateway has not been started"
        return await asyncio.shield(self._death)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if task not in self._tasks:
            return  # cancelled by ``stop``
        # A socket that is closed during a read cancels the reader.
        error = RuntimeError("cancelled by nobody") if task.cancelled() else task.exception() or RuntimeError("it returned")
        logger.error(event("router_task_died", task=task.get_name(), error=repr(error)))
        if self._death is not None and not self._death.done():
            self._death.set_result(error)

    def _close(self) -> None:
        if self._socket is not None and self._monitor is not None:
            self._socket.monitor(None, 0)  # before the reading end is closed
            self._monitor.close(linger=0)
            self._monitor = None
        if self._socket is not None:
            self._socket.close(linger=200)  # ms, to send the last aborts
            self._socket = None
        if self._context is not None:
            self._context.term()
            self._context = None

    @property
    def is_alive(self) -> bool:
        """True while the socket is served."""
        return bool(self._tasks) and not any(task.done() for task in self._tasks)

    @property
    def now(self) -> float:
        """The router's time, seconds."""
        return self._clock.now()

    @property
    def paused_s(self) -> float:
        """How long this router has paused so far, seconds."""
        return self.core.membership.pauses.paused_s(self._clock.now())

    @property
    def retry_after_s(self) -> int:
        """After how many seconds a client that found no route should retry."""
        return self.core.retry_after_s(self._clock.now())

    @property
    def num_requests(self) -> int:
        """Running requests, one per prompt."""
        return len(self._listeners)

    # ---- requests ----------------------------------------------------------------------------------------------------

    async def open(
        self,
        client_id: str,
        submissions: Sequence[Submission],
        wait: Callable[[Place], Awaitable[float]],
        trace: TraceContext | None = None,
    ) -> Generation:
        """Start all prompts of an HTTP request, or none. ``trace`` is the client's span. Yields to other tasks between prompts.

        After a pause of this router a prompt may find no worker, or none with room, since those that suit it are cut off, which
        may have come to light only now. It is tried again after each ``wait``, which calls ``wait_for_change`` with its
        argument and returns how much of the prompt's time is over then.

        Raises:
            RequestError: one of the prompts cannot be served now. Others as ``wait``.
        """
        generation = Generation(self, client_id, [submission.request_id for submission in submissions])
        now, waiting = self._clock.now(), list(submissions)
        place: Place | None = None
        self.observer.on_arrival(submissions, client_id, trace, now)
        try:
            for index in range(len(waiting)):
                if index and index % _PROMPTS_PER_TURN == 0:
                    await asyncio.sleep(0)
                while (actions := self._submit(waiting[index], now, has_waited=place is not None)) is None:
                    self._num_refused += place is None
                    place = self._waits.looked(place)
                    spent_s, now = await wait(place), self._clock.now()
                    waiting[index:] = [replace(submission, spent_s=spent_s) for submission in waiting[index:]]
                request_id = waiting[index].request_id
                self._listeners[request_id] = _Listener(generation, index, self.observer.on_placed(request_id))
                self._perform(actions)
        except BaseException as error:  # a bug must not leave prompts without a client, either
            generation.abort("another prompt of the request was refused, or the request was given up")
            reason = ErrorInfo.of(_as_ours(error))
            for submission in submissions:
                self.observer.on_failed(submission.request_id, reason)
            raise
        finally:
            self._num_refused -= place is not None
        return generation

    def _submit(self, submission: Submission, now: float, *, has_waited: bool) -> Sequence[Action] | None:
        """Start a prompt; None if no worker takes it now, but one may that reconnects soon. Raises as ``open``."""
        if self._is_stopped:
            raise NoWorker(SHUTS_DOWN)
        try:
            return self.core.submit(submission, now)
        except RequestError as error:
            num_waiting = None if has_waited else self._num_refused  # one that waits is not dropped for those that come later
            if self.core.may_serve_soon(submission, error, self._clock.now(), num_waiting):
                return None
            raise

    async def wait_for_route(self) -> None:
        """Wait while there is no route but one is expected, as after a pause of this router, when workers reconnect."""
        while not self._is_stopped and self.core.is_route_expected(self._clock.now()):
            await self.wait_for_change()

    async def wait_for_change(self, place: Place | None = None) -> None:
        """Wait until a worker may take requests that it did not take, or a tick; not once this router stops."""
        if not self._is_stopped:
            await self._waits.wait(place)

    def abort(self, request_id: str, reason: str) -> None:
        """End a request; unknown ids are ignored."""
        if request_id in self._listeners:
            self._perform(self.core.abort(request_id, reason, self._clock.now()))

    def finish_choice(self, request_id: str, index: int) -> None:
        """End one choice at a stop string."""
        self._perform(self.core.finish_choice(request_id, index, self._clock.now()))

    # ---- workers -----------------------------------------------------------------------------------------------------

    async def _tick(self, reader: FrameReader) -> None:
        """Call the timer. A bug in it ends this task, and so the router, because it would recur at every tick."""
        while True:
            await asyncio.sleep(self._tick_s)
            await self._do_what_is_due(reader)

    async def _do_what_is_due(self, reader: FrameReader) -> None:
        """Handle all received messages, so that no worker is judged while its messages are unread; then call the timer.

        Under load there may always be more messages. Reading then stops before the late tick looks like a pause of the router.
        """
        await reader.catch_up(self._heartbeat_interval_s / 2)
        self._perform(self.core.on_timer(self._clock.now()))
        self._waits.note_change()
        self.observer.tick()

    async def _watch_connections(self, monitor: AsyncSocket) -> None:
        """Detect the death of a worker's process at once, without waiting for the heartbeat timeout.

        ZeroMQ reports that a connection was lost, but not whose; sending to that worker then fails.
        """
        connections = ServerConnections()
        events: zmq.Socket[bytes] = zmq.Socket.shadow(monitor)
        now, probe_at = asyncio.get_running_loop().time, math.inf
        while True:
            await monitor.poll(None if probe_at == math.inf else max(0.0, 1000 * (probe_at - now())))
            if self._note_events(events, connections):
                probe_at = min(probe_at, now() + RECONNECT_S)
            if now() >= probe_at:
                probe_at = math.inf
                self._guard(self.core.probe_connections)
            await asyncio.sleep(0)  # the others have their turn, however many connect

    def _note_events(self, events: zmq.Socket[bytes], connections: ServerConnections) -> bool:
        """Note what happened to connections; return True if one has ended.

        One without a handshake is counted and logged: a worker with another cluster key never connects, and retries forever.
        """
        has_ended = False
        for _ in range(_EVENTS_PER_TURN):
            if not events.poll(0):
                break
            found = parse_monitor_message(events.recv_multipart(zmq.NOBLOCK))
            has_ended |= found["event"] == zmq.EVENT_DISCONNECTED
            if connections.note(found, self._clock.now()):
                self._metrics.count_refused_handshake()
                self._peer_log.handshake_refused()
        return has_ended

    def _on_parts(self, parts: list[bytes]) -> None:
        """Handle one message of a worker; no message may stop the router."""
        peer, now = parts[0], self._clock.now()
        try:
            if len(parts) != 2:
                raise ProtocolError(f"message of {len(parts) - 1} frames, expected 1")
            message = codec.decode_worker_frame(parts[1])
        except ProtocolError as error:
            self._metrics.count_malformed()
            self._peer_log.bad_frame(peer, error)
            self._guard(self.core.on_malformed, peer, error, now)
            return
        if not self._guard(self.core.on_message, peer, message, now):
            for request_id in requests_of(message):
                self._give_up(request_id, KVFerryError("the router failed on this request; its log says how"))

    def _guard(self, handle: Callable[..., list[Action]], *args: object) -> bool:
        """Run a step of the core. A bug in it is logged, and the router continues. Returns True without a bug."""
        try:
            self._perform(handle(*args))
        except Exception:
            self._peer_log.bug(getattr(handle, "__name__", "?"))
            return False
        return True

    def _give_up(self, request_id: str, error: KVFerryError) -> None:
        """Fail a request or call, also if a bug made the core lose it; its client would otherwise wait until its deadline."""
        self._guard(self.core.fail, request_id, error, self._clock.now())
        self.engine_api.put(Answered(request_id, ErrorInfo.of(error)))
        listener = self._listeners.pop(request_id, None)
        if listener is None:
            return
        listener.generation.put(listener.prompt_index, Update(error=ErrorInfo.of(error)))  # the core has lost it
        self.observer.on_failed(request_id, ErrorInfo.of(error))

    # ---- actions -----------------------------------------------------------------------------------------------------

    def _perform(self, actions: Sequence[Action]) -> None:
        """Carry out actions, and the actions that follow from connections found lost in between."""
        queue = list(actions)
        for action in queue:  # grows during the loop
            match action:
                case DeliverTokens():
                    self._deliver_tokens(action)
                case Deliver():
                    self._deliver(action)
                case Transmit():
                    queue += self._transmit(action)
                case RefuseVersion():
                    queue += self._send(action.peer, action.frame)
                case EncodeEnded():
                    self.observer.on_encoded(action)
                case Retried():
                    self.observer.on_retried(action)
                case Moved():
                    self.observer.on_moved(action)
                case Ended():
                    self._on_ended(action.request, action.now)
                case Answered():
                    self.engine_api.put(action)
                case Joined() | Left() | Stalled() | Resumed() | Switched():
                    self._worker_log.note(action)
                    self._peer_log.unpaired(unpaired(self.core.membership.workers))
        if self._num_openings != self.core.num_openings:
            self._num_openings = self.core.num_openings
            self._waits.note_change()

    def _transmit(self, action: Transmit) -> list[Action]:
        if self._socket is None:
            return []
        try:
            frame = codec.encode_router_message(self._recorded(action))
        except ProtocolError as error:
            assert isinstance(action.message, Generate | EngineCall), "only prompts can be too large for a frame"
            return self.core.fail_attempt(action.message.request_id, error, self._clock.now())
        return self._send(action.peer, frame)

    def _send(self, peer: bytes, frame: bytes) -> list[Action]:
        """Send a frame to a connection; return the actions that follow if it is lost."""
        if self._socket is None:
            return []
        sent = asyncio.ensure_future(self._socket.send_multipart([peer, frame], flags=zmq.NOBLOCK))
        failure = sent.exception()  # a non-blocking send has ended when it returns
        if failure is None:
            return []
        self._peer_log.unreachable(peer, failure)
        return self.core.on_unreachable(peer, self._clock.now())

    def _recorded(self, action: Transmit) -> RouterMessage:
        """Record the leg that a message starts; return the message with the leg's span."""
        worker = self.core.membership.by_peer(action.peer)
        return action.message if worker is None else self.observer.on_sent(action.message, worker)

    def _deliver(self, action: Deliver) -> None:
        listener = self._listeners[action.request_id]
        self.observer.on_update(listener.observed, action.update)
        listener.generation.put(listener.prompt_index, action.update)

    def _deliver_tokens(self, action: DeliverTokens) -> None:
        """Pass on most tokens of a step: here and below, each call is one per token."""
        now = self._clock.now()
        for request_id, token_ids in action.tokens:
            listener = self._listeners[request_id]
            self.observer.on_tokens(listener.observed, now)
            listener.generation.put_tokens(listener.prompt_index, token_ids)

    def _on_ended(self, request: RequestState, now: float) -> None:
        listener = self._listeners.pop(request.request_id, None)
        self.observer.on_ended(request, now, listener.generation.client_id if listener is not None else None)


def _as_ours(error: BaseException) -> KVFerryError:
    if isinstance(error, KVFerryError):
        return error
    return Cancelled("the request was given up") if isinstance(error, asyncio.CancelledError) else KVFerryError(repr(error))
