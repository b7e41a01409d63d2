"""A server that is gone, or that ends answers by itself: what the agent tells of it, and how soon."""

import asyncio
import errno
import resource
import socket
from contextlib import contextmanager

import pytest

from agent.vllm_server import Health, VllmServer
from core.errors import EngineDead
from core.testing.clock import FakeClock
from tests.agent.running_engine import Running, new_request, tokens
from tests.support.polling import WAIT_S


async def begin(running, server, answer):
    """Send a request, and return once the agent has seen a token of its answer."""
    running.engine.start()
    server.answers.append(answer)
    running.engine.submit_add([new_request()])
    await running.until(lambda: running.outputs)


async def leave(server, how):
    """Let the server be gone, long before the agent's patience of 30 s."""
    if how == "dead engine":
        server.is_healthy = False
    else:
        server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dead engine", "no server"])
async def test_a_server_that_is_gone_is_lost_at_once(server, running, how):
    await begin(running, server, [tokens(1), None])
    await leave(server, how)
    await running.until(lambda: running.deaths)
    assert not running.engine.is_alive()
    with pytest.raises(EngineDead):
        running.engine.submit_add([new_request("s/0")])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dead engine", "no server"])
async def test_a_request_that_finds_the_server_gone_is_answered_by_its_death(server, running, how):
    await leave(server, how)
    server.answers.append((500, {"error": {"message": "EngineCore is dead", "code": 500}}))
    running.engine.submit_add([new_request()])  # nothing watches the server
    await running.until(lambda: running.deaths)
    await asyncio.sleep(0.3)
    assert (len(running.deaths), running.outputs) == (1, [])


