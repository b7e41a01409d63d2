from __future__ import annotations

import signal
from typing import ClassVar

import pytest

from core.config import load_config
from kvferry import serve


@pytest.fixture
def signals():
    """Put back the process's handlers, which ``serve_forever`` replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals")
def test_each_process_gets_the_time_that_it_drains_for_and_some_more(monkeypatch, capsys):
    graces = {}

    class Cluster:
        def __init__(self, config, **options):
            pass

        reserved_bytes: ClassVar = {"2 KV pools of 1 GiB": 2 << 30}
        ends: ClassVar = {"decode-0": ["ended with signal SIGKILL", "ended with exit code 1: no luck"]}

        def prepare(self):
            pass

        def start(self, is_cancelled):
            signal.raise_signal(signal.SIGTERM)
            assert is_cancelled()

        def stop(self, **options):
            graces.update(options)

    monkeypatch.setattr(serve, "LocalCluster", Cluster)
    config = load_config(assignments=["worker.drain_timeout_s=70", "router.drain_timeout_s=40"])
    assert serve.serve_forever(config) == 0
    assert 70 < graces["grace_s"] < 80
    assert 40 < graces["router_grace_s"] < 50
    said = capsys.readouterr()
    assert said.out.startswith("memory beside the model: 2 KV pools of 1 GiB; 2 GiB of ")
    assert said.err == "kvferry: decode-0 ended by itself 2 times, at last: it ended with exit code 1: no luck\n"
