"""Events encoded from what does not change in them are those that the shaper makes one by one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.wire.messages import TokenLogprobs
from router.dispatch.types import PromptReport
from router.http import sse
from router.http.event_encoder import EventEncoder
from router.openai.logprobs import TokenTexts
from router.openai.postprocess import Delta, RequestOutput
from router.openai.preprocess import Prompt
from router.openai.responses import ChatShaper, CompletionShaper, Envelope
from router.openai.sampling import OutputOptions

ENVELOPE = Envelope(id="cmpl-1", created=1, model='a "model"')
reports = st.sampled_from([None, PromptReport(3), PromptReport(3, model_fingerprint=b"weights"), PromptReport(0)])
options = st.builds(
    OutputOptions,
    echo=st.booleans(),
    logprobs=st.sampled_from([None, None, 0]),
    return_token_ids=st.booleans(),
    include_usage=st.booleans(),
    continuous_usage=st.booleans(),
)
texts = st.one_of(st.text(), st.sampled_from(["", '"', "\\", "\n", "\u2028", "\ue000the text\ue000", "</s>"]))
ends = st.sampled_from([None, None, None, "stop", "length"])


@st.composite
def deltas(draw, num_choices, has_logprobs):
    delta = Delta(draw(st.integers(0, num_choices - 1)), draw(texts), draw(st.lists(st.integers(0, 200), max_size=2)))
    delta.finish_reason = draw(ends)
    delta.offsets = [0] * len(delta.token_ids)
    if has_logprobs:
        delta.logprobs = [TokenLogprobs((token,), (-0.5,), 1) for token in delta.token_ids]
    return delta


@pytest.mark.slow
@pytest.mark.parametrize("kind", [CompletionShaper, ChatShaper])
@settings(max_examples=150)
@given(data=st.data(), options=options, num_prompts=st.integers(1, 2), n=st.integers(1, 2))
def test_events_are_those_of_the_shaper(tiny_tokenizer, kind, data, options, num_prompts, n):
    """Whatever the options are, and also if the prompt's report comes, or comes again, between two events."""
    num_prompts = 1 if kind is ChatShaper else num_prompts
    outputs = [
        RequestOutput(tiny_tokenizer, options, [Prompt((65, 66), "AB") for _ in range(num_prompts)], n) for _ in range(2)
    ]
    plain, shaper = (kind(ENVELOPE, options, output, TokenTexts(tiny_tokenizer)) for output in outputs)
    encoder = EventEncoder(shaper, outputs[1])
    for _ in range(data.draw(st.integers(1, 6))):
        report = data.draw(reports)
        for output in outputs:
            output.prompts[0].report = report or output.prompts[0].report
        found = data.draw(st.lists(deltas(num_prompts * n, options.logprobs is not None), min_size=1, max_size=2))
        assert encoder.encode(found) == b"".join([sse.event(chunk) for chunk in plain.chunks(found)])


@pytest.mark.parametrize("kind", [CompletionShaper, ChatShaper])
def test_an_event_names_the_weights_that_are_known_by_then(tiny_tokenizer, kind):
    output = RequestOutput(tiny_tokenizer, OutputOptions(), [Prompt((65,), "A")], 1)
    encoder = EventEncoder(kind(ENVELOPE, OutputOptions(), output, TokenTexts(tiny_tokenizer)), output)
    events = [encoder.encode([Delta(0, text)]) for text in ("a", "b")]
    output.prompts[0].report = PromptReport(0, model_fingerprint=b"weights")
    events += [encoder.encode([Delta(0, text)]) for text in ("c", "d")]
    assert [b"fp_776569676874" in event for event in events] == [False, False, True, True]


def test_events_of_plain_text_are_not_shaped_again(tiny_tokenizer, monkeypatch):
    output = RequestOutput(tiny_tokenizer, OutputOptions(), [Prompt((65,), "A")], 1)
    shaper = CompletionShaper(ENVELOPE, OutputOptions(), output, TokenTexts(tiny_tokenizer))
    encoder = EventEncoder(shaper, output)
    encoder.encode([Delta(0, "a")])
    encoder.encode([Delta(0, "b")])
    monkeypatch.setattr(shaper, "chunks", None)
    assert b'"text":"c\\n"' in encoder.encode([Delta(0, "c\n")])
