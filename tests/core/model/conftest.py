"""Fixtures of the model tests: tiny random models of transformers, a paged cache to run them in, small tokenizers, SmolLM2."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from core.attention.base import AttentionBatch, AttentionSpec, KVLayout, PagedKVCache
from core.attention.sdpa import SdpaBackend
from core.config_types import default_cache_dir
from core.model.arch import ModelArch, parse_arch
from core.model.decoder import Decoder, attention_spec
from core.model.hub import ModelFiles, read_model_folder, resolve_model
from core.model.loader import load_decoder

BLOCK_SIZE = 16
CONFIGS = {
    "gemma3_text": Gemma3TextConfig,
    "llama": LlamaConfig,
    "llama4_text": Llama4TextConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
TINY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@dataclass
class PagedRun:
    """A decoder with its own KV cache: sequence s owns every ``num_sequences``-th block, so that tables interleave."""

    decoder: Decoder
    num_sequences: int
    backend: SdpaBackend = field(init=False)
    lengths: list[int] = field(init=False)

    def __post_init__(self) -> None:
        arch, groups = self.decoder.arch, self.decoder.layer_groups
        num_blocks = 1 + len(groups) * self.num_sequences * self._blocks_per_sequence()
        group_layers = max(len(layers) for layers in groups)
        shape = (num_blocks, group_layers, 2, arch.num_kv_heads, BLOCK_SIZE, arch.head_dim)
        self.backend = SdpaBackend(PagedKVCache(torch.zeros(shape), KVLayout.HND))
        self.lengths = [0] * self.num_sequences

    def step(self, new_tokens: Sequence[Sequence[int]], output_rows: torch.Tensor | None = None) -> torch.Tensor:
        """Feed each sequence its new tokens (at least one) and return logits ``[tokens or rows, vocab]``."""
        spans = [(n, n + len(ids)) for n, ids in zip(self.lengths, new_tokens, strict=True)]
        plans = [self.backend.plan(self._batch(group, spans)) for group in range(len(self.decoder.layer_groups))]
        self.lengths = [end for _, end in spans]
        input_ids = torch.tensor([token for ids in new_tokens for token in ids])
        positions = torch.cat([torch.arange(*span) for span in spans])
        with torch.inference_mode():
            hidden = self.decoder.forward(input_ids, positions, self.backend, plans, output_rows)
            return self.decoder.compute_logits(hidden)

    def _blocks_per_sequence(self) -> int:
        return -(-2048 // BLOCK_SIZE)

    def _batch(self, group: int, spans: list[tuple[int, int]]) -> AttentionBatch:
        per_sequence = self._blocks_per_sequence()
        first = 1 + group * self.num_sequences * per_sequence
        columns = np.arange(per_sequence, dtype=np.int32) * self.num_sequences
        tables = first + columns[None, :] + np.arange(self.num_sequences, dtype=np.int32)[:, None]
        slots = [
            tables[s, np.arange(*span) // BLOCK_SIZE] * BLOCK_SIZE + np.arange(*span) % BLOCK_SIZE
            for s, span in enumerate(spans)
        ]
        counts = [end - start for start, end in spans]
        return AttentionBatch(
            query_start_loc=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            seq_lens=np.array([end for _, end in spans], np.int32),
            block_tables=tables.astype(np.int32),
            slot_mapping=np.concatenate(slots).astype(np.int64),
        )


@pytest.fixture(scope="session")
def paged() -> Callable[..., PagedRun]:
    return lambda decoder, num_sequences=1: PagedRun(decoder, num_sequences)


@dataclass
class TinyModel:
    """A random model as transformers holds it, and its files."""

    reference: PreTrainedModel
    folder: Path

    @property
    def arch(self) -> ModelArch:
        return parse_arch(json.loads((self.folder / "config.json").read_text()))

    @property
    def weight_files(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))

    def load(self) -> Decoder:
        arch = self.arch
        by_spec: dict[AttentionSpec, list[int]] = {}
        for layer in range(arch.num_layers):
            by_spec.setdefault(attention_spec(arch, layer), []).append(layer)
        return load_decoder(arch, self.weight_files, dtype=torch.float32, layer_groups=list(by_spec.values()))

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the reference's logits ``[len(token_ids), vocab]``."""
        with torch.inference_mode():
            return self.reference(torch.tensor([token_ids])).logits[0]


@pytest.fixture
def tiny_model(tmp_path: Path) -> Callable[..., TinyModel]:
    def build(model_type: str, shard_size: str = "5GB", **overrides: Any) -> TinyModel:
        torch.manual_seed(0)
        config = CONFIGS[model_type](**{**TINY, **overrides})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():  # fresh biases are 0 and norms 1: a mistake in either would not show
            for name, parameter in model.named_parameters():
                is_norm = "norm" in name
                parameter.normal_(1.0 if is_norm else 0.0, 0.3 if is_norm or "bias" in name else 0.2)
        folder = tmp_path / model_type
        model.save_pretrained(folder, max_shard_size=shard_size)
        return TinyModel(model, folder)

    return build


CORPUS = ["the quick brown fox jumps over the lazy dog", "naïve café déjà vu", "日本語 テキスト", "12 345 6789", "👩‍👩‍👧‍👦 🎉"]


def _train(backend: Tokenizer, alphabet: Sequence[str] = (), special_tokens: Sequence[AddedToken] = ()) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=list(alphabet), special_tokens=list(special_tokens), show_progress=False
    )
    backend.train_from_iterator(CORPUS * 4, trainer)
    return backend


@pytest.fixture(scope="session")
def byte_level_backend() -> Tokenizer:
    """A small byte-level BPE tokenizer in the manner of GPT-2."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    special = [AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)]
    _train(backend, pre_tokenizers.ByteLevel.alphabet(), special)
    backend.add_tokens([AddedToken("<tool call>", special=False)])
    return backend


@pytest.fixture(scope="session")
def byte_fallback_backend() -> Tokenizer:
    """A small BPE tokenizer with byte fallback and word marks, in the manner of Llama 2."""
    marks = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = marks
    model = json.loads(_train(trained).to_str())["model"]
    first = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: token_id for token_id, token in enumerate([*first, *model["vocab"]])}
    merges = [(left, right) for left, right in model["merges"]]
    backend = Tokenizer(BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    backend.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("<s>", special=True)])
    backend.pre_tokenizer = marks
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


@pytest.fixture
def model_folder(tmp_path: Path, byte_level_backend: Tokenizer) -> Callable[..., ModelFiles]:
    """Write a folder of the Hugging Face layout around a tokenizer; its weights are a few bytes."""

    def build(backend: Tokenizer = byte_level_backend, chat_template: str | None = None, **extra: Any) -> ModelFiles:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
        backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": chat_template, **extra}))
        (folder / "model.safetensors").write_bytes(b"weights")
        return read_model_folder("tiny", folder, tmp_path / "cache")

    return build


@pytest.fixture(scope="session")
def smollm2_files() -> ModelFiles:
    return resolve_model("smollm2-135m", Path(default_cache_dir()))
