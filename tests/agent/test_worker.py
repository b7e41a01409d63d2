"""The start of an agent's process, which waits for its server and says so, and what its drain has to wait for."""

import asyncio
import os
import resource
from dataclasses import replace

import pytest

from agent import worker
from agent.vllm_server import Health, VllmServer
from agent.worker import VllmWorker, read_api_key
from connectors.testing.contexts import worker_context
from core.config import load_config
from core.config_workers import AgentSection
from core.errors import ConfigError, EngineDead
from core.kv.content_feed import ContentFeed
from core.kv.events import BlockStored
from core.testing.clock import FakeClock
from core.worker.parts import EngineEvents
from router.contents.reports import ReportedContents
from router.dispatch.members import WorkerKey
from tests.agent.running_engine import new_request, tokens
from tests.support.polling import WAIT_S, until


class Start:
    """An agent whose looks at its server take 10 s each, and show ``looks``."""

    def __init__(self, server, monkeypatch):
        self.clock = FakeClock()
        self.looks = []
        settings = [f"agent.engine={server.url}", "agent.start_timeout_s=100", "connector.lease_s=120", "model.name=m"]
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


@pytest.mark.parametrize("key", [os.fsdecode(b"a\xff"), "ä", "a\nb"])
def test_an_api_key_that_no_header_can_hold_is_refused_by_its_source(tmp_path, monkeypatch, key):
    monkeypatch.setenv("VLLM_API_KEY", key)
    with pytest.raises(ConfigError, match=r"^\$VLLM_API_KEY: character [12] of the key ") as caught:
        read_api_key(AgentSection())
    assert key not in str(caught.value)  # it may be a secret
    file = tmp_path / "key"
    file.write_text("ä\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"^agent\.api_key_file = {file}: character 1 of the key "):
        read_api_key(AgentSection(api_key_file=str(file)))


def test_an_api_key_of_printable_ascii_is_taken(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "a b~!")
    assert read_api_key(AgentSection()) == "a b~!"


async def test_an_agent_gives_up_a_server_that_does_not_come(start):
    start.looks = [Health.GONE] * 11
    with pytest.raises(EngineDead, match="not ready after 100 s"):
        await start.worker.load()


@pytest.mark.parametrize(
    ("served", "root", "is_told"), [("m", "x", False), ("x", "m", False), ("x", "y", True), ("x", None, True)]
)
async def test_a_server_whose_model_has_other_names_is_told_of(server, start, caplog, served, root, is_told):
    server.model = {"id": served, "root": root}
    start.looks = [Health.HEALTHY]
    server.answers.append([])
    await start.worker.load()
    assert ("event=other_model_name" in caplog.text) == is_told


async def registration(server, start):
    start.looks = [Health.HEALTHY]
    server.answers.append([])
    await start.worker.load()
    return (await start.worker.open(EngineEvents(print, print, print, lambda: None))).register("")


async def test_routers_learn_how_many_blocks_of_16_tokens_the_server_has(server, start, caplog):
    facts = await registration(server, start)
    assert (facts.num_blocks, facts.content_parts) == (200, ())
    assert not caplog.records


async def test_what_a_server_of_unknown_cache_reports_is_believed(server, start, caplog):
    """It has room for one request of the greatest length at least, or it would not have started."""
    server.cache_info = ""
    facts = await registration(server, start)
    assert facts.num_blocks == 512 // 16
    assert caplog.text.count("event=vllm_cache_size_unknown") == 1
    assert "--disable-log-stats" in caplog.text
    router, key = ReportedContents(), WorkerKey(facts.engine_id, facts.incarnation)
    router.join(key, (facts.model_fingerprint, 16), facts.num_blocks, facts.content_parts)
    feed = ContentFeed(facts.engine_id, facts.incarnation)
    feed.start("r")
    feed.publish([BlockStored(tuple(number.to_bytes(32, "little") for number in range(1, 100)), None, 16, 0)])
    for report in feed.take_reports("r"):
        router.on_report(report)
    assert len(router.contents(key)) == 99
    assert not router.needs_snapshot(key, feed.num_sent("r"))


@pytest.mark.parametrize(("hard", "num_choices"), [(1000, 744), (400, 200), (20, 10)])
async def test_an_agent_takes_no_more_choices_than_it_can_have_connections(
    server, start, caplog, monkeypatch, hard, num_choices
):
    limits = {"soft": 16, "hard": hard}
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (limits["soft"], limits["hard"]))
    monkeypatch.setattr(resource, "setrlimit", lambda _kind, new: limits.update(soft=new[0]))
    start.looks = [Health.HEALTHY]
    server.answers.append([])
    await start.worker.load()
    parts = await start.worker.open(EngineEvents(print, print, print, lambda: None))
    facts = parts.register("")
    assert limits["soft"] == hard
    assert facts.max_num_choices == num_choices
    assert facts.max_num_seqs == parts.limits.max_num_seqs == min(64, num_choices)
    assert parts.limits.max_num_seqs + parts.limits.max_waiting_requests == num_choices
    assert "event=few_descriptors" in caplog.text


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


@pytest.mark.parametrize(("value", "num_leased"), [({"kvferry": "abc"}, 1), ({}, 0)], ids=["our plug-in", "another connector"])
async def test_a_drain_waits_for_a_lease_after_the_last_handoff_of_a_server_without_stats(
    server, start, caplog, value, num_leased
):
    server.has_stats = False
    start.looks = [Health.HEALTHY]
    server.answers.append([])
    await start.worker.load()
    assert caplog.text.count("event=vllm_stats_off") == 1
    outputs = []
    parts = await start.worker.open(EngineEvents(outputs.extend, print, print, lambda: None))
    assert parts.load().num_leased_blocks == 0
    params = {"do_remote_prefill": True} | value
    server.answers.append((200, tokens(9, finish_reason="length") | {"kv_transfer_params": params}))
    parts.engine.submit_add([new_request(needs_handoff=True)])
    await until(lambda: outputs)
    start.clock.advance(119.0)
    assert (parts.load().num_leased_blocks, parts.load().longest_lease_s) == (num_leased, 120.0 * num_leased)
    start.clock.advance(1.0)
    assert parts.load().num_leased_blocks == 0
