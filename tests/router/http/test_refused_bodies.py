"""What clients are told about bodies that are refused, and what of a body is read although it is unusual."""

import json

import pytest

USER = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [97]},
}


async def post(under_test, path, content, **headers):
    async with under_test.client() as client:
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        return await client.post(path, content=content, headers={"content-type": "application/json", **headers})


@pytest.mark.parametrize("path", BODIES)
async def test_a_byte_order_mark_before_the_json_is_skipped(served, path):
    response = await post(served, path, b"\xef\xbb\xbf" + json.dumps(BODIES[path]).encode())
    assert response.status_code == 200, response.text
    response = await post(served, path, b"\xef\xbb\xbf")
    assert (response.status_code, response.json()["error"]["message"]) == (400, "the body is empty")


@pytest.mark.parametrize("path", BODIES)
async def test_a_field_that_is_not_known_yet_may_be_null(served, path):
    response = await post(served, path, BODIES[path] | {"moderation": None})
    assert response.status_code == 200, response.text
    response = await post(served, path, BODIES[path] | {"moderation": {}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "moderation")
