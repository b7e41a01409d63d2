"""The estimated wait: queued prompts at the pace of earlier ones; none for idle workers and workers without history."""

import pytest

from core.errors import ContextTooLong, DeadlineExceeded, DeadlineUnreachable
from core.wire.messages import Abort, ChoiceStart, ErrorInfo, Generate, PrefillDone
from core.wire.sampling import SamplingParams
from router.dispatch.members import WorkerKey
from router.dispatch.wait_estimate import WaitEstimates

P0, P1 = WorkerKey("p0", 1), WorkerKey("p1", 1)


class Bench(WaitEstimates):
    """Queues that are fed with prompts of so many tokens."""

    def send(self, name, num_tokens, at, worker=P0, **fields):
        message = Generate(request_id=name, prompt_token_ids=(1,) * num_tokens, sampling=SamplingParams(), **fields)
        self.on_sent(worker, message, at)


@pytest.fixture
def paced():
    """A worker that has done 100 tokens in 1 s, and does nothing at 1001 s."""
    bench = Bench()
    bench.send("done", 100, 1000.0)
    bench.on_first_token("done", 1001.0)
    return bench


def test_of_a_worker_without_a_past_nothing_is_foreseen():
    bench = Bench()
    bench.send("a", 10_000, 1000.0)
    assert bench.wait_s(P0, 1000.0) == 0.0
    assert bench.wait_s(P1, 1000.0) == 0.0


def test_an_idle_worker_has_no_wait_however_slow_it_was(paced):
    paced.send("slow", 1, 1001.0)
    paced.on_first_token("slow", 9000.0)
    assert paced.wait_s(P0, 9000.0) == 0.0


def test_the_wait_is_what_is_queued_at_the_pace_of_what_was_done(paced):
    paced.send("a", 300, 1001.0)
    paced.send("b", 200, 1001.0)
    assert paced.wait_s(P0, 1001.0) == pytest.approx(5.0)
    assert paced.wait_s(P0, 1003.0) == pytest.approx(3.0)
    assert paced.wait_s(P0, 1099.0) == 0.0  # it is overdue by an unknown time


def test_each_prompt_s_own_time_counts_not_its_wait(paced):
    paced.send("a", 100, 1001.0)
    paced.send("b", 100, 1001.0)
    paced.on_first_token("a", 1002.0)
    paced.on_first_token("b", 1003.0)
    paced.send("c", 100, 1003.0)
    assert paced.wait_s(P0, 1003.0) == pytest.approx(1.0)


def test_the_pace_follows_the_latest_prompts(paced):
    for turn in range(60):  # ten times as fast from now on
        paced.send("fast", 100, 2000.0 + turn)
        paced.on_first_token("fast", 2000.1 + turn)
    paced.send("a", 500, 3000.0)
    assert paced.wait_s(P0, 3000.0) == pytest.approx(0.5, rel=0.05)


def test_what_a_short_prompt_took_tells_little_of_long_ones():
    bench = Bench()
    bench.send("short", 1, 1000.0)
    bench.on_first_token("short", 1002.0)
    for number in range(3):
        bench.send(f"long{number}", 100, 1002.0)
    assert bench.wait_s(P0, 1002.0) == pytest.approx(3 * 5 * 2.0)


@pytest.mark.parametrize("leave", ["abort", "fail"])
def test_abandoned_prompt_is_not_waited_for_and_not_counted_in_the_pace(paced, leave):
    paced.send("a", 300, 1001.0)
    paced.send("b", 100, 1001.0)
    if leave == "abort":
        paced.on_sent(P0, Abort(request_ids=("a", "unknown")), 1050.0)
    else:
        paced.drop("a", 1050.0)
    assert paced.wait_s(P0, 1050.0) == pytest.approx(1.0)
    paced.on_first_token("a", 1060.0)  # crossed
    assert paced.wait_s(P0, 1050.0) == pytest.approx(1.0)


def test_a_request_whose_prompt_was_computed_elsewhere_waits_in_no_queue(paced):
    paced.send("a", 1000, 1001.0, choices=(ChoiceStart(index=0, output_token_ids=(5,)),))
    assert paced.wait_s(P0, 1001.0) == 0.0


