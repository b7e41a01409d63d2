"""Log lines can be read back and cannot be forged by what they quote."""

import io
import json
import logging

import pytest

from core.log import configure_logging, event, quote


@pytest.fixture
def stream():
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    stream = io.StringIO()
    configure_logging("INFO", "decode-0", stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def test_event_becomes_one_line_of_key_value_pairs(stream):
    logging.getLogger("core.engine.worker").info(event("finished", request_id="r1", prompt_tokens=12, ttft_ms=1.23456789))
    line = stream.getvalue()
    assert line.startswith("ts=")
    assert line.endswith(
        "level=info process=decode-0 logger=core.engine.worker event=finished request_id=r1 prompt_tokens=12 ttft_ms=1.23457\n"
    )


def test_plain_message_of_a_library_is_wrapped_as_an_event(stream):
    logging.getLogger("lib").warning("disk %s is full", "sda")
    assert 'event=log message="disk sda is full"' in stream.getvalue()


def test_value_with_newline_cannot_start_a_second_line(stream):
    logging.getLogger("x").info(event("failed", message="bad\nts=1 level=error event=forged"))
    assert stream.getvalue().count("\n") == 1


def test_level_filters(stream):
    logging.getLogger("x").debug(event("step"))
    assert stream.getvalue() == ""


def test_second_configuration_replaces_the_first(stream):
    second = io.StringIO()
    configure_logging("WARNING", "router", second)
    logging.getLogger("x").warning(event("once"))
    assert stream.getvalue() == ""
    assert second.getvalue().count("event=once") == 1


def test_json_line_holds_the_same_with_types_and_cannot_be_forged(stream):
    configure_logging("INFO", "decode-0", stream, is_json=True)
    logging.getLogger("x").info(event("finished", request_id='a"\nb', prompt_tokens=12, process="forged", path=io))
    (line,) = stream.getvalue().splitlines()
    found = json.loads(line)
    assert (found["event"], found["request_id"], found["prompt_tokens"]) == ("finished", 'a"\nb', 12)
    assert (found["process"], found["level"], found["logger"]) == ("decode-0", "info", "x")


def test_json_line_of_an_error_holds_its_traceback(stream):
    configure_logging("INFO", "decode-0", stream, is_json=True)
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("x").exception(event("engine_died"))
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: broken" in json.loads(line)["traceback"]


def test_traceback_is_indented_below_the_line(stream):
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("x").exception(event("engine_died"))
    first, *rest = stream.getvalue().splitlines()
    assert "event=engine_died" in first
    assert rest
    assert all(row.startswith("  ") for row in rest)
    assert rest[-1] == "  ValueError: broken"


@pytest.mark.parametrize(
    ("value", "text"),
    [("plain", "plain"), (3, "3"), (0.5, "0.5"), ("two words", '"two words"'), ("", '""'), ("a=b", '"a=b"'), (None, "None")],
)
def test_quotes_only_what_is_ambiguous(value, text):
    assert quote(value) == text
