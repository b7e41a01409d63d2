from __future__ import annotations

import msgspec
import pytest

from core.errors import ContextTooLong, NoWorker, Overloaded, ProtocolError
from core.wire.kv import GroupBlocks, KVHandoff, KVLayoutInfo
from core.wire.messages import (
    Abort,
    ErrorInfo,
    Generate,
    Goodbye,
    Heartbeat,
    PrefillChoice,
    PrefillDone,
    Refused,
    Register,
    Registered,
    Rejected,
    Release,
    Renew,
    RequestFailed,
    TokenLogprobs,
    Tokens,
    TransferUsage,
    Usage,
)
from core.wire.sampling import SamplingParams
from router.flow import Deliver, Ended, Phase
from router.machine import RouterLimits, RouterMachine, Transmit
from router.news import Submission

LAYOUT = KVLayoutInfo(dtype="float32", order="HND", block_size=64, num_layers=1, num_kv_heads=1, head_dim=4, block_bytes=2048)
LIMITS = RouterLimits(heartbeat_interval_s=1.0, heartbeat_timeout_s=5.0, request_timeout_s=60.0, max_requests=3)
FAILURE = ErrorInfo(code="digest", message="corrupt block", http_status=502, retryable=True)


class Bench:
    """A machine with workers whose connections have the workers' names; collects what goes out."""

    def __init__(self, *workers: str) -> None:
        self.machine = RouterMachine("tiny", "router-1", LIMITS)
        self.now = 0.0
        self.sent: list[tuple[str, object]] = []
        self.updates: dict[str, list] = {}
        self.ended: dict[str, Ended] = {}
        for name in workers:
            self.join(name)

    def join(self, name: str, **facts) -> None:
        role = {"p": "prefill", "d": "decode", "a": "aggregated"}[name[0]]
        register = Register(
            engine_id=name,
            incarnation=1,
            role=role,
            model="tiny",
            model_fingerprint=b"w",
            layout=LAYOUT,
            max_model_len=100,
            max_num_seqs=4,
            num_blocks=10,
        )
        self.receive(name, msgspec.structs.replace(register, **facts))

    def do(self, actions) -> None:
        for action in actions:
            match action:
                case Transmit(peer, message):
                    self.sent.append((peer.decode(), message))
                case Deliver(request_id, update):
                    assert request_id not in self.ended, "news after the end"
                    self.updates.setdefault(request_id, []).append(update)
                case Ended(flow):
                    assert flow.request_id not in self.ended, "two ends"
                    self.ended[flow.request_id] = action

    def submit(self, request_id: str = "r1", n: int = 1, prompt: int = 10, **sampling) -> None:
        params = SamplingParams(seed=7, **{"max_tokens": 20, **sampling})
        wanted = Submission(request_id=request_id, prompt_token_ids=tuple(range(prompt)), sampling=params, n=n)
        self.do(self.machine.submit(wanted, self.now))

    def receive(self, peer: str, message) -> None:
        self.do(self.machine.on_message(peer.encode(), message, self.now))

    def tick(self, now: float) -> None:
        self.now = now
        for worker in list(self.machine.cluster.workers):
            self.receive(worker.peer.decode(), Heartbeat(engine_id=worker.key.engine_id, incarnation=worker.key.incarnation))
        self.do(self.machine.on_timer(now))

    def prefill_done(self, request_id: str = "r1", peer: str = "p0", **changes) -> None:
        self.receive(peer, msgspec.structs.replace(prefill_done(request_id, peer), **changes))

    def tokens(self, position: int, *token_ids: int, request_id: str = "r1", peer: str = "d0", **fields) -> None:
        index = fields.pop("index", 0)
        self.receive(peer, [msgspec.structs.replace(Tokens(request_id, index, position, token_ids), **fields)])

    def to(self, peer: str, kind: type) -> list:
        return [message for name, message in self.sent if name == peer and isinstance(message, kind)]

    def output(self, request_id: str = "r1", index: int = 0) -> list[int]:
        choices = [choice for update in self.updates.get(request_id, []) for choice in update.choices]
        return [token for choice in choices if choice.index == index for token in choice.token_ids]

    def error(self, request_id: str = "r1") -> ErrorInfo | None:
        return self.updates[request_id][-1].error

    def assert_idle(self) -> None:
        assert len(self.machine.flows) == 0
        assert [worker.num_inflight for worker in self.machine.cluster.workers if worker.num_inflight] == []


