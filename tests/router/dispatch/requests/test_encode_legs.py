"""Images go to encode workers first, and no failure there keeps a request from its prefill worker."""

from __future__ import annotations

import msgspec
import pytest

from core.errors import EncoderInputMissing, EngineDead, Full, InvalidRequest, Overloaded
from core.wire.media import ECSeal, ECSource, MMFeature
from core.wire.messages import Abort, EncodeDone, EncodeFailed, EncodeRequest, ErrorInfo, Generate, Rejected, RequestFailed
from router.dispatch.request_state import RequestPhase

CAT, DOG, FOX = (bytes([number]) * 16 for number in (1, 2, 3))
FILES = {CAT: b"cat", DOG: b"dog", FOX: b"fox"}


def source(identifier: bytes, engine_id: str = "e0") -> ECSource:
    seal = ECSeal(identifier=identifier, num_embeds=2, hidden_size=4, dtype="float32", digest=7)
    return ECSource(seal=seal, connector="shared", engine_id=engine_id, incarnation=1, lease_ms=1000)


@pytest.fixture
def bench(make_bench):
    found = make_bench(encode_timeout_s=8.0, max_requests=9)
    for name in ("p0", "d0"):
        found.join(name, ec_connector="shared", host_id="here")
    found.join_encoder("e0")
    return found


def submit(bench, *images: bytes, request_id: str = "r1", **fields) -> None:
    features = tuple(
        MMFeature(identifier=image, offset=2 * index, length=2, num_embeds=2, media_index=index)
        for index, image in enumerate(images)
    )
    submission = bench.submission(
        request_id,
        prompt=20,
        mm_features=features,
        media=tuple(FILES[image] for image in images),
        media_places=tuple(f"messages[0].content[{index}]" for index in range(len(images))),
        **fields,
    )
    bench.do(bench.core.submit(submission, bench.now))


def asked(bench, name: str = "e0") -> EncodeRequest:
    return bench.to(name, EncodeRequest)[-1]


def done(bench, *images: bytes, name: str = "e0", request_id: str = "r1") -> None:
    bench.receive(name, EncodeDone(request_id=request_id, ec_sources=tuple(source(image, name) for image in images)))


def answer(bench, request_id: str = "r1") -> None:
    bench.prefill_done(request_id)
    bench.tokens(1, 51, 52, request_id=request_id, finish_reason="stop")


def test_embeddings_are_made_first_and_named_to_both_legs(bench):
    submit(bench, CAT, DOG)
    message = asked(bench)
    assert [feature.identifier for feature in message.mm_features] == [CAT, DOG]
    assert message.media == (b"cat", b"dog")
    assert not bench.to("p0", Generate)
    assert bench.count(RequestPhase.ENCODE) == 1
    done(bench, CAT, DOG)
    bench.prefill_done()
    for name in ("p0", "d0"):
        generate = bench.generated(name)
        assert [found.seal.identifier for found in generate.ec_sources] == [CAT, DOG]
        assert generate.media == (b"cat", b"dog")
        assert len(generate.mm_features) == 2
    bench.tokens(1, 51, finish_reason="stop")
    assert bench.encodes == [("e0", "done", 2)]
    bench.assert_idle()


def test_a_prompt_without_images_does_not_wait_for_an_encode_worker(bench):
    bench.submit()
    assert bench.generated("p0")
    assert not bench.to("e0", EncodeRequest)


def test_request_is_not_retried_on_weights_with_other_image_hashes(bench):
    for name in ("p1", "d1"):
        bench.join(name, ec_connector="shared", host_id="here", model_fingerprint=b"new")
    submit(bench, CAT, model_fingerprint=b"w")
    done(bench, CAT)
    assert bench.generated("p0")
    bench.leave("p0")
    assert not bench.to("p1", Generate)
    assert not bench.generated("d0").handoff  # alone, because it can read from no prefill worker


