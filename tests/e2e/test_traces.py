"""One request through a real cluster is one trace at a collector: router, prefill worker, transfer, decode worker."""

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TREE = {
    "kvferry.request": "",
    "kvferry.leg.prefill": "kvferry.request",
    "kvferry.leg.decode": "kvferry.request",
    "kvferry.prefill": "kvferry.leg.prefill",
    "kvferry.compute": "kvferry.prefill",
    "kvferry.decode": "kvferry.leg.decode",
    "kvferry.kv_transfer": "kvferry.decode",
    "kvferry.kv_verify": "kvferry.decode",
    "kvferry.first_step": "kvferry.decode",
}


@pytest.mark.parametrize("served", ["1p1d-shm"], indirect=True)
def test_one_request_is_one_trace_over_all_processes(served, collector, corpus, eventually):
    body = {"prompt": corpus[:150], "max_tokens": 4, "temperature": 0, "cache_salt": "traced"}
    header = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
    assert served.client.post("/v1/completions", json=body, headers=header).status_code == 200

    def spans_of_the_trace():
        return {span.name: span for span in collector.spans if span.trace_id == TRACE}

    eventually(lambda: spans_of_the_trace().keys() >= TREE.keys(), f"{len(TREE)} kinds of spans")
    spans = spans_of_the_trace()
    names = {span.span_id: span.name for span in spans.values()}
    assert {name: names.get(spans[name].parent_id, "") for name in TREE} == TREE
    assert spans["kvferry.request"].parent_id == SPAN
    roles = {name: spans[name].process["kvferry.role"] for name in TREE}
    assert (roles["kvferry.request"], roles["kvferry.prefill"], roles["kvferry.kv_transfer"]) == ("router", "prefill", "decode")
    assert spans["kvferry.kv_transfer"].attributes["kvferry.transport"] == "shm"
    assert spans["kvferry.kv_transfer"].attributes["kvferry.transferred_bytes"] > 0
    assert not any(span.error for span in spans.values())
