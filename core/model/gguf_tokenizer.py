"""Writes the tokenizer of a GGUF file as ``tokenizer.json`` and ``tokenizer_config.json``.

Owns the tokenizer and pre-tokenizer names of llama.cpp, and their meaning in ``tokenizers``.
A ``tokenizer.json`` in the folder of the GGUF file takes precedence over the metadata: use it for every kind not listed here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from core.errors import ConfigError

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_SPACE_MARK = "\u2581"
_SPECIAL_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# Spellings of tokens that end an answer or a text, from llama.cpp's list (llama-vocab.cpp), as far as models of the
# supported architectures have them.
_ENDS = frozenset(
    (
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<EOT>",
        "_<EOT>",
    )
)
# Those of that list that are ends only as control tokens: vocabularies such as Gemma's have "</s>" as a tag of HTML.
_CONTROL_ENDS = frozenset(("<eos>", "</s>", "[EOS]", "[EOT]", "<\uff5cend\u2581of\u2581sentence\uff5c>"))
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_AND_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def write_tokenizer(metadata: Mapping[str, Any], gguf_path: Path, folder: Path) -> None:
    """Write the tokenizer files of a GGUF's metadata into ``folder``.

    Raises:
        ConfigError: the tokenizer model or pre-tokenizer is not supported and its folder has no ``tokenizer.json``.
    """
    own_file = gguf_path.with_name("tokenizer.json")
    if own_file.is_file():
        shutil.copyfile(own_file, folder / "tokenizer.json")
    else:
        build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    config: dict[str, Any] = {"chat_template": metadata.get("tokenizer.chat_template")}
    for name, kind in _SPECIAL_NAMES.items():
        special = token_id(metadata, kind)
        if special is not None and special < len(tokens):
            config[name] = tokens[special]
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def token_id(metadata: Mapping[str, Any], kind: str) -> int | None:
    """Return the id of a special token ("bos", "eos", "unknown", …); None if the file names none.

    Raises:
        ConfigError: it is no such id.
    """
    key = f"tokenizer.ggml.{kind}_token_id"
    value = metadata.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ConfigError(f"GGUF {key}={value!r} is not supported; supported: the id of a token", param=key)
    return value


def end_tokens(metadata: Mapping[str, Any]) -> set[int]:
    """Return the ids of the tokens that end an answer: those that the metadata name, and those that are spelled like one.

    Converters write one or two of them, and models for chats have more.

    Raises:
        ConfigError: as ``token_id``.
    """
    named = (token_id(metadata, kind) for kind in ("eos", "eot", "eom"))
    return _spelled_ends(metadata) | {index for index in named if index is not None}


def _spelled_ends(metadata: Mapping[str, Any]) -> set[int]:
    """Return the tokens of llama.cpp's list, but for one that stands for unknown text, too.

    One of ``_CONTROL_ENDS`` that is also BOS begins texts instead.
    """
    found = [metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type")]
    tokens, types = ([*value] if isinstance(value, list) else [] for value in found)  # others are refused with the tokenizer
    ends = {index for index, text in enumerate(tokens) if text in _ENDS}
    controls = {index for index, kind in enumerate(types[: len(tokens)]) if kind == _CONTROL} - {token_id(metadata, "bos")}
    return (ends | {index for index in controls if tokens[index] in _CONTROL_ENDS}) - {token_id(metadata, "unknown")}


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer of ``tokenizer.ggml.*``: byte-level BPE ("gpt2") or SentencePiece's BPE ("llama").

    Raises:
        ConfigError: names the key whose value is not supported.
    """
    model = metadata.get("tokenizer.ggml.model")
    _require(model, ("gpt2", "llama"), "tokenizer.ggml.model")
    tokenizer = _byte_level(metadata) if model == "gpt2" else _sentencepiece(metadata)
    tokens: list[str] = _list(metadata, "tokenizer.ggml.tokens")
    pairs = list(zip(tokens, _types(metadata), strict=True))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text, kind in pairs if kind == _CONTROL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text, kind in pairs if kind == _USER_DEFINED])
    if (bos_id := _bos_to_add(metadata)) is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos_id]} $A", special_tokens=[(tokens[bos_id], bos_id)]
        )
    return tokenizer


