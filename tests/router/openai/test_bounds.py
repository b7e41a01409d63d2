"""What clients are told of values out of bounds."""

import pytest

from core.errors import InvalidRequest
from router.openai.requests import CompletionRequest
from router.openai.sampling import ModelLimits, check_ranges, shared_params


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"seed": 2**64}, "at most 18446744073709551615, got 18446744073709551616"),
        ({"priority": -(2**31) - 1}, "at least -2147483648 and"),
        ({"repetition_penalty": 0}, "at least 0.01 and at most 100, got"),
        ({"timeout_s": 0}, "more than 0, got 0"),
    ],
)
def test_bounds_are_told_exactly(fields, said):
    with pytest.raises(InvalidRequest) as refused:
        check_ranges(CompletionRequest(prompt="x", **fields))
    assert said in refused.value.message


@pytest.mark.parametrize(
    ("bias", "said"),
    [
        ({"7": 101}, "logit_bias[7] must be at least -100 and at most 100, got 101"),
        ({"01": 1, "2": 0, "1": -100}, "two keys of one token, 01 and 1: leave one out"),
    ],
)
def test_a_wrong_bias_of_a_token_names_the_token(bias, said):
    with pytest.raises(InvalidRequest) as refused:
        shared_params(CompletionRequest(prompt="x", logit_bias=bias), ModelLimits(max_model_len=100, vocab_size=257))
    assert (refused.value.param, said in refused.value.message) == ("logit_bias", True)
