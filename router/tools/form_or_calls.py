"""Tells an answer of a given form from calls, by how the text begins. What begins as a call of a known function is one."""

from __future__ import annotations

from collections.abc import Sequence

from core.grammar.limits import parse_choices
from core.wire.sampling import StructuredOutput
from router.tools.output import Piece, PieceCollector, ToolParser

Opening = tuple[str, ...]  # parts of a text, with space between them if the model likes
_SPACE = " \t\r\n"
_JSON_STARTS = '[{"-0123456789tfn'  # the first letters of JSON values
_MOST_SPACE = 32  # in a row, as the grammar of calls has it (``core.grammar.translation.WHITESPACE``); more is no call


class FormOrCallsParser:
    """Passes a text that begins as one of ``openings`` to the parser of calls, and any other on as it is.

    ``form``: what a cut beginning of a call may be the beginning of, and is text then; without one it is text.
    """

    def __init__(self, openings: Sequence[Opening], calls: ToolParser, *, form: StructuredOutput | None = None) -> None:
        self._openings = openings
        self._calls = calls
        self._form = form
        self._has_calls: bool | None = None  # None while it may still be either
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that more text completes."""
        if self._has_calls is None:
            text, self._held = self._held + text, ""
            self._openings = [opening for opening in self._openings if _begins(text, opening) is not False]
            self._has_calls = self._decided(text)
        if self._has_calls is None:
            self._held = text
            return []
        return self._calls.push(text) if self._has_calls else _as_text(text)

    def finish(self) -> list[Piece]:
        """Return what was held back."""
        if self._has_calls:
            return self._calls.finish()
        return _as_text(self._held) if self._form is None or _may_begin(self._form, self._held) else []

    @property
    def has_calls(self) -> bool:
        """True if the text began as calls."""
        return bool(self._has_calls)

    @property
    def is_in_call(self) -> bool:
        """As that of the parser of calls."""
        return self._calls.is_in_call

    def _decided(self, text: str) -> bool | None:
        if not self._openings:
            return False
        return True if any(_begins(text, opening) for opening in self._openings) else None


def _begins(text: str, opening: Opening) -> bool | None:
    """Return whether a text begins so; None if more of it must be seen."""
    place = 0
    for number, part in enumerate(opening):
        start = place
        while number and place < len(text) and text[place] in _SPACE:
            place += 1
        if place - start > _MOST_SPACE:
            return False
        if not text.startswith(part, place):
            return None if part.startswith(text[place:]) else False
        place += len(part)
    return True


def _may_begin(form: StructuredOutput, text: str) -> bool:
    """Return False if no text of the form begins so. Only choices and JSON tell; expressions and grammars are not asked."""
    match form.kind:
        case "choice":
            return any(choice.startswith(text) for choice in parse_choices(form.value))
        case "json_object":
            return text.lstrip(_SPACE)[:1] in ("", "{")
        case "json_schema":
            return _may_begin_json(text)
    return True


def _may_begin_json(text: str) -> bool:
    """Return False if no JSON value begins so, as far as its first letters tell."""
    rest = text.lstrip(_SPACE)
    if rest.startswith("["):
        rest = rest[1:].lstrip(_SPACE)
        return not rest or rest[0] in f"]{_JSON_STARTS}"
    return not rest or rest[0] in _JSON_STARTS


def _as_text(text: str) -> list[Piece]:
    output = PieceCollector()
    output.text(text)
    return output.take()
