"""Several threads for one call: all have ended when it returns, however it ends."""

from __future__ import annotations

import threading

import pytest
import torch

from core.kernel_threads import KernelThreads


def test_every_part_runs_and_the_first_on_this_thread():
    seen = {}

    def part(number):
        seen[number] = threading.get_ident()

    KernelThreads("test").run(part, [(number,) for number in range(5)])
    assert seen.keys() == set(range(5))
    assert seen[0] == threading.get_ident()


def test_the_error_of_a_part_is_raised_after_all_have_ended(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    ended, gate = [], threading.Event()

    def part(number):
        if number == 1:
            gate.wait()
            ended.append(number)
        if number == 2:
            gate.set()
            raise ValueError("of a part")

    with pytest.raises(ValueError, match="of a part"):
        KernelThreads("test").run(part, [(0,), (1,), (2,)])
    assert ended == [1]


def test_without_a_thread_nothing_runs_later_on_the_callers_memory(monkeypatch):
    threads, seen = KernelThreads("test"), []

    def fail(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threads.run(seen.append, [("first",), ("queued",)])
    threads.run(seen.append, [("a",), ("b",)])
    assert sorted(seen) == ["a", "b"]
