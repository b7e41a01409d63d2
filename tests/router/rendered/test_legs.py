"""Bodies that go to engines as they are: what becomes of the blocks of their prompts, and what each engine is asked for."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from core.wire.engine_calls import EngineCall
from core.wire.messages import ErrorInfo
from router.dispatch.policy import choose_route

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "use_beam_search": True}
FULL = ErrorInfo(code="overloaded", message="full", http_status=429, retryable=True)
LEAVING = ErrorInfo(code="no_worker", message="shuts down", http_status=503, retryable=True)
LOST = ErrorInfo(code="engine_dead", message="gone", http_status=503, retryable=True)
PARAMS = {"do_remote_prefill": True, "remote_engine_id": "p0", "kvferry": "x"}


class Engines:
    """A router with a prefill and two decode workers. Decode engines answer in turn with what ``answers`` holds."""

    def __init__(self, under_test):
        self.under_test = under_test
        self.answers = []
        self.params = PARAMS
        self.prefill = None

    async def start(self):
        prompts = {CHAT: lambda body: (200, {"kv_transfer_params": self.params}), COMPLETIONS: lambda body: (404, {})}
        self.prefill = await self.add("prefill", prompts)
        for _ in range(2):
            await self.add("decode", {CHAT: lambda body: self.answers.pop(0)})
        return self

    async def add(self, role, calls):
        return await self.under_test.add(role, takes_calls=True, script=self.under_test.script(calls=calls))

    async def ask(self, **fields):
        async with self.under_test.client() as client:
            return await client.post(CHAT, json=BODY | fields)

    @property
    def prompts(self):
        return [json.loads(call.body) for call in self.prefill.messages(EngineCall) if call.path == CHAT]

    @property
    def brought_to_decode(self):
        """What each call of a decode engine says of the blocks, in no order."""
        decodes = (worker for worker in self.under_test.workers if worker is not self.prefill)
        return [json.loads(call.body).get("kv_transfer_params") for each in decodes for call in each.messages(EngineCall)]

    async def releases(self, number):
        """Return what the prefill engine was told to release, once it was told so often."""
        await self.under_test.until(lambda: len(self.prefill.messages(EngineCall)) == len(self.prompts) + number)
        found = [json.loads(call.body) for call in self.prefill.messages(EngineCall) if call.is_release]
        await self.under_test.until(lambda: not self.under_test.router.gateway.core.calls)
        return [body["kv_transfer_params"] for body in found]


@pytest.fixture
async def engines(start_router):
    return await Engines(await start_router(has_http=False)).start()


async def test_blocks_that_no_engine_has_read_go_to_the_next_one(engines):
    engines.answers = [FULL, (200, {"ok": 1})]
    assert (await engines.ask()).json() == {"ok": 1}
    assert len(engines.prompts) == 1
    assert engines.brought_to_decode == [PARAMS] * 2
    assert await engines.releases(0) == []


async def test_blocks_that_no_engine_will_read_are_released_once(engines):
    engines.answers = [FULL] * 2
    assert (await engines.ask()).json()["error"]["code"] == "overloaded"
    assert len(engines.prompts) == 1
    assert await engines.releases(1) == [PARAMS]


@pytest.mark.parametrize("failure", [(500, {}), LOST, LEAVING], ids=["answer", "no answer", "end of a drain"])
async def test_after_an_engine_that_may_have_read_them_the_prompt_is_computed_again(engines, failure):
    engines.answers = [failure, (200, {"ok": 1})]
    assert (await engines.ask()).json() == {"ok": 1}
    assert len(engines.prompts) == 2
    assert await engines.releases(1) == [PARAMS]


@pytest.mark.parametrize("is_draining", [False, True], ids=["left", "drains"])
async def test_blocks_for_a_decode_engine_that_left_meanwhile_go_to_another(engines, monkeypatch, is_draining):
    routes = []

    def choose(workers, demand):
        routes.append(choose_route(workers, demand))
        return routes[-1]

    leaving = SimpleNamespace(is_draining=True) if is_draining else None
    membership = engines.under_test.router.gateway.core.membership
    present = membership.get
    monkeypatch.setattr("router.rendered.legs.choose_route", choose)
    monkeypatch.setattr(membership, "get", lambda key: leaving if key == routes[0].decode.key else present(key))
    engines.answers = [(200, {"ok": 1})]
    assert (await engines.ask()).json() == {"ok": 1}
    assert len(engines.prompts) == 1
    assert engines.brought_to_decode == [PARAMS]
    assert await engines.releases(0) == []


async def test_blocks_of_a_client_that_leaves_are_released(engines):
    engines.answers = [(200, None)]
    asking = asyncio.create_task(engines.ask())
    await engines.under_test.until(lambda: engines.brought_to_decode)
    asking.cancel()
    assert await engines.releases(1) == [PARAMS]


async def test_blocks_of_another_connector_end_with_their_lease(engines):
    engines.params = {"do_remote_prefill": True}
    engines.answers = [FULL] * 2
    assert (await engines.ask()).status_code == 429
    assert await engines.releases(0) == []


async def test_blocks_of_a_lost_prefill_engine_are_computed_by_another(engines):
    second = await engines.add("prefill", {CHAT: lambda body: (200, {"kv_transfer_params": PARAMS})})
    engines.answers = [(200, None), (200, {"ok": 1})]
    asking = asyncio.create_task(engines.ask())
    await engines.under_test.until(lambda: engines.brought_to_decode)
    first = engines.prefill if engines.prompts else second
    (decode,) = (each for each in engines.under_test.workers if each.role == "decode" and each.messages(EngineCall))
    for lost in (first, decode):
        lost.sends_heartbeats = False
        await lost.leave()
    assert (await asking).json() == {"ok": 1}
    other = second if first is engines.prefill else engines.prefill
    assert len(other.messages(EngineCall)) == 1


async def test_a_prefill_engine_is_asked_for_nothing_of_the_answer(engines):
    engines.answers = [(200, {"ok": 1})]
    await engines.ask(logprobs=True, top_logprobs=3, prompt_logprobs=2, n=2)
    (prompt,) = engines.prompts
    assert prompt.keys() == {"messages", "max_tokens", "use_beam_search", "stream", "kv_transfer_params"}


async def test_an_answer_that_is_too_long_is_not_computed_again(engines):
    engines.answers = [ErrorInfo(code="invalid_request", message="stream it", http_status=400)]
    assert (await engines.ask()).json()["error"]["message"] == "stream it"
    assert len(engines.brought_to_decode) == 1
