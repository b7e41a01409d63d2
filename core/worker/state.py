"""The worker's protocol with its routers as a synchronous state machine: events in, actions out.

Owns which request belongs to which router, admission, deadlines, membership, and leaving. Knows nothing of sockets, threads and
the engine: ``core.worker.process`` carries the actions out, and so does the simulation, under a virtual clock. The role's
handler interprets the requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from core.errors import (
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    KVFerryError,
    NoWorker,
    Overloaded,
    ProtocolError,
    RequestError,
    RouterSilent,
    VersionMismatch,
)
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
    Tokens,
)
from core.worker.actions import (
    Action,
    AdmissionLimits,
    EndUnanswered,
    EngineLoad,
    ExpectTransfer,
    ReleaseEmbeddings,
    ReleaseTransfers,
    Send,
    Stop,
    SubmitAbort,
    SubmitAdd,
    SubmitCall,
    for_connector,
)
from core.worker.content_reports import ContentReports
from core.worker.drain import Drain
from core.worker.heartbeats import Heartbeats
from core.worker.request_accounts import RequestAccounts
from core.worker.role import RoleHandler, RoleOutput, split_choice_id
from core.worker.role_switch import RoleSwitch
from core.worker.router_membership import MembershipDuty, RouterMembership, place_of, send_early
from core.worker.served import ServedRequests, num_choices

logger = logging.getLogger(__name__)

DRAIN_POLL_S = 0.1
ROUTER_LOST = "aborted:router_lost"


class WorkerState:
    """All routers and requests of one worker. Every method takes the time and returns what to do, in order."""

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
        self._handler = handler
        self._limits = limits
        self._load = load
        self._metrics = metrics
        self._heartbeats = Heartbeats(registration)
        self._reports = ContentReports(contents)
        self._drain = Drain()
        self._links: dict[str, RouterMembership] = {}
        self._served = ServedRequests()
        self._accounts = RequestAccounts(metrics, self._served)
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
        return self._served.num_not_of(is_prefill=self.roles.role == "prefill")

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
    def num_requests(self) -> int:
        """Return how many requests have not had their last reply."""
        return len(self._served)

    def next_timer(self, now: float) -> float | None:
        """Return when ``on_timer`` has something to do at the latest; None = only after another event."""
        times = [link.next_timer() for link in self._links.values()]
        if self._served.next_deadline is not None:
            times.append(self._served.next_deadline)
        for time in (self._handler.next_timer(), self._reports.next_timer(), self._drain.next_timer(now, DRAIN_POLL_S)):
            if time is not None:
                times.append(time)
        return min(times) if times and not self.is_stopped else None

    # ---- routers -----------------------------------------------------------------------------------------------------

    def connect(self, link: str, now: float) -> list[Action]:
        """A socket to a router address exists: introduce the worker."""
        self._links[link] = RouterMembership(now)
        return self._do_duties(now)

    def disconnect(self, link: str) -> list[Action]:
        """A router address is gone from the name service, and so is the socket."""
        self._links.pop(link, None)
        self._forget_at(link)
        return self._abort_requests_of(link)

    def on_bad_frame(self, link: str, error: ProtocolError, now: float) -> list[Action]:
        """Report a frame that could not be decoded; it has no other effect."""
        self._metrics.count_rejected()
        if isinstance(error, VersionMismatch):
            return self._on_other_version(link, error, now)
        self._log_of_router(now, "rejected_frame", link, error=error.message)
        return [Send(link, Rejected(error=ErrorInfo.of(error)))]

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
        return self._abort_requests_of(link)

    def on_router_message(self, link: str, message: RouterMessage, now: float) -> list[Action]:
        """Handle one message of the router of ``link``."""
        membership = self._links.get(link)
        if membership is None or self.is_stopped:
            return []
        membership.on_heard(now)
        match message:
            case Generate() | EncodeRequest() | EngineCall():
                return self._on_request(link, message, now)
            case PullEarly():
                is_late = self.is_draining or message.request_id in self._served
                return [] if is_late else self._follow(self._handler.on_pull_early(message, now))
            case Abort():
                return self._on_abort(link, message, now)
            case MeetProducer() | Release() | Renew():
                return [for_connector(message)]
            case Registered():
                return self._on_registered(link, membership, message, now)
            case Refused():
                return self._on_refused(link, membership, message, now)
            case SwitchRole():
                return self._on_switch(link, message, now)
            case messages.Drain():
                return self.start_drain(now, message.deadline_ms / 1e3 or self._limits.drain_timeout_s)

    def _on_registered(self, link: str, membership: RouterMembership, message: Registered, now: float) -> list[Action]:
        """Requests of an earlier router process end, also those that came after it was lost for its silence.

        The latter are answered: if this router's first answer was lost, they may be its own.
        """
        was_registered = membership.is_registered
        is_another = membership.on_registered(message, now)
        if not was_registered or is_another:
            logger.info(event("registered", router=link, router_id=message.router_id))
        self.roles.on_registered(link, message, now)
        reports = self._reports.on_registered(link, message, now, is_new=not was_registered or is_another)
        if is_another and was_registered:
            return [*self._abort_requests_of(link), *reports]
        return [*(self._give_up_requests_of(link) if is_another and self._served.of_link(link) else []), *reports]

    def _on_refused(self, link: str, membership: RouterMembership, message: Refused, now: float) -> list[Action]:
        """All requests of this router came before its refusal, also those that came late, after it had seemed lost."""
        if membership.on_refused(message.error.message, now):
            self._log_of_router(now, "refused_by_router", link, code=message.error.code, message=message.error.message)
        self._forget_at(link)
        return self._abort_requests_of(link)

    def _forget_at(self, link: str) -> None:
        """Forget what this router knows of the worker: it is gone, or has no such member."""
        self._reports.stop(link)
        self.roles.on_lost(link)

    def _log_of_router(self, now: float, name: str, link: str, **fields: object) -> None:
        if line := limited_event(self._router_lines, now, name, link, router=link, **fields):
            logger.warning(line)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _on_request(self, link: str, message: Generate | EncodeRequest | EngineCall, now: float) -> list[Action]:
        try:
            actions = self._admit(message, now)
        except RequestError as error:
            return [self._refuse(link, message.request_id, error)]
        except Exception:  # the request boundary: a bug of ours ends this request, with an answer, and nothing else
            logger.exception(event("worker_bug", request_id=message.request_id))
            bug = KVFerryError("the worker failed on this request; its log says how")
            return [*self._drop(message.request_id, bug.code), self._refuse(link, message.request_id, bug)]
        if self._served.begin(link, message, now).has_prompt:
            send_early([other for key, other in self._links.items() if key != link], now)
        return actions

    def _admit(self, message: Generate | EncodeRequest | EngineCall, now: float) -> list[Action]:
        """Return what starts a request, or raise the RequestError that refuses it."""
        if message.request_id in self._served:
            raise InvalidRequest(f"request id {message.request_id!r} is in use", param="request_id")
        if self.is_draining:
            raise NoWorker(f"worker {self._registration.engine_id} is draining")
        if self._served.num_choices + num_choices(message) > self._limits.max_num_seqs + self._limits.max_waiting_requests:
            raise Overloaded(f"worker {self._registration.engine_id} holds {self._served.num_choices} choices already")
        match message:
            case EngineCall():
                if isinstance(self._registration, RegisterEncoder) or not self._registration.takes_calls:
                    raise InvalidRequest("this worker's engine has no API to call")
                return [SubmitCall(message)]
            case EncodeRequest():
                return [SubmitAdd(self._handler.on_encode(message, now))]
            case Generate():
                start = SubmitAdd(self._handler.on_generate(message, now))
                # The engine's thread wakes up while the connector is informed.
                return [start] if message.kv_handoff is None else [start, ExpectTransfer(message.kv_handoff)]

    def _refuse(self, link: str, request_id: str, error: KVFerryError) -> Send:
        self._metrics.count_failed(error.code)
        logger.info(event("refused", request_id=request_id, code=error.code, message=error.message))
        return Send(link, RequestFailed(request_id=request_id, error=ErrorInfo.of(error)))

    def _on_abort(self, link: str, message: Abort, now: float) -> list[Action]:
        actions: list[Action] = []
        for name in message.request_ids:
            request_id, index = split_choice_id(name)
            served = self._served.get(name) or self._served.get(request_id)
            if served is not None and served.link != link:
                continue
            if name not in self._served and request_id in self._served:
                actions += self._abort_choice(request_id, index, now)
            else:
                actions += self._drop(name, f"aborted:{message.reason}")
        return actions + self._leave_if_done(now)

    def _abort_choice(self, request_id: str, index: int, now: float) -> list[Action]:
        """End one choice: the router has found a stop string in its text. The other choices continue."""
        result = self._handler.on_abort_choice(request_id, index)
        if (served := self._served.get(request_id)) is not None:
            self._served.free_choices(served, len(result.abort_ids))
        for ended in result.ended:
            self._accounts.finish(ended, now)
        return self._follow(result)

    def _drop(self, request_id: str, outcome: str) -> list[Action]:
        """Stop a request and free its resources. The caller sends the reply, if there is one."""
        served = self._accounts.drop(request_id, outcome)
        is_call = served is not None and served.is_call
        return [SubmitAbort([request_id])] if is_call else self._follow(self._handler.on_abort(request_id))

    def _fail(self, request_id: str, error: KVFerryError) -> list[Action]:
        """Stop a request and tell its router why."""
        served = self._served.get(request_id)
        assert served is not None, "its caller has found it"
        self._metrics.count_failed(error.code)
        failed = Send(served.link, RequestFailed(request_id=request_id, error=ErrorInfo.of(error)))
        return [*self._drop(request_id, error.code), failed]

    def _abort_requests_of(self, link: str) -> list[Action]:
        """Abort the requests of a router that is gone, and whose clients are gone with it."""
        orphans = self._served.of_link(link)
        if not orphans:
            return []
        logger.warning(event("router_lost", router=link, aborted_requests=len(orphans)))
        actions = [action for request_id in orphans for action in self._drop(request_id, ROUTER_LOST)]
        return [*actions, EndUnanswered(tuple(orphans), ROUTER_LOST)]

    def _give_up_requests_of(self, link: str) -> list[Action]:
        """Fail the requests of a silent router. If it is still alive, it must learn that this worker has dropped them."""
        orphans = self._served.of_link(link)
        logger.warning(event("router_silent", router=link, failed_requests=len(orphans)))
        error = RouterSilent(f"worker {self._registration.engine_id} heard nothing from the router for too long")
        return [action for request_id in orphans for action in self._fail(request_id, error)]

    def on_unsendable(self, link: str, request_id: str, error: ProtocolError) -> list[Action]:
        """A reply exceeds what a frame may hold: stop its request and say so instead."""
        self._metrics.count_failed(error.code)
        failed = Send(link, RequestFailed(request_id=request_id, error=ErrorInfo.of(error)))
        return [*self._drop(request_id, error.code), failed]

    # ---- engine ------------------------------------------------------------------------------------------------------

    def on_outputs(self, outputs: Sequence[EngineCoreOutput], now: float) -> list[Action]:
        """Process the outputs of one engine step: at most one frame of tokens per router."""
        self._accounts.count(outputs)
        result = self._handler.on_outputs(outputs, now)
        actions: list[Action] = []
        tokens: dict[str, list[Tokens]] = {}
        for reply in result.replies:
            served = self._served.get(reply.request_id)
            if served is None:
                continue
            self._accounts.note(served, reply, now)
            if isinstance(reply, Tokens):
                tokens.setdefault(served.link, []).append(reply)
            else:
                actions.append(Send(served.link, reply))
        actions += [Send(link, frame) for link, frame in tokens.items()]
        for request_id in result.ended:
            self._accounts.finish(request_id, now)
        return [*actions, *self._follow(result), *self._reports.take_due(now), *self._leave_if_done(now)]

    def on_call_reply(self, reply: EngineReply | RequestFailed, now: float) -> list[Action]:
        """Pass on what the engine's API says to a call; replies to calls that have ended are dropped."""
        served = self._served.get(reply.request_id)
        if served is None:
            return []
        if isinstance(reply, RequestFailed):
            self._accounts.note(served, reply, now)
        if isinstance(reply, RequestFailed) or reply.is_last:
            self._accounts.finish(reply.request_id, now)
        return [Send(served.link, reply), *self._leave_if_done(now)]

    def on_engine_death(self, error: BaseException) -> list[Action]:
        """The engine thread has ended: answer every request, and end the process."""
        if self.is_stopped:
            return []
        logger.error(event("engine_dead", error=repr(error)))
        dead = EngineDead(f"the engine of worker {self._registration.engine_id} died: {error!r}")
        actions = [action for request_id in self._served for action in self._fail(request_id, dead)]
        return actions + self._stop(1)

    def _follow(self, result: RoleOutput) -> list[Action]:
        """Return the actions that start, stop and release what the handler has asked for."""
        actions: list[Action] = []
        if result.new_requests:
            actions.append(SubmitAdd(result.new_requests))
        if result.abort_ids:
            actions.append(SubmitAbort(result.abort_ids))
        if result.release_transfer_ids:
            actions.append(ReleaseTransfers(tuple(result.release_transfer_ids)))
        if result.release_sources:
            actions.append(ReleaseEmbeddings(tuple(result.release_sources)))
        return actions

    # ---- time --------------------------------------------------------------------------------------------------------

    def on_timer(self, now: float) -> list[Action]:
        """Do everything that is due."""
        if self.is_stopped:
            return []
        self._heartbeats.on_timer(now, self.next_timer(now))
        actions: list[Action] = []
        for key, link in self._links.items():
            if link.lose_if_silent(now):
                self._forget_at(key)
                actions += self._give_up_requests_of(key)
        actions += self._expire(now)
        actions += self._follow(self._handler.on_timer(now))
        actions += self._do_duties(now)
        return actions + self._leave_if_done(now)

    def _expire(self, now: float) -> list[Action]:
        actions: list[Action] = []
        while (request_id := self._served.pop_due(now)) is not None:
            actions += self._fail(request_id, DeadlineExceeded("the request's time budget is used up"))
        return actions

    def _do_duties(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for key, link in self._links.items():
            duty = link.take_duty(now)
            if duty is MembershipDuty.REGISTER and not self.is_draining:
                actions.append(Send(key, self._registration))
            elif duty is MembershipDuty.HEARTBEAT:
                actions += [] if self.roles.is_known_at(key) else [Send(key, self._registration)]
                actions += [*self._reports.take(key, now), Send(key, self._heartbeat(key, now))]  # it tells of the reports
        return actions + self._reports.take_due(now)

    def _heartbeat(self, link: str, now: float) -> Heartbeat:
        place, num_reports = place_of(self._links[link], self._links.values()), self._reports.num_sent(link)
        load, others = self._load(), self._served.queued_of_others(link)
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
        timeout = self._limits.drain_timeout_s if timeout_s is None else timeout_s
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
            actions = [action for request_id in self._served for action in self._fail(request_id, gone)]
        load = self._load()
        if not self._drain.is_over(now, self.num_requests, load.num_leased_blocks, load.longest_lease_s):
            return actions
        goodbye = Goodbye(engine_id=self._registration.engine_id, incarnation=self._registration.incarnation)
        return [*actions, *(Send(key, goodbye) for key, link in self._links.items() if link.is_registered), *self._stop(0)]

    def _stop(self, exit_code: int) -> list[Action]:
        self._exit_code = exit_code
        return [Stop(exit_code)]