def test_a_worker_that_has_left_leaves_nothing(paced):
    paced.send("a", 1000, 1001.0)
    paced.forget(P0)
    paced.on_first_token("a", 1002.0)
    paced.send("b", 1000, 1003.0)
    assert paced.wait_s(P0, 1003.0) == 0.0
    paced.forget(P1)


# ---- in the router -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def make_router(make_bench):
    """Return a router whose prefill and aggregated workers are known to take 1 s for 10 tokens."""

    def make(*workers, **limits):
        bench = make_bench(*workers, max_requests=100, **limits)
        for number, worker in enumerate(name for name in workers if name[0] in "pa"):
            key = next(member.key for member in bench.core.membership.workers if member.key.engine_id == worker)
            message = Generate(request_id=f"past{number}", prompt_token_ids=(1,) * 10, sampling=SamplingParams())
            bench.core.wait_estimates.on_sent(key, message, -1.0)
            bench.core.wait_estimates.on_first_token(f"past{number}", 0.0)
        return bench

    return make


def refusal(bench, **fields):
    with pytest.raises(DeadlineUnreachable) as refused:
        bench.core.submit(bench.submission("late", **fields), bench.now)
    return refused.value


def test_request_that_would_be_late_is_refused_with_reason_and_retry_after(make_router):
    bench = make_router("p0", "d0")
    bench.submit("r1", prompt=50)
    error = refusal(bench, timeout_s=2.0)
    assert (error.code, error.http_status, error.retryable, error.retry_after_s) == ("deadline_unreachable", 503, True, 3)
    assert "may take 2 s, but the prompts before it take about 5.0 s more" in error.message
    assert len(bench.core.dispatcher) == 1
    bench.do(bench.core.submit(bench.submission("patient", timeout_s=6.0), bench.now))
    bench.do(bench.core.submit(bench.submission("any"), bench.now))  # the router's own 60 s


def test_without_a_time_of_its_own_a_request_has_the_router_s(make_router):
    bench = make_router("p0", "d0")
    for number in range(13):
        bench.submit(f"r{number}", prompt=50)
    assert "may take 60 s" in refusal(bench).message
    assert "may take 60 s" in refusal(bench, timeout_s=600.0).message


def test_prompts_computed_or_aborted_meanwhile_are_not_waited_for(make_router):
    bench = make_router("p0", "d0")
    bench.submit("r1", prompt=50)
    bench.submit("r2", prompt=50)
    refusal(bench, timeout_s=7.0)
    bench.now = 5.0
    bench.prefill_done("r1")
    bench.do(bench.core.submit(bench.submission("r3", timeout_s=7.0), bench.now))
    bench.do(bench.core.abort("r2", "client", bench.now))
    bench.do(bench.core.submit(bench.submission("r4", timeout_s=1.5), bench.now))


def test_a_worker_that_would_be_too_late_is_left_out_if_another_is_not(make_router):
    bench = make_router("p0", "p1", "d0", "d1")
    bench.submit("long", prompt=80)
    busy = bench.sent[-1][0]
    for number in range(3):  # more requests, but shorter ones, for the other
        bench.submit(f"short{number}", prompt=1)
    queued = {peer for peer, message in bench.sent if isinstance(message, Generate)}
    assert queued == {"p0", "p1"}
    free = ({"p0", "p1"} - {busy}).pop()
    for number in range(4):
        bench.do(bench.core.submit(bench.submission(f"hurried{number}", timeout_s=4.0, prompt=1), bench.now))
        assert bench.sent[-1][0] == free


def test_a_request_that_a_decode_worker_would_compute_at_once_is_not_refused(make_router):
    bench = make_router("p0", "d0", local_prefill_itl_ms=1000.0)
    bench.do(bench.core.submit(bench.submission("r1", prompt=80), bench.now))
    assert not bench.to("d0", Generate)
    assert refusal(bench, timeout_s=2.0, prompt=80).retry_after_s > 0  # it would not be sooner
    bench.do(bench.core.submit(bench.submission("short", timeout_s=2.0), bench.now))
    assert [message.request_id for message in bench.to("d0", Generate)] == ["short"]
    assert refusal(bench, timeout_s=2.0).retry_after_s > 0  # one local prompt at a time


