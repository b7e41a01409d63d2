"""Log lines as ``key=value`` pairs or JSON on stderr, one handler per process.

Owns the format, and what makes a line safe to read with any value from a peer or client: its length is bounded, and
characters that control a terminal or reorder text are escaped. Knows nothing about what is logged: callers write
``logger.info(event("ready", engine_id=...))``, and plain texts of libraries become ``event=log message="..."``. Only the entry
point of a process calls ``configure_logging``.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import time
from functools import partial
from typing import TextIO

from core.log_stream import LogSink, LogStream, open_log_stream

MAX_VALUE_CHARS = 2_000
MAX_TRACEBACK_CHARS = 20_000
END_PATIENCE_S = 2.0  # for a reader that is late when the process ends
_MAX_INT_BITS = 256  # longer integers become text, so that their length is bounded like any other

_NEEDS_NO_QUOTES = re.compile(r"[^\s\"'=\\\x00-\x1f\x7f]+")
# Beyond what JSON escapes: DEL and C1, bidirectional and other format controls, line and paragraph separators, surrogates.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e007f]"
)
_QUIET_LIBRARIES = ("httpx", "httpcore", "asyncio", "urllib3", "filelock", "uvicorn")


class Event:
    """A named event with its fields, formatted only if the line is written."""

    __slots__ = ("fields", "name")

    def __init__(self, name: str, fields: dict[str, object]) -> None:
        self.name = name
        self.fields = fields

    def __str__(self) -> str:
        return " ".join(f"{key}={quote(value)}" for key, value in {"event": self.name, **self.fields}.items())


def event(name: str, **fields: object) -> Event:
    """Return a log message ``event=name key=value ...``."""
    return Event(name, fields)


def quote(value: object) -> str:
    """Return a value as text for a line: bare if unambiguous, else as a JSON string, so that it cannot break the line."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = _text_of(value)
    if _NEEDS_NO_QUOTES.fullmatch(text) and not _UNSAFE.search(text):
        return text
    return _escape(json.dumps(text, ensure_ascii=False))


def shorten(text: str, max_chars: int = MAX_VALUE_CHARS) -> str:
    """Return the text, or its beginning and how much is left out."""
    return text if len(text) <= max_chars else f"{text[:max_chars]}...[{len(text) - max_chars} more characters]"


def shorten_middle(text: str, max_chars: int = MAX_TRACEBACK_CHARS) -> str:
    """Return the text, or its two ends: a traceback's origin and its exception."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n...[{len(text) - 2 * half} more characters]\n{text[-half:]}"


def _text_of(value: object) -> str:
    is_huge = isinstance(value, int) and value.bit_length() > _MAX_INT_BITS
    return shorten(hex(value) if isinstance(value, int) and is_huge else str(value))


def _json_value(value: object) -> object:
    """Return the JSON line's form of a value: its own type if that is short and finite, else text."""
    match value:
        case None | bool():
            return value
        case int() if value.bit_length() <= _MAX_INT_BITS:
            return value
        case float() if math.isfinite(value):
            return value
        case list() | tuple() | dict():
            text = json.dumps(value, ensure_ascii=False, default=str)
            return json.loads(text) if len(text) <= MAX_VALUE_CHARS else shorten(text)
    return _text_of(value)


def _escape(text: str) -> str:
    """Replace unsafe characters by their JSON escapes; JSON's own escapes stay."""
    return _UNSAFE.sub(lambda found: json.dumps(found.group())[1:-1] if found.group() != "\x7f" else "\\u007f", text)


class KeyValueFormatter(logging.Formatter):
    """``ts=… level=… process=… logger=… event=…``; a traceback follows on lines indented by two spaces."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = quote(process)

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line, plus its traceback."""
        message = record.msg if isinstance(record.msg, Event) else event("log", message=record.getMessage())
        head = f"ts={_timestamp(record)} level={record.levelname.lower()} process={self._process}"
        line = f"{head} logger={record.name} {message}"
        if record.exc_info:
            text = shorten_middle(self.formatException(record.exc_info))
            line += "\n" + "\n".join(f"  {_escape(row)}" for row in text.split("\n"))
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object per line with the same keys; values keep their types, a traceback is one text."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        message = record.msg if isinstance(record.msg, Event) else event("log", message=record.getMessage())
        fields: dict[str, object] = {
            "ts": _timestamp(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "event": message.name,
        }
        fields = {**{key: _json_value(value) for key, value in message.fields.items()}, **fields}
        if record.exc_info:
            fields["traceback"] = shorten_middle(self.formatException(record.exc_info))
        return _escape(json.dumps(fields, ensure_ascii=False))


def _timestamp(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


class ProcessLogHandler(logging.StreamHandler[LogSink]):
    """The one handler; its type is how a second ``configure_logging`` finds the first one's."""

    def close(self) -> None:
        """Wait a moment for a late reader: the last lines say why the process ends. ``logging.shutdown`` calls it."""
        if isinstance(self.stream, LogStream):
            self.stream.finish(END_PATIENCE_S)
        super().close()


def _report_of_lost_lines(formatter: logging.Formatter, num_lost: int) -> str:
    record = logging.makeLogRecord({"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"})
    record.msg = event("log_lines_lost", count=num_lost)
    return formatter.format(record) + "\n"


def configure_logging(level: str, process: str, stream: TextIO | None = None, *, is_json: bool = False) -> None:
    """Send every logger's lines to ``stream`` (default stderr), as text or JSON; a second call replaces the first.

    A reader of it that stops reading costs lines, and stops nothing (``core.log_stream``).
    ``process`` names the process in each line, as several of them often share one stream. Libraries log from WARNING up.
    """
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, ProcessLogHandler)]:
        root.removeHandler(handler)
    formatter = JsonFormatter(process) if is_json else KeyValueFormatter(process)
    report, target = partial(_report_of_lost_lines, formatter), stream or sys.stderr
    handler = ProcessLogHandler(open_log_stream(target, report) if target is not None else None)  # None: it was closed at start
    handler.setFormatter(formatter)
    root.addHandler(handler)
    root.setLevel(level)
    for name in _QUIET_LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING)
