"""One incarnation of a simulated router: a real ``RouterCore`` on the simulated network, and its clients.

Takes the place of ``router.dispatch.worker_gateway``. When the process dies its clients lose their connections; the next
incarnation is another object with another router id.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from core.config_router import RouterSection
from core.errors import Cancelled, RequestError
from core.ids import SeededIds, new_hex_id
from core.wire.codec import decode_worker_frame, encode_router_message
from core.wire.messages import ErrorInfo, Generate, RouterMessage
from kvferry.sim.client import ROUTER_LOST, Client, submission_of
from kvferry.sim.host import Host
from kvferry.sim.plan import MODEL, router_address
from kvferry.sim.request_path import Setback, WorkerTurn
from kvferry.sim.slow_reading import SlowConnection
from router.dispatch.core import Action, RouterCore, RouterLimits, Transmit
from router.dispatch.members import Member, WorkerKey
from router.dispatch.membership import Joined, Left
from router.dispatch.progress import Standing
from router.dispatch.request_state import Deliver, DeliverTokens, EncodeEnded, Ended, Moved, Retried
from router.dispatch.worker_gateway import RECONNECT_S

EAGER_MARGIN = 1e3  # most routers let prompts be loaded even where computing them is much faster


class SimRouter:
    """A router from its start to its end.

    ``retries`` counts its reactions to lost workers and encode workers; ``complain`` receives violations.
    """

    def __init__(
        self,
        host: Host,
        config: RouterSection,
        ids_seed: int,
        retries: Counter[str],
        complain: Callable[[str], None],
        encode_timeout_s: float = 20.0,
    ) -> None:
        self.host = host
        self._complain = complain
        self._retries = retries
        limits = replace(RouterLimits.of(config), encode_timeout_s=encode_timeout_s)
        self.core = RouterCore(MODEL, new_hex_id(SeededIds(ids_seed)), limits)
        if ids_seed % 4:
            self.core.route_costs.sources.margin = EAGER_MARGIN
        self._tick_s, self._timeout_s = limits.tick_s, limits.heartbeat_timeout_s
        self._clients: dict[str, Client] = {}
        self._slow: dict[str, SlowConnection] = {}
        self._wait_for_route: list[Client] = []
        self._members: dict[bytes, Member] = {}  # by their present and former connections
        self._greets_soon = False
        self._lives: defaultdict[str, list[WorkerKey]] = defaultdict(list)  # processes of a name, the latest last
        self._free_at: dict[WorkerKey, float] = {}  # of processes that have left: when an older one may have the name
        address = router_address(host.process.name)
        self._server = host.network.listen(host.process, address, self._on_frame, self._on_lost_connection)
        host.process.on_death(self._drop_clients)
        self._tick()

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._clients)

    def connect(self, client: Client) -> None:
        """A client has connected and sent its request; a router that is frozen reads it later."""
        self._clients[client.plan.name] = client
        if client.plan.reading is not None:
            slow = SlowConnection(client, self.host.process, self.host.loop, self._end_choices, self._end_request)
            self._slow[client.plan.name] = slow
        self.host.process.call_later(0.0, lambda: self._submit(client))

    def disconnect(self, client: Client) -> None:
        """A client has left."""
        self.host.process.call_later(0.0, lambda: self._abort(client))

    # ---- events ------------------------------------------------------------------------------------------------------

    def _submit(self, client: Client) -> None:
        if client.plan.name not in self._clients:
            return  # the client has left
        if self.core.is_route_expected(self._now()):
            self._wait_for_route.append(client)
            return
        try:
            actions = self.core.submit(submission_of(client.plan), self._now())
        except RequestError as error:
            del self._clients[client.plan.name]
            self._slow.pop(client.plan.name, None)
            client.end(error.code, error.message, self.host.loop.now)
            return
        self._perform(actions)

    def _abort(self, client: Client) -> None:
        slow, is_waiting = self._slow.get(client.plan.name), client in self._wait_for_route
        if is_waiting:
            self._wait_for_route.remove(client)
            del self._clients[client.plan.name]
        if is_waiting or (slow is not None and not slow.is_closed):
            client.end(Cancelled.code, "the client left", self.host.loop.now)
        if slow is not None:
            slow.close()
        self._end_request(client)

    def _end_request(self, client: Client) -> None:
        """Abort the request of a client that is gone, unless the request has ended before."""
        if client.plan.name in self._clients:
            self._perform(self.core.abort(client.plan.name, "client", self._now()))

    def _on_frame(self, peer: bytes, frame: bytes) -> None:
        self._perform(self.core.on_message(peer, decode_worker_frame(frame), self._now()))
        member = self.core.membership.by_peer(peer)
        if member is not None:
            self._members[peer] = member

    def _on_lost_connection(self) -> None:
        if not self._greets_soon:
            self._greets_soon = True
            self.host.process.call_later(RECONNECT_S, self._greet_all)

    def _greet_all(self) -> None:
        self._greets_soon = False
        self._perform(self.core.probe_connections())

    def _tick(self) -> None:
        self._perform(self.core.on_timer(self._now()))
        self.host.process.call_at(self._now() + self._tick_s, self._tick)

    def _end_choices(self, client: Client) -> None:
        """Tell the workers, after a moment, that choices have ended by their text."""
        indices, client.ended_choices = client.ended_choices, []

        def tell() -> None:
            for index in indices:
                self._perform(self.core.finish_choice(client.plan.name, index, self._now()))

        self.host.process.call_later(0.0, tell)

    def _drop_clients(self) -> None:
        clients = self._clients | {name: slow.client for name, slow in self._slow.items()}
        for client in [client for client in clients.values() if not client.is_over]:
            client.end(ROUTER_LOST, "the router died", self.host.loop.now)
        for slow in self._slow.values():
            slow.close()
        self._clients.clear()
        self._wait_for_route.clear()

    # ---- carrying actions out ----------------------------------------------------------------------------------------

    def _perform(self, actions: Sequence[Action]) -> None:
        """Carry out actions; then requests that waited for a route may have one."""
        self._carry_out(actions)
        if not self.core.is_route_expected(self._now()):
            waiting, self._wait_for_route = self._wait_for_route, []
            for client in waiting:
                self.host.process.call_later(0.0, partial(self._submit, client))

    def _carry_out(self, actions: Sequence[Action]) -> None:
        """Carry out actions, and those that follow from lost peers found on the way."""
        queue = list(actions)
        for action in queue:  # grows during the loop
            match action:
                case Transmit(peer, message):
                    self.host.log(f"sends to {peer.hex()}", message)
                    self._note_turn(peer, message)
                    if not self._server.send(peer, encode_router_message(message)):
                        queue += self.core.on_unreachable(peer, self._now())
                case Deliver():
                    self._deliver(action)
                case DeliverTokens():
                    for each in action.updates():
                        self._deliver(each)
                case Ended(request):
                    self.host.log(f"ends {request.request_id}", request.error)
                    self._end(self._clients.pop(request.request_id), request.error)
                case EncodeEnded():
                    self.host.log("embeds", action)
                    self._retries[f"encode_{action.outcome}"] += 1
                case Retried(kind=kind):
                    self.host.log("retries", action)
                    self._retries[f"retry_{kind}"] += 1
                    self._note_setback(action)
                case Moved():
                    self.host.log("moves", action)
                    self._retries["moved"] += 1
                case Joined(worker):
                    self._check_place(worker.key)
                    self.host.log(f"takes in {worker.key.engine_id}")
                case Left(worker, reason):
                    self._note_end(action)
                    self.host.log(f"loses {worker.key.engine_id}: {reason}")

    def _deliver(self, action: Deliver) -> None:
        self.host.log(f"delivers {action.request_id}", action.update)
        client, update = self._clients[action.request_id], action.update
        if update.choices:
            client.path.note_output(self.host.loop.now)
        slow = self._slow.get(client.plan.name)
        if slow is not None:
            slow.put(update)
            return
        client.on_update(update)
        if client.ended_choices:
            self._end_choices(client)

    def _end(self, client: Client, error: ErrorInfo | None) -> None:
        client.path.answered_at = self.host.loop.now
        slow = self._slow.get(client.plan.name)
        if slow is not None:
            slow.end(error)
        else:
            client.on_end(error, self.host.loop.now)

    def _note_end(self, left: Left) -> None:
        if not left.is_back:
            self._free_at[left.worker.key] = -math.inf if left.is_orderly else left.worker.last_seen + self._timeout_s

    def _check_place(self, key: WorkerKey) -> None:
        """Check that a replaced process is accepted again only if those that came after it have left, and stay away."""
        self._free_at.pop(key, None)
        lives = self._lives[key.engine_id]
        if key not in lives:
            lives.append(key)
        for newer in lives[lives.index(key) + 1 :]:
            if self._now() < self._free_at.get(newer, math.inf):
                self._complain(f"{self.host.process.name}: takes in a process of {key.engine_id} whose place another has taken")

    def leftovers(self) -> list[str]:
        """Return the remains after every request has ended and all faults are over."""
        name = self.host.process.name
        found = [f"{name}: {self.num_requests} requests left"] if self.num_requests else []
        if any(not slow.is_closed for slow in self._slow.values()) and self.host.process.is_alive:
            found.append(f"{name}: connections of slow clients left")
        members = self.core.membership.members if self.host.process.is_alive else ()
        stalled = [member for member in members if member.progress.standing is Standing.STALLED]
        return found + [f"{name}: {member.key.engine_id} is not taken back" for member in stalled]

    def _note_turn(self, peer: bytes, message: RouterMessage) -> None:
        """Record that a worker is sent a request."""
        member = self.core.membership.by_peer(peer) or self._members.get(peer)  # it may have been found lost a moment before
        if not isinstance(message, Generate) or member is None:
            return
        client = self._clients.get(message.request_id.partition(".")[0])  # without the number of the attempt
        if client is not None:
            role = "prefill" if message.handoff else "decode" if member.role == "prefill" else member.role
            turn = WorkerTurn(member.key.engine_id, role, self.host.loop.now, message.kv_handoff is not None)
            client.path.turns.append(turn)

    def _note_setback(self, action: Retried) -> None:
        path = self._clients[action.request_id].path
        path.setbacks.append(Setback(self.host.loop.now, action.failed.engine_id, action.error.code))

    def _now(self) -> float:
        return self.host.process.clock.now()
