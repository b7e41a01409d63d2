from __future__ import annotations

import os
import signal
import sys
from typing import ClassVar

import pytest

from core.config import load_config
from core.errors import StartFailed
from core.process_signals import SIGNALS
from kvferry import serve


@pytest.fixture
def signals():
    """Put back the process's handlers, which ``serve_forever`` replaces."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Cluster:
    """A cluster without processes; the graces that it is stopped with are in ``graces``."""

    graces: ClassVar = {}
    reserved_bytes: ClassVar = {"2 KV pools of 1 GiB": 2 << 30}
    ends: ClassVar = {"decode-0": ["ended with signal SIGKILL", "ended with exit code 1: no luck"]}
    workers = ()

    def __init__(self, config, **options):
        self.graces.clear()

    def prepare(self):
        pass

    def start(self, is_cancelled):
        signal.raise_signal(signal.SIGTERM)
        assert is_cancelled()

    def stop(self, **options):
        self.graces.update(options)


@pytest.mark.usefixtures("signals")
def test_each_process_gets_the_time_that_it_drains_for_and_some_more(monkeypatch, capsys):
    monkeypatch.setattr(serve, "LocalCluster", Cluster)
    config = load_config(assignments=["worker.drain_timeout_s=70", "router.drain_timeout_s=40"])
    assert serve.serve_forever(config) == 0
    assert 70 < Cluster.graces["grace_s"] < 80
    assert 40 < Cluster.graces["router_grace_s"] < 50
    said = capsys.readouterr()
    assert said.out.startswith("memory beside the model: 2 KV pools of 1 GiB; 2 GiB of ")
    assert said.err == "kvferry: decode-0 ended by itself 2 times, at last: it ended with exit code 1: no luck\n"


class ServingCluster(Cluster):
    """A cluster that is told to leave while its address is said."""

    def start(self, is_cancelled):
        pass

    @property
    def base_url(self):
        signal.raise_signal(signal.SIGTERM)
        return "http://127.0.0.1:8000"


class HangingUpCluster(Cluster):
    """A cluster whose terminal closes: its shell sends the signal, then the kernel."""

    @property
    def base_url(self):
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        return "http://127.0.0.1:8000"

    def start(self, is_cancelled):
        pass


@pytest.mark.usefixtures("signals")
def test_cluster_drains_when_its_terminal_closes(monkeypatch):
    monkeypatch.setattr(serve, "LocalCluster", HangingUpCluster)
    signal.signal(signal.SIGHUP, signal.default_int_handler)  # instead of the end of this process
    assert serve.serve_forever(load_config()) == 0
    assert Cluster.graces["grace_s"] > 0


@pytest.mark.usefixtures("signals")
def test_cluster_drains_although_nobody_reads_its_messages(monkeypatch):
    monkeypatch.setattr(serve, "LocalCluster", ServingCluster)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert serve.serve_forever(load_config()) == 0
        monkeypatch.undo()
    assert Cluster.graces["grace_s"] > 0


class LostCluster(Cluster):
    """A cluster whose processes have ended with the thread that keeps them."""

    base_url = "http://127.0.0.1:8000"

    def start(self, is_cancelled):
        pass

    def check(self):
        raise StartFailed("the thread has died")


@pytest.mark.usefixtures("signals")
def test_a_cluster_whose_processes_nothing_keeps_any_more_ends_the_command(monkeypatch):
    monkeypatch.setattr(serve, "LocalCluster", LostCluster)
    monkeypatch.setattr(serve, "CHECK_INTERVAL_S", 0.01)
    with pytest.raises(StartFailed, match="has died"):  # exit code 1
        serve.serve_forever(load_config())
    assert Cluster.graces


@pytest.mark.usefixtures("signals")
def test_cluster_is_stopped_after_any_error(monkeypatch):
    class Broken(Cluster):
        def start(self, is_cancelled):
            raise MemoryError

    monkeypatch.setattr(serve, "LocalCluster", Broken)
    with pytest.raises(MemoryError):
        serve.serve_forever(load_config())
    assert Broken.graces
