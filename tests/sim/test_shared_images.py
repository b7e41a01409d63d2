"""Clusters that keep embeddings in a store: what becomes of it, and of what lies in it, costs time and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import kvferry.sim.shared_embeddings
from connectors.ec.chunks import ChunkLayout
from connectors.ec.jobs import FetchEnded
from connectors.ec.mover import EmbeddingTransfer
from connectors.ec.store_offers import StoreOffers
from connectors.ec.worker import FetchingWorker, OfferEnded
from kvferry.sim.draw_plan import draw_plan
from kvferry.sim.image_plan import draw_images
from kvferry.sim.runs import Summary, run_seed, run_seeds
from tests.support.unverified_store import use_what_a_store_gives_unverified

pytestmark = pytest.mark.slow

NUM_RUNS = 16
WITH_STORE = [seed for seed in range(500) if (plan := draw_images(seed)) is not None and plan.connector == "shared"]
FAILS_HALF_WAY = 3901  # a fetch that has got the first of several chunks, which few runs have


@pytest.fixture(scope="module")
def runs() -> Summary:
    return run_seeds(WITH_STORE[:NUM_RUNS])


def test_what_becomes_of_embeddings_changes_no_answer_and_leaves_nothing(runs):
    assert not runs.failures, [(failure.seed, failure.violations) for failure in runs.failures]


@pytest.mark.parametrize(
    "happening",
    [
        "embedded_images",
        "embeddings_forgotten",
        "embeddings_refused",
        "embeddings_rejected_digest",
        "embeddings_restarts_noticed",
        "embeddings_stored",
        "embeddings_timeouts",
        "encode_done",
        "fetch_aborted",
        "fetch_deadline",
        "fetch_digest",
        "fetch_ok",
        "fetch_store_miss",
        "flipped_bits",
        "known_images",
        "waiting_for_embeddings",
    ],
)
def test_what_is_to_be_survived_does_happen(happening, runs):
    assert runs.happened[happening] > 0


def test_some_runs_keep_embeddings_and_some_images_take_several_chunks():
    plans = [draw_plan(seed) for seed in WITH_STORE]
    assert {plan.embedding_store is None for plan in plans} == {True, False}
    assert {bool(plan.encoders) for plan in plans} == {True, False}
    assert {plan.images.large_image is None for plan in plans} == {True, False}


@pytest.mark.parametrize("seed", WITH_STORE[:1])
def test_same_seed_gives_the_same_events(seed):
    assert run_seed(seed, keeps_log=True).log == run_seed(seed, keeps_log=True).log


# ---- defects that must be noticed ------------------------------------------------------------------------------------

Patch = Callable[[object, str, object], None]  # monkeypatch.setattr


def name_chunks_by_their_place_alone(patch: Patch) -> None:
    real = ChunkLayout._chunk_hash
    patch(ChunkLayout, "_chunk_hash", lambda layout, identifier, num_embeds, index: real(layout, bytes(16), 0, index))


def take_half_an_item_for_all_of_it(patch: Patch) -> None:
    real = EmbeddingTransfer._end_fetch

    def end_fetch(mover, fetching, error):
        real(mover, fetching, error if fetching.num_done == 0 else None)

    patch(EmbeddingTransfer, "_end_fetch", end_fetch)


def leave_pinned_what_was_fetched(patch: Patch) -> None:
    patch(EmbeddingTransfer, "_release", lambda mover, fetching: setattr(fetching, "ticket", None))


def save_for_ever(patch: Patch) -> None:
    real = StoreOffers.on_report
    patch(StoreOffers, "on_report", lambda offers, news: None if isinstance(news, OfferEnded) else real(offers, news))


def tell_nobody_what_was_stored(patch: Patch) -> None:
    def pass_on(report, offers, worker):
        if isinstance(report, FetchEnded):
            worker.report(report)
        else:
            offers.on_report(report)

    patch(kvferry.sim.shared_embeddings, "pass_on", pass_on)


def sleep_beyond_the_time_for_embeddings(patch: Patch) -> None:
    patch(FetchingWorker, "wake", lambda _: None)


@pytest.mark.parametrize(
    ("defect", "first"),  # played first is a seed that shows the defect
    [
        (leave_pinned_what_was_fetched, 17),
        (name_chunks_by_their_place_alone, 17),
        (save_for_ever, 17),
        (sleep_beyond_the_time_for_embeddings, 64),
        (tell_nobody_what_was_stored, 127),
        (use_what_a_store_gives_unverified, 450),
    ],
)
def test_a_defect_is_noticed(defect, first, monkeypatch):
    defect(monkeypatch.setattr)
    assert any(not run_seed(seed).is_good for seed in (first, *WITH_STORE))


def test_an_item_of_which_half_has_come_is_noticed(monkeypatch):
    take_half_an_item_for_all_of_it(monkeypatch.setattr)
    assert not run_seed(FAILS_HALF_WAY).is_good