def _bos_to_add(metadata: Mapping[str, Any]) -> int | None:
    """Return the token to put before a text; None for none.

    Files that do not say whether there is one follow llama.cpp: there is for SentencePiece and for Llama 3.

    Raises:
        ConfigError: the file says that there is one, and names none of its tokens.
    """
    key, bos_id = "tokenizer.ggml.bos_token_id", token_id(metadata, "bos")
    if bos_id is not None and bos_id >= len(_list(metadata, "tokenizer.ggml.tokens")):
        bos_id = None
    by_default = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    if not metadata.get("tokenizer.ggml.add_bos_token", by_default):
        return None
    if bos_id is None and "tokenizer.ggml.add_bos_token" in metadata:
        named = metadata.get(key)
        raise ConfigError(f"GGUF {key}={named!r} names no token, but one is to be put before every text", param=key)
    return bos_id


def _types(metadata: Mapping[str, Any]) -> list[int]:
    """Return the type of each token. As in llama.cpp, one that is spelled like an end is control, whatever the file says."""
    ends = _spelled_ends(metadata)
    return [_CONTROL if index in ends else kind for index, kind in enumerate(_list(metadata, "tokenizer.ggml.token_type"))]


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    _require(pre, tuple(_PRE_TOKENIZERS), "tokenizer.ggml.pre")
    vocab = _vocabulary(metadata)
    merges = [_split_merge(merge) for merge in _list(metadata, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    """Return SentencePiece's BPE as Gemma uses it: spaces are letters, unknown letters fall back to bytes.

    Pieces defined by the user are not part of it: they match before any merge, as in SentencePiece.
    """
    has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    _require(has_prefix, (False,), "tokenizer.ggml.add_space_prefix")
    vocab = _vocabulary(metadata)
    scores = _list(metadata, "tokenizer.ggml.scores")
    types = _types(metadata)
    pieces = {
        token: score for token, score, kind in zip(vocab, scores, types, strict=True) if kind not in (_CONTROL, _USER_DEFINED)
    }
    unknown = _list(metadata, "tokenizer.ggml.tokens")[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(BPE(vocab, _merges_by_score(pieces), byte_fallback=True, fuse_unk=True, unk_token=unknown))
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE_MARK)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _merges_by_score(pieces: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return every way to join two pieces to a third, highest score of the third first, then longest left part."""
    merges = [
        (score, cut, piece[:cut], piece[cut:])
        for piece, score in pieces.items()
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    merges.sort(key=lambda merge: merge[:2], reverse=True)
    return [(left, right) for _, _, left, right in merges]


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(_list(metadata, "tokenizer.ggml.tokens"))}


def _list(metadata: Mapping[str, Any], key: str) -> list[Any]:
    if not isinstance(metadata.get(key), list):
        raise ConfigError(f"GGUF metadata lacks {key}. Put the model's tokenizer.json beside the file.", param=key)
    return list(metadata[key])


def _split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _require(value: object, supported: tuple[object, ...], key: str) -> None:
    if value not in supported:
        names = ", ".join(str(one) for one in supported)
        raise ConfigError(
            f"GGUF {key}={value!r} is not supported; supported: {names}. Put the model's tokenizer.json beside the file.",
            param=key,
        )


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Split by a regular expression, then map bytes to the byte-level alphabet."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, _gpt2()])


def _llama3() -> pre_tokenizers.PreTokenizer:
    return _split(_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _WORDS_AND_SPACES)


def _qwen2() -> pre_tokenizers.PreTokenizer:
    return _split(_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _WORDS_AND_SPACES)


_PRE_TOKENIZERS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": _llama3,
    "qwen2": _qwen2,
}
