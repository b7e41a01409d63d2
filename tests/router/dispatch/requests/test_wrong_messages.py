"""Messages that are repeated, impossible, unreadable, or from the wrong sender."""

from __future__ import annotations

import msgspec
import pytest

from core.errors import ProtocolError
from core.wire.messages import Abort, ErrorInfo, Generate, PrefillChoice, Refused, Rejected, Release, RequestFailed, Tokens

UNREADABLE = ErrorInfo(code="protocol_error", message="malformed frame", http_status=502)


def test_repeated_tokens_are_dropped(make_bench):
    bench = make_bench("a0")
    bench.submit()
    bench.tokens(0, 1, 2, peer="a0")
    bench.tokens(0, 1, 2, peer="a0")
    bench.tokens(1, 2, 3, peer="a0")
    assert bench.output() == [1, 2, 3]


@pytest.mark.parametrize(
    "fields",
    [
        {"index": 1},
        {"finish_reason": "error"},
        {"finish_reason": "abort"},
        {"logprobs": ()},
    ],
)
def test_impossible_tokens_fail_the_request(make_bench, fields):
    bench = make_bench("a0")
    bench.submit()
    bench.tokens(0, 1, peer="a0", **fields)
    assert bench.error().code == ProtocolError.code
    bench.assert_idle()


def test_one_bad_item_spares_the_other_requests_of_its_frame(make_bench):
    bench = make_bench("a0")
    bench.submit("r1")
    bench.submit("r2")
    bench.receive("a0", [Tokens("r1", 0, 0, (1,)), Tokens("r1", 7, 0, (1,)), Tokens("r2", 0, 0, (2,))])
    assert bench.error("r1").code == ProtocolError.code
    assert bench.output("r2") == [2]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"choices": ()}, "cover every choice once"),
        ({"choices": (PrefillChoice(index=1, token_id=1),)}, "cover every choice once"),
        ({"choices": (PrefillChoice(index=0, token_id=1),) * 2}, "cover every choice once"),
        ({"choices": (PrefillChoice(index=0, token_id=1, finish_reason="abort"),)}, "by itself"),
        ({"kv_handoff": None}, "no handoff"),
    ],
)
def test_an_impossible_prefill_result_fails_the_request_and_leaves_no_lease(pair, changes, said):
    pair.submit()
    pair.prefill_done(**changes)
    assert pair.error().code == ProtocolError.code
    assert said in pair.error().message
    assert pair.to("d0", Generate) == []
    if changes.get("kv_handoff", "kept") is not None:
        assert pair.to("p0", Release)
    pair.assert_idle()


@pytest.mark.parametrize("owner", [{"engine_id": "p9"}, {"incarnation": 2}])
def test_a_handoff_of_another_worker_s_blocks_fails_the_request(pair, owner):
    pair.submit()
    pair.prefill_done(kv_handoff=msgspec.structs.replace(pair.handoff(), **owner))
    assert "its handoff names another worker" in pair.error().message
    assert pair.to("p0", Release)
    pair.assert_idle()


def test_messages_of_unregistered_workers_are_refused(pair):
    pair.submit()
    pair.prefill_done(peer="x")
    assert pair.to("x", Refused)[0].error.code == "not_registered"
    assert pair.updates == {}


def test_another_worker_cannot_answer_for_the_chosen_one(make_bench):
    bench = make_bench("p0", "p1", "d0", "d1")
    bench.submit()
    bench.prefill_done(peer="p1")
    assert bench.to("p1", Release) == [Release(transfer_ids=("t-r1",))]
    assert bench.updates == {}
    bench.prefill_done()
    bench.tokens(1, 66, peer="d1")
    assert bench.output() == [50]


def test_a_worker_busy_with_something_unknown_is_told_to_stop(make_bench):
    bench = make_bench("a0")
    bench.tokens(0, 1, request_id="ghost", peer="a0")
    bench.tokens(1, 1, request_id="ghost", peer="a0")
    assert bench.to("a0", Abort) == [Abort(request_ids=("ghost",), reason="unknown")]


def test_late_tokens_of_an_ended_request_cause_nothing(make_bench):
    bench = make_bench("a0")
    bench.submit()
    bench.do(bench.core.abort("r1", "client", 0.0))
    before = len(bench.sent)
    bench.now = 1.9
    bench.tokens(0, 1, peer="a0")
    assert len(bench.sent) == before


def test_a_worker_that_did_not_get_its_abort_is_told_again(make_bench):
    bench = make_bench("a0")
    bench.submit()
    bench.do(bench.core.abort("r1", "client", 0.0))
    for bench.now in (2.0, 2.1, 3.9, 4.0):
        bench.tokens(0, 1, peer="a0")
    assert [message.reason for message in bench.to("a0", Abort)] == ["client", "unknown", "unknown"]


def test_a_malformed_frame_drops_its_worker_and_fails_its_requests_at_once(pair):
    pair.submit()
    pair.do(pair.core.on_malformed(b"p0", ProtocolError("malformed frame: x"), 0.0))
    assert pair.generated("d0").request_id == "r1.2"
    assert pair.to("p0", Refused)[-1].error.code == ProtocolError.code


def test_a_malformed_frame_of_an_unregistered_worker_is_refused(pair):
    pair.do(pair.core.on_malformed(b"x", ProtocolError("malformed frame: x"), 0.0))
    assert pair.to("x", Refused)
    assert pair.core.not_ready_reason is None


def test_a_frame_that_a_worker_could_not_read_moves_what_it_never_answered(make_bench):
    bench = make_bench("a0")
    bench.submit("r1")
    bench.submit("r2")
    bench.tokens(0, 1, peer="a0", request_id="r1")
    bench.join("a1")
    bench.receive("a0", Rejected(error=UNREADABLE))
    assert [message.request_id for message in bench.to("a1", Generate)] == ["r2.2"]
    assert not bench.ended


def test_a_request_that_no_worker_can_read_ends(make_bench):
    bench = make_bench("a0")
    bench.submit("r1")
    for _ in range(10):
        bench.receive("a0", Rejected(error=UNREADABLE))
    assert bench.error("r1") == UNREADABLE


def test_a_worker_s_answer_to_an_unreadable_request_fails_that_one_alone(make_bench):
    bench = make_bench("a0")
    bench.submit("r1")
    bench.submit("r2")
    bench.receive("a0", RequestFailed(request_id="r1", error=UNREADABLE))
    assert bench.error("r1") == UNREADABLE
    assert "r2" not in bench.ended


def test_a_rejection_spares_a_request_that_has_shown_a_token_of_one_choice(after_handoff):
    after_handoff.tokens(1, 60, index=0)
    after_handoff.receive("d0", Rejected(error=UNREADABLE))
    assert "r1" not in after_handoff.ended
