from __future__ import annotations


async def test_a_completion_passes_through_both_workers(served):
    async with served.client() as client:
        response = await client.post("/v1/completions", json={"model": "tiny", "prompt": "say it", "max_tokens": 50})
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["choices"][0]["text"] == "hello world"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 12
    assert body["usage"]["kv_transfer"]["transport"] == "tcp"
