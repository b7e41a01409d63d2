"""Calls of engines' APIs: one worker each, parts in order, one end whatever happens."""

import msgspec
import pytest

from core.errors import KVFerryError, ProtocolError
from core.wire.codec import decode_router_frame, encode_router_message
from core.wire.engine_calls import EngineCall, EngineReply
from core.wire.messages import Abort, ErrorInfo, Generate, Goodbye, Heartbeat, Rejected, RequestFailed
from router.dispatch.core import Transmit, requests_of
from router.dispatch.engine_api import deadline_ms
from router.dispatch.engine_calls import Answered
from tests.router.dispatch.requests.conftest import Bench

CALL = EngineCall(request_id="c", path="/x", body=b"{}", deadline_ms=2000)


@pytest.fixture
def bench():
    made = Bench()
    made.join("a0", takes_calls=True)
    made.join("a1", takes_calls=True)
    return made


@pytest.fixture
def worker(bench):
    return next(worker for worker in bench.core.membership.workers if worker.key.engine_id == "a0")


@pytest.fixture
def begun(bench, worker):
    actions = bench.core.begin_call(CALL, worker, 0.0)
    assert actions == [Transmit(b"a0", CALL)]
    return bench.core


def part(position, **fields):
    return EngineReply(request_id="c", position=position, body=b"p", **fields)


def test_parts_arrive_in_order_and_the_last_one_ends_the_call(begun, worker):
    assert worker.num_inflight == 1
    assert begun.on_message(b"a0", part(0), 0.1) == [Answered("c", part(0))]
    assert begun.on_message(b"a0", part(1, is_last=True), 0.2) == [Answered("c", part(1, is_last=True))]
    assert (len(begun.calls), worker.num_inflight) == (0, 0)
    assert begun.on_message(b"a0", part(2), 0.3) == []


def test_a_part_of_another_worker_is_ignored(begun):
    assert begun.on_message(b"a1", part(0), 0.1) == []
    assert begun.on_message(b"a1", RequestFailed(request_id="c", error=ErrorInfo(code="x", message="")), 0.1) == []
    assert len(begun.calls) == 1


def test_a_lost_part_fails_the_call_and_ends_it_at_the_worker(begun):
    abort, answered = begun.on_message(b"a0", part(1), 0.1)
    assert abort == Transmit(b"a0", Abort(request_ids=("c",), reason=ProtocolError.code))
    assert answered.reply.code == ProtocolError.code
    assert len(begun.calls) == 0


def test_a_rejected_message_fails_the_calls_that_it_may_have_been(bench, worker):
    error = ErrorInfo.of(ProtocolError("no such message"))
    for request_id in ("answered", "c"):
        bench.do(bench.core.begin_call(msgspec.structs.replace(CALL, request_id=request_id), worker, 0.0))
    bench.receive("a0", EngineReply(request_id="answered", position=0, body=b"p"))
    bench.receive("a0", Rejected(error=error))
    assert bench.answered[1:] == [Answered("c", error)]
    assert bench.to("a0", Abort) == [Abort(request_ids=("c",), reason=error.code)]
    assert "answered" in bench.core.calls


def test_calls_of_a_worker_that_comes_by_another_connection_end_there_too(bench, worker):
    bench.do(bench.core.begin_call(CALL, worker, 0.0))
    bench.receive("a0-again", Heartbeat(engine_id="a0", incarnation=1))
    assert bench.to("a0-again", Abort) == [Abort(request_ids=("c",), reason="peer_lost")]
    assert [answered.reply.code for answered in bench.answered] == ["peer_lost"]


def test_a_worker_that_goes_on_answering_a_call_that_has_ended_is_told_so(begun):
    begun.abort_call("c", 0.1)
    told = [now for now in (0.2, 2.0, 2.2, 4.0) if begun.on_message(b"a0", part(0), now)]
    assert told == [2.2]
    (abort,) = begun.on_message(b"a0", msgspec.structs.replace(part(3), request_id="unknown"), 5.0)
    assert abort == Transmit(b"a0", Abort(request_ids=("unknown",), reason="unknown"))


def test_a_call_that_the_router_cannot_continue_fails(begun):
    assert requests_of(part(0)) == ["c"]
    abort, answered = begun.fail("c", KVFerryError("a bug"), 0.1)
    assert (abort.message.request_ids, answered.reply.code) == (("c",), "internal_error")


@pytest.mark.parametrize("how", ["failed", "left", "late"])
def test_a_call_fails_once_with_the_reason(begun, worker, how):
    match how:
        case "failed":
            failed = RequestFailed(request_id="c", error=ErrorInfo(code="engine_dead", message="gone"))
            actions = begun.on_message(b"a0", failed, 0.1)
        case "left":
            actions = begun.on_message(b"a0", Goodbye(engine_id="a0", incarnation=1), 0.1)
        case "late":
            actions = begun.on_timer(2.0)
    errors = [action.reply.code for action in actions if isinstance(action, Answered)]
    assert errors == [{"failed": "engine_dead", "left": "peer_lost", "late": "deadline_exceeded"}[how]]
    assert len(begun.calls) == 0
    is_aborted = any(isinstance(action, Transmit) and isinstance(action.message, Abort) for action in actions)
    assert is_aborted == (how == "late")


