"""Reading traces: both formats, and every kind of file that is none."""

import io
import json
import os

import pytest

from core.errors import ConfigError
from kvferry.advise import trace as trace_module
from kvferry.advise.trace import read_trace, spread_arrivals


def line(timestamp=0, input_length=1025, output_length=3, hash_ids=(1, 2, 3)):
    found = {"timestamp": timestamp, "input_length": input_length, "output_length": output_length, "hash_ids": list(hash_ids)}
    return json.dumps(found)


def finished(second, total_ms=500, prompt_tokens=10):
    return (
        f"ts=2026-11-24T01:00:{second:02d}.000Z level=info process=router logger=router event=finished request_id=a "
        f'client_id="b event=c" outcome=stop prompt_tokens={prompt_tokens} output_tokens=4 ttft_ms=100 total_ms={total_ms}'
    )


def write(tmp_path, *lines):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n".join(one if isinstance(one, bytes) else one.encode() for one in lines))
    return path


def test_requests_of_a_mooncake_trace_keep_their_whole_blocks(tmp_path):
    trace = read_trace(write(tmp_path, line(5000), "", line(8000, 1024)))
    assert [one.arrival_ms for one in trace.requests] == [0, 3000]
    assert [one.blocks for one in trace.requests] == [(1, 2), (1,)]
    assert trace.knows_prefixes
    assert trace.rate == pytest.approx(2 / 3)


def test_requests_of_a_router_s_log_are_ordered_by_arrival(tmp_path):
    other = "ts=2026-11-24T01:00:00.000Z level=info process=router logger=router event=ready"
    of_a_worker = "ts=2026-11-24T01:00:01.000Z process=decode event=finished request_id=a output_tokens=3"
    trace = read_trace(write(tmp_path, other, finished(3), of_a_worker, "  traceback", finished(4, total_ms=2500)))
    assert [(one.arrival_ms, one.num_tokens, one.num_output_tokens) for one in trace.requests] == [(0, 10, 4), (1000, 10, 4)]
    assert not trace.knows_prefixes


def test_a_log_of_json_lines_is_read(tmp_path):
    fields = {"event": "finished", "prompt_tokens": 7, "output_tokens": 0, "total_ms": 100.0, "ttft_ms": -1.0}
    lines = [json.dumps({"ts": f"2026-11-24T01:00:0{second}.000Z", **fields}) for second in (1, 2)]
    other = json.dumps({"ts": "2026-11-24T01:00:00.000Z", "event": "ready", "finished": 1})
    assert [one.num_output_tokens for one in read_trace(write(tmp_path, other, *lines)).requests] == [1, 1]


BAD = {
    "empty": ([b""], "line 1: the trace has no requests"),
    "blank": ([b"\n\n"], "the trace has no requests"),
    "binary": ([b"\xff\xfe\x00"], "line 1: neither"),
    "text": ([b"hello"], "line 1: neither"),
    "list": ([b"[1]"], "line 1: neither"),
    "broken": ([line(), b'{"timestamp": 1,'], "line 2:"),
    "missing": ([b'{"timestamp": 1}'], "line 1: Object missing required field `input_length`"),
    "nan": ([line(float("nan"))], "line 1:"),
    "later nan": ([line(), line(float("nan"))], "line 2:"),
    "infinite": ([line(), line().replace('"timestamp": 0', '"timestamp": 1e999')], "line 2:"),
    "huge": ([line(), line(1e300)], "line 2:"),
    "negative time": ([line(-1)], "line 1: Expected `float` >= 0"),
    "negative length": ([line(), line(1, input_length=-5)], "line 2: Expected `int` >= 1"),
    "negative answer": ([line(), line(1, output_length=-5)], "line 2: Expected `int` >= 0"),
    "no prompt": ([line(0, input_length=0)], "line 1: Expected `int` >= 1"),
    "text for a number": ([line("0")], "line 1: Expected `float`"),
    "ids of text": ([line(hash_ids=["a"])], "line 1: Expected `int`"),
    "unsorted": ([line(5), line(7), line(6)], "line 3: timestamp 6 is before"),
    "one": ([line(5)], "all requests have one timestamp"),
    "at once": ([line(5), line(5)], "all requests have one timestamp"),
    "log without requests": ([b"ts=2026-11-24T01:00:01.000Z event=ready"], "the trace has no requests"),
    "log with a bad time": ([finished(1), finished(2).replace("2026-11-24T01:00:02.000Z", "noon")], "line 2:"),
    "log with a bad number": ([finished(1), finished(2, total_ms="nan")], "line 2:"),
    "log with a negative number": ([finished(1), finished(2, prompt_tokens=-1)], "line 2:"),
    "log that is no text": ([finished(1).encode(), finished(2).encode() + b"\xff"], "line 2:"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_trace_is_refused_with_its_line(tmp_path, name):
    lines, expected = BAD[name]
    with pytest.raises(ConfigError) as found:
        read_trace(write(tmp_path, *lines))
    assert expected in found.value.message
    assert "line " in found.value.message
    assert "\n" not in found.value.message
    assert len(found.value.message) < 700


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "device", "no path"])
def test_what_is_no_file_is_refused_without_waiting(tmp_path, kind):
    path = tmp_path / "trace"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    paths = {"device": trace_module.Path("/dev/zero"), "no path": trace_module.Path("a\0b")}
    with pytest.raises(ConfigError) as found:
        read_trace(paths.get(kind, path))
    assert "\n" not in found.value.message


class Endless(io.RawIOBase):
    """A stream that never ends: of these bytes, again and again."""

    def __init__(self, unit):
        self.unit = unit

    def readline(self, size=-1):
        return (self.unit * size)[:size] if self.unit == b"\0" else self.unit


@pytest.mark.parametrize(("unit", "expected"), [(b"\0", "longer than"), (line().encode() + b"\n", "more than 3 requests")])
def test_an_endless_trace_ends_at_a_limit(monkeypatch, unit, expected):
    monkeypatch.setattr(trace_module, "MAX_REQUESTS", 3)
    monkeypatch.setattr("sys.stdin", type("", (), {"buffer": Endless(unit)}))
    with pytest.raises(ConfigError, match=expected):
        read_trace(trace_module.Path("-"))


def test_endless_blank_lines_end_at_the_limit_of_bytes(monkeypatch):
    monkeypatch.setattr(trace_module, "MAX_BYTES", 100)
    monkeypatch.setattr("sys.stdin", type("", (), {"buffer": Endless(b"\n")}))
    with pytest.raises(ConfigError, match="line 101: more than"):
        read_trace(trace_module.Path("-"))


def test_requests_of_one_timestamp_are_spread_until_the_next(tmp_path):
    trace = read_trace(write(tmp_path, *[line(0)] * 5, *[line(3000)] * 5))
    spread = [one.arrival_ms for one in spread_arrivals(trace.requests, seed=1)]
    assert spread == sorted(spread)
    assert len(set(spread)) == 10
    assert sum(one < 3000 for one in spread) == 5
    assert spread == [one.arrival_ms for one in spread_arrivals(trace.requests, seed=1)]
