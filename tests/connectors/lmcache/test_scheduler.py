"""The scheduler side on a real engine, with lookups answered by hand: what is offered, what is loaded, what may be saved."""

from __future__ import annotations

import os

import pytest

from connectors.lmcache.messages import LMCacheMPConnectorMetadata, ServerSession
from connectors.lmcache.scheduler import LMCacheMPConnectorScheduler
from connectors.lmcache.staging import SHM_PREFIX, Staging
from connectors.lmcache.tracker import ChunkGeometry
from core.config_workers import SchedulerSection
from core.connector import KVConnectorWorker
from core.constants import HASH_BLOCK_SIZE
from core.engine.core import EngineCore
from core.ids import SeededIds
from core.kv.hashing import BlockHasher
from core.kv.manager import KVCacheManager
from core.kv.pool_region import KVPoolRegion
from core.request import KVConnectorMetadata, KVConnectorOutput, NewRequest, Request, RequestStatus
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
from core.wire.media import MMFeature
from core.wire.messages import ErrorInfo
from core.wire.sampling import SamplingParams

BLOCK = 32
CHUNK = 64
PROMPT = list(range(100, 330))  # three chunks and a part of one
FAILED = ErrorInfo(code="store_miss", message="gone", http_status=502)


class Recorder(KVConnectorWorker):
    """Keeps what it is told; ``output`` is its next report."""

    def __init__(self) -> None:
        self.told: list[LMCacheMPConnectorMetadata] = []
        self.output = KVConnectorOutput()

    def register_kv_caches(self, pool: KVPoolRegion) -> None:
        pass

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        assert isinstance(metadata, LMCacheMPConnectorMetadata)
        self.told.append(metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        output, self.output = self.output, KVConnectorOutput()
        return output


class Bench:
    """An engine whose LMCache server is the test."""

    def __init__(self, num_blocks: int = 64, staging_bytes: int = 1 << 18, saves_output: bool = True) -> None:
        self.clock = FakeClock()
        self.side = LMCacheMPConnectorScheduler(SeededIds(1), self.clock, saves_output=saves_output, handoff_wait_s=0.25)
        self.worker = Recorder()
        self.model = HashModel(num_blocks, BLOCK, self.worker, incarnation=3)
        self.manager = KVCacheManager(
            hash_model_kv_config(num_blocks, BLOCK), 1024, BLOCK, HASH_BLOCK_SIZE, seals=self.model.seals
        )
        scheduler = Scheduler(SchedulerSection(max_num_batched_tokens=128), self.manager, 1024, self.side, self.clock)
        self.core = EngineCore(scheduler, self.model, BlockHasher(b"model", HASH_BLOCK_SIZE), DEFAULT_VOCAB_SIZE)
        self.outputs: dict[str, list[int]] = {}
        self.staging = Staging(f"{SHM_PREFIX}test_{os.getpid()}", staging_bytes, BLOCK * SLOT_BYTES, BLOCK)
        self.staging.unlink()
        self.side.server = ServerSession(1, self.staging, ChunkGeometry(CHUNK, BLOCK))

    def add(self, name: str, prompt: list[int] = PROMPT, num_tokens: int = 3, output: tuple[int, ...] = ()) -> None:
        self.outputs[name] = []
        sampling = SamplingParams(max_tokens=num_tokens)
        self.core.add_request(NewRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, output_token_ids=output))

    def step(self) -> LMCacheMPConnectorMetadata:
        """Run a step and return what the worker side was told."""
        for output in self.core.step():
            self.outputs[output.request_id] += output.new_token_ids
        return self.worker.told[-1]

    def finish(self) -> list[LMCacheMPConnectorMetadata]:
        """Run until nothing is left to do; return what was told."""
        first = len(self.worker.told)
        while self.core.has_work():
            self.step()
        return self.worker.told[first:]

    def look_up(self, name: str, num_found: int, prompt: list[int] = PROMPT) -> str:
        """Add a request and answer its lookup; return its session."""
        self.add(name, prompt)
        (lookup,) = self.step().lookups
        self.answer(lookup.span.session_id, num_found)
        return lookup.span.session_id

    def answer(self, session_id: str, num_found: int) -> None:
        """Answer a lookup, and wake the engine as the event loop does."""
        self.side.on_lookup_answer(session_id, num_found)
        self.core.wake()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def saved(told: list[LMCacheMPConnectorMetadata]) -> list[tuple[int, int]]:
    return [(save.transfer.chunks.start, save.transfer.chunks.end) for metadata in told for save in metadata.saves]


