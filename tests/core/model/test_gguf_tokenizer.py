"""Tokenizers rebuilt from GGUF metadata."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer

from core.errors import ConfigError
from core.model.gguf_tokenizer import build_tokenizer, end_tokens, write_tokenizer
from core.model.hub import read_model_folder
from core.model.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def metadata(byte_level_backend):
    """The metadata that llama.cpp's converter would write for the small byte-level tokenizer."""
    saved = json.loads(byte_level_backend.to_str())
    tokens = [byte_level_backend.id_to_token(token_id) for token_id in range(byte_level_backend.get_vocab_size())]
    added = {token["id"]: 3 if token["special"] else 4 for token in saved["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [added.get(token_id, 1) for token_id in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in saved["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }


def pieces(tokenizer, text):
    return [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@settings(deadline=None)
@given(st.text(max_size=40))
def test_encodes_and_decodes_any_text_like_its_original(metadata, byte_level_backend, text):
    rebuilt = build_tokenizer(metadata)
    ids = byte_level_backend.encode(text).ids
    assert rebuilt.encode(text).ids == ids
    assert rebuilt.decode(ids) == text


PIECES = ["▁", "a", "b", "c", "é", "ab", "bc", "▁a"]
SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<pad>", "<eos>", "<bos>", "<unk>", "<turn>", "\n\n", "  "]
    + [f"<0x{byte:02X}>" for byte in range(256)]
    + PIECES,
    "tokenizer.ggml.token_type": [3, 3, 3, 3, 3, 4, 4] + [6] * 256 + [1] * len(PIECES),
    "tokenizer.ggml.scores": [-1000.0] * 7 + [0.0] * 256 + [-9.0] * 5 + [-4.0, -3.0, -2.0],
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 3,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.add_space_prefix": False,
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ab", ["ab"]),
        ("abc", ["a", "bc"]),  # the better merge comes first, not the leftmost
        (" ab", ["▁a", "b"]),
        ("a  b", ["a", "  ", "b"]),  # what the user defined stands before all merges
        ("a\n\nb", ["a", "\n\n", "b"]),
        ("<turn>b", ["<turn>", "b"]),
        ("é\n", ["é", "<0x0A>"]),
        ("日", ["<0xE6>", "<0x97>", "<0xA5>"]),
    ],
)
def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(text, expected):
    tokenizer = build_tokenizer(SENTENCEPIECE)
    encoded = tokenizer.encode(text)
    assert encoded.tokens == ["<bos>", *expected]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=True) == text.replace("<turn>", "")


def test_sentencepiece_with_a_space_put_before_the_text_is_refused():
    with pytest.raises(ConfigError, match=r"add_space_prefix.*True.*tokenizer.json beside the file"):
        build_tokenizer({**SENTENCEPIECE, "tokenizer.ggml.add_space_prefix": True})


def test_control_tokens_are_special_and_user_defined_ones_are_not(metadata):
    tokenizer = build_tokenizer(metadata)
    ids = tokenizer.encode("<|im_start|>the<tool call>").ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the<tool call>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>the<tool call>"


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["a", " 123", " it", "'s"]),
        ("smollm", ["a", " ", "1", "2", "3", " it", "'s"]),
        ("llama-bpe", ["a", " ", "123", " it", "'s"]),
        ("qwen2", ["a", " ", "1", "2", "3", " it", "'s"]),
    ],
)
def test_each_pre_tokenizer_splits_digits_in_its_own_way(metadata, pre, expected):
    assert pieces(build_tokenizer({**metadata, "tokenizer.ggml.pre": pre}), "a 123 it's") == expected


def test_llama3_splits_long_numbers_by_threes_and_keeps_newlines_together(metadata):
    tokenizer = build_tokenizer({**metadata, "tokenizer.ggml.pre": "llama-bpe"})
    assert pieces(tokenizer, "12345 IT'S!\n\nx") == ["123", "45", " IT", "'S", "!\n\n", "x"]


def test_bos_is_added_if_the_file_requires_it(metadata):
    with_bos = build_tokenizer({**metadata, "tokenizer.ggml.add_bos_token": True})
    without = build_tokenizer(metadata)
    assert with_bos.encode("the").ids == [0, *without.encode("the").ids]
    assert with_bos.encode("the", add_special_tokens=False).ids == without.encode("the").ids


