"""Images through a cluster with an encode worker: the answers are transformers' own, even if the embeddings are lost."""

from __future__ import annotations

import base64
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvferry.local import LocalCluster
from tests.support.tiny_smolvlm import ReferenceSmolVLM, encode_test_image

MODEL = "tiny"
ENCODE, PREFILL, DECODE = "encode-0", "prefill-0", "decode-0"
MAX_TOKENS = 6
SETTINGS = (
    f"model.served_name={MODEL}",
    f"cache.memory_bytes={48 << 20}",
    f"ec_connector.memory_bytes={16 << 20}",
    "local.num_encode=1",
    "scheduler.max_num_batched_tokens=64",  # an image of 80 embeddings crosses the border of a chunk
)
CONNECTORS = {
    "p2p-shm": ("ec_connector.name=p2p", "ec_connector.transports=[shm]"),
    "p2p-tcp": ("ec_connector.name=p2p", "ec_connector.transports=[tcp]"),
    "shared": ("ec_connector.name=shared", "local.kvstore=true", f"kvstore.memory_bytes={16 << 20}"),
}
CELLS = [pytest.param(name, id=name, marks=() if name == "p2p-shm" else pytest.mark.full) for name in CONNECTORS]

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@dataclass(slots=True)
class Sighted:
    """A running cluster of a model that sees images, and what its answers are held against."""

    kind: str
    cluster: LocalCluster
    client: httpx.Client
    reference: ReferenceSmolVLM

    def post(self, *parts: str | bytes, **fields: Any) -> httpx.Response:
        """Ask about texts and image files."""
        content = [{"type": "text", "text": part} if isinstance(part, str) else image_part(part) for part in parts]
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}
        defaults = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return self.client.post("/v1/chat/completions", json={**defaults, **body})

    def ask(self, *parts: str | bytes, **fields: Any) -> dict[str, Any]:
        """Return the body of an answer whose every choice is the reference's."""
        response = self.post(*parts, **fields)
        assert response.status_code == 200, response.text
        for choice in response.json()["choices"]:
            assert len(choice["token_ids"]) == MAX_TOKENS
            self.reference.assert_greedy(choice["token_ids"], *parts)
        return response.json()

    def count(self, process: str, name: str, **labels: str) -> float:
        """Return a counter or gauge of a process, 0 where it has none."""
        families = text_string_to_metric_families(self.cluster.metrics(process))
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def num_computed(self) -> float:
        """Return how many images the encode worker has embedded."""
        return self.count(ENCODE, "kvferry_encoder_images_total", outcome="computed")

    def num_in(self, phase: str) -> float:
        """Return how many requests are on a leg."""
        return self.count("router", "kvferry_num_requests_by_phase", phase=phase)


def image_part(content: bytes) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> ReferenceSmolVLM:
    return ReferenceSmolVLM(tmp_path_factory.mktemp("tiny-smolvlm"))


@pytest.fixture(scope="module", params=CELLS)
def cluster(request, reference, cluster_config, tmp_path_factory, eventually):
    config = cluster_config(f"model.name={reference.folder}", *SETTINGS, *CONNECTORS[request.param])
    with (
        LocalCluster(config, log_dir=tmp_path_factory.mktemp(request.param)) as running,
        httpx.Client(base_url=running.base_url, timeout=60) as client,
    ):
        sighted = Sighted(request.param, running, client, reference)
        yield sighted
        eventually(lambda: not sighted.count(PREFILL, "kvferry_ec_wanted_chunks"), "release of embeddings")
        assert not sighted.count(PREFILL, "kvferry_kv_leaked_blocks")
        assert not sighted.count(PREFILL, "kvferry_encoder_prepared_bytes")


@pytest.fixture
def sighted(cluster):
    """The cluster, its encode worker there."""
    if ENCODE not in cluster.cluster.pids:
        cluster.cluster.restart(ENCODE)
    return cluster


@pytest.fixture
def in_background():
    with ThreadPoolExecutor(max_workers=4) as pool:
        yield pool.submit


def test_answers_are_those_of_transformers(sighted):
    first, second, wide = encode_test_image(1), encode_test_image(2, 20, 64), encode_test_image(3, 64, 10, "JPEG")
    sighted.ask("what is in ", first, "this image?")
    sighted.ask("compare ", first, second, " and ", wide, "!")
    sighted.ask(second, "what is in this image?", n=2)
    sighted.ask("hello")
    assert sighted.count("router", "kvferry_image_encodes_total", outcome="done") >= 3
    assert sighted.count(PREFILL, "kvferry_ec_fetches_total", result="ok") >= 3


