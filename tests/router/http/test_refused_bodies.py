"""What clients are told about bodies that are refused, and what of a body is read although it is unusual."""

import asyncio
import gzip
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


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "x" * 300_000}, "prompt"),
        ("/v1/completions", {"prompt": "x" * 300_000, "truncate_prompt_tokens": 4}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 300_000}]}, "messages"),
        ("/v1/responses", {"input": "x" * 300_000}, "input"),
        ("/tokenize", {"prompt": "x" * 300_000}, "prompt"),
        ("/tokenize", {"prompt": None, "messages": [{"role": "user", "content": "x" * 300_000}]}, "messages"),
    ],
)
async def test_a_text_whose_beginning_has_too_many_tokens_is_refused_by_its_field(served, monkeypatch, path, fields, param):
    reader = served.router.endpoints._reader
    monkeypatch.setattr(reader, "_longest_token", 1000)  # a vocabulary in which the number of characters tells nothing
    error = (await post(served, path, BODIES[path] | fields)).json()["error"]
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert f"{param} is too long" in error["message"]
    is_prompt = path.startswith("/v1") and "truncate_prompt_tokens" not in fields
    assert ("maximum context length is 512 tokens" in error["message"]) == is_prompt


async def test_an_answer_that_cannot_fit_is_refused_by_the_field_that_asks_for_it(served):
    error = (await post(served, "/v1/responses", {"input": "hi", "max_output_tokens": 10**9})).json()["error"]
    assert (error["param"], "max_output_tokens may be at most" in error["message"]) == ("max_output_tokens", True)


IN_CHATS = "is none of text, refusal, image_url"
IN_RESPONSES = "is none of input_text, output_text, reasoning_text, input_image, text, refusal"


@pytest.mark.parametrize(
    ("path", "fields", "place", "said"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "input_text"}]}]}, "messages", IN_CHATS),
        ("/tokenize", {"prompt": None, "messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages", IN_CHATS),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "image_url"}]}]}, "input", IN_RESPONSES),
        ("/v1/responses", {"input": [{"mood": 1, "role": "user", "content": [{"type": "x"}]}]}, "input", IN_RESPONSES),
    ],
)
async def test_a_part_of_an_unknown_type_is_told_the_types_that_there_are(served, path, fields, place, said):
    error = (await post(served, path, BODIES[path] | fields)).json()["error"]
    kind = (fields.get("messages") or fields["input"])[0]["content"][0]["type"]
    assert error["message"] == f"{place}[0].content[0].type: '{kind}' {said}"
    assert error["param"] == f"{place}[0].content[0].type"


async def test_an_image_for_a_model_of_texts_is_refused_in_the_words_of_the_endpoint(served):
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    error = (await post(served, "/v1/responses", {"input": [{"role": "user", "content": [image]}]})).json()["error"]
    assert error["message"] == "input has a part of type input_image, this model reads text only"


@pytest.mark.parametrize("path", BODIES)
async def test_a_compressed_body_is_refused_by_its_header(served, path):
    content = json.dumps(BODIES[path]).encode()
    response = await post(served, path, gzip.compress(content), **{"content-encoding": "gzip"})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (415, "unsupported_encoding")
    assert "Content-Encoding 'gzip'" in error["message"]
    assert (await post(served, path, content, **{"content-encoding": "identity"})).status_code == 200


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: %s\r\n\r\n"
WHOLE = b'18\r\n{"prompt":"x","echo":0,"n\r\nZZ\r\n'


async def answer_to(under_test, *pieces):
    """Send pieces, each after the router has read the one before, and return the status and the message of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", under_test.router.port)
    async with asyncio.timeout(20):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        answer = await reader.read()
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    "pieces", [(HEAD % b"chunked" + b"ZZ\r\n",), (HEAD % b"chunked", b"ZZ\r\n"), (HEAD % b"chunked", WHOLE)]
)
async def test_a_malformed_chunk_is_answered(start_router, pieces):
    under_test = await start_router()
    status, message = await answer_to(under_test, *pieces)
    assert (status, message) == (400, "the body is no valid HTTP: a chunk is malformed")
    assert under_test.router.gateway.num_requests == 0


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"gzip"])
async def test_a_transfer_coding_that_is_not_read_is_refused(start_router, coding):
    status, message = await answer_to(await start_router(), HEAD % coding + b"0\r\n\r\n")
    assert (status, coding.decode() in message) == (400, True)


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("POST", "/chat/completions", 404, "/chat/completions is no path of this API: did you mean /v1/chat/completions?"),
        ("POST", "/v1/v1/completions", 404, "/v1/v1/completions is no path of this API: did you mean /v1/completions?"),
        ("GET", "/models", 404, "/models is no path of this API: did you mean /v1/models?"),
        ("POST", "/v1/tokenize/", 404, "/v1/tokenize is no path of this API: did you mean /tokenize?"),
        ("POST", "/v1/embeddings", 404, "/v1/embeddings is no path of this API: /openapi.json has its paths"),
        ("GET", f"/{'p' * 5000}", 404, f"/{'p' * 99} is no path of this API: /openapi.json has its paths"),
        ("GET", "/v1/completions", 405, "/v1/completions is answered to OPTIONS, POST only"),
    ],
)
async def test_a_request_to_a_wrong_place_is_told_the_right_one(served, method, path, status, said):
    async with served.client() as client:
        response = await client.request(method, path, content=b"{}" if method == "POST" else None)
    assert (response.status_code, response.json()["error"]["message"]) == (status, said)


async def test_a_body_that_is_too_large_is_told_the_limit_and_its_setting(start_router):
    under_test = await start_router(has_http=False, max_body_bytes=1000)
    response = await post(under_test, "/v1/completions", {"prompt": "x" * 1000})
    assert response.json()["error"]["message"] == "the body has more bytes than router.max_body_bytes = 1000: send less"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_a_request_whose_own_time_is_over_is_told_the_field(served, path):
    response = await post(served, path, BODIES[path] | {"timeout_s": 1e-9})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (504, "timeout_s")
    assert error["message"].endswith(", its limit by timeout_s")
