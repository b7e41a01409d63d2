"""Random histories of an engine whose cache has several groups: loads of every kind, some bad or late, requests that leave.

Everything is real but the model and the connector. What happens is drawn from a seed; prompts begin alike, the pool is small.
Whatever happens, every token is the oracle's, a seal and a hash say what is in their block, no step writes under a seal, every
request comes to an end, and nothing is left.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from dataclasses import dataclass

import pytest

from core.kv.seals import decode_seal
from core.request import RequestStatus
from core.testing.hash_model import SLOT_BYTES, HashAttention, expected_kv
from core.testing.scripted_loads import Remote

BLOCK_SIZE = 4
NUM_STEPS = 60
NAMES = "abcdefg"  # a request may be called like one that has just left
MODELS = (
    (HashAttention(),),
    (HashAttention(), HashAttention(window=6)),
    (HashAttention(window=6),),
    (HashAttention(), HashAttention(chunk=8)),
    (HashAttention(), HashAttention(window=5), HashAttention(chunk=8)),
)
KINDS = ("computed", "computed", "async", "async", "sync", "corrupt")
POLICIES = (None, None, None, "fail")
GOOD_ENDS = {RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED}
HAVE_FAILED = {  # seeds, by what was wrong when they failed
    "a load was given what a step in flight read for a hit": (357, 495),
    "what a load may be bringing was a hit while its step was in flight": (4, 22),
    "a request went back over blocks that others rely on": (125, 128, 177),
    "what a request went back over kept its seals": (1796,),
}
LEFT_BEHIND = (
    "departures",
    "empty_handed",
    "failed_recving_kv_req_ids",
    "finished_recving_kv_req_ids",
    "inflight_prefills",
    "recompute_ownership",
    "rolled_back",
    "transfer_usage",
)


@dataclass
class Course:
    """A request, and the tokens that it emits if it is not ended early."""

    request: object
    tokens: list[int]


class History:
    """The history of one engine, drawn from a seed. ``happened`` counts its events."""

    def __init__(self, make_world, load_error, seed):
        self.rng = rng = random.Random(seed)
        self.load_error = load_error
        self.loads_parts = seed % 2 == 0  # loads may bring less than the prompt
        self.attentions = rng.choice(MODELS)
        self.world = make_world(
            block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            max_model_len=40,
            with_connector=True,
            async_scheduling=rng.random() < 0.6,
            attentions=self.attentions,
            num_blocks=1 + rng.randint(rng.choice([6, 9, 11]), 26) * len(self.attentions),
            max_num_batched_tokens=rng.choice([5, 12, 64]),
            max_num_seqs=rng.randint(2, 5),
            policy=rng.choice(["fcfs", "fcfs", "priority"]),
            long_prefill_token_threshold=rng.choice([0, 3]),
            enable_caching=rng.random() < 0.85,
            watermark=rng.choice([0, 0, 0.1]),
        )
        self.text = self.world.prompt(34)
        self.failure_rate = rng.choice([0, 0, 0.05])  # of steps in which the sampler fails for a request
        self.launch_model, self.world.model.launch_model = self.world.model.launch_model, self.launch_and_fail
        connector = self.world.scheduler.connector
        self.tell_connector, connector.request_finished = connector.request_finished, self.request_finishes
        self.courses: dict[str, Course] = {}
        self.failed: set[str] = set()
        self.late: set[int] = set()  # blocks that may be written at any time
        self.contents: dict[tuple[int, bytes], bytes] = {}  # group and hash → what a block of it holds
        self.writes: list[set[int]] = []  # blocks that each step writes which has not been processed
        self.num_added = 0
        self.happened: Counter[str] = Counter()

    def run(self):
        for _ in range(NUM_STEPS):
            self.step()
        self.finish()
        self.happened["preemptions"] += self.world.scheduler.make_stats().num_preemptions
        return self.happened

    # ---- what may happen

    def step(self):
        for _ in range(self.rng.randint(0, 2)):
            self.happen()
        self.schedule()
        if self.rng.random() < 0.4:
            self.happen()
        self.finish_step()

    def schedule(self):
        """Schedule, and note which blocks the step writes."""
        self.world.schedule()
        self.writes.append(self.world.written_blocks())
        self.check_hashes()

    def finish_step(self):
        self.world.finish_step()
        del self.writes[: len(self.writes) - len(self.world.in_flight)]
        self.check()

    def request_finishes(self, request, block_ids):
        if self.failure_rate == 0 and request.status in GOOD_ENDS:
            self.check_good_end(request)
        return self.tell_connector(request, block_ids)

    def check_good_end(self, request):
        """A request that ends well could offer every block that it has filled or hit. (A failed step takes blocks back.)"""
        pool = self.world.manager.block_pool
        for manager in self.world.manager.coordinator.managers:
            table = manager.req_to_blocks[request.request_id]
            full = table[manager.num_lacking_blocks(request.request_id) : request.num_computed_tokens // BLOCK_SIZE]
            unsealed = [block for block in full if pool.seals.sealed_generation(block.block_id) != block.generation]
            assert not [block for block in unsealed if not block.is_null], request

    def happen(self):
        """Between two steps, or while one is under way."""
        what = self.rng.random()
        if what < 0.2:
            self.abort()
        if what < 0.35:
            self.add()
        elif what < 0.5:
            self.end_a_load()
        elif what < 0.6:
            self.world.spoil(*self.late)
        elif what < 0.65:
            self.end_quarantine({block_id for block_id in sorted(self.late) if self.rng.random() < 0.5})
        elif what < 0.7:
            self.complete_sends()

    def add(self):
        rng, world = self.rng, self.world
        names = [name for name in NAMES if name not in world.scheduler.requests]
        if not names:
            return
        name, kind = rng.choice(names), rng.choice(KINDS)
        self.retire(name)
        length = min(rng.randint(3, 28), world.scheduler.max_model_len - 2)
        world.script.remote.pop(name, None)
        if kind != "computed":
            most = length if kind == "async" else length - 1
            num_remote = rng.randint(1, most) if self.loads_parts and rng.random() >= 0.5 else most
            world.script.remote[name] = Remote(num_remote, kind == "async", kind == "corrupt")
        (world.script.keep.add if rng.random() < 0.15 else world.script.keep.discard)(name)
        self.num_added += 1
        request = world.add(
            name,
            self.text[:length],
            max_tokens=rng.randint(1, 8),
            priority=rng.randint(0, 1),
            arrival_time=float(self.num_added),
            kv_load_failure_policy=rng.choice(POLICIES),
        )
        num_tokens = min(request.max_tokens, world.scheduler.max_model_len - length)
        self.courses[name] = Course(request, world.expected(self.text[:length], num_tokens))
        self.learn_contents(self.text[:length] + self.courses[name].tokens)
        self.happened[kind] += 1

    def abort(self):
        alive = [name for name, request in self.world.scheduler.requests.items() if not request.status.is_finished]
        if alive:
            self.world.abort(self.rng.choice(alive))
            self.happened["aborts"] += 1

    def end_a_load(self):
        """Well, or with blocks of one group that are bad or may still be written."""
        rng, world = self.rng, self.world
        if not world.script.loading:
            return
        name = rng.choice(list(world.script.loading))
        group_id = rng.randrange(len(self.attentions))
        load = world.script.loading[name]
        table = load.tables[group_id]
        loaded = [at for at in range(load.start // BLOCK_SIZE, -(-load.end // BLOCK_SIZE)) if table[at]]
        bad = [at for at in loaded if rng.random() < 0.3]
        late = [at for at in loaded if rng.random() < 0.2]
        if rng.random() < 0.4 or not bad + late:
            world.complete_load(name)
            return
        world.end_load_partly(name, bad, late, group_id=group_id)
        self.late |= {table[at] for at in late}
        self.happened["bad loads"] += 1
        if rng.random() < 0.3:
            world.script.report.failed_recving[name] = self.load_error

    def end_quarantine(self, block_ids):
        """Only of blocks that the engine knows to be in quarantine."""
        report = self.world.script.report
        ended = block_ids - report.quarantined_block_ids
        report.unquarantined_block_ids |= ended
        self.late -= ended

    def complete_sends(self, rate=0.5):
        for name in sorted(self.world.scheduler.state.awaiting_sending):
            if self.rng.random() < rate:
                self.world.complete_send(name)
                self.happened["sends"] += 1

    def launch_and_fail(self, scheduler_output):
        """Launch a step; now and then the token of one request of it cannot be chosen."""
        finish = self.launch_model(scheduler_output)
        if self.rng.random() >= self.failure_rate:
            return finish

        def fail_one():
            output = finish()
            if output.sampled_token_ids:
                name = self.rng.choice(sorted(output.sampled_token_ids))
                del output.sampled_token_ids[name]
                output.failed[name] = self.load_error
                self.failed.add(name)
                self.happened["failed samplers"] += 1
            return output

        return fail_one

    def finish(self):
        """Let all loads arrive and the quarantine end: then everything ends."""
        world, num_idle = self.world, 0
        while world.scheduler.has_requests():
            for name in list(world.script.loading):
                world.complete_load(name)
            self.end_quarantine(set(self.late))
            self.complete_sends(1.0)
            has_report = not world.script.report.is_empty()
            self.schedule()
            self.finish_step()
            last = world.last
            did_something = has_report or last.num_scheduled_tokens or last.finished_req_ids or last.preempted_req_ids
            num_idle = 0 if did_something else num_idle + 1
            assert num_idle < 3, list(world.scheduler.requests.values())
        world.assert_clean()
        assert not [name for name in LEFT_BEHIND if getattr(world.scheduler.state, name)]
        for name in list(self.courses):
            self.retire(name)

    # ---- what must hold

    def check(self):
        self.world.assert_sound()
        for name, tokens in self.world.tokens.items():
            assert tokens == self.courses[name].tokens[: len(tokens)], name
        self.check_seals()
        self.check_hashes()

    def check_seals(self):
        """Every sealed block has the content that its seal names, and no open load can write into it."""
        pool = self.world.manager.block_pool
        late = self.late | self.world.scheduler.state.quarantined
        for block in pool.blocks[1:]:
            if pool.seals.sealed_generation(block.block_id) != block.generation:
                continue
            seal = decode_seal(pool.seals.row(block.block_id))
            if seal is not None and seal.num_tokens == BLOCK_SIZE:
                assert block.block_id not in late, block
                self.check_content(block.block_id, seal.group_id, seal.block_hash, "sealed")

    def check_hashes(self):
        """Every block that later requests may hit has the content of its hash, or a step in flight will write it."""
        unwritten = set().union(*self.writes)
        for block in self.world.manager.block_pool.blocks[1:]:
            if block.block_hash is not None and block.block_id not in unwritten:
                self.check_content(block.block_id, block.group_id, block.block_hash, "hashed")

    def check_content(self, block_id, group_id, block_hash, what):
        assert self.world.model.read_block(block_id) == self.contents[group_id, block_hash], (what, block_id, group_id)
        self.happened[f"{what} blocks"] += 1

    def learn_contents(self, token_ids):
        """Note what the blocks of a sequence must hold."""
        size = BLOCK_SIZE * SLOT_BYTES
        block_hashes = self.world.hasher.hash_request_blocks(array("i", token_ids))
        if not block_hashes or (0, block_hashes[-1]) in self.contents:
            return
        for group_id in range(len(self.attentions)):
            kv = expected_kv(token_ids, self.attentions, group_id)
            for index, block_hash in enumerate(block_hashes):
                self.contents[group_id, block_hash] = kv[index * size : (index + 1) * size]

    def retire(self, name):
        """A request that is over has put out all its tokens, unless it was aborted or failed."""
        course = self.courses.pop(name, None)
        if course is None:
            return
        tokens, reason = self.world.tokens.pop(name, []), self.world.ends.pop(name, None)
        if reason == "error":
            assert course.request.kv_load_failure_policy == "fail" or name in self.failed
        elif reason is not None:
            assert tokens == course.tokens
        self.failed.discard(name)
        self.happened[f"ends by {reason}"] += 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "start", [*range(0, 80, 20), *(pytest.param(start, marks=pytest.mark.full) for start in range(80, 1600, 20))]
)
def test_random_histories_end_well(make_world, load_error, start):
    happened = Counter()
    for seed in range(start, start + 20):
        happened += History(make_world, load_error, seed).run()
    for what in ("sealed blocks", "hashed blocks", "bad loads", "aborts", "sends", "ends by length", "ends by error"):
        assert happened[what] > 0, f"no {what}: the histories show nothing"


@pytest.mark.parametrize("seed", [seed for seeds in HAVE_FAILED.values() for seed in seeds])
def test_histories_that_have_gone_wrong_end_well(make_world, load_error, seed):
    History(make_world, load_error, seed).run()
