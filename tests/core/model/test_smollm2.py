"""The real model against transformers reading the same GGUF file by its own reader, not through our cache."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer

from core.model.arch import parse_arch
from core.model.loader import load_decoder
from core.model.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "You answer in one word."}, {"role": "user", "content": "Name a colour."}],
    [
        {"role": "user", "content": "Count to five."},
        {"role": "assistant", "content": "1, 2, 3, 4, 5."},
        {"role": "user", "content": "Now write a Python function that adds 12 and 30."},
    ],
]
CORPUS = [
    "Hello, world! It's a test; don't worry, we'll see.",
    "I have 12345 apples, 3.14159 pies and 2024-11-21.",
    "日本語のテキスト と 中文，한국어",
    "emoji 👩‍👩‍👧‍👦 🎉🎉 🏳️‍🌈",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>x",
    "  leading  and   trailing   \n\n\ttabs\r\nwindows",
    "naïve café coöperate e\u0301 combining",
    "def f(x):\n    return {'a': x ** 2, \"b\": [1, 2]}\n",
    "العربية हिन्दी עברית ελληνικά",
    "\x00\x01\x7f control",
    "a" * 300,
    "",
]


@pytest.fixture(scope="module")
def oracle_tokenizer(smollm2_gguf):
    return AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)


@pytest.fixture(scope="module")
def tokenizer(smollm2_files):
    return Tokenizer(smollm2_files)


@pytest.fixture(scope="module")
def decoder(smollm2_files):
    return load_decoder(parse_arch(smollm2_files.config), smollm2_files.weight_files, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompt(tokenizer):
    """512 tokens."""
    text = " ".join(CORPUS) + " The quick brown fox jumps over the lazy dog." * 40
    return tokenizer.encode(text)[:512]


@pytest.fixture(scope="module")
def logits(decoder, paged, prompt):
    """Our logits after each token of the prompt, which comes in two chunks."""
    run = paged(decoder)
    return torch.cat([run.step([prompt[:256]]), run.step([prompt[256:]])])


def test_best_logits_of_512_tokens_agree(smollm2_oracle, logits, prompt):
    assert len(logits) == len(prompt) == 512
    rows = [0, 1, 15, 16, 31, 63, 127, 200, 254, 255, 256, 257, 300, 400, 510, 511]
    for row, best in zip(rows, smollm2_oracle.best_tokens(prompt, rows, 40), strict=True):
        expected = torch.tensor([value for _, value in best])
        assert (logits[row].topk(40).values - expected).abs().max() <= 2e-3
        assert (logits[row][[token_id for token_id, _ in best]] - expected).abs().max() <= 2e-3


@pytest.mark.full
def test_every_logit_of_512_tokens_agrees(smollm2_oracle, logits, prompt):
    with torch.inference_mode():
        expected = smollm2_oracle.model(torch.tensor([prompt])).logits[0]
    assert (logits - expected).abs().max() <= 2e-3


@pytest.mark.parametrize("chat", range(len(CHATS)))
def test_greedy_tokens_are_those_of_the_oracle(chat, smollm2_oracle, decoder, paged, tokenizer):
    ids = tokenizer.encode(tokenizer.apply_chat_template(CHATS[chat]), add_special_tokens=False)
    run, output = paged(decoder), []
    logits = run.step([ids])[-1]
    while len(output) < 40 and int(logits.argmax()) not in tokenizer.eos_token_ids:
        output.append(int(logits.argmax()))
        logits = run.step([output[-1:]])[-1]
    smollm2_oracle.assert_token_identical(ids, output)


@pytest.mark.full
def test_kept_answers_are_those_of_transformers(smollm2_oracle):
    smollm2_oracle.assert_kept_answers_hold()


def test_tokens_of_a_corpus_are_those_of_transformers(tokenizer, oracle_tokenizer):
    for text in CORPUS:
        ids = tokenizer.encode(text)
        assert ids == oracle_tokenizer.encode(text, add_special_tokens=False), text
        for skip in (True, False):
            expected = oracle_tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_numerals_beyond_ascii_stand_alone(tokenizer):
    # llama.cpp's "smollm" pre-tokenizer isolates every \p{N}; transformers' GGUF reader does not know it and joins the space.
    assert tokenizer.encode("a ½") == tokenizer.encode("a ") + tokenizer.encode("½")


@pytest.mark.parametrize("chat", range(len(CHATS)))
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chats_render_like_transformers(chat, add_generation_prompt, tokenizer, oracle_tokenizer):
    expected = oracle_tokenizer.apply_chat_template(CHATS[chat], tokenize=False, add_generation_prompt=add_generation_prompt)
    assert tokenizer.apply_chat_template(CHATS[chat], add_generation_prompt=add_generation_prompt) == expected


def test_generation_ends_at_the_end_of_a_turn(tokenizer):
    assert [tokenizer.token(token_id) for token_id in tokenizer.eos_token_ids] == ["<|im_end|>"]
