"""Log lines can be read back and cannot be forged by what they quote."""

import io
import json
import logging
import sys
import unicodedata

import pytest

from core.log import MAX_TRACEBACK_CHARS, MAX_VALUE_CHARS, configure_logging, event, quote

BIDI_CONTROLS = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}


@pytest.fixture
def stream():
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    stream = io.StringIO()
    configure_logging("INFO", "decode-0", stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def log_to_stream_only(stream):
    """Keep a line out of pytest's own report, which cannot hold surrogates when tests run side by side."""
    root = logging.getLogger()
    root.handlers[:] = [handler for handler in root.handlers if getattr(handler, "stream", None) is stream]


def test_event_becomes_one_line_of_key_value_pairs(stream):
    logging.getLogger("core.worker.process").info(event("finished", request_id="r1", prompt_tokens=12, ttft_ms=1.23456789))
    line = stream.getvalue()
    assert line.startswith("ts=")
    assert line.endswith(
        "level=info process=decode-0 logger=core.worker.process event=finished request_id=r1 prompt_tokens=12 ttft_ms=1.23457\n"
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


BIDI = [chr(code) for code in range(sys.maxunicode + 1) if unicodedata.bidirectional(chr(code)) in BIDI_CONTROLS]
CONTROLS = [
    chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) in {"Cc", "Cf", "Zl", "Zp", "Cs"}
]


@pytest.mark.parametrize("is_json", [False, True])
def test_no_control_character_reaches_a_line_raw(stream, is_json):
    configure_logging("INFO", "router", stream, is_json=is_json)
    log_to_stream_only(stream)
    logging.getLogger("x").info(event("finished", short="a\u202eb", client_id="".join(CONTROLS[:600] + BIDI)))
    logging.getLogger("lib").info("plain %s", "".join(CONTROLS[-600:]))
    assert not set(stream.getvalue()) & set(CONTROLS + BIDI) - {"\n"}
    assert stream.getvalue().count("\n") == 2


@pytest.mark.parametrize("character", ["\x1b", "\x7f", "\x9b", "\u061c", "\u202e", "\u2028", "\ud800", "\U000e0041"])
def test_an_escaped_character_can_be_read_back(stream, character):
    configure_logging("INFO", "router", stream, is_json=True)
    log_to_stream_only(stream)
    logging.getLogger("x").info(event("finished", client_id=f"a{character}b"))
    assert json.loads(stream.getvalue())["client_id"] == f"a{character}b"
    assert json.loads(quote(f"a{character}b")) == f"a{character}b"


@pytest.mark.parametrize("is_json", [False, True])
@pytest.mark.parametrize(
    "value",
    ["x" * 3_000_000, ["x" * 1_000_000], {"a": "\u202e" * 1_000_000}, 1 << 3_000_000, b"y" * 1_000_000],
    ids=["text", "list", "dict", "int", "bytes"],
)
def test_every_value_is_bounded_in_length(stream, is_json, value):
    configure_logging("INFO", "router", stream, is_json=is_json)
    logging.getLogger("x").info(event("finished", request_id=value, outcome="stop"))
    line = stream.getvalue()
    assert len(line) < 7 * MAX_VALUE_CHARS  # an escaped character takes six
    assert "more characters]" in line
    assert "stop" in line


@pytest.mark.parametrize("is_json", [False, True])
def test_a_traceback_is_bounded_and_escaped(stream, is_json):
    configure_logging("INFO", "router", stream, is_json=is_json)
    try:
        raise ValueError("\x1b[2J\u202e\u2028forged" + "x" * 1_000_000)
    except ValueError:
        logging.getLogger("x").exception(event("bug"))
    text = stream.getvalue()
    assert len(text) < 2 * MAX_TRACEBACK_CHARS
    assert not set(text) & {"\x1b", "\u202e", "\u2028"}


def test_a_json_line_stays_json_for_numbers_that_are_none(stream):
    configure_logging("INFO", "router", stream, is_json=True)
    logging.getLogger("x").info(event("measured", ttft_ms=float("nan"), cores=(1, 2)))

    def refuse(constant):
        raise AssertionError(constant)

    found = json.loads(stream.getvalue(), parse_constant=refuse)
    assert (found["ttft_ms"], found["cores"]) == ("nan", [1, 2])
