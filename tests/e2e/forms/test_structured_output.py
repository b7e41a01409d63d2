"""Structured output over the handoff: every seeded output of a random model follows its schema, also if workers are killed."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "open": {"type": ["boolean", "null"]},
        "place": {
            "type": "object",
            "properties": {"lat": {"type": "number"}, "day": {"type": "string", "format": "date"}},
            "required": ["day"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "open", "place"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
LONG = {"type": "array", "items": {"type": "integer", "minimum": 100000, "maximum": 999999}, "minItems": 60, "maxItems": 60}


@pytest.fixture
def complete(served):
    def ask(prompt="The ferry carried", **fields):
        body = {"temperature": 1.0, "max_tokens": 900, **fields}
        return served.complete(prompt, model=None, **body)

    return ask


def check(choice, schema=SCHEMA):
    assert choice["finish_reason"] == "stop", choice
    jsonschema.validate(json.loads(choice["text"]), schema, format_checker=jsonschema.FormatChecker())


def test_fifty_seeded_outputs_follow_their_schema(complete):
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda seed: complete(response_format=FORMAT, seed=seed), range(50)))
    for answer in answers:
        check(answer["choices"][0])
    assert len({answer["choices"][0]["text"] for answer in answers}) > 40


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_two_thousand_seeded_outputs_follow_their_schema_though_workers_are_killed(complete, served):
    ended = []

    def ask(seed):
        answer = complete(response_format=FORMAT, seed=seed)["choices"][0]
        ended.append(seed)
        if len(ended) % 500 == 0:
            served.cluster.kill(f"decode-{len(ended) // 500 % 2}")
        return answer

    with ThreadPoolExecutor(16) as pool:
        for choice in pool.map(ask, range(2000)):
            check(choice)


def test_output_follows_its_schema_though_its_decode_worker_is_killed(complete, served, kill_busy_decode_worker):
    form = {"structured_outputs": {"json": LONG}}
    calm = complete(seed=1, **form)["choices"][0]["text"]
    body = {"prompt": "The ferry carried", "seed": 1, "temperature": 1.0, "max_tokens": 900, "stream": True, **form}
    texts = []
    with served.client.stream("POST", "/v1/completions", json=body) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[len("data: ") :])
            assert "error" not in event, event
            texts += [choice["text"] for choice in event["choices"]]
            if len(texts) == 10:
                kill_busy_decode_worker()
    assert len(texts) > 10
    jsonschema.validate(json.loads("".join(texts)), LONG)
    assert "".join(texts) == calm


def test_choices_stop_strings_and_logprobs_keep_the_form(complete):
    answer = complete(guided_choice=["yes", "no"], n=3, logprobs=2, seed=3)
    assert {choice["text"] for choice in answer["choices"]} <= {"yes", "no"}
    assert all(choice["logprobs"]["tokens"] for choice in answer["choices"])
    (cut,) = complete(structured_outputs={"regex": "[a-z]{40}!"}, stop="!")["choices"]
    assert (len(cut["text"]), cut["finish_reason"]) == (40, "stop")


def test_an_output_that_is_cut_says_so(complete):
    (choice,) = complete(response_format=FORMAT, max_tokens=5)["choices"]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}}, "uniqueItems"),
        ({"guided_regex": "(?=a)a"}, "look-around"),
        (
            {"guided_json": {"allOf": [{"type": "string", "pattern": f".*{letter}.*"} for letter in "abcdefghijklmnopqrst"]}},
            "too complex",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_enforced_is_refused_by_name(served, fields, message):
    for _ in range(20):  # 429: the machine was too busy to find out
        response = served.client.post("/v1/completions", json={"prompt": "x", **fields})
        if response.status_code != 429:
            break
    assert response.status_code == 400
    error = response.json()["error"]
    assert message in error["message"]
    assert error["param"] == next(iter(fields))


def test_a_chat_is_served(served):
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": FORMAT, "max_tokens": 900, "seed": 5}
    response = served.client.post("/v1/chat/completions", json=body).json()
    jsonschema.validate(json.loads(response["choices"][0]["message"]["content"]), SCHEMA)
