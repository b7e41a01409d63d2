"""The OpenAPI document of the router, made from the types of its bodies and the table of their ranges.

Owns what types do not say: ranges, statuses, headers, media types, examples. Top levels of requests are closed; messages and
their parts are open, because unknown fields in them are ignored (``router.openai.unknown_fields``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from router.http.errors import ErrorBody
from router.openai.requests import (
    NEUTRAL,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from router.openai.responses import ChatChunk, ChatCompletion, Completion
from router.openai.sampling import (
    ID_FIELDS,
    MAX_ID_CHARACTERS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    RANGES,
)
from router.openai.tokenized import Detokenized, Tokenized
from router.openai.tool_choice import MAX_TOOLS
from router.responses_api.bodies import RESPONSE_EVENTS, ResponseBody
from router.responses_api.requests import RESPONSES_NEUTRAL, ResponsesRequest

Schema = dict[str, Any]

_REFERENCE = "#/components/schemas/{name}"
_LENIENT = ("ChatMessage", "InputItem")  # open, with everything that they refer to
_GENERATED = (CompletionRequest, ChatCompletionRequest, ResponsesRequest)
_REFUSALS = {
    400: "The request is wrong; `param` names the field",
    401: "The API key is missing or wrong",
    404: "Another model is served, or there is no such path",
    408: "The body did not arrive in time",
    413: "The body is too large",
    415: "The body is compressed",
    429: "Too many requests",
    431: "The head of the request is too large",
    500: "The router failed",
    502: "A worker failed",
    503: "No worker can serve it now, or the router shuts down",
    504: "The time limit of the request has passed",
}
_NO_JSON_BODY = (401, 404, 431, 500)  # of requests without a body
_MESSAGES = [{"role": "user", "content": "What is a ferry?"}]
_EXAMPLES: Mapping[type, Schema] = {
    CompletionRequest: {"prompt": "A ferry is", "max_tokens": 16, "temperature": 0},
    ResponsesRequest: {"input": "What is a ferry?", "max_output_tokens": 64},
    ChatCompletionRequest: {"messages": _MESSAGES, "max_completion_tokens": 64, "stream": False},
    TokenizeRequest: {"prompt": "A ferry is"},
    DetokenizeRequest: {"tokens": [1, 2, 3]},
}
_CARD: Schema = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by", "max_model_len"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer", "description": "Unix seconds"},
        "owned_by": {"type": "string"},
        "root": {"type": "string"},
        "parent": {"type": "null"},
        "max_model_len": {"type": ["integer", "null"], "description": "tokens; null without a worker"},
        "permission": {"type": "array"},
    },
}
_MODELS: Schema = {
    "type": "object",
    "required": ["object", "data"],
    "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": _CARD}},
}
_VERSION: Schema = {
    "type": "object",
    "required": ["version", "wire_version"],
    "properties": {"version": {"type": "string"}, "wire_version": {"type": "integer"}},
}
_LOAD: Schema = {"type": "object", "required": ["server_load"], "properties": {"server_load": {"type": "integer"}}}
_STATUS: Schema = {
    "type": "object",
    "required": ["status"],
    "properties": {"status": {"type": "string"}, "reason": {"type": ["string", "null"]}},
}
_RETRY_AFTER = {"description": "seconds until another attempt makes sense", "schema": {"type": "string"}}
_REQUEST_ID = {"description": "the client's id of the request, or one of the router's", "schema": {"type": "string"}}
_IGNORED = {"description": "number and names of unknown fields in messages that were ignored", "schema": {"type": "string"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What a method of a path takes and returns. ``answer`` is a type or a schema, None = any text of ``media_type``.

    ``events`` are the types of a stream's events; with ``has_end_mark`` the last is ``[DONE]``.
    ``is_probe``: served without the API key, and may answer 503.
    """

    summary: str
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | Schema | None = None
    events: tuple[type[msgspec.Struct], ...] = ()
    has_end_mark: bool = True
    media_type: str = "application/json"
    is_open: bool = False
    is_probe: bool = False
    query: str = ""  # its parameter, which may be left out


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/completions"): Operation(
        summary="Complete a prompt.", body=CompletionRequest, answer=Completion, events=(Completion,)
    ),
    ("POST", "/v1/chat/completions"): Operation(
        summary="Answer a conversation.", body=ChatCompletionRequest, answer=ChatCompletion, events=(ChatChunk,)
    ),
    ("POST", "/v1/responses"): Operation(
        summary="Answer items of a conversation, by items.",
        body=ResponsesRequest,
        answer=ResponseBody,
        events=RESPONSE_EVENTS,
        has_end_mark=False,
    ),
    ("POST", "/tokenize"): Operation(
        summary="Return the tokens of a text or a conversation.", body=TokenizeRequest, answer=Tokenized
    ),
    ("POST", "/detokenize"): Operation(summary="Return the text of tokens.", body=DetokenizeRequest, answer=Detokenized),
    ("GET", "/v1/models"): Operation(summary="List the served model.", answer=_MODELS),
    ("GET", "/v1/models/{name}"): Operation(summary="Describe the served model.", answer=_CARD),
    ("GET", "/load"): Operation(summary="Return the number of requests in flight.", answer=_LOAD),
    ("GET", "/health"): Operation(summary="Report whether the process works.", answer=_STATUS, is_open=True, is_probe=True),
    ("GET", "/ping"): Operation(summary="As /health.", answer=_STATUS, is_open=True, is_probe=True),
    ("GET", "/ready"): Operation(
        summary="Report whether a request could be served now, and if not, why.", answer=_STATUS, is_open=True, is_probe=True
    ),
    ("GET", "/readyz"): Operation(summary="As /ready.", answer=_STATUS, is_open=True, is_probe=True),
    ("GET", "/version"): Operation(summary="Return the version of kvferry.", answer=_VERSION, is_open=True),
    ("GET", "/metrics"): Operation(summary="Return all metrics in Prometheus's format.", media_type="text/plain", is_open=True),
    ("GET", "/status"): Operation(summary="Return the status page for browsers.", media_type="text/html", is_open=True),
    ("GET", "/status.json"): Operation(
        summary="Return workers, traffic and counters.", answer={"type": "object"}, is_open=True
    ),
    ("GET", "/status/history.json"): Operation(
        summary="Return the last ten minutes in intervals of five seconds.", answer={"type": "object"}, is_open=True
    ),
    ("GET", "/status/requests.json"): Operation(
        summary="Return the latest requests, and the timelines of the request `id`.",
        answer={"type": "object"},
        is_open=True,
        query="id",
    ),
}


