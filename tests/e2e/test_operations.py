"""A secured cluster is rolled over under load: every worker drains and is replaced, and no client sees an error."""

from __future__ import annotations

import threading

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from core.wire.curve import derive_keys
from core.wire.sockets import SocketOptions, dealer_socket
from kvferry.operate import drain_worker

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_CLIENTS = 3
NUM_TOKENS = 24
DRAIN_S = 60.0
HUNG_UP = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class Load:
    """Clients that ask one after the other until ``stop``; every answer is kept."""

    def __init__(self, served, prompts):
        self._served = served
        self._prompts = prompts
        self._must_stop = threading.Event()
        self.answers = []
        self.transports = set()
        self.errors = []
        self._threads = [threading.Thread(target=self._ask, args=(index,)) for index in range(NUM_CLIENTS)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._must_stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, client):
        turn = client
        while not self._must_stop.is_set():
            prompt = self._prompts[turn % len(self._prompts)]
            turn += 1
            try:
                answer = self._served.complete(prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
                self.answers.append((prompt, answer["choices"][0]["token_ids"]))
                self.transports.add(answer["usage"]["kv_transfer"]["transport"])
            except Exception as error:  # any error that a client sees
                self.errors.append(repr(error))


@pytest.mark.parametrize(
    "names",
    [
        ("prefill-0", "decode-0"),
        pytest.param(("prefill-0", "decode-0", "prefill-1", "decode-1"), marks=pytest.mark.full),
    ],
    ids=["one pair", "all"],
)
def test_rolling_restart_of_a_secured_cluster_is_invisible(secured, names, serve, corpus, eventually, assert_token_identical):
    cluster = secured.cluster
    prompts = [corpus[start : start + 150] for start in (0, 40, 80)]
    with serve("rolling", cluster) as served:
        with Load(served, prompts) as load:
            for worker in map(cluster.worker, names):
                eventually(lambda: len(load.answers) > 0, "the first answers")
                seen = len(load.answers)
                drain_worker(worker.ops_address, DRAIN_S)
                cluster.wait_until_ready()
                assert cluster.worker(worker.engine_id).pid != worker.pid
                eventually(lambda seen=seen: len(load.answers) > seen, "answers after the restart")
        assert load.errors == []
        assert "tcp" in load.transports
        for prompt, token_ids in load.answers:
            assert len(token_ids) == NUM_TOKENS
            assert_token_identical(prompt, token_ids)
        eventually(lambda: not served.held(), f"release of {served.held()}")


@pytest.mark.parametrize(
    "keys", [None, derive_keys("the key of another cluster, as long as any")], ids=["no key", "another key"]
)
def test_router_hangs_up_on_processes_without_the_cluster_key(secured, serve, corpus, keys):
    with serve("secured", secured.cluster) as served, zmq.Context() as context:
        stranger = dealer_socket(context, SocketOptions(max_message_bytes=1 << 20, keys=keys))
        monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | HUNG_UP)
        stranger.connect(secured.worker_address)
        assert monitor.poll(10_000)
        assert recv_monitor_message(monitor)["event"] & HUNG_UP
        stranger.disable_monitor()
        stranger.close(linger=0)
        start = 200 if keys is None else 400  # a prompt that no worker has cached
        usage = served.complete(corpus[start : start + 130], max_tokens=4)["usage"]
        assert usage["kv_transfer"]["transport"] == "tcp", usage
