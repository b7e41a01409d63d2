"""Splits text at the markers that begin calls, letter by letter.

Text that may be the start of a marker is held back, and so is space, which is dropped before and between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from string import whitespace

from router.tools.json_reader import CallReader, ReaderStatus
from router.tools.output import Piece, PieceCollector

_SEPARATORS = f",{whitespace}"  # of calls in a list

ReaderFactory = Callable[[PieceCollector], CallReader]


class MarkerParser:
    """A parser of ``opens`` ... ``close``; ``close`` may be missing, and is dropped only after a call.

    ``first_letters`` begin a call without a marker if the text starts with one of them; ``separator`` is dropped between two
    calls, as space is, and such a letter may follow it. ``is_forced``: a grammar lets only calls be written, so that the
    beginning of a call at the end of the text is one that was cut, and is dropped.
    """

    def __init__(
        self,
        opens: Sequence[str],
        reader: ReaderFactory,
        *,
        close: str = "",
        first_letters: str = "",
        separator: str = "",
        is_forced: bool = False,
    ) -> None:
        self._close = close
        self._markers = tuple(marker for marker in (*opens, close) if marker)
        self._marker_letters = frozenset(marker[0] for marker in self._markers)
        self._reader_factory = reader
        self._first_letters = first_letters
        self._separator = separator
        self._is_forced = is_forced
        self._output = PieceCollector()
        self._reader: CallReader | None = None
        self._opened_by = ""  # the marker before the reader
        self._num_before = 0  # calls before the reader
        self._candidate = ""  # the start of a marker, perhaps
        self._space: list[str] = []  # with separators
        self._may_begin = True  # a call may begin without a marker
        self._is_after_call = False

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that more text completes."""
        for letter in text:
            self._step(letter)
        return self._output.take()

    def finish(self) -> list[Piece]:
        """Return what was held back."""
        if self._reader is not None and not self._is_forced:
            self._give_up(self._reader, is_cut=True)
        if not (self._is_after_call and self._close.startswith(self._candidate)):  # the end of a call may be cut
            self._flush_candidate()
        if not self._output.num_calls:
            self._flush_space()
        return self._output.take()

    @property
    def is_in_call(self) -> bool:
        """True if the last call has begun, and its arguments are not whole."""
        return self._output.is_in_call

    def _step(self, letter: str) -> None:
        reader = self._reader
        if reader is None:
            self._outside(letter)
            return
        status = reader.feed(letter)
        if status is ReaderStatus.MORE:
            return
        if status is ReaderStatus.WRONG:
            self._give_up(reader)
            self._outside(letter)
            return
        self._reader = None
        self._space.clear()
        self._is_after_call = True
        self._may_begin = False

    def _give_up(self, reader: CallReader, *, is_cut: bool = False) -> None:
        """Make what has been read text; of a construct in which a call has begun, only what follows its calls.

        If the end of the text has cut the construct, a separator behind its last call is no text.
        """
        self._reader = None
        unread = reader.unread
        self._may_begin = False
        self._is_after_call = False
        if self._output.num_calls == self._num_before:
            self._flush_space()
            self._output.text(self._opened_by + unread)
            return
        self._space.clear()
        if unread.strip(_SEPARATORS if is_cut else None):
            self._output.text(unread)

    def _outside(self, letter: str) -> None:
        if not self._candidate and letter not in self._marker_letters:
            self._text(letter)
            return
        self._candidate += letter
        if self._candidate in self._markers:
            marker, self._candidate = self._candidate, ""
            self._at_marker(marker)
        elif not any(marker.startswith(self._candidate) for marker in self._markers):
            candidate, self._candidate = self._candidate, ""
            self._text(candidate[0])
            for held in candidate[1:]:
                self._step(held)

    def _at_marker(self, marker: str) -> None:
        if marker == self._close:
            if self._is_after_call:
                self._space.clear()
            else:
                self._flush_space()
                self._output.text(marker)
            self._is_after_call = False
            return
        self._begin(marker)

    def _begin(self, marker: str) -> None:
        self._opened_by = marker
        self._num_before = self._output.num_calls
        self._reader = self._reader_factory(self._output)

    def _text(self, letter: str) -> None:
        if letter.isspace():
            self._space.append(letter)
            return
        if letter == self._separator and self._is_after_call:
            self._may_begin = True
            self._space.append(letter)
            return
        if letter in self._first_letters and self._may_begin:
            self._begin("")
            self._step(letter)
            return
        self._may_begin = self._is_after_call = False
        self._flush_space()
        self._output.text(letter)

    def _flush_candidate(self) -> None:
        candidate, self._candidate = self._candidate, ""
        for letter in candidate:
            self._text(letter)

    def _flush_space(self) -> None:
        self._output.text("".join(self._space))
        self._space.clear()
