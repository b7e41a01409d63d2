"""Outputs follow their grammar on one engine: in a batch, after preemption, from tokens of another worker, and to the end."""

from __future__ import annotations

import json
import shutil
import time

import jsonschema
import numpy as np
import pytest
import torch

from core.engine.allowed_tokens import compiled_library, keep_allowed
from core.engine.core import EngineCore
from core.errors import InvalidRequest
from core.model.hub import resolve_model
from core.model.tokenizer import Tokenizer
from core.request import NewRequest, RequestStatus
from core.wire.sampling import SamplingParams, StructuredOutput
from tests.support.json_model import EOS_TOKEN_IDS, write_json_model

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 4},
        "open": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "open"],
    "additionalProperties": False,
}
FORM = StructuredOutput(kind="json_schema", value=json.dumps(SCHEMA))


@pytest.fixture(scope="session")
def json_model(tmp_path_factory):
    return write_json_model(tmp_path_factory.mktemp("json-model"))


@pytest.fixture
def build(build_tiny, json_model):
    return lambda **settings: build_tiny(model__name=str(json_model), **settings)


@pytest.fixture
def tokenizer(json_model, tmp_path):
    return Tokenizer(resolve_model(str(json_model), tmp_path))


def request(name, form=FORM, output=(), prompt=range(10, 30), **sampling):
    params = SamplingParams(**{"max_tokens": 200, "seed": 1, "structured_output": form, **sampling})
    stops = frozenset(EOS_TOKEN_IDS) | frozenset(params.stop_token_ids)
    return NewRequest(
        request_id=name, prompt_token_ids=list(prompt), output_token_ids=output, sampling=params, stop_token_ids=stops
    )


def run(engine: EngineCore, requests, after_step=lambda engine: None, timeout_s=60.0):
    """Run requests to their ends; return their outputs' tokens and last outputs, by id."""
    for new in requests:
        engine.add_request(new)
    tokens, ends, deadline = {}, {}, time.monotonic() + timeout_s
    while len(ends) < len(requests):
        assert time.monotonic() < deadline
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                ends[output.request_id] = output
        after_step(engine)
    return tokens, ends


def text_of(tokenizer, token_ids):
    return tokenizer.decode([token for token in token_ids if token not in EOS_TOKEN_IDS])


def check(tokenizer, token_ids):
    jsonschema.validate(json.loads(text_of(tokenizer, token_ids)), SCHEMA)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["off", "on"])
def test_every_seeded_output_of_a_random_model_is_valid(build, tokenizer, mode):
    engine = build(scheduler__async_scheduling=mode, scheduler__max_num_seqs=8).engine
    tokens, ends = run(engine, [request(f"r{seed}", seed=seed) for seed in range(20)])
    assert {end.finish_reason for end in ends.values()} == {"stop"}
    for token_ids in tokens.values():
        check(tokenizer, token_ids)
    assert len({tuple(token_ids) for token_ids in tokens.values()}) > 10


@pytest.mark.slow
def test_free_text_beside_it_is_what_it_is_alone(build):
    free = [request(f"f{seed}", None, seed=seed, max_tokens=30) for seed in range(3)]
    alone, _ = run(build().engine, free)
    together, _ = run(build().engine, [*free, request("bound")])
    assert {name: together[name] for name in alone} == alone


@pytest.mark.slow
def test_a_worker_goes_on_from_the_tokens_of_another(build, tokenizer):
    whole, _ = run(build().engine, [request("a")])
    for count in (1, 7, len(whole["a"]) - 1):
        rest, _ = run(build().engine, [request("a", output=whole["a"][:count])])
        assert whole["a"][:count] + rest["a"] == whole["a"]


@pytest.mark.slow
def test_tokens_of_another_worker_that_do_not_follow_are_an_error(build):
    _, ends = run(build().engine, [request("a", output=[30, 31])])
    assert ends["a"].finish_reason == "error"
    assert "does not follow the grammar" in ends["a"].error.message


@pytest.mark.slow
def test_preemption_changes_nothing(build, tokenizer):
    requests = [request(f"r{seed}", seed=seed) for seed in range(6)]
    calm, _ = run(build().engine, requests)
    engine = build(cache__num_blocks=12).engine
    tight, _ = run(engine, requests)
    assert engine.stats.num_preemptions > 0
    assert tight == calm


