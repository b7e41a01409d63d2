from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import ContextTooLong, InvalidRequest
from core.wire import codec
from core.wire.messages import Generate
from core.wire.sampling import SamplingParams
from router.openai.body_parser import parse_body
from router.openai.requests import NEUTRAL, ChatCompletionRequest, CompletionRequest
from router.openai.sampling import (
    ModelLimits,
    check_ranges,
    check_supported,
    load_failure_policy,
    output_options,
)
from router.openai.unknown_fields import parse_lenient_body
from tests.support.sampling_params import sampling_params

LIMITS = ModelLimits(max_model_len=100, vocab_size=257)


def completion(**fields) -> CompletionRequest:
    return parse_body(json.dumps({"prompt": "x", **fields}).encode(), CompletionRequest)


def chat(**fields) -> ChatCompletionRequest:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    return parse_body(json.dumps(body).encode(), ChatCompletionRequest)


def sampling(request, num_prompt_tokens: int = 10, seed: int = 5) -> SamplingParams:
    check_ranges(request)
    return sampling_params(request, num_prompt_tokens, seed, LIMITS)


# ---- bodies --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"prompt": "x", "colour": 1}, "colour", "unknown field"),
        ({"model": "tiny"}, "prompt", "required"),
        ({"prompt": {"a": 1}}, "prompt", "must be a string or a list, not an object: correct it"),
        ({"prompt": "x", "temperature": "hot"}, "temperature", "must be a number, not a string: numbers go without quotes"),
        ({"prompt": "x", "n": 1.5}, "n", "must be an integer, not a number: correct it, or leave it out"),
        ({"prompt": "x", "n": True}, "n", "must be an integer, not true or false"),
        ({"prompt": "x", "stop": ["a", 1]}, "stop[1]", "must be a string, not an integer: texts go in quotes"),
        ({"prompt": "x", "stream": "yes"}, "stream", "must be true or false, not a string: true and false go without quotes"),
        ({"prompt": "x", "stream_options": {"flush": True}}, "stream_options.flush", "unknown field"),
        ({"prompt": "x", "logit_bias": {"1": "much"}}, "logit_bias[...]", "must be a number"),
        ({"prompt": [1, [2.5]]}, "prompt[1][0]", "must be an integer, not a number: correct it"),
    ],
)
def test_a_wrong_completion_body_names_the_field(body, param, said):
    with pytest.raises(InvalidRequest) as refused:
        parse_body(json.dumps(body).encode(), CompletionRequest)
    assert refused.value.param == param
    assert said in refused.value.message
    assert param in refused.value.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "pope", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[0].mood"),
        ({"messages": [], "prompt": "x"}, "prompt"),
    ],
)
def test_a_wrong_chat_body_names_the_field(body, param):
    with pytest.raises(InvalidRequest) as refused:
        parse_body(json.dumps(body).encode(), ChatCompletionRequest)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b'"x"',
        b'{"prompt":"\xff"}',
        b"[" * 100_000,
        b'{"n":1e999}',
        b'{"prompt":"x","n":1.0,"seed":1e999}',
    ],
)
def test_what_is_no_json_object_is_refused(body):
    with pytest.raises(InvalidRequest):
        parse_body(body, CompletionRequest)


@pytest.mark.parametrize(
    "text",
    [r"\ud800", r"a\ud83dbc", r"\udc00 \ud83d\ude00", r"\ud83d\ud83d", r"\\\\\uDFFF"],
    ids=["end", "cut", "low", "two", "escaped"],
)
def test_half_a_character_is_named(text):
    with pytest.raises(InvalidRequest, match=r"half a character, \\u[dD]"):
        parse_body(b'{"prompt": "%s"}' % text.encode(), CompletionRequest)


@pytest.mark.parametrize(
    "body", [b'{"prompt": "x', rb'{"prompt": "\ud83d\ude00', rb'{"prompt": "\\\\ud800'], ids=["", "pair", "backslash"]
)
def test_a_body_that_is_cut_is_not_said_to_have_half_a_character(body):
    with pytest.raises(InvalidRequest, match="truncated"):
        parse_body(body, CompletionRequest)


def test_whole_numbers_may_be_written_as_floats():
    request = completion(max_tokens=100.0, seed=7.0, temperature=1, n=2.0)
    assert (request.max_tokens, request.seed, request.temperature, request.n) == (100, 7, 1.0, 2)
    assert isinstance(request.max_tokens, int)
    body = {"messages": [{"role": "user", "content": "x", "mood": 1}], "max_tokens": 5.0}
    assert parse_lenient_body(json.dumps(body).encode(), ChatCompletionRequest)[0].max_tokens == 5
    for wrong in (1.5, 1e300, True):
        with pytest.raises(InvalidRequest, match="max_tokens"):
            completion(max_tokens=wrong)


