"""The worker's protocol with its routers as a synchronous state machine: events in, actions out.

Owns membership at the routers, the role in force, and leaving; ``core.worker.serving`` owns the requests. Knows nothing of
sockets, threads and the engine: ``core.worker.process`` carries the actions out, and so does the simulation, under a virtual
clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from core.errors import EngineDead, NoWorker, ProtocolError, VersionMismatch
from core.kv.content_feed import ContentFeed
from core.log import event
from core.metrics import WorkerMetrics
from core.rate_limit import LOG_INTERVAL_S, RateLimit, limited_event
from core.request import EngineCoreOutput
from core.wire import messages
from core.wire.early import MeetProducer, PullEarly
from core.wire.engine_calls import EngineCall, EngineReply
from core.wire.messages import (
    Abort,
    EncodeRequest,
    ErrorInfo,
    Generate,
    Goodbye,
    Heartbeat,
    Refused,
    Register,
    Registered,
    RegisterEncoder,
    Rejected,
    Release,
    Renew,
    RequestFailed,
    Role,
    RouterMessage,
    SwitchRole,
)
from core.worker.actions import (
    Action,
    AdmissionLimits,
    EngineLoad,
    Send,
    Stop,
    for_connector,
)
from core.worker.content_reports import ContentReports
from core.worker.drain import DrainPhases
from core.worker.heartbeats import Heartbeats
from core.worker.role import RoleHandler
from core.worker.role_switch import RoleSwitch
from core.worker.router_membership import MembershipDuty, RouterMembership, place_of, send_early
from core.worker.serving import Serving

logger = logging.getLogger(__name__)

DRAIN_POLL_S = 0.1


class WorkerState:
    """All routers of one worker. Every method takes the time and returns what to do, in order."""

    def __init__(
        self,
        registration: Register | RegisterEncoder,
        handler: RoleHandler,
        limits: AdmissionLimits,
        load: Callable[[], EngineLoad],
        metrics: WorkerMetrics,
        contents: ContentFeed | None = None,
    ) -> None:
        self.roles = RoleSwitch(registration)
        self.serving = Serving(registration, handler, limits, metrics)
        self._drain_timeout_s = limits.drain_timeout_s
        self._load = load
        self._metrics = metrics
        self._heartbeats = Heartbeats(registration)
        self._reports = ContentReports(contents)
        self._drain = DrainPhases()
        self._links: dict[str, RouterMembership] = {}
        self._num_takeovers = 0  # by spare links, at all routers
        self._exit_code: int | None = None
        self._router_lines = RateLimit(LOG_INTERVAL_S)  # for what a router can cause as often as it likes

    @property
    def _registration(self) -> Register | RegisterEncoder:
        return self.roles.registration

    # ---- state for the shell -----------------------------------------------------------------------------------------

    @property
    def is_draining(self) -> bool:
        """True from the first request to leave, for good."""
        return self._drain.is_draining

    @property
    def num_of_former_role(self) -> int:
        """Return how many requests it took in another role than the present one."""
        return self.serving.requests.num_not_of(is_prefill=self.roles.role == "prefill")

    @property
    def num_leased_blocks(self) -> int:
        """Return how many blocks are held for readers."""
        return self._load().num_leased_blocks

    @property
    def is_stopped(self) -> bool:
        """True once a ``Stop`` was returned; nothing is accepted any more."""
        return self._exit_code is not None

    @property
    def num_registered_routers(self) -> int:
        """Return how many routers have this worker in their membership."""
        return sum(link.is_registered for link in self._links.values())

    @property
    def refusals(self) -> dict[str, str]:
        """Return by router address why routers do not take this worker in."""
        return {link: membership.refusal for link, membership in self._links.items() if membership.refusal}

    @property
    def num_requests(self) -> int:
        """Return how many requests have not had their last reply."""
        return len(self.serving.requests)

    def next_timer(self, now: float) -> float | None:
        """Return when ``on_timer`` has something to do at the latest; None = only after another event."""
        times = [link.next_timer() for link in self._links.values()]
        for time in (self.serving.next_timer(), self._reports.next_timer(), self._drain.next_timer(now, DRAIN_POLL_S)):
            if time is not None:
                times.append(time)
        return min(times) if times and not self.is_stopped else None

    # ---- routers -----------------------------------------------------------------------------------------------------

    def connect(self, link: str, now: float) -> list[Action]:
        """A socket to a router address exists: introduce the worker."""
        self._links[link] = RouterMembership(now)
        return self._do_duties(now)

    def disconnect(self, link: str, now: float) -> list[Action]:
        """A router address is gone from the name service, and so is the socket. The router may live if a spare link remains."""
        membership = self._links.pop(link, None)
        self._forget_at(link)
        spare = self._spare_link(membership.router_id) if membership is not None else None
        if spare is None:
            return self.serving.abort_of_link(link)
        return [*self._take_over(spare, now), *self.serving.give_up_of_link(link, spare, is_dropped=True)]

    def on_bad_frame(self, link: str, error: ProtocolError, now: float, request_id: str = "") -> list[Action]:
        """Report a frame that could not be decoded; of the request that it names, if it names one. It has no other effect."""
        self._metrics.count_rejected()
        if isinstance(error, VersionMismatch):
            return self._on_other_version(link, error, now)
        self._log_of_router(now, "rejected_frame", link, error=error.message)
        info = ErrorInfo.of(error)
        return [Send(link, RequestFailed(request_id=request_id, error=info) if request_id else Rejected(error=info))]

    def _on_other_version(self, link: str, error: VersionMismatch, now: float) -> list[Action]:
        """Back off, without an answer: a router of another version would have to refuse it again.

        It has replaced the router of the present requests, including those that came after that router seemed lost.
        """
        membership = self._links.get(link)
        if membership is None:
            return []
        if membership.on_other_version(now):
            self._log_of_router(now, "other_wire_version", link, ours=error.ours, theirs=error.theirs)
        self._forget_at(link)
        return self.serving.abort_of_link(link)

    def on_router_message(self, link: str, message: RouterMessage, now: float) -> list[Action]:
        """Handle one message of the router of ``link``. What comes by a spare link belongs to the one in use."""
        membership = self._links.get(link)
        if membership is None or self.is_stopped:
            return []
        membership.on_heard(now)
        if membership.spare_of and not isinstance(message, Registered | Refused):
            link = self._link_in_use(membership.spare_of) or link
        match message:
            case Generate() | EncodeRequest() | EngineCall():
                return self._on_request(link, message, now)
            case PullEarly():
                return self.serving.pull_early(message, now, is_leaving=self.is_draining)
            case Abort():
                return [*self.serving.abort(link, message, now), *self._leave_if_done(now)]
            case MeetProducer() | Release() | Renew():
                return [for_connector(message)]
            case Registered():
                return self._on_registered(link, membership, message, now)
            case Refused():
                return self._on_refused(link, membership, message, now)
            case SwitchRole():
                return self._on_switch(link, message, now)
            case messages.Drain():
                return self.start_drain(now, message.deadline_ms / 1e3 or self._drain_timeout_s)

    def _on_registered(self, link: str, membership: RouterMembership, message: Registered, now: float) -> list[Action]:
        """Requests of an earlier router process end, also those that came after it was lost for its silence.

        The latter are answered: if this router's first answer was lost, they may be its own. A second link to a router that has
        one in use stays spare.
        """
        was_registered, was_spare = membership.is_registered, bool(membership.spare_of)
        is_another = membership.on_registered(message, now)
        ended = self._end_former(link, was_registered=was_registered) if is_another else []
        in_use = self._link_in_use(message.router_id, but=link)
        if in_use is not None:
            return [*ended, *self._set_aside(link, membership, in_use, now)]
        if not was_registered or is_another:
            logger.info(event("registered", router=link, router_id=message.router_id))
        self.roles.on_registered(link, message, now)
        reports = self._reports.on_registered(link, message, now, is_new=not was_registered or is_another)
        # A router that knew the worker by a link that was lost since has changed nothing for the registration of a spare one.
        return [*ended, *(self._use_spare(link) if was_spare else []), *reports]

    def _end_former(self, link: str, *, was_registered: bool) -> list[Action]:
        """End what came from the router process that a link led to before."""
        if was_registered:
            return self.serving.abort_of_link(link)
        return self.serving.give_up_of_link(link) if self.serving.requests.of_link(link) else []

    def _link_in_use(self, router_id: str, but: str = "") -> str | None:
        """Return the link by which this worker is registered at a router; None if there is none besides ``but``."""
        return next((key for key, other in self._links.items() if other.router_id == router_id and key != but), None)

    def _spare_link(self, router_id: str) -> str | None:
        """Return the link that leads to a router, is not in use, and was heard last."""
        spares = [key for key, other in self._links.items() if router_id and other.spare_of == router_id]
        return max(spares, key=lambda key: self._links[key].heard_at, default=None)

    def _take_over(self, spare: str, now: float) -> list[Action]:
        """Use a spare link in place of a lost one, on which messages of either side may be lost: the router retries them."""
        membership = self._links[spare]
        membership.take_over(now)
        logger.info(event("spare_router_link_used", router=spare, router_id=membership.router_id))
        return self._use_spare(spare)

    def _use_spare(self, link: str) -> list[Action]:
        """Register by a link that was spare: its router is to take it as a new connection."""
        self._num_takeovers += 1
        self._links[link].takeover = self._num_takeovers
        return [Send(link, self._registration_by(link))]

    def _registration_by(self, link: str) -> Register | RegisterEncoder:
        """Return the registration that a link sends."""
        membership = self._links[link]
        return msgspec.structs.replace(self._registration, takeover=membership.takeover, is_spare=bool(membership.spare_of))

    def _set_aside(self, link: str, membership: RouterMembership, in_use: str, now: float) -> list[Action]:
        """Leave a link spare. Its router may take it for the newest connection, so the one in use registers there again."""
        if membership.set_aside(now):
            logger.info(event("spare_router_link", router=link, in_use=in_use, router_id=membership.spare_of))
        self._forget_at(link)
        self.serving.requests.move(link, in_use)
        return [] if self.is_draining else [Send(in_use, self._registration_by(in_use))]

    def _on_refused(self, link: str, membership: RouterMembership, message: Refused, now: float) -> list[Action]:
        """All requests of this router came before its refusal, also those that came late, after it had seemed lost.

        A refusal that the next registration does not end is logged again now and then.
        """
        is_news = membership.on_refused(message.error.message, now)
        if is_news or not message.error.retryable:
            self._log_of_router(now, "refused_by_router", link, code=message.error.code, message=message.error.message)
        self._forget_at(link)
        return self.serving.abort_of_link(link)

    def _forget_at(self, link: str) -> None:
        """Forget what this router knows of the worker: it is gone, or has no such member."""
        self._reports.stop(link)
        self.roles.on_lost(link)

    def _log_of_router(self, now: float, name: str, link: str, *, code: str = "", **fields: object) -> None:
        """Write a line; each ``code`` has a limit of its own, since another one says something new."""
        shown = {"code": code, **fields} if code else fields
        if line := limited_event(self._router_lines, now, name, (link, code), router=link, **shown):
            logger.warning(line)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _on_request(self, link: str, message: Generate | EncodeRequest | EngineCall, now: float) -> list[Action]:
        actions, begun = self.serving.take(link, message, now, is_leaving=self.is_draining)
        if begun is not None and begun.has_prompt:
            send_early([other for key, other in self._links.items() if key != link], now)
        return actions

    def on_unsendable(self, link: str, request_id: str, error: ProtocolError) -> list[Action]:
        """A reply exceeds what a frame may hold: stop its request and say so instead."""
        return self.serving.fail_at(link, request_id, error)

    # ---- engine ------------------------------------------------------------------------------------------------------

    def on_outputs(self, outputs: Sequence[EngineCoreOutput], now: float) -> list[Action]:
        """Process the outputs of one engine step: at most one frame of tokens per router."""
        actions = self.serving.on_outputs(outputs, now)
        return [*actions, *self._reports.take_due(now), *self._leave_if_done(now)]

    def on_call_reply(self, reply: EngineReply | RequestFailed, now: float) -> list[Action]:
        """Pass on what the engine's API says to a call; replies to calls that have ended are dropped."""
        passed_on = self.serving.on_call_reply(reply, now)
        return [*passed_on, *self._leave_if_done(now)] if passed_on else []

    def on_engine_death(self, error: BaseException) -> list[Action]:
        """The engine thread has ended: answer every request, and end the process."""
        if self.is_stopped:
            return []
        logger.error(event("engine_dead", error=repr(error)))
        dead = EngineDead(f"the engine of worker {self._registration.engine_id} died: {error!r}")
        return [*self.serving.fail_all(dead), *self._stop(1)]

    # ---- time --------------------------------------------------------------------------------------------------------

    def on_timer(self, now: float) -> list[Action]:
        """Do everything that is due."""
        if self.is_stopped:
            return []
        self._heartbeats.on_timer(now, self.next_timer(now))
        actions: list[Action] = []
        for key, link in self._links.items():
            spare = self._spare_link(link.router_id)
            if link.lose_if_silent(now):
                self._forget_at(key)
                actions += self._take_over(spare, now) if spare is not None else []
                actions += self.serving.give_up_of_link(key, spare)
        actions += self.serving.on_timer(now)
        actions += self._do_duties(now)
        return actions + self._leave_if_done(now)

    def _do_duties(self, now: float) -> list[Action]:
        actions = self._replace_lost(now)
        for key, link in self._links.items():
            duty = link.take_duty(now)
            if duty is MembershipDuty.REGISTER and not self.is_draining:
                actions.append(Send(key, self._registration_by(key)))
            elif duty is MembershipDuty.HEARTBEAT:
                actions += [] if self.roles.is_known_at(key) else [Send(key, self._registration_by(key))]
                actions += [*self._reports.take(key, now), Send(key, self._heartbeat(key, now))]  # it tells of the reports
        return actions + self._reports.take_due(now)

    def _replace_lost(self, now: float) -> list[Action]:
        """Use spare links of routers to which no link is in use any more: that one was refused, or leads elsewhere."""
        actions: list[Action] = []
        in_use = {link.router_id for link in self._links.values()}
        for router_id in sorted({link.spare_of for link in self._links.values()} - in_use):
            if (spare := self._spare_link(router_id)) is not None:
                actions += self._take_over(spare, now)
        return actions

    def _heartbeat(self, link: str, now: float) -> Heartbeat:
        place, num_reports = place_of(self._links[link], self._links.values()), self._reports.num_sent(link)
        load, others = self._load(), self.serving.requests.queued_of_others(link)
        heartbeat = self._heartbeats.write(
            load, now, is_draining=self.is_draining, num_reports=num_reports, others=others, place=place
        )
        return self.roles.sign(heartbeat, link, self.num_of_former_role, now)

    # ---- role --------------------------------------------------------------------------------------------------------

    def switch_role(
        self, role: Role, now: float, incarnation: int | None = None, num_switches: int | None = None
    ) -> list[Action]:
        """Take requests of another role from now on, by command; those of the present role run to their end.

        With ``incarnation`` and ``num_switches``, only if the worker is that process and has that role still.

        Raises:
            RoleSwitchRefused: it keeps its role; says why.
        """
        self.roles.take(role, incarnation, num_switches, is_leaving=self.is_draining)
        return self._announce_role("by command", now)

    def _on_switch(self, link: str, message: SwitchRole, now: float) -> list[Action]:
        refused = self.roles.order(link, message, now, is_leaving=self.is_draining)
        return [Send(link, refused)] if refused is not None else self._announce_role(message.reason, now)

    def _announce_role(self, reason: str, now: float) -> list[Action]:
        """Tell all routers at once."""
        self.roles.log(reason, self.num_of_former_role, self.num_leased_blocks)
        for link in self._links.values():
            link.hurry(now)
        return self._do_duties(now)

    # ---- leaving -----------------------------------------------------------------------------------------------------

    def start_drain(self, now: float, timeout_s: float | None = None) -> list[Action]:
        """Take no new request, finish what runs, wait for readers, then go; 0 = go at once. Idempotent.

        The time is for requests. The worker waits for readers as long as their leases last, including leases granted during the
        drain, so every reader that was promised blocks gets them.
        """
        timeout = self._drain_timeout_s if timeout_s is None else timeout_s
        if not self.is_draining:
            logger.info(event("draining", timeout_s=timeout, requests=self.num_requests))
        self._drain.start(now, timeout)
        for link in self._links.values():
            link.hurry(now)
        return self._do_duties(now) + self._leave_if_done(now)

    def _leave_if_done(self, now: float) -> list[Action]:
        if self.is_stopped or not self.is_draining:
            return []
        actions: list[Action] = []
        if self._drain.is_out_of_time(now):
            gone = NoWorker(f"worker {self._registration.engine_id} shuts down")
            # Releases free blocks that the drain waits for.
            actions = self.serving.fail_all(gone, spares_releases=self._drain.waits_for_readers(now))
        load = self._load()
        if not self._drain.is_over(now, self.num_requests, load.num_leased_blocks, load.longest_lease_s):
            return actions
        goodbye = Goodbye(engine_id=self._registration.engine_id, incarnation=self._registration.incarnation)
        return [*actions, *(Send(key, goodbye) for key, link in self._links.items() if link.is_registered), *self._stop(0)]

    def _stop(self, exit_code: int) -> list[Action]:
        self._exit_code = exit_code
        return [Stop(exit_code)]
