"""The router's HTTP application: routes, authorization, body limits, and errors in OpenAI's shape.

Owns the HTTP part of the API; ``router.http.endpoints`` gives requests their meaning.
"""

from __future__ import annotations

import hmac
import logging
from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

import msgspec
from litestar import Litestar, MediaType, Request, Response, get, post
from litestar.config.cors import CORSConfig
from litestar.connection import ASGIConnection
from litestar.datastructures import State
from litestar.dto import MsgspecDTO
from litestar.exceptions import (
    HTTPException,
    InternalServerException,
    MethodNotAllowedException,
    NotAuthorizedException,
    NotFoundException,
    ValidationException,
)
from litestar.handlers import BaseRouteHandler, HTTPRouteHandler
from litestar.params import Body, Parameter
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp, ExceptionHandler, Guard, Scope
from litestar.typing import FieldDefinition
from litestar.utils import normalize_path

from core.errors import Cancelled, DeadlineUnreachable, InvalidRequest, KVFerryError
from core.log import event
from core.tracing import parse_trace_context
from core.wire.messages import ErrorInfo
from core.worker.ops_http import OpsResponse
from router.http.api_keys import key_of, tenant_of
from router.http.caller import Caller
from router.http.endpoints import Endpoints
from router.http.errors import BUG, RETRY_AFTER_S, AnthropicErrorBody, ErrorBody, RequestFailure, error_response, is_anthropics
from router.http.key_limit import KeyLimit
from router.http.middleware import RequestIdMiddleware, client_id, report_ignored
from router.http.openapi import openapi_document
from router.http.probes import ProbeAnswers
from router.http.uploads import UploadLimit, hold_of
from router.openai.body_parser import decode_fields
from router.openai.requests import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from router.openai.tokenized import Detokenized, Tokenized
from router.openai.unknown_fields import parse_lenient_body
from router.rendered.bodies import CHAT, COMPLETIONS, COUNT_TOKENS, MESSAGES, EngineBody, check_timed_body
from router.responses_api.requests import ResponsesRequest

logger = logging.getLogger(__name__)

_HTTP_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_encoding",
}
_SHOWN_CHARACTERS = 100  # of a path that the client asked for
_GONE = "client disconnected prematurely"  # the text is the only difference to Litestar's other exceptions
_OPEN = "is_open"  # handler option: served without the API key

Decoded = TypeVar("Decoded", bound=msgspec.Struct)
Generated = TypeVar("Generated", ChatCompletionRequest, CompletionRequest)


class TypedBody(MsgspecDTO[msgspec.Struct]):
    """Decodes a body as the type of the handler's ``data`` with ``parse_lenient_body``, whose errors name the field."""

    @classmethod
    def create_for_field_definition(
        cls, field_definition: FieldDefinition, handler_id: str, backend_cls: object = None
    ) -> None:
        """Do nothing: bodies are decoded as their own type."""

    def decode_bytes(self, value: bytes) -> msgspec.Struct:
        """Return the decoded body."""
        connection = self.asgi_connection
        kind: type[msgspec.Struct] = connection.route_handler.parsed_data_field.annotation
        return _decoded(_without_mark(value), kind, connection.scope)


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """Limits: bytes of one request's body, bytes of all bodies together, and requests per API key.

    With ``has_fair_shares`` the requests of different keys share the cluster fairly; without API keys all count as one client.
    """

    max_body_bytes: int = 12 << 20
    max_upload_bytes: int = 256 << 20
    max_requests_per_key: int = 0  # open at once; 0 = no limit
    has_fair_shares: bool = True


def create_app(
    endpoints: Endpoints,
    *,
    version: str,
    api_key: str = "",
    limits: BodyLimits | None = None,
    has_metrics: bool = True,
    cors_origins: Sequence[str] = (),
) -> ASGIApp:
    """Return the ASGI application. An empty ``api_key`` turns authorization off; commas separate several keys.

    Without ``has_metrics`` the application has no metrics and status; they have their own port. Browser pages from
    ``cors_origins`` may call the API.
    """
    limits = limits or BodyLimits()
    probes = ProbeAnswers(endpoints, version)
    routes = [*_generation_routes(endpoints), *_text_routes(endpoints), *_status_routes(endpoints, probes)]
    routes += _operator_routes(probes) if has_metrics else []
    on_error = _on_error(endpoints, _Places(frozenset(path for route in routes for path in route.paths), limits.max_body_bytes))
    app = Litestar(
        route_handlers=[*routes, _document_route(openapi_document(version, _described(routes), has_key=bool(api_key)))],
        request_max_body_size=limits.max_body_bytes,
        guards=[*([_guard(api_key)] if api_key else []), _check_encoding],
        exception_handlers={
            KVFerryError: on_error,
            RequestFailure: on_error,
            HTTPException: on_error,
            Exception: on_error,
        },
        openapi_config=None,
        logging_config=None,
        state=State({"has_tenants": limits.has_fair_shares and bool(api_key)}),
        cors_config=_cors(cors_origins),
    )
    paths = frozenset(route.path for route in app.routes)
    uploads = UploadLimit(app, limits.max_upload_bytes)
    endpoints.metrics.watch("upload_bytes", "Bytes of request bodies in memory.", lambda: uploads.num_bytes)
    app_with_limits: ASGIApp = uploads
    if limits.max_requests_per_key and api_key:
        app_with_limits = KeyLimit(uploads, limits.max_requests_per_key)
    return RequestIdMiddleware(app_with_limits, endpoints.metrics, paths, is_closing=lambda: endpoints.is_closing)