@pytest.fixture
def slow_tokens(make_router):
    """Return a router that predicts 1.4 s for a prompt by what it has measured; its prefill worker has two prompts."""
    bench = make_router("p0", "d0", local_prefill_itl_ms=1000.0)
    costs, (p0,) = bench.core.route_costs, [worker for worker in bench.core.membership.workers if worker.role == "prefill"]
    for number in range(10):
        name, num_tokens = f"fit{number}", 10 + number
        costs.on_sent(p0, Generate(request_id=name, prompt_token_ids=(1,) * num_tokens, sampling=SamplingParams()), 0.0)
        costs.on_prefill_done(PrefillDone(request_id=name, choices=(), prefill_ms=100.0 * num_tokens), 0.0)
    for name in ("long", "long as well"):
        bench.do(bench.core.submit(bench.submission(name, prompt=70), bench.now))
    return bench


def test_a_local_prompt_that_would_itself_miss_its_deadline_is_refused_at_once(slow_tokens):
    assert refusal(slow_tokens, timeout_s=1.0, prompt=60).retry_after_s > 0
    assert not slow_tokens.to("d0", Generate)
    slow_tokens.do(slow_tokens.core.submit(slow_tokens.submission("patient", timeout_s=2.0, prompt=60), slow_tokens.now))
    assert [message.request_id for message in slow_tokens.to("d0", Generate)] == ["patient"]


def test_a_refusal_compares_no_workers_if_no_decode_worker_could_begin(slow_tokens, monkeypatch):
    slow_tokens.heartbeat("d0", num_waiting=1)
    monkeypatch.setattr(slow_tokens.core.route_costs, "offers", None)
    refusal(slow_tokens, timeout_s=2.0)


def test_only_a_placement_that_is_made_teaches_of_sources(slow_tokens, monkeypatch):
    chosen = []
    monkeypatch.setattr(slow_tokens.core.route_costs, "on_chosen", chosen.append)
    refusal(slow_tokens, timeout_s=1.0, prompt=60)
    assert not chosen
    slow_tokens.do(slow_tokens.core.submit(slow_tokens.submission("r1", timeout_s=2.0, prompt=60), slow_tokens.now))
    assert [offer.ttft_ms for offer in chosen] == [pytest.approx(1393.0, abs=1.0)]


def test_an_aggregated_worker_s_queue_counts_until_the_first_token(make_router):
    bench = make_router("a0")
    bench.submit("r1", prompt=50)
    refusal(bench, timeout_s=2.0)
    bench.tokens(0, 5, request_id="r1", peer="a0")
    bench.do(bench.core.submit(bench.submission("r2", timeout_s=2.0), bench.now))


def test_a_request_ends_when_its_own_time_is_over(make_router):
    bench = make_router("p0", "d0")
    bench.do(bench.core.submit(bench.submission("r1", timeout_s=3.0), bench.now))
    assert bench.generated("p0").deadline_ms == 3000
    bench.tick(3.0)
    assert bench.error("r1").message == "the request took longer than 3 s, its limit by timeout_s"
    assert bench.error("r1").param == "timeout_s"


@pytest.mark.parametrize(("timeout_s", "setting"), [(3.0, "timeout_s"), (None, "router.request_timeout_s")])
def test_a_deadline_that_a_worker_finds_over_is_told_as_the_router_says_it(make_router, timeout_s, setting):
    bench = make_router("p0", "d0")
    bench.do(bench.core.submit(bench.submission("r1", timeout_s=timeout_s), bench.now))
    bench.fails("p0", ErrorInfo(code="deadline_exceeded", message="over", http_status=504), "r1")
    limit_s = timeout_s or 60.0
    assert bench.error("r1").message == f"the request took longer than {limit_s:g} s, its limit by {setting}"
    assert (bench.error("r1").param, bench.error("r1").http_status) == ("timeout_s" if timeout_s else None, 504)