def test_an_image_is_embedded_once_however_often_it_comes(sighted, in_background):
    image, before = encode_test_image(10), sighted.num_computed()
    asks = [in_background(sighted.ask, f"question {number}: ", image) for number in range(4)]
    for ask in asks:
        ask.result()
    sighted.ask("again ", image, image)
    assert sighted.num_computed() - before == 1


def test_an_encode_worker_killed_with_a_request_costs_no_answer(sighted, in_background, eventually):
    sighted.cluster.kill(ENCODE, signal.SIGSTOP)
    asks = [in_background(sighted.ask, "look: ", encode_test_image(20 + number)) for number in range(3)]
    eventually(lambda: sighted.num_in("encode") == 3, "three requests at the encode worker")
    sighted.cluster.kill(ENCODE)
    for ask in asks:
        ask.result()
    assert sighted.count("router", "kvferry_image_encodes_total", outcome="peer_lost") >= 3
    eventually(lambda: sighted.count("router", "kvferry_workers", role="encode") == 0, "the loss of the encode worker")
    sighted.ask("and without one ", encode_test_image(24))
    sighted.cluster.restart(ENCODE)
    eventually(lambda: sighted.count("router", "kvferry_workers", role="encode") == 1, "the new encode worker")
    sighted.ask("and with one ", encode_test_image(25))
    assert sighted.num_computed() == 1


def test_embeddings_that_were_damaged_on_their_way_are_not_used(sighted, in_background, eventually):
    if sighted.kind == "shared":
        pytest.skip("the encode worker keeps nothing for readers")
    image, before = encode_test_image(30), sighted.num_computed()
    sighted.cluster.kill(PREFILL, signal.SIGSTOP)
    try:
        ask = in_background(sighted.ask, "damaged: ", image)
        eventually(lambda: sighted.num_computed() == before + 1 and sighted.num_in("prefill") == 1, "the embeddings")
        damage(memory_of(sighted.cluster.pids[ENCODE]))
    finally:
        sighted.cluster.kill(PREFILL, signal.SIGCONT)
    ask.result()
    assert sighted.count(PREFILL, "kvferry_ec_fetches_total", result="digest") == 1


def memory_of(pid: int) -> Path:
    """Return the memory file of an encode worker's embeddings."""
    files = [path for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    return next(path for path in files if "kvferry-embeddings (" in str(path.readlink()))


def damage(path: Path) -> None:
    """Change every embedding in the memory."""
    with path.open("r+b") as file:
        content = file.read()
        for offset in range(0, len(content), 64):
            if any(content[offset : offset + 64]):
                os.pwrite(file.fileno(), bytes([content[offset] ^ 1]), offset)


def test_bad_images_are_the_clients_fault_by_name(sighted, eventually):
    good = encode_test_image(40)
    bad = {
        "no image": b"hello",
        "cut off": good[:-30],
        "damaged behind its head": encode_test_image(41, 60, 44, "GIF")[:-500],  # which only a worker sees
    }
    for content in bad.values():
        response = sighted.post("what is ", good, content)
        error = response.json().get("error")
        assert response.status_code == 400, response.text
        assert error["param"] == "messages[0].content[2]", error
    response = sighted.client.post(
        "/v1/chat/completions",
        json={
            "model": MODEL,
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/"}}]}],
        },
    )
    assert response.status_code == 400
    sighted.ask("still here ", good)
    eventually(lambda: not sighted.count(ENCODE, "kvferry_ec_leased_blocks"), "release of embeddings that nobody will read")


@pytest.mark.full
def test_an_encode_worker_drains_and_comes_back(sighted, eventually):
    before = sighted.cluster.pids[ENCODE]
    sighted.ask("one ", encode_test_image(50))
    sighted.cluster.restart(ENCODE)
    assert sighted.cluster.pids[ENCODE] != before
    eventually(lambda: sighted.count("router", "kvferry_workers", role="encode") == 1, "the new encode worker")
    sighted.ask("two ", encode_test_image(51))
    assert sighted.num_computed() == 1
