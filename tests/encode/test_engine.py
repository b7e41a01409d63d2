"""The engine of an encode worker: each image computed once, however many ask for it and whenever."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from core.ec_connector import ECConnectorWorker, EmbeddingsLayout
from core.engine.media.image_decode_thread import BUDGET_BYTES, ImageDecodeThread
from core.errors import EncoderInputMissing, EngineDead, Full, InvalidRequest
from core.request import ECConnectorOutput, NewRequest
from core.testing.clock import FakeClock
from core.wire.media import ECSeal, ECSource, MMFeature
from core.wire.messages import ErrorInfo
from core.wire.sampling import SamplingParams
from encode.engine import EncodeEngine
from encode.metrics import EncodeMetrics

CAT, DOG, FOX = b"cat", b"dog", b"fox"
WAIT_S = 20.0


def name_of(content: bytes) -> bytes:
    return content.ljust(16, b".")


class FileEncoder:
    """Embeds a file as one row per byte; a file that starts with "bad" is damaged."""

    layout = EmbeddingsLayout(hidden_size=2, dtype="float32")

    def __init__(self) -> None:
        self.encoded: list[bytes] = []

    def identify(self, content: bytes) -> bytes:
        return name_of(content)

    def prepare(self, content: bytes) -> np.ndarray:
        if content.startswith(b"bad"):
            raise InvalidRequest("it is damaged")
        return np.frombuffer(content, dtype=np.uint8)

    def prepared_bytes(self, num_embeds: int) -> int:
        return num_embeds

    def embed(self, tiles: np.ndarray) -> torch.Tensor:
        self.encoded.append(tiles.tobytes())
        return torch.ones(len(tiles), 2)


class ShelfConnector(ECConnectorWorker):
    """Keeps what is saved; reports it at once, or when ``is_slow``, by ``let_go``. Every source has a lease of its own."""

    def __init__(self) -> None:
        self.kept: set[bytes] = set()
        self.is_slow = False
        self.room = 1000  # embeddings, of all items
        self.num_asked = 0  # for room
        self.error: Exception | None = None
        self.num_leases = 0
        self.is_shut_down = 0
        self._pending: list[bytes] = []
        self._output = ECConnectorOutput()

    def register_caches(self, layout) -> None:
        self.layout = layout

    def start_load_caches(self, encoder_cache, metadata) -> None:
        raise AssertionError("an encode worker loads nothing")

    def save_caches(self, encoder_cache, identifier) -> None:
        assert encoder_cache[identifier].shape[1] == self.layout.hidden_size
        self.room -= len(encoder_cache[identifier])
        self._pending.append(identifier)
        if not self.is_slow:
            self.let_go()

    def let_go(self) -> None:
        for identifier in self._pending:
            self.kept.add(identifier)
            self._output.finished_saving[identifier] = self.source(identifier)
        self._pending = []

    def refuse(self) -> None:
        for identifier in self._pending:
            self._output.failed_saving[identifier] = ErrorInfo.of(Full("no room"))
        self._pending = []

    def source(self, identifier: bytes) -> ECSource:
        self.num_leases += 1
        seal = ECSeal(identifier=identifier, num_embeds=3, hidden_size=2, dtype="float32", digest=1)
        return ECSource(
            seal=seal, connector="shelf", engine_id="e0", incarnation=1, lease_ms=1, payload=b"%d" % self.num_leases
        )

    def has_room(self, num_embeds):
        self.num_asked += 1
        return num_embeds <= self.room

    def find_source(self, identifier):
        return self.source(identifier) if identifier in self.kept else None

    def get_finished(self, finished_req_ids):
        if self.error is not None:
            raise self.error
        output, self._output = self._output, ECConnectorOutput()
        return output

    def shutdown(self) -> None:
        self.is_shut_down += 1


@pytest.fixture
def make_engine():
    def make(budget_bytes: int = BUDGET_BYTES, **settings) -> SimpleNamespace:
        encoder, connector, registry, clock = FileEncoder(), ShelfConnector(), CollectorRegistry(), FakeClock()
        image_decode_thread = ImageDecodeThread(encoder, budget_bytes)
        options = {"max_batch_images": 2, **settings}
        engine = EncodeEngine(encoder, connector, image_decode_thread, EncodeMetrics(registry), clock, **options)

        def counted(outcome: str) -> float:
            return registry.get_sample_value("kvferry_encoder_images_total", {"outcome": outcome})

        return SimpleNamespace(
            engine=engine,
            encoder=encoder,
            connector=connector,
            image_decode_thread=image_decode_thread,
            clock=clock,
            counted=counted,
        )

    return make


@pytest.fixture
def bench(make_engine):
    return make_engine()


def request(request_id: str, content: bytes, **fields) -> NewRequest:
    feature = MMFeature(identifier=name_of(content), offset=0, length=3, num_embeds=3, media_index=1)
    defaults = {"mm_features": (feature,), "media": (b"", content)}
    return NewRequest(request_id=request_id, prompt_token_ids=(), sampling=SamplingParams(), **{**defaults, **fields})


def run(engine: EncodeEngine) -> dict[str, object]:
    outputs = {}
    while engine.has_work():
        for output in engine.step():
            assert output.request_id not in outputs
            outputs[output.request_id] = output
    return outputs


def test_an_image_is_computed_and_told_where_it_lies(bench):
    bench.engine.add_request(request("r/0", CAT))
    (output,) = run(bench.engine).values()
    assert output.finish_reason == "stop"
    assert output.encoded.source.seal.identifier == name_of(CAT)
    assert not output.encoded.was_cached
    assert bench.engine.stats.num_waiting == bench.engine.stats.num_running == 0


def test_requests_for_one_image_are_answered_together_each_by_its_own_lease(bench):
    for number in range(3):
        bench.engine.add_request(request(f"r{number}/0", CAT))
    outputs = run(bench.engine)
    assert bench.encoder.encoded == [CAT]
    assert len({output.encoded.source.payload for output in outputs.values()}) == 3
    assert [output.encoded.was_cached for output in outputs.values()] == [False, True, True]
    assert (bench.counted("computed"), bench.counted("cached")) == (1, 2)


def test_a_repeated_image_is_not_computed_again(bench):
    for number in range(3):
        bench.engine.add_request(request(f"r{number}/0", CAT))
        (output,) = run(bench.engine).values()
        assert output.encoded.was_cached is (number > 0)
    assert bench.encoder.encoded == [CAT]


def test_an_image_that_is_gone_is_computed_again(bench):
    bench.engine.add_request(request("r0/0", CAT))
    run(bench.engine)
    bench.connector.kept.clear()
    bench.engine.add_request(request("r1/0", CAT))
    assert run(bench.engine)["r1/0"].encoded.was_cached is False
    assert bench.encoder.encoded == [CAT, CAT]


def test_who_asks_while_an_image_is_being_saved_is_answered_with_the_others(bench):
    bench.connector.is_slow = True
    bench.engine.add_request(request("r0/0", CAT))
    assert bench.engine.step() == []
    assert bench.engine.stats.num_running == 1
    bench.engine.add_request(request("r1/0", CAT))
    assert bench.engine.step() == []
    bench.connector.let_go()
    bench.engine.wake()
    assert set(run(bench.engine)) == {"r0/0", "r1/0"}
    assert bench.encoder.encoded == [CAT]


def test_nothing_is_done_while_there_is_nothing_to_do(bench):
    bench.connector.is_slow = True
    bench.engine.add_request(request("r0/0", CAT))
    bench.engine.step()
    assert not bench.engine.has_work()


def test_a_step_computes_a_batch_and_no_more(bench):
    for number, content in enumerate((CAT, DOG, FOX)):
        bench.engine.add_request(request(f"r{number}/0", content))
    assert len(bench.engine.step()) == 2
    assert bench.engine.stats.num_waiting == 1
    assert len(bench.engine.step()) == 1


def test_known_images_do_not_count_as_computed_ones(make_engine):
    bench = make_engine(max_batch_images=1)
    for content in (CAT, DOG):
        bench.engine.add_request(request(content.decode(), content))
    run(bench.engine)
    for number, content in enumerate((CAT, DOG, FOX)):
        bench.engine.add_request(request(f"r{number}/0", content))
    assert len(bench.engine.step()) == 3


@pytest.mark.parametrize(("by_priority", "order"), [(False, [DOG, CAT]), (True, [CAT, DOG])])
def test_priorities_count_where_they_are_to(make_engine, by_priority, order):
    bench = make_engine(by_priority=by_priority)
    bench.engine.add_request(request("r0/0", DOG, priority=5))
    bench.engine.add_request(request("r1/0", CAT, priority=-5))
    run(bench.engine)
    assert bench.encoder.encoded == order


def test_an_image_becomes_as_urgent_as_its_most_urgent_request(make_engine):
    bench = make_engine(by_priority=True, max_batch_images=1)
    bench.engine.add_request(request("r0/0", DOG, priority=5))
    bench.engine.add_request(request("r1/0", CAT, priority=4))
    bench.engine.add_request(request("r2/0", DOG, priority=3))
    assert {output.request_id for output in bench.engine.step()} == {"r0/0", "r2/0"}


def test_an_aborted_image_is_not_computed(bench):
    bench.engine.add_request(request("r0/0", CAT))
    assert bench.engine.abort_requests(["r0/0", "unknown"]) == ["r0/0"]
    assert run(bench.engine) == {}
    assert bench.encoder.encoded == []


def test_an_abort_leaves_the_image_to_others(bench):
    bench.engine.add_request(request("r0/0", CAT))
    bench.engine.add_request(request("r1/0", CAT))
    bench.engine.abort_requests(["r0/0"])
    assert set(run(bench.engine)) == {"r1/0"}


def test_a_late_report_of_an_aborted_image_answers_no_request(bench):
    bench.connector.is_slow = True
    bench.engine.add_request(request("r0/0", CAT))
    bench.engine.step()
    bench.engine.abort_requests(["r0/0"])
    bench.connector.let_go()
    bench.engine.wake()
    assert run(bench.engine) == {}


def test_a_bad_image_fails_alone(bench):
    bench.engine.add_request(request("r0/0", b"bad"))
    bench.engine.add_request(request("r1/0", CAT))
    outputs = run(bench.engine)
    assert (outputs["r0/0"].error.code, outputs["r0/0"].finish_reason) == ("invalid_request", "error")
    assert outputs["r1/0"].encoded is not None
    assert bench.counted("bad") == 1


def test_an_image_with_another_number_of_embeddings_than_announced_is_left_to_others(bench):
    bench.engine.add_request(request("r0/0", b"mouse"))
    assert run(bench.engine)["r0/0"].error.code == "encoder_input_missing"
    assert bench.counted("failed") == 1


def test_an_image_under_anothers_name_is_left_to_others(bench):
    with pytest.raises(EncoderInputMissing, match="not the image"):
        bench.engine.add_request(request("r0/0", CAT, media=(b"", DOG)))


def test_a_worker_that_names_images_otherwise_than_the_router_says_so_once(bench, caplog):
    for name in ("r0/0", "r1/0"):
        with pytest.raises(EncoderInputMissing):
            bench.engine.add_request(request(name, CAT, media=(b"", DOG)))
    assert [record.message.split()[0] for record in caplog.records] == ["event=image_named_otherwise"]


@pytest.mark.parametrize("media", [(), (CAT,), (CAT, b"")])
def test_a_request_without_its_file_is_refused(bench, media):
    with pytest.raises(EncoderInputMissing):
        bench.engine.add_request(request("r0/0", CAT, media=media))


def test_what_cannot_be_offered_fails(bench):
    bench.connector.is_slow = True
    bench.engine.add_request(request("r0/0", CAT))
    bench.engine.step()
    bench.connector.refuse()
    bench.engine.wake()
    assert run(bench.engine)["r0/0"].error.code == "store_full"
    assert bench.counted("failed") == 1


def test_what_there_is_no_room_for_is_not_computed(bench):
    bench.connector.room = 2
    bench.connector.kept.add(name_of(DOG))
    for name, content in (("r0/0", CAT), ("r1/0", DOG)):
        bench.engine.add_request(request(name, content))
    outputs = run(bench.engine)
    assert outputs["r0/0"].error.code == "store_full"
    assert outputs["r1/0"].encoded is not None, "it is there already"
    assert bench.encoder.encoded == []
    assert bench.counted("failed") == 1


def test_an_image_takes_the_room_of_the_next_ones_of_its_batch(bench):
    bench.connector.room = 3
    for name, content in (("r0/0", CAT), ("r1/0", DOG)):
        bench.engine.add_request(request(name, content))
    outputs = {output.request_id: output for output in bench.engine.step()}
    assert outputs["r0/0"].encoded is not None
    assert outputs["r1/0"].error.code == "store_full"
    assert bench.encoder.encoded == [CAT]


def test_a_lack_of_room_fails_only_images_whose_turn_it_is(make_engine):
    bench = make_engine(max_batch_images=4)
    for number in range(100):
        bench.engine.add_request(request(f"r{number}/0", b"%03d" % number))
    outputs = []
    for number in range(25):
        if number % 3 == 0:  # readers have released everything
            bench.connector.room = 8 * 3
        outputs += bench.engine.step()
        assert bench.connector.num_asked == 4 * (number + 1)
    encoded = [output for output in outputs if output.encoded is not None]
    assert len(outputs) == 100
    assert len(encoded) == len(bench.encoder.encoded) == 68


def test_a_dead_connector_ends_the_engine(bench):
    bench.connector.error = EngineDead("gone")
    bench.engine.wake()
    with pytest.raises(EngineDead):
        bench.engine.step()


def test_times_are_reported(bench):
    bench.connector.is_slow = True
    bench.engine.add_request(request("r0/0", CAT))
    bench.clock.advance(2.0)
    bench.engine.step()
    bench.clock.advance(0.5)
    bench.connector.let_go()
    bench.engine.wake()
    encoded = run(bench.engine)["r0/0"].encoded
    assert (encoded.queue_s, encoded.compute_s) == (2.0, 0.5)


def test_the_connector_is_shut_down_once(bench):
    bench.engine.shutdown()
    bench.engine.shutdown()
    assert bench.connector.is_shut_down == 1


# ---- with a thread that decodes --------------------------------------------------------------------------------------


class Beside:
    """An engine whose images are decoded on a thread, which is held while ``gate`` is closed."""

    def __init__(self, bench: SimpleNamespace) -> None:
        self.engine, self.encoder, self.connector = bench.engine, bench.encoder, bench.connector
        self.image_decode_thread = bench.image_decode_thread
        self.gate, self.has_begun, self.woken = threading.Event(), threading.Event(), threading.Semaphore(0)
        self.decoded: list[bytes] = []
        self._prepare, self.encoder.prepare = self.encoder.prepare, self.prepare
        self.image_decode_thread.start(self.woken.release)

    def prepare(self, content: bytes) -> np.ndarray:
        self.has_begun.set()
        assert self.gate.wait(WAIT_S)
        self.decoded.append(content)
        return self._prepare(content)

    def let_decode(self, count: int) -> None:
        """Open the gate, and wait until so many images are decoded."""
        self.gate.set()
        for _ in range(count):
            assert self.woken.acquire(timeout=WAIT_S)
        self.engine.wake()


@pytest.fixture
def beside(bench):
    beside = Beside(bench)
    yield beside
    beside.gate.set()
    beside.engine.shutdown()
    assert beside.image_decode_thread.num_bytes == 0


def test_while_an_image_is_decoded_the_engine_sleeps_and_takes_others_in(beside):
    beside.engine.add_request(request("r0/0", CAT))
    assert run(beside.engine) == {}
    beside.connector.kept.add(name_of(DOG))
    beside.engine.add_request(request("r1/0", DOG))
    assert run(beside.engine).keys() == {"r1/0"}
    beside.let_decode(1)
    assert run(beside.engine).keys() == {"r0/0"}
    assert beside.image_decode_thread.num_bytes == 0


def test_an_abort_has_its_turn_while_an_image_is_decoded(beside):
    for number, content in enumerate((CAT, DOG, FOX)):
        beside.engine.add_request(request(f"r{number}/0", content))
    assert run(beside.engine) == {}
    assert beside.has_begun.wait(WAIT_S)
    assert beside.engine.abort_requests(["r0/0", "r1/0"]) == ["r0/0", "r1/0"]
    assert run(beside.engine) == {}
    beside.let_decode(2)
    assert run(beside.engine).keys() == {"r2/0"}
    assert beside.encoder.encoded == [FOX]
    assert beside.decoded == [CAT, FOX]  # the one in progress, and the one that a request needs
    assert beside.image_decode_thread.num_bytes == 0


def test_the_next_images_are_decoded_while_a_batch_is_computed(beside, monkeypatch):
    contents = [b"%d.." % number for number in range(3)]
    for content in contents:
        beside.engine.add_request(request(content.decode(), content))
    assert run(beside.engine) == {}
    beside.let_decode(3)
    more = b"4.."
    beside.engine.add_request(request("more", more))
    embed = beside.encoder.embed

    def wait_and_embed(tiles):
        assert beside.woken.acquire(timeout=WAIT_S)
        beside.woken.release()
        return embed(tiles)

    monkeypatch.setattr(beside.encoder, "embed", wait_and_embed)
    assert {output.request_id for output in beside.engine.step()} == {"0..", "1.."}
    assert beside.decoded == [*contents, more]
    assert run(beside.engine).keys() == {"2..", "more"}


@pytest.mark.parametrize("num_bytes", [6, 5, 2])  # room for a batch of two images, for one, and for none
def test_a_batch_that_leaves_no_room_beside_it_does_not_keep_the_others_waiting(make_engine, num_bytes):
    beside = Beside(make_engine(budget_bytes=num_bytes))
    contents = [b"%d.." % number for number in range(7)]
    for content in contents:
        beside.engine.add_request(request(content.decode(), content))
    answered = run(beside.engine).keys()
    while len(answered) < len(contents):
        beside.let_decode(1)
        answered |= run(beside.engine).keys()
    assert beside.encoder.encoded == contents
    assert not beside.engine.has_work()
    beside.engine.shutdown()


def test_the_step_after_a_batch_that_finds_nothing_decoded_is_the_last(make_engine):
    beside = Beside(make_engine(budget_bytes=3))
    for content in (b"0..", b"1.."):
        beside.engine.add_request(request(content.decode(), content))
    assert run(beside.engine) == {}
    beside.let_decode(1)
    beside.gate.clear()
    assert len(beside.engine.step()) == 1
    assert beside.engine.has_work()
    assert beside.engine.step() == []
    assert not beside.engine.has_work()
    beside.let_decode(1)
    assert run(beside.engine).keys() == {"1.."}
    beside.engine.shutdown()


@pytest.mark.parametrize(("by_priority", "order"), [(False, [DOG, CAT]), (True, [CAT, DOG])])
def test_images_are_decoded_in_the_order_in_which_they_are_computed(make_engine, by_priority, order):
    beside = Beside(make_engine(by_priority=by_priority))
    beside.engine.add_request(request("r0/0", DOG, priority=5))
    beside.engine.add_request(request("r1/0", CAT, priority=-5))
    assert run(beside.engine) == {}
    beside.let_decode(2)
    assert run(beside.engine).keys() == {"r0/0", "r1/0"}
    assert beside.decoded == beside.encoder.encoded == order
    beside.engine.shutdown()


def test_the_pixels_of_images_that_there_is_no_room_for_are_dropped(beside):
    beside.connector.room = 3
    for number, content in enumerate((CAT, DOG)):
        beside.engine.add_request(request(f"r{number}/0", content))
    assert run(beside.engine) == {}
    beside.let_decode(2)
    outputs = run(beside.engine)
    assert (outputs["r0/0"].error, outputs["r1/0"].error.code) == (None, "store_full")
    assert beside.encoder.encoded == [CAT]
    assert beside.image_decode_thread.num_bytes == 0


def test_an_image_that_waits_to_be_decoded_waits_for_room_too(beside):
    beside.connector.room = 0
    beside.engine.add_request(request("r0/0", CAT))
    assert run(beside.engine) == {}
    beside.connector.room = 3
    beside.let_decode(1)
    assert run(beside.engine)["r0/0"].encoded is not None


def test_a_bad_image_fails_alone_when_it_is_decoded(beside):
    beside.engine.add_request(request("r0/0", b"bad"))
    beside.engine.add_request(request("r1/0", CAT))
    assert run(beside.engine) == {}
    beside.let_decode(2)
    outputs = run(beside.engine)
    assert (outputs["r0/0"].error.code, outputs["r1/0"].error) == ("invalid_request", None)


def test_a_bug_on_the_thread_ends_the_engine(beside, monkeypatch):
    def broken(content):
        raise ZeroDivisionError

    monkeypatch.setattr(beside.encoder, "prepare", broken)
    beside.engine.add_request(request("r0/0", CAT))
    assert beside.engine.step() == []
    beside.let_decode(1)
    with pytest.raises(ZeroDivisionError):
        beside.engine.step()
