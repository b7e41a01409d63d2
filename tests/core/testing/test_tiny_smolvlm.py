import hashlib

import pytest
import torch
from PIL import Image

from core.testing.tiny_smolvlm import build_tiny_smolvlm, encode_test_image, load_reference_processor


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_equal_seeds_give_equal_folders_and_leave_other_random_numbers_alone(tmp_path):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    build_tiny_smolvlm(tmp_path / "a")
    assert torch.rand(3).tolist() == expected.tolist()
    build_tiny_smolvlm(tmp_path / "b")
    build_tiny_smolvlm(tmp_path / "c", seed=8)
    one, same, other = (digests(tmp_path / name) for name in "abc")
    assert one == same
    assert {name for name in one if one[name] != other[name]} == {"model.safetensors"}


@pytest.mark.parametrize("model_type", ["smolvlm", "idefics3"])
def test_what_the_model_says_depends_on_the_image(tmp_path, model_type):
    model = build_tiny_smolvlm(tmp_path, model_type=model_type)
    processor = load_reference_processor(tmp_path)
    parts = [{"type": "image"}, {"type": "text", "text": "what is in this image?"}]
    text = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    answers = set()
    for seed in range(3):
        (tmp_path / "image").write_bytes(encode_test_image(seed))
        with Image.open(tmp_path / "image") as image:
            inputs = processor(text=text, images=[image], return_tensors="pt")
        assert inputs["pixel_values"].shape == (1, 5, 3, 32, 32)
        answers.add(tuple(model.generate(**inputs, max_new_tokens=8, do_sample=False)[0].tolist()))
    assert len(answers) == 3
