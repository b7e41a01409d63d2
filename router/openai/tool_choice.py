"""The tools of a chat, as the client gives them: ``tools``, ``tool_choice``, ``parallel_tool_calls``, and earlier calls.

Owns their checks, and the form of output that a forced call must have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from core.errors import InvalidRequest
from core.grammar.limits import check_limits
from core.wire.sampling import IGNORES_END, StructuredOutput
from router.openai.requests import ChatCompletionRequest
from router.openai.structured import field_of_form

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
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
    form_field = field_of_form(request)
    if form_field is not None and choice == "auto":
        raise InvalidRequest(
            f"{form_field} and tools are not supported together unless tool_choice says whether to call: "
            "set it to none, required or a function",
            param=form_field,
        )
    is_parallel = request.parallel_tool_calls is not False
    form = _form(choice, named, schemas, is_parallel)
    if form is not None and request.ignore_eos:
        raise InvalidRequest(IGNORES_END, param="ignore_eos")
    return ToolUse(definitions=request.tools, schemas=schemas, choice=choice, named=named, is_parallel=is_parallel, form=form)


def earlier_calls(value: object, place: str) -> list[dict[str, Any]]:
    """Return the ``tool_calls`` of an assistant's message for a template, with arguments as objects.

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
    try:
        arguments = msgspec.json.decode(written or "{}") if isinstance(written, str | None) else written
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{place}.function.arguments must be the JSON text of an object", param=place)
    found = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": value["id"], **found} if isinstance(value.get("id"), str) else found


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
        if name in schemas:
            raise InvalidRequest(f"{place}: there are two functions named {name}", param=place)
        if not isinstance(parameters, dict | None):
            raise InvalidRequest(f"{place}.function.parameters must be a JSON schema", param=place)
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
            raise InvalidRequest(f"tool_choice names {name!r}, which is none of the tools", param="tool_choice")
    raise InvalidRequest(
        "tool_choice is not supported: it must be none, auto, required, or name a function", param="tool_choice"
    )


def _form(
    choice: Literal["auto", "required", "named"], named: str, schemas: Mapping[str, dict[str, Any]], is_parallel: bool
) -> StructuredOutput | None:
    """Return the form of a forced call: the arguments of the named function, or a list of calls."""
    if choice == "auto":
        return None
    schema = schemas[named] if choice == "named" else _calls_schema(schemas, is_parallel)
    form = StructuredOutput(kind="json_schema", value=msgspec.json.encode(schema).decode())
    try:
        check_limits(form)
    except InvalidRequest as error:
        error.param = "tools"
        raise
    return form


def _calls_schema(schemas: Mapping[str, dict[str, Any]], is_parallel: bool) -> dict[str, Any]:
    """Return the schema of a list of calls; a function's own references are moved with its schema."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name in schemas
    ]
    definitions = {name: _moved(schema, f"#/$defs/{name}") for name, schema in schemas.items()}
    most = {} if is_parallel else {"maxItems": 1}
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most, "$defs": definitions}


def _moved(schema: Any, base: str) -> Any:  # noqa: ANN401 - JSON
    if isinstance(schema, list):
        return [_moved(item, base) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: value if key in ("enum", "const", "default") else _moved(value, base) for key, value in schema.items()}
    reference = found.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        found["$ref"] = base + reference[1:]
    return found
