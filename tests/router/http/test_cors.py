"""Web pages may call the API from a browser where a setting names them, and nowhere else."""

from __future__ import annotations

import pytest

PAGE = "https://chat.example"


async def ask(under_test, method, path="/v1/completions", **headers):
    async with under_test.client() as client:
        return await client.request(method, path, headers={"origin": PAGE, **headers})


async def test_pages_are_not_allowed_by_default(start_router):
    under_test = await start_router(has_http=False)
    answer = await ask(under_test, "GET", "/version")
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("origins", [(PAGE,), ("*",)])
async def test_named_page_may_ask_with_a_key_of_its_own(start_router, origins):
    under_test = await start_router(has_http=False, cors_origins=origins, api_key="secret")
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    before = await ask(under_test, "OPTIONS", **asked)
    assert before.status_code == 204
    assert before.headers["access-control-allow-origin"] in (PAGE, "*")
    assert "authorization" in before.headers["access-control-allow-headers"]
    answer = await ask(under_test, "POST")
    assert answer.status_code == 401  # the page can read why
    assert answer.headers["access-control-allow-origin"] in (PAGE, "*")
    assert "access-control-allow-credentials" not in answer.headers


async def test_other_page_stays_outside(start_router):
    under_test = await start_router(has_http=False, cors_origins=("https://other.example",))
    assert "access-control-allow-origin" not in (await ask(under_test, "GET", "/version")).headers
