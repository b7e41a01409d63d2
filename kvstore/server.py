"""The store as a separate process: one thread between the store's state machine and its clients, and the tiers' threads.

Owns the socket, that thread, and the watch over client processes of this host. A malformed frame gets an
error reply and has no other effect. A bug ends the thread and calls ``on_death``, so that a store that does not answer does not
look alive.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from core.clock import Clock
from core.errors import ProtocolError, Unavailable, VersionMismatch
from core.log import event
from core.rate_limit import LimitedLog
from core.wire.contexts import started_context
from core.wire.curve import ClusterKeys
from core.wire.sockets import CLOSE_LINGER_MS, SocketOptions, bind, router_socket, warn_if_exposed
from core.wire.version import VersionRefuser
from kvstore.client import process_start_ticks
from kvstore.messages import MAX_BLOCK_BYTES, AttachRefused, ToClient, decode_to_store, encode_to_client
from kvstore.server_state import Action, SendParcel, ServerOptions, ServerState, StartJob, WatchProcess
from kvstore.tiers.base import Tier, TierJob
from kvstore.tiers.worker import TierExecutor, stop_all
from kvstore.wakeup import Wakeup

FLUSH_TIMEOUT_S = 25.0  # with the next below the 35 s that ``kvferry serve`` leaves a process by default
STOP_TIMEOUT_S = 5.0  # of each tier's present job when the store is stopped
MAX_QUEUED_MESSAGES = 1024  # for each client
MAX_MESSAGES_PER_TURN = 64

_log = logging.getLogger(__name__)


class StoreServer:
    """Serves a store. ``machine`` and ``workers`` are for metrics: their counts may be read from any thread."""

    def __init__(
        self,
        options: ServerOptions,
        tiers: Sequence[Tier],
        clock: Clock,
        on_death: Callable[[BaseException], None],
        keys: ClusterKeys | None = None,
    ) -> None:
        self._keys = keys
        self.machine = ServerState(options, tiers)
        self.workers = [TierExecutor(tier, self._on_job_done) for tier in tiers]
        self._clock = clock
        self._on_death = on_death
        self._refuser = VersionRefuser()
        self._limited_log = LimitedLog(_log, clock.now)
        self._timer_interval_s = options.client_timeout_s / 4
        self._next_timer = 0.0
        self._wakeup = Wakeup()
        self._done: deque[TierJob] = deque()
        self._pidfds: dict[int, str] = {}  # of clients: pidfd → client id
        self._is_closing = False
        self._context: zmq.Context[zmq.Socket[bytes]] = started_context(zmq.Context)
        limits = SocketOptions(max_message_bytes=MAX_BLOCK_BYTES, high_water_mark=MAX_QUEUED_MESSAGES, keys=keys)
        self._socket = router_socket(self._context, limits)
        self._thread = threading.Thread(target=self._run, name="kvstore-server", daemon=True)

    def start(self, address: str) -> str:
        """Bind, serve from now on, and return the actual address.

        Raises:
            ConfigError: the address cannot be bound.
        """
        actual = bind(self._socket, address)
        if self._keys is None:
            warn_if_exposed("kvstore.bind_address", actual)
        for worker in self.workers:
            worker.start()
        self._thread.start()
        return actual

    @property
    def is_serving(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive() and not self._is_closing

    def stop(self, flush_timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        """Stop serving, save the dirty blocks, and release all resources but those of a tier that hangs."""
        self._is_closing = True
        self._wakeup.set()
        if self._thread.ident is not None:
            self._thread.join()
            self._flush(flush_timeout_s)
        stop_all(self.workers, STOP_TIMEOUT_S)
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._wakeup.close()
        self._socket.close(linger=CLOSE_LINGER_MS)
        self._context.term()
        if self.machine.memory is not None:
            self.machine.memory.arena.close()  # its mapping stays: a tier that hangs may still read or write there

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # a worker's main loop
            _log.exception(event("kvstore_server_died"))
            self._on_death(error)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakeup.fd, zmq.POLLIN)
        watched: set[int] = set()
        while not self._is_closing:
            for pidfd in self._pidfds.keys() - watched:
                poller.register(pidfd, zmq.POLLIN)
            watched = set(self._pidfds)
            timeout_s = max(0.0, self._next_timer - self._clock.now())
            ready = dict(poller.poll(math.ceil(1000 * timeout_s)))
            self._wakeup.clear()
            for pidfd in watched & ready.keys():
                poller.unregister(pidfd)
                watched.discard(pidfd)
                self._follow(self.machine.on_process_died(self._pidfds.pop(pidfd)))
                os.close(pidfd)
            for _ in range(MAX_MESSAGES_PER_TURN):
                if not self._receive():
                    break
            self._take_results()
            now = self._clock.now()
            if now >= self._next_timer:
                self._next_timer = now + self._timer_interval_s
                self._follow(self.machine.on_timer(now))

    def _receive(self) -> bool:
        try:
            client, frame, *blocks = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        except ValueError:  # an empty message
            return True
        try:
            message = decode_to_store(frame)
        except VersionMismatch as error:
            self.machine.counts["bad_frames"] += 1
            self._refuse_version(client, error)
            return True
        except ProtocolError as error:
            self.machine.counts["bad_frames"] += 1
            self._send(client, [encode_to_client(AttachRefused(code=error.code, message=error.message[:1000]))])
            return True
        self._follow(self.machine.on_parcel(client, message, blocks, self._clock.now()))
        return True

    def _refuse_version(self, client: bytes, error: VersionMismatch) -> None:
        self._limited_log.warning("other_wire_version", key=error.theirs, ours=error.ours, theirs=error.theirs)
        refusal = self._refuser.answer(client, error, self._clock.now())
        if refusal is not None:
            self._send(client, [refusal])

    def _follow(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case SendParcel():
                    self._log_refusal(action.parcel.message)
                    self._send(action.client, [encode_to_client(action.parcel.message), *action.parcel.blocks])
                case StartJob():
                    self.workers[action.job.tier].submit(action.job)
                case WatchProcess():
                    self._watch(action)

    def _log_refusal(self, message: ToClient) -> None:
        """Log why a client gets nothing: an arena too small for a block shows only once the first client tells its size."""
        if isinstance(message, AttachRefused) and message.code != Unavailable.code:  # which is logged where it arises
            self._limited_log.warning("kvstore_client_refused", key=message.code, code=message.code, reason=message.message)

    def _send(self, client: bytes, frames: Sequence[bytes | memoryview]) -> None:
        try:
            self._socket.send_multipart([client, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # the client is gone or does not read: its silence will end its session
            _log.debug(event("kvstore_reply_dropped", error=error))

    def _watch(self, action: WatchProcess) -> None:
        """Detect the end of a process. Its start time distinguishes it from a later process with the same number."""
        if action.client_id in self._pidfds.values():
            self._follow(self.machine.on_watched(action.client_id))
            return
        try:
            pidfd = os.pidfd_open(action.pid)
        except ProcessLookupError:
            self._follow(self.machine.on_process_died(action.client_id))
            return
        except OSError as error:  # not permitted in this container, or too few descriptors
            self._refuse_to_watch(action, str(error))
            return
        start_ticks = process_start_ticks(action.pid)
        if start_ticks == action.start_ticks:
            self._pidfds[pidfd] = action.client_id
            self._follow(self.machine.on_watched(action.client_id))
            return
        is_alive = not zmq.zmq_poll([(pidfd, zmq.POLLIN)], 0)  # one that was reaped meanwhile has no start time either
        os.close(pidfd)
        if start_ticks is None and is_alive:
            self._refuse_to_watch(action, f"/proc/{action.pid}/stat cannot be read")
        else:
            self._follow(self.machine.on_process_died(action.client_id))

    def _refuse_to_watch(self, action: WatchProcess, reason: str) -> None:
        self._limited_log.warning("kvstore_cannot_watch", client=action.client_id, reason=reason)
        reason = f"the store cannot watch process {action.pid}: {reason}; no shared memory"
        self._follow(self.machine.on_unwatchable(action.client_id, reason))

    def _on_job_done(self, job: TierJob) -> None:
        self._done.append(job)
        self._wakeup.set()

    def _take_results(self) -> None:
        while self._done:
            self._follow(self.machine.on_job_done(self._done.popleft()))

    def _flush(self, timeout_s: float) -> None:
        """Save the dirty blocks on the caller's thread, after the server's thread has ended."""
        deadline = self._clock.now() + timeout_s
        self._follow(self.machine.flush())
        while self.machine.num_unsaved and self._clock.now() < deadline:
            zmq.zmq_poll([(self._wakeup.fd, zmq.POLLIN)], 100)
            self._wakeup.clear()
            self._take_results()
            self._follow(self.machine.flush())
        if self.machine.num_unsaved:
            _log.warning(event("kvstore_unsaved", blocks=self.machine.num_unsaved))