def handoff(request_id: str, peer: str) -> KVHandoff:
    return KVHandoff(
        transfer_id=f"t-{request_id}",
        engine_id=peer,
        incarnation=1,
        control_address="tcp://127.0.0.1:1",
        model_fingerprint=b"w",
        layout=LAYOUT,
        groups=(GroupBlocks(group_id=0, block_ids=(1,), generations=(1,), block_hashes=(bytes(16),)),),
        num_tokens=10,
        lease_ms=30_000,
    )


def prefill_done(request_id: str = "r1", peer: str = "p0", n: int = 1) -> PrefillDone:
    return PrefillDone(
        request_id=request_id,
        choices=tuple(PrefillChoice(index=index, token_id=50 + index) for index in range(n)),
        kv_handoff=handoff(request_id, peer),
        num_cached_tokens=4,
        queue_ms=1.0,
        prefill_ms=2.0,
    )


# ---- the way through ---------------------------------------------------------------------------------------------------


def test_a_request_goes_to_prefill_then_to_decode_and_ends():
    bench = Bench("p0", "d0")
    bench.submit(max_tokens=3)
    first = bench.to("p0", Generate)[0]
    assert (first.handoff, first.kv_handoff, first.choices, first.deadline_ms) == (True, None, (), 60_000)
    assert bench.to("d0", Generate) == []

    bench.prefill_done()
    second = bench.to("d0", Generate)[0]
    assert second.kv_handoff == handoff("r1", "p0")
    assert [(choice.index, choice.output_token_ids) for choice in second.choices] == [(0, (50,))]
    assert (second.prompt_token_ids, second.sampling) == (first.prompt_token_ids, first.sampling)
    report = bench.updates["r1"][0].prompt
    assert (report.num_cached_tokens, report.queue_ms, report.prefill_ms) == (4, 1.0, 2.0)

    bench.tokens(1, 51)
    bench.tokens(2, 52, finish_reason="length")
    assert bench.output() == [50, 51, 52]
    assert bench.ended["r1"].flow.error is None
    assert bench.to("p0", Release) == []
    assert bench.to("p0", Abort) == bench.to("d0", Abort) == []
    bench.assert_idle()


def test_an_aggregated_worker_serves_alone():
    bench = Bench("a0")
    bench.submit()
    message = bench.to("a0", Generate)[0]
    assert not message.handoff
    bench.tokens(0, 50, peer="a0", usage=Usage(num_cached_tokens=3, prompt_logprobs=(None,)))
    bench.tokens(1, 51, peer="a0", finish_reason="stop", usage=Usage(num_cached_tokens=3))
    assert bench.output() == [50, 51]
    reports = [update.prompt for update in bench.updates["r1"]]
    assert reports[0].num_cached_tokens == 3
    assert reports[0].prompt_logprobs == (None,)
    assert reports[1] is None
    bench.assert_idle()


def test_a_request_that_ends_at_its_first_token_needs_no_decode_worker():
    bench = Bench("p0", "d0")
    bench.submit(max_tokens=1)
    bench.prefill_done(choices=(PrefillChoice(index=0, token_id=50, finish_reason="length"),), kv_handoff=None)
    assert bench.to("d0", Generate) == []
    assert bench.output() == [50]
    assert bench.ended["r1"].flow.finish_reasons == ["length"]
    bench.assert_idle()


def test_a_needless_hand_over_is_released():
    bench = Bench("p0", "d0")
    bench.submit(max_tokens=1)
    bench.prefill_done(choices=(PrefillChoice(index=0, token_id=50, finish_reason="length"),))
    assert bench.to("p0", Release) == [Release(transfer_ids=("t-r1",))]
    bench.assert_idle()


