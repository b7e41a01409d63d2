"""Calls as a Python list, ``[weather(city="Oslo", days=2), time()]``, of Llama 3.2, Llama 4 and Gemma 3.

A call is passed on when its closing parenthesis has been read. Its arguments are literals given by name.
"""

from __future__ import annotations

import ast
import json

from router.tools.json_reader import MAX_DEPTH, ReaderStatus
from router.tools.output import PieceCollector, whole_characters

_MAX_CALL = 64 << 10  # characters
_CLOSER = {"(": ")", "[": "]", "{": "}"}
_CONSTANTS = {"true": True, "false": False, "null": None}  # as JSON spells them


class PythonicReader:
    """Reads a list of calls."""

    def __init__(self, output: PieceCollector) -> None:
        self._output = output
        self._is_open = False
        self._has_calls = False
        self._before: list[str] = []  # the list since the last call
        self._call: list[str] = []
        self._closers: list[str] = []
        self._quote = ""
        self._is_escaped = False

    @property
    def unread(self) -> str:
        """What has been read since the last call."""
        return "".join(self._before + self._call)

    def feed(self, letter: str) -> ReaderStatus:
        """Read a letter."""
        if not self._is_open:
            if letter != "[":
                return ReaderStatus.WRONG
            self._is_open = True
            self._before.append(letter)
            return ReaderStatus.MORE
        if not self._call:
            return self._between_calls(letter)
        if len(self._call) >= _MAX_CALL:
            return ReaderStatus.WRONG
        if not self._closers and not (letter == "(" or letter.isalnum() or letter in "_.-"):
            return ReaderStatus.WRONG
        if not self._follow(letter):
            return ReaderStatus.WRONG
        self._call.append(letter)
        return self._end_call() if not self._closers and letter == ")" else ReaderStatus.MORE

    def _between_calls(self, letter: str) -> ReaderStatus:
        if letter == "]":
            return ReaderStatus.DONE if self._has_calls else ReaderStatus.WRONG
        if letter.isalpha() or letter == "_":
            self._call.append(letter)
            return ReaderStatus.MORE
        if letter.isspace() or (letter == "," and self._has_calls):
            self._before.append(letter)
            return ReaderStatus.MORE
        return ReaderStatus.WRONG

    def _follow(self, letter: str) -> bool:
        """Follow strings and brackets; return False if they do not match or are too deep."""
        if self._quote:
            is_end = letter == self._quote and not self._is_escaped
            self._is_escaped = letter == "\\" and not self._is_escaped
            self._quote = "" if is_end else self._quote
            return True
        if letter in ")]}":
            return self._closers.pop() == letter
        if letter in "\"'":
            self._quote = letter
        elif letter in _CLOSER:
            self._closers.append(_CLOSER[letter])
        return len(self._closers) <= MAX_DEPTH

    def _end_call(self) -> ReaderStatus:
        found = _read_call("".join(self._call))
        if found is None:
            self._call.pop()  # the letter is not consumed
            return ReaderStatus.WRONG
        name, arguments = found
        self._output.start(name)
        self._output.arguments(arguments)
        self._output.end()
        self._has_calls = True
        self._call.clear()
        self._before.clear()
        return ReaderStatus.MORE


def _read_call(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments as JSON; None if it is no call with literals by name."""
    name, _, inner = text.partition("(")
    try:
        call = ast.parse("call(" + inner, mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        arguments = {keyword.arg: _literal(keyword.value) for keyword in call.keywords}
        if None in arguments:  # **mapping
            return None
        return name, whole_characters(json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> object:
    """Return the value of a literal, JSON's constants among them. Raises ValueError for anything else."""
    match node:
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {str(_literal(key)): _literal(value) for key, value in zip(keys, values, strict=True) if key is not None}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("no JSON value")
    return value
