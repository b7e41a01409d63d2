"""Room that is kept for a request held for long: who takes it nevertheless, and where it would be kept in vain."""

from __future__ import annotations

import pytest

from core.errors import NoWorker, Overloaded
from core.wire.media import MMFeature
from core.wire.messages import EncodeDone, EncodeRequest, ErrorInfo
from router.dispatch import policy
from router.dispatch.members import WorkerKey
from router.dispatch.waiting import PASS_S
from tests.router.dispatch.requests.test_shares import CALM, FLOOD, GRAMMAR, THIRD, finish, started, submit

FOURTH = 4
FULL = ErrorInfo.of(Overloaded("full"))
IMAGE = {"mm_features": (MMFeature(identifier=bytes(16), offset=0, length=2, num_embeds=2, media_index=0),)}


def two_full(make_bench):
    """Return a bench with two workers full of the same key's requests; another key's one for four choices is held."""
    bench = make_bench(max_requests=100)
    for name in ("a0", "a1"):
        bench.join(name, max_num_choices=4, ec_connector="shared")
    for number in range(8):
        submit(bench, f"f{number}", FLOOD)
    submit(bench, "t0", THIRD, n=4)
    return bench


@pytest.mark.parametrize("another_is_held", [False, True])
def test_a_lost_request_that_had_waited_for_its_share_takes_room_before_a_flood(make_bench, another_is_held):
    bench = two_full(make_bench)
    submit(bench, "c0", CALM)
    finish(bench, started(bench, "a0")[0])
    assert started(bench)[-1] == "c0"
    if another_is_held:
        submit(bench, "g0", FOURTH)
    bench.tick(PASS_S + 1.0)
    bench.leave("a0")
    before = started(bench, "a1")
    finish(bench, before[0])
    assert started(bench, "a1")[len(before) :] == ["c0.2"]


def test_a_request_lost_during_its_encode_leg_takes_room_before_a_flood(make_bench):
    bench = two_full(make_bench)
    bench.join_encoder("e0")
    submit(bench, "c0", CALM, media=(b"image",), media_places=("content",), **IMAGE)
    finish(bench, started(bench, "a0")[0])
    assert [message.request_id for message in bench.to("e0", EncodeRequest)] == ["c0"]
    bench.tick(PASS_S + 1.0)
    bench.leave("a0")
    bench.receive("e0", EncodeDone(request_id="c0", ec_sources=()))
    before = started(bench, "a1")
    finish(bench, before[0])
    assert started(bench, "a1")[len(before) :] == ["c0"]


def test_a_held_request_leaves_kept_room_alone_if_a_worker_only_had_none_for_it(make_bench):
    bench = two_full(make_bench)
    submit(bench, "c0", CALM)
    finish(bench, started(bench, "a0")[0])
    bench.tick(PASS_S + 1.0)
    bench.fails("a0", GRAMMAR, "c0")
    before = started(bench, "a1")
    finish(bench, before[0])
    assert started(bench, "a1") == before, "it is kept for t0"


def test_a_held_request_takes_no_kept_room_directly_after_a_refusal_either(make_bench):
    bench = two_full(make_bench)
    submit(bench, "c0", CALM)
    finish(bench, started(bench, "a0")[0])
    bench.tick(PASS_S + 1.0)
    before = started(bench, "a1")
    finish(bench, before[0])
    bench.fails("a0", GRAMMAR, "c0")
    assert started(bench, "a1") == before, "it is kept for t0"
    for request_id in before[1:4]:
        finish(bench, request_id)
    assert started(bench, "a1")[4:] == ["t0"]


@pytest.mark.parametrize("why", [GRAMMAR, FULL])
def test_a_refused_request_of_a_flood_takes_no_kept_room(make_bench, why):
    bench = make_bench(max_requests=100)
    bench.join("a0", max_num_choices=4, max_model_len=40)
    bench.join("a1", max_num_choices=4)
    for number in range(8):
        submit(bench, f"f{number}", FLOOD)
    submit(bench, "t0", THIRD, n=4, prompt=60)  # more than a0 holds
    bench.tick(PASS_S + 1.0)
    before = started(bench, "a1")
    finish(bench, started(bench, "a0")[0])
    for number, request_id in enumerate(before[:3]):
        finish(bench, request_id)
        submit(bench, f"x{number}", FLOOD)
        assert started(bench, "a0")[-1] == f"x{number}"
        bench.fails("a0", why, f"x{number}")
        assert bench.error(f"x{number}").http_status == 429
        bench.tick(bench.now + 1.0)
    finish(bench, before[3])
    assert started(bench, "a1")[4:] == ["t0"]


def held_with_grammars(bench, names, **fields):
    """Let a request of each of many keys be held, the grammar of each refused by another worker."""
    for number, name in enumerate(names):
        submit(bench, f"c{number}", 10 + number, **fields)
        bench.core.dispatcher.requests[f"c{number}"].retries.refusing_until[WorkerKey(name, 1)] = 100.0
    assert bench.core.dispatcher.num_waiting == len(names)
    bench.now = PASS_S


