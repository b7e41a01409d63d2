"""Calls whose name stands before the JSON object of their arguments: Mistral's newer form, and functionary's."""

from __future__ import annotations

from router.tools.json_reader import ArgumentsReader, CallListReader, CallReader, ReaderStatus
from router.tools.output import PieceCollector

_MAX_NAME = 128
_ARGUMENTS_MARK = "[ARGS]"
_ID_MARK = "[CALL_ID]"


class NamedCallReader:
    """Reads ``name``, ``end`` and an object; with an empty ``end`` the object ends the name."""

    def __init__(self, output: PieceCollector, end: str = "") -> None:
        self._output = output
        self._end = end
        self._name: list[str] = []
        self._arguments: ArgumentsReader | None = None
        self._has_begun = False

    @property
    def unread(self) -> str:
        """What has been read if no call has begun."""
        return "" if self._has_begun else "".join(self._name)

    def feed(self, letter: str) -> ReaderStatus:
        """Read a letter."""
        if self._arguments is not None:
            return self._feed_arguments(self._arguments, letter)
        if letter == (self._end or "{"):
            self._arguments = ArgumentsReader(self._output)
            if not self._end:
                return self._feed_arguments(self._arguments, letter)
            self._name.append(letter)
            return ReaderStatus.MORE
        if letter in '"{}\n' or len(self._name) >= _MAX_NAME:
            return ReaderStatus.WRONG
        self._name.append(letter)
        return ReaderStatus.MORE

    def _feed_arguments(self, arguments: ArgumentsReader, letter: str) -> ReaderStatus:
        if not self._has_begun:
            if letter.isspace():
                self._name.append(letter)
                return ReaderStatus.MORE
            name = self._called()
            if letter != "{" or not name:
                return ReaderStatus.WRONG
            self._has_begun = True
            self._output.start(name)
        return arguments.feed(letter)

    def _called(self) -> str:
        """Return the name without what may follow it."""
        name = "".join(self._name)
        for mark in (self._end, _ID_MARK, _ARGUMENTS_MARK):
            name = name.partition(mark)[0] if mark else name
        return name.strip()


class MistralReader:
    """Reads what follows ``[TOOL_CALLS]``: a list of call objects, or a name and its arguments."""

    def __init__(self, output: PieceCollector) -> None:
        self._output = output
        self._num_before = output.num_calls
        self._space: list[str] = []
        self._reader: CallReader | None = None

    @property
    def unread(self) -> str:
        """What has been read if no call has begun."""
        return "".join(self._space) + (self._reader.unread if self._reader else "")

    def feed(self, letter: str) -> ReaderStatus:
        """Read a letter."""
        if self._reader is None:
            if letter.isspace():
                self._space.append(letter)
                return ReaderStatus.MORE
            self._reader = CallListReader(self._output) if letter == "[" else NamedCallReader(self._output)
        status = self._reader.feed(letter)
        if self._output.num_calls > self._num_before:
            self._space.clear()
        return status
