"""The tools of a chat, as the client gives them: ``tools``, ``tool_choice``, ``parallel_tool_calls``, and earlier calls.

Owns their checks, and the form of the output in which a call is forced or is one of two ways to answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from core.errors import InvalidRequest
from core.grammar.limits import ENDLESS, MAX_SCHEMA_BYTES, check_limits
from core.grammar.tool_calls import CallSyntax, calls_schema, form_or_calls
from core.wire.sampling import IGNORES_END, StructuredOutput
from router.openai.requests import ChatCompletionRequest

MAX_TOOLS = 128
_MAX_NAME = 64
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{_MAX_NAME}}}")
_OWN_WORD = "json_schema "  # of a form; a client's tool has no such field
_FIELDS = (("description", str, "a string"), ("strict", bool, "true or false"))  # of a function, that a client may leave out
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a request with ``tool_choice`` other than none.

    ``definitions`` are the client's objects, for the template. ``schemas`` are the functions' parameters by name. ``named`` is
    the function to call, empty unless it is named. ``form``: what a forced call must be; None = the model chooses.
    """

    definitions: list[dict[str, Any]]
    schemas: dict[str, dict[str, Any]]
    choice: Literal["auto", "required", "named"]
    named: str
    is_parallel: bool
    form: StructuredOutput | None = None


def tool_use(request: ChatCompletionRequest) -> ToolUse | None:
    """Return the tools that the model may call, None if there are none.

    Raises:
        InvalidRequest: a tool or the choice is malformed, or excludes another field; names the field.
    """
    schemas = _schemas(request.tools)
    choice, named = _choice(request.tool_choice, schemas)
    if not schemas or choice == "none":
        return None
    is_parallel = request.parallel_tool_calls is not False
    form = _form(choice, named, schemas, is_parallel)
    if form is not None and request.ignore_eos:
        raise InvalidRequest(IGNORES_END, param="ignore_eos")
    return ToolUse(definitions=request.tools, schemas=schemas, choice=choice, named=named, is_parallel=is_parallel, form=form)


def form_or_free_calls(
    form: StructuredOutput, form_field: str, tools: ToolUse, syntaxes: Sequence[CallSyntax], special_tokens: Mapping[str, int]
) -> StructuredOutput:
    """Return the form of an output that is of ``form`` or calls tools, as the model chooses; ``syntaxes`` say how it calls.

    Raises:
        InvalidRequest: there are none, or the form and the tools together are too large; names ``form_field``.
    """
    if not syntaxes:
        raise InvalidRequest(
            f"{form_field} and tools are not supported together with this model if tool_choice is auto: no grammar has its "
            "format of calls; set tool_choice to none, required or a function",
            param=form_field,
        )
    try:
        return form_or_calls(form, syntaxes, tools.schemas, special_tokens, is_parallel=tools.is_parallel)
    except InvalidRequest as error:
        error.param = form_field
        raise


def calls_form(tools: ToolUse) -> StructuredOutput:
    """Return the form of calls alone, as a list. Raises InvalidRequest if it exceeds a limit, or references lead nowhere."""
    return _calls_form(tools.schemas, tools.is_parallel)


def function_form(tools: ToolUse, name: str) -> StructuredOutput:
    """Return the form of one function's arguments."""
    return _form_of(tools.schemas[name])


def in_words_of_tools(error: InvalidRequest, tools: ToolUse, name: str = "") -> InvalidRequest:
    """Return why calls could not be compiled; ``name`` is the function at fault, whose own schema was compiled."""
    text = error.message
    if not name:
        text = f"the schema of a function {ENDLESS}" if ENDLESS in text else text.replace(_OWN_WORD, "the schema of calls ", 1)
        return InvalidRequest(text, param="tools")
    return _of_function(text, list(tools.schemas).index(name))


def _of_function(text: str, index: int) -> InvalidRequest:
    place = f"tools[{index}]"
    if ENDLESS in text:
        return InvalidRequest(f"the schema of {place}.function.parameters {ENDLESS}", param=place)
    return InvalidRequest(f"{place}.function.parameters: {text.removeprefix(f'{_OWN_WORD}is ')}", param=place)


def earlier_calls(value: object, place: str) -> list[dict[str, Any]]:
    """Return the ``tool_calls`` of an assistant's message for a template, with arguments as objects.

    Arguments that are no JSON object, as of a call that was cut, stay the text that they are.

    Raises:
        InvalidRequest: they are malformed; names the place.
    """
    if not isinstance(value, list):
        raise InvalidRequest(f"{place} must be a list", param=place)
    return [_earlier_call(item, f"{place}[{index}]") for index, item in enumerate(value)]


