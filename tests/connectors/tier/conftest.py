"""A tier whose every answer and copy comes on command, and a whole engine without weights."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from connectors.pool_access import open_pool
from connectors.tier.scheduler import TierConnectorScheduler, TierSettings
from connectors.tier.transfer import TierTransfer
from connectors.tier.worker import TierConnectorWorker
from core.config_workers import SchedulerSection
from core.constants import HASH_BLOCK_SIZE
from core.engine.core import EngineCore
from core.errors import CorruptBlock, StaleBlock
from core.kv.hashing import BlockHasher
from core.kv.manager import KVCacheManager
from core.request import NewRequest
from core.sched.scheduler import Scheduler
from core.testing.clock import FakeClock
from core.testing.hash_model import FULL, HashModel, expected_tokens, hash_model_kv_config
from core.wire.sampling import SamplingParams
from kvstore.base import GetTicket, LookupTicket, PutTicket, StoredBlock, StoreStatistics
from kvstore.seal_check import BlockVerifier

FINGERPRINT = b"tiers"
BLOCK_SIZE = 16


@dataclass
class ScriptedStore:
    """A ``BlockStore`` that does nothing by itself: ``answer`` decides when, and ``is_lost`` whether, a ticket is answered."""

    capacity: int = 10_000
    blocks: dict = field(default_factory=dict)  # key -> [content, seal]
    open: list = field(default_factory=list)
    pinned: list = field(default_factory=list)
    is_lost: bool = False
    answers_at_once: bool = True
    num_lookups: int = 0
    num_gets: int = 0
    max_pins: int = 10_000
    rejected: dict = field(default_factory=dict)

    @property
    def is_connected(self):
        return not self.is_lost

    def lookup(self, keys):
        self.num_lookups += 1
        return self._opened(LookupTicket(keys, self.num_lookups))

    def get(self, keys):
        self.num_gets += 1
        ticket = GetTicket(keys, self.num_gets)
        self.pinned.append(ticket)
        return self._opened(ticket)

    def put(self, keys, blocks, seals):
        return self._opened(PutTicket(keys, 0, blocks=blocks, seals=seals))

    def release(self, ticket):
        self.pinned.remove(ticket)

    def copy_out(self, block, target):
        target[:] = block.content
        try:
            BlockVerifier().check(block.key, block.seal, target)
        except (CorruptBlock, StaleBlock) as error:
            self.rejected[error.code] = self.rejected.get(error.code, 0) + 1
            self.blocks.pop(block.key, None)
            raise

    def verify(self, block):
        BlockVerifier().check(block.key, block.seal, block.content)

    def statistics(self):
        return StoreStatistics(lookups=self.num_lookups, rejected=self.rejected)

    def close(self):
        assert not self.pinned, "a get was never released"

    def answer(self, count=None):
        """Answer the oldest open tickets."""
        chosen, self.open = self.open[:count], self.open[count:] if count is not None else []
        for ticket in chosen:
            self._answer(ticket)

    def _opened(self, ticket):
        if self.answers_at_once:
            self._answer(ticket)
        else:
            self.open.append(ticket)
        return ticket

    def _answer(self, ticket):
        if self.is_lost:
            ticket.failure = "lost"
        elif isinstance(ticket, LookupTicket):
            ticket.hits = [key in self.blocks for key in ticket.keys]
        elif isinstance(ticket, GetTicket):
            num_pinned = sum(block is not None for other in self.pinned for block in other.blocks)
            found = [self._stored(key) for key in ticket.keys]
            room = max(0, self.max_pins - num_pinned)
            ticket.withheld = [index for index, block in enumerate(found) if block is not None][room:]
            ticket.blocks = [None if index in ticket.withheld else block for index, block in enumerate(found)]
        else:
            ticket.stored = [self._store(*block) for block in zip(ticket.keys, ticket.blocks, ticket.seals, strict=True)]
        ticket.is_done = True

    def _stored(self, key):
        if key not in self.blocks:
            return None
        content, seal = self.blocks[key]
        return StoredBlock(key, memoryview(bytes(content)), seal, lambda: True)

    def _store(self, key, content, seal):
        if key not in self.blocks and len(self.blocks) >= self.capacity:
            return False
        self.blocks.setdefault(key, [bytearray(content), seal])
        return True

    def corrupt(self, rng):
        """Change a bit of one block."""
        if self.blocks:
            content, _ = self.blocks[rng.choice(sorted(self.blocks))]
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


class TierEngine:
    """Scheduler, pool and model of hashes with a tier, all driven by hand. ``move`` is what the mover's thread does.

    ``make_model`` makes the model from what ``HashModel`` takes; ``open_pool`` the mover's way to the model's pool.
    """

    def __init__(
        self,
        store,
        *,
        num_blocks=40,
        attentions=FULL,
        max_tokens=64,
        make_model=HashModel,
        async_scheduling=False,
        open_pool=lambda model: open_pool(model.region),
        **settings,
    ):
        self.store = store
        self.attentions = attentions
        self.clock = FakeClock()
        self.watched = []
        self.mover = None
        self.worker = TierConnectorWorker("tier", self._submit)
        self.model = make_model(num_blocks, BLOCK_SIZE, self.worker_side(), incarnation=3, attentions=attentions)
        self.scheduler = TierConnectorScheduler(
            TierSettings(name="tier", **settings), self.model.region.layout, self.clock, lambda: store, self.watched.append
        )
        region = self.model.region
        self.mover = TierTransfer("tier", store, open_pool(self.model), region.seals, region.block_bytes, self.clock)
        self.manager = KVCacheManager(
            hash_model_kv_config(num_blocks, BLOCK_SIZE, attentions),
            max_model_len=500,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=HASH_BLOCK_SIZE,
            max_in_flight_tokens=max_tokens * (2 if async_scheduling else 1),
            seals=self.model.seals,
        )
        mode = "on" if async_scheduling else "off"
        config = SchedulerSection(max_num_batched_tokens=max_tokens, max_num_seqs=6, async_scheduling=mode)
        core_scheduler = Scheduler(config, self.manager, 500, self.scheduler_side(), self.clock)
        self.core = EngineCore(core_scheduler, self.model, BlockHasher(FINGERPRINT), self.model.vocab_size)
        self.prompts = {}
        self.tokens = {}
        self.stats = {}
        self.usage = {}
        self.finished = {}

    def worker_side(self):
        """Return what the model calls."""
        return self.worker

    def scheduler_side(self):
        """Return what the scheduler calls."""
        return self.scheduler

    def _submit(self, metadata):
        self.mover.submit(metadata)

    def add(self, request_id, prompt, max_tokens=4, cache_salt=""):
        sampling = SamplingParams(max_tokens=max_tokens)
        self.prompts[request_id], self.tokens[request_id] = list(prompt), []
        self.core.add_request(
            NewRequest(request_id=request_id, prompt_token_ids=list(prompt), sampling=sampling, cache_salt=cache_salt)
        )

    def step(self):
        self.note(self.core.step())

    def note(self, outputs):
        for output in outputs:
            self.tokens[output.request_id] += output.new_token_ids
            if output.prefill_stats is not None:
                self.stats[output.request_id] = output.prefill_stats
            if output.transfer_usage is not None:
                self.usage[output.request_id] = output.transfer_usage
            if output.finish_reason is not None:
                self.finished[output.request_id] = output.finish_reason

    def move(self, count=1000):
        """Let the mover do something ``count`` times, or until it has nothing to do; its reports wake the engine."""
        for _ in range(count):
            has_moved = self.mover.step()
            for report in self.mover.take_reports():
                self.worker.report(report)
            if not has_moved:
                return

    def run(self, max_steps=3000):
        """Go on until nothing is left to do."""
        self.drive(self.note, max_steps)

    def drive(self, on_outputs, max_steps=3000):
        """Go on until nothing is left to do; ``on_outputs`` is given what each step puts out."""
        for _ in range(max_steps):
            self.store.answer()
            self.move()
            on_outputs(self.core.step())
            if not self.core.has_requests() and not self.scheduler.num_saving_blocks and not self.mover.is_waiting:
                return
        raise AssertionError(f"no end: {self.core.scheduler.requests}")

    def forget(self):
        """Lose what the pool holds."""
        assert self.manager.reset_prefix_cache()
        self.model.rows[:] = 0xAB

    def expected(self, request_id):
        """Return what a request's tokens must be, as far as it has come."""
        return expected_tokens(
            self.prompts[request_id], len(self.tokens[request_id]), self.model.vocab_size, attentions=self.attentions
        )

    def assert_is_right(self):
        """Check every token, and that nothing is held."""
        for request_id, tokens in self.tokens.items():
            assert tokens == self.expected(request_id), f"{request_id} has wrong tokens"

    def assert_is_empty(self):
        pool = self.manager.block_pool
        assert pool.num_free_blocks == pool.num_usable_blocks
        assert not self.scheduler.has_pending_push_work()
        assert not self.scheduler.has_pending_block_frees()
        assert not self.store.pinned


@pytest.fixture
def store():
    return ScriptedStore()


@pytest.fixture
def tier_engine(store):
    return lambda **settings: TierEngine(settings.pop("store", store), **settings)


@pytest.fixture
def scripted_store():
    return ScriptedStore


@pytest.fixture
def rng():
    return random.Random(1)