def test_several_choices_share_one_prefill_and_only_live_ones_go_on():
    bench = Bench("p0", "d0")
    bench.submit(n=3)
    done = prefill_done(n=3)
    ended = PrefillChoice(index=1, token_id=2, finish_reason="stop", stop_reason=2)
    bench.receive("p0", msgspec.structs.replace(done, choices=(done.choices[0], ended, done.choices[2])))
    assert [choice.index for choice in bench.to("d0", Generate)[0].choices] == [0, 2]
    bench.tokens(1, 60, index=2, finish_reason="stop")
    assert "r1" not in bench.ended
    bench.tokens(1, 61, index=0, finish_reason="stop")
    assert (bench.output(index=0), bench.output(index=1), bench.output(index=2)) == ([50, 61], [2], [52, 60])
    assert "r1" in bench.ended
    bench.assert_idle()


def test_logprobs_pass_through():
    bench = Bench("p0", "d0")
    bench.submit(logprobs=1)
    entry = TokenLogprobs((50, 50), (-0.5, -0.5), 1)
    bench.prefill_done(choices=(PrefillChoice(index=0, token_id=50, logprobs=entry),), prompt_logprobs=(None, entry))
    bench.tokens(1, 51, logprobs=(entry,))
    assert [update.choices[0].logprobs for update in bench.updates["r1"]] == [(entry,), (entry,)]
    assert bench.updates["r1"][0].prompt.prompt_logprobs == (None, entry)


def test_the_transfer_s_cost_is_reported():
    bench = Bench("p0", "d0")
    bench.submit()
    bench.prefill_done()
    bench.tokens(1, 51, usage=Usage(kv_transfer=TransferUsage(transport="shm", transferred_tokens=10)))
    assert bench.updates["r1"][-1].kv_transfer.transport == "shm"
    assert bench.updates["r1"][-1].prompt is None, "the prefill worker has reported the prompt already"


def test_tokens_of_one_frame_make_one_update_per_request():
    bench = Bench("a0")
    bench.submit("r1", n=2)
    bench.submit("r2")
    bench.receive("a0", [Tokens("r1", 0, 0, (1,)), Tokens("r2", 0, 0, (2,)), Tokens("r1", 1, 0, (3,))])
    assert len(bench.updates["r1"]) == len(bench.updates["r2"]) == 1
    assert [choice.index for choice in bench.updates["r1"][0].choices] == [0, 1]


# ---- lost, repeated and wrong messages -----------------------------------------------------------------------------------


def test_repeated_tokens_are_dropped():
    bench = Bench("a0")
    bench.submit()
    bench.tokens(0, 1, 2, peer="a0")
    bench.tokens(0, 1, 2, peer="a0")
    bench.tokens(1, 2, 3, peer="a0")
    assert bench.output() == [1, 2, 3]


def test_a_gap_in_the_tokens_fails_the_request():
    bench = Bench("p0", "d0")
    bench.submit()
    bench.prefill_done()
    bench.tokens(3, 54)
    assert bench.output() == [50]
    assert bench.error().code == ProtocolError.code
    assert "tokens 1 to 2 of choice 0 were lost" in bench.error().message
    assert bench.to("d0", Abort)
    bench.assert_idle()


@pytest.mark.parametrize(
    "fields",
    [
        {"index": 1},
        {"finish_reason": "error"},
        {"finish_reason": "abort"},
        {"logprobs": ()},
    ],
)
def test_impossible_tokens_fail_the_request(fields):
    bench = Bench("a0")
    bench.submit()
    bench.tokens(0, 1, peer="a0", **fields)
    assert bench.error().code == ProtocolError.code
    bench.assert_idle()


