"""A token in the midst of a decode leg takes a short way through the dispatcher, with the same result as the long one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.wire.messages import Tokens, Usage
from router.dispatch import dispatcher
from router.dispatch.request_state import DeliverTokens
from tests.router.dispatch.requests.conftest import Bench

FRAMES = st.lists(
    st.lists(
        st.tuples(
            st.sampled_from(["r1", "r1", "r2", "r1.2", "unknown"]),
            st.sampled_from([0, 0, 0, -1, 1]),  # from the position that is due
            st.sampled_from([(1,), (2,), (3,), (), (4, 5)]),
            st.sampled_from([None, None, None, None, "length", "abort"]),
            st.booleans(),
        ),
        max_size=4,
    ),
    max_size=6,
)


def outcome(frames, *, n, has_short_way, monkeypatch):
    """Return what clients and workers get of these frames."""
    with monkeypatch.context() as patch:
        if not has_short_way:
            patch.setattr(dispatcher, "apply_plain_token", lambda request, item: False)
        bench = Bench("p0", "d0", "d1")
        for request_id in ("r1", "r2"):
            bench.submit(request_id, n=n)
            bench.prefill_done(request_id, n=n)
        for peer in ("d0", "d1"):  # the first token of a decode leg goes the long way
            bench.receive(peer, [Tokens(request_id, index, 1, (5,)) for request_id in ("r1", "r2") for index in range(n)])
        for frame in frames:
            due = {request_id: len(bench.output(request_id)) // n for request_id in ("r1", "r2")}
            items = []
            for name, offset, token_ids, reason, has_usage in frame:
                position = max(0, due.get(name.partition(".")[0], 1) + offset)
                usage = Usage() if has_usage else None
                items.append(Tokens(name, 0, position, token_ids, reason, usage=usage))
            for peer in ("d0", "d1"):
                bench.receive(peer, items)
        outputs = {(request_id, index): bench.output(request_id, index) for request_id in ("r1", "r2") for index in range(n)}
        errors = {request_id: [update.error for update in updates] for request_id, updates in bench.updates.items()}
        ends = {request_id: ended.request.finish_reasons for request_id, ended in bench.ended.items()}
        return outputs, {name: [error for error in found if error] for name, found in errors.items()}, ends, bench.sent


@pytest.mark.slow
@given(frames=FRAMES, n=st.sampled_from([1, 1, 2]))
def test_both_ways_lead_to_the_same(frames, n):
    with pytest.MonkeyPatch.context() as monkeypatch:
        short, long = (
            outcome(frames, n=n, has_short_way=has_short_way, monkeypatch=monkeypatch) for has_short_way in (True, False)
        )
    assert short[1:] == long[1:]
    for choice, token_ids in long[0].items():
        # Tokens before a wrong message of the same frame are passed on by the short way, and dropped by the long one.
        assert short[0][choice][: len(token_ids)] == token_ids
        if choice[0] not in {name for name, errors in long[1].items() if errors}:
            assert short[0][choice] == token_ids


def test_tokens_of_a_frame_stay_in_order(make_bench):
    bench = make_bench("a0")
    bench.submit()
    bench.tokens(0, 1, peer="a0", usage=Usage())
    frame = [Tokens("r1", 0, 1, (2,)), Tokens("r1", 0, 2, (3, 4)), Tokens("r1", 0, 4, (5,)), Tokens("r1", 0, 5, (6,))]
    bench.receive("a0", frame)
    assert bench.output() == [1, 2, 3, 4, 5, 6]


def test_a_gap_or_a_repetition_is_noticed(make_bench):
    bench = make_bench("p0", "d0", "d1")
    bench.submit()
    bench.prefill_done()
    peer = bench.core.dispatcher.requests["r1"].current.engine_id
    bench.tokens(1, 7, peer=peer)
    bench.tokens(1, 7, peer=peer)
    assert bench.output() == [50, 7]
    bench.tokens(3, 9, peer=peer)
    assert bench.output() == [50, 7]
    assert bench.kinds() == ["replay"]


def test_a_token_gives_back_free_retries(make_bench):
    bench = make_bench("p0", "d0")
    bench.submit()
    bench.prefill_done()
    bench.tokens(1, 7)
    request = bench.core.dispatcher.requests["r1"]
    request.retries.free["stalled"] = 1
    bench.tokens(2, 8)
    assert request.retries.free == {}


def test_tokens_of_a_step_are_one_action(make_bench):
    bench = make_bench("a0", max_requests=4)
    for request_id in ("r1", "r2"):
        bench.submit(request_id)
        bench.tokens(0, 1, peer="a0", request_id=request_id, usage=Usage())
    frame = [Tokens(request_id, 0, 1, (2,)) for request_id in ("r1", "r2")]
    (action,) = bench.core.on_message(b"a0", frame, bench.now)
    assert action == DeliverTokens([("r1", (2,)), ("r2", (2,))])