def _earlier_call(value: object, place: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{place} must be an object with a function that has a name", param=place)
    written = function.get("arguments")
    if not isinstance(written, str | dict | None):
        raise InvalidRequest(f"{place}.function.arguments must be the JSON text of an object", param=place)
    arguments = _object_of(written or "{}") if isinstance(written, str | None) else written
    found = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": value["id"], **found} if isinstance(value.get("id"), str) else found


def _object_of(text: str) -> dict[str, Any] | str:
    """Return the object that a text writes, and else the text."""
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


def _schemas(tools: object) -> dict[str, dict[str, Any]]:
    """Return the parameters of each function by its name."""
    if tools is None:
        return {}
    if not isinstance(tools, list):
        raise InvalidRequest("tools must be a list", param="tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"there are {len(tools)} tools, at most {MAX_TOOLS} are allowed", param="tools")
    schemas: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict):
            raise InvalidRequest(f'{place} must be {{"type": "function", "function": {{...}}}}', param=place)
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidRequest(f"{place}.function.name must be 1 to 64 letters, digits, _, . or -", param=place)
        for field, kind, what in _FIELDS:
            if not isinstance(function.get(field), kind | None):
                raise InvalidRequest(f"{place}.function.{field} must be {what}, or left out", param=f"{place}.function.{field}")
        if name in schemas:
            raise InvalidRequest(f"{place}: there are two functions named {name}", param=place)
        if not isinstance(parameters, dict | None) or (parameters or {}).get("type", "object") != "object":
            raise InvalidRequest(f"{place}.function.parameters must be a JSON schema of type object", param=place)
        schemas[name] = _NO_ARGUMENTS if parameters is None else {"type": "object", **parameters}
    return schemas


def _choice(value: object, schemas: Mapping[str, Any]) -> tuple[Literal["none", "auto", "required", "named"], str]:
    """Return the kind of choice and the function that it names."""
    match value:
        case None | "auto":
            return "auto", ""
        case "none":
            return "none", ""
        case "required" if schemas:
            return "required", ""
        case {"type": "function", "function": {"name": str() as name}} if name in schemas:
            return "named", name
        case "required":
            raise InvalidRequest("tool_choice is required, and there are no tools", param="tool_choice")
        case {"type": "function", "function": {"name": str() as name}}:
            told = repr(name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}…")
            raise InvalidRequest(f"tool_choice names {told}, which is none of the tools", param="tool_choice")
    raise InvalidRequest(
        'tool_choice is not supported: it must be none, auto, required, or {"type": "function", "function": {"name": ...}}',
        param="tool_choice",
    )


def _form(
    choice: Literal["auto", "required", "named"], named: str, schemas: Mapping[str, dict[str, Any]], is_parallel: bool
) -> StructuredOutput | None:
    """Return the form of a forced call: the arguments of the named function, or a list of calls."""
    if choice == "auto":
        return None
    if choice == "required":
        return _calls_form(schemas, is_parallel)
    form = _form_of(schemas[named])
    try:
        check_limits(form)
    except InvalidRequest as error:
        raise _of_function(error.message, list(schemas).index(named)) from None
    return form


def _calls_form(schemas: Mapping[str, dict[str, Any]], is_parallel: bool) -> StructuredOutput:
    """Return the form of a list of calls. Raises InvalidRequest: names the function at fault, if one is."""
    _check_bytes(schemas)
    for index, (name, schema) in enumerate(schemas.items()):
        try:
            check_limits(_form_of({"$defs": {name: schema}}))  # as deep as it is in the list
        except InvalidRequest as error:
            raise _of_function(error.message, index) from None
    try:
        call = calls_schema(schemas)
    except InvalidRequest as error:
        if error.param is not None:
            raise _of_function(error.message, list(schemas).index(error.param)) from None
        raise _of_all(error.message) from None
    most = {} if is_parallel else {"maxItems": 1}
    form = _form_of({"type": "array", "items": {"anyOf": call["anyOf"]}, "minItems": 1, **most, "$defs": call["$defs"]})
    _refuse_more_bytes(len(form.value.encode()))
    return form


def _check_bytes(schemas: Mapping[str, dict[str, Any]]) -> None:
    """Refuse too large schemas before any of them is walked: each may be of the size of a body."""
    total = 0
    for index, schema in enumerate(schemas.values()):
        num_bytes = len(msgspec.json.encode(schema))
        if num_bytes > MAX_SCHEMA_BYTES:
            raise _of_function(f"the JSON schema has {num_bytes} bytes, at most {MAX_SCHEMA_BYTES} are allowed", index)
        total += num_bytes
    _refuse_more_bytes(total)


def _refuse_more_bytes(num_bytes: int) -> None:
    if num_bytes > MAX_SCHEMA_BYTES:
        raise _of_all(f"the JSON schema has {num_bytes} bytes, at most {MAX_SCHEMA_BYTES} are allowed")


def _of_all(text: str) -> InvalidRequest:
    return InvalidRequest(text.replace("JSON schema", "schema of calls", 1), param="tools")


def _form_of(schema: Mapping[str, Any]) -> StructuredOutput:
    return StructuredOutput(kind="json_schema", value=msgspec.json.encode(schema).decode())
