"""Requests that the server has rendered, and answers under a grammar that another engine has begun."""

import msgspec
import pytest

from agent.regeneration import KnownTokens, ReplayDiverged, is_regenerated
from agent.vllm_protocol import Choice, Content, Logprobs, generate_body
from core.wire.kv import KVHandoff
from core.wire.sampling import SamplingParams, StructuredOutput
from tests.agent.running_engine import LAYOUT, new_request, tokens
from tests.agent.scripted_server import END

GRAMMAR = {"sampling_params": {"structured_outputs": {"regex": "a+"}, "logprobs": 3, "n": 4, "stop_token_ids": [8]}}


def rendered(**fields):
    return new_request(engine_request=msgspec.json.encode(GRAMMAR | fields), sampling=SamplingParams(max_tokens=9, seed=5))


def test_what_the_router_decides_goes_before_what_the_server_rendered():
    body = generate_body(rendered(features={"f": 1}, model="lora", reasoning_ended=True))
    params = body["sampling_params"]
    assert (params["structured_outputs"], params["n"], params["max_tokens"], params["seed"]) == ({"regex": "a+"}, 1, 9, 5)
    assert (params["stop_token_ids"], params["logprobs"]) == ([8], None)
    assert (body["features"], body["model"], body["reasoning_ended"]) == ({"f": 1}, "lora", True)


def test_a_prefill_engine_gets_the_prompt_and_nothing_of_the_output():
    request = msgspec.json.encode(GRAMMAR | {"features": {"f": 1}, "reasoning_ended": True})
    body = generate_body(new_request(engine_request=request, needs_handoff=True))
    assert body["features"] == {"f": 1}
    assert "structured_outputs" not in body["sampling_params"]
    assert "reasoning_ended" not in body


async def test_an_answer_under_a_grammar_is_generated_again_and_goes_on_with_new_tokens(running):
    request = new_request(
        engine_request=msgspec.json.encode(GRAMMAR), output_token_ids=(7, 8), sampling=SamplingParams(max_tokens=9, seed=5)
    )
    outputs = await running.run(request, [tokens(7), tokens(8, 9), tokens(3, finish_reason="stop"), END])
    (body,) = running.server.bodies
    assert (body["token_ids"], body["sampling_params"]["max_tokens"], body["sampling_params"]["seed"]) == ([5, 6], 9, 5)
    assert [output.new_token_ids for output in outputs] == [[], [9], [3]]


@pytest.mark.parametrize(
    ("form", "spelled"),
    [
        (StructuredOutput(kind="json_object"), {"json_object": True}),
        (StructuredOutput(kind="json_schema", value="{}"), {"json": "{}"}),
        (StructuredOutput(kind="choice", value='["a","b"]'), {"choice": ["a", "b"]}),
        (StructuredOutput(kind="regex", value="a+"), {"regex": "a+"}),
    ],
    ids=lambda form: form.kind if isinstance(form, StructuredOutput) else "",
)
def test_a_form_of_the_output_reaches_the_engine_that_samples(form, spelled):
    sampling = SamplingParams(structured_output=form)
    assert generate_body(new_request(sampling=sampling))["sampling_params"]["structured_outputs"] == spelled
    prefill = generate_body(new_request(sampling=sampling, needs_handoff=True))
    assert "structured_outputs" not in prefill["sampling_params"]
    assert is_regenerated(new_request(sampling=sampling, output_token_ids=(7,)))


@pytest.mark.parametrize(("words", "is_again"), [(["foo bar"], True), ([], False), (None, False)])
def test_words_that_must_not_come_are_looked_for_in_the_output_only(words, is_again):
    """vLLM: a word whose first tokens are in the prompt may be ended."""
    request = msgspec.json.encode({"sampling_params": {"bad_words": words}})
    assert is_regenerated(new_request(engine_request=request, output_token_ids=(7,))) == is_again
    assert not is_regenerated(new_request(engine_request=request))


@pytest.mark.parametrize("events", [[tokens(7, 1)], [tokens(7, finish_reason="stop")]])
async def test_an_answer_that_comes_out_differently_ends_with_an_error(running, events):
    request = new_request(engine_request=msgspec.json.encode(GRAMMAR), output_token_ids=(7, 8))
    (*_, last) = await running.run(request, [*events, None])
    assert last.error.code == ReplayDiverged.code


async def test_without_a_grammar_output_so_far_becomes_prompt(running):
    request = new_request(engine_request=b"{}", output_token_ids=(7, 8))
    await running.run(request, [tokens(9, finish_reason="length"), END])
    assert running.server.bodies[0]["token_ids"] == [5, 6, 7, 8]


def test_logprobs_of_known_tokens_are_held_back_too():
    content = [Content(token_id=token, logprob=-1.0, rank=1) for token in (7, 8)]
    choice = KnownTokens([7]).strip(Choice(token_ids=[7, 8], logprobs=Logprobs(content)))
    assert (choice.token_ids, choice.logprobs.content) == ([8], content[1:])


def test_a_rendered_request_takes_its_handoff_along():
    handoff = KVHandoff(
        transfer_id="t", engine_id="p", incarnation=1, control_address="", model_fingerprint=b"m", layout=LAYOUT, groups=(),
        num_tokens=2, lease_ms=1, engine_params=b'{"do_remote_prefill": true}',
    )  # fmt: skip
    body = generate_body(new_request(engine_request=msgspec.json.encode(GRAMMAR), kv_handoff=handoff))
    assert body["kv_transfer_params"] == {"do_remote_prefill": True}
