"""A block whose first tokens are missing, since its window begins within it: it is read here, and never saved."""

from __future__ import annotations

import os

from connectors.lmcache.messages import LMCacheMPConnectorMetadata, SavePages, ServerSession
from connectors.lmcache.scheduler import LMCacheMPConnectorScheduler
from connectors.lmcache.staging import SHM_PREFIX, Staging
from connectors.lmcache.tracker import ChunkGeometry
from connectors.multi.scheduler import MultiConnectorScheduler, MultiKVConnectorMetadata
from core.config_workers import SchedulerSection
from core.connector import KVConnectorScheduler, KVConnectorWorker
from core.engine.core import EngineCore
from core.ids import SeededIds
from core.kv.block import NULL_BLOCK_ID
from core.kv.hashing import BlockHasher
from core.kv.manager import KVCacheBlocks, KVCacheManager
from core.kv.pool_region import KVPoolRegion
from core.request import KVConnectorMetadata, NewRequest, Request, SchedulerOutput
from core.sched.scheduler import Scheduler
from core.testing.clock import FakeClock
from core.testing.hash_model import (
    DEFAULT_VOCAB_SIZE,
    SLOT_BYTES,
    HashAttention,
    HashModel,
    expected_kv,
    expected_tokens,
    hash_model_kv_config,
)
from core.wire.sampling import SamplingParams

BLOCK = CHUNK = 32
WINDOW = 24
ATTENTIONS = (HashAttention(), HashAttention(window=WINDOW))
PROMPT = list(range(1000, 1110))
NUM_LOADED = 109
WINDOW_BLOCK = (NUM_LOADED - WINDOW + 1) // BLOCK  # the window begins within it
FIRST_LOADED = 80  # of its tokens, as from a worker with blocks of 16


class Loads(KVConnectorScheduler):
    """Loads all of a prompt but its last token, and of the window what another worker with smaller blocks may hold."""

    def __init__(self) -> None:
        self.tables: tuple[list[int], ...] = ()  # to load into, in the next step

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        self._manager = manager

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return (NUM_LOADED, False) if num_computed_tokens == 0 else (0, False)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._manager.withhold_first_block(request.request_id, 1)
            self.tables = blocks.get_block_ids()

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return KVConnectorMetadata()


class Worker(KVConnectorWorker):
    """Loads, and keeps the content of what is to be saved, and the verdicts."""

    def __init__(self, loads: Loads) -> None:
        self.loads = loads
        self.model: HashModel | None = None
        self.saves: list[SavePages] = []
        self.contents: list[tuple[SavePages, int, int, bytes]] = []
        self.verdicts: dict[int, bool] = {}

    def register_kv_caches(self, pool: KVPoolRegion) -> None:
        pass

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        assert isinstance(metadata, MultiKVConnectorMetadata)
        (told,) = [part for part in metadata.metadata if isinstance(part, LMCacheMPConnectorMetadata)]
        self.saves = told.saves
        self.verdicts |= told.verdicts
        self._load()

    def _load(self) -> None:
        assert self.model is not None
        for group_id, table in enumerate(self.loads.tables):
            kv = bytearray(expected_kv([*PROMPT, *[0] * BLOCK], ATTENTIONS, group_id))
            if group_id == 1:
                kv[: FIRST_LOADED * SLOT_BYTES] = bytes(FIRST_LOADED * SLOT_BYTES)
            for index, block_id in enumerate(table):
                if block_id != NULL_BLOCK_ID:
                    self.model.write_block(block_id, bytes(kv[index * BLOCK * SLOT_BYTES :][: BLOCK * SLOT_BYTES]))
        self.loads.tables = ()

    def wait_for_save(self) -> None:
        assert self.model is not None
        for save in self.saves:
            first = save.transfer.chunks.start // BLOCK
            for move in save.transfer.moves:
                content = self.model.read_block(move.block_id)
                self.contents.append((save, move.identity.group_id, first + move.index, content))
        self.saves = []


def test_a_block_whose_first_tokens_are_missing_is_saved_by_nobody():
    loads, num_blocks = Loads(), 40
    worker = Worker(loads)
    lmcache = LMCacheMPConnectorScheduler(SeededIds(1), FakeClock(), saves_output=True, handoff_wait_s=0.25)
    side = MultiConnectorScheduler([loads, lmcache])
    model = worker.model = HashModel(num_blocks, BLOCK, worker, incarnation=3, attentions=ATTENTIONS)
    config = hash_model_kv_config(num_blocks, BLOCK, ATTENTIONS)
    manager = KVCacheManager(config, 1024, BLOCK, 16, seals=model.seals)
    engine = EngineCore(
        Scheduler(SchedulerSection(max_num_batched_tokens=128), manager, 1024, side, FakeClock()),
        model,
        BlockHasher(b"model", 16),
        DEFAULT_VOCAB_SIZE,
    )
    staging = Staging(f"{SHM_PREFIX}incomplete_{os.getpid()}", 1 << 18, BLOCK * SLOT_BYTES, BLOCK)
    staging.unlink()
    lmcache.server = ServerSession(1, staging, ChunkGeometry(CHUNK, BLOCK, (-1, WINDOW)))

    engine.add_request(NewRequest(request_id="a", prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=60)))
    output: list[int] = []
    while engine.has_work():
        for step in engine.step():
            output += step.new_token_ids

    assert output == expected_tokens(PROMPT, 60, DEFAULT_VOCAB_SIZE, ATTENTIONS)
    assert worker.verdicts
    assert all(worker.verdicts.values()), "what cannot prove good is not copied in each step"
    saved = {(group_id, index) for _, group_id, index, _ in worker.contents}
    assert (0, WINDOW_BLOCK) in saved, "the same tokens are complete in the group without a window"
    assert (1, WINDOW_BLOCK) not in saved
    assert (1, WINDOW_BLOCK + 2) in saved, "later blocks of the window are"
    tokens = PROMPT + output
    for _, group_id, index, content in worker.contents:
        assert content == expected_kv(tokens, ATTENTIONS, group_id)[index * len(content) :][: len(content)]
