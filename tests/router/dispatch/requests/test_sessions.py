"""A session keeps its worker among about equal ones, whichever router places it."""

from __future__ import annotations

from core.wire.messages import Generate

WORKERS = ("a0", "a1", "a2", "a3")


def placed(bench, session, number=0, **fields):
    """Place one prompt of a session; return its worker."""
    request_id = f"{session}-{number}"
    bench.do(bench.core.submit(bench.submission(request_id, affinity=session, **fields), bench.now))
    worker = next(name for name in WORKERS if any(m.request_id == request_id for m in bench.to(name, Generate)))
    bench.do(bench.core.abort(request_id, "client", bench.now))
    return worker


def test_a_restarted_router_and_another_one_choose_the_same_worker(make_bench):
    routers = [make_bench(*WORKERS), make_bench(*reversed(WORKERS))]
    places = [[placed(bench, f"s{number}") for number in range(12)] for bench in routers]
    assert places[0] == places[1]
    assert len(set(places[0])) > 1


def test_without_a_session_equal_workers_take_turns(make_bench):
    bench = make_bench(*WORKERS)
    assert {placed(bench, "", number) for number in range(4)} == set(WORKERS)


def test_a_busy_worker_is_not_preferred(make_bench):
    bench = make_bench(*WORKERS)
    first = placed(bench, "s")
    bench.do(bench.core.submit(bench.submission("other", prompt=60, affinity="s"), bench.now))
    assert [m.request_id for m in bench.to(first, Generate)][-1] == "other"
    assert placed(bench, "s", 1) != first


def test_a_worker_that_drains_passes_its_sessions_on(make_bench):
    bench = make_bench(*WORKERS)
    first = placed(bench, "s")
    bench.heartbeat(first, is_draining=True)
    assert placed(bench, "s", 1) != first


def test_keys_do_not_share_sessions(make_bench):
    bench = make_bench(*WORKERS)
    places = [placed(bench, "s", tenant, tenant=tenant) for tenant in range(1, 12)]
    assert len(set(places)) > 1


def test_a_session_of_many_long_answers_spreads(make_bench):
    bench = make_bench("a0", "a1", "a2", "a3", max_requests=1000)
    for number in range(64):
        name = f"r{number}"
        bench.do(bench.core.submit(bench.submission(name, affinity="app"), bench.now))
        (worker,) = [to for to, message in bench.sent if isinstance(message, Generate) and message.request_id == name]
        bench.now += 0.02
        bench.tokens(0, 5, request_id=name, peer=worker)
        bench.now += 0.05
    counts = [len(bench.to(name, Generate)) for name in ("a0", "a1", "a2", "a3")]
    assert max(counts) <= 2 * min(counts)
