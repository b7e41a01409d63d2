from __future__ import annotations

import math
import string

import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from core.model.hub import ModelFiles
from core.model.tokenizer import Tokenizer
from core.wire.messages import TokenLogprobs
from router.openai.logprobs import TokenTexts, chat_logprobs, completion_logprobs, prompt_logprobs


def saved(backend: tokenizers.Tokenizer, folder) -> Tokenizer:
    path = folder / "tokenizer.json"
    backend.save(str(path))
    return Tokenizer(ModelFiles("tiny", folder, {}, {}, (), path, {}, None, folder / "digests.json"))


@pytest.fixture
def texts(tiny_tokenizer) -> TokenTexts:
    return TokenTexts(tiny_tokenizer)


@pytest.fixture
def ids(tiny_tokenizer):
    return tiny_tokenizer.encode


def test_a_token_shows_its_text_with_its_space(texts, ids):
    (space,) = ids(" ")
    assert texts.text_of(space) == " "
    assert texts.bytes_of(space) == b" "


def test_a_token_that_is_half_a_character_shows_its_bytes(texts, ids):
    first = ids("€")[0]
    assert texts.text_of(first) == "\ufffd"
    assert texts.bytes_of(first) == "€".encode()[:1]


def test_special_and_unknown_tokens_do_not_break_it(texts):
    assert texts.text_of(256) == "<eos>"
    assert texts.bytes_of(9999) == b""


@pytest.mark.parametrize(
    ("spelled", "text", "raw"),
    [("\u2581the", " the", b" the"), ("<0xE2>", "\ufffd", b"\xe2")],
)
def test_sentencepiece_spellings_are_understood(tiny_tokenizer, monkeypatch, spelled, text, raw):
    monkeypatch.setattr(tiny_tokenizer, "is_byte_level", False)
    monkeypatch.setattr(tiny_tokenizer, "token", lambda token_id: spelled)
    monkeypatch.setattr(tiny_tokenizer, "decode", lambda token_ids, **options: "\ufffd")
    texts = TokenTexts(tiny_tokenizer)
    assert (texts.text_of(1), texts.bytes_of(1)) == (text, raw)


def test_an_added_token_of_a_byte_level_vocabulary_is_what_it_spells(tmp_path):
    bos = "<｜begin\u2581of\u2581sentence｜>"  # DeepSeek's
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(BPE({letter: index for index, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([bos])
    texts = TokenTexts(saved(backend, tmp_path))
    token_ids = backend.encode(f"{bos}abc").ids
    assert texts.text_of(token_ids[0]) == bos
    assert texts.bytes_of(token_ids[0]) == bos.encode()
    assert texts.offsets_of(f"{bos}abc", token_ids) == [0, 21, 22, 23]


def test_completion_logprobs_are_parallel_lists(texts, ids):
    a, b = ids("ab")
    entry = TokenLogprobs((b, a, b), (-0.5, -0.25, -0.5), 2)
    result = completion_logprobs(texts, [None, entry], [a, b], [3, 4])
    assert result.tokens == ["a", "b"]
    assert result.text_offset == [3, 4]
    assert result.token_logprobs == [None, -0.5]
    assert result.top_logprobs == [None, {"b": -0.5, "a": -0.25}]


@pytest.fixture(scope="session")
def byte_fallback(tmp_path_factory) -> Tokenizer:
    """A tokenizer in the manner of Llama 2, of letters and bytes."""
    names = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *string.ascii_lowercase]
    backend = tokenizers.Tokenizer(
        BPE({name: index for index, name in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>")
    )
    backend.add_special_tokens(["<unk>", "<s>"])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    strip = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return saved(backend, tmp_path_factory.mktemp("fallback"))


@pytest.mark.parametrize(
    ("text", "offsets"),
    [
        ("ab", [0, 1]),
        ("a€b", [0, 1, 1, 1, 2]),
        ("<eos>a", [0, 5]),
        ("é🎉", [0, 0, 1, 1, 1, 1]),
    ],
)
def test_tokens_of_a_byte_level_prompt_start_where_their_character_does(texts, ids, text, offsets):
    assert texts.offsets_of(text, ids(text)) == offsets


@pytest.mark.parametrize(
    ("text", "offsets"),
    [
        ("ab c", [0, 0, 0, 1, 2, 3]),  # bos and the mark of a first word are not in the text
        (" ab", [0, 0, 1, 2]),
        ("a€b", [0, 0, 0, 1, 1, 1, 2]),
        ("a 日b", [0, 0, 0, 1, 2, 2, 2, 3]),
    ],
)
def test_tokens_of_a_byte_fallback_prompt_start_where_their_character_does(byte_fallback, text, offsets):
    assert TokenTexts(byte_fallback).offsets_of(text, byte_fallback.encode(text)) == offsets


def test_special_tokens_that_the_text_leaves_out_take_no_place(texts, tiny_tokenizer):
    a, b = tiny_tokenizer.encode("ab")
    assert texts.offsets_of("ab", [a, 256, b]) == [0, 1, 1]


def test_chat_logprobs_leave_out_what_was_not_asked_for(texts, ids):
    a, b = ids("ab")
    entry = TokenLogprobs((b, a, b), (-0.5, -0.25, -0.5), 2)
    (position,) = chat_logprobs(texts, [entry], 1).content
    assert (position.token, position.logprob, position.bytes) == ("b", -0.5, [98])
    assert [(top.token, top.logprob, top.bytes) for top in position.top_logprobs] == [("a", -0.25, [97])]
    assert chat_logprobs(texts, [entry], 0).content[0].top_logprobs == []


def test_prompt_logprobs_have_vllm_s_shape(texts, ids):
    a, b = ids("ab")
    entry = TokenLogprobs((b, a), (-0.5, -0.25), 7)
    assert prompt_logprobs(texts, [None, entry]) == [
        None,
        {
            str(b): {"logprob": -0.5, "rank": 7, "decoded_token": "b"},
            str(a): {"logprob": -0.25, "rank": 1, "decoded_token": "a"},
        },
    ]


@pytest.mark.parametrize("wild", [-math.inf, math.nan])
def test_what_json_cannot_hold_becomes_very_unlikely(texts, ids, wild):
    (a,) = ids("a")
    assert completion_logprobs(texts, [TokenLogprobs((a,), (wild,), 1)], [a], [0]).token_logprobs == [-9999.0]