@pytest.fixture
def lookups(monkeypatch):
    """One item for each time that all workers are compared, to choose among them or to find those that are of use."""
    found, real = [], policy._alone
    monkeypatch.setattr(policy, "_alone", lambda workers: found.append(1) or real(workers))
    return found


def test_of_many_that_wait_for_full_workers_one_looks_whoever_refuses_them(make_bench, lookups):
    bench = make_bench(max_requests=1000)
    names = [f"a{number}" for number in range(30)]
    for name in names:
        bench.join(name, max_num_choices=4)
    for number in range(90):
        submit(bench, f"f{number}", FLOOD)
    held_with_grammars(bench, names, n=2)
    lookups.clear()
    bench.do(bench.core.on_timer(bench.now))
    assert len(lookups) <= 2
    lookups.clear()
    with pytest.raises(Overloaded, match="other API keys"):
        submit(bench, "late", FLOOD)
    assert len(lookups) <= 5


def test_for_each_that_looks_it_is_not_looked_up_again_what_is_kept(make_bench, lookups):
    """A pair seems to be free, but does not fit, so that each looks."""
    bench = make_bench(max_requests=1000)
    names = [f"p{number}" for number in range(20)]
    bench.join("d0")
    for name in names:
        bench.join(name, max_num_choices=1)
    for number in range(20):
        submit(bench, f"f{number}", FLOOD)
    bench.join("p20", transports=("rdma",))
    held_with_grammars(bench, names)
    lookups.clear()
    bench.do(bench.core.on_timer(bench.now))
    assert 20 <= len(lookups) <= 25
    finish(bench, "f0")
    assert [name for name in names if len(started(bench, name)) > 1] == ["p0"], "it is open to all but one"


@pytest.fixture
def held_pair(make_bench):
    """A pair whose decode worker is full of one key's requests; another key's one for two choices is held for long."""
    bench = make_bench("p0", max_requests=100)
    bench.join("d0", max_num_choices=4)
    for number in range(4):
        submit(bench, f"f{number}", FLOOD)
        bench.prefill_done(f"f{number}")
    submit(bench, "c0", CALM, n=2)
    bench.tick(PASS_S)
    return bench


@pytest.mark.parametrize("other", ["is not there", "drains", "has no partner", "is cut off"])
def test_no_decode_room_is_kept_if_another_prefill_worker_cannot_begin_either(held_pair, other):
    if other != "is not there":
        held_pair.join("p1", transports=("rdma",) if other == "has no partner" else ("shm",))
        (p1,) = [worker for worker in held_pair.core.membership.workers if worker.key.engine_id == "p1"]
        p1.is_draining = other == "drains"
        p1.cut_peer = b"p1" if other == "is cut off" else None
    finish(held_pair, "f0")
    finish(held_pair, "f1")
    held_pair.fails("p0", GRAMMAR, "c0")
    submit(held_pair, "f8", FLOOD)
    submit(held_pair, "f9", FLOOD)
    assert started(held_pair, "p0")[-3:] == ["c0", "f8", "f9"]


def test_decode_room_is_kept_while_another_prefill_worker_can_begin(held_pair):
    finish(held_pair, "f0")
    finish(held_pair, "f1")
    held_pair.join("p1")
    held_pair.heartbeat("d0", num_running=3)  # of another router, too
    held_pair.fails("p0", GRAMMAR, "c0")
    with pytest.raises(Overloaded, match="other API keys"):
        submit(held_pair, "f8", FLOOD)


def test_no_prefill_room_is_kept_while_every_decode_worker_refuses_the_grammar(make_bench):
    bench = make_bench(max_requests=100, local_prefill_itl_ms=1000.0)
    bench.join("p0", max_num_choices=4)
    bench.join("d0", max_num_choices=8)
    for number in range(5):
        submit(bench, f"f{number}", FLOOD, prompt=70)
    assert len(started(bench, "p0")) == 4
    submit(bench, "c0", CALM, n=2)
    bench.tick(PASS_S)
    finish(bench, "f0")
    finish(bench, "f1")
    assert started(bench, "d0")[-1] == "c0", "it computes the prompt itself"
    bench.fails("d0", GRAMMAR, "c0")
    for name in ("f7", "f8", "f9"):  # the first one is computed by d0, whose prompt is overdue
        submit(bench, name, FLOOD, prompt=70)
    assert started(bench, "p0")[-2:] == ["f8", "f9"]


def test_no_prefill_room_is_kept_if_no_decode_worker_can_ever_hold_the_choices(make_bench):
    bench = make_bench(max_requests=100)
    bench.join("p0", max_num_choices=4)
    bench.join("d0", max_num_choices=3)
    bench.join("d1", max_num_choices=4)
    for number in range(4):
        submit(bench, f"f{number}", FLOOD)
    submit(bench, "c0", CALM, n=4)
    bench.heartbeat("d1", is_draining=True, num_running=1)
    bench.now += PASS_S
    finish(bench, "f0")
    submit(bench, "f9", FLOOD)
    assert started(bench, "p0")[-1] == "f9"


