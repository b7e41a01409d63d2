"""How an error of an engine's API becomes one of the router."""

from __future__ import annotations

import pytest

from router.metrics import CLIENT_ERRORS
from router.rendered.renderer import refusal


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, "invalid_request"), (404, "model_not_found"), (413, "invalid_request"), (422, "invalid_request")],
)
def test_a_refusal_by_the_engine_is_the_client_s_mistake(status, code):
    info = refusal(status, b'{"error": {"message": "no", "param": "tools"}}')
    assert (info.code, info.http_status, info.param) == (code, status, "tools")
    assert info.code in CLIENT_ERRORS


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
def test_a_busy_or_broken_engine_is_no_mistake_of_a_client(status):
    assert refusal(status, b"oops").code not in CLIENT_ERRORS