@functools.cache
def openapi_document(version: str, served: frozenset[tuple[str, str]], *, has_key: bool) -> bytes:
    """Return the document as JSON, with the methods and paths of ``served``. Made once for the same arguments.

    Raises:
        KeyError: a served path is not in ``OPERATIONS``.
    """
    found = {place: OPERATIONS[place] for place in sorted(served)}
    paths: dict[str, Schema] = {}
    for (method, path), operation in found.items():
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, operation)
    document = {
        "openapi": "3.1.0",
        "info": {"title": "kvferry", "version": version},
        "security": [{"bearer": []}] if has_key else [{}, {"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": _schemas(found.values()),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }
    return msgspec.json.encode(document)


def _operation(method: str, path: str, operation: Operation) -> Schema:
    name = "".join(part.title() for part in path.replace("{", "").replace("}", "").replace(".", "/").split("/"))
    found: Schema = {"operationId": method.lower() + name, "summary": operation.summary, "responses": _responses(operation)}
    if operation.is_open:
        found["security"] = []
    if "{name}" in path:
        found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}]
    if operation.query:
        found["parameters"] = [{"name": operation.query, "in": "query", "required": False, "schema": {"type": "string"}}]
    if operation.body is not None:
        content = {"schema": _reference(operation.body), "example": _EXAMPLES[operation.body]}
        found["requestBody"] = {"required": True, "content": {"application/json": content}}
    return found


def _responses(operation: Operation) -> Schema:
    answer = operation.answer
    schema = {"type": "string"} if answer is None else answer if isinstance(answer, dict) else _reference(answer)
    content: Schema = {operation.media_type: {"schema": schema}}
    headers = {"X-Request-Id": _REQUEST_ID}
    if operation.events:
        content["text/event-stream"] = {"schema": _event(operation)}
    if operation.body is not None:
        headers["X-KVFerry-Ignored-Fields"] = _IGNORED
    responses = {"200": {"description": "Done", "headers": headers, "content": content}}
    if operation.is_probe:
        responses["503"] = {"description": "Not now; see `reason`", "headers": headers, "content": content}
    statuses = [status for status in _REFUSALS if operation.body is not None or status in _NO_JSON_BODY]
    for status in statuses:
        if not (operation.is_open and status in (401, 404)):
            responses[str(status)] = _refusal(status)
    return responses


