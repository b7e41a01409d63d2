"""Streaming: however the text is split, it is the same, and no piece is broken."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.model import detokenizer
from core.model.detokenizer import IncrementalDetokenizer, StopStringMatcher, StopStrings
from core.model.tokenizer import Tokenizer

TEXTS = st.text(st.sampled_from("ab é日👩‍👧🎉🦊 \n"), max_size=30)


@pytest.fixture(scope="module")
def tokenizers(byte_level_backend, byte_fallback_backend, tmp_path_factory):
    from core.model.hub import ModelFiles

    def make(name, backend):
        folder = tmp_path_factory.mktemp(name)
        backend.save(str(folder / "tokenizer.json"))
        files = ModelFiles(name, folder, {}, {}, (), folder / "tokenizer.json", {}, None, folder / "digests.json")
        return Tokenizer(files)

    return {"byte level": make("byte_level", byte_level_backend), "byte fallback": make("byte_fallback", byte_fallback_backend)}


def stream(tokenizer, token_ids, sizes=(1,), **options):
    """Push ``token_ids`` in pieces of ``sizes``, cycling; return the pieces of text."""
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    pieces, start, turn = [], 0, 0
    while start < len(token_ids):
        size = max(1, sizes[turn % len(sizes)])
        pieces.append(detokenizer.push(token_ids[start : start + size]))
        start, turn = start + size, turn + 1
    return [*pieces, detokenizer.flush()]


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 440), max_size=40), sizes=st.lists(st.integers(1, 5), min_size=1), skip=st.booleans())
def test_any_byte_level_ids_stream_to_what_they_decode_to(tokenizers, ids, sizes, skip):
    tokenizer = tokenizers["byte level"]
    pieces = stream(tokenizer, ids, sizes, skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@settings(deadline=None)
@given(text=TEXTS, sizes=st.lists(st.integers(1, 5), min_size=1))
def test_text_streams_to_itself_in_whole_characters(tokenizers, kind, text, sizes):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids, sizes)
    assert "".join(pieces) == tokenizer.decode(ids) == text.removeprefix(" " if kind == "byte fallback" else "")
    assert all("\ufffd" not in piece for piece in pieces)


@settings(deadline=None)
@given(prompt=TEXTS, text=TEXTS)
@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_output_continues_its_prompt(tokenizers, kind, prompt, text):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(prompt + text)
    cut = len(tokenizer.encode(prompt))
    whole = tokenizer.decode(ids)
    streamed = "".join(stream(tokenizer, ids[cut:], prompt_token_ids=ids[:cut]))
    known = tokenizer.decode(ids[:cut]).rstrip("\ufffd")
    assert whole.endswith(streamed)
    assert known + streamed == whole


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@pytest.mark.parametrize("num_in_prompt", range(3))
def test_a_replacement_character_that_ends_the_prompt_is_not_put_out_again(tokenizers, kind, num_in_prompt):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode("a\ufffd🦊")
    start = len(tokenizer.encode("a\ufffd"))
    assert len(ids) - start > 2  # the fox's tokens, of which the prompt has some
    cut = start + num_in_prompt
    assert "".join(stream(tokenizer, ids[cut:], prompt_token_ids=ids[:cut])) == "🦊"


def test_a_character_is_held_until_its_last_byte(tokenizers):
    tokenizer = tokenizers["byte level"]
    ids = tokenizer.encode("🦊")
    assert len(ids) > 1
    assert stream(tokenizer, ids) == [*[""] * (len(ids) - 1), "🦊", ""]
    assert stream(tokenizer, ids[:-1])[-1] == "\ufffd"


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@pytest.mark.parametrize("num_in_prompt", range(3))
def test_a_character_is_left_out_where_the_text_is_cut_within_it(tokenizers, kind, num_in_prompt):
    tokenizer = tokenizers[kind]
    ids, start = tokenizer.encode("a🦊🦊"), len(tokenizer.encode("a"))
    for end in range(start + num_in_prompt, len(ids)):
        detokenizer = IncrementalDetokenizer(tokenizer, ids[: start + num_in_prompt])
        text = detokenizer.push(ids[start + num_in_prompt : end]) + detokenizer.flush(is_cut=True)
        assert text == "🦊" * ((end - start) * 2 // (len(ids) - start))


def test_bytes_that_are_no_character_are_shown_where_the_text_is_cut(tokenizers):
    tokenizer = tokenizers["byte fallback"]
    first, *_, last = tokenizer.encode("🦊")[-4:]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push([last, last, first]) + detokenizer.flush(is_cut=True) == "\ufffd\ufffd"


def test_the_space_before_a_first_word_depends_on_the_prompt(tokenizers):
    tokenizer = tokenizers["byte fallback"]
    prompt, word = tokenizer.encode("the quick"), tokenizer.encode(" brown")
    assert "".join(stream(tokenizer, word, prompt_token_ids=prompt)) == " brown"
    assert "".join(stream(tokenizer, word)) == "brown"


def test_endless_broken_bytes_are_not_held_forever(tokenizers):
    tokenizer = tokenizers["byte fallback"]
    continuation = tokenizer.encode("🦊")[-1]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert tokenizer.decode([continuation]) == "\ufffd"
    pieces = [detokenizer.push([continuation]) for _ in range(40)]
    assert any(pieces[:20])


@pytest.mark.parametrize("hidden", [1, 10_000], ids=["special", "outside the vocabulary"])
def test_tokens_without_text_cost_no_more_as_they_become_many(tokenizers, monkeypatch, hidden):
    tokenizer = tokenizers["byte fallback"]
    fox = tokenizer.encode("the 🦊")
    ids = [*fox[:-1], *[hidden] * 300, fox[-1], *[hidden] * 300]
    decoded = []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: decoded.append(len(ids)) or decode(ids, **options))
    assert "".join(stream(tokenizer, ids)) == "the 🦊"
    assert sum(decoded) < 10 * len(ids)


def cut_at_stop(text, stops, include):
    """Read character by character and stop as soon as a stop string is complete: the definition."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def run_matcher(pieces, stops, include):
    matcher = StopStringMatcher(StopStrings(stops), include_stop_str_in_output=include)
    sent = []
    for piece in pieces:
        text, stop = matcher.push(piece)
        sent.append(text)
        if stop is not None:
            return sent, stop
    return [*sent, matcher.flush()], None