def test_a_mass_of_nothing_is_greedy():
    assert sampling(completion(top_p=0, temperature=0.9)).temperature == 0.0
    assert sampling(completion(top_p=0.1, temperature=0.9)).temperature == 0.9


def test_null_is_as_good_as_nothing_for_every_optional_field():
    for request, kind in ((completion(), CompletionRequest), (chat(), ChatCompletionRequest)):
        required = {"prompt", "messages"}
        nulls = dict.fromkeys(field for field in kind.__struct_fields__ if field not in required)
        again = completion(**nulls) if kind is CompletionRequest else chat(**nulls)
        assert again == request


def test_fields_that_clients_send_for_themselves_are_ignored():
    request = chat(
        user="u", metadata={"a": "b"}, store=True, safety_identifier="s", prompt_cache_key="k", parallel_tool_calls=True
    )
    check_supported(request)
    assert sampling(request) == sampling(chat())


# ---- unsupported fields ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "end"),
        ("best_of", 3),
        ("guided_whitespace_pattern", " "),
        ("bad_words", ["x"]),
        ("length_penalty", 0.5),
        ("length_penalty", True),
        ("use_beam_search", True),
        ("use_beam_search", 0),
    ],
)
def test_unsupported_fields_of_completions_are_refused_by_name(field, value):
    with pytest.raises(InvalidRequest, match=f"{field} is not supported yet") as refused:
        check_supported(completion(**{field: value}))
    assert refused.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{}]),
        ("modalities", ["audio"]),
        ("chat_template", "{{ messages }}"),
        ("web_search_options", {}),
        ("echo", True),
    ],
)
def test_unsupported_fields_of_chat_are_refused_by_name(field, value):
    with pytest.raises(InvalidRequest, match=f"{field} is not supported yet") as refused:
        check_supported(chat(**{field: value}))
    assert refused.value.param == field


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
def test_neutral_values_pass(kind):
    build = completion if kind is CompletionRequest else chat
    for field, values in NEUTRAL.items():
        if field in kind.__struct_fields__:
            for value in values:
                check_supported(build(**{field: value}))
    check_supported(build(best_of=2, n=2))
    check_supported(build(best_of=1))


# ---- ranges ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 0.001),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("seed", 2**64),
        ("priority", 2**31),
        ("cache_salt", ""),
    ],
)
@pytest.mark.parametrize("build", [completion, chat])
def test_values_out_of_range_name_the_field_and_what_is_allowed(build, field, value):
    with pytest.raises(InvalidRequest, match=f"{field} (must be|is empty)") as refused:
        sampling(build(**{field: value}))
    assert refused.value.param == field


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_wrong_output_options_name_the_field(fields, param):
    with pytest.raises(InvalidRequest) as refused:
        output_options(completion(**fields))
    assert refused.value.param == param


def test_no_top_logprobs_is_what_a_request_without_logprobs_has_anyway():
    options = output_options(chat(logprobs=False, top_logprobs=0))
    assert options.logprobs is None


@pytest.mark.parametrize(
    "fields", [{"top_logprobs": 2}, {"top_logprobs": 2, "logprobs": False}, {"logprobs": True, "top_logprobs": 21}]
)
def test_top_logprobs_needs_logprobs_and_a_range(fields):
    with pytest.raises(InvalidRequest) as refused:
        output_options(chat(**fields))
    assert refused.value.param == "top_logprobs"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_token_ids": [257]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"allowed_token_ids": [300]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"logit_bias": {"257": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"one": 1}}, "logit_bias"),
        ({"logit_bias": {"": 1}}, "logit_bias"),
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias"),  # int() refuses more than 4300 digits with a ValueError
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ],
)
def test_token_ids_and_contradictions_are_checked(fields, param):
    with pytest.raises(InvalidRequest) as refused:
        sampling(completion(**fields))
    assert refused.value.param == param


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(-1e9, 1e9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("019x", max_size=3), inner, max_size=3),
    max_leaves=4,
)
plausible = st.integers(-2, 300) | st.floats(-2, 3) | st.lists(st.integers(-1, 300), max_size=3) | st.booleans() | values