def test_one_bad_item_spares_the_other_requests_of_its_frame():
    bench = Bench("a0")
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
        ({"kv_handoff": None}, "no hand-over"),
        ({"kv_handoff": handoff("r1", "p9")}, "p9"),
        ({"kv_handoff": msgspec.structs.replace(handoff("r1", "p0"), incarnation=2)}, "another worker"),
    ],
)
def test_an_impossible_prefill_result_fails_the_request_and_leaves_no_lease(changes, said):
    bench = Bench("p0", "d0")
    bench.submit()
    bench.prefill_done(**changes)
    assert bench.error().code == ProtocolError.code
    assert said in bench.error().message
    assert bench.to("d0", Generate) == []
    if changes.get("kv_handoff", "kept") is not None:
        assert bench.to("p0", Release)
    bench.assert_idle()


def test_messages_of_strangers_are_refused():
    bench = Bench("p0", "d0")
    bench.submit()
    bench.receive("x", prefill_done())
    assert bench.to("x", Refused)[0].error.code == "not_registered"
    assert bench.updates == {}


def test_another_worker_cannot_answer_for_the_chosen_one():
    bench = Bench("p0", "p1", "d0", "d1")
    bench.submit()
    bench.prefill_done(peer="p1")
    assert bench.to("p1", Release) == [Release(transfer_ids=("t-r1",))]
    assert bench.updates == {}
    bench.prefill_done()
    bench.tokens(1, 66, peer="d1")
    assert bench.output() == [50]


def test_a_worker_busy_with_something_unknown_is_told_to_stop_once():
    bench = Bench("a0")
    bench.tokens(0, 1, request_id="ghost", peer="a0")
    bench.tokens(1, 1, request_id="ghost", peer="a0")
    assert bench.to("a0", Abort) == [Abort(request_ids=("ghost",), reason="unknown")]


def test_late_tokens_of_an_ended_request_cause_nothing():
    bench = Bench("a0")
    bench.submit()
    bench.do(bench.machine.abort("r1", "client", 0.0))
    before = len(bench.sent)
    bench.tokens(0, 1, peer="a0")
    assert len(bench.sent) == before


def test_a_malformed_frame_drops_its_worker_and_fails_its_requests_at_once():
    bench = Bench("p0", "d0")
    bench.submit()
    bench.do(bench.machine.on_malformed(b"p0", ProtocolError("malformed frame: x"), 0.0))
    assert bench.error().code == "peer_lost"
    assert bench.to("p0", Refused)[-1].error.code == ProtocolError.code
    assert bench.machine.not_ready_reason is not None
    bench.assert_idle()


def test_a_malformed_frame_of_a_stranger_is_refused():
    bench = Bench("p0", "d0")
    bench.do(bench.machine.on_malformed(b"x", ProtocolError("malformed frame: x"), 0.0))
    assert bench.to("x", Refused)
    assert bench.machine.not_ready_reason is None


# ---- aborts --------------------------------------------------------------------------------------------------------------


def test_an_abort_during_prefill_stops_the_prefill_worker():
    bench = Bench("p0", "d0")
    bench.submit()
    bench.do(bench.machine.abort("r1", "client disconnected", 0.0))
    assert bench.to("p0", Abort) == [Abort(request_ids=("r1",), reason="client disconnected")]
    assert bench.to("d0", Abort) == []
    assert bench.error().code == "cancelled"
    bench.assert_idle()


def test_an_abort_that_crosses_the_prefill_result_releases_the_hand_over():
    bench = Bench("p0", "d0")
    bench.submit()
    bench.do(bench.machine.abort("r1", "client", 0.0))
    bench.prefill_done()
    assert bench.to("p0", Release) == [Release(transfer_ids=("t-r1",))]
    assert bench.to("d0", Generate) == []


def test_an_abort_during_hand_over_stops_decode_and_releases_the_lease():
    bench = Bench("p0", "d0")
    bench.submit()
    bench.prefill_done()
    bench.do(bench.machine.abort("r1", "client", 0.0))
    assert bench.to("d0", Abort) == [Abort(request_ids=("r1",), reason="client")]
    assert bench.to("p0", Release) == [Release(transfer_ids=("t-r1",))]
    bench.assert_idle()


