"""A small random SmolVLM checkpoint, as a folder that transformers and kvferry load alike.

Owns its sizes, its tokenizer and its chat template. Needs transformers and Pillow (extra ``test``). Used in tests of the
model, of encode workers and of whole clusters; what it is held against is transformers' own model of the same folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, ProcessorMixin

TILE_SIZE = 32  # pixels; 8 by 8 patches, which are 16 embeddings
LONGEST_EDGE = 64  # of the resized image: 2 by 2 tiles and the whole at most
EMBEDS_PER_TILE = 16

_CORPUS = ("the quick brown fox jumps over the lazy dog", "what is in this image?", "compare these images", "User: Assistant:")
_TAGS = ("<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>", "<|im_end|>", "<pad>")
_MAX_TILES_PER_EDGE = 4
# As SmolVLM has it: contents are lists of parts, and the assistant's turn is opened without a line break.
_CHAT_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


def build_tiny_smolvlm(
    folder: Path,
    *,
    model_type: str = "smolvlm",
    seed: int = 7,
    preprocessor: Mapping[str, Any] | None = None,
    text: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Write config, weights, tokenizer and image processing into ``folder``; return transformers' model of them.

    ``model_type`` is ``smolvlm`` or ``idefics3``. Equal seeds give equal weights. ``preprocessor`` changes fields of
    ``preprocessor_config.json``, for example ``{"do_image_splitting": False}``; ``text`` those of the text half.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = _write_tokenizer(folder)
    model = _random_model(model_type, vocabulary, seed, text or {})
    model.save_pretrained(folder)
    image_processor = {
        "image_processor_type": "SmolVLMImageProcessor" if model_type == "smolvlm" else "Idefics3ImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "do_image_splitting": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_pad": True,
        "image_mean": [0.5, 0.45, 0.4],
        "image_std": [0.5, 0.3, 0.25],
        "resample": 1,
        "rescale_factor": 1 / 255,
        "size": {"longest_edge": LONGEST_EDGE},
        "max_image_size": {"longest_edge": TILE_SIZE},
        **(preprocessor or {}),
    }
    _write_json(folder / "preprocessor_config.json", image_processor)
    _write_json(folder / "processor_config.json", {"image_seq_len": EMBEDS_PER_TILE})
    return model


class ReferenceSmolVLM:
    """The same checkpoint in transformers, with transformers' own processor: what our answers are held against."""

    def __init__(
        self,
        folder: Path,
        *,
        model_type: str = "smolvlm",
        preprocessor: Mapping[str, Any] | None = None,
        margin: float = 1e-3,
    ) -> None:
        """Build the checkpoint in ``folder`` by ``build_tiny_smolvlm``."""
        from transformers import Idefics3ImageProcessorPil, Idefics3Processor, PreTrainedTokenizerFast

        self.folder = folder
        self.model = build_tiny_smolvlm(folder, model_type=model_type, preprocessor=preprocessor)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        # SmolVLM's processor adds only videos to that of Idefics 3, and asks for libraries of theirs.
        self.processor: ProcessorMixin = Idefics3Processor(
            Idefics3ImageProcessorPil.from_pretrained(folder),
            tokenizer,
            image_seq_len=EMBEDS_PER_TILE,
            chat_template=tokenizer.chat_template,
        )
        self._margin = margin
        self._answers: dict[tuple[tuple[str | bytes, ...], int], tuple[list[int], list[int]]] = {}

    def render(self, *parts: str | bytes) -> str:
        """Return a conversation of one turn as the template writes it, one tag for each image file among the parts."""
        content = [{"type": "image"} if isinstance(part, bytes) else {"type": "text", "text": part} for part in parts]
        text: str = self.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        return text

    def inputs(self, *parts: str | bytes) -> dict[str, Tensor]:
        """Return what the model takes for that conversation, image files decoded."""
        from PIL import Image

        images = [Image.open(BytesIO(part)) for part in parts if isinstance(part, bytes)]
        return dict(self.processor(text=self.render(*parts), images=images or None, return_tensors="pt"))

    def generate(self, *parts: str | bytes, max_new_tokens: int) -> tuple[list[int], list[int]]:
        """Return the prompt and the greedy answer of that conversation, which no end of text ends. Answers are kept."""
        known = self._answers.get((parts, max_new_tokens))
        if known is not None:
            return known
        inputs = self.inputs(*parts)
        ids = self.model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=None)[0].tolist()
        num_prompt = inputs["input_ids"].shape[1]
        self._answers[parts, max_new_tokens] = ids[:num_prompt], ids[num_prompt:]
        return self._answers[parts, max_new_tokens]

    def assert_greedy(self, output: Sequence[int], *parts: str | bytes) -> None:
        """Hold an answer against ``generate``; it may leave it where the two best logits are less than the margin apart."""
        import torch

        prompt, expected = self.generate(*parts, max_new_tokens=len(output))
        pairs = list(zip(output, expected, strict=True))
        position = next((number for number, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if position is None:
            return
        inputs = self.inputs(*parts)
        inputs["input_ids"] = torch.tensor([[*prompt, *expected[:position]]])
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        with torch.inference_mode():
            best = self.model(**inputs).logits[0, -1].topk(2).values
        gap = float(best[0] - best[1])
        assert gap < self._margin, f"token {position} is {output[position]}, not {expected[position]} (gap {gap:.2g})"


def encode_test_image(seed: int, width: int = 60, height: int = 44, file_format: str = "PNG") -> bytes:
    """Return the file of an image of coarse random blotches, equal for equal arguments."""
    import numpy as np
    from PIL import Image

    blotches = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    image = Image.fromarray(blotches).resize((width, height), Image.Resampling.BICUBIC)
    file = BytesIO()
    image.save(file, file_format)
    return file.getvalue()


def _write_tokenizer(folder: Path) -> dict[str, int]:
    """Train a byte-level BPE tokenizer with SmolVLM's special tokens; return the vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE

    edge = range(1, _MAX_TILES_PER_EDGE + 1)
    tags = [*_TAGS, *(f"<row_{row}_col_{column}>" for row in edge for column in edge)]
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(tag, special=True, normalized=False) for tag in tags],
        show_progress=False,
    )
    backend.train_from_iterator([*_CORPUS, "a line\n\nand another"] * 4, trainer)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<end_of_utterance>",
        "pad_token": "<pad>",
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "chat_template": _CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", config)
    vocabulary: dict[str, int] = backend.get_vocab()
    return vocabulary


def _random_model(model_type: str, vocabulary: dict[str, int], seed: int, changes: Mapping[str, Any]) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForImageTextToText, Idefics3Config, SmolVLMConfig

    ends = {"bos_token_id": vocabulary["<|im_start|>"], "eos_token_id": vocabulary["<end_of_utterance>"]}
    pad = {"pad_token_id": vocabulary["<pad>"]}
    text = {
        "model_type": "llama",
        "vocab_size": len(vocabulary),
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        **ends,
        **pad,
        **changes,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": TILE_SIZE,
        "patch_size": 4,
    }
    config_class = SmolVLMConfig if model_type == "smolvlm" else Idefics3Config
    shared = {"image_token_id": vocabulary["<image>"], "scale_factor": 2, **ends, **pad}
    config = config_class(text_config=text, vision_config=vision, **shared)
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():  # fresh biases are 0 and norms 1: a mistake in either would not show
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name and name.endswith("weight")
            parameter.normal_(1.0 if is_norm else 0.0, 0.2)
    torch.set_rng_state(state)
    model.generation_config.update(**ends, **pad)
    return model


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