@pytest.mark.slow
@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_body_is_refused_or_becomes_a_message_that_workers_can_read(kind, data):
    fields = data.draw(st.dictionaries(st.sampled_from(kind.__struct_fields__), plausible, max_size=6))
    required = {"prompt": "x"} if kind is CompletionRequest else {"messages": [{"role": "user", "content": "x"}]}
    try:
        request = parse_body(json.dumps({**required, **fields}).encode(), kind)
        check_supported(request)
        check_ranges(request)
        output_options(request)
        params = sampling_params(request, 10, 5, LIMITS)
    except InvalidRequest:
        return
    message = Generate(request_id="r", prompt_token_ids=(1,), sampling=params, n=request.n or 1, priority=request.priority or 0)
    assert codec.decode_router_frame(codec.encode_router_message(message)) == message


# ---- defaults and conversion -------------------------------------------------------------------------------------------------


def test_defaults_are_openai_s():
    assert sampling(completion()) == SamplingParams(max_tokens=16, seed=5)


def test_every_parameter_arrives():
    request = completion(
        max_tokens=7,
        min_tokens=2,
        temperature=0.0,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=42,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"3": -100, "4": 1.5},
        allowed_token_ids=[3, 4, 5],
        stop_token_ids=[9],
        ignore_eos=True,
        logprobs=3,
        prompt_logprobs=2,
    )
    assert sampling(request) == SamplingParams(
        max_tokens=7,
        min_tokens=2,
        temperature=0.0,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=42,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={3: -100.0, 4: 1.5},
        allowed_token_ids=(3, 4, 5),
        stop_token_ids=(9,),
        ignore_eos=True,
        logprobs=3,
        prompt_logprobs=2,
    )


@pytest.mark.parametrize(("given", "used"), [(0, 0), (-1, 2**63 - 1), (2**63, 0), (-(2**63), 0)])
def test_any_64_bit_seed_is_mapped_into_the_range_of_the_wire(given, used):
    assert sampling(completion(seed=given)).seed == used


def test_top_k_minus_one_means_all():
    assert sampling(completion(top_k=-1)).top_k == 0


def test_chat_without_a_limit_may_fill_the_context():
    assert sampling(chat(), num_prompt_tokens=30).max_tokens == 70


def test_completions_without_a_limit_stay_within_the_context():
    assert sampling(completion(), num_prompt_tokens=95).max_tokens == 5


def test_max_completion_tokens_wins():
    assert sampling(chat(max_tokens=5, max_completion_tokens=6)).max_tokens == 6


@pytest.mark.parametrize(
    ("request_", "num_prompt_tokens", "param"),
    [
        (completion(max_tokens=91), 10, "max_tokens"),
        (completion(), 100, "prompt"),
        (completion(max_tokens=1), 100, "prompt"),
        (chat(), 100, "messages"),
        (chat(max_tokens=50), 51, "max_tokens"),
        (chat(max_tokens=5, max_completion_tokens=50), 51, "max_completion_tokens"),
        (chat(max_completion_tokens=50), 100, "messages"),
    ],
)
def test_what_exceeds_the_context_is_refused_with_the_numbers(request_, num_prompt_tokens, param):
    with pytest.raises(ContextTooLong, match="maximum context length is 100 tokens") as refused:
        sampling(request_, num_prompt_tokens)
    assert refused.value.param == param
    says_how_many = f"{param} may be at most {100 - num_prompt_tokens} with this prompt" in refused.value.message
    assert says_how_many == (num_prompt_tokens < 100)


def test_too_many_least_tokens_are_compared_with_the_field_that_the_client_gave():
    with pytest.raises(InvalidRequest, match="min_tokens = 5 exceeds max_completion_tokens = 4"):
        sampling(chat(min_tokens=5, max_completion_tokens=4))


def test_what_just_fits_is_accepted():
    assert sampling(completion(max_tokens=90), 10).max_tokens == 90
    assert sampling(chat(), 99).max_tokens == 1


def test_echo_with_logprobs_asks_for_those_of_the_prompt():
    assert sampling(completion(echo=True, logprobs=2)).prompt_logprobs == 2
    assert sampling(completion(echo=True)).prompt_logprobs is None
    assert sampling(completion(logprobs=2)).prompt_logprobs is None