def verdicts(told: list[LMCacheMPConnectorMetadata]) -> dict[int, bool]:
    return {number: is_good for metadata in told for number, is_good in metadata.verdicts.items()}


def test_a_request_waits_for_the_answer_while_others_run(bench):
    bench.add("a")
    (lookup,) = bench.step().lookups
    assert lookup.num_tokens == 3 * CHUNK
    assert list(lookup.span.token_ids) == PROMPT[: 3 * CHUNK]
    assert bench.step().lookups == [], "asked once"
    assert not bench.core.scheduler.running
    bench.answer(lookup.span.session_id, 0)
    bench.step()
    assert [request.request_id for request in bench.core.scheduler.running] == ["a"]


def test_without_a_server_nothing_is_asked_and_nothing_saved(bench):
    bench.side.server = None
    bench.add("a")
    told = bench.finish()
    assert bench.outputs["a"] == expected_tokens(PROMPT, 3)
    assert all(metadata.is_empty() for metadata in told)


def test_a_prompt_below_a_chunk_is_not_looked_up(bench):
    bench.add("a", PROMPT[: CHUNK - 1])
    assert bench.step().lookups == []


def test_a_lookup_asks_for_no_more_than_a_load_can_have():
    bench = Bench(staging_bytes=2 * 384 * 5)  # nine pages: four to load
    bench.add("a", list(range(500)))
    (lookup,) = bench.step().lookups
    assert lookup.num_tokens == 2 * CHUNK


def test_requests_with_the_same_tokens_and_other_images_share_no_keys(bench):
    """Images of one size have the same placeholder tokens, and tokens are all that the server compares."""
    images = {"a": (b"a" * 16, 4), "b": (b"b" * 16, 4), "moved": (b"a" * 16, 8), "again": (b"a" * 16, 4), "none": None}
    salts = {}
    for name, image in images.items():
        features = () if image is None else (feature_of(*image),)
        request = Request(
            NewRequest(request_id=name, prompt_token_ids=PROMPT, sampling=SamplingParams(), mm_features=features),
            BlockHasher(b"model", HASH_BLOCK_SIZE),
        )
        bench.side.get_num_new_matched_tokens(request, 0)
        salts[name] = bench.side._next.lookups[-1].span.salt
    assert salts["a"] == salts["again"]
    assert len(set(salts.values())) == 4
    assert salts["none"] == ""
    assert all(len(salt) == 32 for name, salt in salts.items() if name != "none")


def feature_of(identifier: bytes, offset: int) -> MMFeature:
    return MMFeature(identifier=identifier, offset=offset, length=8, num_embeds=8, media_index=0)


def test_steps_save_what_they_complete_and_it_proves_good(bench):
    bench.look_up("a", 0)
    told = bench.finish()
    assert saved(told) == [(0, 128), (128, 192)]
    assert verdicts(told) == {1: True, 2: True}
    assert told[-1].ended or any(metadata.ended for metadata in told)


def test_output_is_saved_too_unless_it_is_not_wanted():
    for saves_output, expected in ((True, [(0, 128), (128, 192), (192, 256), (256, 320)]), (False, [(0, 128), (128, 192)])):
        bench = Bench(saves_output=saves_output)
        bench.add("a", num_tokens=100)
        (lookup,) = bench.step().lookups
        bench.answer(lookup.span.session_id, 0)
        assert saved(bench.finish()) == expected


