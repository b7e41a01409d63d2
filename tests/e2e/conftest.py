"""Clusters of real processes that the tests share, and the reference that their answers are held against."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM

from core.config import default_cache_dir
from core.ids import RandomIds
from core.model.hub import resolve_model
from core.model.tokenizer import Tokenizer
from core.wire.curve import ClusterKeys, derive_keys, new_cluster_key
from kvferry.local import LocalCluster

MODEL = "smollm2-135m"
NEAR_TIE = 1e-3  # the first divergence may lie where the oracle's two best logits are closer than this
REQUEST_TIMEOUT_S = 240.0
HELD_BLOCKS = (
    "kvferry_kv_leaked_blocks",
    "kvferry_kv_leased_blocks",
    "kvferry_kv_loading_blocks",
    "kvferry_kv_parked_blocks",
    "kvferry_kv_quarantined_blocks",
)

TOPOLOGIES = {
    "1p1d-shm": ("connector.transports=[shm]",),
    "1p1d-tcp": ("connector.transports=[tcp]",),
    "1p1d-nixl": ("connector.transports=[nixl]",),
    "2p2d-shm": ("connector.transports=[shm]", "local.num_prefill=2", "local.num_decode=2"),
    "aggregated": ("local.aggregated=true", "local.num_prefill=1", "local.num_decode=1"),
}


@dataclass(slots=True)
class Served:
    """A running cluster and a client for it."""

    kind: str
    cluster: LocalCluster
    client: httpx.Client

    @property
    def is_disaggregated(self) -> bool:
        """True if KV blocks are handed over."""
        return self.kind != "aggregated"

    def complete(self, prompt: Sequence[int] | str, **fields: Any) -> dict[str, Any]:
        """Return the body of a completion that succeeded."""
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, "return_token_ids": True, **fields}
        response = self.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def complete_all(self, prompts: Sequence[Sequence[int]], **fields: Any) -> list[dict[str, Any]]:
        """Return the bodies of completions that run at the same time."""
        with ThreadPoolExecutor(max_workers=len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.complete(prompt, **fields), prompts))

    def gauges(self, name: str) -> dict[str, float]:
        """Return the unlabelled samples of a process's metrics by name."""
        families = text_string_to_metric_families(self.cluster.metrics(name))
        return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}

    def held(self) -> dict[str, float]:
        """Return every block and request gauge of the workers that is not 0."""
        names = (*HELD_BLOCKS, "kvferry_num_requests_running", "kvferry_num_requests_waiting", "kvferry_num_requests_loading")
        found = {}
        for worker in self.cluster.workers:
            gauges = self.gauges(worker.engine_id)
            found |= {f"{worker.engine_id}:{name}": gauges[name] for name in names if gauges.get(name)}
        return found


@contextmanager
def client_of(kind: str, cluster: LocalCluster) -> Iterator[Served]:
    with httpx.Client(base_url=cluster.base_url, timeout=REQUEST_TIMEOUT_S) as client:
        yield Served(kind, cluster, client)


@pytest.fixture(scope="session")
def serve() -> Callable[..., AbstractContextManager[Served]]:
    """Open a client for a running cluster."""
    return client_of


@pytest.fixture(scope="session", params=TOPOLOGIES)
def served(request, cluster_config, tmp_path_factory, eventually) -> Iterator[Served]:
    """Every topology and transport in turn; at its end nothing may be held by anyone."""
    logs = tmp_path_factory.mktemp(request.param)
    failures_before = request.session.testsfailed
    config = cluster_config(*TOPOLOGIES[request.param])
    with LocalCluster(config, log_dir=logs) as cluster, client_of(request.param, cluster) as found:
        yield found
        eventually(lambda: not found.held(), f"release of {found.held()}")
    if request.session.testsfailed > failures_before:
        for path in sorted(logs.glob("*.log")):
            print(f"---- {path.name}\n{path.read_text(errors='replace')[-4000:]}")


@dataclass(slots=True)
class Secured:
    """Two pairs of workers that talk tcp with a cluster key and are restarted when they end; where their router meets them."""

    cluster: LocalCluster
    worker_address: str
    keys: ClusterKeys