@pytest.mark.parametrize("why", [FULL, GRAMMAR])
def test_a_key_below_its_share_waits_after_a_refusal_while_all_other_room_is_kept(make_bench, why):
    bench = make_bench(max_requests=100, request_timeout_s=600.0)
    bench.join("a0", max_num_choices=4, max_model_len=40)
    bench.join("a1", max_num_choices=4)
    for number in range(8):
        submit(bench, f"f{number}", FLOOD)
    submit(bench, "t0", THIRD, n=4, prompt=60)
    bench.tick(PASS_S + 1.0)
    for request_id in (started(bench, "a0")[0], started(bench, "a1")[0]):
        finish(bench, request_id)
    submit(bench, "c0", CALM)
    assert started(bench, "a0")[-1] == "c0"
    bench.fails("a0", why, "c0")
    assert "c0" not in bench.ended
    for request_id in started(bench, "a1")[1:4]:
        finish(bench, request_id)
    assert started(bench, "a1")[-1] == "t0"
    finish(bench, "t0")
    assert any(request_id.startswith("c0") for request_id in started(bench, "a1"))


def test_a_request_that_no_worker_can_ever_hold_gets_no_reason_of_a_smaller_one(make_bench):
    bench = make_bench(max_requests=100, request_timeout_s=60.0)
    bench.join("a0", max_num_choices=4)
    bench.join("a1", max_num_choices=2)
    for number in range(6):
        submit(bench, f"f{number}", FLOOD)
    submit(bench, "t0", THIRD, n=4)
    submit(bench, "c0", CALM, n=2, priority=-1)  # looks first
    bench.leave("a0")
    while "t0" not in bench.ended:
        bench.tick(bench.now + 1.0)
    assert bench.ended["t0"].request.error.code == "invalid_request"
    assert "c0" not in bench.ended


@pytest.mark.parametrize("numbers", [(1, 2), (2, 1), (1, 2, 3)])
def test_while_no_open_worker_can_serve_one_looks_for_each_number_of_choices(make_bench, monkeypatch, numbers):
    bench = make_bench("p0", "d0", max_requests=100, heartbeat_timeout_s=50.0)
    bench.submit("running")
    bench.prefill_done("running")
    for number in range(30):
        bench.submit(f"r{number}", n=numbers[number % len(numbers)])
    bench.heartbeat("d0", is_draining=True)
    for number in range(30):
        bench.fails("p0", ErrorInfo.of(NoWorker("draining")), f"r{number}")
    placement, looked = bench.core.dispatcher.placement, []
    check = placement.check_room
    monkeypatch.setattr(placement, "check_room", lambda request, *args: looked.append(request) or check(request, *args))
    finish(bench, "running")
    assert bench.core.dispatcher.num_waiting == 30
    assert sorted(request.submission.n for request in looked) == sorted(numbers)
    looked.clear()
    bench.do(bench.core.on_timer(bench.now))
    assert len(looked) == len(numbers)


def test_what_is_full_for_fewer_choices_is_full_also_beside_more_than_are_open(make_bench, monkeypatch):
    bench = make_bench(max_requests=100)
    bench.join("a0", max_num_choices=4)
    bench.join("a1", max_num_choices=2)
    for number in range(6):
        submit(bench, f"f{number}", FLOOD)
    for number in range(30):
        submit(bench, f"c{number}", 10 + number, n=(4, 1, 2)[number % 3])
    bench.heartbeat("a0", is_draining=True, num_running=4)
    placement, looked = bench.core.dispatcher.placement, []
    check = placement.check_room
    monkeypatch.setattr(placement, "check_room", lambda request, *args: looked.append(request) or check(request, *args))
    bench.do(bench.core.dispatcher.place_waiting(bench.now))
    assert [request.submission.n for request in looked] == [4, 1], "what is full for one is full for two"


@pytest.mark.parametrize("other", ["is alone", "waits for a worker that is away"])
def test_a_held_request_that_nothing_can_hold_any_more_ends_at_once(make_bench, other):
    bench = make_bench(max_requests=100, worker_wait_s=10.0)
    for name, context in (("a0", 40), ("a1", 70), ("a2", 100)):
        bench.join(name, max_model_len=context, max_num_choices=4)
    for tokens in (70, 40):  # on a1 and a2
        submit(bench, f"f{tokens}", FLOOD, prompt=tokens, n=4)
    if other != "is alone":
        submit(bench, "shorter", CALM, prompt=40)
    submit(bench, "longer", THIRD, prompt=70)
    bench.leave("a1")
    bench.leave("a2")
    bench.join("a2", incarnation=2, max_model_len=40)
    bench.tick(bench.now + 1.0)
    assert bench.ended["longer"].request.error.code == "context_length_exceeded"
    assert "shorter" not in bench.ended
