from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.model.detokenizer import StopStrings
from core.wire.messages import ErrorInfo, TokenLogprobs, TransferUsage
from router.dispatch.timing import HandoffReport, first_token_timing, second_token_timing
from router.dispatch.types import ChoiceUpdate, PromptReport, Update
from router.openai.postprocess import ChoiceText, RequestOutput
from router.openai.preprocess import Prompt
from router.openai.sampling import OutputOptions

EOS = 256


def _choice(tokenizer, options: OutputOptions) -> ChoiceText:
    return ChoiceText(tokenizer, options, StopStrings(options.stop), ())


@pytest.fixture
def spell(tiny_tokenizer):
    return lambda text: tuple(tiny_tokenizer.encode(text))


@pytest.fixture
def choice(tiny_tokenizer):
    return lambda **options: _choice(tiny_tokenizer, OutputOptions(**options))


def tokens(*token_ids: int, reason=None, stop=None, logprobs=None) -> ChoiceUpdate:
    return ChoiceUpdate(0, tuple(token_ids), logprobs, reason, stop)


def test_tokens_become_text(choice, spell):
    text = choice()
    assert text.push(tokens(*spell("hel")), 0).text == "hel"
    last = text.push(tokens(*spell("lo"), reason="length"), 0)
    assert (last.text, last.finish_reason, last.stop_reason) == ("lo", "length", None)
    assert text.num_tokens == 5


def test_end_of_sequence_is_counted_and_not_shown(choice, spell):
    text = choice(skip_special_tokens=False)
    delta = text.push(tokens(*spell("a"), EOS, reason="stop", stop=EOS), 0)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a", "stop", None)
    assert delta.token_ids == [*spell("a"), EOS]
    assert text.num_tokens == 2


def test_a_stop_token_of_the_client_is_hidden_and_named(choice, spell):
    (stop,) = spell("z")
    text = choice(stop_token_ids=frozenset({stop}))
    delta = text.push(tokens(*spell("az"), reason="stop", stop=stop), 0)
    assert (delta.text, delta.stop_reason) == ("a", stop)


def test_a_stop_token_can_be_shown(choice, spell):
    (stop,) = spell("z")
    text = choice(stop_token_ids=frozenset({stop}), include_stop_str=True)
    assert text.push(tokens(*spell("az"), reason="stop", stop=stop), 0).text == "az"


def test_characters_are_held_back_until_they_are_whole(choice, spell):
    first, second, third = spell("€")
    text = choice()
    assert text.push(tokens(first), 0).text == ""
    assert text.push(tokens(second), 0).text == ""
    assert text.push(tokens(third), 0).text == "€"


def test_tokens_start_where_their_character_does(choice, spell):
    text = choice()
    first = text.push(tokens(*spell("a€")), 0)
    assert first.offsets == [0, 1, 1, 1]
    assert text.push(tokens(*spell("bc"), EOS, reason="stop", stop=EOS), 0).offsets == [2, 3, 4]


def test_prompt_alone_has_no_output(choice, spell):
    text = choice(echo=True, is_echo_only=True)
    delta = text.push(tokens(*spell("x"), reason="length", logprobs=(TokenLogprobs(spell("x"), (-1.0,), 1),)), 0)
    assert (delta.text, delta.token_ids, delta.logprobs, delta.finish_reason) == ("", [], [], "length")
    assert text.num_tokens == 0


def test_a_character_that_the_model_leaves_broken_is_shown_at_the_end(choice, spell):
    text = choice()
    assert text.push(tokens(spell("€")[0], EOS, reason="stop", stop=EOS), 0).text == "\ufffd"


@pytest.mark.parametrize("num_bytes", [1, 2])
@pytest.mark.parametrize("options", [{}, {"stop": ("END",)}, {"stop": ("aEN",)}])
def test_a_character_that_the_limit_of_tokens_cuts_is_left_out(choice, spell, num_bytes, options):
    cut = spell("€")[:num_bytes]
    entries = tuple(TokenLogprobs((token,), (-1.0,), 1) for token in cut)
    text = choice(logprobs=0, **options)
    shown = text.push(tokens(*spell("aE")), 0).text
    delta = text.push(tokens(*cut, reason="length", logprobs=entries), 0)
    assert (shown + delta.text, delta.finish_reason) == ("aE", "length")
    assert (delta.token_ids, delta.logprobs, delta.offsets) == (list(cut), list(entries), [2] * num_bytes)


