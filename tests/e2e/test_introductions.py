"""A decode worker meets the prefill worker while the first prompt is computed, before there is anything to read."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def handshakes(served) -> float:
    families = text_string_to_metric_families(served.cluster.metrics("decode-0"))
    events = next(family for family in families if family.name == "kvferry_kv_handoff_events")
    return next(sample.value for sample in events.samples if sample.labels.get("event") == "handshakes")


@pytest.mark.parametrize("transport", ["shm", *(pytest.param(name, marks=pytest.mark.full) for name in ("tcp", "nixl"))])
def test_first_handoff_finds_its_peer_open(serve, start_cluster, corpus, assert_token_identical, eventually, transport):
    cluster = start_cluster(f"connector.transports=[{transport}]")
    with serve("local", cluster) as served:
        assert handshakes(served) == 0
        served.complete(corpus[:100], max_tokens=1)  # ends with the first token, at the prefill worker
        eventually(lambda: handshakes(served) == 1, "the handshake of the meeting")
        prompt = corpus[100:300]
        answer = served.complete(prompt, max_tokens=6)
        assert answer["usage"]["kv_transfer"]["transport"] == transport
        assert_token_identical(prompt, answer["choices"][0]["token_ids"])
        assert handshakes(served) == 1
        eventually(lambda: not served.held(), f"release of {served.held()}")