@pytest.mark.slow
def test_a_minimum_above_what_the_grammar_allows_ends_with_it(build, tokenizer):
    form = StructuredOutput(kind="choice", value='["yes", "no"]')
    tokens, ends = run(build().engine, [request("a", form, min_tokens=50)])
    assert text_of(tokenizer, tokens["a"]) in ("yes", "no")
    assert ends["a"].finish_reason == "stop"


@pytest.mark.slow
def test_a_minimum_makes_an_output_longer_where_the_grammar_allows_it(build, tokenizer):
    form = StructuredOutput(kind="regex", value="[a-z]*")
    tokens, _ = run(build().engine, [request("a", form, min_tokens=40, logit_bias={2: 100.0})])
    assert len(tokens["a"]) == 41
    assert text_of(tokenizer, tokens["a"]).isalpha()
    allowed = (*tokenizer.encode("x"), *EOS_TOKEN_IDS)
    tokens, _ = run(build().engine, [request("a", form, min_tokens=40, logit_bias={2: 100.0}, allowed_token_ids=allowed)])
    assert text_of(tokenizer, tokens["a"]) == "x" * 40


@pytest.mark.slow
def test_greedy_outputs_with_penalties_and_logprobs_are_valid(build, tokenizer):
    tokens, ends = run(build().engine, [request("a", temperature=0.0, repetition_penalty=1.3, logprobs=3)])
    check(tokenizer, tokens["a"])
    assert ends["a"].finish_reason == "stop"


@pytest.mark.slow
def test_allowed_tokens_that_the_grammar_excludes_end_in_an_error(build, tokenizer):
    letter = tokenizer.encode("x")
    _, ends = run(build().engine, [request("a", allowed_token_ids=tuple(letter))])
    assert ends["a"].finish_reason == "error"
    assert ends["a"].error.param == "allowed_token_ids"
    assert "or leave allowed_token_ids out" in ends["a"].error.message


@pytest.mark.slow
def test_a_minimum_ends_where_only_allowed_tokens_that_end_go_on(build, tokenizer):
    form = StructuredOutput(kind="regex", value="xy*")
    allowed = (*tokenizer.encode("x"), *EOS_TOKEN_IDS)
    tokens, ends = run(build().engine, [request("a", form, allowed_token_ids=allowed, min_tokens=50)])
    assert ends["a"].finish_reason == "stop"
    assert text_of(tokenizer, tokens["a"]) == "x"


@pytest.mark.slow
def test_an_unsupported_schema_ends_in_an_error_and_the_others_go_on(build, tokenizer):
    bad = StructuredOutput(kind="json_schema", value='{"uniqueItems": true}')
    tokens, ends = run(build().engine, [request("bad", bad), request("good")])
    assert "uniqueItems" in ends["bad"].error.message
    assert ends["bad"].error.http_status == 400
    check(tokenizer, tokens["good"])


def test_the_first_form_needs_no_file(build_tiny, json_model, tokenizer, tmp_path):
    folder = shutil.copytree(json_model, tmp_path / "model")
    engine = build_tiny(model__name=str(folder)).engine
    (folder / "tokenizer.json").unlink()
    tokens, _ = run(engine, [request("a")])
    check(tokenizer, tokens["a"])


def test_a_request_without_its_grammar_holds_nothing_up(build):
    engine = build().engine
    engine.add_request(request("bound"))
    assert engine.scheduler.requests["bound"].status is RequestStatus.WAITING_FOR_GRAMMAR
    engine.add_request(request("free", None, max_tokens=1))
    outputs = engine.step()  # the grammar takes a process to start
    assert [output.request_id for output in outputs] == ["free"]
    for _ in range(2):
        engine.step()
    assert not engine.has_work()  # it sleeps until the grammar is there
    assert engine.stats.num_waiting == 1


def test_a_waiting_request_can_be_aborted(build):
    engine = build().engine
    engine.add_request(request("bound"))
    assert engine.abort_requests(["bound"]) == ["bound"]
    engine.step()
    assert not engine.has_requests()


