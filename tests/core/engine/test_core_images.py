"""The engine's sleep and its numbers while embeddings of images are on their way. The model is a ``HashModel``."""

from __future__ import annotations

import pytest

from core.config_workers import SchedulerSection
from core.engine.core import EngineCore
from core.errors import EncoderInputMissing
from core.kv.hashing import BlockHasher
from core.kv.manager import KVCacheManager
from core.request import NewRequest
from core.sched.encoder_inputs import EncoderInputs
from core.sched.scheduler import Scheduler
from core.testing.clock import FakeClock
from core.testing.hash_encoder import HashEncoder, Image, input_ids_of, lay_out
from core.testing.hash_model import HashModel, expected_tokens, hash_model_kv_config
from core.wire.messages import ErrorInfo
from core.wire.sampling import SamplingParams
from kvferry.sim.manual_images import ManualImages
from tests.support.scripted_embeddings import EmbeddingScript, ScriptedECScheduler, ScriptedECWorker

CAT, DOG = Image(b"cat", 6), Image(b"dog", 6)


class Engine:
    """An engine that embeds images, and may load embeddings by a scripted connector. ``images`` have to be prepared first."""

    def __init__(self, images: ManualImages | None = None) -> None:
        self.script = EmbeddingScript()
        encoder = HashEncoder(ScriptedECWorker(self.script), images.take if images is not None else None)
        self.model = HashModel(65, 16, encoder=encoder)
        manager = KVCacheManager(hash_model_kv_config(65, 16), 512, 16, 16, seals=self.model.seals)
        self.connector = ScriptedECScheduler(self.script)
        inputs = EncoderInputs(64, 64, self.connector, images)
        scheduler = Scheduler(SchedulerSection(policy="priority"), manager, 512, None, FakeClock(), encoder=inputs)
        self.core = EngineCore(scheduler, self.model, BlockHasher(b"test", 16), self.model.vocab_size)

    def add(self, name: str, *parts: list[int] | Image, priority: int = 0) -> list[int]:
        """Add a request that shows the cat, or has these parts; return what it shall put out."""
        token_ids, features, media = lay_out(parts or ([5, 6, 7], CAT, [8]))
        self.core.add_request(
            NewRequest(
                request_id=name,
                prompt_token_ids=token_ids,
                sampling=SamplingParams(max_tokens=3),
                mm_features=features,
                media=media,
                priority=priority,
            )
        )
        return expected_tokens(input_ids_of(token_ids, features, media), 3)

    def run(self) -> list[int]:
        """Step while there is work; return the tokens that come out."""
        tokens: list[int] = []
        while self.core.has_work():
            tokens += [token for output in self.core.step() for token in output.new_token_ids]
        return tokens


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_it_sleeps_while_embeddings_are_on_their_way_and_goes_on_when_woken(engine):
    expected = engine.add("a")
    engine.script.on_the_way.add(CAT.identifier)
    assert engine.run() == []
    engine.script.on_the_way.clear()
    assert not engine.core.has_work()
    engine.core.wake()
    assert engine.run() == expected


def test_it_counts_where_embeddings_came_from(engine):
    engine.script.here[CAT.identifier] = CAT.media
    engine.add("a")
    engine.run()
    engine.add("b")  # its prefix is shorter than a block, so the image is needed again
    engine.run()
    stats = engine.core.stats
    assert (stats.num_encoder_loaded, stats.num_encoder_hits, stats.num_encoder_computed) == (1, 1, 0)
    assert stats.encoder_cache_usage == 0


def test_a_request_that_is_given_up_ends_in_the_step_after_the_wake(engine):
    engine.add("a")
    engine.script.on_the_way.add(CAT.identifier)
    engine.run()
    engine.script.unavailable["a"] = ErrorInfo.of(EncoderInputMissing("nobody has it"))
    engine.core.wake()
    (output,) = engine.core.step()
    assert (output.finish_reason, output.error.code) == ("error", "encoder_input_missing")
    assert not engine.core.has_requests() or engine.run() == []


def test_it_steps_while_the_ec_connector_asks_for_it_without_requests(engine, monkeypatch):
    assert not engine.core.has_work()
    monkeypatch.setattr(engine.connector, "has_pending_push_work", lambda: True)
    assert engine.core.has_work()


def test_engine_goes_on_if_a_ready_image_made_room_and_its_request_blocks_no_other():
    images = ManualImages(budget_embeds=6)
    engine = Engine(images)
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks(pool.num_free_blocks - 1)
    engine.add("too large for now", list(range(20)), CAT, priority=1)
    assert engine.run() == []
    images.work()
    expected = engine.add("text", [5, 6, 7], priority=2)
    assert engine.run() == [], "it has to wait for the blocks of the one before it"
    engine.add("urgent", DOG, [5], priority=0)
    assert engine.run() == expected, "the one before it waits for its image, which has made room for the urgent one's"


def test_shutting_down_ends_both_sides_of_the_ec_connector_once(engine, monkeypatch):
    ended: list[str] = []
    monkeypatch.setattr(engine.connector, "shutdown", lambda: ended.append("scheduler"))
    monkeypatch.setattr(engine.model.encoder._connector, "shutdown", lambda: ended.append("worker"))
    engine.core.shutdown()
    engine.core.shutdown()
    assert ended == ["scheduler", "worker"]
