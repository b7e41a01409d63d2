"""Requests that wait for their grammar: before they begin, and again when it is full.

A grammar's lexer states are shared by its requests, so one request may fill them for all. The others have done nothing wrong:
whoever meets a full grammar loses its blocks and waits for a new one, in which its output so far is replayed. That is shared as
well; the second time a request gets one of its own. Only who has filled that alone ends with the error. Compiles nothing: the
engine is told what to have compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from core.request import EngineCoreOutput, Request, RequestStatus
from core.sched.outputs import fail_requests
from core.sched.running import take_off
from core.sched.state import SchedulerState
from core.wire.messages import ErrorInfo
from core.wire.sampling import StructuredOutput

if TYPE_CHECKING:
    from core.grammar.compiled import CompiledGrammar

_MAX_LOST = 2  # grammars of a request that were full: the first was shared, the second perhaps, the next is its own


def await_grammar(state: SchedulerState, request: Request) -> None:
    """Let a request that is in no queue wait, without blocks."""
    request.status = RequestStatus.WAITING_FOR_GRAMMAR
    state.grammar_waiting[request.request_id] = request


def take_grammar(state: SchedulerState, output: StructuredOutput, grammar: CompiledGrammar, owner: str = "") -> None:
    """Let the requests that wait for this grammar be admitted, in their order: those that have run before all others.

    Requests with a full one that do not run change over to it.
    """
    for request in state.requests.values():
        is_broken = request.grammar is not None and request.grammar.is_broken
        if is_broken and request.status is not RequestStatus.RUNNING and _wants(request, output, owner):
            request.grammar = grammar
    found = [request for request in state.grammar_waiting.values() if _wants(request, output, owner)]
    for request in found:
        del state.grammar_waiting[request.request_id]
        request.grammar = grammar
        request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
        if not request.num_preemptions:
            state.waiting.add_request(request)
    for request in reversed(found):
        if request.num_preemptions:
            state.waiting.requeue_request(request)


def fail_grammar(state: SchedulerState, output: StructuredOutput, error: ErrorInfo, owner: str = "") -> list[EngineCoreOutput]:
    """End the requests that wait for this grammar, which cannot be had; return their last outputs."""
    failed = {request.request_id: error for request in state.grammar_waiting.values() if _wants(request, output, owner)}
    return fail_requests(state, failed)


def put_back_broken(state: SchedulerState, refused: Mapping[str, ErrorInfo]) -> dict[str, ErrorInfo]:
    """Let the running requests that a full grammar has left without a token wait for a new one.

    Returns the errors of the others, which end: what they were refused for is their own.
    """
    ending: dict[str, ErrorInfo] = {}
    for request_id, error in refused.items():
        request = state.requests[request_id]
        output = request.sampling.structured_output
        is_broken = request.grammar is not None and request.grammar.is_broken
        if output is None or not is_broken or _owner_of(request):
            ending[request_id] = error
            continue
        take_off(state, request, pins_blocks=True)
        state.put_back_req_ids.add(request_id)
        request.grammar = None
        request.num_lost_grammars += 1
        state.lost_grammars[output, _owner_of(request)] = None
        await_grammar(state, request)
    return ending


def _wants(request: Request, output: StructuredOutput, owner: str) -> bool:
    return _owner_of(request) == owner and request.sampling.structured_output == output


def _owner_of(request: Request) -> str:
    """Return who may share the grammar of a request: nobody else, or, if empty, any."""
    return request.request_id if request.num_lost_grammars >= _MAX_LOST else ""
