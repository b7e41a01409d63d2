"""Generated requests against the OpenAPI document: every answer is one that the document has, and wrong bodies are refused."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import hypothesis
import pytest

schemathesis = pytest.importorskip("schemathesis")

PLACES = [
    *(("POST", path) for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")),
    *(("GET", path) for path in ("/v1/models", "/v1/models/{name}", "/load", "/health", "/ready", "/version", "/metrics")),
    *(("GET", path) for path in ("/ping", "/readyz", "/status", "/status.json")),
    *(("GET", path) for path in ("/status/history.json", "/status/requests.json")),
]
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "allow_header_conformance",
)
NUM_CASES = {"POST": 32, "GET": 4}  # of each kind; with --full 650 and 60


def exercise(url: str, document: dict[str, Any], place: tuple[str, str], mode: Any, num_cases: int) -> list[int]:
    """Send generated requests and check every answer; return the statuses."""
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=url)
    operation = schema[place[1]][place[0]]
    checks = [check for check in schemathesis.checks.CHECKS.get_all() if check.__name__ in CHECKS]
    assert len(checks) == len(CHECKS)
    not_a_server_error = next(check for check in checks if check.__name__ == "not_a_server_error")
    statuses: list[int] = []
    known = fields_of_body(document, place)  # the document is closed, and yet a field that is not known may be null

    @hypothesis.settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def check_one(case: Any) -> None:
        hypothesis.assume(
            not (isinstance(case.body, dict) and any(case.body[name] is None for name in case.body.keys() - known))
        )
        response = case.call(timeout=30)
        is_too_short = response.status_code == HTTPStatus.GATEWAY_TIMEOUT and case.body["timeout_s"] < 1.0
        excluded = [not_a_server_error] if is_too_short else []  # the client's own limit: 504 is what the document has
        case.validate_response(response, checks=checks, excluded_checks=excluded)
        statuses.append(response.status_code)

    check_one()
    return statuses


def fields_of_body(document: dict[str, Any], place: tuple[str, str]) -> set[str]:
    body = document["paths"][place[1]][place[0].lower()].get("requestBody")
    if body is None:
        return set()
    name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    return set(document["components"]["schemas"][name]["properties"])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize("place", PLACES, ids=" ".join)
async def test_answers_are_those_of_the_document(start_router, request, place, mode):
    if place[0] == "GET" and mode == "negative":
        pytest.skip("nothing about these can be wrong")
    under_test = await start_router()
    await under_test.pair()
    async with under_test.client() as client:
        document = (await client.get("/openapi.json")).json()
    is_full = request.config.getoption("--full")
    num_cases = {"POST": 650, "GET": 60}[place[0]] if is_full else NUM_CASES[place[0]]
    generation = schemathesis.GenerationMode(mode)
    statuses = await asyncio.to_thread(exercise, under_test.url, document, place, generation, num_cases)
    assert (200 in statuses) == (mode == "positive" and "{name}" not in place[1])  # no generated name is the served one


async def test_every_operation_is_exercised(served):
    async with served.client() as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
    assert {(method.upper(), path) for path, item in paths.items() for method in item} == set(PLACES)


def promise_another_status(document):
    document["paths"]["/version"]["get"]["responses"] = {"204": {"description": "nothing"}}


def promise_another_body(document):
    answer = document["paths"]["/version"]["get"]["responses"]["200"]["content"]["application/json"]
    answer["schema"]["required"].append("colour")


def promise_a_refusal(document):
    document["components"]["schemas"]["DetokenizeRequest"]["properties"]["tokens"]["maxItems"] = 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "place", "mode", "found"),
    [
        (promise_another_status, ("GET", "/version"), "positive", "Undocumented status code"),
        (promise_another_body, ("GET", "/version"), "positive", "Response violates schema"),
        (promise_a_refusal, ("POST", "/detokenize"), "negative", "Schema-violating request accepted"),
    ],
)
async def test_document_that_promises_something_else_is_found_out(start_router, change, place, mode, found):
    under_test = await start_router()
    await under_test.pair()
    async with under_test.client() as client:
        document = (await client.get("/openapi.json")).json()
    change(document)
    with pytest.raises(BaseExceptionGroup) as violations:
        await asyncio.to_thread(exercise, under_test.url, document, place, schemathesis.GenerationMode(mode), 2000)
    assert found in "".join(map(str, violations.value.exceptions))
