"""The sides of ``benchmarks/engine.py``. Each computes prompts greedily and says when it began and when its steps ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from peer_process import PeerProcess
from transformers import AutoModelForCausalLM, LogitsProcessor

from core.engine.build import BuiltEngine
from core.request import NewRequest
from core.wire.sampling import SamplingParams

Prompts = Sequence[Sequence[int]]
Answer = tuple[list[float], list[list[int]]]  # times, the first is the start and each later one the end of a step; tokens


class Side(Protocol):
    """One of the engines."""

    def run(self, prompts: Prompts, num_tokens: int) -> Answer:
        """Answer all prompts at once."""


class StepTimes(LogitsProcessor):
    """Notes when ``generate`` has the logits of each step, and changes nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return scores


class Ours:
    """The engine, driven as the worker does: add, then step until done."""

    def __init__(self, built: BuiltEngine) -> None:
        self.engine = built.engine
        self.count = 0
        self.add_us: list[float] = []  # of each request

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[list[float], list[list[int]]]:
        """Return the times at which each step ended, the first entry being the start, and the outputs."""
        names = [f"r{self.count + number}" for number in range(len(prompts))]
        self.count += len(prompts)
        tokens: dict[str, list[int]] = {name: [] for name in names}
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
        times = [time.perf_counter()]
        for name, prompt in zip(names, prompts, strict=True):
            begin = time.perf_counter()
            self.engine.add_request(NewRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling))
            self.add_us.append(1e6 * (time.perf_counter() - begin))
        while self.engine.has_work():
            outputs = self.engine.step()
            times.append(time.perf_counter())
            for output in outputs:
                tokens[output.request_id] += output.new_token_ids
        return times, [tokens[name] for name in names]


class Theirs:
    """Transformers on the same weights."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        # Sampling settings in the model's files would only cause warnings; end-of-sequence must not end a text.
        for name in ("eos_token_id", "temperature", "top_p", "top_k"):
            setattr(self.model.generation_config, name, None)
        self.model.generation_config.pad_token_id = 0

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[list[float], list[list[int]]]:
        """Return start and the time of each step's logits, then the end; and the outputs."""
        steps = StepTimes()
        start = time.perf_counter()
        with torch.inference_mode():
            ids = torch.tensor(prompts)
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                logits_processor=[steps],
            )
        end = time.perf_counter()
        return [start, *steps.times, end], out[:, ids.shape[1] :].tolist()


class Vllm:
    """vLLM's engine, in a process that sleeps between questions."""

    def __init__(self, peer: PeerProcess) -> None:
        self._peer = peer
        self.add_us: list[float] = []  # of each request

    def run(self, prompts: Prompts, num_tokens: int) -> Answer:
        """Return the times at which each step ended, the first entry being the start, and the outputs."""
        answer = self._peer.ask({"prompts": prompts, "num_tokens": num_tokens})
        self.add_us += answer["add_us"]
        return answer["times"], answer["tokens"]
