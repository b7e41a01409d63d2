import itertools
import json
from dataclasses import replace
from io import BytesIO

import pytest
import torch
from PIL import Image

from core.errors import ConfigError, InvalidRequest
from core.kv.hashing import hash_media
from core.model.hub import read_model_folder
from core.model.image_encoder import load_image_encoder
from core.model.image_file import read_image_size
from core.model.image_prompt import PromptImage, load_image_prompts
from core.model.tokenizer import Tokenizer
from tests.support.tiny_smolvlm import encode_test_image

FINGERPRINT = b"model"


@pytest.fixture
def files(tiny_smolvlm_files):
    return tiny_smolvlm_files


@pytest.fixture
def tokenizer(files):
    return Tokenizer(files)


@pytest.fixture
def prompts(files, tokenizer):
    return load_image_prompts(files, tokenizer)


def prompt_images(*contents):
    return [PromptImage(content, read_image_size(content)) for content in contents]


def encode(prompts, tokenizer, text, images):
    return tokenizer.encode(prompts.expand(text, [image.size for image in images]), add_special_tokens=False)


IMAGES = [encode_test_image(0), encode_test_image(1, 20, 64), encode_test_image(2, 64, 10), encode_test_image(3, 30, 31)]
CONVERSATIONS = {
    "one": (IMAGES[0], "what is in this image?"),
    "several": ("compare ", *IMAGES, "\n\nand say"),
    "image last": ("look\n", IMAGES[1]),
    "twice": (IMAGES[2], IMAGES[0], IMAGES[2]),
    "none": ("hello\n\nyou",),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_prompts_have_the_tokens_of_transformers(tiny_smolvlm, tokenizer, prompts, name):
    parts = CONVERSATIONS[name]
    images = prompt_images(*(part for part in parts if isinstance(part, bytes)))
    expected = tiny_smolvlm.inputs(*parts)["input_ids"][0].tolist()
    assert encode(prompts, tokenizer, tiny_smolvlm.render(*parts), images) == expected


def test_conversations_are_rendered_as_in_transformers(tiny_smolvlm, tokenizer):
    content = [{"type": "image"}, {"type": "text", "text": "what?"}]
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": content}])
    assert rendered == tiny_smolvlm.render(IMAGES[0], "what?")


def test_features_span_the_image_tokens_of_their_image(tiny_smolvlm, files, tokenizer, prompts):
    parts = CONVERSATIONS["several"]
    images = prompt_images(*IMAGES)
    token_ids = encode(prompts, tokenizer, tiny_smolvlm.render(*parts), images)
    features, media = prompts.features(token_ids, images, FINGERPRINT)
    image_token_id = files.config["image_token_id"]
    assert media == tuple(IMAGES)
    assert [feature.media_index for feature in features] == [0, 1, 2, 3]
    assert sum(feature.num_embeds for feature in features) == token_ids.count(image_token_id)
    assert len({feature.identifier for feature in features}) == 4
    for feature, image in zip(features, images, strict=True):
        span = token_ids[feature.offset : feature.end]
        assert span[0] == span[-1] == image_token_id
        assert span.count(image_token_id) == feature.num_embeds == prompts.num_embeds(image.size)
    assert all(one.end < other.offset for one, other in itertools.pairwise(features))


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "GIF"])
@pytest.mark.parametrize("orientation", [1, 6])
def test_the_router_counts_as_many_embeddings_as_the_worker_makes(files, prompts, file_format, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = BytesIO()
    Image.new("RGB", (70, 20), "green").save(file, file_format, **({} if file_format == "GIF" else {"exif": exif}))
    content = file.getvalue()
    embeddings = load_image_encoder(files, torch.float32).encode(content)
    assert prompts.num_embeds(read_image_size(content)) == len(embeddings)


def test_equal_images_are_one_file_and_one_identifier(tiny_smolvlm, tokenizer, prompts):
    parts = CONVERSATIONS["twice"]
    images = prompt_images(*parts)
    token_ids = encode(prompts, tokenizer, tiny_smolvlm.render(*parts), images)
    features, media = prompts.features(token_ids, images, FINGERPRINT)
    assert media == (IMAGES[2], IMAGES[0])
    assert [feature.media_index for feature in features] == [0, 1, 0]
    assert features[0].identifier == features[2].identifier != features[1].identifier


def test_identifiers_depend_on_image_model_and_processing(tiny_smolvlm, tmp_path, files, tokenizer, prompts):
    text = tiny_smolvlm.render(IMAGES[0], "what?")
    (image,) = prompt_images(IMAGES[0])
    other_folder = tmp_path / "other"
    other_folder.mkdir()
    for path in files.path.iterdir():
        (other_folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((other_folder / "preprocessor_config.json").read_text())
    (other_folder / "preprocessor_config.json").write_text(json.dumps({**config, "resample": 3}))
    other = load_image_prompts(read_model_folder("other", other_folder, tmp_path), tokenizer)

    def identifier(prompts, fingerprint):
        token_ids = encode(prompts, tokenizer, text, [image])
        return prompts.features(token_ids, [image], fingerprint)[0][0].identifier

    found = [identifier(prompts, FINGERPRINT), identifier(other, FINGERPRINT), identifier(prompts, b"finetuned")]
    assert len(set(found)) == 3
    assert identifier(prompts, FINGERPRINT) == found[0] != hash_media(FINGERPRINT, b"", IMAGES[0])


@pytest.mark.parametrize("text", ["no tag", "two <image> and <image>"])
def test_tags_that_are_not_of_images_are_refused(prompts, text):
    (image,) = prompt_images(IMAGES[0])
    with pytest.raises(InvalidRequest, match=r"the conversation has 1 images, but [02] times the text <image>"):
        prompts.expand(text, [image.size])


def test_prompts_whose_image_tokens_are_gone_are_refused(tiny_smolvlm, tokenizer, prompts):
    images = prompt_images(IMAGES[0])
    token_ids = encode(prompts, tokenizer, tiny_smolvlm.render(IMAGES[0], "what?"), images)
    with pytest.raises(InvalidRequest, match=r"the prompt has \d\d image tokens, its images take 80"):
        prompts.features(token_ids[-40:], images, FINGERPRINT)


def test_a_checkpoint_that_contradicts_itself_is_refused(tiny_smolvlm, tmp_path, files, tokenizer):
    def load(name, **fields):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for path in files.path.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**config, **fields}))
        return load_image_prompts(read_model_folder("other", folder, tmp_path), tokenizer)

    with pytest.raises(ConfigError, match="image_seq_len=17, but a tile has 16 embeddings"):
        load("processor_config.json", image_seq_len=17)
    with pytest.raises(ConfigError, match="max_image_size 36 is 9 patches, no multiple of scale_factor 2"):
        load("preprocessor_config.json", max_image_size={"longest_edge": 36})
    with pytest.raises(ConfigError, match="the tokenizer has no image token 499"):
        load("config.json", image_token_id=499, text_config={**files.config["text_config"], "vocab_size": 500})