@pytest.mark.parametrize(
    ("says", "pre", "has_bos"),
    [
        ({}, "llama-bpe", True),
        ({"tokenizer.ggml.add_bos_token": False}, "llama-bpe", False),
        ({}, "smollm", False),
        ({}, "qwen2", False),
        ({"tokenizer.ggml.add_bos_token": True}, "qwen2", True),
    ],
)
def test_bos_of_a_file_that_does_not_say_follows_llama_cpp(says, pre, has_bos, metadata):
    tokenizer = build_tokenizer({**metadata, "tokenizer.ggml.pre": pre, **says})
    assert (tokenizer.encode("the").ids[0] == 0) == has_bos


def test_sentencepiece_adds_bos_unless_the_file_says_otherwise():
    silent = {key: value for key, value in SENTENCEPIECE.items() if key != "tokenizer.ggml.add_bos_token"}
    assert build_tokenizer(silent).encode("ab").tokens == ["<bos>", "ab"]
    assert build_tokenizer({**silent, "tokenizer.ggml.add_bos_token": False}).encode("ab").tokens == ["ab"]


@pytest.mark.parametrize("bos_id", [None, 10**6, "1"])
def test_a_bos_that_is_no_token_is_refused_where_one_is_added(bos_id, metadata):
    wanted = {**metadata, "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": bos_id}
    with pytest.raises(ConfigError, match=rf"tokenizer\.ggml\.bos_token_id={bos_id!r}"):
        build_tokenizer(wanted)


@pytest.mark.parametrize("bos_id", [None, 2**32 - 1])  # the latter, -1 as uint32, is no token to llama.cpp either
def test_a_llama3_tokenizer_without_bos_adds_none(bos_id, metadata):
    tokenizer = build_tokenizer({**metadata, "tokenizer.ggml.bos_token_id": bos_id, "tokenizer.ggml.pre": "llama-bpe"})
    assert tokenizer.encode("the").ids == tokenizer.encode("the", add_special_tokens=False).ids


def test_a_token_spelled_like_an_end_is_special_whatever_its_type(metadata):
    ordinary = [1 if text == "<|im_end|>" else kind for text, kind in typed(metadata)]
    tokenizer = build_tokenizer({**metadata, "tokenizer.ggml.token_type": ordinary})
    ids = tokenizer.encode("the<|im_end|>").ids
    assert ids[-1] == metadata["tokenizer.ggml.tokens"].index("<|im_end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the"


def typed(metadata):
    return zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True)


@pytest.mark.parametrize(("key", "value"), [("tokenizer.ggml.model", "t5"), ("tokenizer.ggml.pre", "tekken")])
def test_refuses_kinds_it_does_not_know_and_names_the_way_out(metadata, key, value, tmp_path):
    with pytest.raises(ConfigError, match=f"{value}.*tokenizer.json beside the file") as caught:
        write_tokenizer({**metadata, key: value}, tmp_path / "model.gguf", tmp_path)
    assert caught.value.param == key


def test_ends_of_a_file_whose_types_are_no_list_are_those_that_it_names():
    assert end_tokens({"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.token_type": 3, "tokenizer.ggml.eos_token_id": 0}) == {0}


@pytest.mark.parametrize("key", ["tokens", "merges", "token_type"])
def test_names_missing_metadata(metadata, key, tmp_path):
    incomplete = {name: value for name, value in metadata.items() if name != f"tokenizer.ggml.{key}"}
    with pytest.raises(ConfigError, match=rf"lacks tokenizer\.ggml\.{key}"):
        write_tokenizer(incomplete, tmp_path / "model.gguf", tmp_path)


def test_a_tokenizer_beside_the_file_wins(metadata, byte_fallback_backend, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    byte_fallback_backend.save(str(source / "tokenizer.json"))
    write_tokenizer({**metadata, "tokenizer.ggml.model": "llama"}, source / "model.gguf", target)
    assert BackendTokenizer.from_file(str(target / "tokenizer.json")).to_str() == byte_fallback_backend.to_str()


def test_writes_template_and_special_tokens(metadata, tmp_path):
    write_tokenizer(metadata, tmp_path / "model.gguf", tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config == {
        "chat_template": "{{ messages[0].content }}",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
    }


def test_a_template_s_token_that_the_file_does_not_name_is_reported(metadata, tmp_path):
    silent = {key: value for key, value in metadata.items() if key != "tokenizer.ggml.bos_token_id"}
    write_tokenizer({**silent, "tokenizer.chat_template": "{{ bos_token }}{{ eos_token }}"}, tmp_path / "model.gguf", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    tokenizer = Tokenizer(read_model_folder("m", tmp_path, tmp_path, needs_weights=False))
    assert tokenizer.unknown_template_tokens == ["bos_token"]
