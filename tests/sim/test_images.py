"""Clusters whose prompts show images: late, lost and corrupt embeddings cost time, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import connectors.p2p.consumer.verification
import core.request
import kvferry.sim.checks
from connectors.ec.chunks import RowsDigester
from connectors.ec.scheduler import FetchingScheduler
from connectors.ec.worker import FetchingWorker
from core.sched.encoder_inputs import EncoderInputs
from core.testing.hash_encoder import HashEncoder
from encode.engine import EncodeEngine
from kvferry.sim.cluster import RunResult
from kvferry.sim.draw_plan import draw_plan
from kvferry.sim.image_plan import draw_images
from kvferry.sim.runs import Summary, run_seed

pytestmark = pytest.mark.slow

NUM_RUNS = 20
WITH_IMAGES = [seed for seed in range(300) if (plan := draw_images(seed)) is not None and plan.connector == "p2p"][:NUM_RUNS]
RELEASED_LATE = 446  # a fetch ends when no request is left
SLEPT_ON = 2021  # an engine with orders and nothing to compute


@pytest.fixture(scope="module")
def results() -> list[RunResult]:
    return [run_seed(seed) for seed in WITH_IMAGES]


@pytest.fixture(scope="module")
def runs(results) -> Summary:
    summary = Summary()
    for result in results:
        summary.add(result)
    return summary


def test_what_becomes_of_embeddings_changes_no_answer_and_leaves_nothing(runs):
    assert not runs.failures, [(failure.seed, failure.violations) for failure in runs.failures]


def test_requests_end_for_want_of_embeddings_only_where_files_are_nowhere_else(results):
    missing = {result.seed for result in results if "encoder_input_missing" in result.outcomes}
    absent = {seed for seed in WITH_IMAGES if draw_images(seed).absent}
    assert missing
    assert missing <= absent


@pytest.mark.parametrize(
    "happening",
    [
        "decoded_images",
        "embedded_images",
        "encode_deadline",
        "encode_done",
        "encode_peer_lost",
        "fetch_deadline",
        "fetch_digest",
        "fetch_ok",
        "fetch_peer_lost",
        "fetch_stale",
        "flipped_embeddings",
        "images_decoded_to_share",
        "images_without_room",
        "known_images",
        "waiting_for_embeddings",
    ],
)
def test_what_is_to_be_survived_does_happen(happening, runs):
    assert runs.happened[happening] > 0


def test_no_image_is_embedded_whose_embeddings_are_refused_then(runs):
    assert runs.happened["refused_offers"] == 0


@pytest.mark.parametrize("seed", WITH_IMAGES[:1])
def test_same_seed_gives_the_same_events(seed):
    assert run_seed(seed, keeps_log=True).log == run_seed(seed, keeps_log=True).log


def test_some_seeds_have_images_and_some_of_these_encode_workers():
    plans = [draw_plan(seed) for seed in range(60)]
    with_images = [plan for plan in plans if plan.images is not None]
    assert 0 < len(with_images) < len(plans) / 2
    assert {bool(plan.encoders) for plan in with_images} == {True, False}
    assert {plan.images.connector for plan in with_images} == {"", "p2p", "shared"}


# ---- defects that must be noticed ------------------------------------------------------------------------------------

Patch = Callable[[object, str, object], None]  # monkeypatch.setattr


def forget_images_in_block_hashes(patch: Patch) -> None:
    def salt_alone(mm_features, cache_salt):
        return (("cache_salt", cache_salt),) if cache_salt else ()

    patch(core.request, "extra_keys_of", salt_alone)
    patch(kvferry.sim.checks, "extra_keys_of", salt_alone)


def load_other_embeddings(patch: Patch) -> None:
    real = FetchingWorker.start_load_caches

    def start_load_caches(worker, encoder_cache, metadata):
        real(worker, encoder_cache, metadata)
        for load in metadata.loads:
            encoder_cache[load.identifier] = encoder_cache[load.identifier] ^ 1

    patch(FetchingWorker, "start_load_caches", start_load_caches)


def check_no_digests(patch: Patch) -> None:
    patch(RowsDigester, "check", lambda *_: None)
    patch(connectors.p2p.consumer.verification, "_find_corruption", lambda *_: None)


def never_let_go_of_embeddings(patch: Patch) -> None:
    patch(EncoderInputs, "release_computed", lambda *_: None)


def sleep_on_orders(patch: Patch) -> None:
    patch(FetchingScheduler, "has_pending_push_work", lambda _: False)


def let_who_lacks_embeddings_for_good_wait(patch: Patch) -> None:
    patch(FetchingScheduler, "take_unavailable_requests", lambda _: {})


def sleep_beside_the_room_that_a_batch_leaves(patch: Patch) -> None:
    real = EncodeEngine._choose_batch

    def choose_batch(engine, outputs):
        batch = real(engine, outputs)
        left = [engine._images[identifier] for _, _, identifier in engine._queue]
        engine._must_step = any(engine._image_decode_thread.is_ready("engine", image.feature, image.content) for image in left)
        return batch

    patch(EncodeEngine, "_choose_batch", choose_batch)


def merge_embeddings_one_row_too_late(patch: Patch) -> None:
    real = HashEncoder.merge

    def merge(encoder, request_id, token_ids, start, end):
        inputs = real(encoder, request_id, token_ids, start, end)
        return inputs if inputs is token_ids else [inputs[0], *inputs[:-1]]

    patch(HashEncoder, "merge", merge)


@pytest.mark.parametrize(
    ("defect", "first"),  # played first is a seed that shows the defect
    [
        (check_no_digests, RELEASED_LATE),
        (forget_images_in_block_hashes, 67),
        (let_who_lacks_embeddings_for_good_wait, RELEASED_LATE),
        (load_other_embeddings, SLEPT_ON),
        (merge_embeddings_one_row_too_late, RELEASED_LATE),
        (never_let_go_of_embeddings, 13),
        (sleep_beside_the_room_that_a_batch_leaves, 24),
        (sleep_on_orders, SLEPT_ON),
    ],
)
def test_a_defect_is_noticed(defect, first, monkeypatch):
    defect(monkeypatch.setattr)
    assert any(not run_seed(seed).is_good for seed in (first, RELEASED_LATE, SLEPT_ON, *WITH_IMAGES))
