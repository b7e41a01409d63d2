"""LMCache behind a connector that has a hit: the first loads, and both save."""

from __future__ import annotations

import os

import numpy as np
import pytest

from connectors.lmcache.messages import LMCacheMPConnectorMetadata, ServerSession
from connectors.lmcache.scheduler import LMCacheMPConnectorScheduler
from connectors.lmcache.staging import SHM_PREFIX, Staging
from connectors.lmcache.tracker import ChunkGeometry
from connectors.multi.scheduler import MultiConnectorScheduler
from connectors.multi.worker import multi_connector_worker
from core.config_workers import SchedulerSection
from core.connector import KVConnectorScheduler, KVConnectorWorker
from core.constants import HASH_BLOCK_SIZE
from core.engine.core import EngineCore
from core.ids import SeededIds
from core.kv.hashing import BlockHasher
from core.kv.manager import KVCacheManager
from core.request import KVConnectorMetadata, KVConnectorOutput, NewRequest
from core.sched.scheduler import Scheduler
from core.testing.clock import FakeClock
from core.testing.hash_model import (
    DEFAULT_VOCAB_SIZE,
    SLOT_BYTES,
    HashModel,
    expected_kv,
    expected_tokens,
    hash_model_kv_config,
)
from core.wire.sampling import SamplingParams

BLOCK, CHUNK, NUM_BLOCKS, MAX_MODEL_LEN = 32, 64, 64, 1024
NUM_HIT_TOKENS = 96  # of the connector in front: they end inside a chunk
PROMPT = list(range(100, 330))


class HitScheduler(KVConnectorScheduler):
    """Has the beginning of every prompt, once."""

    def __init__(self):
        self.loads = []
        self.offered = set()

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        has_hit = num_computed_tokens < NUM_HIT_TOKENS and request.request_id not in self.offered
        return (NUM_HIT_TOKENS - num_computed_tokens, True) if has_hit else (0, False)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            self.offered.add(request.request_id)
            self.loads.append((request, blocks.get_block_ids()[0][: NUM_HIT_TOKENS // BLOCK]))

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()


class HitWorker(KVConnectorWorker):
    """Brings what the scheduler side has promised."""

    def __init__(self, side):
        self.side = side
        self.model = None

    def register_kv_caches(self, pool):
        pass

    def start_load_kv(self, metadata):
        pass

    def get_transfer_results(self, finished_req_ids):
        output = KVConnectorOutput()
        for request, block_ids in self.side.loads:
            content = expected_kv(list(request.all_token_ids[:NUM_HIT_TOKENS]))
            self.model.rows[block_ids] = np.frombuffer(content, dtype=np.uint8).reshape(len(block_ids), -1)
            output.finished_recving.add(request.request_id)
        self.side.loads = []
        return output


class RecordingWorker(KVConnectorWorker):
    """Stands for LMCache's worker side: it keeps what it is told."""

    def __init__(self):
        self.told: list[LMCacheMPConnectorMetadata] = []

    def register_kv_caches(self, pool):
        pass

    def start_load_kv(self, metadata):
        self.told.append(metadata)


class Bench:
    """An engine with a connector that has a hit, and LMCache behind it."""

    def __init__(self):
        clock, front = FakeClock(), HitScheduler()
        self.lmcache = LMCacheMPConnectorScheduler(SeededIds(1), clock, saves_output=True, handoff_wait_s=0.25)
        self.worker = RecordingWorker()
        front_worker = HitWorker(front)
        workers = multi_connector_worker([front_worker, self.worker])
        self.model = front_worker.model = HashModel(NUM_BLOCKS, BLOCK, workers, incarnation=3)
        config = hash_model_kv_config(NUM_BLOCKS, BLOCK)
        self.manager = KVCacheManager(config, MAX_MODEL_LEN, BLOCK, HASH_BLOCK_SIZE, seals=self.model.seals)
        sides = MultiConnectorScheduler([front, self.lmcache])
        scheduler = Scheduler(SchedulerSection(max_num_batched_tokens=128), self.manager, MAX_MODEL_LEN, sides, clock)
        self.core = EngineCore(scheduler, self.model, BlockHasher(b"model", HASH_BLOCK_SIZE), DEFAULT_VOCAB_SIZE)
        self.staging = Staging(f"{SHM_PREFIX}test_multi_{os.getpid()}", 1 << 18, BLOCK * SLOT_BYTES, BLOCK)
        self.staging.unlink()
        self.lmcache.server = ServerSession(1, self.staging, ChunkGeometry(CHUNK, BLOCK))

    def run(self, request_id, num_tokens=3, prompt=PROMPT):
        """Serve a request; return its tokens and what LMCache's worker side was told."""
        first, tokens = len(self.worker.told), []
        sampling = SamplingParams(max_tokens=num_tokens)
        self.core.add_request(NewRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling))
        for _ in range(200):
            if not self.core.has_work():
                break
            for output in self.core.step():
                tokens += output.new_token_ids
        return tokens, self.worker.told[first:]


@pytest.fixture
def bench():
    return Bench()


def saves_of(told):
    return [save for metadata in told for save in metadata.saves]


def ranges_of(told):
    return [(save.transfer.chunks.start, save.transfer.chunks.end) for save in saves_of(told)]


def verdicts_of(told):
    return {number: is_good for metadata in told for number, is_good in metadata.verdicts.items()}


def test_what_another_connector_has_brought_and_what_is_computed_is_saved_once(bench):
    tokens, told = bench.run("a")
    assert tokens == expected_tokens(PROMPT, 3)
    assert not any(metadata.lookups or metadata.loads for metadata in told), "the first has a hit: no other connector is asked"
    ranges = ranges_of(told)
    assert (ranges[0][0], ranges[-1][1]) == (0, 192)
    assert [end for _, end in ranges[:-1]] == [start for start, _ in ranges[1:]], "each chunk once"
    assert set(verdicts_of(told).values()) == {True}


def test_only_what_the_engine_has_sealed_is_sent(bench):
    """A block that was brought and has lost its seal since: its chunk is copied, and then not sent."""
    bench.core.add_request(NewRequest(request_id="a", prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=3)))
    while not saves_of(bench.worker.told):
        bench.core.step()
    (save,) = saves_of(bench.worker.told)
    bench.model.seals.break_seals([save.transfer.moves[0].block_id])
    while bench.core.has_work():
        bench.core.step()
    verdicts = verdicts_of(bench.worker.told)
    assert verdicts[save.number] is False
    assert not any(verdicts.values()), "its chunk is the beginning of all that is tried later"


def test_hits_that_overlap_count_once(bench):
    """Local hits beside a hit in front: what is computed is not taken for more than it is, so no chunk is saved too early."""
    bench.run("a", prompt=[*PROMPT[:70], *range(900, 930)])
    tokens, told = bench.run("b")
    assert tokens == expected_tokens(PROMPT, 3)
    ranges = ranges_of(told)
    assert (ranges[0], ranges[-1][1]) == ((0, 192), 192), "of 64 tokens here, 96 with those of the first, and 128 of a step"
    assert set(verdicts_of(told).values()) == {True}, "a chunk that is saved too early is not sealed yet"


def test_nothing_is_kept_of_a_request_that_has_ended(bench):
    bench.run("a")
    assert not bench.lmcache._trackers
    assert not bench.lmcache._servers
    assert bench.manager.block_pool.num_free_blocks == bench.manager.block_pool.num_usable_blocks