def _event(operation: Operation) -> Schema:
    """Return what every server-sent event of a stream is."""
    kinds = [_reference(kind) for kind in operation.events]
    content: Schema = {"anyOf": [*kinds, _reference(ErrorBody)] if operation.has_end_mark else kinds}
    chunk = {"type": "string", "contentMediaType": "application/json", "contentSchema": content}
    last = "`[DONE]` is the last, unless the request has failed"
    if not operation.has_end_mark:
        last = "the last has the whole response, completed, incomplete or failed"
    return {
        "description": f"each event, with `stream`; {last}",
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, chunk]} if operation.has_end_mark else chunk},
    }


def _refusal(status: int) -> Schema:
    headers: Schema = {"X-Request-Id": _REQUEST_ID}
    if status in (429, 503):
        headers["Retry-After"] = _RETRY_AFTER
    if status == 401:
        headers["WWW-Authenticate"] = {"schema": {"const": "Bearer"}}
    content = {"application/json": {"schema": _reference(ErrorBody)}}
    return {"description": _REFUSALS[status], "headers": headers, "content": content}


def _reference(kind: type) -> Schema:
    return {"$ref": _REFERENCE.format(name=kind.__name__)}


def _schemas(operations: Iterable[Operation]) -> dict[str, Schema]:
    kinds: list[type] = [ErrorBody]
    for operation in operations:
        named = (operation.body, operation.answer, *operation.events)
        kinds += [kind for kind in named if isinstance(kind, type) and kind not in kinds]
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    for kind in (kind for kind in _GENERATED if kind in kinds):
        neutral = RESPONSES_NEUTRAL if kind is ResponsesRequest else NEUTRAL
        _add_limits(schemas[kind.__name__]["properties"], neutral)
    for name in set().union(*(_referred(name, schemas) for name in _LENIENT)):
        schemas[name].pop("additionalProperties", None)
        if schemas[name].get("type") == "object":
            schemas[name]["additionalProperties"] = True
    return schemas


def _add_limits(fields: dict[str, Schema], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Add what the router refuses although the types allow it."""
    for name, allowed in RANGES.items():
        if name in fields:
            number = _not_null(fields[name])
            low = 0 if name == "max_tokens" and "echo" in fields and "prompt" in fields else allowed.low
            number["exclusiveMinimum" if allowed.is_low_open else "minimum"] = low
            if allowed.high is not None:
                number["maximum"] = allowed.high
    for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
        if name in fields and _not_null(fields[name]).get("type") == "integer":
            _not_null(fields[name]).update(minimum=0, maximum=MAX_LOGPROBS)
    for name in ID_FIELDS:
        _not_null(fields[name])["maxLength"] = MAX_ID_CHARACTERS
    for name, values in neutral.items():
        if name in fields:
            fields[name] = {"enum": [None, *values], "description": "known, and not supported: other values are refused"}
    _add_shapes(fields)
    if "messages" in fields:
        fields["messages"]["minItems"] = 1
        fields["echo"] = {"enum": [None, False]}


def _add_shapes(fields: dict[str, Schema]) -> None:
    """Add the outlines and bounds of what is a list or an object, or is read by its value."""
    text, null = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}, {"type": "null"}
    tokens = {"type": "object", "maxProperties": MAX_LOGIT_BIAS, "propertyNames": {"pattern": "^[0-9]{1,10}$"}}
    shapes: dict[str, list[Schema]] = {
        "stop": [text, {"type": "array", "items": text, "maxItems": MAX_STOP_STRINGS}],
        "logit_bias": [{**tokens, "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}],
        "truncate_prompt_tokens": [{"type": "integer", "minimum": 1}, {"const": -1}],
        "tools": [{"type": "array", "items": {"type": "object", "required": ["type"]}, "maxItems": MAX_TOOLS}],
        "tool_choice": [{"enum": ["none", "auto", "required"]}, {"type": "object", "required": ["type"]}],
        "response_format": [{"type": "object", "required": ["type"]}],
    }
    for name, allowed in shapes.items():
        if name in fields:
            fields[name] = {"anyOf": [*allowed, null], "default": None}


def _not_null(schema: Schema) -> Schema:
    """Return the branch of a field that is not null."""
    branches: list[Schema] = [branch for branch in schema.get("anyOf", [schema]) if branch.get("type") != "null"]
    return branches[0]


def _referred(name: str, schemas: Mapping[str, Schema]) -> set[str]:
    """Return a schema's name and those that it refers to, also by others; empty if it is not there."""
    found: set[str] = set()
    waiting = [name] if name in schemas else []
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += list(_references_in(schemas[name]))
    return found


def _references_in(value: object) -> Iterable[str]:
    if isinstance(value, dict):
        for key, content in value.items():
            if key == "$ref":
                yield str(content).rpartition("/")[2]
            else:
                yield from _references_in(content)
    elif isinstance(value, list):
        for item in value:
            yield from _references_in(item)
