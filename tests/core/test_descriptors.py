from __future__ import annotations

import asyncio
import errno
import os
import resource

import pytest

from core.descriptors import connections_within, raise_descriptor_limit, report_full_table


@pytest.fixture
def limits(monkeypatch):
    """The process's limits, as the code sees them."""
    found = {"soft": 1024, "hard": 4096}
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (found["soft"], found["hard"]))
    monkeypatch.setattr(resource, "setrlimit", lambda _kind, new: found.update(soft=new[0], hard=new[1]))
    return found


def test_soft_limit_is_raised_as_far_as_it_is_needed(limits):
    raise_descriptor_limit(2000)
    assert limits == {"soft": 2256, "hard": 4096}


def test_soft_limit_is_raised_to_the_hard_one_at_most(limits):
    raise_descriptor_limit(8192)
    assert limits == {"soft": 4096, "hard": 4096}


def test_limit_that_is_high_enough_stays(limits):
    limits["soft"] = 4000
    raise_descriptor_limit(100)
    assert limits["soft"] == 4000


def test_connections_leave_descriptors_for_everything_else(limits, caplog):
    assert connections_within(8192, "router.max_connections") == 768
    assert "few_descriptors" in caplog.text
    assert "router.max_connections" in caplog.text


def test_few_descriptors_are_shared_with_everything_else(limits):
    for soft, expected in [(400, 200), (256, 128), (2, 1), (1, 1)]:
        limits["soft"] = soft
        assert connections_within(8192, "router.max_connections") == expected


def test_enough_descriptors_are_nothing_to_talk_about(limits, caplog):
    assert connections_within(768, "router.max_connections") == 768
    limits["soft"] = resource.RLIM_INFINITY
    assert connections_within(8192, "router.max_connections") == 8192
    assert not caplog.text


async def test_full_table_is_one_line_that_names_the_limit(limits, caplog):
    loop = asyncio.get_running_loop()
    report_full_table(loop)
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    for _ in range(3):
        loop.call_exception_handler({"message": "no resource", "exception": error, "socket": object()})
    (record,) = caplog.records
    assert "event=no_descriptors" in record.getMessage()
    assert "soft_limit=1024" in record.getMessage()
    assert "ulimit -n" in record.getMessage()
    assert not record.exc_info


async def test_other_errors_of_the_loop_are_written_as_before(caplog):
    loop = asyncio.get_running_loop()
    report_full_table(loop)
    loop.call_exception_handler({"message": "a bug", "exception": ValueError("bad")})
    loop.call_exception_handler({"message": "a task", "exception": OSError(errno.EMFILE, "of a file")})
    assert [bool(record.exc_info) for record in caplog.records] == [True, True]
