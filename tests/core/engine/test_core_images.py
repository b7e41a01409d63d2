"""The engine's sleep and its numbers while embeddings of images are on their way. The model is a ``HashModel``."""

from __future__ import annotations

import pytest

from core.config import SchedulerSection
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
from tests.support.scripted_embeddings import EmbeddingScript, ScriptedECScheduler, ScriptedECWorker

CAT = Image(b"cat", 6)


class Engine:
    """An engine that embeds images, and may load embeddings by a scripted connector."""

    def __init__(self) -> None:
        self.script = EmbeddingScript()
        encoder = HashEncoder(ScriptedECWorker(self.script))
        self.model = HashModel(65, 16, encoder=encoder)
        manager = KVCacheManager(hash_model_kv_config(65, 16), 512, 16, 16, seals=self.model.seals)
        self.connector = ScriptedECScheduler(self.script)
        scheduler = Scheduler(
            SchedulerSection(), manager, 512, None, FakeClock(), encoder=EncoderInputs(64, 64, self.connector)
        )
        self.core = EngineCore(scheduler, self.model, BlockHasher(b"test", 16), self.model.vocab_size)

    def add(self, name: str) -> list[int]:
        """Add a request that shows the cat; return what it shall put out."""
        token_ids, features, media = lay_out([[5, 6, 7], CAT, [8]])
        sampling = SamplingParams(max_tokens=3)
        self.core.add_request(
            NewRequest(request_id=name, prompt_token_ids=token_ids, sampling=sampling, mm_features=features, media=media)
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
    gauges = engine.core.gauges
    assert (gauges.num_encoder_loaded, gauges.num_encoder_hits, gauges.num_encoder_computed) == (1, 1, 0)
    assert gauges.encoder_cache_usage == 0


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


def test_shutting_down_ends_both_sides_of_the_ec_connector_once(engine, monkeypatch):
    ended: list[str] = []
    monkeypatch.setattr(engine.connector, "shutdown", lambda: ended.append("scheduler"))
    monkeypatch.setattr(engine.model.encoder._connector, "shutdown", lambda: ended.append("worker"))
    engine.core.shutdown()
    engine.core.shutdown()
    assert ended == ["scheduler", "worker"]
