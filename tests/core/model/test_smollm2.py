"""The real model against transformers reading the same GGUF file by its own reader, not through our cache."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from core.model.arch import parse_arch
from core.model.loader import load_decoder
from core.model.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NEAR_TIE = 1e-3  # the first divergence may lie where the oracle's two best logits are closer than this

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
def oracle(smollm2_gguf):
    folder, name = smollm2_gguf.parent, smollm2_gguf.name
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def oracle_tokenizer(smollm2_gguf):
    return AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)


@pytest.fixture(scope="module")
def tokenizer(smollm2_files):
    return Tokenizer(smollm2_files)


@pytest.fixture(scope="module")
def decoder(smollm2_files):
    return load_decoder(parse_arch(smollm2_files.config), smollm2_files.weight_files, dtype=torch.float32)


def test_logits_of_512_tokens_agree(oracle, decoder, paged, tokenizer):
    text = " ".join(CORPUS) + " The quick brown fox jumps over the lazy dog." * 40
    ids = tokenizer.encode(text)[:512]
    assert len(ids) == 512
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids])).logits[0]
    run = paged(decoder)
    logits = torch.cat([run.step([ids[:256]]), run.step([ids[256:]])])
    assert (logits - expected).abs().max() <= 2e-3


@pytest.mark.parametrize("chat", range(len(CHATS)))
def test_greedy_tokens_are_those_of_the_oracle(chat, oracle, decoder, paged, tokenizer):
    ids = tokenizer.encode(tokenizer.apply_chat_template(CHATS[chat]), add_special_tokens=False)
    run, output = paged(decoder), []
    logits = run.step([ids])[-1]
    while len(output) < 40 and int(logits.argmax()) not in tokenizer.eos_token_ids:
        output.append(int(logits.argmax()))
        logits = run.step([output[-1:]])[-1]
    assert len(output) >= 1
    with torch.inference_mode():
        reference = oracle(torch.tensor([ids + output])).logits[0, len(ids) - 1 : -1]
    best = reference.topk(2).values
    diverging = [
        step
        for step, token in enumerate(output)
        if int(reference[step].argmax()) != token and best[step, 0] - best[step, 1] >= NEAR_TIE
    ]
    assert diverging == []


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
