"""Two ``vllm serve`` with the plug-in from its wheel, driven as llm-d's side-car does: P first, then D with P's answer."""

import contextlib
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.streaming_client import Stream
from tests.support.tiny_models import VOCAB_SIZE
from tests.support.vllm_server import MODEL, VllmServer

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

WAIT_S = 60.0  # for what must come; a machine may be busy
COUNTED = ("loads", "verified_blocks", "failures", "refusals")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

# What llm-d's side-car sends to P, key by key (connector_nixlv2.go).
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Router:
    """Does what a side-car does, and keeps the numbers of what D has loaded."""

    def __init__(self, p: VllmServer, d: VllmServer) -> None:
        self.p, self.d = p, d
        self._random = random.Random(5)

    def words(self, num_tokens: int = 300) -> list[int]:
        """Return a new prompt."""
        return [self._random.randrange(300, VOCAB_SIZE) for _ in range(num_tokens)]

    def body(self, path: str, prompt: list[int], **fields) -> dict:
        """Return a client's request."""
        text = "".join(f"t{token}" for token in prompt)
        asked = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": prompt}
        rest = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return {"model": MODEL} | asked | rest | fields

    def hand_off(self, body: dict, path: str = COMPLETIONS) -> dict:
        """Have P compute the prompt; return what it publishes."""
        limits = {name: 1 for name in ("max_tokens", "max_completion_tokens") if name in body}
        status, answer = self.p.post(path, body | limits | {"stream": False, "kv_transfer_params": REMOTE_DECODE})
        assert status == 200, answer
        assert answer["kv_transfer_params"]["kvferry"]
        return answer["kv_transfer_params"]

    def answer(self, body: dict, params: dict | None = None, path: str = COMPLETIONS) -> list[int]:
        """Return D's tokens."""
        if params is not None:
            body = body | {"kv_transfer_params": params}
        if body.get("stream"):
            stream = Stream(self.d.base_url, body, path).result()
            assert (stream.is_done, stream.error, stream.finish_reason) == (True, None, "length")
            return stream.token_ids
        status, answer = self.d.post(path, body)
        assert status == 200, answer
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "length"
        return choice["token_ids"]

    def reference(self, body: dict, path: str = COMPLETIONS) -> list[int]:
        """Return the tokens that D computes by itself; a salt keeps them from its prefix cache."""
        return self.answer(body | {"cache_salt": str(self._random.random())}, path=path)

    def counts(self) -> Counter[str]:
        """Return what D has counted since it was started."""
        return Counter({name: int(self.d.metric(f"vllm:kvferry_{name}_total")) for name in COUNTED})

    @contextlib.contextmanager
    def counting(self, **counts: int) -> Iterator[None]:
        """Wait until D has counted just this more than before; what is not named, not at all."""
        expected = self.counts() + Counter(counts)
        yield
        wait_until(lambda: self.counts() >= expected)
        assert self.counts() == expected

    def assert_verifies(self) -> None:
        """Hand a new prompt off: D must use P's KV, and answer as it does by itself."""
        body = self.body(COMPLETIONS, self.words(300))
        with self.counting(loads=1, verified_blocks=10):
            assert self.answer(body, self.hand_off(body)) == self.reference(body)


def usage(server: VllmServer) -> float:
    """Return the part of a server's blocks that is in use."""
    return server.metric("vllm:kv_cache_usage_perc")


def wait_until(holds) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(scope="module")
def lasting_router(servers):
    return Router(*servers)  # its prompts are new, each time


@pytest.fixture
def router(lasting_router):
    """Yield a router to P and D; afterwards neither server holds a block."""
    yield lasting_router
    for server in (lasting_router.p, lasting_router.d):
        wait_until(lambda server=server: usage(server) == server.metric("vllm:kvferry_held_blocks") == 0)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_p_s_answer_passed_to_d_unchanged_gives_the_tokens_of_d_alone(router, path, stream):
    body = router.body(path, router.words(), stream=stream)
    with router.counting(loads=1, verified_blocks=10):
        tokens = router.answer(body, router.hand_off(body, path), path)
    assert tokens == router.reference(body, path)
    assert len(tokens) == 16


def test_twelve_requests_at_once(router):
    bodies = [router.body(COMPLETIONS, router.words(40 + 10 * index), stream=index % 2 == 0) for index in range(12)]
    num_blocks = sum(-(-len(body["prompt"]) // 32) for body in bodies)
    with router.counting(loads=12, verified_blocks=num_blocks), ThreadPoolExecutor(len(bodies)) as threads:
        answers = list(threads.map(lambda body: router.answer(body, router.hand_off(body)), bodies))
    assert answers == [router.reference(body) for body in bodies]


def test_a_client_that_leaves_before_the_first_token(router):
    body = router.body(COMPLETIONS, router.words(), stream=True)
    params = router.hand_off(body)
    router.p.freeze()  # so that no token can come
    try:
        with router.counting():  # no failure: the load does not wait for its deadline
            stream = Stream(router.d.base_url, body | {"kv_transfer_params": params})
            wait_until(lambda: usage(router.d) > 0)
            stream.leave()
            wait_until(lambda: usage(router.d) == 0)
        assert stream.token_ids == []
    finally:
        router.p.thaw()
    wait_until(lambda: usage(router.p) == 0)
    router.assert_verifies()


def test_a_client_that_leaves_after_the_first_token(router):
    body = router.body(COMPLETIONS, router.words(), stream=True, max_tokens=700)
    with router.counting(loads=1, verified_blocks=10):
        stream = Stream(router.d.base_url, body | {"kv_transfer_params": router.hand_off(body)})
        wait_until(lambda: stream.token_ids)
        stream.leave()
        assert not stream.is_done
        wait_until(lambda: usage(router.d) == 0)
    router.assert_verifies()


def test_a_rejected_request_frees_blocks_before_an_older_one_that_is_never_read(router):
    unread, rejected = (router.body(COMPLETIONS, router.words(num_tokens)) for num_tokens in (128, 320))
    router.hand_off(unread)
    wait_until(lambda: router.p.metric("vllm:kvferry_held_blocks") == 4)
    of_unread = usage(router.p)
    assert of_unread > 0
    params = router.hand_off(rejected)
    with router.counting():
        status, answer = router.d.post(COMPLETIONS, rejected | {"kv_transfer_params": params, "max_tokens": 5000})
        assert status == 400, answer
        wait_until(lambda: usage(router.p) == of_unread)
    wait_until(lambda: usage(router.p) == 0)  # the lease of the other one


@pytest.mark.full
def test_p_killed_and_started_again_at_the_same_ports(router):
    body = router.body(COMPLETIONS, router.words())
    params = router.hand_off(body)
    router.p.kill()
    with router.counting(failures=1):
        assert router.answer(body, params) == router.reference(body)
    router.p.start().wait()
    again = router.body(COMPLETIONS, router.words())
    with router.counting(refusals=1):
        assert router.answer(again, params) == router.reference(again)  # P's earlier life, and another prompt
    router.assert_verifies()