def test_a_call_to_a_worker_that_has_left_since_it_was_chosen_fails_at_once(bench, worker):
    bench.leave("a0")
    (answered,) = bench.core.begin_call(CALL, worker, 0.1)
    assert (answered.request_id, answered.reply.code) == ("c", "peer_lost")
    assert len(bench.core.calls) == 0
    bench.join("a0", incarnation=2, takes_calls=True)
    (answered,) = bench.core.begin_call(CALL, worker, 0.2)
    assert answered.reply.code == "peer_lost", "its successor is another process"


def test_a_call_counts_at_the_present_member_of_a_worker_that_registered_again(bench, worker):
    bench.leave("a0")
    bench.join("a0", takes_calls=True)
    bench.do(bench.core.begin_call(CALL, worker, 0.0))
    present = bench.core.membership.get(worker.key)
    assert (present.num_inflight, worker.num_inflight) == (1, 0)
    bench.receive("a0", part(0, is_last=True))
    assert (present.num_inflight, worker.num_inflight) == (0, 0)


LONG = EngineCall(request_id="c", path="/x", body=b"{}", deadline_ms=60_000)


def stall(bench, name="a0"):
    """Let a worker report that its engine makes no step, until the router believes it; the others are well."""
    for second in range(1, 30):
        bench.now = float(second)
        for other in ("a0", "a1"):
            if bench.core.membership.by_peer(other.encode()) is not None:
                stalled_ms = 1e3 * second if other == name else 0.0
                bench.heartbeat(other, num_running=1, stalled_ms=stalled_ms)
        bench.do(bench.core.on_timer(bench.now))


def test_a_call_leaves_a_stalled_worker_for_another_one(bench, worker):
    bench.do(bench.core.begin_call(LONG, worker, 0.0))
    stall(bench)
    assert worker.why_unresponsive
    assert len(bench.core.calls) == 0
    (abort,) = bench.to("a0", Abort)
    assert (abort.request_ids, abort.reason) == (("c",), "worker_stalled")
    assert [answered.reply.code for answered in bench.answered] == ["worker_stalled"]


def test_a_call_stays_where_no_other_worker_could_answer_it(bench, worker):
    bench.leave("a1")
    bench.do(bench.core.begin_call(LONG, worker, 0.0))
    stall(bench)
    assert worker.why_unresponsive
    assert len(bench.core.calls) == 1


def test_a_call_stays_if_the_other_worker_has_another_model(bench, worker):
    bench.leave("a1")
    bench.join("a1", takes_calls=True, model_fingerprint=b"other")
    bench.do(bench.core.begin_call(LONG, worker, 0.0))
    stall(bench)
    assert worker.why_unresponsive
    assert len(bench.core.calls) == 1


def test_after_a_pause_a_call_stays_with_its_engine_if_all_are_cut_off(bench, worker):
    bench.do(bench.core.on_timer(0.0))
    bench.do(bench.core.begin_call(LONG, worker, 0.0))
    bench.now = 30.0
    bench.do(bench.core.on_timer(bench.now))
    lost = [b"a0"]
    for peer in lost:  # grows: what is sent to other workers is lost, too
        actions = bench.core.on_unreachable(peer, bench.now)
        lost += [action.peer for action in actions if isinstance(action, Transmit)]
    bench.do(bench.core.on_timer(bench.now))
    assert {*lost} == {b"a0", b"a1"}
    assert (len(bench.core.calls), bench.answered) == (1, [])


def test_a_call_that_needs_no_step_stays_at_a_stalled_engine(bench, worker):
    bench.do(bench.core.begin_call(msgspec.structs.replace(LONG, path="/v1/chat/completions/derender"), worker, 0.0))
    stall(bench)
    assert worker.why_unresponsive
    assert len(bench.core.calls) == 1


def test_a_call_whose_answer_has_begun_stays(bench, worker):
    bench.do(bench.core.begin_call(LONG, worker, 0.0))
    bench.receive("a0", part(0))
    stall(bench)
    assert len(bench.core.calls) == 1


def test_a_call_that_its_caller_gives_up_ends_at_the_worker(begun, worker):
    assert begun.abort_call("c", 0.1) == [Transmit(b"a0", Abort(request_ids=("c",), reason="client"))]
    assert begun.abort_call("c", 0.2) == []
    assert worker.num_inflight == 0


def test_what_the_engine_has_rendered_goes_with_every_leg_of_a_request(bench):
    submission = bench.submission("r", engine_request=b"{}")
    bench.do(bench.core.submit(submission, 0.0))
    generates = [message for _, message in bench.sent if isinstance(message, Generate)]
    assert [message.engine_request for message in generates] == [b"{}"]


@pytest.mark.parametrize("timeout_s", [-1.0, 0.0, 1e-6, 1e9, 1e20, 1e306, float("inf")])
def test_a_deadline_of_any_time_fits_on_the_wire(timeout_s):
    call = msgspec.structs.replace(CALL, deadline_ms=deadline_ms(timeout_s))
    assert decode_router_frame(encode_router_message(call)) == call
    assert call.deadline_ms >= 1
