"""Log lines to readers that stop reading: a process goes on, and says later how many lines are missing."""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import os
import pty
import socket
import subprocess
import sys
import threading
import time
import tty
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TextIO

import pytest

from core.log import ProcessLogHandler, configure_logging, event
from core.log_stream import MAX_KEPT_LINES, LogStream, open_log_stream

LINE = "x" * 99 + "\n"
LOST = "lost {}\n"
DEADLINE_S = 60.0


@pytest.fixture(params=["pipe", "terminal", "socket", "another user's pipe"])
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, TextIO]]:
    """Return the end that reads, which does not wait, and the stream that writes."""
    if request.param == "terminal":
        reader, writer = pty.openpty()
        tty.setraw(writer)
    elif request.param == "socket":
        reader, writer = (end.detach() for end in socket.socketpair())
    else:
        reader, writer = os.pipe()
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    if request.param == "another user's pipe":
        monkeypatch.setattr("core.log_stream.os.open", refuse_to_open)
    os.set_blocking(reader, False)
    with os.fdopen(writer, "w") as stream:
        yield reader, stream
    os.close(reader)


def refuse_to_open(*_arguments: object) -> int:
    raise PermissionError


def refuse_a_thread(_: object) -> None:
    raise RuntimeError("can't start new thread")


def opened(file: TextIO) -> LogStream:
    stream = open_log_stream(file, LOST.format)
    assert isinstance(stream, LogStream)
    return stream


def read_until(fd: int, end: str) -> str:
    """Read until a line comes."""
    deadline, text = time.monotonic() + DEADLINE_S, ""
    while not text.endswith(end):
        assert time.monotonic() < deadline, text[-200:]
        try:
            text += os.read(fd, 65536).decode()
        except BlockingIOError:
            time.sleep(0.001)
    return text


def test_what_is_not_read_at_once_is_written_when_it_is(ends):
    reader, file = ends
    stream = opened(file)
    for _ in range(MAX_KEPT_LINES):
        stream.write(LINE)
    stream.write("last\n")
    assert read_until(reader, "last\n") == LINE * MAX_KEPT_LINES + "last\n"
    assert os.get_blocking(file.fileno()), "what other processes share stays as it was"


def read_all_of(fd: int, stream: LogStream) -> list[str]:
    """Read everything that was written, and a line "end" after it, which finds nothing kept or lost before it."""
    deadline, text = time.monotonic() + DEADLINE_S, ""
    while stream._num_kept != stream._num_written:
        assert time.monotonic() < deadline, text[-200:]
        with contextlib.suppress(BlockingIOError):
            text += os.read(fd, 65536).decode()
    stream.write("end\n")
    return (text + read_until(fd, "end\n")).splitlines(keepends=True)


def test_beyond_a_limit_lines_are_lost_whole_and_counted_where_they_were(ends):
    reader, file = ends
    stream = opened(file)
    num_written = MAX_KEPT_LINES + 5000  # more than pipes, sockets and terminals hold beside
    for _ in range(num_written):
        stream.write(LINE)
    lines = read_all_of(reader, stream)
    assert lines.pop() == "end\n"
    reports = [line for line in lines if line != LINE]
    num_lost = sum(int(line.removeprefix("lost ")) for line in reports)
    assert num_lost
    assert len(lines) - len(reports) + num_lost == num_written


def test_a_line_longer_than_all_that_is_kept_is_written(ends):
    reader, file = ends
    long = "y" * 1_000_000 + "z\n"
    opened(file).write(long)
    assert read_until(reader, "z\n") == long


def test_the_number_of_lost_lines_has_a_line_of_the_log(ends):
    reader, file = ends
    log = logging.getLogger("tests.log_stream")
    configure_logging("INFO", "p", file)
    for number in range(6000):
        log.info(event("line", number=number, text=LINE))
    text = read_until(reader, "\n")
    while "event=log_lines_lost count=" not in text:
        text += read_until(reader, "\n")
    (stream,) = [handler.stream for handler in logging.getLogger().handlers if isinstance(handler, ProcessLogHandler)]
    stream.finish(DEADLINE_S)  # until then the next line would be lost as well
    log.info(event("next"))
    text += read_until(reader, "event=next\n")
    events = [line.partition("event=")[2].split() for line in text.splitlines()]
    *lines, report, after = events
    assert [fields[1] for fields in lines] == [f"number={number}" for number in range(len(lines))]
    assert report == ["log_lines_lost", f"count={6000 - len(lines)}"]
    assert after == ["next"]


@pytest.mark.parametrize(("end", "exit_code"), [("exit_process(3)", 3), ("sys.exit(4)", 4), ("", 0)])
def test_a_process_waits_at_its_end_for_a_reader_that_is_late(end, exit_code):
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    script = (
        "import logging, sys; from core.log import configure_logging; from core.process_signals import exit_process\n"
        "configure_logging('INFO', 'p')\n"
        "for _ in range(500): logging.info('x' * 100)\n"
        "print('logged', flush=True); logging.info('last')\n" + end
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=writer)
    os.close(writer)
    assert process.stdout is not None
    assert process.stdout.readline() == b"logged\n"
    with os.fdopen(reader) as log:
        lines = log.read().splitlines()
    assert process.wait(DEADLINE_S) == exit_code
    assert len(lines) == 501
    assert lines[-1].endswith("message=last")


def test_a_process_ends_though_nobody_reads():
    reader, writer = os.pipe()
    with closing(os.fdopen(writer, "w")) as file:
        stream = opened(file)
        for _ in range(MAX_KEPT_LINES + 100):
            stream.write(LINE)
        stream.finish(0.0)
        assert stream._num_kept > stream._num_written
        os.close(reader)
        stream.finish(DEADLINE_S)
        assert stream._num_kept == stream._num_written


def test_a_finalizer_that_logs_may_run_within_a_line(ends):
    """As garbage is collected while a line is written: a lock would be waited for by the thread that holds it."""
    reader, file = ends
    stream = opened(file)
    write, depths = stream._write, [0]

    def log_and_write(data: bytes) -> int:
        depths.append(depths[-1] + 1)
        if depths[-1] == 1 and threading.current_thread() is threading.main_thread():
            stream.write("nested\n")
        depths.pop()
        return write(data)

    stream._write = log_and_write
    for _ in range(MAX_KEPT_LINES + 5000):
        stream.write("outer\n")
    assert "nested\n" in read_all_of(reader, stream)[0]


def test_without_a_thread_lines_go_to_the_stream_as_it_is(ends, monkeypatch):
    monkeypatch.setattr("threading.Thread.start", refuse_a_thread)
    assert open_log_stream(ends[1], LOST.format) is ends[1]


def test_files_and_streams_without_a_number_are_written_as_they_are(tmp_path: Path):
    text = io.StringIO()
    assert open_log_stream(text, LOST.format) is text
    with closing((tmp_path / "log").open("w")) as file:
        assert open_log_stream(file, LOST.format) is file


def test_a_closed_stderr_is_no_hindrance(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    configure_logging("INFO", "p")
    logging.getLogger("tests.log_stream").info(event("nowhere"))
    logging.getLogger().handlers[-1].close()


def test_without_a_reader_a_write_fails_as_it_did():
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as file:
        stream = opened(file)
        os.close(reader)
        with pytest.raises(BrokenPipeError):
            stream.write(LINE)
