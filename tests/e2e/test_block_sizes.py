"""Prefill and decode workers with blocks of different sizes: handoffs are converted, and the answers are the same."""

from __future__ import annotations

import pytest

from core.config_workers import CacheSection
from kvferry.local import LocalCluster, ProcessOptions

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TOKEN_BYTES = 30 * 2 * 3 * 64 * 4  # layers, keys and values, heads, head size, float32
SIZES = {"16-to-64": (16, 64), "64-to-16": (64, 16)}  # at the prefill and at the decode worker
QUICK = {("64-to-16", "tcp")}  # the others are in the full matrix
CELLS = [
    pytest.param((sizes, transport), id=f"{sizes}-{transport}", marks=() if (sizes, transport) in QUICK else pytest.mark.full)
    for sizes in SIZES
    for transport in ("shm", "tcp", "nixl")
]


@pytest.fixture(scope="module", params=CELLS)
def served(request, cluster_config, tmp_path_factory, eventually, serve):
    sizes, transport = request.param
    logs = tmp_path_factory.mktemp(sizes)
    failures_before = request.session.testsfailed
    prefill, decode = (CacheSection(block_size=size, memory_bytes=256 << 20) for size in SIZES[sizes])
    options = ProcessOptions(caches={"prefill": prefill, "decode": decode})
    config = cluster_config(f"connector.transports=[{transport}]", "connector.kv_load_failure_policy=fail")
    with LocalCluster(config, log_dir=logs, options=options) as cluster, serve(sizes, cluster) as found:
        yield found
        eventually(lambda: not found.held(), f"release of {found.held()}")
    if request.session.testsfailed > failures_before:
        for path in sorted(logs.glob("*.log")):
            print(f"---- {path.name}\n{path.read_text(errors='replace')[-4000:]}")


def test_blocks_of_another_size_are_converted_to_the_last_token(served, corpus, assert_token_identical):
    prefill_block, _ = SIZES[served.kind]
    lengths = (1, 15, 16, 17, 48, 63, 64, 65, 100, 128, 300)
    prompts = [corpus[3 * length : 4 * length] for length in lengths]
    for prompt, body in zip(prompts, served.complete_all(prompts, max_tokens=6), strict=True):
        assert_token_identical(prompt, body["choices"][0]["token_ids"])
        usage = body["usage"]["kv_transfer"]
        assert (usage["transferred_tokens"], usage["recomputed_tokens"]) == (len(prompt), 0)
        assert usage["transferred_bytes"] == -(-len(prompt) // prefill_block) * prefill_block * TOKEN_BYTES


def test_load_continues_after_a_local_hit_that_ends_within_a_block_of_the_other_side(served, corpus, assert_token_identical):
    _, decode_block = SIZES[served.kind]
    document = corpus[700:844]
    for question in (corpus[10:40], corpus[50:121]):
        prompt = [*document, *question]
        body = served.complete(prompt, max_tokens=5)
        assert_token_identical(prompt, body["choices"][0]["token_ids"])
    num_hit = len(document) - len(document) % decode_block
    assert body["usage"]["kv_transfer"]["transferred_tokens"] == len(prompt) - num_hit