@pytest.mark.parametrize("nested", [False, True])
def test_tags_are_spelled_as_the_tokenizer_says(files, tokenizer, nested):
    names = {"fake_image_token": {"content": "<|edge|>"}, "global_image_token": "<|whole|>"}
    spelled = {"extra_special_tokens": names} if nested else names
    prompts = load_image_prompts(replace(files, tokenizer_config=spelled), tokenizer)
    expanded = prompts.expand("<image>", [read_image_size(IMAGES[0])])
    assert expanded.startswith("<|edge|><row_1_col_1><image>")
    assert expanded.endswith("\n\n<|edge|><|whole|>" + "<image>" * 16 + "<|edge|>")


def test_the_image_processing_may_lie_inside_processor_config(tmp_path, files, tokenizer, prompts):
    for path in files.path.iterdir():
        if path.name not in ("preprocessor_config.json", "processor_config.json"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    nested = {"image_seq_len": 16, "image_processor": files.image_processor_config}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    again = load_image_prompts(read_model_folder("nested", tmp_path, tmp_path), tokenizer)
    size = read_image_size(IMAGES[1])
    assert again.expand("<image>", [size]) == prompts.expand("<image>", [size])


def test_a_model_that_reads_text_only_has_no_image_prompts(model_folder):
    files = model_folder()
    assert load_image_prompts(files, Tokenizer(files)) is None
