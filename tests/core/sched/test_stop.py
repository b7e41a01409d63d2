"""When a request ends by its own tokens."""

import pytest

from core.request import NewRequest, Request, RequestStatus
from core.sched.stop import append_output_tokens
from core.wire.sampling import SamplingParams

EOS = 2


@pytest.fixture
def make_request():
    def make(output=(), stop=frozenset({EOS}), **sampling) -> Request:
        params = SamplingParams(**sampling)
        return Request(
            NewRequest(request_id="r", prompt_token_ids=[7] * 5, output_token_ids=output, sampling=params, stop_token_ids=stop),
            None,
        )

    return make


def test_ordinary_token_does_not_stop(make_request):
    request = make_request(max_tokens=3)
    assert append_output_tokens(request, [5], 100) == [5]
    assert not request.status.is_finished
    assert request.output_token_ids == [5]


def test_stop_token_the_client_named_is_the_stop_reason(make_request):
    request = make_request(stop=frozenset({EOS, 9}), stop_token_ids=(9,))
    append_output_tokens(request, [9], 100)
    assert request.status is RequestStatus.FINISHED_STOPPED
    assert request.stop_reason == 9
    assert request.output_token_ids == [9]


def test_end_of_sequence_stops_without_a_stop_reason(make_request):
    request = make_request()
    append_output_tokens(request, [EOS], 100)
    assert request.status is RequestStatus.FINISHED_STOPPED
    assert request.stop_reason is None


def test_max_tokens_counts_tokens_of_other_workers(make_request):
    request = make_request(output=(4, 4), max_tokens=3)
    append_output_tokens(request, [5], 100)
    assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED


def test_max_model_len_counts_prompt_and_output(make_request):
    request = make_request(max_tokens=50)
    append_output_tokens(request, [5], 7)
    assert not request.status.is_finished
    append_output_tokens(request, [5], 7)
    assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED


def test_stop_token_before_min_tokens_does_not_stop(make_request):
    request = make_request(min_tokens=2, max_tokens=9)
    append_output_tokens(request, [EOS], 100)
    assert not request.status.is_finished
    append_output_tokens(request, [EOS], 100)
    assert request.status is RequestStatus.FINISHED_STOPPED


def test_length_ends_a_request_even_before_min_tokens(make_request):
    request = make_request(min_tokens=8, max_tokens=9)
    append_output_tokens(request, [EOS], 6)
    assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED


def test_stop_token_that_is_also_the_last_allowed_one_counts_as_stop(make_request):
    request = make_request(max_tokens=1)
    append_output_tokens(request, [EOS], 100)
    assert request.status is RequestStatus.FINISHED_STOPPED


def test_tokens_after_the_last_one_are_dropped(make_request):
    request = make_request(max_tokens=9)
    assert append_output_tokens(request, [5, EOS, 6], 100) == [5, EOS]
    assert request.output_token_ids == [5, EOS]
