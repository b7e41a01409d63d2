"""Errors as OpenAI clients expect them: one JSON shape for all errors, with the right status.

Owns the shape and the statuses.
"""

from __future__ import annotations

import msgspec
from litestar import MediaType, Response

from core.wire.messages import ErrorInfo

RETRY_AFTER_S = 1
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
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


class RequestFailure(Exception):
    """An error that a worker or the router core reported for a request."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.info = info


def error_body(info: ErrorInfo) -> ErrorBody:
    """Return the body for an error."""
    kind = _TYPES.get(info.http_status, "server_error" if info.http_status >= 500 else "invalid_request_error")
    return ErrorBody(error=ErrorDetail(message=info.message, type=kind, param=info.param, code=info.code))


def error_response(info: ErrorInfo, retry_after_s: int = RETRY_AFTER_S) -> Response[ErrorBody]:
    """Return the response for an error; a retryable error has a ``Retry-After`` header."""
    status = _status(info)
    headers = {"retry-after": str(max(1, info.retry_after_s, retry_after_s))} if info.retryable or status in _WITH_RETRY else {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(error_body(info), status_code=status, media_type=MediaType.JSON, headers=headers)


def _status(info: ErrorInfo) -> int:
    """Return the status for an error. Errors between workers are often temporary, so they are 503, not 502."""
    return 503 if info.retryable and info.http_status == 502 else info.http_status
