"""What the doctor says of vLLM servers: of each, and of two that are to work together."""

import asyncio
import threading

import pytest

from core.config import KVFerryConfig
from kvferry.doctor_vllm import check_engines
from tests.agent.scripted_server import ScriptedServer


@pytest.fixture
def loop():
    """Yield an event loop on a thread of its own: the doctor has one, too."""
    running = asyncio.new_event_loop()
    thread = threading.Thread(target=running.run_forever)
    thread.start()
    yield running
    running.call_soon_threadsafe(running.stop)
    thread.join()
    running.close()


@pytest.fixture
def servers(loop):
    made = [ScriptedServer(), ScriptedServer()]
    for server in made:
        asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(10)
    yield made
    for server in made:
        loop.call_soon_threadsafe(server.stop)


def examined(*urls):
    return [(finding.verdict, finding.text, finding.fix) for finding in check_engines(urls, KVFerryConfig())]


def test_an_engine_that_can_hand_over_is_in_order(servers):
    first, plugin, cache, load = examined(servers[0].url)
    assert {first[0], plugin[0], cache[0], load[0]} == {"ok"}
    assert "vLLM 0.32.0 serves m and takes token ids; 100 blocks of 32 tokens, at most 512" in first[1]
    assert "KvferryConnector" in plugin[1]
    assert "2 requests run, 1 wait; 50% of the KV cache is used; 7 blocks are held for readers" in load[1]


def test_a_server_without_its_token_routes_is_named_with_the_flag(servers):
    servers[0].token_routes = 403
    ((verdict, text, _),) = examined(servers[0].url)
    assert verdict == "failure"
    assert "--enable-scale-out" in text


@pytest.mark.parametrize("how", ["gone", "dead"])
def test_a_server_that_cannot_be_asked_is_a_failure(servers, how):
    url = servers[0].url if how == "dead" else "http://127.0.0.1:9"
    servers[0].is_healthy = False
    ((verdict, text, fix),) = examined(url)
    assert (verdict, text) == ("failure", "nothing listens there, or its engine is dead")
    assert "log" in fix


def test_engines_that_differ_are_named_with_both_values(servers):
    servers[1].version = "0.33.1"
    servers[1].has_plugin = False
    found = examined(servers[0].url, servers[1].url)
    assert ("warning", "it has no plug-in: it can only serve alone") in [each[:2] for each in found]
    failures = [text for verdict, text, _ in found if verdict == "failure"]
    assert failures == ["version: 0.32 and 0.33", "plug-in: True and False"]


def test_an_engine_without_stats_may_have_the_plugin(servers):
    servers[1].has_stats = False
    found = examined(servers[0].url, servers[1].url)
    assert [text for verdict, text, _ in found if verdict == "failure"] == []
    warnings = [(text, fix) for verdict, text, fix in found if verdict == "warning"]
    text = "its /metrics tell neither its load nor whether it has the plug-in"
    assert warnings == [(text, "start it without --disable-log-stats")]


def test_engines_that_agree_are_in_order(servers):
    (*_, last) = examined(servers[0].url, servers[1].url)
    assert last[:2] == ("ok", "one model; layout, dtype and hash seed are compared at their first handoff")
