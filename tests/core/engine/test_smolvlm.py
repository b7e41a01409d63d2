"""Engines of a model that sees images, against transformers' own ``generate``."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import pytest
import torch

from core.ec_connector import ECConnectorScheduler, ECConnectorWorker
from core.errors import InvalidRequest
from core.kv.invariants import find_violations
from core.model.hub import read_model_folder
from core.model.image_encoder import load_image_encoder
from core.request import ECConnectorMetadata, ECConnectorOutput
from core.wire.messages import ErrorInfo
from tests.support.tiny_smolvlm import ReferenceSmolVLM, encode_test_image

pytestmark = pytest.mark.slow

BLOCK = 16
IMAGES = [encode_test_image(0), encode_test_image(1, 20, 64), encode_test_image(2, 64, 10), encode_test_image(3, 30, 31)]
EMBEDS = [80, 64, 48, 80]  # of these images: 16 per tile
CONVERSATIONS = {
    "text": ("hello, who are you?",),
    "one": (IMAGES[0], "what is in this image?"),
    "several": ("compare ", IMAGES[0], IMAGES[1], " and\n\n", IMAGES[2], "please"),
    "twice": (IMAGES[3], "and again", IMAGES[3]),
    "image last": ("look at this: ", IMAGES[1]),
}


@pytest.fixture(scope="session")
def image_encoder(tiny_smolvlm_files):
    return load_image_encoder(tiny_smolvlm_files, torch.float32)


def run_all(run_engine, image_router, built, conversations, **how):
    """Run the conversations side by side; hold every answer against transformers."""
    requests = [image_router.request(name, parts) for name, parts in conversations.items()]
    finished = run_engine(built.engine, requests, **how)
    for name, parts in conversations.items():
        assert finished[name].finish_reason == "length", finished[name].outputs[-1].error
        image_router.tiny.assert_greedy(finished[name].token_ids, *parts)
    assert find_violations(built.engine.scheduler.kv_cache_manager, []) == []
    return finished


@pytest.mark.parametrize("async_scheduling", ["off", "on"])
@pytest.mark.parametrize("chunk", [256, 24])
def test_answers_are_those_of_transformers_in_any_chunks(build_smolvlm, image_router, run_engine, chunk, async_scheduling):
    built = build_smolvlm(scheduler__max_num_batched_tokens=chunk, scheduler__async_scheduling=async_scheduling)
    run_all(run_engine, image_router, built, CONVERSATIONS, per_step=1)  # images come while others decode
    assert built.engine.stats.num_encoder_computed >= 4


def test_an_image_that_several_show_at_a_time_is_computed_once(build_smolvlm, image_router, run_engine):
    built = build_smolvlm()
    run_all(run_engine, image_router, built, CONVERSATIONS)
    assert built.engine.stats.num_encoder_computed == 4


def test_each_conversation_alone_is_answered_alike(build_smolvlm, image_router, run_engine):
    built = build_smolvlm(scheduler__max_num_batched_tokens=7)
    for name, parts in CONVERSATIONS.items():
        run_all(run_engine, image_router, built, {name: parts})
    assert built.engine.stats.encoder_cache_usage == 0.0


@pytest.mark.full
@pytest.mark.parametrize("model_type", ["smolvlm", "idefics3"])
@pytest.mark.parametrize("chunk", [1, 5, 16, 63, 100])
def test_more_chunk_sizes_and_both_names_of_the_architecture(
    tmp_path, build_tiny, run_engine, make_image_router, model_type, chunk
):
    tiny = ReferenceSmolVLM(tmp_path / model_type, model_type=model_type, preprocessor={"do_image_splitting": chunk > 16})
    files = read_model_folder("tiny", tiny.folder, tmp_path)
    built = build_tiny(model__name=str(tiny.folder), scheduler__max_num_batched_tokens=chunk)
    run_all(run_engine, make_image_router(tiny, files), built, CONVERSATIONS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("graphs", [False, True])
def test_answers_on_cuda_are_those_of_transformers(build_smolvlm, image_router, run_engine, graphs):
    settings = {"model__device": "cuda", "model__dtype": "float32", "model__cuda_graphs": graphs}
    built = build_smolvlm(scheduler__max_num_batched_tokens=24, **settings)
    run_all(run_engine, image_router, built, CONVERSATIONS)


def test_a_prompt_with_the_same_image_is_a_hit_and_computes_no_embedding_again(build_smolvlm, image_router, run_engine):
    built = build_smolvlm()
    parts = CONVERSATIONS["several"]
    run_all(run_engine, image_router, built, {"first": parts})
    num_computed = built.engine.stats.num_encoder_computed
    finished = run_all(run_engine, image_router, built, {"second": parts})
    num_prompt = len(image_router.request("", parts).prompt_token_ids)
    assert finished["second"].outputs[0].prefill_stats.num_local_cached_tokens == (num_prompt - 1) // BLOCK * BLOCK
    assert built.engine.stats.num_encoder_computed == num_computed == 3


def test_the_same_text_with_another_image_hits_only_what_stands_before_the_image(build_smolvlm, image_router, run_engine):
    built = build_smolvlm()
    before = "look at what I have found here, it is quite a long text: "
    run_all(run_engine, image_router, built, {"first": (before, IMAGES[0], "what?")})
    finished = run_all(run_engine, image_router, built, {"second": (before, IMAGES[3], "what?")})
    first, second = (image_router.request("", (before, image, "what?")) for image in (IMAGES[0], IMAGES[3]))
    assert first.prompt_token_ids == second.prompt_token_ids
    offset = second.mm_features[0].offset
    assert offset > BLOCK
    assert finished["second"].outputs[0].prefill_stats.num_local_cached_tokens == offset // BLOCK * BLOCK


def test_images_of_many_requests_pass_through_a_small_encoder_cache(build_smolvlm, image_router, run_engine):
    built = build_smolvlm(scheduler__encoder_cache_embeds=160, scheduler__max_num_encoder_embeds=1)  # one image per step
    conversations = {str(number): (f"{number}", encode_test_image(number % 7), "what?") for number in range(10)}
    run_all(run_engine, image_router, built, conversations)
    assert built.engine.stats.num_encoder_computed >= 7
    assert len(built.engine.runner._encoder.cache) <= 2


def test_preempted_requests_see_their_images_again(build_smolvlm, image_router, run_engine):
    built = build_smolvlm(cache__num_blocks=22, cache__enable_prefix_caching=False)
    conversations = {str(number): (IMAGES[number], "what is in this image?") for number in range(4)}
    requests = [image_router.request(name, parts, max_tokens=40) for name, parts in conversations.items()]
    finished = run_engine(built.engine, requests)
    assert built.engine.stats.num_preemptions > 0
    for name, parts in conversations.items():
        image_router.tiny.assert_greedy(finished[name].token_ids, *parts)


def test_an_image_too_large_for_the_encoder_is_refused(build_smolvlm, image_router, run_engine):
    built = build_smolvlm(scheduler__encoder_cache_embeds=79)
    with pytest.raises(InvalidRequest, match="image 0 takes 80 embeddings"):
        built.engine.add_request(image_router.request("large", CONVERSATIONS["one"]))


def bad_requests(image_router):
    parts = CONVERSATIONS["several"]
    good = image_router.request("bad", parts)
    cut_off = good.media[1][: len(good.media[1]) // 2]
    other_features = [msgspec.structs.replace(good.mm_features[0], num_embeds=EMBEDS[0] - 16), *good.mm_features[1:]]
    return {
        "cut off": (
            replace(good, media=(good.media[0], cut_off, good.media[2])),
            "image 1 cannot be used: it is not the image",
        ),
        "exchanged": (replace(good, media=good.media[::-1]), "image 0 cannot be used: it is not the image that was announced"),
        "miscounted": (replace(good, mm_features=other_features), "80 embeddings for 80 image tokens, 64 were announced"),
        "missing": (replace(good, media=()), "embeddings of image 0 did not arrive, and the image is not at hand"),
    }


@pytest.mark.parametrize("async_scheduling", ["off", "on"])
@pytest.mark.parametrize("kind", ["cut off", "exchanged", "miscounted", "missing"])
def test_a_bad_image_ends_its_request_alone(build_smolvlm, image_router, run_engine, kind, async_scheduling):
    built = build_smolvlm(scheduler__async_scheduling=async_scheduling)
    bad, message = bad_requests(image_router)[kind]
    others = {"other": (IMAGES[3], "what is in this image?"), "text": CONVERSATIONS["text"]}
    finished = run_engine(built.engine, [bad, *(image_router.request(name, parts) for name, parts in others.items())])
    assert finished["bad"].finish_reason == "error"
    assert message in finished["bad"].outputs[-1].error.message
    for name, parts in others.items():
        image_router.tiny.assert_greedy(finished[name].token_ids, *parts)
    run_all(run_engine, image_router, built, {"again": CONVERSATIONS["several"]})


def test_a_damaged_file_under_its_own_identifier_is_the_clients_fault(build_smolvlm, image_router, run_engine, image_encoder):
    good = image_router.request("bad", CONVERSATIONS["one"])
    damaged = good.media[0][:-40]
    features = [msgspec.structs.replace(good.mm_features[0], identifier=image_encoder.identify(damaged))]
    finished = run_engine(build_smolvlm().engine, [replace(good, media=(damaged,), mm_features=features)])
    error = finished["bad"].outputs[-1].error
    assert (error.code, error.param) == ("invalid_request", "images[0]")
    assert "image 0 cannot be used: it is damaged" in error.message


@pytest.fixture
def computed(build_smolvlm, image_router):
    """Compute a prompt of several images in one engine; return a copy of its pool, and where its blocks lie in it."""
    built = build_smolvlm()
    new = image_router.request("several", CONVERSATIONS["several"])
    built.engine.add_request(new)
    built.engine.step()
    (blocks,) = built.engine.scheduler.kv_cache_manager.get_block_ids("several")
    assert len(new.prompt_token_ids) <= 256, "one step"
    return built.pool.cache.pool.clone(), blocks


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("bad_block", [None, 2, 9])
def test_prompt_with_loaded_kv_needs_only_embeddings_of_what_it_computes(  # noqa: PLR0917
    computed, copy_connector, tiny_smolvlm, build_tiny, image_router, run_engine, is_async, bad_block
):
    source, blocks = computed
    new = image_router.request("several", CONVERSATIONS["several"])
    num_loaded = len(new.prompt_token_ids) // BLOCK * BLOCK
    connector = copy_connector({"several": (num_loaded, blocks[: num_loaded // BLOCK])}, source, is_async)
    if bad_block is not None:
        connector.worker.bad = {blocks[bad_block]}
    built = build_tiny(connector, model__name=str(tiny_smolvlm.folder))
    finished = run_engine(built.engine, [new, image_router.request("one", CONVERSATIONS["one"])])
    for name in ("several", "one"):
        image_router.tiny.assert_greedy(finished[name].token_ids, *CONVERSATIONS[name])
    first_computed = num_loaded if bad_block is None else bad_block * BLOCK
    needed = {feature.identifier for feature in new.mm_features if feature.end > first_computed}
    needed |= {feature.identifier for feature in image_router.request("one", CONVERSATIONS["one"]).mm_features}
    assert built.engine.stats.num_encoder_computed == len(needed)


class Shelf(ECConnectorScheduler):
    """Offers what lies in a dictionary of embeddings, and notes what is asked and told."""

    def __init__(self, embeddings):
        self.embeddings = embeddings
        self.loads = []

    def has_cache_item(self, identifier):
        return identifier in self.embeddings

    def update_state_after_alloc(self, request, index):
        identifier = request.mm_features[index].identifier
        if identifier in self.embeddings:
            self.loads.append(identifier)

    def build_connector_meta(self, scheduler_output):
        metadata = ShelfMetadata()
        metadata.loads, self.loads = self.loads, []
        return metadata


class ShelfMetadata(ECConnectorMetadata):
    __slots__ = ("loads",)


class ShelfWorker(ECConnectorWorker):
    """Loads from the dictionary; those in ``lost`` do not come. Keeps what is saved."""

    def __init__(self, embeddings, lost=()):
        self.embeddings = embeddings
        self.lost = lost
        self.saved = {}
        self.layout = None
        self.num_loaded = 0
        self._failed = {}

    def register_caches(self, layout):
        self.layout = layout

    def start_load_caches(self, encoder_cache, metadata):
        for identifier in metadata.loads:
            if identifier in self.lost:
                self._failed[identifier] = ErrorInfo(code="corrupt_block", message="lost on the way", http_status=502)
            else:
                encoder_cache[identifier] = self.embeddings[identifier].clone()
                self.num_loaded += 1

    def save_caches(self, encoder_cache, identifier):
        self.saved[identifier] = encoder_cache[identifier]

    def get_finished(self, finished_req_ids):
        failed, self._failed = self._failed, {}
        return ECConnectorOutput(failed_loading=failed)


@dataclass
class ShelfConnector:
    scheduler: Shelf
    worker: ShelfWorker


@pytest.fixture
def with_shelf(tiny_smolvlm, build_tiny, image_encoder):
    """Return a builder of (engine, connector) whose shelf holds the embeddings of some images."""

    def build(images, lost=(), **settings):
        embeddings = {image_encoder.identify(image): image_encoder.encode(image) for image in images}
        worker = ShelfWorker(embeddings, [image_encoder.identify(image) for image in lost])
        connector = ShelfConnector(Shelf(embeddings), worker)
        settings["ec_connector_factory"] = lambda fingerprint: connector
        built = build_tiny(model__name=str(tiny_smolvlm.folder), **settings)
        return built, connector

    return build


def test_embeddings_that_others_computed_are_loaded_and_new_ones_offered(with_shelf, image_router, run_engine, image_encoder):
    built, connector = with_shelf([IMAGES[0], IMAGES[2]])
    run_all(run_engine, image_router, built, {"several": CONVERSATIONS["several"]})
    assert (connector.worker.layout.hidden_size, connector.worker.layout.dtype) == (48, "float32")
    assert connector.worker.num_loaded == 2
    assert list(connector.worker.saved) == [image_encoder.identify(IMAGES[1])]
    assert torch.equal(connector.worker.saved[image_encoder.identify(IMAGES[1])], image_encoder.encode(IMAGES[1]))


def test_requests_without_their_images_live_on_loaded_embeddings(with_shelf, image_router, run_engine):
    built, _ = with_shelf(IMAGES)
    request = image_router.request("several", CONVERSATIONS["several"], media=())
    finished = run_engine(built.engine, [request])
    image_router.tiny.assert_greedy(finished["several"].token_ids, *CONVERSATIONS["several"])


def test_embeddings_that_are_lost_on_the_way_are_computed_where_the_image_is_at_hand(with_shelf, image_router, run_engine):
    built, connector = with_shelf(IMAGES, lost=[IMAGES[1]])
    run_all(run_engine, image_router, built, {name: CONVERSATIONS[name] for name in ("several", "image last", "one")})
    assert built.engine.stats.num_encoder_computed == 1
    assert connector.worker.num_loaded >= 2


@pytest.mark.parametrize("is_last_chunk", [False, True])
def test_lost_embeddings_leave_no_gap_in_prompt_logprobs(with_shelf, image_router, run_engine, is_last_chunk):
    request = image_router.request("r", ("look at what I have found here, " * 9, IMAGES[1]), max_tokens=3)
    request.sampling = msgspec.structs.replace(request.sampling, prompt_logprobs=0)
    chunk = request.mm_features[0].offset if is_last_chunk else 40
    found = []
    for lost in ([], [IMAGES[1]]):
        built, _ = with_shelf([IMAGES[1]], lost, scheduler__max_num_batched_tokens=chunk)
        outputs = run_engine(built.engine, [replace(request)])["r"].outputs
        assert built.engine.stats.num_encoder_computed == len(lost)
        assert [output.prompt_logprobs for output in outputs[1:]] == [None] * 2
        found.append(outputs[0].prompt_logprobs)
    expected, computed_again = found
    assert expected[0] is computed_again[0] is None
    for entry, same in zip(expected[1:], computed_again[1:], strict=True):
        assert entry.logprobs == pytest.approx(same.logprobs, abs=1e-4)


def test_embeddings_that_are_lost_on_the_way_end_a_request_without_images(with_shelf, image_router, run_engine):
    built, _ = with_shelf(IMAGES, lost=[IMAGES[1]])
    request = image_router.request("several", CONVERSATIONS["several"], media=())
    finished = run_engine(built.engine, [request, image_router.request("one", CONVERSATIONS["one"])])
    assert finished["several"].outputs[-1].error.code == "encoder_input_missing"
    image_router.tiny.assert_greedy(finished["one"].token_ids, *CONVERSATIONS["one"])


def test_a_connector_that_raises_behind_a_step_ends_the_next_one(with_shelf, image_router):
    built, connector = with_shelf([])

    def broken(finished_req_ids):
        raise RuntimeError("broken")

    connector.worker.get_finished = broken
    built.engine.add_request(image_router.request("text", CONVERSATIONS["text"]))
    outputs = built.engine.step()
    assert outputs[0].new_token_ids
    assert built.engine.has_work()
    with pytest.raises(RuntimeError, match="broken"):
        built.engine.step()