def test_an_abort_during_decode_stops_decode_only():
    bench = Bench("p0", "d0")
    bench.submit()
    bench.prefill_done()
    bench.tokens(1, 51)
    bench.do(bench.machine.abort("r1", "client", 0.0))
    assert bench.to("d0", Abort)
    assert bench.to("p0", Release) == bench.to("p0", Abort) == []
    bench.assert_idle()


def test_aborting_twice_or_something_unknown_does_nothing():
    bench = Bench("a0")
    bench.submit()
    bench.do(bench.machine.abort("r1", "client", 0.0))
    assert bench.machine.abort("r1", "client", 0.0) == []
    assert bench.machine.abort("ghost", "client", 0.0) == []


def test_a_stop_string_in_the_only_choice_ends_the_request_well():
    bench = Bench("p0", "d0")
    bench.submit()
    bench.prefill_done()
    bench.tokens(1, 51)
    bench.do(bench.machine.finish_choice("r1", 0, 0.0))
    assert bench.to("d0", Abort) == [Abort(request_ids=("r1",), reason="stop")]
    assert bench.ended["r1"].flow.error is None
    assert bench.ended["r1"].flow.finish_reasons == ["stop"]
    bench.assert_idle()


def test_a_stop_string_in_one_of_two_choices_lets_the_other_go_on():
    bench = Bench("a0")
    bench.submit(n=2)
    bench.receive("a0", [Tokens("r1", 0, 0, (1,)), Tokens("r1", 1, 0, (2,))])
    bench.do(bench.machine.finish_choice("r1", 0, 0.0))
    assert bench.to("a0", Abort) == [Abort(request_ids=("r1/0",), reason="stop")]
    bench.receive("a0", [Tokens("r1", 0, 1, (3,)), Tokens("r1", 1, 1, (4,), "length")])
    assert (bench.output(index=0), bench.output(index=1)) == ([1], [2, 4])
    assert bench.ended["r1"].flow.finish_reasons == ["stop", "length"]
    bench.assert_idle()


def test_a_choice_stopped_at_its_first_token_is_not_handed_over():
    bench = Bench("p0", "d0")
    bench.submit(n=2)
    bench.receive("p0", prefill_done(n=2))
    bench.do(bench.machine.finish_choice("r1", 1, 0.0))
    assert bench.to("d0", Abort) == [Abort(request_ids=("r1/1",), reason="stop")]
    bench.tokens(1, 60, index=0, finish_reason="stop")
    assert "r1" in bench.ended


# ---- failures and lost workers -------------------------------------------------------------------------------------------


def test_a_prefill_failure_reaches_the_client():
    bench = Bench("p0", "d0")
    bench.submit()
    bench.receive("p0", RequestFailed(request_id="r1", error=FAILURE))
    assert bench.error() == FAILURE
    assert bench.to("p0", Abort) == []
    bench.assert_idle()


def test_a_decode_failure_before_its_first_token_releases_the_lease():
    bench = Bench("p0", "d0")
    bench.submit()
    bench.prefill_done()
    bench.receive("d0", RequestFailed(request_id="r1", error=FAILURE))
    assert bench.error() == FAILURE
    assert bench.to("p0", Release) == [Release(transfer_ids=("t-r1",))]
    bench.assert_idle()


def test_a_prefill_worker_s_failure_after_the_first_token_is_not_the_client_s_business():
    bench = Bench("p0", "d0")
    bench.submit()
    bench.prefill_done()
    bench.receive("p0", RequestFailed(request_id="r1", error=FAILURE))
    bench.tokens(1, 51, finish_reason="length")
    assert bench.ended["r1"].flow.error is None


def test_a_frame_that_a_worker_could_not_read_fails_what_it_never_answered():
    bench = Bench("p0", "d0")
    bench.submit("r1")
    bench.submit("r2")
    bench.prefill_done("r2")
    bench.receive("p0", Rejected(error=FAILURE))
    assert bench.error("r1") == FAILURE
    assert "r2" not in bench.ended
    bench.receive("d0", Rejected(error=FAILURE))
    assert bench.error("r2") == FAILURE


