"""Real workers change their roles while requests run: every answer stays exact, and nothing is left."""

from __future__ import annotations

import itertools
import threading

import pytest

from kvferry.local import LocalCluster
from kvferry.operate import worker_role
from tests.e2e.conftest import Served

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_CLIENTS = 3
NUM_TOKENS = 24
PROMPTS = [[300 + (7 * start + step) % 1500 for step in range(200)] for start in range(6)]


@pytest.fixture
def serve_switchable(cluster_config, tiny_model, tmp_path, serve):
    """Start workers that can switch their roles."""

    def start(*settings: str) -> LocalCluster:
        return LocalCluster(cluster_config(*tiny_model, "worker.can_switch_role=true", *settings), log_dir=tmp_path)

    return start


class Load:
    """Clients that ask without a pause until the end; ``answers`` are (number of the prompt, token ids)."""

    def __init__(self, served: Served, num_clients: int = NUM_CLIENTS, **fields) -> None:
        self.answers: list[tuple[int, list[int]]] = []
        self.errors: list[str] = []
        self._served = served
        self._fields = {"max_tokens": NUM_TOKENS, "ignore_eos": True, **fields}
        self._must_stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(index,)) for index in range(num_clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._must_stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, first: int) -> None:
        for turn in itertools.count(first):
            if self._must_stop.is_set():
                return
            number = turn % len(PROMPTS)
            try:
                answer = self._served.complete(PROMPTS[number], **self._fields)
                self.answers.append((number, answer["choices"][0]["token_ids"]))
            except Exception as error:  # any error that a client sees
                self.errors.append(repr(error))


def roles(served: Served) -> dict[str, str]:
    return {worker["engine_id"]: worker["role"] for worker in served.client.get("/status.json").json()["workers"]}


def is_switching(served: Served) -> bool:
    return any(worker["is_switching"] for worker in served.client.get("/status.json").json()["workers"])


def test_a_worker_takes_every_role_and_returns_under_load(serve_switchable, serve, eventually):
    settings = ("local.num_prefill=2", "local.num_decode=1", "connector.transports=[tcp]")
    with serve_switchable(*settings) as cluster, serve("roles", cluster) as served:
        expected = [served.complete(prompt, max_tokens=NUM_TOKENS, ignore_eos=True) for prompt in PROMPTS]
        token_ids = [answer["choices"][0]["token_ids"] for answer in expected]
        address = cluster.worker("prefill-1").ops_address
        with Load(served) as load:
            for role in ("decode", "aggregated", "prefill"):
                worker_role(address, role)
                eventually(lambda role=role: roles(served)["prefill-1"] == role, f"the router knows {role}")
                seen = len(load.answers)
                eventually(lambda seen=seen: len(load.answers) > seen + 2 * NUM_CLIENTS, "answers in the new role")
        assert load.errors == []
        assert all(answer == token_ids[number] for number, answer in load.answers)
        assert "prefill, 3 switches" in worker_role(address)
        eventually(lambda: not served.held(), f"release of {served.held()}")
        eventually(lambda: not is_switching(served), "a heartbeat after the end of the former role")


@pytest.mark.full
def test_the_planner_lends_prefill_a_worker_while_prompts_wait(serve_switchable, serve, eventually):
    planner = {"enabled": "true", "interval_s": 0.25, "hold_s": 0.5, "cooldown_s": 1, "max_wait_s": 0.02, "low": 0.9}
    settings = [f"router.planner.{name}={value}" for name, value in planner.items()]
    sizes = ("local.num_prefill=1", "local.num_decode=2", "cache.enable_prefix_caching=false")
    with serve_switchable(*settings, *sizes) as cluster, serve("planner", cluster) as served:
        (expected,) = [served.complete(PROMPTS[0], max_tokens=2)["choices"][0]["token_ids"]]
        with Load(served, num_clients=12, max_tokens=2) as load:
            eventually(lambda: list(roles(served).values()).count("prefill") == 2, "a second prefill worker")
            planned = served.client.get("/status.json").json()["planner"]["last"]
            assert (planned["before"], planned["role"]) == ("decode", "prefill")
            assert "prefill needs" in planned["reason"]
        eventually(lambda: list(roles(served).values()).count("prefill") == 1, "its return")
        assert load.errors == []
        assert all(answer == expected for number, answer in load.answers if number == 0)
        eventually(lambda: not served.held(), f"release of {served.held()}")
        assert served.client.get("/status.json").json()["planner"]["last"]["outcome"] == "done"