def _cors(origins: Sequence[str]) -> CORSConfig | None:
    if not origins:
        return None
    # No credentials: the page's script sends the key as a header, and the API uses no cookies.
    return CORSConfig(
        allow_origins=list(origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "x-kvferry-ignored-fields", "retry-after"],
    )


def _without_mark(body: bytes) -> bytes:
    """Return a body without the byte order mark that some clients put before JSON."""
    return body.removeprefix(BOM_UTF8)


def _generation_routes(endpoints: Endpoints) -> list[BaseRouteHandler]:
    async def read(path: str, request: Request[Any, Any, Any], kind: type[Generated]) -> tuple[Generated | EngineBody, Caller]:
        content = _without_mark(await request.body())
        caller = _caller(endpoints, request, None)
        body: Generated | EngineBody | None = await endpoints.engine_body(path, content, caller)
        body = body or _decoded(content, kind, request.scope)
        named = _name_of(body) if isinstance(body, EngineBody) else body.request_id
        return body, replace(caller, client_id=client_id(request.scope, named))

    @post(COMPLETIONS, status_code=200)
    async def completions(request: Request[Any, Any, Any]) -> ASGIApp:
        """Complete a prompt."""
        body, caller = await read(COMPLETIONS, request, CompletionRequest)
        if isinstance(body, EngineBody):
            return await endpoints.serve_by_engine(body, caller)
        return await endpoints.complete(body, caller)

    @post(CHAT, status_code=200)
    async def chat_completions(request: Request[Any, Any, Any]) -> ASGIApp:
        """Answer a conversation."""
        body, caller = await read(CHAT, request, ChatCompletionRequest)
        if isinstance(body, EngineBody):
            return await endpoints.serve_by_engine(body, caller)
        return await endpoints.chat(body, caller)

    @post("/v1/responses", dto=TypedBody, status_code=200)
    async def responses(data: Annotated[ResponsesRequest, Body()], request: Request[Any, Any, Any]) -> ASGIApp:
        """Answer items of a conversation, by items."""
        return await endpoints.respond(data, _caller(endpoints, request, data.request_id))

    async def anthropics_body(path: str, request: Request[Any, Any, Any]) -> tuple[EngineBody, Caller]:
        content = _without_mark(await request.body())
        caller = _caller(endpoints, request, None)
        body = await endpoints.engine_body(path, content, caller)
        if body is None:
            if endpoints.gateway.engine_api.is_there or not endpoints.gateway.core.membership.workers:
                check_timed_body(content)
                decode_fields(content)
            endpoints.check_ready()  # engines that are all away may be back soon
            raise NotFoundException(f"{path} is served by vLLM engines only")
        return body, replace(caller, client_id=client_id(request.scope, _name_of(body)))

    @post(MESSAGES, status_code=200, include_in_schema=False)
    async def messages(request: Request[Any, Any, Any]) -> ASGIApp:
        """Answer a conversation in Anthropic's form, by the engine."""
        return await endpoints.serve_by_engine(*await anthropics_body(MESSAGES, request))

    @post(COUNT_TOKENS, status_code=200, include_in_schema=False)
    async def count_tokens(request: Request[Any, Any, Any]) -> dict[str, Any]:
        """Return how many tokens a conversation in Anthropic's form has, by the engine."""
        return await endpoints.count_by_engine(*await anthropics_body(COUNT_TOKENS, request))

    return [completions, chat_completions, responses, messages, count_tokens]