def test_bytes_that_become_no_character_are_shown_where_the_limit_of_tokens_cuts(choice, spell):
    first, second, _ = spell("€")
    assert choice().push(tokens(first, *spell("a"), first, second, reason="length"), 0).text == "\ufffda"
    assert choice().push(tokens(second, reason="length"), 0).text == "\ufffd"


def test_a_stop_string_ends_the_choice_and_cuts_what_follows(choice, spell):
    text = choice(stop=("END",))
    delta = text.push(tokens(*spell("abENDcd")), 0)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("ab", "stop", "END")
    assert delta.token_ids == list(spell("abEND"))
    assert text.num_tokens == 5
    assert text.is_finished


def test_the_start_of_a_stop_string_is_held_back_and_given_out_when_it_is_none(choice, spell):
    text = choice(stop=("END",))
    assert text.push(tokens(*spell("aEN")), 0).text == "a"
    assert text.push(tokens(*spell("x")), 0).text == "ENx"
    assert text.push(tokens(*spell("E"), reason="length"), 0).text == "E"


def test_a_stop_string_can_be_shown(choice, spell):
    assert choice(stop=("END",), include_stop_str=True).push(tokens(*spell("abENDcd")), 0).text == "abEND"


def test_stop_strings_are_not_looked_for_before_the_minimum(choice, spell):
    text = choice(stop=("b",), min_tokens=3)
    delta = text.push(tokens(*spell("abcdb")), 0)
    assert (delta.text, delta.finish_reason) == ("abcd", "stop")


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("abSTOPmore", {"stop": ("STOP",), "min_tokens": 4}, ("ab", "STOP")),
        ("abSTOPmore", {"stop": ("STOP",), "min_tokens": 5}, ("ab", "STOP")),
        ("abSTOPmore", {"stop": ("STOP",), "min_tokens": 6}, ("abSTOPmore", None)),
        ("aSTOPSTOP.", {"stop": ("STOP",), "min_tokens": 5}, ("aSTOP", "STOP")),
        ("abababx", {"stop": ("abab",), "min_tokens": 4}, ("ab", "abab")),
        ("abd", {"stop": ("b", "abc"), "min_tokens": 2}, ("abd", None)),
        ("abcd", {"stop": ("b", "abc"), "min_tokens": 2}, ("", "abc")),
    ],
)
@pytest.mark.parametrize("size", [1, 20])
def test_a_stop_string_may_begin_within_the_minimum_but_not_end(choice, spell, text, options, expected, size):
    output, ids = choice(**options), spell(text)
    deltas = []
    for start in range(0, len(ids), size):
        is_last = start + size >= len(ids)
        deltas.append(output.push(tokens(*ids[start : start + size], reason="length" if is_last else None), 0))
        if output.is_finished:
            break
    assert ("".join(delta.text for delta in deltas), deltas[-1].stop_reason) == expected
    assert deltas[-1].finish_reason == ("stop" if expected[1] else "length")


def test_logprobs_stay_beside_their_tokens(choice, spell):
    entries = tuple(TokenLogprobs((token,), (-1.0,), 1) for token in spell("abEND"))
    delta = choice(stop=("E",), logprobs=0).push(tokens(*spell("abEND"), logprobs=entries), 0)
    assert delta.token_ids == list(spell("abE"))
    assert delta.logprobs == list(entries[:3])


@given(st.text(max_size=30), st.lists(st.integers(1, 5), min_size=1, max_size=40), st.sampled_from(["", "a", "ab", "é"]))
def test_text_does_not_depend_on_how_tokens_arrive(tiny_tokenizer, text, sizes, stop):
    token_ids = tiny_tokenizer.encode(text)
    options = OutputOptions(stop=(stop,) if stop else ())
    choice, shown, position = _choice(tiny_tokenizer, options), "", 0
    while not choice.is_finished:
        size = sizes[position % len(sizes)]
        part = token_ids[position : position + size]
        position += size
        shown += choice.push(ChoiceUpdate(0, tuple(part), None, "length" if position >= len(token_ids) else None), 0).text
    assert shown == (text.partition(stop)[0] if stop else text)


