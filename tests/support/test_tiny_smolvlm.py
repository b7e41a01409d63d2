import hashlib

import pytest
import torch

from tests.support.tiny_smolvlm import ReferenceSmolVLM, build_tiny_smolvlm, encode_test_image


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
    reference = ReferenceSmolVLM(tmp_path, model_type=model_type)
    assert reference.inputs(encode_test_image(0), "what?")["pixel_values"].shape == (1, 5, 3, 32, 32)
    answers = {tuple(reference.generate(encode_test_image(seed), "what?", max_new_tokens=8)[1]) for seed in range(3)}
    assert len(answers) == 3


def test_an_answer_that_is_not_the_models_is_told_apart(tmp_path):
    reference = ReferenceSmolVLM(tmp_path)
    image = encode_test_image(0)
    _, answer = reference.generate(image, "what?", max_new_tokens=5)
    reference.assert_greedy(answer, image, "what?")
    answer = [*answer[:3], (answer[3] + 1) % 300, answer[4]]
    with pytest.raises(AssertionError, match="token 3 is"):
        reference.assert_greedy(answer, image, "what?")