def _text_routes(endpoints: Endpoints) -> list[BaseRouteHandler]:
    @post("/tokenize", dto=TypedBody, return_dto=None, status_code=200)
    async def tokenize(data: Annotated[TokenizeRequest, Body()], request: Request[Any, Any, Any]) -> Tokenized:
        """Return the tokens of a text or a conversation."""
        return await endpoints.tokenize(data, _caller(endpoints, request, None))

    @post("/detokenize", dto=TypedBody, return_dto=None, status_code=200)
    async def detokenize(data: Annotated[DetokenizeRequest, Body()], request: Request[Any, Any, Any]) -> Detokenized:
        """Return the text of tokens."""
        return await endpoints.detokenize(data, _caller(endpoints, request, None))

    return [tokenize, detokenize]


def _status_routes(endpoints: Endpoints, probes: ProbeAnswers) -> list[BaseRouteHandler]:
    @get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the served model."""
        return {"object": "list", "data": endpoints.models()}

    @get("/v1/models/{name:path}")
    async def model(name: Annotated[str, Parameter()]) -> dict[str, Any]:
        """Describe the served model."""
        asked = name.lstrip("/")
        if asked != endpoints.model.lstrip("/"):  # a model's name may be a path, which has lost its first slash here
            endpoints.check_model(asked)
        return endpoints.models()[0]

    @get(["/health", "/ping"], opt={_OPEN: True})
    async def health() -> ASGIResponse:
        """Report whether the process is alive and working."""
        return _answer(probes.health())

    @get(["/ready", "/readyz"], opt={_OPEN: True})
    async def ready() -> ASGIResponse:
        """Report whether a request could be served now, and if not, why."""
        return _answer(probes.ready())

    @get("/version", opt={_OPEN: True})
    async def version() -> ASGIResponse:
        """Return the version of kvferry."""
        return _answer(probes.version())

    @get("/load")
    async def load() -> dict[str, int]:
        """Return the number of requests in flight."""
        return {"server_load": endpoints.gateway.num_requests}

    return [models, model, health, ready, version, load]


def _operator_routes(probes: ProbeAnswers) -> list[BaseRouteHandler]:
    @get("/metrics", opt={_OPEN: True})
    async def metrics() -> ASGIResponse:
        """Return all metrics in Prometheus's text format."""
        return _answer(probes.metrics())

    @get("/status", opt={_OPEN: True})
    async def status_page() -> ASGIResponse:
        """Return the status page for browsers."""
        return _answer(probes.status_page())

    @get("/status.json", opt={_OPEN: True})
    async def status() -> ASGIResponse:
        """Return what the page shows of now: workers, traffic, handoffs, failures, and where time goes."""
        return _answer(probes.status())

    @get("/status/history.json", opt={_OPEN: True})
    async def history() -> ASGIResponse:
        """Return the last ten minutes in intervals of five seconds."""
        return _answer(probes.history())

    @get("/status/requests.json", opt={_OPEN: True})
    async def requests(request: Request[Any, Any, Any]) -> ASGIResponse:
        """Return the latest requests; with the id of a request also its timelines."""
        return _answer(probes.requests(request.query_params.get("id", "")))

    return [metrics, status_page, status, history, requests]


def _described(routes: Sequence[BaseRouteHandler]) -> frozenset[tuple[str, str]]:
    """Return methods and paths of the routes that the OpenAPI document describes."""
    handlers = [route for route in routes if isinstance(route, HTTPRouteHandler) and route.include_in_schema is not False]
    return frozenset(
        (method, path.replace(":path}", "}"))
        for handler in handlers
        for path in handler.paths
        for method in handler.http_methods
    )


def _document_route(document: bytes) -> BaseRouteHandler:
    @get("/openapi.json", include_in_schema=False)
    async def openapi() -> ASGIResponse:
        """Return the description of the API, OpenAPI 3.1."""
        return ASGIResponse(body=document, media_type=MediaType.JSON)

    return openapi


def _decoded(content: bytes, kind: type[Decoded], scope: Scope) -> Decoded:
    """Return a body as its type; the answer names fields that are ignored."""
    if not content:
        raise InvalidRequest("the body is empty")
    body, ignored = parse_lenient_body(content, kind)
    if ignored:
        report_ignored(scope, ignored)
    return body


def _name_of(body: EngineBody) -> str | None:
    named = body.fields.get("request_id")
    return named if isinstance(named, str) else None


def _caller(endpoints: Endpoints, request: Request[Any, Any, Any], named_in_body: str | None) -> Caller:
    headers = request.headers
    trace = parse_trace_context(headers.get("traceparent", ""), headers.get("tracestate", ""))
    return Caller(
        client_id=client_id(request.scope, named_in_body),
        receive=request.receive,
        arrival=endpoints.gateway.now,
        paused_s=endpoints.gateway.paused_s,
        hold=hold_of(request.scope),
        trace=trace,
        tenant=tenant_of(_key_of(request)) if request.app.state.has_tenants else 0,
    )