def test_an_abort_takes_out_the_grammar_for_this_request_alone(build):
    engine = build().engine
    engine.add_request(request("bound"))
    form = engine.scheduler.requests["bound"].sampling.structured_output
    for owner in ("bound", "other"):
        engine._grammars.renew(form, owner)
    engine.abort_requests(["bound"])
    assert engine._grammars._pending == {(form, ""), (form, "other")}


@pytest.mark.slow
def test_a_grammar_that_is_known_starts_at_once(build):
    engine = build().engine
    run(engine, [request("first")])
    engine.add_request(request("second"))
    assert engine.scheduler.requests["second"].status is RequestStatus.WAITING
    assert engine.step()


def test_ignore_eos_is_refused(build):
    with pytest.raises(InvalidRequest, match="ignore_eos"):
        build().engine.add_request(request("a", ignore_eos=True))


@pytest.fixture(params=["compiled", "numpy"])
def either_way(request, monkeypatch):
    """Run a test with the compiled mask, and as where there is no compiler."""
    if request.param == "numpy":
        monkeypatch.setattr("core.engine.allowed_tokens.compiled_library", lambda: None)
    elif shutil.which("gcc") is None:
        pytest.skip("there is no C compiler")
    else:
        assert compiled_library() is not None, "core/engine/_allowed_tokens.c was not built: make install"


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("vocab_size", [5, 49_152, 50_001])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 1.0])
def test_only_the_logits_of_allowed_tokens_stay(vocab_size, share):
    generator = np.random.default_rng(1)
    allowed = generator.random(vocab_size) < share
    logits = torch.from_numpy(generator.standard_normal(vocab_size).astype(np.float32))
    expected = torch.where(torch.from_numpy(allowed), logits, -torch.inf)
    bits = np.packbits(np.pad(allowed, (0, -vocab_size % 32)), bitorder="little")  # as the library has them: whole words
    keep_allowed(logits, bits)
    assert torch.equal(logits, expected)


@pytest.mark.skipif(compiled_library() is None, reason="core/engine/_allowed_tokens.c was not built")
def test_a_mask_that_is_too_short_is_refused():
    with pytest.raises(AssertionError, match="a bit for each"):
        keep_allowed(torch.zeros(9), np.zeros(1, dtype=np.uint8))


def test_no_logit_stays_without_a_mask():
    logits = torch.zeros(9)
    keep_allowed(logits, None)
    assert logits.isneginf().all()


MANY_STATES = StructuredOutput(kind="regex", value="(a|b)*a(a|b){14}c")  # two states or so for each token


def random_letters(tokenizer, name, **sampling):
    letters = tuple(tokenizer.encode("ab"))
    return request(name, MANY_STATES, allowed_token_ids=letters, **sampling)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["off", "on"])
def test_requests_that_fill_a_grammar_together_go_on_in_a_new_one(build, tokenizer, monkeypatch, mode):
    requests = [random_letters(tokenizer, f"r{seed}", seed=seed, max_tokens=60) for seed in range(6)]
    settings = {"scheduler__async_scheduling": mode, "scheduler__max_num_seqs": 4}  # two wait with a grammar that gets full
    calm, _ = run(build(**settings).engine, requests)
    monkeypatch.setattr("core.grammar.compiled.MAX_LEXER_STATES", 300)
    engine = build(**settings).engine
    lost = set()
    found, ends = run(
        engine, requests, lambda engine: lost.update(one.num_lost_grammars for one in engine.scheduler.requests.values())
    )
    assert max(lost) > 0
    assert {end.finish_reason for end in ends.values()} == {"length"}
    assert found == calm
    assert engine.stats.num_preemptions == 0  # none for lack of blocks


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["off", "on"])
def test_only_the_request_that_fills_a_grammar_alone_ends(build, tokenizer, monkeypatch, mode):
    others = [random_letters(tokenizer, f"r{seed}", seed=seed, max_tokens=50) for seed in range(3)]
    monkeypatch.setattr("core.grammar.compiled.MAX_LEXER_STATES", 200)
    engine = build(scheduler__async_scheduling=mode).engine
    _, ends = run(engine, [random_letters(tokenizer, "long", seed=9, max_tokens=400), *others])
    assert ends["long"].finish_reason == "error"
    assert "too complex to go on" in ends["long"].error.message
    assert {ends[other.request_id].finish_reason for other in others} == {"length"}
