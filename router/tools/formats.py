"""The formats of tool calls by name: entry points of the group ``kvferry.tool_formats``, and which one a template means.

An entry point is a ``ToolFormat``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from core.errors import ConfigError
from core.grammar.tool_calls import CallSyntax
from router.tools.json_reader import CallListReader, CallObjectReader
from router.tools.marker_parser import MarkerParser
from router.tools.named_reader import MistralReader, NamedCallReader
from router.tools.output import ToolParser
from router.tools.pythonic_reader import PythonicReader

GROUP = "kvferry.tool_formats"
AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a family of models writes calls.

    ``parser`` makes the parser of one choice. ``shows_special_tokens``: its markers are special tokens, which the text must
    keep. ``num_id_letters``: the length of call ids if templates insist on one, with letters and digits only. ``syntaxes``: how
    a grammar writes calls, all of which the parser reads; none if no grammar can.
    """

    parser: Callable[[], ToolParser]
    shows_special_tokens: bool = False
    num_id_letters: int = 0
    syntaxes: tuple[CallSyntax, ...] = ()


HERMES = ToolFormat(
    parser=lambda: MarkerParser(("<tool_call>",), CallObjectReader, close="</tool_call>"),
    syntaxes=(CallSyntax(before="<tool_call>", after="</tool_call>"),),
)
LLAMA3_JSON = ToolFormat(
    parser=lambda: MarkerParser(
        ("<|python_tag|>",),
        lambda output: CallObjectReader(output, needs_arguments=True),
        first_letters="{",
        separator=";",
    ),
    shows_special_tokens=True,
    syntaxes=(
        CallSyntax(arguments_key="parameters", between=";"),
        CallSyntax(first="<|python_tag|>", arguments_key="parameters", between=";"),
    ),
)
PYTHONIC = ToolFormat(
    parser=lambda: MarkerParser(("<|python_start|>",), PythonicReader, close="<|python_end|>", first_letters="["),
    shows_special_tokens=True,
)
MISTRAL = ToolFormat(
    parser=lambda: MarkerParser(("[TOOL_CALLS]",), MistralReader),
    shows_special_tokens=True,
    num_id_letters=9,
    syntaxes=(
        CallSyntax(first="[TOOL_CALLS][", between=",", last="]"),
        CallSyntax(before="[TOOL_CALLS]", name_end="[ARGS]"),
        CallSyntax(before="[TOOL_CALLS]", name_end=""),
    ),
)
FUNCTIONARY = ToolFormat(
    parser=lambda: MarkerParser(("<function=",), lambda output: NamedCallReader(output, end=">"), close="</function>"),
    syntaxes=(CallSyntax(before="<function=", name_end=">", after="</function>"),),
)
# Of required calls, whose form a grammar gives: a JSON list.
REQUIRED = ToolFormat(parser=lambda: MarkerParser((), CallListReader, first_letters="[", is_forced=True))

_MARKS = {  # in chat templates
    "<tool_call>": HERMES,
    "[TOOL_CALLS]": MISTRAL,
    "<function=": FUNCTIONARY,
    "<|python_start|>": PYTHONIC,
    "<|python_tag|>": LLAMA3_JSON,
    '"parameters": dictionary of argument name': LLAMA3_JSON,
    "[func_name1(": PYTHONIC,
}
_XML_MARK = "<parameter="  # of arguments in XML, within the marks of other formats


def has_known_calls(template: str) -> bool:
    """Return True if a template writes calls in one of the known formats, as far as its marks tell."""
    return any(mark in template for mark in _MARKS) and _XML_MARK not in template


def tool_format(name: str, template: str = "") -> ToolFormat:
    """Return a format by its name; ``auto`` is the one whose marks the template has, or else Hermes'.

    Raises:
        ConfigError: there is none of this name; lists the known ones.
    """
    if name == AUTO:  # without the metadata of the installation, which may be older than the code
        return next((found for mark, found in _MARKS.items() if mark in template), HERMES)
    chosen = _entry_point(name).load()
    if not isinstance(chosen, ToolFormat):
        raise ConfigError(f"router.tool_format = {name!r}: it is no ToolFormat", param="router.tool_format")
    return chosen


def check_name(name: str) -> None:
    """Look for a format by its name; nothing is imported.

    Raises:
        ConfigError: there is none of this name; lists the known ones.
    """
    if name != AUTO:
        _entry_point(name)


def _entry_point(name: str) -> EntryPoint:
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        known = ", ".join((AUTO, *sorted(found)))
        raise ConfigError(f"router.tool_format = {name!r}: no such format; known: {known}", param="router.tool_format")
    return found[name]