def test_a_save_names_the_blocks_by_what_they_hold(bench):
    bench.look_up("a", 0)
    (save,) = bench.step().saves
    hashes = bench.core.scheduler.requests["a"].block_hashes
    moves = save.transfer.moves
    assert [move.identity.block_hash for move in moves] == hashes[1::2][: len(moves)]
    content = b"".join(bench.model.read_block(move.block_id) for move in moves)
    assert content == expected_kv(PROMPT[: 2 * CHUNK])
    bench.finish()


def test_blocks_that_the_engine_does_not_seal_are_not_sent(bench):
    """A step that was not good: its blocks were copied before anybody knew."""
    bench.look_up("a", 0)
    (save,) = bench.step().saves
    bench.model.seals.break_seals([save.transfer.moves[2].block_id])
    told = [bench.step()]
    assert verdicts(told) == {save.number: False}
    assert saved(told) == [(0, 192)], "tried again, with what has come since"
    bench.finish()


def test_blocks_that_hold_something_else_by_now_are_not_sent(bench):
    bench.look_up("a", 0)
    (save,) = bench.step().saves
    bench.core.abort_requests(["a"])
    assert bench.side._next.verdicts == {save.number: True}, "judged before they can be reused"
    bench.look_up("b", 0, list(range(900, 990)))
    (save,) = bench.step().saves
    block = bench.manager.block_pool.blocks[save.transfer.moves[0].block_id]
    block.generation += 1
    assert bench.step().verdicts == {save.number: False}
    block.generation -= 1
    bench.finish()


def test_what_the_server_has_is_loaded_into_fresh_blocks(bench):
    session_id = bench.look_up("a", 128)
    metadata = bench.step()
    (load,) = metadata.loads
    assert metadata.unclaimed == [session_id]
    assert (load.transfer.chunks.start, load.transfer.chunks.end, load.num_tokens) == (0, 128, 128)
    for index, move in enumerate(load.transfer.moves):
        start = index * BLOCK * SLOT_BYTES
        bench.model.write_block(move.block_id, expected_kv(PROMPT[:128])[start : start + BLOCK * SLOT_BYTES])
    bench.worker.output = KVConnectorOutput(finished_recving={"a"})
    bench.core.wake()
    told = bench.finish()
    assert bench.outputs["a"] == expected_tokens(PROMPT, 3)
    assert saved(told) == [(128, 192)], "what came from the server is not sent back"


def test_a_failed_load_is_computed_and_not_tried_again(bench):
    bench.look_up("a", 128)
    bench.step()
    bench.worker.output = KVConnectorOutput(finished_recving={"a"}, failed_recving={"a": FAILED})
    bench.core.wake()
    told = bench.finish()
    assert bench.outputs["a"] == expected_tokens(PROMPT, 3)
    assert not any(metadata.loads or metadata.lookups for metadata in told)
    assert saved(told)[0][0] == 0, "the server may not have it any more"


def test_a_hit_that_somebody_else_loads_is_let_go(bench):
    """As one of several connectors: the blocks are allocated, and nothing of them is for this one."""
    session_id = bench.look_up("a", 128)
    request = bench.core.scheduler.requests["a"]
    assert bench.side.get_num_new_matched_tokens(request, 0) == (128, True)
    bench.side.update_state_after_alloc(request, bench.manager.get_blocks("a"), 0)
    assert bench.side._next.unclaimed == [session_id]
    assert bench.side._next.loads == []
    assert bench.side.get_num_new_matched_tokens(request, 0) == (0, False)


def test_asking_again_changes_nothing(bench):
    bench.look_up("a", 128)
    request = bench.core.scheduler.requests["a"]
    for _ in range(3):
        assert bench.side.get_num_new_matched_tokens(request, 64) == (64, True)
    assert bench.side.get_num_new_matched_tokens(request, 128) == (0, False)
    assert bench.side.get_num_new_matched_tokens(request, 192) == (0, False)


