"""Our router over two ``vllm serve`` with agents beside them: the answers are those of vLLM alone, by verified handoffs."""

import contextlib
import random
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.routed_servers import RoutedServers
from tests.support.streaming_client import Stream
from tests.support.tiny_models import VOCAB_SIZE
from tests.support.vllm_engine import REMOTE_DECODE
from tests.support.vllm_server import MODEL

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

WAIT_S = 60.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class Cluster:
    """A router over P and D, with the requests of a test."""

    def __init__(self, routed, p, d):
        self.routed, self.p, self.d = routed, p, d
        self._random = random.Random(9)

    def words(self, num_tokens=300):
        """Return a new prompt."""
        return [self._random.randrange(300, VOCAB_SIZE) for _ in range(num_tokens)]

    def body(self, prompt, **fields):
        rest = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return {"model": MODEL, "prompt": prompt} | rest | fields

    def chat_body(self, **fields):
        text = "".join(f"t{token}" for token in self.words(60))
        rest = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
        return {"model": MODEL, "messages": [{"role": "user", "content": text}]} | rest | fields

    def ask(self, path, body, status=200):
        """Return the answer of our router."""
        answer = httpx.post(self.routed.base_url + path, json=body, timeout=120)
        assert answer.status_code == status, answer.text
        return answer.json()

    def alone(self, path, body):
        """Return the answer of D by itself; a salt keeps it from D's prefix cache."""
        status, answer = self.d.post(path, body | {"cache_salt": str(self._random.random())})
        assert status == 200, answer
        return answer

    def tokens(self, body):
        """Return the tokens of each choice, by our router."""
        return [choice["token_ids"] for choice in self.ask(COMPLETIONS, body)["choices"]]

    def tokens_alone(self, body):
        return [choice["token_ids"] for choice in self.alone(COMPLETIONS, body)["choices"]]

    @contextlib.contextmanager
    def loading(self, count):
        """Check that D loads so many handoffs, and that none fails."""

        def counts():
            return [int(self.d.metric(f"vllm:kvferry_{name}_total")) for name in ("loads", "failures", "refusals")]

        loads, *problems = counts()
        yield
        wait_until(lambda: counts() == [loads + count, *problems])


def wait_until(holds):
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


@contextlib.contextmanager
def frozen(process):
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def used(server):
    return server.metric("vllm:kv_cache_usage_perc") or server.metric("vllm:kvferry_held_blocks")


@pytest.fixture(scope="module")
def routed(servers, served_model, tmp_path_factory):
    roles = {"p0": (servers[0], "prefill"), "d0": (servers[1], "decode")}
    with RoutedServers(tmp_path_factory.mktemp("routed"), served_model, roles, "agent.patience_s=3") as running:
        yield running


@pytest.fixture(scope="module")
def lasting_cluster(routed, servers):
    return Cluster(routed, *servers)  # its prompts are new, each time


@pytest.fixture
def cluster(lasting_cluster):
    """Yield the cluster; afterwards neither server holds a block."""
    yield lasting_cluster
    for server in (lasting_cluster.p, lasting_cluster.d):
        wait_until(lambda server=server: not used(server))


@pytest.mark.parametrize("num_tokens", [1, 33, 300])
def test_the_answer_is_that_of_vllm_alone_by_a_handoff(cluster, num_tokens):
    body = cluster.body(cluster.words(num_tokens))
    with cluster.loading(1):
        tokens = cluster.tokens(body)
    assert tokens == cluster.tokens_alone(body)
    assert len(tokens[0]) == 16


def test_a_streamed_answer_is_that_of_vllm_alone(cluster):
    body = cluster.body(cluster.words(), stream=True)
    with cluster.loading(1):
        stream = Stream(cluster.routed.base_url, body).result()
    assert (stream.is_done, stream.error, stream.finish_reason) == (True, None, "length")
    assert [stream.token_ids] == cluster.tokens_alone(body | {"stream": False})


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.8, "seed": 5},
        {"temperature": 1.2, "seed": 6, "top_k": 40, "top_p": 0.9, "n": 3},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"logit_bias": {"77": 8.0}, "min_tokens": 4},
        {"max_tokens": 1},
    ],
    ids=["seeded", "three choices", "penalties", "bias", "one token"],
)
def test_sampling_is_that_of_vllm_alone(cluster, fields):
    body = cluster.body(cluster.words(100), **fields)
    with cluster.loading(1):  # all choices of a prompt share its blocks
        tokens = cluster.tokens(body)
    assert tokens == cluster.tokens_alone(body)


def test_a_chat_with_logprobs_is_that_of_vllm_alone(cluster):
    body = cluster.chat_body(logprobs=True, top_logprobs=3, n=2, temperature=0.7, seed=4)
    ours, theirs = (ask(CHAT, body)["choices"] for ask in (cluster.ask, cluster.alone))
    for our, their in zip(ours, theirs, strict=True):
        assert our["message"]["content"] == their["message"]["content"]
        for one, other in zip(our["logprobs"]["content"], their["logprobs"]["content"], strict=True):
            assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-3)
            # A part of a character has no text of its own in vLLM's form.
            best, others = ([top["token"].replace("\ufffd", "") for top in each["top_logprobs"]] for each in (one, other))
            sampled = one["token"].replace("\ufffd", "")
            others.remove(sampled)  # vLLM puts the sampled token first and drops the last one
            assert [token for token in best if token != sampled][: len(others)] == others


