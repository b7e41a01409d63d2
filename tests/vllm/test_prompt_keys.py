"""What makes two prompts of the same tokens different: a LoRA adapter, a salt, an image. Their KV is not mixed up."""

import json

import pytest

from tests.support.tiny_models import LORA_RANK, write_tiny_lora
from tests.support.tiny_smolvlm import build_tiny_smolvlm
from tests.support.vllm_engine import EngineFailed, VllmEngine
from tests.vllm.conftest import settings

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def check_handoff(pair, prompt, of_p, of_d, *, is_read):
    """Hand a prompt off with the keys that P gets; D, which gets others or the same, must answer right, and read or not."""
    counts, refused = pair.counts(), pair.d.ask("usage")["refused"].get("stale", 0)
    params = pair.hand_off(prompt, **of_p)
    tokens = pair.answer(prompt, params, **of_d)
    assert tokens == pair.reference(prompt, **{name: value for name, value in of_d.items() if name != "cache_salt"})
    num_blocks = len(params["remote_block_ids"][0])
    assert num_blocks >= 10
    loads, verified = (1, num_blocks) if is_read else (0, 0)
    expected = {"loads": counts["loads"] + loads, "verified": counts["verified"] + verified, "failures": counts["failures"]}
    assert pair.counts() == expected
    assert pair.d.ask("usage")["refused"].get("stale", 0) == refused + (not is_read)
    pair.assert_nothing_is_held()


@pytest.fixture(scope="module")
def keys_of(tmp_path_factory):
    """Return the options of a request by the name of its adapter."""
    folders = {name: write_tiny_lora(tmp_path_factory.mktemp(name), seed) for seed, name in enumerate(["one", "other"])}
    return {"none": {}} | {name: {"lora": (name, str(folder))} for name, folder in folders.items()}


@pytest.fixture(scope="module")
def lora_pair(new_pair):
    return new_pair(extra=settings("tcp"), enable_lora=True, max_lora_rank=LORA_RANK, max_loras=2)


def test_each_adapter_gives_other_tokens(lora_pair, keys_of):
    prompt = lora_pair.prompt()
    assert len({tuple(lora_pair.reference(prompt, **keys)) for keys in keys_of.values()}) == 3


@pytest.mark.parametrize("adapter", ["none", "one", "other"])
def test_a_handoff_with_the_same_adapter_is_read(lora_pair, keys_of, adapter):
    check_handoff(lora_pair, lora_pair.prompt(), keys_of[adapter], keys_of[adapter], is_read=True)


@pytest.mark.parametrize(("of_p", "of_d"), [("none", "one"), ("one", "none"), ("one", "other")])
def test_a_handoff_with_another_adapter_is_not_read(lora_pair, keys_of, of_p, of_d):
    check_handoff(lora_pair, lora_pair.prompt(), keys_of[of_p], keys_of[of_d], is_read=False)


def test_a_handoff_with_the_same_salt_is_read(tcp_pair):
    check_handoff(tcp_pair, tcp_pair.prompt(), {"cache_salt": "a"}, {"cache_salt": "a"}, is_read=True)


@pytest.mark.parametrize(
    ("of_p", "of_d"), [({}, {"cache_salt": "a"}), ({"cache_salt": "a"}, {}), ({"cache_salt": "a"}, {"cache_salt": "b"})]
)
def test_a_handoff_with_another_salt_is_not_read(tcp_pair, of_p, of_d):
    check_handoff(tcp_pair, tcp_pair.prompt(), of_p, of_d, is_read=False)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """Return the folder of a tiny Idefics 3 whose heads have the size that vLLM needs on CPU."""
    folder = tmp_path_factory.mktemp("tiny-idefics3")
    build_tiny_smolvlm(folder, model_type="idefics3", text={"hidden_size": 64, "num_attention_heads": 2})
    return folder


@pytest.fixture(scope="module")
def image_pair(new_pair, seeing):
    return new_pair(extra=settings("tcp"), model=seeing, skip_tokenizer_init=False)


@pytest.fixture(scope="module")
def with_image(seeing):
    """Return a function that makes a prompt with one placeholder for an image, which vLLM replaces by over a hundred."""
    vocabulary = json.loads((seeing / "tokenizer.json").read_text())["model"]["vocab"]

    def make(pair):
        words = [100 + token % 200 for token in pair.prompt()]
        return [*words[:40], vocabulary["<image>"], *words[40:]]

    return make


@pytest.mark.full
def test_each_image_gives_other_tokens(image_pair, with_image):
    prompt = with_image(image_pair)
    assert image_pair.reference(prompt, image=1) != image_pair.reference(prompt, image=2)


@pytest.mark.full
@pytest.mark.parametrize("image", [1, 2])
def test_a_handoff_with_the_same_image_is_read(image_pair, with_image, image):
    check_handoff(image_pair, with_image(image_pair), {"image": image}, {"image": image}, is_read=True)


@pytest.mark.full
def test_a_handoff_with_another_image_is_not_read(image_pair, with_image):
    check_handoff(image_pair, with_image(image_pair), {"image": 1}, {"image": 2}, is_read=False)


@pytest.mark.full
def test_images_that_vllm_would_not_hash_are_refused_at_start(tmp_path, seeing):
    """It would number them, on P and on D: the first image of one would be taken for the first of the other."""
    no_caches = {"mm_processor_cache_gb": 0, "enable_prefix_caching": False}
    engine = VllmEngine(tmp_path / "log", seeing, extra=settings(), skip_tokenizer_init=False, **no_caches)
    with engine, pytest.raises(EngineFailed, match="numbers images instead of hashing them"):
        engine.wait()