def test_request_whose_route_leaves_goes_to_workers_of_the_same_weights(bench):
    for name, weights in (("p1", b"new"), ("d1", b"new"), ("p2", b"w"), ("d2", b"w")):
        bench.join(name, ec_connector="shared", host_id="here", model_fingerprint=weights)
    submit(bench, CAT, model_fingerprint=b"w")
    reserved = bench.core.dispatcher.requests["r1"].attempt.prefill.engine_id
    bench.leave(reserved)
    done(bench, CAT)
    assert bench.generated({"p0": "p2", "p2": "p0"}[reserved]).ec_sources
    assert not bench.to("p1", Generate)


def test_a_request_with_images_does_not_begin_where_everything_is_refused_by_now(bench):
    submit(bench, CAT)
    assert bench.core.dispatcher.requests["r1"].attempt.prefill.engine_id == "p0"
    bench.fails("p0", ErrorInfo.of(EngineDead("it died")), "an earlier one")
    bench.join("p1", ec_connector="shared", host_id="here")
    done(bench, CAT)
    assert not bench.to("p0", Generate)
    assert bench.generated("p1").ec_sources


def test_time_without_a_route_is_not_that_of_the_encode_workers(bench, monkeypatch):
    tried = []
    restart = bench.core.dispatcher._restart
    monkeypatch.setattr(bench.core.dispatcher, "_restart", lambda *args: tried.append(bench.now) or restart(*args))
    submit(bench, CAT)
    bench.leave("p0")
    bench.leave("d0")
    bench.tick(1.0)
    done(bench, CAT)
    bench.tick(10.0)
    assert tried == [float(second) for second in range(1, 11)], "once at each tick"
    bench.join("a0", ec_connector="shared")
    assert bench.generated("a0").request_id == "r1"
    assert bench.ended == {}
    assert bench.core.dispatcher.requests["r1"].measurements.encode_s == 1.0


def test_one_image_named_twice_is_asked_for_once(bench):
    submit(bench, CAT, CAT)
    assert len(asked(bench).mm_features) == 1


@pytest.mark.parametrize(
    "facts",
    [{"ec_connector": "p2p"}, {"model_fingerprint": b"another"}, {"max_num_images": 0}],
    ids=["connector", "model", "full"],
)
def test_images_go_straight_to_the_prompt_if_no_encode_worker_fits(make_bench, facts):
    bench = make_bench()
    for name in ("p0", "d0"):
        bench.join(name, ec_connector="shared")
    bench.join_encoder("e0", **facts)
    submit(bench, CAT)
    assert not bench.to("e0", EncodeRequest)
    assert bench.generated("p0").media == (b"cat",)
    assert not bench.generated("p0").ec_sources


def test_images_go_straight_to_an_aggregated_worker_that_loads_no_embeddings(make_bench):
    bench = make_bench("a0")
    bench.join_encoder("e0")
    submit(bench, CAT)
    assert bench.generated("a0").media == (b"cat",)


def test_an_aggregated_worker_gets_embeddings_too(make_bench):
    bench = make_bench()
    bench.join("a0", ec_connector="shared")
    bench.join_encoder("e0")
    submit(bench, CAT)
    done(bench, CAT)
    assert len(bench.generated("a0").ec_sources) == 1
    bench.tokens(0, 51, peer="a0", finish_reason="stop")
    bench.assert_idle()


def test_an_image_goes_back_to_the_worker_that_has_embedded_it(bench):
    bench.join_encoder("e1")
    submit(bench, CAT)
    done(bench, CAT)
    answer(bench)
    for number in range(2, 5):
        submit(bench, CAT, request_id=f"r{number}")
        done(bench, CAT, request_id=f"r{number}")
        answer(bench, f"r{number}")
    assert len(bench.to("e0", EncodeRequest)) == 4
    assert not bench.to("e1", EncodeRequest)


def test_new_images_are_divided_among_encode_workers(bench):
    bench.join_encoder("e1")
    submit(bench, CAT, DOG)
    assert [len(asked(bench, name).mm_features) for name in ("e0", "e1")] == [1, 1]
    assert asked(bench, "e1").media == (b"", b"dog")
    done(bench, CAT, name="e0")
    assert not bench.to("p0", Generate)
    done(bench, DOG, name="e1")
    assert [found.engine_id for found in bench.generated("p0").ec_sources] == ["e0", "e1"]


