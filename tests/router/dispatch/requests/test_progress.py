"""Live workers whose engines make no progress: where their requests continue, and how they return to service."""

from __future__ import annotations

import pytest

from core.errors import NoWorker
from core.wire.messages import Abort, Generate
from router.dispatch.membership import Resumed, Stalled
from router.dispatch.progress import Standing


def stall(bench, name: str = "d0", seconds: int = 4, **told) -> None:
    """Let so many heartbeats of a worker report that its engine hangs; the others continue."""
    for _ in range(seconds):
        bench.now += 1.0
        for member in list(bench.core.membership.members):
            other = member.key.engine_id
            bench.stalled[other] = bench.stalled.get(other, 0.0) + 1000.0 if other == name else 0.0
            bench.heartbeat(other, **({"stalled_ms": bench.stalled[other], **told} if other == name else {}))
        bench.do(bench.core.on_timer(bench.now))


def standing(bench, name: str = "d0") -> Standing:
    return bench.core.membership.by_peer(name.encode()).progress.standing


def decoding(make_bench, *workers: str, **limits):
    bench = make_bench(*workers, **limits)
    bench.submit()
    bench.prefill_done()
    bench.tokens(1, 51)
    return bench


# ---- leaving ---------------------------------------------------------------------------------------------------------------


def test_a_stream_leaves_a_worker_without_progress_and_costs_no_retry(make_bench):
    bench = decoding(make_bench, "p0", "d0", "d1", max_retries=0)
    stall(bench)
    assert bench.to("d0", Abort)[-1].request_ids == ("r1",), "it is stopped when it thaws"
    assert bench.generated("d1").request_id == "r1.2"
    bench.tokens(2, 99, peer="d0")
    bench.tokens(2, 52, peer="d1", request_id="r1.2", finish_reason="length")
    assert bench.output() == [50, 51, 52]
    assert (bench.kinds(), bench.retries[0].error.code) == (["replay"], "worker_stalled")
    bench.assert_idle()


def test_a_prompt_leaves_a_prefill_worker_without_progress(make_bench):
    bench = make_bench("p0", "d0", "p1", max_retries=0)
    bench.submit()
    stall(bench, "p0")
    assert bench.generated("p1").request_id == "r1.2"


def wait_for_readers(bench, *names: str, seconds: int = 4) -> None:
    """Let these workers report requests that wait while readers hold all their blocks; the others are idle."""
    full = {"num_waiting": 1, "num_leased_blocks": 10}
    for _ in range(seconds):
        bench.now += 1.0
        for member in list(bench.core.membership.members):
            bench.heartbeat(member.key.engine_id, **(full if member.key.engine_id in names else {}))
        bench.do(bench.core.on_timer(bench.now))


def test_a_prompt_leaves_a_prefill_worker_whose_blocks_readers_keep(make_bench):
    bench = make_bench("p0", "d0", "p1", max_retries=0)
    bench.submit()
    wait_for_readers(bench, "p0", seconds=2)
    assert not bench.retries, "readers may release blocks soon"
    wait_for_readers(bench, "p0", seconds=2)
    assert bench.to("p0", Abort)[-1].request_ids == ("r1",)
    assert bench.generated("p1").request_id == "r1.2"
    wait_for_readers(bench, "p1")
    assert len(bench.retries) == 1, "it moves once"


def test_a_prompt_stays_if_readers_keep_the_blocks_of_every_prefill_worker(make_bench):
    bench = make_bench("p0", "d0", "p1", max_retries=0)
    bench.submit()
    wait_for_readers(bench, "p0", "p1", seconds=20)
    assert not bench.retries


def test_a_request_that_is_decoded_stays_while_readers_keep_blocks(make_bench):
    bench = decoding(make_bench, "p0", "d0", "p1", "d1", max_retries=0)
    wait_for_readers(bench, "p0", "d0", seconds=20)
    assert not bench.retries


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (2, {}),
        (9, {"slowest_step_ms": 3100.0}),
        (4, {"slowest_step_ms": 200.0, "predicted_step_ms": 3000.0}),
        (60, {"is_warming_up": True}),
    ],
    ids=["short", "slow steps", "long step in hand", "first of its size"],
)
def test_a_worker_within_its_bound_is_left_in_peace(make_bench, seconds, told):
    bench = decoding(make_bench, "p0", "d0", "d1", request_timeout_s=100.0)
    stall(bench, seconds=seconds, **told)
    assert bench.to("d1", Generate) == []
    assert standing(bench) is Standing.SERVING


def test_an_answer_says_more_than_the_heartbeat_before_it(make_bench):
    bench = decoding(make_bench, "p0", "d0", "d1")
    stall(bench, seconds=2)
    bench.now += 1.0
    bench.heartbeat("d0", stalled_ms=3000.0)
    bench.tokens(2, 52)
    bench.do(bench.core.on_timer(bench.now))
    assert standing(bench) is Standing.SERVING


def test_a_process_that_was_paused_as_a_whole_is_not_stalled(make_bench):
    bench = decoding(make_bench, "p0", "d0", "d1")
    bench.tick(1.0)
    bench.wait(5.0)
    for stalled_ms in (4000.0, 300.0, 400.0):
        bench.now += 0.5
        bench.heartbeat("d0", stalled_ms=stalled_ms)
        bench.do(bench.core.on_timer(bench.now))
        assert standing(bench) is Standing.SERVING


