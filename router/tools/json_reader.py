"""Reads calls in JSON letter by letter, in constant time for each.

Arguments are passed on as the model writes them: brackets and strings are followed, values are not checked. A reader that
finds something other than a call returns what it has read, so that it becomes text.
"""

from __future__ import annotations

import json
import math
from enum import Enum, auto
from typing import Protocol

from router.tools.output import PieceCollector, whole_characters

MAX_DEPTH = 64  # of brackets in each other, where a value is read and not passed on; deeper text is no call
_MAX_NAME = 256  # characters of a key or a name with its quotes
_SPACE = " \t\r\n"
_CLOSER = {"{": "}", "[": "]"}
_ARGUMENT_KEYS = ("arguments", "parameters")


class ReaderStatus(Enum):
    """Whether a reader goes on, has read its last letter, or cannot read this letter, which is not consumed."""

    MORE = auto()
    DONE = auto()
    WRONG = auto()


class CallReader(Protocol):
    """Reads one construct that holds calls."""

    @property
    def unread(self) -> str:
        """What becomes text if the construct ends early."""
        ...

    def feed(self, letter: str) -> ReaderStatus:
        """Read a letter."""
        ...


class ValueExtent:
    """Finds the end of a JSON value; ``feed`` gets its letters from the first."""

    def __init__(self, max_depth: float = MAX_DEPTH) -> None:
        self._max_depth = max_depth
        self._closers: list[str] = []
        self._in_string = False
        self._is_escaped = False

    def feed(self, letter: str) -> ReaderStatus:
        """Follow a letter of a string, object or list."""
        if self._in_string:
            return self._follow_string(letter)
        match letter:
            case '"':
                self._in_string = True
            case "{" | "[":
                if len(self._closers) >= self._max_depth:
                    return ReaderStatus.WRONG
                self._closers.append(_CLOSER[letter])
            case "}" | "]":
                if self._closers.pop() != letter:
                    return ReaderStatus.WRONG
                return ReaderStatus.MORE if self._closers else ReaderStatus.DONE
        return ReaderStatus.MORE

    def _follow_string(self, letter: str) -> ReaderStatus:
        if self._is_escaped or letter != '"':
            self._is_escaped = letter == "\\" and not self._is_escaped
            return ReaderStatus.MORE
        self._in_string = False
        return ReaderStatus.MORE if self._closers else ReaderStatus.DONE


class ArgumentsReader:
    """Reads an object and passes it on as the arguments of the call that has begun."""

    def __init__(self, output: PieceCollector) -> None:
        self._output = output
        self._extent: ValueExtent | None = None

    def feed(self, letter: str) -> ReaderStatus:
        """Read a letter; space before the object is dropped."""
        if self._extent is None:
            if letter in _SPACE:
                return ReaderStatus.MORE
            if letter != "{":
                return ReaderStatus.WRONG
            self._extent = ValueExtent(math.inf)
        status = self._extent.feed(letter)
        if status is not ReaderStatus.WRONG:
            self._output.arguments(letter)
        if status is ReaderStatus.DONE:
            self._output.end()
        return status


class _Place(Enum):
    BEFORE = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE_START = auto()
    VALUE = auto()
    SCALAR = auto()
    AFTER_VALUE = auto()