@settings(deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_stops_where_reading_character_by_character_would(pieces, stops, include):
    sent, stop = run_matcher(pieces, stops, include)
    assert ("".join(sent), stop) == cut_at_stop("".join(pieces), stops, include)


def test_holds_back_only_what_may_become_a_stop():
    matcher = StopStringMatcher(StopStrings(["END"]))
    assert matcher.push("the E") == ("the ", None)
    assert matcher.push("N") == ("", None)
    assert matcher.push("T E") == ("ENT ", None)
    assert matcher.push("NDx") == ("", "END")


def test_sends_what_was_held_at_the_end():
    matcher = StopStringMatcher(StopStrings(["END"]))
    assert matcher.push("the EN") == ("the ", None)
    assert matcher.flush() == "EN"
    assert matcher.flush() == ""


def test_including_the_stop_holds_nothing_back():
    matcher = StopStringMatcher(StopStrings(["END"]), include_stop_str_in_output=True)
    assert matcher.push("the EN") == ("the EN", None)
    assert matcher.push("Dless") == ("D", "END")


def test_a_letter_costs_one_step_however_long_the_stop_is(monkeypatch):
    steps = []
    original = detokenizer._advance
    matcher = StopStringMatcher(StopStrings(["b" + "a" * 1000, "ab" * 500]))
    monkeypatch.setattr(detokenizer, "_advance", lambda *arguments: steps.append(1) or original(*arguments))
    for _ in range(2000):
        matcher.push("a")
    assert len(steps) == 2 * 2000


def test_without_stops_everything_passes():
    matcher = StopStringMatcher(StopStrings(["", ""]))
    assert matcher.push("anything") == ("anything", None)
    assert matcher.flush() == ""
