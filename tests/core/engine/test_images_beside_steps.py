"""Engines that decode images on a thread of their own, around a model that sees images, with a decoder that a test holds."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import msgspec
import pytest

from core.engine.media.image_decode_thread import THREAD_NAME
from core.engine.thread import EngineThread
from core.wire.sampling import SamplingParams
from tests.support.tiny_smolvlm import encode_test_image

WAIT_S = 20.0
IMAGES = [encode_test_image(0), encode_test_image(1, 20, 64), encode_test_image(2, 64, 10)]
TEXT = ("hello, who are you?",)
ONE = (IMAGES[0], "what is in this image?")
SEVERAL = ("compare ", IMAGES[0], IMAGES[1], " and\n\n", IMAGES[2], "please")


class Running:
    """An engine thread and the thread of its images, which is held while ``gate`` is closed."""

    def __init__(self, built, mailbox) -> None:
        self.built = built
        self.mailbox = mailbox
        self.gate, self.has_begun = threading.Event(), threading.Event()
        self.decoded: list[bytes] = []
        self.bug: Exception | None = None
        reader = built.image_decode_thread._reader
        self._prepare, reader.prepare = reader.prepare, self.prepare
        self.thread = EngineThread(built.engine, mailbox.on_outputs, mailbox.on_death)
        built.image_decode_thread.start(self.thread.wake)
        self.thread.start()

    def prepare(self, content):
        assert threading.current_thread().name == THREAD_NAME
        self.has_begun.set()
        assert self.gate.wait(WAIT_S)
        if self.bug is not None:
            raise self.bug
        self.decoded.append(content)
        return self._prepare(content)

    def wait_for(self, *names):
        self.mailbox.wait(lambda: all(name in self.mailbox.ends for name in names))


@pytest.fixture
def start(build_smolvlm, make_mailbox):
    """Return a builder of running engines; at the end they are stopped, and nothing is left of any image."""
    started = []

    def start(**settings):
        started.append(Running(build_smolvlm(**settings), make_mailbox()))
        return started[-1]

    yield start
    for running in started:
        running.gate.set()
        assert running.thread.stop(WAIT_S)
        assert running.built.image_decode_thread.num_bytes == 0
        assert THREAD_NAME not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("async_scheduling", ["off", "on"])
def test_text_goes_on_while_an_image_is_decoded(start, image_router, async_scheduling):
    running = start(scheduler__async_scheduling=async_scheduling)
    running.thread.submit_add([image_router.request("image", ONE)])
    assert running.has_begun.wait(WAIT_S)
    running.thread.submit_add([image_router.request("text", TEXT)])
    running.wait_for("text")
    assert "image" not in running.mailbox.tokens
    running.gate.set()
    running.wait_for("image")
    image_router.tiny.assert_greedy(running.mailbox.tokens["text"], *TEXT)
    image_router.tiny.assert_greedy(running.mailbox.tokens["image"], *ONE)


@pytest.mark.parametrize("chunk", [256, 24])
def test_answers_are_those_of_transformers(start, image_router, chunk):
    running = start(scheduler__max_num_batched_tokens=chunk)
    running.gate.set()
    conversations = {"text": TEXT, "one": ONE, "several": SEVERAL, "image last": ("look at this: ", IMAGES[1])}
    running.thread.submit_add([image_router.request(name, parts) for name, parts in conversations.items()])
    running.wait_for(*conversations)
    for name, parts in conversations.items():
        image_router.tiny.assert_greedy(running.mailbox.tokens[name], *parts)
    assert sorted(running.decoded) == sorted(IMAGES)  # each once, in any number of requests


def test_a_damaged_image_ends_its_request_alone_and_names_its_place(start, image_router):
    running = start()
    running.gate.set()
    good = image_router.request("bad", SEVERAL)
    damaged = IMAGES[1][:-40]
    identifier = running.built.image_decode_thread._reader.identify(damaged)
    features = [msgspec.structs.replace(f, identifier=identifier) if f.media_index == 1 else f for f in good.mm_features]
    bad = replace(good, media=(good.media[0], damaged, good.media[2]), mm_features=features)
    running.thread.submit_add([bad, image_router.request("one", ONE)])
    running.wait_for("bad", "one")
    error = running.mailbox.ends["bad"].error
    assert (error.code, error.http_status, error.param) == ("invalid_request", 400, "images[1]")
    assert "image 1 cannot be used: it is damaged" in error.message
    image_router.tiny.assert_greedy(running.mailbox.tokens["one"], *ONE)
    assert not running.mailbox.deaths


def test_an_abort_while_its_image_is_decoded_leaves_nothing(start, image_router):
    running = start()
    running.thread.submit_add([image_router.request("gone", ONE), image_router.request("also", SEVERAL)])
    assert running.has_begun.wait(WAIT_S)
    running.thread.submit_abort(["gone", "also"])
    running.thread.submit_add([image_router.request("text", TEXT)])
    running.wait_for("text")
    assert not running.built.image_decode_thread._images.num_images
    running.gate.set()
    running.thread.submit_add([image_router.request("one", ONE)])
    running.wait_for("one")
    assert running.decoded == [IMAGES[0], IMAGES[0]]  # the one in progress, and again for the one that came
    assert running.mailbox.ends.keys() == {"text", "one"}


def test_a_bug_on_the_thread_ends_the_engine(start, image_router):
    running = start()
    running.bug = ZeroDivisionError("a bug")
    running.gate.set()
    running.thread.submit_add([image_router.request("image", ONE)])
    running.mailbox.wait(lambda: running.mailbox.deaths)
    assert running.mailbox.deaths == [running.bug]


def test_the_engine_sleeps_while_all_wait_for_an_image(start, image_router):
    running = start()
    running.thread.submit_add([image_router.request("image", ONE)])
    assert running.has_begun.wait(WAIT_S)
    running.thread.submit_add([replace(image_router.request("text", TEXT), sampling=SamplingParams(max_tokens=1))])
    running.wait_for("text")
    engine = running.built.engine
    end = time.monotonic() + WAIT_S
    while engine.has_work():  # one more step may be on its way
        assert time.monotonic() < end
        time.sleep(0.001)
    assert engine.has_requests()
    running.gate.set()
    running.wait_for("image")
    assert engine.stats.num_encoder_deferrals < 10