def test_losing_the_prefill_worker_before_the_first_token_fails_the_request():
    bench = Bench("p0", "d0")
    bench.submit()
    bench.receive("p0", Goodbye(engine_id="p0", incarnation=1))
    assert bench.error().code == "peer_lost"
    assert bench.error().http_status == 502
    assert bench.error().retryable
    assert "prefill worker p0 was lost" in bench.error().message
    bench.assert_idle()


def test_a_silent_worker_fails_its_requests_within_the_heartbeat_timeout():
    bench = Bench("p0", "d0")
    bench.submit()
    bench.prefill_done()
    bench.tokens(1, 51)
    bench.now = 5.2
    bench.receive("p0", Heartbeat(engine_id="p0", incarnation=1))
    bench.do(bench.machine.on_timer(5.2))
    assert "decode worker d0 was lost: no heartbeat" in bench.error().message
    bench.assert_idle()


def test_a_restarted_worker_fails_the_requests_of_its_predecessor_at_once():
    bench = Bench("p0", "d0")
    bench.submit()
    bench.prefill_done()
    bench.tokens(1, 51)
    bench.join("d0", incarnation=2)
    assert bench.error().code == "peer_lost"
    bench.submit("r2")
    assert bench.to("p0", Generate)[-1].request_id == "r2"


def test_losing_the_prefill_worker_after_the_first_token_leaves_the_request_alone():
    bench = Bench("p0", "d0")
    bench.submit()
    bench.prefill_done()
    bench.receive("p0", Goodbye(engine_id="p0", incarnation=1))
    bench.tick(25.0)
    bench.tokens(1, 51, finish_reason="length")
    assert bench.ended["r1"].flow.error is None
    bench.assert_idle()


@pytest.mark.parametrize("how", ["leaves", "drains"])
def test_a_reserved_decode_worker_that_goes_is_replaced(how):
    bench = Bench("p0", "d0", "d1")
    bench.submit()
    if how == "leaves":
        bench.receive("d0", Goodbye(engine_id="d0", incarnation=1))
    else:
        bench.receive("d0", Heartbeat(engine_id="d0", incarnation=1, is_draining=True))
    bench.prefill_done()
    assert bench.to("d0", Generate) == []
    assert bench.to("d1", Generate)
    bench.tokens(1, 51, peer="d1", finish_reason="length")
    assert bench.ended["r1"].flow.error is None
    bench.assert_idle()


def test_no_decode_worker_left_fails_the_request_and_releases_the_lease():
    bench = Bench("p0", "d0")
    bench.submit()
    bench.receive("d0", Goodbye(engine_id="d0", incarnation=1))
    bench.prefill_done()
    assert bench.error().code == NoWorker.code
    assert bench.to("p0", Release)
    bench.assert_idle()


def test_a_worker_on_a_new_connection_is_told_to_drop_what_was_lost():
    bench = Bench("a0")
    bench.submit()
    register = Heartbeat(engine_id="a0", incarnation=1)
    bench.receive("a0-again", register)
    assert bench.error().code == "peer_lost"
    assert bench.to("a0-again", Abort)
    assert bench.to("a0-again", Registered)
    bench.assert_idle()


def test_an_unreachable_worker_is_dropped_with_its_requests():
    bench = Bench("a0")
    bench.submit()
    bench.do(bench.machine.on_unreachable(b"a0", 0.0))
    assert bench.error().code == "peer_lost"
    assert bench.machine.on_unreachable(b"a0", 0.0) == []


# ---- time ----------------------------------------------------------------------------------------------------------------


def test_the_deadline_ends_a_request_in_any_phase():
    bench = Bench("p0", "d0", "a0")
    bench.submit("r1")
    bench.submit("r2")
    bench.prefill_done("r1")
    bench.tick(59.9)
    assert bench.ended == {}
    bench.tick(60.0)
    assert {bench.error("r1").code, bench.error("r2").code} == {"deadline_exceeded"}
    assert bench.error("r1").http_status == 504
    bench.assert_idle()


