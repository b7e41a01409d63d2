"""Errors as OpenAI clients expect them: one JSON shape for all errors, with the right status; and Anthropic's for its clients.

Owns the shapes and the statuses.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from litestar import MediaType, Response
from litestar.utils import normalize_path

from core.wire.messages import ErrorInfo
from router.rendered.bodies import MESSAGES

RETRY_AFTER_S = 1
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {**_TYPES, 404: "not_found_error", 413: "request_too_large"}
_WITH_RETRY = (429, 503)
BUG = ErrorInfo(code="internal_error", message="the router failed on this request; its log says how")


class ErrorDetail(msgspec.Struct, kw_only=True):
    """The error. ``param`` names the field at fault; ``code`` is stable."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, kw_only=True):
    """Body of every response that is not a success."""

    error: ErrorDetail


class AnthropicErrorDetail(msgspec.Struct, kw_only=True):
    """The error in Anthropic's shape."""

    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, kw_only=True):
    """Body of every response of ``/v1/messages``, and of paths below it, that is not a success."""

    type: Literal["error"] = "error"
    error: AnthropicErrorDetail


class RequestFailure(Exception):
    """An error that a worker or the router core reported for a request."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.info = info


def is_anthropics(path: str) -> bool:
    """Return True for paths of Anthropic's API, whether they are served or not."""
    return f"{normalize_path(path)}/".startswith(f"{MESSAGES}/")


def error_body(info: ErrorInfo) -> ErrorBody:
    """Return the body for an error."""
    kind = _TYPES.get(info.http_status, "server_error" if info.http_status >= 500 else "invalid_request_error")
    return ErrorBody(error=ErrorDetail(message=info.message, type=kind, param=info.param, code=info.code))


def anthropic_error_body(info: ErrorInfo) -> AnthropicErrorBody:
    """Return the body for an error of ``/v1/messages``."""
    kind = _ANTHROPIC_TYPES.get(info.http_status, "api_error" if info.http_status >= 500 else "invalid_request_error")
    return AnthropicErrorBody(error=AnthropicErrorDetail(type=kind, message=info.message))


def error_response(
    info: ErrorInfo, retry_after_s: int = RETRY_AFTER_S, *, is_anthropic: bool = False
) -> Response[ErrorBody | AnthropicErrorBody]:
    """Return the response for an error; a retryable error has a ``Retry-After`` header."""
    status = _status(info)
    headers = {"retry-after": str(max(1, info.retry_after_s, retry_after_s))} if info.retryable or status in _WITH_RETRY else {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    body = anthropic_error_body(info) if is_anthropic else error_body(info)
    return Response(body, status_code=status, media_type=MediaType.JSON, headers=headers)


def _status(info: ErrorInfo) -> int:
    """Return the status for an error. Errors between workers are often temporary, so they are 503, not 502."""
    return 503 if info.retryable and info.http_status == 502 else info.http_status
