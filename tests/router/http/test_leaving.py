"""What is done for one request alone ends when its client leaves, and when its time is over."""

import asyncio
import threading
import time
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import httpx
import pytest

from core.clock import SystemClock
from core.errors import DeadlineExceeded
from core.wire.engine_calls import EngineCall
from core.wire.messages import Abort
from router.http.caller import Caller
from router.http.time_limits import TimeLimits
from router.openai.text_pool import INLINE_CHARACTERS

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RENDER, SPLIT = f"{CHAT}/render", f"{CHAT}/derender"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
RENDERED = (200, {"token_ids": [5, 6, 7]})


def chat(**fields):
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20} | fields


@pytest.fixture
async def splitting(start_router):
    """A router, and a worker whose engine renders at once but never answers how an output is split."""
    served = await start_router()
    calls = {RENDER: lambda body: RENDERED, SPLIT: lambda body: (200, None)}
    return served, await served.add("aggregated", takes_calls=True, script=served.script(calls=calls))


async def ask_and_leave(served, path, body, begun):
    """Send a request, and close its connection once ``begun`` is true."""
    async with served.client() as client:
        asked = asyncio.create_task(client.post(path, json=body))
        await served.until(begun)
        asked.cancel()
        with suppress(asyncio.CancelledError, httpx.HTTPError):
            await asked


@pytest.mark.parametrize("fields", [{}, {"stream": True}], ids=["whole", "stream"])
async def test_an_engine_does_not_go_on_splitting_for_a_client_that_has_left(splitting, fields):
    served, worker = splitting

    def split_calls():
        return [call for call in worker.messages(EngineCall) if call.path == SPLIT]

    await ask_and_leave(served, CHAT, chat(tools=TOOLS, **fields), split_calls)
    await worker.aborts(split_calls()[0].request_id)
    await served.until(lambda: not served.router.gateway.core.calls)
    assert len(split_calls()) == 1, "no other engine is asked"


@pytest.mark.slow
async def test_rendering_generating_and_splitting_have_one_time_limit(splitting):
    served, worker = splitting
    worker.script.pause_after = 1
    async with served.client() as client:
        asked = asyncio.create_task(client.post(CHAT, json=chat(tools=TOOLS, timeout_s=1.0)))
        await worker.generated()
        await asyncio.sleep(0.3)
        worker.script.resume.set()
        answer = await asked
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    render, split = worker.messages(EngineCall)
    assert split.deadline_ms <= render.deadline_ms - 250
    assert (await worker.generated()).deadline_ms <= 1000


class JumpingClock(SystemClock):
    """The real time, and what the router has paused beside it."""

    jumped_s = 0.0

    def now(self):
        return time.monotonic() + self.jumped_s


async def pause(served, clock):
    """Let 30 s go by between two ticks of the router's timer."""
    pauses = served.router.gateway.core.membership.pauses
    await served.until(lambda: pauses._last_tick is not None)
    clock.jumped_s = 30.0


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("timeout_s", "status"), [(None, 200), (15, 504)])
async def test_a_pause_of_the_router_leaves_time_to_split_unless_the_client_set_it(start_router, is_stream, timeout_s, status):
    clock = JumpingClock()
    served = await start_router(clock=clock, request_timeout_s=20.0)
    message = {"index": 0, "finish_reason": "stop"} | {name: {"content": "x"} for name in ("message", "delta")}
    split = (200, {"choices": [message], "chunk": {"choices": [message]}, "stream_state": None})
    script = served.script(calls={RENDER: lambda body: RENDERED, SPLIT: lambda body: split}, pause_after=0)
    worker = await served.add("aggregated", takes_calls=True, script=script)
    async with served.client() as client:
        asked = asyncio.create_task(client.post(CHAT, json=chat(tools=TOOLS, stream=is_stream, timeout_s=timeout_s)))
        await worker.generated()
        await pause(served, clock)
        worker.script.resume.set()
        answer = await asked
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize(("timeout_s", "is_ended"), [(None, False), (20.0, False), (0.05, True)])
async def test_a_pause_extends_the_time_before_a_request_is_submitted_too(timeout_s, is_ended):
    gateway = SimpleNamespace(now=100.0, paused_s=5.0)
    caller = Caller(client_id="c", receive=asyncio.Event().wait, arrival=100.0, paused_s=5.0, hold=lambda num_bytes: None)
    limits = TimeLimits(gateway, 0.06)

    async def work():
        gateway.now, gateway.paused_s = 130.0, 35.0
        await asyncio.sleep(0.1)

    with pytest.raises(DeadlineExceeded, match=r"longer than 0\.05 s") if is_ended else nullcontext():
        await limits.run(work(), timeout_s, caller)
    assert limits.spent_s(timeout_s, caller) == (30.0 if is_ended else 0.0)


