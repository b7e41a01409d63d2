"""The small model in bfloat16: handoffs give the tokens of one aggregated worker, bit for bit, in half of the bytes."""

from __future__ import annotations

import pytest

from kvferry.local import LocalCluster

TOKEN_BYTES = 30 * 2 * 3 * 64 * 2  # layers, keys and values, heads, head size, bfloat16
BLOCK = 64
LENGTHS = (1, 17, 64, 100, 300)
MAX_TOKENS = 16
CELLS = [pytest.param(name, marks=() if name == "shm" else pytest.mark.full) for name in ("shm", "tcp", "nixl")]

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def answers(served, prompts):
    """Return the bodies of answers to prompts sent at once."""
    return served.complete_all(prompts, max_tokens=MAX_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(cluster_config, serve, tmp_path_factory, corpus):
    """Prompts, each with the tokens of one worker that computes it alone."""
    prompts = [corpus[3 * length : 4 * length] for length in LENGTHS]
    config = cluster_config("model.dtype=bfloat16", "local.aggregated=true", "local.num_prefill=1", "local.num_decode=1")
    with LocalCluster(config, log_dir=tmp_path_factory.mktemp("alone")) as cluster, serve("aggregated", cluster) as alone:
        return [(prompt, answers(alone, [prompt])[0]["choices"][0]["token_ids"]) for prompt in prompts]


@pytest.mark.parametrize("transport", CELLS)
def test_handoff_changes_no_token_and_moves_half_of_the_bytes(cluster_config, serve, tmp_path, expected, eventually, transport):
    config = cluster_config(
        "model.dtype=bfloat16", f"connector.transports=[{transport}]", "connector.kv_load_failure_policy=fail"
    )
    prompts = [prompt for prompt, _ in expected]
    with LocalCluster(config, log_dir=tmp_path) as cluster, serve("1p1d", cluster) as served:
        served.complete(prompts[0], max_tokens=1)  # ends with the first token, at the prefill worker
        eventually(lambda: served.handshakes("decode-0") == 1, "the handshake before there is anything to read")
        bodies = answers(served, prompts)
        assert served.handshakes("decode-0") == 1
        eventually(lambda: not served.held(), f"release of {served.held()}")
    assert [body["choices"][0]["token_ids"] for body in bodies] == [tokens for _, tokens in expected]
    for prompt, body in zip(prompts, bodies, strict=True):
        usage = body["usage"]["kv_transfer"]
        assert (usage["transport"], usage["transferred_tokens"], usage["recomputed_tokens"]) == (transport, len(prompt), 0)
        assert usage["transferred_bytes"] == -(-len(prompt) // BLOCK) * BLOCK * TOKEN_BYTES