@contextmanager
def no_more_descriptors():
    """Let nothing be opened; what is open stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_lack_of_descriptors_costs_requests_and_not_the_server(server, running):
    server.answers.append([None])
    running.engine.submit_add([new_request("a/0")])
    await running.until(lambda: server.bodies)  # over the only connection
    with no_more_descriptors():
        assert await running.http.health(5.0) is Health.SILENT
        running.engine.submit_add([new_request("b/0"), new_request("c/0")])
        await running.until(lambda: len(running.outputs) == 2)
    assert [output.error.code for output in running.outputs] == ["engine_dead"] * 2
    await running.until(lambda: running.engine.num_requests == 1)
    assert running.deaths == []
    assert await running.http.health(5.0) is Health.HEALTHY


REFUSED, NO_DESCRIPTOR = ConnectionRefusedError(errno.ECONNREFUSED, "no"), OSError(errno.EMFILE, "too many")
NO_ADDRESS, NO_FAMILY = OSError(errno.EADDRNOTAVAIL, "none"), OSError(errno.EAFNOSUPPORT, "off")


@pytest.mark.parametrize(
    ("causes", "expected"),
    [
        ([REFUSED], Health.GONE),
        ([REFUSED, REFUSED], Health.GONE),
        ([NO_ADDRESS, REFUSED], Health.GONE),  # of ``localhost`` on a machine without IPv6
        ([NO_FAMILY, REFUSED], Health.GONE),
        ([OSError(errno.ENETUNREACH, "no route"), REFUSED], Health.GONE),
        ([NO_ADDRESS, NO_ADDRESS], Health.SILENT),  # for want of ports
        ([NO_DESCRIPTOR], Health.SILENT),
        ([REFUSED, NO_DESCRIPTOR], Health.SILENT),
        ([socket.gaierror(socket.EAI_NONAME, "no name")], Health.SILENT),
    ],
)
async def test_only_a_server_that_refuses_connections_at_all_usable_addresses_is_gone(running, monkeypatch, causes, expected):
    async def connect(*_, **__):
        cause = causes[0] if len(causes) == 1 else ExceptionGroup("several", causes)
        raise OSError("All connection attempts failed") from cause

    monkeypatch.setattr("anyio.connect_tcp", connect)
    try:
        raise EngineDead("of a request") from REFUSED
    except EngineDead:
        assert await running.http.health(5.0) is expected


@pytest.mark.parametrize(
    ("before", "now", "is_lost"),
    [(1.5e9, 1.5e9 + 0.25, True), (1.5e9, 1.5e9, False), (0.0, 1.5e9, False), (1.5e9, 0.0, False)],
    ids=["another process", "the same", "not told before", "not told now"],
)
async def test_a_server_that_was_started_again_meanwhile_is_lost(server, before, now, is_lost):
    """As in a pause of this agent: it may serve another model. Its counters alone may be reset while it lives."""
    server.started_at, server.num_steps = now, 50
    running = Running(server, patience_s=30.0, started_at=before)
    running.engine.start()
    await running.until(lambda: running.deaths or server.num_looks > 2)
    server.num_steps = 0
    looks = server.num_looks
    await running.until(lambda: running.deaths or server.num_looks > looks + 2)
    assert bool(running.deaths) == is_lost
    await asyncio.to_thread(running.engine.stop, WAIT_S)
    await running.http.close()


async def test_one_bad_look_does_not_end_the_server(server, running):
    server.is_healthy = False
    assert await running.http.health(5.0) is Health.GONE
    server.answers.append([tokens(1)])
    running.engine.submit_add([new_request()])
    await running.until(lambda: server.num_looks == 2)
    server.is_healthy = True
    await running.until(lambda: running.outputs and running.outputs[-1].error)
    assert (running.deaths, running.engine.is_alive()) == ([], True)


@pytest.mark.parametrize("reason", ["abort", "error"])
@pytest.mark.parametrize("num_tokens", [0, 1])
async def test_an_answer_that_the_server_aborts_is_a_failure_and_no_short_answer(running, num_tokens, reason):
    parts = [tokens(7)] * num_tokens + [tokens(finish_reason=reason)]
    outputs = await running.run(new_request(), parts)
    assert [output.new_token_ids for output in outputs] == [[7]] * num_tokens + [[]]
    assert (outputs[-1].finish_reason, outputs[-1].error.code) == ("error", "engine_dead")


async def test_a_prompt_that_the_server_aborts_is_a_failure(running):
    outputs = await running.run(new_request(needs_handoff=True), (200, tokens(finish_reason="abort")))
    assert (outputs[-1].error.code, outputs[-1].kv_handoff) == ("engine_dead", None)


async def test_a_computation_of_no_meaning(server):
    http = VllmServer(server.url)
    server.answers.append((200, tokens(1, 2, finish_reason="length")))
    await http.compute(num_prompt_tokens=38, num_tokens=2)
    await http.close()
    (body,) = server.bodies
    assert (len(body["token_ids"]), body["sampling_params"]["max_tokens"], body["stream"]) == (38, 2, False)


async def test_a_server_that_only_loads_blocks_is_asked_for_a_step_of_its_own(server, running):
    server.answers += [[None], (200, tokens(1, finish_reason="length")), [None]]  # the second step does not come
    running.engine.submit_add([new_request()])  # the server says that it loads blocks of one request
    await running.until(lambda: server.bodies)
    running.engine.start()
    await running.until(lambda: len(server.bodies) == 3)
    assert [len(body["token_ids"]) for body in server.bodies] == [2, 1, 1]
    looks = server.num_looks
    await running.until(lambda: server.num_looks > looks + 3)
    assert len(server.bodies) == 3, "one such step at a time"
    assert running.engine.num_requests == 1


async def test_a_server_that_also_computes_is_not_asked_for_steps(server, running):
    server.answers += [[None], [None]]
    running.engine.submit_add([new_request("a/0"), new_request("b/0")])
    running.engine.start()
    await running.until(lambda: server.num_looks > 3)
    assert len(server.bodies) == 2


async def test_a_server_that_does_not_tell_its_steps_is_asked_for_one_when_it_is_silent(server):
    clock, server.has_stats = FakeClock(), False
    running = Running(server, patience_s=30.0, clock=clock)

    async def look_often():
        looks = server.num_looks
        await running.until(lambda: server.num_looks > looks + 3)

    running.engine.start()
    clock.advance(5.0)
    await look_often()
    assert not server.bodies, "it rests"
    server.answers += [[None], (200, tokens(1, finish_reason="length")), [None]]  # the second step does not come
    running.engine.submit_add([new_request()])
    await running.until(lambda: server.bodies)
    await look_often()
    assert len(server.bodies) == 1, "it may have answered since the last look"
    clock.advance(5.0)
    await running.until(lambda: running.engine.reading().stalled_s == 0.0)
    clock.advance(5.0)
    await running.until(lambda: len(server.bodies) == 3)
    await look_often()
    assert [len(body["token_ids"]) for body in server.bodies] == [2, 1, 1], "one such step at a time"
    assert running.engine.reading().stalled_s == 5.0
    await asyncio.to_thread(running.engine.stop, WAIT_S)
    await running.http.close()


async def test_a_server_that_fills_more_blocks_is_not_asked_for_steps(server, running):
    """It computes a long prompt, whose chunks vLLM does not count as steps."""
    server.answers.append([None])
    server.usages = [number / 1000 for number in range(1000)]
    running.engine.submit_add([new_request()])  # the server says that it loads blocks of one request
    await running.until(lambda: server.bodies)
    running.engine.start()
    await running.until(lambda: server.num_looks > 4)
    assert len(server.bodies) == 1


async def test_loads_that_have_begun_are_counted_and_no_others(server, running):
    load = await running.http.load(5.0)
    assert (load.num_waiting, load.num_loading) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("is_back", [True, False])
async def test_a_pause_of_the_agent_is_no_silence_of_the_server(server, is_back, monkeypatch):
    """A look that was paused together with the agent finds nothing; the next one decides."""
    paused = Running(server, patience_s=0.05)
    real, looks = paused.http.health, []

    async def health(timeout_s):
        looks.append(timeout_s)
        if len(looks) == 1:
            await asyncio.sleep(0.2)  # of the pause, longer than the patience
        return Health.SILENT if len(looks) == 1 or not is_back else await real(timeout_s)

    monkeypatch.setattr(paused.http, "health", health)
    paused.engine.start()
    await paused.until(lambda: paused.deaths or len(looks) > 5)
    assert bool(paused.deaths) == (not is_back)
    await asyncio.to_thread(paused.engine.stop, WAIT_S)
    await paused.http.close()


async def test_a_bug_of_the_watch_ends_the_agent(running, monkeypatch):
    """Else its requests would wait for a server that nothing watches."""

    async def fails(timeout_s):
        raise ValueError("1e")

    monkeypatch.setattr(running.http, "load", fails)
    running.engine.start()
    await running.until(lambda: running.deaths)
    assert "cannot be watched: ValueError('1e')" in str(running.deaths[0])
