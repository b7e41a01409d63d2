"""Images in chats: what is taken, what is refused and by which name, and what workers get of it."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from io import BytesIO

import pytest
from PIL import Image

from core.config_router import ImagesSection
from core.errors import EncoderInputMissing, InvalidRequest
from core.model.image_file import read_image_size
from core.model.image_prompt import PromptImage, load_image_prompts
from core.model.tokenizer import Tokenizer
from core.testing.clock import FakeClock
from core.wire.messages import EncodeFailed, EncodeRequest, ErrorInfo
from router.images.reader import decode_data_url
from router.openai.served_model import ServedModel

MODEL = "tiny"
TAGS = ("<image>", "<fake_token_around_image>", "<global-img>")
IMAGE_TOKEN_ID = 257
EMBEDS_PER_TILE = 4
FROM_LOOPBACK = ImagesSection(allowed_hosts=("127.0.0.1",))
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}<image>{% endif %}{% endfor %}\n"
    "{% endfor %}"
)


def picture(width: int = 8, height: int = 8, colour: str = "red", kind: str = "PNG") -> bytes:
    file = BytesIO()
    Image.new("RGB", (width, height), colour).save(file, kind)
    return file.getvalue()


def data_url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def image_part(url: str) -> dict:
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*parts: dict | str, **fields) -> dict:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}


@pytest.fixture(scope="session")
def sighted_model(tmp_path_factory, write_tiny_files) -> ServedModel:
    """A model of text and images, as far as a router knows it: no image is cut into tiles."""
    files = replace(
        write_tiny_files(tmp_path_factory.mktemp("sighted"), *TAGS),
        config={
            "model_type": "smolvlm",
            "eos_token_id": 256,
            "image_token_id": IMAGE_TOKEN_ID,
            "scale_factor": 2,
            "text_config": {"hidden_size": 8, "vocab_size": 300},
            "vision_config": {"hidden_size": 8, "num_attention_heads": 2, "image_size": 16, "patch_size": 4},
        },
        chat_template=TEMPLATE,
        image_processor_config={
            "size": {"longest_edge": 16},
            "max_image_size": {"longest_edge": 16},
            "do_image_splitting": False,
        },
        processor_config={"image_seq_len": EMBEDS_PER_TILE},
    )
    tokenizer = Tokenizer(files)
    return ServedModel(name=MODEL, tokenizer=tokenizer, image_prompts=load_image_prompts(files, tokenizer))


@pytest.fixture
def start_sighted(start_router, sighted_model):
    async def start(**settings):
        under_test = await start_router(has_http=False, model=sighted_model, **settings)
        under_test.prefill = await under_test.add("prefill", ec_connector="shared")
        await under_test.add("decode", ec_connector="shared")
        return under_test

    return start


async def post(under_test, body):
    async with under_test.client() as client:
        return await client.post("/v1/chat/completions", json=body)


async def refused(under_test, body, place: str | None = "messages[0].content[0]") -> str:
    response = await post(under_test, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == (place or "messages")
    if place is not None:
        assert error["message"].startswith(place)
    return error["message"]


async def test_an_image_becomes_placeholders_and_travels_as_it_came(start_sighted):
    under_test = await start_sighted()
    content = picture()
    response = await post(under_test, chat("what is ", image_part(data_url(content)), "?"))
    assert response.status_code == 200, response.text
    generate = await under_test.prefill.generated()
    (feature,) = generate.mm_features
    assert generate.media == (content,)
    assert (feature.num_embeds, feature.media_index) == (EMBEDS_PER_TILE, 0)
    assert generate.prompt_token_ids[feature.offset : feature.offset + feature.length] == (IMAGE_TOKEN_ID,) * EMBEDS_PER_TILE
    assert response.json()["usage"]["prompt_tokens"] == len(generate.prompt_token_ids)


async def test_equal_images_travel_once(start_sighted):
    under_test = await start_sighted()
    part = image_part(data_url(picture()))
    await post(under_test, chat(part, "and", part, image_part(data_url(picture(colour="blue")))))
    generate = await under_test.prefill.generated()
    assert len(generate.media) == 2
    assert [feature.media_index for feature in generate.mm_features] == [0, 0, 1]


async def test_texts_of_a_model_that_sees_are_served_as_before(start_sighted):
    under_test = await start_sighted()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    assert (await post(under_test, body)).status_code == 200
    generate = await under_test.prefill.generated()
    assert generate.prompt_token_ids
    assert not generate.mm_features


async def test_images_go_to_an_encode_worker_first(start_sighted):
    under_test = await start_sighted()
    encoder = await under_test.add("encode")
    assert (await post(under_test, chat(image_part(data_url(picture()))))).status_code == 200
    assert len(encoder.messages(EncodeRequest)) == 1
    assert under_test.metric("kvferry_image_encodes_total", outcome="done") == 1
    assert under_test.metric("kvferry_workers", role="encode") == 1


async def test_images_are_hashed_for_serving_weights_not_for_an_unpaired_worker(start_router, sighted_model):
    under_test = await start_router(has_http=False, model=sighted_model)
    await under_test.add("prefill", model_fingerprint=b"new weights")
    prefill, _ = await under_test.pair()
    content = picture()
    response = await post(under_test, chat(image_part(data_url(content))))
    assert response.status_code == 200, response.text
    assert response.json()["system_fingerprint"] == f"fp_{b'weights'.hex()[:12]}"
    generate = await prefill.generated()
    image = PromptImage(content, read_image_size(content))
    named, _ = sighted_model.image_prompts.features(generate.prompt_token_ids, [image], b"weights")
    assert generate.mm_features == named


async def test_a_request_whose_workers_leave_before_its_images_are_here_finds_no_worker(start_sighted, host):
    host.has("/cat", picture())
    host.gate.clear()
    under_test = await start_sighted(images=FROM_LOOPBACK)
    asking = asyncio.create_task(post(under_test, chat(image_part(f"{host.url}/cat"))))
    await host.asked.wait()
    for worker in under_test.workers:
        await worker.leave()
    await under_test.until(lambda: under_test.router.endpoints.not_ready_reason == "no worker has registered")
    host.gate.set()
    response = await asking
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "no_worker"


async def test_a_request_whose_images_come_while_its_workers_reconnect_after_a_pause_waits(start_sighted, host):
    host.has("/cat", picture())
    host.gate.clear()
    clock = FakeClock()
    under_test = await start_sighted(images=FROM_LOOPBACK, clock=clock)
    gateway = under_test.router.gateway
    await under_test.until(lambda: gateway.core.membership.pauses._last_tick is not None)
    asking = asyncio.create_task(post(under_test, chat(image_part(f"{host.url}/cat"))))
    await host.asked.wait()
    clock.advance(30.0)
    under_test.find_cut_off()
    waits, wait_for_change = [], gateway.wait_for_change
    gateway.wait_for_change = lambda: waits.append(1) or wait_for_change()
    host.gate.set()
    await under_test.until(lambda: waits or asking.done())
    for worker in under_test.workers:
        await under_test.reconnect(worker)
    response = await asking
    assert response.status_code == 200, response.text


async def add_encoder_that_refuses(under_test):
    """Add an encode worker for which the first image of every request is damaged."""
    encoder = await under_test.add("encode")

    async def fail(message):
        error = ErrorInfo.of(InvalidRequest("it is damaged"))
        await encoder.send(EncodeFailed(request_id=message.request_id, error=error, media_index=0))

    encoder._answer = fail


async def test_an_image_that_no_worker_can_decode_is_named(start_sighted):
    under_test = await start_sighted()
    await add_encoder_that_refuses(under_test)
    message = await refused(under_test, chat("a", image_part(data_url(picture()))), "messages[0].content[1]")
    assert message.endswith("it is damaged")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_image_of_a_response_that_no_worker_can_decode_is_named_as_input(start_sighted, is_stream):
    under_test = await start_sighted()
    await add_encoder_that_refuses(under_test)
    parts = [{"type": "input_image", "image_url": data_url(picture())}]
    body = {"instructions": "Look.", "input": [{"role": "user", "content": parts}], "stream": is_stream}
    async with under_test.client() as client:
        response = await client.post("/v1/responses", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "input")
    assert error["message"] == "input: the image cannot be used: it is damaged"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("data:image/png;base64,!!!!", "not valid base64"),
        ("data:image/png;base64", "no comma"),
        ("data:image/png;base64,", "no image of a known format"),
        (data_url(b"hello"), "no image of a known format"),
        (data_url(picture()[:-20]), "damaged"),
        (data_url(picture(101, 100)), "at most 10000 are taken"),
        (data_url(bytes(3000)), "more than 2000 bytes"),
        ("https://example.com/cat.png", "data: URLs only"),
        ("cat.png", "data: URLs only"),
    ],
)
async def test_bad_images_are_refused_by_their_place(start_sighted, url, why):
    under_test = await start_sighted(images=ImagesSection(max_bytes=2000, max_pixels=10000))
    assert why in await refused(under_test, chat(image_part(url)))


async def test_the_second_of_two_images_is_named(start_sighted):
    under_test = await start_sighted()
    body = chat(image_part(data_url(picture())), "and", image_part(data_url(b"x")))
    await refused(under_test, body, "messages[0].content[2]")


async def test_an_image_that_would_take_minutes_to_decode_is_named_with_the_way_out(start_sighted):
    under_test = await start_sighted()
    content = picture(kind="JPEG")
    body = chat("what is", image_part(data_url(content[:2] + b"\xff\xfe\0\2" * 4097 + content[2:])))
    assert "save it again without metadata" in await refused(under_test, body, "messages[0].content[1]")
    scan = content[content.index(b"\xff\xda") : -2]
    body = chat("what is", image_part(data_url(content[:-2] + scan * 64 + content[-2:])))
    assert "save it as a JPEG that is not progressive" in await refused(under_test, body, "messages[0].content[1]")


async def test_a_router_without_memory_for_an_image_reports_it_and_continues(start_sighted, monkeypatch):
    def fail(*_):
        raise EncoderInputMissing("there is no memory for an image at the moment")

    under_test = await start_sighted()
    body = chat(image_part(data_url(picture())))
    with monkeypatch.context() as patch:
        patch.setattr("router.images.reader.read_image_size", fail)
        response = await post(under_test, body)
    assert response.status_code == 503, response.text
    assert response.json()["error"]["param"] == "messages[0].content[0]"
    assert "retry-after" in response.headers
    assert (await post(under_test, body)).status_code == 200


async def test_an_image_without_a_thread_is_told_to_come_back(start_sighted, monkeypatch):
    def fail(_):
        raise RuntimeError("can't start new thread")

    under_test = await start_sighted()
    body = chat(image_part(data_url(picture())))
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", fail)
        response = await post(under_test, body)
    assert (response.status_code, response.json()["error"]["code"]) == (429, "overloaded"), response.text
    assert (await post(under_test, body)).status_code == 200


async def test_too_many_images_are_refused(start_sighted):
    under_test = await start_sighted(images=ImagesSection(max_count=1))
    part = image_part(data_url(picture()))
    assert "2 images, at most 1" in await refused(under_test, chat(part, part), None)


async def test_images_that_are_too_large_together_are_refused(start_sighted):
    under_test = await start_sighted(images=ImagesSection(max_total_bytes=100))
    part = image_part(data_url(picture()))
    assert "at most 100 are taken together" in await refused(under_test, chat(part, part), None)


async def test_a_text_may_not_pretend_to_be_an_image(start_sighted):
    under_test = await start_sighted()
    body = chat("<image>", image_part(data_url(picture())))
    assert "stands for an image" in await refused(under_test, body, None)


async def test_a_conversation_with_images_that_is_too_long_is_named(start_sighted):
    under_test = await start_sighted()
    answer = await post(under_test, chat("x" * 512, image_part(data_url(picture()))))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")


async def test_a_prompt_with_images_is_not_cut(start_sighted):
    under_test = await start_sighted()
    response = await post(under_test, chat(image_part(data_url(picture())), truncate_prompt_tokens=3))
    assert response.json()["error"]["param"] == "truncate_prompt_tokens"


async def test_a_model_that_reads_text_only_refuses_images(served):
    assert "reads text only" in await refused(served, chat(image_part(data_url(picture()))))


@pytest.mark.parametrize(
    ("detail", "status"), [("auto", 200), ("low", 200), ("high", 200), ("original", 200), (None, 200), ("huge", 400)]
)
async def test_detail_of_an_image_is_a_hint_of_known_values(start_sighted, detail, status):
    under_test = await start_sighted()
    url = data_url(picture())
    of_chat = {"type": "image_url", "image_url": {"url": url, "detail": detail}}
    of_responses = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": detail}]}]}
    response = await post(under_test, chat(of_chat))
    assert response.status_code == status, response.text
    async with under_test.client() as client:
        response = await client.post("/v1/responses", json=of_responses)
    assert response.status_code == status, response.text
    if status == 400:
        assert "detail" in response.json()["error"]["param"]


async def test_conversations_with_images_cannot_be_tokenized_alone(start_sighted):
    under_test = await start_sighted()
    async with under_test.client() as client:
        body = {"messages": chat(image_part(data_url(picture())))["messages"]}
        response = await client.post("/tokenize", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages[0].content[0]")
    assert "/tokenize takes no images" in error["message"]


async def test_images_of_listed_hosts_are_fetched(start_sighted, host):
    host.has("/cat", picture())
    under_test = await start_sighted(images=FROM_LOOPBACK)
    response = await post(under_test, chat(image_part(f"{host.url}/cat")))
    assert response.status_code == 200, response.text
    assert (await under_test.prefill.generated()).media == (picture(),)
    assert under_test.metric("kvferry_upload_bytes") == 0


async def test_fetched_images_count_as_uploads_until_the_answer_ends(start_sighted, host):
    host.has("/cat", picture() + bytes(5000))
    under_test = await start_sighted(images=FROM_LOOPBACK, max_upload_bytes=4000, max_body_bytes=4000)
    response = await post(under_test, chat(image_part(f"{host.url}/cat")))
    assert response.status_code == 400  # it would never fit
    assert "max_upload_bytes" in response.json()["error"]["message"]
    assert under_test.metric("kvferry_upload_bytes") == 0


async def test_one_bad_image_ends_the_fetches_of_the_others(start_sighted, host):
    host.pages["/slow"] = None
    under_test = await start_sighted(images=ImagesSection(allowed_hosts=("127.0.0.1",), fetch_timeout_s=60))
    body = chat(image_part(f"{host.url}/slow"), image_part(data_url(b"x")))
    await refused(under_test, body, "messages[0].content[1]")


@pytest.mark.parametrize(
    ("url", "content"),
    [
        ("data:;base64,aGVsbG8=", b"hello"),
        ("DATA:image/png;BASE64,aGVsbG8=", b"hello"),
        ("data:image/png;base64,aGVsbG8%3D", b"hello"),
        ("data:,hello%20you", b"hello you"),
    ],
)
def test_data_urls_are_read(url, content):
    assert decode_data_url(url, 100) == content


def test_data_urls_of_too_many_escapes_are_refused():
    with pytest.raises(InvalidRequest, match="send it as base64"):
        decode_data_url("data:," + "%41" * 65_537, 1 << 20)


@pytest.mark.parametrize("num_bytes", [99, 100, 101, 102])
@pytest.mark.parametrize("is_base64", [True, False])
def test_data_urls_are_taken_up_to_the_limit(num_bytes, is_base64):
    content = b"x" * num_bytes
    url = data_url(content) if is_base64 else "data:," + content.decode()
    if num_bytes <= 100:
        assert decode_data_url(url, 100) == content
    else:
        with pytest.raises(InvalidRequest, match="more than 100 bytes"):
            decode_data_url(url, 100)