@pytest.fixture(scope="session")
def secured(cluster_config, tmp_path_factory) -> Iterator[Secured]:
    """A cluster as an operator runs it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    key = new_cluster_key(RandomIds())
    settings = (
        f"security.cluster_key={key}",
        f"router.worker_address={address}",
        "connector.transports=[tcp]",
        "local.num_prefill=2",
        "local.num_decode=2",
        "worker.drain_timeout_s=60",
    )
    keys = derive_keys(key)
    assert keys is not None
    with LocalCluster(cluster_config(*settings), supervise=True, log_dir=tmp_path_factory.mktemp("secured")) as cluster:
        yield Secured(cluster, address, keys)


@pytest.fixture(scope="session")
def aggregated_answers(cluster_config, tmp_path_factory) -> Callable[..., dict[str, Any]]:
    """Answer requests on one worker that does it all, each once; the reference for hand-over parity."""
    answers: dict[str, dict[str, Any]] = {}
    config, logs = cluster_config(*TOPOLOGIES["aggregated"]), tmp_path_factory.mktemp("parity")
    with LocalCluster(config, log_dir=logs) as cluster, client_of("aggregated", cluster) as found:
        for name, fields in parity_requests().items():
            answers[name] = found.complete(**fields)
    return lambda name: answers[name]


def parity_requests() -> dict[str, dict[str, Any]]:
    """Requests whose answers must not depend on where prompt and tokens were computed."""
    prompt = "The three primary colours are"
    return {
        "seeded": {"prompt": prompt, "temperature": 0.9, "top_p": 0.95, "seed": 7, "max_tokens": 16},
        "two seeded choices": {"prompt": prompt, "temperature": 0.9, "seed": 11, "n": 2, "max_tokens": 12},
        "logprobs": {"prompt": prompt, "logprobs": 3, "max_tokens": 8},
        "penalties": {
            "prompt": prompt,
            "max_tokens": 16,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
        },
        "minimum": {"prompt": prompt, "min_tokens": 10, "max_tokens": 12},
        "stop string": {"prompt": prompt, "stop": [","], "max_tokens": 16},
        "prompt logprobs": {"prompt": prompt, "prompt_logprobs": 1, "max_tokens": 2},
    }


@pytest.fixture(scope="session")
def parity_cases() -> dict[str, dict[str, Any]]:
    return parity_requests()


@pytest.fixture(scope="session")
def corpus() -> list[int]:
    """Enough tokens of English to cut prompts of any length from."""
    tokenizer = Tokenizer(resolve_model(MODEL, Path(default_cache_dir())))
    sentences = [
        f"On day {day} the ferry carried {day * 7 % 90} people and {day * 3 % 11} cars across the strait, "
        f"while the wind blew from the {('north', 'east', 'south', 'west')[day % 4]}."
        for day in range(1, 60)
    ]
    return tokenizer.encode(" ".join(sentences))


@pytest.fixture(scope="session")
def oracle(smollm2_gguf):
    """transformers' own model, read from the GGUF file by its own reader."""
    torch.set_num_threads(1)  # two threads would wait for each other behind the workers
    model = AutoModelForCausalLM.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="session")
def assert_token_identical(oracle) -> Callable[[Sequence[int], Sequence[int]], None]:
    """Hold greedy output against the oracle, token by token on the same prefix."""
    checked: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()  # topologies give the same answers

    def check(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        key = (tuple(prompt_ids), tuple(output_ids))
        if key in checked:
            return
        assert output_ids
        with torch.inference_mode():
            logits = oracle(torch.tensor([[*prompt_ids, *output_ids]])).logits[0, len(prompt_ids) - 1 : -1]
        best = logits.topk(2).values
        for step, token_id in enumerate(output_ids):
            if int(logits[step].argmax()) != token_id:
                gap = float(best[step, 0] - best[step, 1])
                assert gap < NEAR_TIE, f"token {step} is {token_id}, expected {int(logits[step].argmax())} by {gap}"
        checked.add(key)

    return check