def test_the_encode_worker_on_the_readers_host_is_preferred(bench):
    bench.join_encoder("e1", host_id="here")
    submit(bench, CAT, DOG)
    assert len(asked(bench, "e1").mm_features) == 2


@pytest.mark.parametrize("error", [EngineDead("it died"), Overloaded("no room")])
def test_a_failure_of_the_encode_worker_leaves_the_image_to_the_prompt(bench, error):
    submit(bench, CAT)
    bench.receive("e0", EncodeFailed(request_id="r1", error=ErrorInfo.of(error)))
    assert bench.generated("p0").media == (b"cat",)
    answer(bench)
    assert bench.error() is None
    submit(bench, CAT, request_id="r2")
    assert bench.generated("p0").request_id == "r2", "it takes no more for now"


def test_an_image_that_the_encode_worker_names_otherwise_is_left_to_the_prompt(bench):
    submit(bench, CAT)
    error = ErrorInfo.of(EncoderInputMissing("it is not the image that was announced"))
    bench.receive("e0", EncodeFailed(request_id="r1", error=error))
    assert bench.generated("p0").media == (b"cat",)
    answer(bench)
    assert bench.error() is None


def test_finish_message_of_another_role_from_an_encode_worker_is_accepted(bench):
    submit(bench, CAT)
    bench.receive("e0", RequestFailed(request_id="r1", error=ErrorInfo.of(InvalidRequest("it is draining"))))
    assert bench.generated("p0").media == (b"cat",)


def test_what_an_encode_worker_cannot_read_as_a_message_is_not_waited_for(bench):
    submit(bench, CAT)
    bench.receive("e0", Rejected(error=ErrorInfo(code="protocol_error", message="what?")))
    assert bench.generated("p0").media == (b"cat",)


def test_the_wait_for_embeddings_is_a_part_of_the_time_to_the_first_token(bench):
    submit(bench, CAT)
    bench.now = 0.75
    done(bench, CAT)
    bench.now = 1.0
    bench.prefill_done(queue_ms=50.0, prefill_ms=150.0)
    timing = next(update.prompt.timing for update in bench.updates["r1"] if update.prompt)
    assert (timing.encode_ms, timing.queue_ms, timing.prefill_ms, timing.relay_ms) == (750.0, 50.0, 150.0, 50.0)
    bench.submit("r2")
    bench.prefill_done("r2")
    assert next(update.prompt.timing for update in bench.updates["r2"] if update.prompt).encode_ms is None


def test_a_lost_encode_worker_is_not_waited_for(bench):
    submit(bench, CAT)
    bench.leave("e0")
    assert bench.generated("p0").media == (b"cat",)
    assert bench.encodes == [("e0", "peer_lost", 1)]
    answer(bench)
    bench.assert_idle()


def test_an_encode_worker_whose_link_was_lost_keeps_nothing_for_the_request(bench):
    submit(bench, CAT)
    encoder = bench.core.membership.encoders[0]
    bench.do(bench.core.on_message(encoder.peer, msgspec.structs.replace(encoder.facts, takeover=1), bench.now))
    assert bench.generated("p0").media == (b"cat",)
    assert bench.encodes == [("e0", "peer_lost", 1)]
    assert aborted(bench, "e0") == [("r1",)]
    done(bench, CAT)  # under way when the link was lost
    answer(bench)
    bench.assert_idle()


def test_a_silent_encode_worker_is_waited_for_until_the_limit_and_told_to_stop(bench):
    submit(bench, CAT)
    bench.tick(7.9)
    assert not bench.to("p0", Generate)
    bench.tick(8.0)
    assert bench.generated("p0").media == (b"cat",)
    assert [abort.request_ids for abort in bench.to("e0", Abort)] == [("r1",)]
    done(bench, CAT)
    assert len(bench.to("p0", Generate)) == 1
    answer(bench)
    bench.assert_idle()


