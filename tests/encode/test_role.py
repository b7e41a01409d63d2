"""Encode requests: split into images, joined into one answer."""

from __future__ import annotations

import pytest

from core.errors import EngineDead, Full, InvalidRequest
from core.request import EncodedImage, EngineCoreOutput
from core.wire.media import ECSeal, ECSource, MMFeature
from core.wire.messages import EncodeDone, EncodeFailed, EncodeRequest, ErrorInfo, Generate
from core.wire.sampling import SamplingParams
from encode.role import EncodeHandler

CAT, DOG, FOX = b"c" * 16, b"d" * 16, b"f" * 16


def message(*identifiers: bytes, **fields) -> EncodeRequest:
    features = tuple(
        MMFeature(identifier=identifier, offset=3 * index, length=3, num_embeds=3, media_index=index + 5)
        for index, identifier in enumerate(identifiers)
    )
    return EncodeRequest(**{"request_id": "r", "mm_features": features, "media": (b"",) * 5 + identifiers, **fields})


def encoded(number: int, identifier: bytes = CAT, request_id: str = "r", lease_ms: int = 1, **fields) -> EngineCoreOutput:
    seal = ECSeal(identifier=identifier, num_embeds=3, hidden_size=2, dtype="float32", digest=1)
    source = ECSource(seal=seal, connector="shelf", engine_id="e0", incarnation=1, lease_ms=lease_ms)
    times = {"was_cached": False, "queue_s": 0.25, "compute_s": 0.5, **fields}
    return EngineCoreOutput(f"{request_id}/{number}", [], finish_reason="stop", encoded=EncodedImage(source, **times))


def failed(number: int, error) -> EngineCoreOutput:
    return EngineCoreOutput(f"r/{number}", [], finish_reason="error", error=ErrorInfo.of(error))


@pytest.fixture
def handler():
    return EncodeHandler()


def test_each_distinct_image_is_one_engine_request(handler):
    requests = handler.on_encode(message(CAT, DOG, CAT, deadline_ms=2000, priority=3), 10.0)
    assert [request.request_id for request in requests] == ["r/0", "r/1"]
    assert [request.mm_features[0].identifier for request in requests] == [CAT, DOG]
    assert {(request.deadline, request.priority) for request in requests} == {(12.0, 3)}


def test_the_answer_comes_with_the_last_image(handler):
    handler.on_encode(message(CAT, DOG), 0.0)
    assert handler.on_outputs([encoded(1, DOG, was_cached=True, queue_s=1.0)], 0.0).replies == []
    result = handler.on_outputs([encoded(0)], 0.0)
    (reply,) = result.replies
    assert isinstance(reply, EncodeDone)
    assert {source.seal.identifier for source in reply.ec_sources} == {CAT, DOG}
    assert (reply.num_cached, reply.queue_ms, reply.encode_ms) == (1, 1000.0, 500.0)
    assert result.ended == ["r"]


def test_a_bad_image_is_named_and_the_others_are_released(handler):
    handler.on_encode(message(CAT, DOG), 0.0)
    result = handler.on_outputs([failed(1, InvalidRequest("it is damaged"))], 0.0)
    (reply,) = result.replies
    assert isinstance(reply, EncodeFailed)
    assert (reply.media_index, reply.error.code) == (6, "invalid_request")
    assert result.abort_ids == ["r/0"]
    assert result.ended == ["r"]
    assert handler.on_outputs([encoded(0)], 0.0).replies == []


def test_handoffs_that_will_not_be_read_are_released(handler):
    handler.on_encode(message(CAT, DOG), 0.0)
    first = encoded(0)
    handler.on_outputs([first], 0.0)
    assert handler.on_outputs([failed(1, InvalidRequest("it is damaged"))], 0.0).release_sources == [first.encoded.source]
    late = encoded(0)
    assert handler.on_outputs([late], 0.0).release_sources == [late.encoded.source]
    handler.on_encode(message(CAT, DOG), 0.0)
    handler.on_outputs([first], 0.0)
    assert handler.on_abort("r").release_sources == [first.encoded.source]


def test_a_failure_of_ours_names_no_image(handler):
    handler.on_encode(message(CAT), 0.0)
    (reply,) = handler.on_outputs([failed(0, Full("no room"))], 0.0).replies
    assert reply.media_index is None


def test_a_failure_of_ours_leaves_the_other_images_as_they_are(handler):
    handler.on_encode(message(CAT, DOG), 0.0)
    result = handler.on_outputs([failed(0, Full("no room"))], 0.0)
    assert (result.replies, result.abort_ids, result.ended) == ([], [], [])
    result = handler.on_outputs([encoded(1, DOG)], 0.0)
    (reply,) = result.replies
    assert isinstance(reply, EncodeDone)
    assert [source.seal.identifier for source in reply.ec_sources] == [DOG]
    assert result.ended == ["r"]
    assert [error.code for error in reply.errors] == ["store_full"]


def test_a_bad_image_ends_the_request_after_a_failure_of_ours_too(handler):
    handler.on_encode(message(CAT, DOG, FOX), 0.0)
    handler.on_outputs([failed(0, Full("no room"))], 0.0)
    result = handler.on_outputs([failed(1, InvalidRequest("it is damaged"))], 0.0)
    (reply,) = result.replies
    assert (reply.error.code, reply.media_index) == ("invalid_request", 6)
    assert result.abort_ids == ["r/2"]


def test_without_any_image_the_first_failure_is_the_answer(handler):
    handler.on_encode(message(CAT, DOG), 0.0)
    handler.on_outputs([failed(1, Full("no room"))], 0.0)
    (reply,) = handler.on_outputs([failed(0, EngineDead("gone"))], 0.0).replies
    assert isinstance(reply, EncodeFailed)
    assert (reply.error.code, reply.media_index) == ("store_full", None)


def test_an_abort_stops_what_is_not_done(handler):
    handler.on_encode(message(CAT, DOG), 0.0)
    handler.on_outputs([encoded(0)], 0.0)
    assert handler.on_abort("r").abort_ids == ["r/1"]
    assert handler.on_abort("r").abort_ids == []


def test_an_abort_after_the_answer_releases_its_leases(handler):
    handler.on_encode(message(CAT, DOG), 0.0)
    first, second = encoded(0), encoded(1, DOG)
    assert handler.on_outputs([first, second], 0.0).release_sources == []
    assert handler.on_abort("r").release_sources == [first.encoded.source, second.encoded.source]
    assert handler.on_abort("r").release_sources == []


def test_an_answer_is_remembered_only_while_its_leases_last(handler):
    for number, now in enumerate((0.0, 0.5, 1.5, 1.75)):
        handler.on_encode(message(CAT, request_id=f"r{number}"), now)
        handler.on_outputs([encoded(0, request_id=f"r{number}", lease_ms=1000)], now)
    released = [len(handler.on_abort(f"r{number}").release_sources) for number in range(4)]
    assert released == [0, 0, 1, 1]


def test_a_request_without_images_is_refused(handler):
    with pytest.raises(InvalidRequest):
        handler.on_encode(message(), 0.0)


def test_prompts_are_refused(handler):
    with pytest.raises(InvalidRequest, match="no prompts"):
        handler.on_generate(Generate(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams()), 0.0)
