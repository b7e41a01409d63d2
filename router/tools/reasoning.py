"""Splits reasoning between thinking tags from the answer, letter by letter; and arguments that a grammar has forced."""

from __future__ import annotations

from router.tools.output import CallArguments, CallStart, Piece

OPEN, CLOSE = "<think>", "</think>"


class ReasoningParser:
    """Splits the text of one choice. ``is_open``: the prompt has opened the tag.

    Reasoning may only come first. Space around the tags is dropped.
    """

    def __init__(self, *, is_open: bool) -> None:
        self._marker = CLOSE if is_open else OPEN  # the next; empty after the end of reasoning
        self._candidate = ""
        self._space: list[str] = []
        self._is_leading = True
        self._num_read = 0
        self._end = 0  # of the reasoning
        self._reasoning: list[str] = []
        self._text: list[str] = []

    @property
    def num_characters(self) -> int:
        """How many characters from the start are reasoning, with its tags."""
        return self._num_read if self._marker == CLOSE else self._end

    def push(self, text: str) -> tuple[str, str]:
        """Return the new reasoning and the new text of the answer."""
        for place, letter in enumerate(text):
            if not self._marker and not self._is_leading:
                self._text.append(text[place:])
                break
            self._step(letter)
        return self._take()

    def finish(self) -> tuple[str, str]:
        """Return what was held back."""
        self._release(self._candidate)
        if self._marker == OPEN:
            self._text += self._space
        return self._take()

    def _step(self, letter: str) -> None:
        self._num_read += 1
        if not self._marker:
            if not letter.isspace():
                self._is_leading = False
                self._text.append(letter)
            return
        self._candidate += letter
        while self._candidate and not self._marker.startswith(self._candidate):
            self._release(self._candidate[0])
            self._candidate = self._candidate[1:]
            if not self._marker:  # there is no reasoning
                self._text.append(self._candidate)
                self._candidate = ""
        if self._marker and self._candidate == self._marker:
            self._end = self._num_read if self._marker == CLOSE else 0
            self._marker = CLOSE if self._marker == OPEN else ""
            self._candidate = ""
            self._space.clear()
            self._is_leading = True

    def _release(self, letters: str) -> None:
        """Take letters that are no part of a tag."""
        for letter in letters:
            if letter.isspace():
                if self._marker == OPEN or not self._is_leading:
                    self._space.append(letter)
                continue
            if self._marker == OPEN:
                self._marker = ""
            self._is_leading = False
            found = self._reasoning if self._marker else self._text
            found += self._space
            self._space.clear()
            found.append(letter)

    def _take(self) -> tuple[str, str]:
        found = "".join(self._reasoning), "".join(self._text)
        self._reasoning.clear()
        self._text.clear()
        return found


class NamedArgumentsParser:
    """Makes all text the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def push(self, text: str) -> list[Piece]:
        """Return the text as arguments, after the start of the call."""
        if not text:
            return []
        start: list[Piece] = [] if self._has_begun else [CallStart(0, self._name)]
        self._has_begun = True
        return [*start, CallArguments(0, text)]

    def finish(self) -> list[Piece]:
        """Return nothing: no text is held back."""
        return []

    @property
    def is_in_call(self) -> bool:
        """Return False: nothing tells the end of the arguments but the end of the text."""
        return False