def test_part_of_the_embeddings_is_better_than_none(bench):
    bench.join_encoder("e1")
    submit(bench, CAT, DOG)
    done(bench, CAT)
    bench.leave("e1")
    assert [found.seal.identifier for found in bench.generated("p0").ec_sources] == [CAT]


def test_a_bad_image_ends_the_request_and_is_named_as_the_client_did(bench):
    bench.join_encoder("e1")
    submit(bench, CAT, DOG)
    failed = EncodeFailed(request_id="r1", error=ErrorInfo.of(InvalidRequest("it is cut off")), media_index=1)
    bench.receive("e1", failed)
    error = bench.error()
    assert (error.code, error.http_status, error.param) == ("invalid_request", 400, "messages[0].content[1]")
    assert error.message.endswith("it is cut off")
    assert bench.to("e0", Abort)
    assert not bench.to("p0", Generate)
    bench.assert_idle()


def test_a_bad_image_that_a_prefill_worker_finds_is_named_as_the_client_did(make_bench):
    bench = make_bench("p0", "d0")
    submit(bench, CAT, DOG)
    bad = InvalidRequest("image 1 cannot be used: it is cut off", param="images[1]")
    bench.fails("p0", ErrorInfo.of(bad))
    error = bench.error()
    assert (error.http_status, error.param) == (400, "messages[0].content[1]")
    assert error.message == "messages[0].content[1]: the image cannot be used: it is cut off"


def test_an_abort_reaches_the_encode_workers(bench):
    submit(bench, CAT)
    bench.do(bench.core.abort("r1", "client", 0.0))
    assert [abort.request_ids for abort in bench.to("e0", Abort)] == [("r1",)]
    assert not bench.to("p0", Abort)
    bench.assert_idle()


def aborted(bench, name: str) -> list[tuple[str, ...]]:
    return [abort.request_ids for abort in bench.to(name, Abort)]


def test_an_abort_releases_embeddings_that_no_worker_has_been_told_of(bench):
    bench.join_encoder("e1")
    submit(bench, CAT, DOG)
    done(bench, CAT)
    bench.do(bench.core.abort("r1", "client", 0.0))
    assert [aborted(bench, name) for name in ("e0", "e1")] == [[("r1",)], [("r1",)]]
    bench.assert_idle()


def test_an_abort_while_there_is_no_route_releases_all_embeddings(bench):
    submit(bench, CAT)
    bench.leave("p0")
    bench.leave("d0")
    done(bench, CAT)
    bench.do(bench.core.abort("r1", "client", 0.0))
    assert aborted(bench, "e0") == [("r1",)]


def test_embeddings_that_a_worker_has_been_told_of_are_its_own_to_release(bench):
    submit(bench, CAT)
    done(bench, CAT)
    bench.do(bench.core.abort("r1", "client", 0.0))
    assert aborted(bench, "p0") == [("r1",)]
    assert not aborted(bench, "e0")


def refuse(bench, name: str, request_id: str) -> None:
    bench.fails(name, ErrorInfo.of(Overloaded("it holds too many choices")), request_id)


def test_embeddings_of_a_prompt_that_its_workers_refuse_are_released(bench):
    bench.join("p1", ec_connector="shared", host_id="here")
    submit(bench, CAT)
    done(bench, CAT)
    first = "p0" if bench.to("p0", Generate) else "p1"
    refuse(bench, first, "r1")
    assert not aborted(bench, "e0"), "another worker may read them"
    second = {"p0": "p1", "p1": "p0"}[first]
    assert bench.generated(second).ec_sources
    refuse(bench, second, "r1.2")
    bench.do(bench.core.abort("r1", "client", bench.now))
    assert aborted(bench, "e0") == [("r1",)], "by the name of the attempt that asked for them"
    bench.assert_idle()


