"""Clusters of real processes that the tests share, and the reference that their answers are held against."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from core.config_types import default_cache_dir
from core.ids import RandomIds
from core.model.hub import ALIASES, resolve_model
from core.model.tokenizer import Tokenizer
from core.wire.curve import ClusterKeys, derive_keys, new_cluster_key
from kvferry.cluster_plan import free_ports
from kvferry.local import LocalCluster
from tests.support.tiny_models import write_tiny_llama, write_tiny_tokenizer
from tests.support.trace_collector import TraceCollector

if TYPE_CHECKING:  # they take seconds to import, and most runs do without the model
    from transformers import PreTrainedModel

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
}
AGGREGATED = ("local.aggregated=true", "local.num_prefill=1", "local.num_decode=1")
TRACED = "1p1d-shm"
# "2p2d-tcp" has both the transport and the topology; tests of ``faults`` run over nixl
IN_FULL_ONLY = ("1p1d-tcp", "1p1d-nixl", "2p2d-shm")
CELLS = [
    pytest.param(kind, marks=pytest.mark.full if kind in IN_FULL_ONLY else ())
    for kind in (*TOPOLOGIES, "2p2d-tcp", "aggregated")
]


@dataclass(slots=True)
class Served:
    """A running cluster and a client for it."""

    kind: str
    cluster: LocalCluster
    client: httpx.Client

    @property
    def is_disaggregated(self) -> bool:
        """True if KV blocks are handed off."""
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

    def handshakes(self, name: str) -> float:
        """Return how many handshakes with prefill workers a decode worker has made."""
        families = text_string_to_metric_families(self.cluster.metrics(name))
        events = next(family for family in families if family.name == "kvferry_kv_handoff_events")
        return next(sample.value for sample in events.samples if sample.labels.get("event") == "handshakes")

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


@pytest.fixture(scope="session")
def aggregated(cluster_config, tmp_path_factory) -> Iterator[Served]:
    """One aggregated worker, shared by all tests that need one."""
    config, logs = cluster_config(*AGGREGATED), tmp_path_factory.mktemp("aggregated")
    with LocalCluster(config, log_dir=logs) as cluster, client_of("aggregated", cluster) as found:
        yield found


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> tuple[str, ...]:
    """Settings of a model that a worker loads sooner, for tests that need no particular answers; its name stays."""
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    write_tiny_tokenizer(folder)
    return f"model.name={folder}", f"model.served_name={MODEL}"


@pytest.fixture(scope="session")
def collector() -> Iterator[TraceCollector]:
    """Where the processes of the cluster ``TRACED`` send their spans."""
    with TraceCollector() as found:
        yield found


@pytest.fixture(scope="session", params=CELLS)
def served(request, cluster_config, tmp_path_factory, eventually, collector) -> Iterator[Served]:
    """Every topology and transport in turn; at its end nothing may be held by anyone."""
    if request.param not in TOPOLOGIES:
        found = request.getfixturevalue("aggregated" if request.param == "aggregated" else "secured_served")
        yield found
        eventually(lambda: not found.held(), f"release of {found.held()}")
        return
    logs = tmp_path_factory.mktemp(request.param)
    failures_before = request.session.testsfailed
    tracing = (f"tracing.endpoint={collector.endpoint}", "tracing.export_interval_s=0.05") if request.param == TRACED else ()
    config = cluster_config(*TOPOLOGIES[request.param], *tracing)
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
    address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
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
def secured_served(secured) -> Iterator[Served]:
    """A client of that cluster."""
    with client_of("2p2d-tcp", secured.cluster) as found:
        yield found


@pytest.fixture(scope="session")
def aggregated_answers(aggregated) -> Callable[..., dict[str, Any]]:
    """Answer requests on one worker that does it all, each once; the reference for handoff parity."""
    answers = {name: aggregated.complete(**fields) for name, fields in parity_requests().items()}
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
def assert_token_identical(request, smollm2_gguf) -> Iterator[Callable[[Sequence[int], Sequence[int]], None]]:
    """Hold greedy output against transformers, token by token on the same prefix."""
    oracle = SmolLM2Oracle(smollm2_gguf, asks_anew=request.config.getoption("--full"))
    yield oracle.assert_token_identical
    if request.config.getoption("--keep-answers"):
        oracle.keep()


class SmolLM2Oracle:
    """The continuation by transformers, token by token, with its own model of the GGUF file, read by its own reader.

    The continuations of the default suite's prompts are stored next to the tests, by prompt: ``pytest --keep-answers`` adds
    missing ones. Output that is the beginning of a stored continuation is right; the model is run for any other output, and for
    all of them with --full.
    """

    KEPT = Path(__file__).parents[1] / "kept_answers" / f"{MODEL}.json"

    def __init__(self, gguf: Path, asks_anew: bool) -> None:
        self._gguf = gguf
        self._continuations: dict[str, list[int]] = {} if asks_anew else json.loads(self.KEPT.read_text())
        self._near_ties: set[tuple[str, tuple[int, ...]]] = set()  # outputs that differ from the best tokens, and may

    def assert_token_identical(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Compare up to the last token; near ties may differ."""
        assert output_ids
        name = hashlib.sha256(json.dumps([ALIASES[MODEL].content_id, *prompt_ids]).encode()).hexdigest()[:24]
        known = self._continuations.get(name, [])
        if list(output_ids) == known[: len(output_ids)] or (name, tuple(output_ids)) in self._near_ties:
            return
        best = self._ask(prompt_ids, output_ids)
        agreed = [*itertools.takewhile(lambda pair: pair[0] == pair[1], zip(best, output_ids, strict=True))]
        if len(agreed) < len(output_ids):
            self._near_ties.add((name, tuple(output_ids)))
        self._continuations[name] = max(known, best[: len(agreed) + 1], key=len)

    def keep(self) -> None:
        """Write what is known."""
        kept = {**json.loads(self.KEPT.read_text()), **self._continuations}
        lines = [f"{json.dumps(name)}: {json.dumps(tokens)}" for name, tokens in sorted(kept.items())]
        self.KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n")

    def _ask(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[int]:
        """Return the best token in each place of the output; fail where another was put out and it is not a near tie."""
        import torch

        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt_ids, *output_ids]])).logits[0, len(prompt_ids) - 1 : -1]
        best = logits.topk(2)
        for step, token_id in enumerate(output_ids):
            expected, gap = int(best.indices[step, 0]), float(best.values[step, 0] - best.values[step, 1])
            assert token_id == expected or gap < NEAR_TIE, f"token {step} is {token_id}, expected {expected} by {gap}"
        return best.indices[:, 0].tolist()

    @cached_property
    def _model(self) -> PreTrainedModel:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)  # two threads would wait for each other, as the workers use the cores
        folder, name = self._gguf.parent, self._gguf.name
        return AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
