import math

import msgspec
import pytest

from core.wire.sampling import SamplingParams

REFUSED = [
    {"repetition_penalty": 0.0},
    {"repetition_penalty": 1e-300},
    {"repetition_penalty": math.nan},
    {"logit_bias": {5: math.inf}},
    {"logit_bias": {5: -100.5}},
    {"logit_bias": {5: math.nan}},
    {"logprobs": 101},
    {"prompt_logprobs": 2**53},
    {"temperature": math.nan},
    {"presence_penalty": math.inf},
]


@pytest.mark.parametrize("fields", REFUSED, ids=str)
def test_refuses_values_that_would_spoil_the_logits_or_a_frame(fields):
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=SamplingParams)


def test_accepts_the_ends_of_the_ranges():
    params = SamplingParams(repetition_penalty=0.01, logit_bias={5: -100.0, 6: 100.0}, logprobs=100, prompt_logprobs=0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