def test_embeddings_are_not_released_for_a_worker_that_refuses_a_later_attempt(bench):
    bench.join("p1", ec_connector="shared", host_id="here")
    submit(bench, CAT)
    done(bench, CAT)
    first, second = ("p0", "p1") if bench.to("p0", Generate) else ("p1", "p0")
    bench.leave(first)
    refuse(bench, second, "r1.2")
    bench.do(bench.core.abort("r1", "client", bench.now))
    assert not aborted(bench, "e0"), "the first worker was told of them"


def test_embeddings_are_not_released_for_a_decode_worker_that_refuses(bench):
    submit(bench, CAT)
    done(bench, CAT)
    bench.prefill_done()
    refuse(bench, "d0", "r1")
    bench.do(bench.core.abort("r1", "client", bench.now))
    assert not aborted(bench, "e0"), "the prefill worker was told of them"


def test_an_image_that_an_encode_worker_could_not_embed_is_not_counted_as_done(bench):
    submit(bench, CAT, DOG, FOX)
    full = ErrorInfo.of(Full("no room"))
    bench.receive("e0", EncodeDone(request_id="r1", ec_sources=(source(DOG),), errors=(full, full)))
    assert sorted(bench.encodes) == [("e0", "done", 1), ("e0", "store_full", 2)]
    assert len(bench.generated("p0").ec_sources) == 1


def test_images_of_whose_failure_an_encode_worker_says_nothing_are_counted_apart(bench):
    submit(bench, CAT, DOG)
    done(bench, DOG)
    assert sorted(bench.encodes) == [("e0", "done", 1), ("e0", "not_embedded", 1)]


def test_a_request_whose_deadline_is_near_does_not_wait_for_longer(make_bench):
    bench = make_bench(request_timeout_s=3.0, encode_timeout_s=8.0)
    bench.join("a0", ec_connector="shared")
    bench.join_encoder("e0")
    submit(bench, CAT)
    assert asked(bench).deadline_ms == 3000
    bench.tick(3.0)
    assert bench.error().code == "deadline_exceeded"
    assert bench.to("e0", Abort)
    bench.assert_idle()


def test_a_prefill_worker_lost_meanwhile_is_replaced(bench):
    submit(bench, CAT)
    bench.join("p1", ec_connector="shared", host_id="here")
    bench.leave("p0")
    done(bench, CAT)
    assert bench.generated("p1").ec_sources
    bench.prefill_done(peer="p1")
    bench.tokens(1, 51, finish_reason="stop")
    bench.assert_idle()


def test_a_request_that_lost_its_worker_meanwhile_waits_if_the_next_one_is_full(bench):
    submit(bench, CAT)
    bench.join("p1", ec_connector="shared", host_id="here")
    bench.leave("p0")
    done(bench, CAT)
    bench.fails("p1", ErrorInfo.of(Overloaded("full")))
    assert "r1" not in bench.ended
    bench.tick(1.0)
    assert bench.generated("p1").request_id == "r1.2"


def test_with_no_prefill_worker_left_a_decode_worker_embeds_and_serves_alone(bench):
    submit(bench, CAT)
    bench.leave("p0")
    done(bench, CAT)
    alone = bench.generated("d0")
    assert (alone.handoff, alone.kv_handoff, alone.choices) == (False, None, ())
    assert alone.media


def test_a_second_attempt_uses_the_embeddings_of_the_first(bench):
    bench.join("p1", ec_connector="shared", host_id="here")
    submit(bench, CAT)
    done(bench, CAT)
    bench.leave("p0")
    assert bench.generated("p1").request_id == "r1.2"
    assert bench.generated("p1").ec_sources
    assert len(bench.to("e0", EncodeRequest)) == 1


def test_unrequested_embeddings_are_not_passed_on(bench):
    submit(bench, CAT)
    done(bench, CAT, FOX)
    assert [found.seal.identifier for found in bench.generated("p0").ec_sources] == [CAT]


def test_encode_workers_alone_make_no_route(make_bench):
    bench = make_bench()
    bench.join_encoder("e0")
    assert bench.core.not_ready_reason == "no worker has registered"