def test_a_worker_whose_clock_jumps_is_judged_by_the_routers(make_bench):
    bench = decoding(make_bench, "p0", "d0", "d1")
    for number in range(8):
        bench.now += 0.25
        bench.heartbeat("d0", stalled_ms=9000.0 * (number + 1))
        bench.do(bench.core.on_timer(bench.now))
    assert standing(bench) is Standing.SERVING


def test_a_stalled_worker_gets_no_new_request(make_bench):
    bench = make_bench("p0", "d0", "d1")
    stall(bench)
    for name in ("r1", "r2"):
        bench.submit(name)
        bench.prefill_done(name)
    assert bench.to("d0", Generate) == []


def test_a_stream_without_a_survivor_stays_and_continues_when_the_worker_does(make_bench):
    bench = decoding(make_bench, "p0", "d0", worker_wait_s=5.0)
    stall(bench, seconds=20)
    assert (bench.updates["r1"][-1].error, bench.retries) == (None, [])
    bench.heartbeat("d0")
    bench.tokens(2, 52, finish_reason="length")
    assert bench.output() == [50, 51, 52]
    bench.assert_idle()


def test_a_stream_that_stayed_moves_on_once_there_is_a_survivor(make_bench):
    bench = decoding(make_bench, "p0", "d0")
    stall(bench)
    bench.join("d1")
    stall(bench)
    assert bench.generated("d1").request_id == "r1.2"


def test_a_request_reserved_at_a_stalled_worker_waits_for_it_beyond_worker_wait_s(make_bench):
    bench = make_bench("p0", "d0", worker_wait_s=3.0)
    bench.submit()
    stall(bench)
    bench.prefill_done()
    stall(bench, seconds=10)
    assert bench.core.dispatcher.num_waiting == 1
    bench.tick(bench.now + 1.0)
    assert bench.generated("d0").kv_handoff is not None


def test_a_request_that_stalls_every_worker_ends(make_bench):
    bench = decoding(make_bench, "p0", *(f"d{number}" for number in range(6)), max_retries=1)
    for number in range(1, 6):
        name = bench.core.dispatcher.requests["r1"].attempt.decode.engine_id if "r1" not in bench.ended else "d0"
        stall(bench, name)
        assert number < 4 or "r1" in bench.ended
    assert bench.error().code == "worker_stalled"
    bench.assert_idle()


# ---- coming back -----------------------------------------------------------------------------------------------------------


def thawed(make_bench):
    """Return a bench whose d0 has stalled and makes progress again, with a second worker d1."""
    bench = make_bench("p0", "d0", "d1", max_requests=9)
    stall(bench)
    assert standing(bench) is Standing.STALLED
    bench.tick(bench.now + 1.0)
    assert standing(bench) is Standing.PROBATION
    return bench


def start(bench, name: str) -> str:
    """Start a request and return its decode worker."""
    bench.submit(name)
    bench.prefill_done(name)
    return bench.core.dispatcher.requests[name].attempt.decode.engine_id


def test_a_worker_on_probation_gets_one_request_at_a_time_until_one_succeeds(make_bench):
    bench = thawed(make_bench)
    assert start(bench, "r1") == "d1", "it backs off at first"
    bench.tick(bench.now + 1.0)
    assert [start(bench, name) for name in ("r2", "r3", "r4")] == ["d0", "d1", "d1"]
    bench.tokens(1, 51, request_id="r2", finish_reason="length")
    assert standing(bench) is Standing.SERVING
    assert start(bench, "r5") == "d0"


def test_a_worker_on_probation_serves_if_no_other_can(make_bench):
    bench = make_bench("p0", "d0", max_requests=9)
    stall(bench)
    bench.tick(bench.now + 1.0)
    assert [start(bench, name) for name in ("r1", "r2")] == ["d0", "d0"]


def test_a_worker_that_puts_out_tokens_for_a_while_has_succeeded(make_bench):
    bench = decoding(make_bench, "p0", "d0")
    stall(bench)
    for position in range(2, 9):
        bench.tick(bench.now + 1.0)
        bench.tokens(position, 50)
    bench.tick(bench.now + 1.0)
    assert standing(bench) is Standing.SERVING


def test_each_stall_in_a_row_doubles_the_back_off(make_bench):
    bench = thawed(make_bench)
    waits = []
    for _ in range(4):
        waits.append(0)
        while bench.core.membership.by_peer(b"d0").is_reserve:
            bench.tick(bench.now + 1.0)
            waits[-1] += 1
        stall(bench)
        bench.tick(bench.now + 1.0)
    assert waits == [1, 2, 4, 8]


def test_the_log_has_stalls_and_returns(make_bench):
    bench = make_bench("p0", "d0")
    stall(bench, seconds=3)
    bench.now += 1.0
    bench.heartbeat("p0")
    bench.heartbeat("d0", stalled_ms=4000.0)
    (stalled,) = bench.core.on_timer(bench.now)
    assert isinstance(stalled, Stalled)
    assert stalled.worker.why_closed == "worker d0 has stalled: its engine makes no progress for 3.0 s"
    with pytest.raises(NoWorker, match=r"no decode worker is available.*stalled"):
        bench.submit()
    bench.heartbeat("d0")
    assert [type(action) for action in bench.core.on_timer(bench.now)] == [Resumed]
