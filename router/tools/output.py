"""What a parser makes of a model's text: pieces of text and of tool calls, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; ``index`` counts the calls of a choice."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Piece = str | CallStart | CallArguments


class ToolParser(Protocol):
    """Splits the text of one choice. The pieces do not depend on where the text is cut, except for their lengths."""

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that more text completes."""
        ...

    def finish(self) -> list[Piece]:
        """Return what was held back. No text may follow."""
        ...

    @property
    def is_in_call(self) -> bool:
        """True if the last call has begun, and its arguments are not whole."""
        ...


class PieceCollector:
    """The pieces so far; neighbours of one kind are joined."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.is_in_call = False
        self._pieces: list[Piece] = []
        self._open: list[str] = []  # of the last piece, of text or of arguments
        self._is_text = True

    def text(self, text: str) -> None:
        """Add text outside calls."""
        self._extend(text, is_text=True)

    def start(self, name: str) -> None:
        """Begin the next call."""
        self._close()
        self._pieces.append(CallStart(self.num_calls, name))
        self.num_calls += 1
        self.is_in_call = True

    def arguments(self, text: str) -> None:
        """Add to the arguments of the last call."""
        self._extend(text, is_text=False)

    def end(self) -> None:
        """End the arguments of the last call."""
        self.is_in_call = False

    def take(self) -> list[Piece]:
        """Return the pieces since the last call."""
        self._close()
        pieces, self._pieces = self._pieces, []
        return pieces

    def _extend(self, text: str, *, is_text: bool) -> None:
        if is_text != self._is_text:
            self._close()
            self._is_text = is_text
        self._open.append(text)

    def _close(self) -> None:
        text = "".join(self._open)
        self._open.clear()
        if text:
            self._pieces.append(text if self._is_text else CallArguments(self.num_calls - 1, text))


def whole_characters(text: str) -> str:
    """Return a text as UTF-8 can have it: halves of a character (surrogates) are joined, and one alone becomes U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
