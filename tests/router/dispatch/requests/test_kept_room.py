"""Room that is kept for a request held for long, and who takes it nevertheless."""

from __future__ import annotations

import pytest

from core.wire.media import MMFeature
from core.wire.messages import EncodeDone, EncodeRequest
from router.dispatch.waiting import PASS_S
from tests.router.dispatch.requests.test_shares import CALM, FLOOD, GRAMMAR, THIRD, finish, started, submit

FOURTH = 4
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
