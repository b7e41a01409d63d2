"""Signals of a process that an event loop runs."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from core.process_signals import SIGNALS, exit_on_signals, handled_signals


@pytest.fixture
def dispositions(monkeypatch):
    """Return the handlers that are set from now on, each with its signal; the old ones come back at the end."""
    found, set_handler = [], signal.signal
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def record(number, handler):
        found.append((number, handler))
        return set_handler(number, handler)

    set_handler(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may ignore it
    monkeypatch.setattr(signal, "signal", record)
    yield found
    for number, handler in before.items():
        set_handler(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
async def test_each_signal_calls_the_handler_in_the_loop(number, dispositions):
    called = asyncio.Event()
    with handled_signals(asyncio.get_running_loop(), called.set):
        os.kill(os.getpid(), number)
        await asyncio.wait_for(called.wait(), 10)


async def test_hangup_after_another_signal_is_left_out(dispositions):
    """A terminal that closes often sends two: a second signal to leave would cut what drains."""
    calls, all_read = [], asyncio.Event()

    def handler():
        calls.append(1)
        if len(calls) == 2:
            all_read.set()

    with handled_signals(asyncio.get_running_loop(), handler):
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
            os.kill(os.getpid(), number)
        await asyncio.wait_for(all_read.wait(), 10)
    assert len(calls) == 2


async def test_ignored_hangup_stays_ignored(dispositions):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    exit_on_signals()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    with handled_signals(asyncio.get_running_loop(), lambda: None):
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


async def test_at_no_moment_a_signal_has_its_default_effect(dispositions):
    ours = {number: lambda *_: None for number in SIGNALS}
    for number, handler in ours.items():
        signal.signal(number, handler)
    with handled_signals(asyncio.get_running_loop(), lambda: None):
        pass
    defaults = {signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler}
    assert [entry for entry in dispositions if entry[1] in defaults] == []
    assert {number: signal.getsignal(number) for number in SIGNALS} == ours


async def test_the_wakeup_descriptor_is_given_back(dispositions):
    with handled_signals(asyncio.get_running_loop(), lambda: None):
        pass
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    assert before == -1
