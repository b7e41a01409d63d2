"""A worker without a router says so after some seconds, rarely, and never while it has one."""

from __future__ import annotations

import pytest

from core.worker.router_watch import PATIENCE_S, RouterWatch


@pytest.fixture
def look(caplog):
    """Look at a time; returns the lines that are written there."""
    watch = RouterWatch()

    def look(now, *, is_well=False):
        caplog.clear()
        watch.look(now, is_well=is_well, reasons=lambda: {"tcp://a:1": "away", "tcp://b:1": "no answer"})
        return [record.getMessage() for record in caplog.records]

    return look


def test_line_comes_after_some_seconds_then_once_a_minute(look):
    assert look(100.0) == []
    assert look(99.9 + PATIENCE_S) == []
    assert look(100.0 + PATIENCE_S) == [
        "event=router_unreachable router=tcp://a:1 reason=away",
        'event=router_unreachable router=tcp://b:1 reason="no answer"',
    ]
    assert look(159.0 + PATIENCE_S) == []
    assert len(look(160.0 + PATIENCE_S)) == 2


def test_no_line_while_a_router_has_the_worker(look):
    for now in range(0, 1000, 10):
        assert look(float(now), is_well=True) == []


def test_worker_that_loses_its_routers_waits_again(look):
    look(0.0)
    assert look(100.0)
    assert look(101.0, is_well=True) == []
    assert look(102.0) == []
    assert look(102.0 + PATIENCE_S)
