"""The clock that tests move."""

import pytest

from core.testing.clock import FakeClock


def test_does_not_move_by_itself():
    clock = FakeClock(5.0)
    assert clock.now() == clock.now() == 5.0
    assert clock.advance(2.5) == 7.5
    assert clock.now() == 7.5


def test_never_goes_back():
    clock = FakeClock()
    with pytest.raises(ValueError, match="monotonic"):
        clock.advance(-1.0)