def test_the_deadline_travels_as_what_is_left():
    bench = Bench("p0", "d0")
    bench.submit()
    bench.now = 12.0
    bench.prefill_done()
    assert bench.to("d0", Generate)[0].deadline_ms == 48_000


def test_the_lease_is_renewed_until_decode_shows_a_token():
    bench = Bench("p0", "d0")
    bench.submit()
    bench.prefill_done()
    bench.tick(4.0)
    assert bench.to("p0", Renew) == []
    bench.tick(10.0)
    bench.tick(14.0)
    bench.tick(20.0)
    assert bench.to("p0", Renew) == [Renew(transfer_ids=("t-r1",))] * 2
    bench.tokens(1, 51)
    bench.tick(30.0)
    assert len(bench.to("p0", Renew)) == 2


def test_leases_of_one_worker_are_renewed_together():
    bench = Bench("p0", "d0")
    for request_id in ("r1", "r2"):
        bench.submit(request_id)
        bench.prefill_done(request_id)
    bench.tick(10.0)
    assert bench.to("p0", Renew) == [Renew(transfer_ids=("t-r1", "t-r2"))]


# ---- admission -----------------------------------------------------------------------------------------------------------


def test_requests_beyond_the_limit_are_refused():
    bench = Bench("a0")
    for number in range(3):
        bench.submit(f"r{number}")
    with pytest.raises(Overloaded):
        bench.submit("r3")
    bench.do(bench.machine.abort("r0", "client", 0.0))
    bench.submit("r3")


def test_a_refused_request_leaves_no_trace():
    bench = Bench("p0", "d0")
    with pytest.raises(ContextTooLong):
        bench.submit(prompt=95)
    bench.assert_idle()
    assert bench.to("p0", Generate) == []


def test_requests_are_spread_over_equal_workers():
    bench = Bench("p0", "p1", "d0", "d1")
    bench.submit("r1")
    bench.submit("r2")
    assert len(bench.to("p0", Generate)) == len(bench.to("p1", Generate)) == 1
    bench.prefill_done("r1", "p0")
    bench.prefill_done("r2", "p1")
    assert len(bench.to("d0", Generate)) == len(bench.to("d1", Generate)) == 1


def test_phases_are_counted():
    bench = Bench("p0", "d0")
    bench.submit("r1")
    bench.submit("r2")
    bench.prefill_done("r2")
    flows = bench.machine.flows
    assert [flows.count(phase) for phase in Phase] == [1, 1, 0]
    bench.tokens(1, 51, request_id="r2")
    assert [flows.count(phase) for phase in Phase] == [1, 0, 1]


def two_choices_handed_over() -> Bench:
    bench = Bench("p0", "d0")
    bench.submit(n=2)
    bench.receive("p0", prefill_done(n=2))
    return bench


def test_a_hand_over_is_renewed_until_every_choice_has_shown_a_token():
    bench = two_choices_handed_over()
    bench.tokens(1, 60, index=0)
    bench.tick(10.0)
    assert len(bench.to("p0", Renew)) == 1
    bench.tokens(1, 61, index=1)
    bench.tick(20.0)
    assert len(bench.to("p0", Renew)) == 1


def test_a_decode_worker_lost_before_every_choice_began_releases_the_hand_over():
    bench = two_choices_handed_over()
    bench.tokens(1, 60, index=0)
    bench.receive("d0", Goodbye(engine_id="d0", incarnation=1))
    assert [message.transfer_ids for message in bench.to("p0", Release)] == [("t-r1",)]
    assert bench.error().code == "peer_lost"


def test_a_choice_that_has_ended_is_not_waited_for():
    bench = two_choices_handed_over()
    bench.do(bench.machine.finish_choice("r1", 1, bench.now))
    bench.tokens(1, 60, index=0)
    assert bench.machine.flows.count(Phase.DECODE) == 1


def test_a_rejection_spares_a_request_that_has_shown_a_token_of_one_choice():
    bench = two_choices_handed_over()
    bench.tokens(1, 60, index=0)
    bench.receive("d0", Rejected(error=FAILURE))
    assert "r1" not in bench.ended
