"""A worker's requests from their messages to their last replies, and every way in which one ends before.

Owns which request belongs to which router, admission, and deadlines; the role's handler interprets the requests. Knows nothing
of membership, of the role in force and of when to leave: ``core.worker.state`` says which routers are gone, and whether new
requests are taken. Every method takes the time if it needs one, in seconds, and returns what to do, in order.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from core.errors import DeadlineExceeded, InvalidRequest, KVFerryError, NoWorker, Overloaded, RequestError, RouterSilent
from core.log import event
from core.metrics import WorkerMetrics
from core.request import EngineCoreOutput
from core.wire.early import PullEarly
from core.wire.engine_calls import EngineCall, EngineReply
from core.wire.messages import Abort, EncodeRequest, ErrorInfo, Generate, Register, RegisterEncoder, RequestFailed, Tokens
from core.worker.actions import (
    Action,
    AdmissionLimits,
    EndUnanswered,
    ExpectTransfer,
    ReleaseEmbeddings,
    ReleaseTransfers,
    Send,
    SubmitAbort,
    SubmitAdd,
    SubmitCall,
)
from core.worker.request_accounts import RequestAccounts
from core.worker.role import RoleHandler, RoleOutput, split_choice_id
from core.worker.served import Served, ServedRequests, num_choices

logger = logging.getLogger("core.worker.state")  # for operators' filters: one name for all modules of a worker's state

ROUTER_LOST = "aborted:router_lost"


class Serving:
    """The requests of all routers of one worker. ``requests`` are those that have not had their last reply."""

    def __init__(
        self,
        registration: Register | RegisterEncoder,
        handler: RoleHandler,
        limits: AdmissionLimits,
        metrics: WorkerMetrics,
    ) -> None:
        self._name = registration.engine_id
        self._takes_calls = isinstance(registration, Register) and registration.takes_calls
        self._handler = handler
        self._limits = limits
        self._metrics = metrics
        self.requests = ServedRequests()
        self._accounts = RequestAccounts(metrics, self.requests)

    def next_timer(self) -> float | None:
        """Return when ``on_timer`` has something to do at the latest; None = only after another event."""
        times = [time for time in (self.requests.next_deadline, self._handler.next_timer()) if time is not None]
        return min(times, default=None)

    def on_timer(self, now: float) -> list[Action]:
        """End the requests whose time is up, and what else is due in the role."""
        return [*self._expire(now), *self._follow(self._handler.on_timer(now))]

    def _expire(self, now: float) -> list[Action]:
        actions: list[Action] = []
        while (request_id := self.requests.pop_due(now)) is not None:
            actions += self._fail(request_id, DeadlineExceeded("the request's time budget is used up"))
        return actions

    # ---- what routers ask --------------------------------------------------------------------------------------------

    def take(
        self, link: str, message: Generate | EncodeRequest | EngineCall, now: float, *, is_leaving: bool
    ) -> tuple[list[Action], Served | None]:
        """Begin a request, or refuse it. Returns None instead of the request if it was refused."""
        try:
            actions = self._admit(message, now, is_leaving=is_leaving)
        except RequestError as error:
            return [self._refuse(link, message.request_id, error)], None
        except Exception:  # the request boundary: a bug of ours ends this request, with an answer, and nothing else
            logger.exception(event("worker_bug", request_id=message.request_id))
            bug = KVFerryError("the worker failed on this request; its log says how")
            return [*self._drop(message.request_id, bug.code), self._refuse(link, message.request_id, bug)], None
        return actions, self.requests.begin(link, message, now)

    def _admit(self, message: Generate | EncodeRequest | EngineCall, now: float, *, is_leaving: bool) -> list[Action]:
        """Return what starts a request, or raise the RequestError that refuses it."""
        if message.request_id in self.requests:
            raise InvalidRequest(f"request id {message.request_id!r} is in use", param="request_id")
        is_release = isinstance(message, EngineCall) and message.is_release  # a drain waits for the blocks that it frees
        if is_leaving and not is_release:
            raise NoWorker(f"worker {self._name} is draining")
        if self.requests.num_choices + num_choices(message) > self._limits.max_num_seqs + self._limits.max_waiting_requests:
            raise Overloaded(f"worker {self._name} holds {self.requests.num_choices} choices already")
        match message:
            case EngineCall():
                if not self._takes_calls:
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

    def pull_early(self, message: PullEarly, now: float, *, is_leaving: bool) -> list[Action]:
        """Read ahead for a request that will follow. Ignored once the request is here, or if it will not be taken."""
        if is_leaving or message.request_id in self.requests:
            return []
        return self._follow(self._handler.on_pull_early(message, now))

    def abort(self, link: str, message: Abort, now: float) -> list[Action]:
        """Stop requests and choices that their router names; those of other routers are left alone."""
        actions: list[Action] = []
        for name in message.request_ids:
            request_id, index = split_choice_id(name)
            served = self.requests.get(name) or self.requests.get(request_id)
            if served is not None and served.link != link:
                continue
            if name not in self.requests and request_id in self.requests:
                actions += self._abort_choice(request_id, index, now)
            else:
                actions += self._drop(name, f"aborted:{message.reason}")
        return actions

    def _abort_choice(self, request_id: str, index: int, now: float) -> list[Action]:
        """End one choice: the router has found a stop string in its text. The other choices continue."""
        result = self._handler.on_abort_choice(request_id, index)
        if (served := self.requests.get(request_id)) is not None:
            self.requests.free_choices(served, len(result.abort_ids))
        for ended in result.ended:
            self._accounts.finish(ended, now)
        return self._follow(result)

    # ---- what the engine answers -------------------------------------------------------------------------------------

    def on_outputs(self, outputs: Sequence[EngineCoreOutput], now: float) -> list[Action]:
        """Process the outputs of one engine step: at most one frame of tokens per router."""
        self._accounts.count(outputs)
        result = self._handler.on_outputs(outputs, now)
        actions: list[Action] = []
        tokens: dict[str, list[Tokens]] = {}
        for reply in result.replies:
            served = self.requests.get(reply.request_id)
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
        return [*actions, *self._follow(result)]

    def on_call_reply(self, reply: EngineReply | RequestFailed, now: float) -> list[Action]:
        """Pass on what the engine's API says to a call; replies to calls that have ended are dropped."""
        served = self.requests.get(reply.request_id)
        if served is None:
            return []
        if isinstance(reply, RequestFailed):
            self._accounts.note(served, reply, now)
        if isinstance(reply, RequestFailed) or reply.is_last:
            self._accounts.finish(reply.request_id, now)
        return [Send(served.link, reply)]

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

    # ---- ends without an abort ---------------------------------------------------------------------------------------

    def abort_of_link(self, link: str) -> list[Action]:
        """Abort the requests of a router that is gone, and whose clients are gone with it."""
        orphans = self.requests.of_link(link)
        if not orphans:
            return []
        logger.warning(event("router_lost", router=link, aborted_requests=len(orphans)))
        actions = [action for request_id in orphans for action in self._drop(request_id, ROUTER_LOST)]
        return [*actions, EndUnanswered(tuple(orphans), ROUTER_LOST)]

    def give_up_of_link(self, link: str, spare: str | None = None, *, is_dropped: bool = False) -> list[Action]:
        """Fail the requests of a silent router. If it is still alive, it must learn that this worker has dropped them.

        It is told by another link that leads to it, if there is a ``spare`` one. ``is_dropped``: the link was not silent, its
        address is gone from the name service.
        """
        orphans = self.requests.of_link(link)
        name = "router_address_gone" if is_dropped else "router_silent"
        logger.warning(event(name, router=link, failed_requests=len(orphans)))
        if spare is not None:
            self.requests.move(link, spare)
        why = "has lost the router's address" if is_dropped else "heard nothing from the router for too long"
        error = RouterSilent(f"worker {self._name} {why}")
        return [action for request_id in orphans for action in self._fail(request_id, error)]

    def fail_all(self, error: KVFerryError, *, spares_releases: bool = False) -> list[Action]:
        """Stop all requests, or all but releases, which have short deadlines, and tell their routers why."""
        spared = {request_id for request_id in self.requests if spares_releases and self._is_release(request_id)}
        return [action for request_id in self.requests if request_id not in spared for action in self._fail(request_id, error)]

    def _is_release(self, request_id: str) -> bool:
        served = self.requests.get(request_id)
        return served is not None and served.is_release

    def _fail(self, request_id: str, error: KVFerryError) -> list[Action]:
        """Stop a request and tell its router why."""
        served = self.requests.get(request_id)
        assert served is not None, "its caller has found it"
        return self.fail_at(served.link, request_id, error)

    def fail_at(self, link: str, request_id: str, error: KVFerryError) -> list[Action]:
        """Stop a request, if it has not ended yet, and tell the router of a link why."""
        self._metrics.count_failed(error.code)
        info = ErrorInfo.of(error)
        if request_id not in self.requests:  # its last reply could not be sent: the log tells of a request that was served
            self._accounts.log_failure(request_id, info)
        return [*self._drop(request_id, error.code), Send(link, RequestFailed(request_id=request_id, error=info))]

    def _drop(self, request_id: str, outcome: str) -> list[Action]:
        """Stop a request and free its resources. The caller sends the reply, if there is one."""
        served = self._accounts.drop(request_id, outcome)
        is_call = served is not None and served.is_call
        return [SubmitAbort([request_id])] if is_call else self._follow(self._handler.on_abort(request_id))
