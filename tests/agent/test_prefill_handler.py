"""The prefill role of an agent: one computation per prompt, no first token."""

from types import SimpleNamespace

import pytest

from agent.prefill_handler import VllmPrefillHandler
from core.errors import InvalidRequest
from core.request import EngineCoreOutput, PrefillStats
from core.wire.messages import ChoiceStart, ErrorInfo, Generate, PrefillDone, RequestFailed
from core.wire.sampling import SamplingParams
from core.worker.role import EngineFacts


@pytest.fixture
def handler():
    return VllmPrefillHandler(EngineFacts(max_model_len=100, eos_token_ids=frozenset()))


def generate(**fields):
    values = {"request_id": "r", "prompt_token_ids": (1, 2), "sampling": SamplingParams(), "handoff": True}
    return Generate(**values | fields)


def test_one_computation_serves_all_choices_and_no_token_is_passed_on(handler):
    (request,) = handler.on_generate(generate(n=3), 1.0)
    assert (request.request_id, request.needs_handoff) == ("r/0", True)
    result = handler.on_outputs([EngineCoreOutput("r/0", [9], finish_reason="length", late_cached_tokens=1)], 1.5)
    (reply,) = result.replies
    assert isinstance(reply, PrefillDone)
    assert (reply.choices, reply.num_cached_tokens, reply.tells_hits, reply.prefill_ms) == ((), 1, True, 500)
    assert result.ended == ["r"]
    assert handler.on_outputs([EngineCoreOutput("r/0", [9], finish_reason="length")], 2.0).replies == []


@pytest.mark.parametrize(("found", "is_told"), [(None, False), (0, True)])
def test_a_server_that_does_not_say_what_was_cached_is_told_from_one_without(handler, found, is_told):
    handler.on_generate(generate(), 1.0)
    output = EngineCoreOutput("r/0", [9], finish_reason="length", prefill_stats=PrefillStats(2, 0, 0), late_cached_tokens=found)
    (reply,) = handler.on_outputs([output], 1.5).replies
    assert (reply.num_cached_tokens, reply.tells_hits) == (0, is_told)


def test_a_failure_is_passed_on(handler):
    handler.on_generate(generate(), 1.0)
    error = ErrorInfo(code="engine_dead", message="gone")
    result = handler.on_outputs([EngineCoreOutput("r/0", [], finish_reason="error", error=error)], 2.0)
    assert result.replies == [RequestFailed(request_id="r", error=error)]
    assert result.ended == ["r"]


def test_an_abort_ends_the_computation_once(handler):
    handler.on_generate(generate(), 1.0)
    assert handler.on_abort("r").abort_ids == ["r/0"]
    assert handler.on_abort("r").abort_ids == []
    assert handler.on_outputs([EngineCoreOutput("r/0", [9], finish_reason="length")], 2.0).replies == []


def test_a_handoff_that_comes_after_its_abort_is_released(handler):
    handler.on_generate(generate(), 1.0)
    handler.on_abort("r")
    handoff = SimpleNamespace(transfer_id="t")
    result = handler.on_outputs([EngineCoreOutput("r/0", [9], finish_reason="length", kv_handoff=handoff)], 2.0)
    assert (result.replies, result.release_transfer_ids) == ([], ["t"])


@pytest.mark.parametrize("fields", [{"handoff": False}, {"choices": (ChoiceStart(index=0, output_token_ids=(1,)),)}])
def test_requests_for_other_roles_are_refused(handler, fields):
    with pytest.raises(InvalidRequest):
        handler.on_generate(generate(**fields), 1.0)
