"""The thread that prepares images: what it does beside the engine's, and how it ends."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from core.engine.media.image_decode_thread import THREAD_NAME, ImageDecodeThread
from core.errors import EncoderInputMissing, InvalidRequest
from core.wire.media import MMFeature

WAIT_S = 20.0


class HeldReader:
    """Makes of a file the array of its bytes, once ``gate`` is open; "bad" is a bad file, "bug" a bug of ours.

    For "big" there is no memory.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun: list[tuple[bytes, str]] = []

    def identify(self, content: bytes) -> bytes:
        return content.ljust(16, b".")

    def prepare(self, content: bytes) -> np.ndarray:
        self.begun.append((content, threading.current_thread().name))
        assert self.gate.wait(WAIT_S)
        if content == b"bad":
            raise InvalidRequest("it is damaged")
        if content == b"big":
            raise EncoderInputMissing("no memory")
        if content == b"bug":
            raise ZeroDivisionError("a bug")
        return np.frombuffer(content, dtype=np.uint8)

    def prepared_bytes(self, num_embeds: int) -> int:
        return num_embeds


class Bench:
    """A preparation that runs, and the engine's thread: the test."""

    def __init__(self) -> None:
        self.reader = HeldReader()
        self.images = ImageDecodeThread(self.reader, budget_bytes=8)
        self.woken = threading.Semaphore(0)

    def start(self) -> Bench:
        self.images.start(self.woken.release)
        return self

    def ask(self, *contents: bytes) -> list[bool]:
        self.images.begin_step()
        answers = [self.images.is_ready("r", feature(content), content) for content in contents]
        self.images.end_step()
        return answers

    def take(self, content: bytes) -> bytes:
        return self.images.take(feature(content).identifier, content).tobytes()

    def wait_for_wakeup(self) -> None:
        assert self.woken.acquire(timeout=WAIT_S)


def feature(content: bytes) -> MMFeature:
    size = len(content)
    return MMFeature(identifier=content.ljust(16, b"."), offset=0, length=size, num_embeds=size, media_index=0)


def poll(condition) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "condition never true"
        time.sleep(0.001)


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.reader.gate.set()
    bench.images.shutdown()
    assert THREAD_NAME not in {thread.name for thread in threading.enumerate()}


def test_without_the_thread_every_image_is_ready_and_prepared_by_whoever_takes_it(bench):
    bench.reader.gate.set()
    assert bench.ask(b"cat") == [True]
    assert bench.take(b"cat") == b"cat"
    assert bench.reader.begun == [(b"cat", threading.current_thread().name)]


def test_questions_are_answered_while_an_image_is_decoded(bench):
    bench.start()
    assert bench.ask(b"cat", b"dog") == [False, False]
    assert bench.ask(b"cat", b"dog") == [False, False]  # the gate is closed: nothing waits for it
    bench.reader.gate.set()
    for _ in range(2):
        bench.wait_for_wakeup()
    assert bench.ask(b"cat", b"dog") == [True, True]
    assert bench.images.num_bytes == 6
    assert (bench.take(b"cat"), bench.take(b"dog")) == (b"cat", b"dog")
    assert bench.reader.begun == [(b"cat", THREAD_NAME), (b"dog", THREAD_NAME)]
    assert bench.images.num_bytes == 0


def test_a_bad_image_is_ready_and_whoever_takes_it_is_told(bench):
    bench.reader.gate.set()
    bench.start().ask(b"bad", b"cat")
    for _ in range(2):
        bench.wait_for_wakeup()
    assert bench.ask(b"bad", b"cat") == [True, True]
    with pytest.raises(InvalidRequest, match="it is damaged"):
        bench.take(b"bad")
    assert bench.take(b"cat") == b"cat"


def test_an_image_that_there_is_no_memory_for_ends_alone_and_can_be_asked_for_again(bench):
    bench.reader.gate.set()
    bench.start().ask(b"big", b"cat")
    for _ in range(2):
        bench.wait_for_wakeup()
    assert bench.ask(b"big", b"cat") == [True, True]
    with pytest.raises(EncoderInputMissing):
        bench.take(b"big")
    assert bench.take(b"cat") == b"cat"
    assert bench.ask(b"big") == [False]
    bench.wait_for_wakeup()
    assert [content for content, _ in bench.reader.begun] == [b"big", b"cat", b"big"]


def test_another_file_under_an_identifier_is_not_decoded(bench):
    bench.reader.gate.set()
    bench.start()
    bench.images.begin_step()
    bench.images.is_ready("r", feature(b"cat"), b"dog")
    bench.images.end_step()
    bench.wait_for_wakeup()
    with pytest.raises(EncoderInputMissing, match="not the image that was announced"):
        bench.images.take(feature(b"cat").identifier, b"dog")
    assert bench.reader.begun == []


def test_a_bug_wakes_the_engine_and_ends_its_next_step(bench):
    bench.reader.gate.set()
    bench.start().ask(b"bug")
    bench.wait_for_wakeup()
    with pytest.raises(ZeroDivisionError):
        bench.images.begin_step()


def test_what_nobody_wants_any_more_is_dropped_when_it_is_decoded(bench):
    bench.start().ask(b"cat")
    bench.images.forget("r", [feature(b"cat")])
    bench.reader.gate.set()
    assert bench.ask(b"dog") == [False]
    while bench.ask(b"dog") != [True]:
        bench.wait_for_wakeup()
    assert bench.images.num_bytes == 3
    bench.images.forget("r", [feature(b"dog")])
    assert bench.images.num_bytes == 0


def test_shutting_down_waits_for_the_image_in_progress_and_begins_no_other(bench):
    bench.start().ask(b"cat", b"dog")
    poll(lambda: bench.reader.begun)
    closing = threading.Thread(target=bench.images.shutdown)
    closing.start()
    poll(lambda: not bench.images._images.num_images)
    bench.reader.gate.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    bench.images.shutdown()
    assert bench.images.num_bytes == 0
    assert [content for content, _ in bench.reader.begun] == [b"cat"]


def test_shutting_down_leaves_an_image_that_does_not_end_and_hears_nothing_of_it(bench, caplog):
    bench.start().ask(b"cat")
    poll(lambda: bench.reader.begun)
    bench.images.shutdown(timeout_s=0.0)
    assert "an image is still being decoded" in caplog.text
    (thread,) = (thread for thread in threading.enumerate() if thread.name == THREAD_NAME)
    assert thread.daemon  # so that the process may end
    bench.reader.gate.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert not bench.woken.acquire(blocking=False)
    assert bench.images.num_bytes == 0