class HeldChecker:
    """Checks of grammars that wait for ``go``."""

    def __init__(self):
        self.go = threading.Event()
        self.asked = []

    def check_kept(self, output):
        return False

    def check(self, output):
        self.asked.append(output.value)
        assert self.go.wait(30)

    def close(self):
        self.go.set()


@pytest.fixture
async def held(start_router):
    """A router that serves, and whose checks of grammars are held."""
    served = await start_router()
    await served.add("aggregated")
    checker = HeldChecker()
    served.router.endpoints._grammars.close()
    gate = served.router.endpoints._grammars = type(served.router.endpoints._grammars)(None)
    gate._checker = checker
    yield served, checker
    gate.close()


async def test_a_grammar_whose_client_has_closed_its_connection_is_not_checked(held):
    served, checker = held
    trials = served.router.endpoints._grammars._trials
    async with served.client() as client:
        first = asyncio.create_task(client.post(CHAT, json=chat(guided_regex="first")))
        await served.until(lambda: checker.asked)
        left = {"prompt": "x", "guided_regex": "left"}
        await ask_and_leave(served, COMPLETIONS, left, lambda: len(trials) == 2)
        await served.until(lambda: len(trials) == 1)
        checker.go.set()
        assert (await first).status_code == 200
        assert (await client.post(CHAT, json=chat(guided_regex="next"))).status_code == 200
    assert checker.asked == ["first", "next"]


async def test_grammars_are_checked_in_turns_of_api_keys(start_router, monkeypatch):
    served = await start_router(api_key="a,b")
    await served.add("aggregated")
    tenants = []

    async def check(output, field, tenant):
        tenants.append(tenant)

    monkeypatch.setattr(served.router.endpoints._grammars, "check", check)
    async with served.client() as client:
        for key in "aba":
            answer = await client.post(CHAT, json=chat(guided_regex="x"), headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200
    first, second, third = tenants
    assert first == third
    assert len({0, first, second}) == 3


@pytest.mark.slow
async def test_the_wait_for_a_grammar_is_a_part_of_the_time_of_the_request(held):
    served, checker = held
    async with served.client() as client:
        answer = await client.post(CHAT, json=chat(guided_regex="first", timeout_s=0.2))
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert answer.json()["error"]["message"] == "the request took longer than 0.2 s, its limit by timeout_s"
    assert checker.asked == ["first"]
    assert not [worker for worker in served.workers if worker.messages(Abort)], "no worker had it"


@pytest.mark.parametrize(("path", "fields"), [(COMPLETIONS, {"truncate_prompt_tokens": 5}), ("/tokenize", {})])
async def test_a_long_text_whose_client_has_left_is_not_tokenized(start_router, monkeypatch, path, fields):
    served = await start_router(text_threads=1)
    await served.add("aggregated")
    pool, go = served.router.endpoints._pool, threading.Event()
    pool._threads.submit(go.wait, 30)
    seen, encode = [], type(pool)._encode
    monkeypatch.setattr(type(pool), "_encode", lambda *arguments: seen.append(arguments[1]) or encode(*arguments))
    waiting = pool._threads._work_queue
    texts = [letter * (INLINE_CHARACTERS + 1) for letter in "ab"]
    left, stays = ({"prompt": text, **fields} for text in texts)
    await ask_and_leave(served, path, left, lambda: waiting.qsize() == 1)
    await served.until(lambda: not served.router.http.clients._group_of)
    async with served.client() as client:
        asked = asyncio.create_task(client.post(path, json=stays))
        await served.until(lambda: waiting.qsize() == 2)
        go.set()
        assert (await asked).status_code == 200
    assert seen == texts[1:]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/detokenize", {"tokens": [5] * (INLINE_CHARACTERS + 1)}),
        (COMPLETIONS, {"prompt": "abc", "echo": True, "logprobs": 0, "max_tokens": 2}),
    ],
)
async def test_nothing_is_kept_for_a_client_that_leaves_before_a_thread_is_free(start_router, path, body):
    served = await start_router(text_threads=1)
    await served.add("aggregated")
    pool, go = served.router.endpoints._pool, threading.Event()
    pool._threads.submit(go.wait, 30)
    try:
        await ask_and_leave(served, path, body, lambda: pool._threads._work_queue.qsize() == 1)
        await served.until(lambda: served.metric("kvferry_upload_bytes") == 0)
        work = pool._threads._work_queue.get_nowait()
        assert work.future.cancelled()
    finally:
        go.set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {"prompt": "a" * (INLINE_CHARACTERS + 1)}), ("/detokenize", {"tokens": [5] * (INLINE_CHARACTERS + 1)})],
)
async def test_texts_for_tokenize_and_detokenize_have_the_time_of_a_request(start_router, path, body):
    served = await start_router(text_threads=1, request_timeout_s=0.3)
    await served.add("aggregated")
    go = threading.Event()
    served.router.endpoints._pool._threads.submit(go.wait, 30)
    try:
        async with served.client() as client:
            answer = await client.post(path, json=body)
    finally:
        go.set()
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
