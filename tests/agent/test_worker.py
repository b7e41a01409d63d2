"""The start of an agent's process, which waits for its server and says so, and what its drain has to wait for."""

import asyncio
from dataclasses import replace

import pytest

from agent import worker
from agent.vllm_server import Health, VllmServer
from agent.worker import VllmWorker
from connectors.testing.contexts import worker_context
from core.config import load_config
from core.errors import EngineDead
from core.testing.clock import FakeClock
from core.worker.parts import EngineEvents
from tests.agent.running_engine import WAIT_S, until


class Start:
    """An agent whose looks at its server take 10 s each, and show ``looks``."""

    def __init__(self, server, monkeypatch):
        self.clock = FakeClock()
        self.looks = []
        settings = [f"agent.engine={server.url}", "agent.start_timeout_s=100", "connector.lease_s=120"]
        config = load_config(assignments=settings)
        self.worker = VllmWorker(replace(worker_context("decode"), config=config, clock=self.clock))
        monkeypatch.setattr(worker, "START_POLL_S", 0.0)
        monkeypatch.setattr(VllmServer, "health", self._look)

    async def _look(self, timeout_s):
        self.clock.advance(10.0)
        return self.looks.pop(0)


@pytest.fixture
async def start(server, monkeypatch):
    made = Start(server, monkeypatch)
    yield made
    await made.worker.close()


def waiting_lines(caplog):
    return [record.msg.fields for record in caplog.records if getattr(record.msg, "name", "") == "waiting_for_engine"]


async def test_an_agent_that_waits_for_its_server_says_so_at_once_and_then_now_and_again(server, start, caplog):
    caplog.set_level("INFO")
    start.looks = [Health.GONE] * 3 + [Health.SILENT] * 4 + [Health.HEALTHY]
    server.answers.append([])
    await start.worker.load()
    assert waiting_lines(caplog) == [{"url": server.url, "health": health} for health in ("gone", "silent", "silent")]


async def test_an_agent_whose_server_is_there_waits_for_nothing(server, start, caplog):
    caplog.set_level("INFO")
    start.looks = [Health.HEALTHY]
    server.answers.append([])
    await start.worker.load()
    assert waiting_lines(caplog) == []


async def test_an_agent_gives_up_a_server_that_does_not_come(start):
    start.looks = [Health.GONE] * 11
    with pytest.raises(EngineDead, match="not ready after 100 s"):
        await start.worker.load()


@pytest.mark.slow
async def test_a_drain_waits_for_readers_as_long_as_the_server_may_hold_blocks(server, start, monkeypatch):
    start.looks = [Health.HEALTHY]
    server.answers.append([])
    await start.worker.load()
    events = EngineEvents(print, print, print, lambda: None)
    parts = await start.worker.open(events)
    assert parts.load().longest_lease_s == 0.0, "no block is held yet"
    monkeypatch.undo()
    parts.engine.start()
    await until(lambda: parts.load().num_leased_blocks)
    assert parts.load().longest_lease_s == 120.0
    await asyncio.to_thread(parts.engine.stop, WAIT_S)
