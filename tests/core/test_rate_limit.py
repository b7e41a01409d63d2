"""An event that a peer can trigger at any rate is admitted once per interval, and memory stays bounded."""

import io
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.log import configure_logging
from core.rate_limit import LimitedLog, RateLimit
from core.testing.clock import FakeClock


@pytest.fixture
def stream():
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    stream = io.StringIO()
    configure_logging("INFO", "router", stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def test_one_occurrence_per_interval_is_admitted():
    limit = RateLimit(10.0)
    assert [limit.admit("a", now) for now in (0.0, 1.0, 9.9, 10.0, 11.0)] == [0, None, None, 2, None]


def test_keys_are_limited_apart():
    limit = RateLimit(10.0)
    assert [limit.admit(key, 0.0) for key in ("a", "b", "a")] == [0, 0, None]


def test_keys_beyond_the_bound_share_one_admission():
    limit = RateLimit(10.0, max_keys=3)
    admitted = [key for key in range(1000) if limit.admit(key, 0.0) is not None]
    assert admitted == [0, 1, 2, 3]
    assert limit.num_keys == 3


def test_ended_windows_make_room_for_new_keys():
    limit = RateLimit(10.0, max_keys=2)
    for key in "ab":
        limit.admit(key, 0.0)
    assert [limit.admit(key, 10.0) for key in "cd"] == [0, 0]


@given(st.lists(st.tuples(st.integers(0, 20), st.floats(0, 5)), max_size=200), st.integers(1, 8))
def test_an_interval_admits_as_many_as_there_are_keys_and_one(steps, max_keys):
    limit, now, admitted = RateLimit(7.0, max_keys), 0.0, []
    for key, passed in steps:
        now += passed
        if limit.admit(key, now) is not None:
            admitted.append(now)
        assert limit.num_keys <= max_keys
    for first, later in zip(admitted, admitted[max_keys + 1 :], strict=False):
        assert later - first >= 7.0 - 1e-9


def test_a_line_says_how_many_were_suppressed_before_it(stream):
    clock = FakeClock()
    log = LimitedLog(logging.getLogger("x"), clock.now, interval_s=60.0)
    for _ in range(1000):
        log.warning("malformed_frame", peer="aa")
    clock.advance(60.0)
    log.warning("malformed_frame", peer="bb")
    first, second = stream.getvalue().splitlines()
    assert first.endswith("event=malformed_frame peer=aa")
    assert second.endswith("event=malformed_frame peer=bb suppressed=999")


def test_an_exception_is_limited_with_its_traceback(stream):
    log = LimitedLog(logging.getLogger("x"), FakeClock().now)
    for _ in range(3):
        try:
            raise ValueError("bug")
        except ValueError:
            log.exception("router_bug")
    assert stream.getvalue().count("Traceback") == 1