def test_the_shortest_wait_is_reported(make_router):
    bench = make_router("p0", "p1", "d0")
    workers = bench.core.membership.workers
    bench.submit("r1", prompt=50)
    assert bench.core.wait_estimates.shortest_wait_s(workers, 0.0) == 0.0
    bench.submit("r2", prompt=30)
    assert bench.core.wait_estimates.shortest_wait_s(workers, 0.0) == pytest.approx(3.0)
    assert bench.core.wait_estimates.shortest_wait_s((), 0.0) == 0.0


@pytest.mark.parametrize(
    "stranger",
    [
        {"p1": {"model_fingerprint": b"new"}, "d1": {"model_fingerprint": b"new"}},  # it knows the images by other names
        {"p1": {"max_model_len": 60}},
        {"p1": {"model_fingerprint": b"new"}},  # no decode worker fits it
        {"a1": {"model_fingerprint": b"new"}},
    ],
    ids=["other weights", "short context", "no partner", "other weights, aggregated"],
)
def test_an_idle_worker_that_cannot_serve_the_request_is_no_hope(make_router, stranger):
    bench = make_router("p0", "d0")
    bench.submit("r1", prompt=50)
    for name, facts in stranger.items():
        bench.join(name, **facts)
    error = refusal(bench, timeout_s=2.0, prompt=50, model_fingerprint=b"w")
    assert "the prompts before it take about 5.0 s more" in error.message


def test_a_busy_worker_that_cannot_serve_the_request_is_no_obstacle(make_router):
    bench = make_router("p0", "d0")
    bench.submit("r1", prompt=50)
    for name in ("p1", "d1"):
        bench.join(name, model_fingerprint=b"new")
    bench.do(bench.core.submit(bench.submission("r2", timeout_s=2.0, model_fingerprint=b"new"), bench.now))
    assert bench.sent[-1][0] == "p1"
    bench.do(bench.core.submit(bench.submission("text", timeout_s=2.0), bench.now))
    assert bench.sent[-1][0] == "p1"


def test_a_request_that_fits_no_worker_gets_the_reason_and_no_retry_after(make_router):
    bench = make_router("p0", "d0")
    bench.submit("r1", prompt=50)
    with pytest.raises(ContextTooLong):
        bench.core.submit(bench.submission("long", timeout_s=2.0, prompt=200), bench.now)


def test_a_worker_without_a_partner_does_not_shorten_the_wait(make_router):
    bench = make_router("p0", "d0")
    bench.submit("r1", prompt=50)
    bench.join("p1", model_fingerprint=b"new")
    assert bench.core.wait_estimates.shortest_wait_s(bench.core.membership.workers, 0.0) == pytest.approx(5.0)


def test_without_workers_the_error_is_not_about_the_deadline(make_bench):
    bench = make_bench()
    with pytest.raises(Exception, match="no worker has registered"):
        bench.core.submit(bench.submission("r1", timeout_s=0.001), bench.now)


@pytest.mark.parametrize("timeout_s", [10.0, None, 900.0])
def test_what_was_spent_before_a_request_was_submitted_is_a_part_of_its_time(make_bench, timeout_s):
    bench = make_bench("a0")
    limit_s = min(timeout_s or 60.0, 60.0)
    bench.do(bench.core.submit(bench.submission(timeout_s=timeout_s, spent_s=4.0), bench.now))
    assert bench.generated("a0").deadline_ms == (limit_s - 4.0) * 1000
    bench.tick(limit_s - 4.0)
    setting = "timeout_s" if timeout_s == 10.0 else "router.request_timeout_s"
    assert bench.error().message == f"the request took longer than {limit_s:g} s, its limit by {setting}"


def test_a_request_whose_time_is_over_before_it_is_submitted_waits_for_nothing(make_bench):
    bench = make_bench("a0")
    with pytest.raises(DeadlineExceeded, match="longer than 1 s, its limit by timeout_s"):
        bench.core.submit(bench.submission(timeout_s=1.0, spent_s=1.1), bench.now)
    bench.assert_idle()