def _answer(response: OpsResponse) -> ASGIResponse:
    media_type, _, _ = response.content_type.partition("; charset=")  # which Litestar adds to texts
    headers = dict(response.headers)
    return ASGIResponse(body=response.body, status_code=response.status, media_type=media_type, headers=headers)


def _key_of(connection: ASGIConnection[Any, Any, Any, Any]) -> bytes:
    authorization, x_api_key = (connection.headers.get(name, "").encode() for name in ("authorization", "x-api-key"))
    return key_of(connection.scope["path"], authorization, x_api_key)


def _guard(api_key: str) -> Guard:
    """Return a guard that requires one of the comma-separated keys, and compares them in constant time."""
    expected = [key.strip().encode() for key in api_key.split(",") if key.strip()]

    async def check(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
        given = _key_of(connection)
        num_matches = sum(
            hmac.compare_digest(given, known) for known in expected
        )  # compare all, so that the time does not depend on the match
        if not handler.opt.get(_OPEN) and not num_matches:
            raise NotAuthorizedException("Incorrect API key provided: send it as `Authorization: Bearer <key>`")

    return check


async def _check_encoding(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    """Refuse a compressed body, which would be read as malformed JSON. A guard that is not async would be given a thread."""
    encodings = [line.strip().lower() for line in connection.headers.getall("content-encoding", [])]
    encoding = next((line for line in encodings if line not in ("", "identity")), None)
    has_body = isinstance(handler, HTTPRouteHandler) and "POST" in handler.http_methods
    if has_body and encoding is not None:
        text = f"a body with Content-Encoding {encoding[:40]!r} is not read: send it uncompressed, without this header"
        raise HTTPException(detail=text, status_code=415)


@dataclass(frozen=True, slots=True)
class _Places:
    """What a client is told that has sent a request to a wrong place, or too large a one."""

    paths: frozenset[str]
    max_body_bytes: int

    def reason(self, error: HTTPException, path: str) -> str:
        """Return the reason of a refusal, with the fix where the application's own reason has none."""
        path = normalize_path(path)
        shown = path[:_SHOWN_CHARACTERS]
        if error.status_code == 413:
            return f"the body has more bytes than router.max_body_bytes = {self.max_body_bytes}: send less"
        if isinstance(error, MethodNotAllowedException):
            return f"{shown} is answered to {_allowed(error)} only"
        if isinstance(error, NotFoundException) and error.detail == "Not Found":
            meant = next((known for known in (f"/v1{path}", path.removeprefix("/v1")) if known in self.paths), None)
            return f"{shown} is no path of this API: {f'did you mean {meant}?' if meant else '/openapi.json has its paths'}"
        return error.detail


def _on_error(endpoints: Endpoints, places: _Places) -> ExceptionHandler[Exception]:
    def handle(request: Request[Any, Any, Any], error: Exception) -> Response[ErrorBody | AnthropicErrorBody]:
        info = _describe(error)
        if isinstance(error, HTTPException) and error.status_code in (404, 405, 413):
            info = msgspec.structs.replace(info, message=places.reason(error, request.scope["path"]))
        endpoints.metrics.count_failed(info.code)
        if info.http_status == 500:
            logger.error(event("internal_error", path=request.url.path), exc_info=error)
        response = error_response(
            info,
            error.retry_after_s if isinstance(error, DeadlineUnreachable) else RETRY_AFTER_S,
            is_anthropic=is_anthropics(request.scope["path"]),
        )
        if isinstance(error, MethodNotAllowedException):
            response.set_header("allow", _allowed(error))
        return response

    return handle


def _allowed(error: MethodNotAllowedException) -> str:
    """Return the methods of the path. Where GET is answered, HEAD is too."""
    methods = set((error.headers or {}).get("allow", "").split(", "))
    return ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))


def _describe(error: Exception) -> ErrorInfo:
    match error:
        case RequestFailure():
            return error.info
        case KVFerryError():
            return ErrorInfo.of(error)
        case ValidationException():  # parse_lenient_body checks bodies, so this is a missing body
            return ErrorInfo.of(InvalidRequest("the body is empty"))
        case InternalServerException() if error.detail == _GONE:
            return ErrorInfo.of(Cancelled("the client disconnected before its request had arrived"))
        case HTTPException() if error.status_code < 500:
            status = error.status_code
            return ErrorInfo(code=_HTTP_CODES.get(status, "invalid_request"), message=error.detail, http_status=status)
        case _:
            return BUG