class CallObjectReader:
    """Reads ``{"name": ..., "arguments": {...}}``; other keys are dropped, ``parameters`` means ``arguments``.

    ``needs_arguments``: without them the object is no call. The call begins when its name and the start of its arguments are
    known.
    """

    def __init__(self, output: PieceCollector, *, needs_arguments: bool = False) -> None:
        self._output = output
        self._needs_arguments = needs_arguments
        self._raw: list[str] = []
        self._place = _Place.BEFORE
        self._token: list[str] = []  # the key or value in progress, unless it is passed on
        self._extent = ValueExtent()
        self._key = ""
        self._name: str | None = None
        self._arguments: str | None = None  # that came before the name
        self._is_started = False
        self._is_passed_on = False  # the value in progress is
        self._has_arguments = False

    @property
    def unread(self) -> str:
        """What has been read if no call has begun."""
        return "" if self._is_started else "".join(self._raw)

    def feed(self, letter: str) -> ReaderStatus:
        """Read a letter."""
        status = self._feed(letter)
        if status is not ReaderStatus.WRONG and not self._is_started:
            self._raw.append(letter)
        return status

    def _feed(self, letter: str) -> ReaderStatus:
        match self._place:
            case _Place.VALUE:
                return self._in_value(letter)
            case _Place.KEY:
                return self._in_key(letter)
            case _Place.SCALAR:
                if letter not in ",}]" and letter not in _SPACE:
                    self._token.append(letter)
                    return ReaderStatus.MORE
                return ReaderStatus.WRONG if not self._end_value() else self._after_value(letter)
            case _ if letter in _SPACE:
                return ReaderStatus.MORE
            case _Place.BEFORE:
                self._place = _Place.KEY_OR_END
                return ReaderStatus.MORE if letter == "{" else ReaderStatus.WRONG
            case _Place.KEY_OR_END:
                if letter == "}":
                    return self._end()
                self._place, self._extent, self._token = _Place.KEY, ValueExtent(), []
                return self._in_key(letter) if letter == '"' else ReaderStatus.WRONG
            case _Place.COLON:
                self._place = _Place.VALUE_START
                return ReaderStatus.MORE if letter == ":" else ReaderStatus.WRONG
            case _Place.VALUE_START:
                return self._begin_value(letter)
            case _:
                return self._after_value(letter)

    def _in_key(self, letter: str) -> ReaderStatus:
        self._token.append(letter)
        if len(self._token) > _MAX_NAME:
            return ReaderStatus.WRONG
        if self._extent.feed(letter) is ReaderStatus.DONE:
            self._key, self._place = _string("".join(self._token)) or "", _Place.COLON
        return ReaderStatus.MORE

    def _begin_value(self, letter: str) -> ReaderStatus:
        self._token, self._extent = [], ValueExtent()
        self._is_passed_on = False
        if letter in ",}]:":
            return ReaderStatus.WRONG
        if letter not in '"{[':
            self._place = _Place.SCALAR
            self._token.append(letter)
            return ReaderStatus.MORE
        self._place = _Place.VALUE
        if self._key in _ARGUMENT_KEYS and letter == "{" and self._name is not None and not self._has_arguments:
            self._start()
            self._is_passed_on, self._extent = True, ValueExtent(math.inf)
        return self._in_value(letter)

    def _in_value(self, letter: str) -> ReaderStatus:
        status = self._extent.feed(letter)
        if status is ReaderStatus.WRONG:
            return status
        if self._is_passed_on:
            self._output.arguments(letter)
        else:
            self._token.append(letter)
        if status is ReaderStatus.MORE:
            return status
        return ReaderStatus.MORE if self._end_value() else ReaderStatus.WRONG

    def _end_value(self) -> bool:
        """Take a whole value; return False if the object can be no call."""
        self._place = _Place.AFTER_VALUE
        text = "".join(self._token)
        if self._is_passed_on:
            self._has_arguments = True
            self._output.end()
        elif self._key == "name" and self._name is None:
            self._name = _string(text)
            return bool(self._name)
        elif self._key in _ARGUMENT_KEYS and not self._has_arguments and self._arguments is None:
            self._arguments = _arguments(text)
        if self._name is not None and self._arguments is not None and not self._has_arguments:
            self._send_arguments(self._arguments)
        return True

    def _after_value(self, letter: str) -> ReaderStatus:
        if letter in _SPACE:
            return ReaderStatus.MORE
        if letter == ",":
            self._place = _Place.KEY_OR_END
            return ReaderStatus.MORE
        return self._end() if letter == "}" else ReaderStatus.WRONG

    def _end(self) -> ReaderStatus:
        if self._name is None or (self._needs_arguments and not self._has_arguments and self._arguments is None):
            return ReaderStatus.WRONG
        if not self._has_arguments:
            self._send_arguments(self._arguments or "{}")
        return ReaderStatus.DONE

    def _send_arguments(self, text: str) -> None:
        self._start()
        self._output.arguments(text)
        self._output.end()
        self._has_arguments = True

    def _start(self) -> None:
        if self._name is not None and not self._is_started:
            self._is_started = True
            self._output.start(self._name)


class CallListReader:
    """Reads a JSON list of call objects."""

    def __init__(self, output: PieceCollector) -> None:
        self._output = output
        self._before: list[str] = []  # of the list, since the last call
        self._is_open = False
        self._call: CallObjectReader | None = None

    @property
    def unread(self) -> str:
        """What has been read since the last call if none began after it."""
        if self._call is None:
            return "".join(self._before)
        return "".join(self._before) + self._call.unread if self._call.unread else ""

    def feed(self, letter: str) -> ReaderStatus:
        """Read a letter."""
        if self._call is not None:
            status = self._call.feed(letter)
            if status is ReaderStatus.DONE:
                self._call = None
                self._before.clear()
            return ReaderStatus.MORE if status is ReaderStatus.DONE else status
        if letter == "{" and self._is_open:
            self._call = CallObjectReader(self._output)
            return self._call.feed(letter)
        if letter == "[" and not self._is_open:
            self._is_open = True
        elif letter == "]" and self._is_open:
            return ReaderStatus.DONE
        elif letter not in _SPACE and not (letter == "," and self._is_open):
            return ReaderStatus.WRONG
        self._before.append(letter)
        return ReaderStatus.MORE


def _string(text: str) -> str | None:
    """Return the string that JSON text stands for; None if it is no string."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return whole_characters(found) if isinstance(found, str) else None


def _arguments(text: str) -> str:
    """Return an object that a model has written as a string, ``{}`` for nothing, and anything else as it is written."""
    if text == "null":
        return "{}"
    inner = _string(text)
    if inner is not None and (not inner.strip() or inner.lstrip().startswith("{")):
        return inner.strip() or "{}"
    return text