# ---- whole requests ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def output(tiny_tokenizer, spell):
    prompts = [Prompt(spell("ab"), "ab"), Prompt(spell("cde"), "cde")]
    return RequestOutput(tiny_tokenizer, OutputOptions(stop=("!",)), prompts, 2)


def test_choices_are_numbered_prompt_by_prompt(output, spell):
    update = Update(choices=[ChoiceUpdate(1, spell("x"))])
    deltas, stopped, error = output.apply([(1, update)])
    assert [(delta.index, delta.text) for delta in deltas] == [(3, "x")]
    assert (stopped, error) == ([], None)
    assert output.locate(3) == (1, 1)
    assert output.prompt_of(3).prompt.text == "cde"


def test_each_piece_of_a_choices_output_makes_a_delta(output, spell):
    first, second = Update(choices=[ChoiceUpdate(0, spell("x"))]), Update(choices=[ChoiceUpdate(0, spell("y"), None, "length")])
    deltas, _, _ = output.apply([(0, first), (0, second)])
    assert [(delta.text, delta.finish_reason) for delta in deltas] == [("x", None), ("y", "length")]


def test_choices_stopped_by_text_are_reported_once(output, spell):
    _, stopped, _ = output.apply([(0, Update(choices=[ChoiceUpdate(1, spell("a!b"))]))])
    assert stopped == [1]
    deltas, stopped, _ = output.apply([(0, Update(choices=[ChoiceUpdate(1, spell("c"))]))])
    assert (deltas, stopped) == ([], [])


def test_a_choice_that_is_cut_within_a_character_leaves_the_others_whole(output, spell):
    first, *others = spell("€")
    output.apply([(0, Update(choices=[ChoiceUpdate(0, (first,)), ChoiceUpdate(1, (first,))]))])
    cut, whole = ChoiceUpdate(0, (others[0],), None, "length"), ChoiceUpdate(1, tuple(others), None, "length")
    deltas, _, _ = output.apply([(0, Update(choices=[cut, whole]))])
    assert [delta.text for delta in deltas] == ["", "€"]


def test_a_stop_string_in_the_last_tokens_needs_no_report(output, spell):
    _, stopped, _ = output.apply([(0, Update(choices=[ChoiceUpdate(0, spell("a!"), None, "length")]))])
    assert stopped == []


def test_it_is_finished_when_every_choice_is(output, spell):
    for prompt_index in (0, 1):
        for index in (0, 1):
            assert not output.is_finished
            output.apply([(prompt_index, Update(choices=[ChoiceUpdate(index, spell("x"), None, "length")]))])
    assert output.is_finished


def test_an_error_ends_the_news(output, spell):
    failure = ErrorInfo(code="peer_lost", message="gone")
    news_ = [(0, Update(choices=[ChoiceUpdate(0, spell("x"))])), (1, Update(error=failure))]
    deltas, _, error = output.apply(news_)
    assert [delta.text for delta in deltas] == ["x"]
    assert error is failure


def test_usage_adds_up_over_prompts_and_choices(output, spell):
    timing = first_token_timing(0.0, 0.0, 0.0), second_token_timing(0.0, TransferUsage())
    report = HandoffReport(cost=TransferUsage(transport="shm"), first_token=timing[0], second_token=timing[1])
    output.apply([(0, Update(choices=[ChoiceUpdate(0, spell("xy"))], prompt=PromptReport(num_cached_tokens=1)))])
    output.apply([(1, Update(choices=[ChoiceUpdate(1, spell("z"))], prompt=PromptReport(num_cached_tokens=2)))])
    output.apply([(1, Update(handoff=report))])
    output.apply([(1, Update())])
    assert (output.num_prompt_tokens, output.num_completion_tokens, output.num_cached_tokens) == (5, 3, 3)
    assert output.prompts[1].handoff is report
