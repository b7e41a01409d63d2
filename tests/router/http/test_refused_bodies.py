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


async def test_each_line_of_content_encoding_is_looked_at(served):
    content = json.dumps(BODIES["/tokenize"]).encode()
    async with served.client() as client:
        encodings = [("content-encoding", "identity"), ("content-encoding", "gzip")]
        response = await client.post("/tokenize", content=content, headers=encodings)
        assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_encoding")
        response = await client.post("/tokenize", content=content, headers=[("content-encoding", "identity")] * 2)
        assert response.status_code == 200


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


VERSION = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
EXPECTING = b"POST %s HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n%s\r\n"
REFUSED = {
    415: (b"/v1/completions", b"Content-Encoding: gzip\r\n"),
    404: (b"/v2", b""),
    401: (b"/v1/completions", b""),
    413: (b"/v1/completions", b""),
}


async def read_answer(reader):
    """Return the head, in lower case, and the body of an answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    return head, await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))


@pytest.fixture(params=REFUSED)
async def refused(request, start_router):
    """Return a connection to a router, and the head of a request with a body of two bytes that it refuses unread."""
    settings = {401: {"api_key": "k"}, 413: {"max_body_bytes": 1}}.get(request.param, {})
    under_test = await start_router(**settings)
    reader, writer = await asyncio.open_connection("127.0.0.1", under_test.router.port)
    async with asyncio.timeout(20):
        yield reader, writer, request.param, EXPECTING % REFUSED[request.param]
    writer.close()


async def test_a_refusal_without_the_body_that_a_client_waits_to_send_ends_the_connection(refused):
    reader, writer, status, head = refused
    writer.write(head)
    answer, _ = await read_answer(reader)
    assert answer.startswith(b"http/1.1 %d " % status)
    assert b"\r\nconnection: close\r\n" in answer
    writer.write(b"{}" + VERSION)  # a body on its way costs no answer, and is followed by none
    assert await reader.read() == b""


async def test_a_refusal_of_a_request_whose_body_has_come_keeps_the_connection(refused):
    reader, writer, status, head = refused
    writer.write(head + b"{}")
    answer, _ = await read_answer(reader)
    assert answer.startswith(b"http/1.1 %d " % status)
    assert b"connection" not in answer
    writer.write(VERSION)
    assert (await read_answer(reader))[0].startswith(b"http/1.1 200 ")


async def test_a_refusal_keeps_the_connection_of_a_client_that_sends_its_body_anyway(refused):
    reader, writer, status, head = refused
    writer.write(head.replace(b"Expect: 100-continue\r\n", b""))
    answer, _ = await read_answer(reader)
    assert answer.startswith(b"http/1.1 %d " % status)
    assert b"connection" not in answer
    writer.write(b"{}" + VERSION)
    assert (await read_answer(reader))[0].startswith(b"http/1.1 200 ")


async def test_a_client_that_waits_to_send_its_body_is_asked_for_it(start_router):
    under_test = await start_router()
    reader, writer = await asyncio.open_connection("127.0.0.1", under_test.router.port)
    async with asyncio.timeout(20):
        writer.write(EXPECTING % (b"/tokenize", b""))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"{}" + VERSION)
        assert b"connection" not in (await read_answer(reader))[0]
        assert (await read_answer(reader))[0].startswith(b"http/1.1 200 ")
    writer.close()


@pytest.mark.parametrize("path", [b"/v2", b"/v1/completions"])
async def test_a_malformed_chunk_of_a_request_that_was_answered_only_ends_the_connection(start_router, path):
    under_test = await start_router()
    reader, writer = await asyncio.open_connection("127.0.0.1", under_test.router.port)
    async with asyncio.timeout(20):
        head = HEAD.replace(b"/v1/completions", path) % b"chunked"
        writer.write(head.replace(b"Host: x", b"Content-Encoding: gzip"))
        answer, _ = await read_answer(reader)
        assert answer.split()[1] == (b"404" if path == b"/v2" else b"415")
        writer.write(b"zz\r\n")
        assert await reader.read() == b""
    writer.close()


async def test_a_malformed_target_behind_an_answered_request_is_refused_as_such(start_router):
    under_test = await start_router()
    reader, writer = await asyncio.open_connection("127.0.0.1", under_test.router.port)
    async with asyncio.timeout(20):
        writer.write(VERSION)
        await read_answer(reader)
        writer.write(b"GET http:///x HTTP/1.1\r\nHost: x\r\n\r\n")
        answer, body = await read_answer(reader)
    writer.close()
    assert answer.startswith(b"http/1.1 400 ")
    assert json.loads(body)["error"]["message"] == "this is no valid HTTP request"
