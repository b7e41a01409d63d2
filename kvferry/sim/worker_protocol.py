"""The protocol half of a simulated worker: its state machine on the simulated network.

Takes the place of ``core.worker.process``: carries out the actions of ``WorkerState``, by the process's own clock. Subclasses
define what the worker computes. A crash ends the incarnation; the next one is another object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from core.engine.engine_messages import AbortRequests, AddRequests, EngineMessage
from core.errors import RoleSwitchRefused
from core.machine_driver import ActionHandler, ByType, EventHandler, MachineDriver, TimerDue
from core.request import EngineCoreOutput
from core.wire.codec import decode_router_frame, encode_tokens, encode_worker_message
from core.wire.early import MeetProducer
from core.wire.kv import KVHandoff
from core.wire.media import ECSource
from core.wire.messages import Refused, Register, Registered, Role, RouterMessage
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
)
from core.worker.state import WorkerState
from kvferry.sim.host import Host
from kvferry.sim.loop import ProcessTimers
from kvferry.sim.network import Link

FINGERPRINT = b"hash-model fingerprint"
LINGER_S = 1.0  # for the last replies and the goodbye


class Submits(Protocol):
    """The protocol half's interface to an engine."""

    def submit(self, message: EngineMessage) -> None:
        """Queue a message, and wake the engine."""


class SimWorkerProtocol:
    """A worker as its routers see it.

    A subclass sets ``state``, ``engine`` and ``_complain``, which receives violations, and calls ``_join`` when it is ready.
    """

    state: WorkerState
    engine: Submits
    _complain: Callable[[str], None]

    def __init__(self, host: Host) -> None:
        self.host = host
        self.is_stopped = False
        self._links: dict[str, Link] = {}
        self._router_ids: dict[str, str] = {}  # by address, the router that answered last; "" if it refused

    @property
    def is_serving(self) -> bool:
        """True while the process lives and has not left."""
        return self.host.process.is_alive and not self.is_stopped

    def drain(self) -> None:
        """Leave in good order."""
        self._perform(self.state.start_drain(self._now()))

    def switch_role(self, role: Role) -> bool:
        """Take another role by command; return False if it is refused."""
        try:
            self._perform(self.state.switch_role(role, self._now()))
        except RoleSwitchRefused:
            return False
        return True

    def jump(self, seconds: float) -> None:
        """Let the clock jump ahead."""
        if self.host.process.is_alive:
            self.host.process.jump(seconds)

    def leftovers(self) -> list[str]:
        """Return the remains of requests that have all ended."""
        raise NotImplementedError

    def count_what_happened(self) -> dict[str, int]:
        """Count events that not every run has."""
        raise NotImplementedError

    # ---- implemented by a subclass -----------------------------------------------------------------------------------

    def _meet(self, producer: MeetProducer) -> None:
        """The connector gets to know a worker; there may be none."""

    def _expect(self, handoff: KVHandoff) -> None:
        """Prepare for a request that may load this handoff."""

    def _release(self, transfer_ids: Sequence[str]) -> None:
        """Release handoffs that will not be read."""

    def _release_embeddings(self, sources: Sequence[ECSource]) -> None:
        """Release embeddings that will not be read."""

    def _as_received(self, message: RouterMessage) -> RouterMessage:
        """Return the message as this worker receives it."""
        return message

    def _renew(self, transfer_ids: Sequence[str]) -> None:
        """Extend the leases of handoffs."""

    # ---- events ------------------------------------------------------------------------------------------------------

    def _join(self, router_addresses: Sequence[str]) -> None:
        """Introduce the worker to its routers."""
        self._driver = self._make_driver()
        self._links = {address: self._open(address) for address in router_addresses}
        for address in self._links:
            self._perform(self.state.connect(address, self._now()))

    def _open(self, address: str) -> Link:
        def on_frame(frame: bytes) -> None:
            message = self._as_received(decode_router_frame(frame))
            before = self.state.roles.num_switches
            self._perform(self.state.on_router_message(address, message, self._now()))
            self._check_router(address, message)
            if self.state.roles.num_switches != before:
                self.host.troubles.roles.note_planned(self.host.process.name, self.state.roles.registration.incarnation)

        return Link(self.host.network, self.host.process, address, on_frame)

    def _check_router(self, address: str, message: RouterMessage) -> None:
        """Check that no request of a router runs that has ended, or does not know this worker."""
        if not isinstance(message, Registered | Refused):
            return
        router_id = message.router_id if isinstance(message, Registered) else ""
        before = self._router_ids.get(address, "")
        is_over = bool(before) and before != router_id  # one that refused may send requests before it registers the worker
        self._router_ids[address] = router_id
        if is_over and self.state.serving.requests.of_link(address):
            self._complain(f"{self.host.process.name}: serves requests of a router at {address} that has ended")

    def _put_outputs(self, outputs: list[EngineCoreOutput]) -> None:
        self.host.from_engine.put(lambda: self._perform(self.state.on_outputs(outputs, self._now())))

    # ---- carrying actions out ----------------------------------------------------------------------------------------

    def _make_driver(self) -> MachineDriver[None]:
        events: ByType[EventHandler] = ByType({TimerDue: lambda event, now: self.state.on_timer(now)})
        actions: ByType[ActionHandler[None]] = ByType(
            {
                Send: self._send,
                SubmitAdd: lambda action: self.engine.submit(AddRequests(action.requests)),
                SubmitAbort: lambda action: self.engine.submit(AbortRequests(action.engine_request_ids)),
                EndUnanswered: lambda action: None,
                ExpectTransfer: lambda action: self._expect(action.handoff),
                MeetWorker: lambda action: self._meet(action.producer),
                ReleaseTransfers: lambda action: self._release(action.transfer_ids),
                ReleaseEmbeddings: lambda action: self._release_embeddings(action.sources),
                RenewTransfers: lambda action: self._renew(action.transfer_ids),
                Stop: self._stop,
            }
        )
        return MachineDriver(events, actions, lambda: self.state.next_timer(self._now()), ProcessTimers(self.host.process))

    def _perform(self, actions: Sequence[Action]) -> None:
        self._driver.carry_out(actions)

    def _send(self, action: Send) -> None:
        message = action.message
        self.host.log(f"sends {action.link}", message)
        if isinstance(message, Register):
            self.host.troubles.roles.note(message.engine_id, message.incarnation, message.role)
        self._links[action.link].send(encode_tokens(message) if isinstance(message, list) else encode_worker_message(message))

    def _stop(self, action: Stop) -> None:
        self.is_stopped = True
        self.host.process.call_later(LINGER_S, self.host.process.kill)

    def _now(self) -> float:
        return self.host.process.clock.now()
