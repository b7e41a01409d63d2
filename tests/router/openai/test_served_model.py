from __future__ import annotations

import dataclasses

import pytest

from core.config_workers import ModelSection
from core.errors import ConfigError
from core.wire.messages import Generate
from core.wire.sampling import SamplingParams
from router.openai.requests import CompletionRequest
from router.openai.sampling import ModelLimits
from router.openai.served_model import SamplingDefaults, sampling_defaults, served_model
from tests.support.sampling_params import sampling_params

FILE = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "do_sample": True, "eos_token_id": [1]}
DEFAULTS = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05)


def test_reads_the_sampling_parameters_and_nothing_else():
    assert sampling_defaults(FILE) == DEFAULTS


@pytest.mark.parametrize("file", [{}, {"temperature": None, "top_k": None}])
def test_what_is_not_there_is_neutral(file):
    assert sampling_defaults(file) == SamplingDefaults(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", -1), ("temperature", "hot"), ("top_p", 1.5), ("top_k", 2.5), ("min_p", True), ("repetition_penalty", 0)],
)
def test_nonsense_is_refused_with_the_way_around_it(key, value):
    with pytest.raises(ConfigError, match=rf"{key}.*model\.generation_config = none"):
        sampling_defaults({key: value})


@pytest.mark.parametrize(("setting", "defaults"), [("auto", DEFAULTS), ("none", SamplingDefaults())])
def test_setting_says_whether_the_file_counts(tiny_model_files, setting, defaults):
    files = dataclasses.replace(tiny_model_files, generation_config=FILE)
    served = served_model(ModelSection(name="m", served_name="known-as", generation_config=setting), files)
    assert (served.name, served.defaults) == ("known-as", defaults)


def sampling(defaults, **fields) -> SamplingParams:
    limits = ModelLimits(max_model_len=100, vocab_size=257, defaults=defaults)
    return sampling_params(CompletionRequest(prompt="p", **fields), 1, 5, limits)


def test_model_s_sampling_parameters_stand_in_for_what_the_request_leaves_out():
    chosen = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    defaults = SamplingDefaults(**chosen)
    assert sampling(defaults) == SamplingParams(max_tokens=16, seed=5, **chosen)
    asked = sampling(defaults, temperature=0, top_p=1, top_k=0, min_p=0, repetition_penalty=1)
    assert asked == SamplingParams(max_tokens=16, seed=5, temperature=0)


@pytest.mark.parametrize(("top_k", "sampled"), [(-1, 0), (0, 0), (1000, 257)])
def test_model_s_top_k_is_understood_as_a_request_s(top_k, sampled):
    assert sampling(SamplingDefaults(top_k=top_k)).top_k == sampled


async def test_workers_are_told_the_model_s_sampling_parameters(start_router):
    under_test = await start_router(has_http=False, sampling=DEFAULTS)
    prefill, _ = await under_test.pair()
    async with under_test.client() as client:
        for fields in ({}, {"temperature": 0}):
            await client.post("/v1/completions", json={"prompt": "p", "max_tokens": 2, **fields})
    sampled, greedy = [message.sampling for message in prefill.messages(Generate)]
    assert (sampled.temperature, sampled.top_k, sampled.top_p, sampled.repetition_penalty) == (0.6, 20, 0.95, 1.05)
    assert (greedy.temperature, greedy.top_k) == (0.0, 20)
