"""A tiny model with random weights whose tokens can spell any text: what it puts out is bound by a grammar or by nothing."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.tiny_models import write_tiny_llama

EOS_TOKEN_IDS = (2, 3)
CALL = "<call>"  # a special token, the trigger of a tool call
_SPECIAL = ["<pad>", "<s>", "</s>", "<end>", CALL]
_TEXTS = [
    '{"name": "John", "age": 42, "tags": ["a", "b"], "open": true, "more": null}',
    "The ferry carried 17 cars to Oslo.",
] * 20


def write_json_model(folder: Path) -> Path:
    """Write the model, with 2,048 logits, and its tokenizer, with fewer tokens; two of them end a text."""
    write_tiny_llama(folder)
    write_json_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(EOS_TOKEN_IDS)}))
    return folder


def write_json_tokenizer(folder: Path) -> None:
    """Write a tokenizer of bytes and pairs of them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_TEXTS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
