"""A decode worker computes a prompt itself if that is sooner and delays the others there no more than allowed."""

from __future__ import annotations

import pytest

from core.wire.media import MMFeature
from core.wire.messages import Generate, Usage


@pytest.fixture
def busy(make_bench):
    """Return a bench whose prefill worker has two prompts and does not finish them."""
    bench = make_bench("p0", "d0", local_prefill_itl_ms=1000.0, max_requests=9)
    submit_long(bench)
    return bench


def submit_long(bench):
    for name in ("long", "long as well"):
        bench.do(bench.core.submit(bench.submission(name, prompt=70), bench.now))
    assert not bench.to("d0", Generate)


def test_a_busy_prefill_worker_is_left_out(busy):
    busy.submit()
    message = busy.generated("d0")
    assert (message.handoff, message.kv_handoff, message.choices) == (False, None, ())
    busy.tokens(0, 50, usage=Usage(num_cached_tokens=3))
    busy.tokens(1, 51, finish_reason="stop", usage=Usage(num_cached_tokens=3))
    report = busy.updates["r1"][0].handoff
    assert (report.routing.reason, report.outcome, report.cost.fallback_reason) == ("local", "local", "")
    assert (report.routing.candidates, report.routing.hit_tokens, report.routing.ttft_ms) == (2, 3, 0.0)
    assert busy.error() is None
    assert busy.output() == [50, 51]


def test_an_idle_prefill_worker_is_used(make_bench):
    bench = make_bench("p0", "d0", local_prefill_itl_ms=1000.0)
    bench.submit()
    assert bench.generated("p0").handoff


def test_without_the_setting_decode_workers_compute_no_prompts(make_bench):
    bench = make_bench("p0", "d0")
    submit_long(bench)
    bench.submit()
    assert not bench.to("d0", Generate)


@pytest.mark.parametrize(
    "load",
    [
        {"num_waiting": 1},
        {"kv_cache_usage": 0.99},
        {"num_leased_blocks": 0, "num_running": 4, "num_waiting": 2},
    ],
    ids=["queue", "full cache", "full"],
)
def test_a_decode_worker_without_room_computes_none(busy, load):
    busy.heartbeat("d0", **load)
    busy.submit()
    assert not busy.to("d0", Generate)


def test_a_prompt_that_would_delay_others_too_long_goes_to_the_prefill_worker(make_bench):
    bench = make_bench("p0", "d0", local_prefill_itl_ms=0.5)
    bench.heartbeat("d0", num_running=1)
    submit_long(bench)
    bench.submit()
    assert not bench.to("d0", Generate)


def test_one_local_prompt_at_a_time(busy):
    busy.submit()
    busy.submit("r2")
    assert [message.request_id for message in busy.to("d0", Generate)] == ["r1"]


def test_images_go_to_the_prefill_worker(busy):
    image = MMFeature(identifier=bytes(16), offset=0, length=4, num_embeds=4, media_index=0)
    busy.do(busy.core.submit(busy.submission(mm_features=(image,), media=(b"image",)), busy.now))
    assert not busy.to("d0", Generate)


def test_a_lost_decode_worker_leaves_the_request_to_the_pair(busy):
    busy.submit()
    busy.join("d1")
    busy.leave("d0")
    assert busy.generated("p0").handoff or busy.to("d1", Generate)
    assert "r1" not in busy.ended


def test_requests_whose_prompts_wait_elsewhere_are_not_delayed(make_bench):
    """The decode worker has reserved room for both long prompts and runs nothing: no limit holds before the first is there."""
    bench = make_bench("p0", "d0", local_prefill_itl_ms=0.5, max_requests=9)
    submit_long(bench)
    (d0,) = [worker for worker in bench.core.membership.workers if worker.role == "decode"]
    assert (d0.num_inflight, d0.num_reserved, d0.num_present) == (2, 2, 0)
    bench.submit()
    assert [message.request_id for message in bench.to("d0", Generate)] == ["r1"]
    assert d0.num_present == 1
    bench.prefill_done("long")
    assert (d0.num_inflight, d0.num_reserved, d0.num_present) == (3, 1, 2)
    for name in ("long", "long as well", "r1"):
        bench.do(bench.core.abort(name, "gone", bench.now))
    assert (d0.num_inflight, d0.num_reserved, d0.num_present) == (0, 0, 0)
    assert not d0.reserved_until


def test_a_request_whose_prompt_ends_elsewhere_meanwhile_counts_as_running(make_bench):
    """The first long prompt takes 17 ms at the prefill worker; the local one takes 11 ms."""
    bench = make_bench("p0", "d0", local_prefill_itl_ms=3.0, max_requests=9)
    submit_long(bench)
    bench.now = 0.012
    bench.submit("due soon")
    assert not bench.to("d0", Generate)
    bench = make_bench("p0", "d0", local_prefill_itl_ms=3.0, max_requests=9)
    submit_long(bench)
    bench.now = 0.004
    bench.submit("in time")
    assert [message.request_id for message in bench.to("d0", Generate)] == ["in time"]


def test_a_prompt_that_takes_longer_than_predicted_may_end_at_any_moment(make_bench):
    bench = make_bench("p0", "d0", local_prefill_itl_ms=3.0, max_requests=9)
    submit_long(bench)
    bench.now = 0.018
    bench.submit()
    assert not bench.to("d0", Generate)
