"""The demo with vLLM engines says what happened, and fails if the answer did not come by a verified handoff."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from rich.console import Console

from core.config import load_config
from kvferry import demo
from kvferry.demo_vllm import read_engine

LOADED = {
    "kvferry_loads_total": 1,
    "kvferry_verified_blocks_total": 3,
    "kvferry_bytes_total": 4096,
    "kvferry_transfer_seconds_total": 0.25,
    "kvferry_verify_seconds_total": 0.5,
}


def metrics(**values):
    """Return a server's metrics; those of two engines, which are summed, for a tuple."""
    lines = []
    for name, value in values.items():
        family = name.removesuffix("_total")
        lines.append(f"# TYPE vllm:{family} {'counter' if name.endswith('_total') else 'gauge'}")
        for engine, one in enumerate(value if isinstance(value, tuple) else (value,)):
            lines.append(f'vllm:{name}{{engine="{engine}",model_name="m",reason="stale"}} {one}')
    return "\n".join(lines) + "\n"


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs the demo over servers with these metrics; it returns exit code and output."""

    def run_with(prefill, decode):
        servers = {"prefill-0-vllm": prefill, "decode-0-vllm": decode}

        class Cluster:
            base_url = "http://127.0.0.1:1"
            workers = (SimpleNamespace(engine_id="prefill-0"), SimpleNamespace(engine_id="decode-0"))
            has_stopped = False

            def __init__(self, config):
                pass

            def start(self):
                return self

            def stop(self):
                Cluster.has_stopped = True

            def metrics(self, name):
                return metrics(**servers[name])

        answer = demo.StreamResult(sent_at=1.0, text_at=[1.5, 2.0], usage={"prompt_tokens": 41})
        monkeypatch.setattr(demo, "LocalCluster", Cluster)
        monkeypatch.setattr(demo, "_ask", lambda *_: answer)
        monkeypatch.setattr(demo, "_SETTLE_TIMEOUT_S", 0.0)
        code = demo.run_demo(load_config(assignments=["local.engine=vllm"]), "why?", 8)
        assert Cluster.has_stopped
        return code, capsys.readouterr().out

    return run_with


def test_a_verified_handoff_is_accounted_for(run):
    code, said = run({}, LOADED)
    assert code == 0
    for line in ("prompt: 41 tokens", "bytes: 4,096", "verified blocks: 3", "transfer: 250.0 ms", "verification: 500.0 ms"):
        assert f"  {line}\n" in said
    assert said.endswith("no block is held on either engine\n")


@pytest.mark.parametrize(
    ("decode", "words"),
    [
        ({}, "did not come by a handoff"),
        (LOADED | {"kvferry_verified_blocks_total": 0}, "did not come by a handoff"),
        (LOADED | {"kvferry_failures_total": 1}, "computed instead of transferred: stale"),
        (LOADED | {"kvferry_refusals_total": 1}, "computed instead of transferred: stale"),
    ],
)
def test_an_answer_without_a_verified_handoff_fails_the_demo(run, decode, words):
    code, said = run({}, decode)
    assert code == 1
    assert "FAILED: " in said
    assert words in said


@pytest.mark.parametrize(("held", "count"), [({"kvferry_held_blocks": 2}, 2), ({"kv_cache_usage_perc": 0.1}, 1)])
def test_blocks_that_are_still_held_fail_the_demo(run, held, count):
    code, said = run(held, LOADED)
    assert code == 1
    assert f"FAILED: blocks are still held: {{'prefill-0': {count}}}" in said


def test_the_engines_of_a_server_are_summed():
    reading = read_engine(metrics(kvferry_loads_total=(1, 2), kvferry_held_blocks=(0, 5), kvferry_failures_total=(1, 0)))
    assert (reading.num_loads, reading.num_held_blocks, reading.problems) == (3, 5, {"stale": 1})


def test_the_demo_sends_the_first_of_several_keys(monkeypatch):
    sent = []
    monkeypatch.setattr(demo, "_events", lambda _url, _body, headers: sent.append(headers) or iter(()))
    demo._ask("http://127.0.0.1:1", load_config(assignments=["router.api_key=K1,K2"]), "why?", 8, Console(quiet=True))
    assert [headers[b"Authorization"] for headers in sent] == [b"Bearer K1"]
