"""Log lines as ``key=value`` pairs or JSON on stderr, one handler per process.

Owns the format. Knows nothing about what is logged: callers write ``logger.info(event("ready", engine_id=...))``, and plain
texts of libraries become ``event=log message="..."``. Only a process's entry point calls ``configure_logging``.
"""

from __future__ import annotations

import json
import logging
import re
import time
from typing import TextIO

_NEEDS_NO_QUOTES = re.compile(r"[^\s\"'=\\\x00-\x1f\x7f]+")
_QUIET_LIBRARIES = ("httpx", "httpcore", "asyncio", "urllib3", "filelock", "uvicorn")


class Event:
    """A named happening with its fields, formatted only if the line is written."""

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
    """Return a value as it stands in a line: bare if unambiguous, else as a JSON string, so that it cannot break the line."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if _NEEDS_NO_QUOTES.fullmatch(text) else json.dumps(text, ensure_ascii=False)


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
            line += "\n" + "\n".join(f"  {row}" for row in self.formatException(record.exc_info).splitlines())
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
        fields = {**message.fields, **fields}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)


def _timestamp(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


class _KVFerryHandler(logging.StreamHandler[TextIO]):
    """The one handler; its type is how a second ``configure_logging`` finds the first one's."""


def configure_logging(level: str, process: str, stream: TextIO | None = None, *, is_json: bool = False) -> None:
    """Send every logger's lines to ``stream`` (default stderr), as text or JSON; a second call replaces the first.

    ``process`` names the process in each line, as several of them often share one stream. Libraries log from WARNING up.
    """
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _KVFerryHandler)]:
        root.removeHandler(handler)
    handler = _KVFerryHandler(stream)
    handler.setFormatter(JsonFormatter(process) if is_json else KeyValueFormatter(process))
    root.addHandler(handler)
    root.setLevel(level)
    for name in _QUIET_LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING)