@pytest.mark.parametrize("moment", ["before the lookup", "while it is open", "with an answer", "while loading", "running"])
def test_an_abort_ends_the_session_once(bench, moment):
    if moment == "before the lookup":
        bench.add("a")
        bench.core.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
        assert not any(metadata.ended for metadata in bench.finish())
        return
    if moment == "while it is open":
        bench.add("a")
        session_id = bench.step().lookups[0].span.session_id
    else:
        session_id = bench.look_up("a", 128 if moment == "while loading" else 0)
    if moment in {"while loading", "running"}:
        bench.step()
    bench.core.abort_requests(["a"])
    assert bench.side._next.ended == [session_id]
    assert bench.side._next.aborts == (["a"] if moment == "while loading" else [])
    if moment == "while loading":
        bench.step()
        bench.worker.output = KVConnectorOutput(finished_recving={"a"})
        bench.core.wake()
    bench.finish()
    assert not bench.core.has_requests()
    assert bench.manager.block_pool.num_free_blocks == bench.manager.block_pool.num_usable_blocks


def test_a_request_that_outlives_the_server_saves_nothing_more(bench):
    bench.look_up("a", 0)
    assert bench.step().saves
    bench.side.server = ServerSession(2, bench.staging, ChunkGeometry(CHUNK, BLOCK))
    assert saved(bench.finish()) == []


def test_a_save_without_room_is_tried_again_with_the_next_step(bench):
    taken = []
    while (page := bench.staging.take_to_save(1)) is not None:
        taken += page
    bench.look_up("a", 0)
    assert bench.step().saves == []
    assert bench.side.num_saves_without_room == 1
    bench.staging.give_back(taken)
    assert saved([bench.step()]) == [(0, 192)]
    bench.finish()


def test_a_backlog_larger_than_the_save_pages_is_saved_in_steps_and_leaves_half():
    bench = Bench(staging_bytes=8 * 384)  # eight pages: four to save, two chunks
    server, bench.side.server = bench.side.server, None
    bench.add("before the server came")
    bench.finish()
    bench.side.server = server
    bench.look_up("a", 0)
    told = []
    while bench.core.has_work():
        told.append(bench.step())
        for save in told[-1].saves:
            bench.staging.give_back(save.pages)
    assert saved(told) == [(0, 64), (64, 192)]


def test_a_prompt_that_was_computed_elsewhere_is_waited_for_a_moment(bench):
    bench.add("a", output=(7,))
    sessions = []
    for num_found in (0, 64, 128):
        (lookup,) = bench.step().lookups
        sessions.append(lookup.span.session_id)
        bench.answer(sessions[-1], num_found)
        bench.clock.advance(0.05)
    metadata = bench.step()
    assert (metadata.loads, metadata.ended) == ([], [sessions[-1]]), "a part of it is there"
    bench.answer(metadata.lookups[0].span.session_id, 192)
    (load,) = bench.step().loads
    assert load.num_tokens == 192
    assert len({*sessions, load.transfer.chunks.span.session_id}) == 4


def test_what_does_not_come_in_a_moment_is_computed(bench):
    bench.add("a", output=(7,))
    (lookup,) = bench.step().lookups
    bench.answer(lookup.span.session_id, 64)
    (lookup,) = bench.step().lookups
    bench.clock.advance(0.25)
    bench.answer(lookup.span.session_id, 64)
    metadata = bench.step()
    assert metadata.lookups == []
    assert metadata.loads[0].num_tokens == 64
    assert not bench.side._waiting_since


def test_a_prompt_that_nobody_has_computed_is_not_waited_for(bench):
    bench.look_up("a", 0)
    assert bench.step().lookups == []
    assert bench.core.scheduler.running


def test_a_server_lost_during_a_repeated_lookup_is_not_waited_for(bench):
    class LosesServer(LMCacheMPConnectorScheduler):
        """The event loop loses the server behind the first time that it is read."""

        @property
        def server(self):
            server, self.__dict__["server"] = self.__dict__["server"], None
            return server

    bench.add("a", output=(7,))
    (lookup,) = bench.step().lookups
    bench.answer(lookup.span.session_id, 0)
    bench.side.__class__ = LosesServer
    metadata = bench.step()
    assert (metadata.lookups, metadata.ended) == ([], [lookup.span.session_id])
    assert bench.core.scheduler.running