def test_eight_requests_at_once(cluster):
    bodies = [cluster.body(cluster.words(40 + 10 * number)) for number in range(8)]
    with cluster.loading(8), ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(cluster.tokens, bodies))
    assert answers == [cluster.tokens_alone(body) for body in bodies]


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_a_client_that_leaves_ends_its_request_at_both_servers(cluster, num_tokens):
    stream = Stream(cluster.routed.base_url, cluster.body(cluster.words(), stream=True, max_tokens=700))
    wait_until(lambda: len(stream.token_ids) >= num_tokens)
    stream.leave()
    assert not stream.is_done
    for server in (cluster.p, cluster.d):
        wait_until(lambda server=server: not used(server))
    with cluster.loading(1):
        cluster.tokens(cluster.body(cluster.words()))


def test_a_handoff_that_no_engine_will_read_is_freed_before_an_older_unread_one(cluster):
    unread = cluster.body(cluster.words(128), max_tokens=1, kv_transfer_params=REMOTE_DECODE)
    with frozen(cluster.d.process("EngineCore")):
        assert cluster.p.post(COMPLETIONS, unread)[0] == 200
        stream = Stream(cluster.routed.base_url, cluster.body(cluster.words(320), stream=True))
        wait_until(lambda: cluster.p.metric("vllm:kvferry_held_blocks") == 4 + 10)
        stream.leave()
        wait_until(lambda: cluster.p.metric("vllm:kvferry_held_blocks") == 4)
    wait_until(lambda: not used(cluster.p))  # the lease of the other one


def test_the_status_report_shows_the_engines(cluster):
    report = httpx.get(f"{cluster.routed.base_url}/status.json", timeout=10).json()
    engines = {worker["engine_id"]: (worker["role"], worker["state"]) for worker in report["workers"]}
    assert engines == {"p0": ("prefill", "ready"), "d0": ("decode", "ready")}
    assert all(worker["version"].endswith(", vLLM 0.32.0") for worker in report["workers"])


def test_what_vllm_refuses_is_refused_with_its_reason(cluster):
    error = cluster.ask(COMPLETIONS, cluster.body(cluster.words(20), max_tokens=5000), status=400)["error"]
    assert "1024" in error["message"]


@pytest.mark.full  # it starts a server again; tests/agent and test_router_faults.py lose servers and agents without that
def test_a_request_goes_on_when_p_is_lost_and_by_handoffs_when_it_is_back(cluster):
    body = cluster.body(cluster.words())
    cluster.p.kill()
    with cluster.loading(0):
        assert cluster.tokens(body) == cluster.tokens_alone(body)
    assert cluster.routed.wait_for_end("p0") == 1, "its server is lost"
    cluster.routed.start_agent("p0")  # as a supervisor does; it waits for the server
    cluster.p.start().wait()
    cluster.routed.wait_for_agent("p0")
    with cluster.loading(1):
        assert cluster.tokens(body | {"prompt": cluster.words()})


def test_an_agent_that_is_drained_finishes_what_runs(cluster):
    stream = Stream(cluster.routed.base_url, cluster.body(cluster.words(), stream=True, max_tokens=200))
    wait_until(lambda: stream.token_ids)
    assert cluster.routed.drain_agent("d0") == 0
    found = stream.result()
    assert (found.error, found.broken, len(found.token_ids)) == (None, "", 200)
    cluster.routed.start_agent("d0")
    cluster.routed.wait_for_agent("d0")
    with cluster.loading(1):
        cluster.tokens(cluster.body(cluster.words()))


@pytest.mark.full  # test_router_faults.py freezes engine cores; tests/agent freezes a server until its agent ends
def test_a_request_goes_on_when_p_freezes(cluster):
    body = cluster.body(cluster.words())
    cluster.p.freeze()
    try:
        with cluster.loading(0):
            assert cluster.tokens(body) == cluster.tokens_alone(body)
        assert cluster.routed.wait_for_end("p0") == 1, "its server does not answer"
    finally:
        cluster.p.thaw()
    cluster.routed.start_agent("p0")
    cluster.routed.wait_for_agent("p0")
    with cluster.loading(1):
        cluster.tokens(cluster.body(cluster.words()))


def test_an_engine_that_serves_alone(cluster, served_model, tmp_path):
    roles = {"alone": (cluster.d, "aggregated")}
    with RoutedServers(tmp_path, served_model, roles) as routed, cluster.loading(0):
        alone = Cluster(routed, cluster.p, cluster.d)
        body = alone.body(cluster.words(), n=2, temperature=0.9, seed=3)
        assert alone.tokens(body) == alone.tokens_alone(body)
        stream = Stream(routed.base_url, alone.body(cluster.words(), stream=True)).result()
        assert (stream.is_done, len(stream.token_ids)) == (True, 16)
