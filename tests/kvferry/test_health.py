"""A live process that does no work is replaced; one that is slow to start, or was paused with us, is left alone."""

from __future__ import annotations

import http.server
import socket
import threading
from contextlib import contextmanager, suppress

import pytest

from core.clock import SystemClock
from kvferry.health import HealthJudge, HealthLimits, HealthWatch, ProbeResult, WatchedProcess
from kvferry.http_get import NoAnswer, get

LIMITS = HealthLimits(interval_s=2.0, timeout_s=5.0, max_failures=3, max_silence_s=20.0, max_start_s=100.0)
WELL, STUCK, SILENT = ProbeResult(), ProbeResult(reason="engine stuck"), ProbeResult(is_silent=True)


class Checks:
    """Feeds a judge with one answer every interval; a silent one takes its whole time-out."""

    def __init__(self):
        self.judge = HealthJudge(LIMITS, started_at=0.0)
        self.now = 0.0

    def check(self, answer, *, late_s=0.0, took_s=0.0):
        self.now += LIMITS.interval_s + late_s
        asked_at, self.now = self.now, self.now + (took_s or (LIMITS.timeout_s if answer.is_silent else 0.1))
        return self.judge.judge(answer, asked_at, self.now)

    def until_replaced(self, answer, most=100):
        for number in range(1, most + 1):
            reason = self.check(answer)
            if reason is not None:
                return number, reason
        return most, None


@pytest.fixture
def checks():
    return Checks()


@pytest.fixture
def started(checks):
    assert checks.check(WELL) is None
    assert checks.judge.has_started
    return checks


def test_process_that_says_it_is_unwell_is_replaced_after_some_answers_in_a_row(started):
    assert started.until_replaced(STUCK) == (3, "engine stuck")


def test_one_good_answer_begins_the_count_again(started):
    answers = [STUCK, STUCK, WELL, STUCK, STUCK, WELL]
    assert [started.check(answer) for answer in answers] == [None] * 6


def test_process_that_does_not_answer_is_replaced_after_a_bounded_time(started):
    number, reason = started.until_replaced(SILENT)
    assert number == 4  # 7 s each, the first counts from its question
    assert reason == "no answer to /health for 26 s"


def test_process_that_thaws_in_time_is_left_alone(started):
    assert [started.check(answer) for answer in [SILENT, SILENT, WELL] * 5] == [None] * 15


def test_process_loading_its_model_may_be_silent_or_refuse_until_start_timeout(checks):
    answers = [SILENT, STUCK, STUCK, STUCK, STUCK] * 4
    assert [checks.check(answer) for answer in answers] == [None] * 20
    assert checks.now < LIMITS.max_start_s


def test_process_that_never_starts_is_replaced(checks):
    _, reason = checks.until_replaced(SILENT)
    assert reason == "not started after 100 s"
    assert LIMITS.max_start_s <= checks.now < LIMITS.max_start_s + 10


@pytest.mark.parametrize("pause", [{"late_s": 60.0}, {"took_s": 60.0}])
def test_pause_of_the_supervisor_itself_is_held_against_no_child(started, pause):
    assert [started.check(answer) for answer in (SILENT, SILENT, STUCK, STUCK)] == [None] * 4
    assert started.check(SILENT, **pause) is None
    assert started.until_replaced(SILENT)[0] == 4
    assert Checks().until_replaced(STUCK)[0] > 3


def test_pause_of_the_supervisor_lengthens_the_time_to_start(checks):
    assert checks.check(SILENT) is None
    assert checks.check(SILENT, late_s=500.0) is None
    assert checks.check(SILENT) is None


# ---- over real sockets ------------------------------------------------------------------------------------------------


@contextmanager
def server(status, body):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}/health"
        found.shutdown()
        thread.join()


class OneChild:
    pid = 1

    def __init__(self, url):
        self.url = url
        self.started_at = SystemClock().now()
        self.reasons = []
        self.is_replaced = threading.Event()
        self.has_been_well = threading.Event()

    def question(self, _child, has_started):
        if has_started:
            self.has_been_well.set()
        return self.url

    def replace(self, _child, reason):
        self.reasons.append(reason)
        self.is_replaced.set()


@contextmanager
def watched(url, started_pids=(), **limits):
    child = OneChild(url)
    process = WatchedProcess(name="c", current=lambda: child, question=child.question, replace=child.replace)
    quick = {"interval_s": 0.01, "timeout_s": 30.0, "max_failures": 2, "max_silence_s": 60.0, "max_start_s": 60.0} | limits
    watch = HealthWatch([process], HealthLimits(**quick), SystemClock(), started_pids)
    watch.start()
    yield child
    watch.stop()


@pytest.mark.slow
def test_watch_replaces_a_process_that_answers_with_a_reason():
    with server(200, b"{}") as good, server(503, b'{"status": "engine stuck"}') as bad, watched(good) as child:
        assert child.has_been_well.wait(60)
        child.url = bad
        assert child.is_replaced.wait(60)
    assert child.reasons[0] == "engine stuck"


@pytest.mark.slow
def test_process_that_hangs_before_its_first_check_is_replaced_if_it_had_started():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/health"
        with watched(url, started_pids=[OneChild.pid], timeout_s=0.05, max_silence_s=0.2) as child:
            assert child.is_replaced.wait(60)
    assert child.reasons[0].startswith("no answer to /health for ")


def test_an_answer_that_is_no_text_is_read_with_replacement_characters():
    with server(200, b"\xff\xfe") as url:
        assert get(url, 30.0) == (200, "\ufffd\ufffd")


@pytest.mark.slow
@pytest.mark.parametrize("body", [b"\xff\xfe", b"[" * 100_000])
def test_no_answer_ends_the_watch(body):
    with server(503, body) as url, watched(url, started_pids=[OneChild.pid], max_failures=1) as child:
        for _ in range(2):
            child.is_replaced.clear()
            assert child.is_replaced.wait(60)
    assert child.reasons[0]


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_answer_that_comes_byte_by_byte_counts_as_none_at_its_deadline(head):
    is_over = threading.Event()

    def drip(listener):
        sock, _ = listener.accept()
        with sock, suppress(OSError):
            sock.sendall(head)
            for byte in b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 60 + b"\r\n":
                if is_over.wait(0.005):
                    return
                sock.sendall(bytes([byte]))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        with pytest.raises(NoAnswer):
            get(f"http://127.0.0.1:{listener.getsockname()[1]}/health", 0.2)
        is_over.set()
        thread.join()


def test_listener_that_never_answers_is_silent_and_one_that_closes_is_not():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/health"
        with pytest.raises(NoAnswer):
            get(url, 0.05)
        thread = threading.Thread(target=lambda: [listener.accept()[0].close() for _ in range(2)])
        thread.start()  # the first connection is the one above
        with pytest.raises(OSError) as caught:  # noqa: PT011 - its type is what is looked at
            get(url, 30.0)
        thread.join()
    assert not isinstance(caught.value, NoAnswer)
    with pytest.raises(NoAnswer):
        get(url, 30.0)
