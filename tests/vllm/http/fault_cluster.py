"""vLLM servers with our router and agents, under load while something goes wrong, and what must hold afterwards."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus

import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.support.routed_servers import RoutedServers
from tests.support.streaming_client import Stream
from tests.support.tiny_models import VOCAB_SIZE
from tests.support.vllm_server import MODEL, VllmServer

WAIT_S = 120.0  # for what must come; the machine may be busy
NUM_CLIENTS = 3
NUM_TOKENS = 40  # of an answer
REFUSED_S = 0.2  # until a client that was refused asks again
LENGTHS = (40, 300, 500)  # of prompts, in tokens
HELD = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "kvferry_held_blocks")


class Load:
    """Clients that ask one question after the other, each a new prompt, until ``end``."""

    def __init__(self, cluster: FaultCluster) -> None:
        self.streams: list[Stream] = []
        self._cluster = cluster
        self._has_ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._has_ended.is_set():
            with contextlib.suppress(OSError):  # there is no router
                stream = self._cluster.stream(max_tokens=NUM_TOKENS)
                self.streams.append(stream)
                if stream.result(WAIT_S).status != HTTPStatus.OK:
                    time.sleep(REFUSED_S)

    def wait_for_tokens(self) -> None:
        """Return in the midst of answers of all clients."""
        wait_until(lambda: sum(bool(stream.token_ids) and not stream.has_ended for stream in list(self.streams)) >= 2)

    def wait_for_answers(self, number: int = 2 * NUM_CLIENTS) -> None:
        """Return once so many answers to questions of from now on have ended."""
        now = time.monotonic()
        wait_until(lambda: sum(each.is_done for each in list(self.streams) if each.started_at > now) >= number)

    def end(self) -> None:
        """Ask no more, and wait for the last answers."""
        self._has_ended.set()
        for thread in self._threads:
            thread.join(WAIT_S)


class FaultCluster:
    """``servers`` are those of the agents, by the names of these; several agents may share one.

    ``measured`` gets a row for each fault: its name, what was measured, and seconds.
    """

    def __init__(self, routed: RoutedServers, servers: Mapping[str, VllmServer]) -> None:
        self.routed, self.servers = routed, servers
        self.measured: list[tuple[str, object]] = []
        self.name = ""  # of the test
        self._random = random.Random(12)
        self._salts = itertools.count()

    # ---- requests ----------------------------------------------------------------------------------------------------

    def stream(self, num_prompt_tokens: int = 0, **fields: object) -> Stream:
        """Begin a streamed answer to a new prompt."""
        length = num_prompt_tokens or self._random.choice(LENGTHS)
        body: dict[str, object] = {
            "model": MODEL,
            "prompt": [self._random.randrange(5, VOCAB_SIZE) for _ in range(length)],
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        return Stream(self.routed.base_url, body | fields)

    def assert_right(self, stream: Stream, num_tokens: int = NUM_TOKENS) -> None:
        """Check that an answer is whole, without an error, and that of vLLM alone."""
        found = (stream.status, stream.error, stream.broken, stream.is_done)
        assert found == (200, None, "", True), found
        assert len(stream.token_ids) == num_tokens
        self.assert_no_wrong_token(stream)

    def assert_no_wrong_token(self, stream: Stream) -> None:
        """Check the tokens that have come against those of vLLM alone; a salt keeps it from all caches."""
        if not stream.token_ids:
            return
        body = {
            "model": MODEL,
            "prompt": stream.prompt,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "max_tokens": len(stream.token_ids),
            "cache_salt": f"alone {next(self._salts)}",
        }
        status, answer = self.servers["d1"].post("/v1/completions", body)
        assert status == 200, answer
        assert stream.token_ids == answer["choices"][0]["token_ids"]

    @contextlib.contextmanager
    def load(self, *, may_break: bool = False, may_refuse: bool = False) -> Iterator[Load]:
        """Ask while something goes wrong; every answer must be right, or without a wrong token if it ``may_break``.

        With ``may_refuse`` the router may say, before it begins an answer, that there is no worker.
        """
        load = Load(self)
        try:
            load.wait_for_tokens()
            yield load
        finally:
            load.end()
        waits = [longest_wait_s(stream) for stream in load.streams]
        self.note("longest wait of a client for a token", max(waits))
        check = self.assert_no_wrong_token if may_break else self.assert_right
        begun = [stream for stream in load.streams if not (may_refuse and is_refused(stream))]
        with ThreadPoolExecutor(NUM_CLIENTS) as threads:
            for _ in threads.map(check, begun):
                pass

    def note(self, what: str, seconds: float) -> None:
        """Keep a time for the report of the test run."""
        self.measured.append(("measured", (self.name, "tcp", what, seconds)))

    # ---- faults ------------------------------------------------------------------------------------------------------

    def core(self, name: str) -> psutil.Process:
        """Return the process of a server's engine core."""
        return self.servers[name].process("EngineCore")

    @contextlib.contextmanager
    def frozen(self, *pids: int) -> Iterator[None]:
        """Stop processes, and let them go on at the end."""
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    # ---- afterwards --------------------------------------------------------------------------------------------------

    def make_whole(self) -> None:
        """Start what has ended, as a supervisor does, and wait until all agents are registered."""
        for server in dict.fromkeys(self.servers.values()):
            if not server.is_healthy():
                server.kill()
                server.start()
        for server in dict.fromkeys(self.servers.values()):
            server.wait()
        self.routed.start_missing()
        for name in self.servers:
            self.routed.wait_for_agent(name)

    def assert_whole(self) -> None:
        """Check that nothing is held, and that the cluster answers by a handoff, which leaves nothing either."""
        began = time.monotonic()
        self.wait_until_nothing_is_held()
        self.note("last answer to nothing held", time.monotonic() - began)
        before = self.num_loads()
        wait_until(lambda: self._answers() and self.num_loads() > before)
        self.wait_until_nothing_is_held()

    def _answers(self) -> bool:
        stream = self.stream(300, max_tokens=5).result()
        self.assert_right(stream, 5)
        return True

    def num_loads(self) -> int:
        """Return how many handoffs have been loaded and verified, by all servers that there are."""
        return int(sum(server.metric("vllm:kvferry_loads_total") for server in dict.fromkeys(self.servers.values())))

    def held(self) -> dict[str, float]:
        """Return what servers hold, by agent and metric."""
        found = {f"{name} {what}": server.metric(f"vllm:{what}") for name, server in self.servers.items() for what in HELD}
        return {name: value for name, value in found.items() if value}

    def wait_until_nothing_is_held(self) -> None:
        """Return once no server has a request or a block that is held."""
        end = time.monotonic() + WAIT_S
        while held := self.held():
            assert time.monotonic() < end, held
            time.sleep(0.05)

    def has_work(self, *names: str) -> bool:
        """Return whether one of these agents has requests at its server: only then it measures the time without progress."""
        return any(self.agent_metric(name, "kvferry_engine_stalled_seconds") for name in names)

    def agent_metric(self, name: str, metric: str) -> float:
        """Return a metric of an agent, or of the router."""
        return metric_at(self.routed.ops_url(name), metric)


def metric_at(url: str, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples that have these labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def is_refused(stream: Stream) -> bool:
    """Return whether the router has said, instead of an answer, that there is no worker."""
    return stream.status == HTTPStatus.SERVICE_UNAVAILABLE and (stream.error or {}).get("code") == "no_worker"


def longest_wait_s(stream: Stream) -> float:
    """Return the longest time without a token, from the question on; for one without tokens, until its end."""
    times: Sequence[float] = [stream.started_at, *stream.times] if stream.times else [stream.started_at, stream.ended_at]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


def wait_until(holds: Callable[[], object]) -> None:
    """Ask again and again until something holds."""
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.02)
