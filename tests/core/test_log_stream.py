"""Log lines to readers that stop reading: a process goes on, and says later how many lines are missing."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pty
import socket
import tty
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TextIO

import pytest

from core.log import configure_logging, event
from core.log_stream import LogStream, open_log_stream

LINE = "x" * 99 + "\n"


@pytest.fixture(params=["pipe", "terminal", "socket"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[int, TextIO]]:
    """Return the end that reads, which does not wait, and the stream that writes."""
    if request.param == "pipe":
        reader, writer = os.pipe()
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    elif request.param == "terminal":
        reader, writer = pty.openpty()
        tty.setraw(writer)
    else:
        reader, writer = (end.detach() for end in socket.socketpair())
    os.set_blocking(reader, False)
    with os.fdopen(writer, "w") as stream:
        yield reader, stream
    os.close(reader)


def read_all(fd: int) -> str:
    """Return what there is now."""
    parts = []
    try:
        while part := os.read(fd, 65536):
            parts.append(part)
    except BlockingIOError:
        pass
    return b"".join(parts).decode()


def fill(stream: LogStream) -> int:
    """Write lines until one is lost; return how many were written, the last one perhaps in part."""
    num_lines = 0
    while not stream.num_lost:
        stream.write(LINE)
        num_lines += 1
    return num_lines - 1


def test_lines_without_room_are_lost_whole_and_counted(ends):
    reader, file = ends
    stream = open_log_stream(file)
    assert isinstance(stream, LogStream)
    num_written = fill(stream)
    stream.write(LINE)
    assert stream.num_lost == 2
    assert stream.is_stuck
    text = read_all(reader)
    stream.write("after\n")
    assert not stream.is_stuck
    assert text + read_all(reader) == LINE * num_written + "after\n", "the rest of a line comes before the next one"
    assert os.get_blocking(file.fileno()), "what other processes share stays as it was"


def test_a_line_longer_than_a_pipe_is_written_in_parts_as_it_is_read(ends):
    reader, file = ends
    stream = open_log_stream(file)
    assert isinstance(stream, LogStream)
    long = "y" * 300_000 + "\n"
    stream.write(long)
    text, num_lines = "", 0
    while not text.endswith(LINE):
        text += read_all(reader)
        stream.write(LINE)
        num_lines += 1
    text += read_all(reader)
    assert text == long + LINE * (num_lines - stream.num_lost)


def test_the_first_line_that_is_read_again_is_followed_by_the_number_of_the_lost_ones(ends):
    reader, file = ends
    log = logging.getLogger("tests.log_stream")
    try:
        configure_logging("INFO", "p", file)
        handler = logging.getLogger().handlers[-1]
        assert isinstance(handler, logging.StreamHandler)
        fill(handler.stream)
        log.info(event("not_seen", text=LINE))
        read_all(reader)
        log.info(event("seen"))
        log.info(event("next"))
    finally:
        configure_logging("WARNING", "tests")
    lines = read_all(reader).splitlines()
    events = [line.partition("event=")[2] for line in lines if "event=" in line]
    assert events == ["seen", "log_lines_lost count=2", "next"]


def test_files_and_streams_without_a_number_are_written_as_they_are(tmp_path: Path):
    text = io.StringIO()
    assert open_log_stream(text) is text
    with closing((tmp_path / "log").open("w")) as file:
        assert open_log_stream(file) is file


def test_without_a_reader_a_write_fails_as_it_did():
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as file:
        stream = open_log_stream(file)
        os.close(reader)
        with pytest.raises(BrokenPipeError):
            stream.write(LINE)