def test_no_tokens_are_allowed_with_echo_only():
    wanted = completion(echo=True, max_tokens=0)
    check_ranges(wanted)
    assert output_options(wanted).is_echo_only
    assert sampling(wanted).max_tokens == 1
    for refused in (completion(max_tokens=0), chat(max_tokens=0), completion(echo=True, max_tokens=-1)):
        with pytest.raises(InvalidRequest, match="max_tokens"):
            check_ranges(refused)
    with pytest.raises(InvalidRequest, match="min_tokens"):
        sampling(completion(echo=True, max_tokens=0, min_tokens=1))


def test_output_options_are_read():
    options = output_options(
        completion(
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            stop="END",
            include_stop_str_in_output=True,
            min_tokens=3,
            skip_special_tokens=False,
            echo=True,
            logprobs=0,
            return_token_ids=True,
            stop_token_ids=[1],
        )
    )
    assert options.is_stream
    assert options.include_usage
    assert options.continuous_usage
    assert options.stop == ("END",)
    assert options.include_stop_str
    assert options.min_tokens == 3
    assert not options.skip_special_tokens
    assert options.echo
    assert options.logprobs == 0
    assert options.return_token_ids
    assert options.stop_token_ids == {1}


def test_chat_logprobs_count_their_alternatives():
    assert output_options(chat(logprobs=True)).logprobs == 0
    assert output_options(chat(logprobs=True, top_logprobs=3)).logprobs == 3
    assert output_options(chat(logprobs=False)).logprobs is None


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_the_load_failure_policy_is_the_client_s_choice(policy):
    assert load_failure_policy(completion(kv_transfer_params={"kv_load_failure_policy": policy})) == policy


@pytest.mark.parametrize("params", [None, {}, {"kv_load_failure_policy": None}])
def test_without_a_choice_the_load_failure_policy_is_the_workers(params):
    assert load_failure_policy(completion(kv_transfer_params=params)) is None


def test_unknown_load_failure_policy_error_names_the_field_and_allowed_values():
    with pytest.raises(InvalidRequest) as refused:
        load_failure_policy(completion(kv_transfer_params={"kv_load_failure_policy": "retry"}))
    assert refused.value.param == "kv_transfer_params.kv_load_failure_policy"
    assert refused.value.message == f"{refused.value.param} must be one of recompute, fail, got 'retry'"


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"do_remote_decode": True}, "kv_transfer_params.do_remote_decode"),
        ({"kv_load_failure_policy": 1}, "kv_transfer_params.kv_load_failure_policy"),
        ("fail", "kv_transfer_params"),
    ],
)
def test_other_transfer_parameters_are_refused_by_name(params, field):
    with pytest.raises(InvalidRequest) as refused:
        completion(kv_transfer_params=params)
    assert refused.value.param == field


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_token_ids": list(range(257))}, "stop_token_ids"),
        ({"stop_token_ids": list(range(1, 257))}, "stop_token_ids"),  # 0 is the model's own end
        ({"stop_token_ids": [5, 6], "allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"allowed_token_ids": [0]}, "allowed_token_ids"),
        ({"allowed_token_ids": [0, 7], "stop_token_ids": [7]}, "allowed_token_ids"),
    ],
)
def test_request_that_leaves_no_token_to_choose_is_refused(fields, param):
    limits = ModelLimits(max_model_len=100, vocab_size=257, eos_token_ids=frozenset({0}))
    with pytest.raises(InvalidRequest, match="min_tokens = 1") as caught:
        sampling_params(completion(min_tokens=1, **fields), 10, 5, limits)
    assert caught.value.param == param
    sampling_params(completion(**fields), 10, 5, limits)  # the first token may end the text


def test_one_token_that_does_not_end_the_text_is_enough():
    limits = ModelLimits(max_model_len=100, vocab_size=257, eos_token_ids=frozenset({0}))
    sampling_params(completion(min_tokens=1, stop_token_ids=list(range(2, 257))), 10, 5, limits)
    sampling_params(completion(min_tokens=1, stop_token_ids=list(range(1, 257)), ignore_eos=True), 10, 5, limits)


@pytest.mark.parametrize(
    ("fields", "num_prompt_tokens", "expected"), [({}, 30, 70), ({}, 150, 50), ({"max_tokens": 120}, 30, 120)]
)
def test_output_that_only_a_worker_that_is_away_could_hold_is_not_refused_here(fields, num_prompt_tokens, expected):
    limits = ModelLimits(max_model_len=100, later_model_len=200, vocab_size=257)
    assert sampling_params(chat(**fields), num_prompt_tokens, 5, limits).max_tokens == expected
    with pytest.raises(ContextTooLong, match="200 tokens"):
        sampling_params(chat(max_tokens=171), num_prompt_tokens, 5, limits)
