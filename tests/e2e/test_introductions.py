"""A decode worker meets the prefill worker while the first prompt is computed, before there is anything to read."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.full  # ``test_bfloat16`` counts the handshakes of a cluster that it starts anyway
@pytest.mark.parametrize("transport", ["shm", "tcp", "nixl"])
def test_first_handoff_finds_its_peer_open(serve, start_cluster, corpus, assert_token_identical, eventually, transport):
    cluster = start_cluster(f"connector.transports=[{transport}]")
    with serve("local", cluster) as served:
        assert served.handshakes("decode-0") == 0
        served.complete(corpus[:100], max_tokens=1)  # ends with the first token, at the prefill worker
        eventually(lambda: served.handshakes("decode-0") == 1, "the handshake of the meeting")
        prompt = corpus[100:300]
        answer = served.complete(prompt, max_tokens=6)
        assert answer["usage"]["kv_transfer"]["transport"] == transport
        assert_token_identical(prompt, answer["choices"][0]["token_ids"])
        assert served.handshakes("decode-0") == 1
        eventually(lambda: not served.held(), f"release of {served.held()}")
