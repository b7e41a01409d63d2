"""Random histories of arrivals, aborts, loads, failures, delays and preemptions: each token that comes out is right.

Scheduler, KV cache manager and HashModel are real; the connector is scripted. The oracle is the HashModel over the plain
sequence. Pools are tiny, so that preemption, waiting loads and cache eviction are the rule.
"""

import os
from array import array
from collections import Counter
from itertools import product

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from core.kv.invariants import find_violations
from core.kv.seals import BROKEN, decode_seal
from core.request import RequestStatus
from core.testing.hash_model import SLOT_BYTES
from core.wire.messages import ErrorInfo

NUM_EXAMPLES = int(os.environ.get("KVFERRY_TEST_EXAMPLES", "60"))
IN_QUEUES = {RequestStatus.WAITING, RequestStatus.PREEMPTED}
HOLDING = {*IN_QUEUES, RequestStatus.WAITING_FOR_REMOTE_KVS}


class SchedulerMachine(RuleBasedStateMachine):
    make_world: staticmethod
    make_remote: staticmethod
    kv_of: staticmethod
    load_error: ErrorInfo
    async_scheduling = False

    def __init__(self) -> None:
        super().__init__()
        self.prompts: dict[str, list[int]] = {}
        self.max_tokens: dict[str, int] = {}
        self.aborted: set[str] = set()
        self.failing: set[str] = set()  # the load failed and has not ended
        self.bad: dict[str, set[int]] = {}  # positions of blocks that were reported during their load
        self.may_fail: set[str] = set()  # by their policy
        self.has_rolled_back = False
        self.sending: set[str] = set()
        self.is_stuck_excused = False

    @initialize(
        num_blocks=st.integers(4, 12),
        max_num_batched_tokens=st.sampled_from([3, 8, 64]),
        max_num_seqs=st.integers(1, 5),
        policy=st.sampled_from(["fcfs", "priority"]),
        long_prefill_token_threshold=st.sampled_from([0, 0, 5]),
        hash_block_size=st.sampled_from([1, 2, 4]),
        enable_caching=st.sampled_from([True, True, True, False]),
        watermark=st.sampled_from([0.0, 0.0, 0.2]),
        kv_load_failure_policy=st.sampled_from(["recompute", "recompute", "fail"]),
    )
    def build(self, **config):
        self.world = self.make_world(
            block_size=4, max_model_len=40, with_connector=True, async_scheduling=self.async_scheduling, **config
        )
        self.kv_by_hash = {}
        for family, num_given in product((0, 1), (1, 2, 3)):  # a start that is cut short continues differently
            start = self.world.prompt(num_given, seed=family)
            self.learn_kv([*start, *self.world.expected(start, 40)])

    # ---- what may happen

    @rule(
        length=st.integers(1, 26),
        family=st.integers(0, 1),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 2),
        continued=st.integers(0, 3),
        remote=st.sampled_from(["none", "none", "async", "async", "sync", "corrupt", "later"]),
        remote_tokens=st.integers(1, 24),
        is_kept=st.booleans(),
        own_policy=st.sampled_from([None, None, "recompute", "fail"]),
        stop_at=st.integers(1, 30),
    )
    def add(self, *, length, family, max_tokens, priority, continued, remote, remote_tokens, is_kept, own_policy, stop_at):
        world = self.world
        request_id = f"r{len(self.prompts)}"
        prompt = self.family_prompt(family, length)
        output = world.expected(prompt, min(continued, max_tokens - 1))
        if len(prompt) + len(output) >= world.scheduler.max_model_len:
            return
        if remote != "none":
            num_tokens = None if remote == "later" else min(remote_tokens, length)
            is_async = remote not in {"sync", "corrupt"}
            world.script.remote[request_id] = self.make_remote(num_tokens, is_async, remote == "corrupt")
        if is_kept:
            world.script.keep.add(request_id)
        if (own_policy or world.config.kv_load_failure_policy) == "fail":
            self.may_fail.add(request_id)
        self.prompts[request_id] = [*prompt, *output]
        self.max_tokens[request_id] = max_tokens - len(output)
        stop = set()
        if stop_at < self.max_tokens[request_id]:
            self.max_tokens[request_id] = stop_at
            stop = set(world.expected([*prompt, *output], stop_at)[-1:])
        world.add(
            request_id,
            prompt,
            max_tokens=max_tokens,
            priority=priority,
            output_token_ids=output,
            arrival_time=float(len(self.prompts)),
            kv_load_failure_policy=own_policy,
            stop_token_ids=frozenset(stop),
        )

    def family_prompt(self, family: int, length: int) -> list[int]:
        """Return the first tokens of one long text, so that prompts of a family, and their outputs, share prefixes."""
        start = self.world.prompt(3, seed=family)
        return [*start, *self.world.expected(start, 24)][:length]

    def learn_kv(self, text: list[int]) -> None:
        """Know the KV of the last block of every prefix of a text, by the prefix's hash."""
        kv, hasher = self.kv_of(text), self.world.hasher
        hashes = hasher.hash_request_blocks(tokens := array("i", text))
        for end in range(1, len(text) + 1):
            start = (end - 1) // 4 * 4
            self.kv_by_hash[hasher.prefix_hash(hashes, tokens, end)] = kv[start * SLOT_BYTES : end * SLOT_BYTES]

    @rule()
    def step(self):
        self.check_step()

    @rule(count=st.integers(2, 6))
    def several_steps(self, count):
        for _ in range(count):
            self.check_step()

    @rule(data=st.data())
    def abort(self, data):
        if alive := self.alive():
            self.abort_now(data.draw(st.sampled_from(alive)))

    @rule(data=st.data())
    def abort_between_schedule_and_output(self, data):
        self.world.schedule()
        if alive := self.alive():
            self.abort_now(data.draw(st.sampled_from(alive)))
        self.world.finish_step()
        self.note_ends()

    @rule(data=st.data())
    def load_arrives(self, data):
        if loading := self.loading():
            self.world.complete_load(data.draw(st.sampled_from(loading)))

    @rule(data=st.data(), is_terminal=st.booleans())
    def load_fails(self, data, is_terminal):
        if loading := self.loading():
            request_id = data.draw(st.sampled_from(loading))
            self.world.fail_load(request_id, is_terminal)
            if not is_terminal:
                self.failing.add(request_id)

    @rule(data=st.data(), is_whole=st.booleans())
    def load_ends_with_bad_blocks_and_open_reads(self, data, is_whole):
        """The bad blocks are recomputed; the open reads may write into theirs until the quarantine ends."""
        if loading := self.loading():
            request_id = data.draw(st.sampled_from(loading))
            positions = self.loaded_positions(request_id)
            positions = positions[data.draw(st.integers(0, len(positions) - 1)) :]  # something before them is often good
            subsets = st.sets(st.sampled_from(positions))
            self.world.end_load_partly(request_id, data.draw(subsets), data.draw(subsets))
            if is_whole:
                self.world.script.report.failed_recving[request_id] = self.load_error

    @rule(data=st.data())
    def loaded_block_is_invalid_while_others_still_load(self, data):
        if loading := self.loading():
            request_id = data.draw(st.sampled_from(loading))
            position = data.draw(st.sampled_from(self.loaded_positions(request_id)))
            self.world.script.report.invalid_block_ids.add(self.world.script.loading[request_id].block_ids[position])
            self.bad.setdefault(request_id, set()).add(position)
            self.failing.add(request_id)

    def loaded_positions(self, request_id: str) -> list[int]:
        """Return the positions of the blocks that a load writes, in its table."""
        load = self.world.script.loading[request_id]
        return list(range(load.start // 4, -(-load.end // 4)))

    @rule(data=st.data())
    def failed_load_ends_late(self, data):
        if self.failing:
            self.end_failing(data.draw(st.sampled_from(sorted(self.failing))))

    def end_failing(self, request_id: str) -> None:
        self.failing.remove(request_id)
        if request_id in self.bad:
            self.world.end_load_partly(request_id, self.bad.pop(request_id))
        else:
            self.world.end_load(request_id)

    @rule(data=st.data(), min_references=st.integers(0, 2))
    def a_block_goes_bad_within_a_step(self, data, min_references):
        """Make any block bad, with any owner, loaded or not: the step that reads it is the one that reports it."""
        self.world.drain()
        self.note_ends()
        self.world.schedule()
        blocks = self.world.manager.block_pool.blocks[1:]
        found = [block.block_id for block in blocks if block.ref_cnt >= min_references]
        if found:
            block_id = data.draw(st.sampled_from(found))
            self.world.spoil(block_id)
            self.world.script.report.invalid_block_ids.add(block_id)
        self.world.finish_step()
        self.note_ends()

    @rule()
    def late_bytes_arrive(self):
        self.world.let_late_bytes_arrive()

    @rule()
    def late_bytes_arrive_within_a_step(self):
        self.world.schedule()
        self.world.let_late_bytes_arrive()
        self.world.finish_step()
        self.note_ends()

    @rule(data=st.data())
    def quarantine_ends(self, data):
        if quarantined := sorted(self.quarantined):
            ended = data.draw(st.sets(st.sampled_from(quarantined)))
            self.world.script.report.unquarantined_block_ids |= ended

    @rule(data=st.data(), num_tokens=st.integers(0, 24))
    def connector_makes_up_its_mind(self, data, num_tokens):
        deferred = sorted(name for name, remote in self.world.script.remote.items() if remote.num_tokens is None)
        if deferred:
            request_id = data.draw(st.sampled_from(deferred))
            self.world.script.remote[request_id].num_tokens = min(num_tokens, len(self.prompts[request_id]))

    @rule(data=st.data())
    def reader_is_done(self, data):
        if self.sending:
            request_id = data.draw(st.sampled_from(sorted(self.sending)))
            self.sending.remove(request_id)
            self.world.complete_send(request_id)

    # ---- what must hold

    @invariant()
    def every_request_is_in_one_place_with_the_right_status(self):
        scheduler = self.world.scheduler
        places = Counter()
        for place, statuses in (
            (scheduler.running, {RequestStatus.RUNNING}),
            (scheduler.waiting, IN_QUEUES),
            (scheduler.kv_holding_waiting, HOLDING),
        ):
            for request in place:
                assert request.status in statuses, request
                places[request.request_id] += 1
        unfinished = {name for name, request in scheduler.requests.items() if not request.status.is_finished}
        assert places == Counter(dict.fromkeys(unfinished, 1))

    @invariant()
    def blocks_are_held_by_known_requests_only(self):
        scheduler, manager = self.world.scheduler, self.world.manager
        references = self.held_blocks()
        for name in scheduler.requests:
            references.update(manager.get_block_ids(name)[0])
        pool = manager.block_pool
        assert {block.block_id: block.ref_cnt for block in pool.blocks if block.ref_cnt} == dict(references)
        assert pool.num_free_blocks == pool.num_usable_blocks - len(references)
        for request in scheduler.waiting:
            assert self.world.num_blocks_of(request.request_id) == 0
        for request in (*scheduler.running, *scheduler.kv_holding_waiting):
            num_blocks, num_full = self.world.num_blocks_of(request.request_id), request.num_computed_tokens // 4
            num_needed = -(-request.num_computed_tokens // 4)
            assert num_needed <= num_blocks, request
            assert num_blocks <= num_full + 1 or self.has_rolled_back, request

    @invariant()
    def nobody_computes_in_a_quarantined_block(self):
        scheduler = self.world.scheduler
        for request in scheduler.running:
            assert not self.quarantined & set(self.world.manager.get_block_ids(request.request_id)[0]), request
        assert scheduler.make_stats().num_quarantined_blocks == len(self.quarantined)
        assert not any(self.world.manager.block_pool.blocks[block_id].block_hash for block_id in self.quarantined)

    @invariant()
    def blocks_hold_what_their_seals_say(self):
        pool, model = self.world.manager.block_pool, self.world.model
        known_to_be_bad = self.world.script.report.invalid_block_ids
        for block in pool.blocks:
            if pool.seals.sealed_generation(block.block_id) == BROKEN or block.block_id in known_to_be_bad:
                continue
            seal = decode_seal(pool.seals.row(block.block_id))
            kv = self.kv_by_hash[seal.block_hash]
            assert len(kv) == seal.num_tokens * SLOT_BYTES
            assert model.read_block(block.block_id).startswith(kv), block

    @invariant()
    def what_can_be_hit_has_a_seal(self):
        """Or a step in flight fills it, also for a request that has left."""
        pool, being_filled = self.world.manager.block_pool, self.blocks_being_filled()
        for block in pool.blocks:
            if block.block_hash is not None and block.block_id not in being_filled:
                assert pool.seals.sealed_generation(block.block_id) == block.generation, block

    @invariant()
    def what_a_request_relies_on_to_be_sealed_is_sealed(self):
        """Or a step in flight fills it: above all its hits, which it never seals itself."""
        being_filled = self.blocks_being_filled()
        scheduler, manager = self.world.scheduler, self.world.manager
        seals, (group,) = manager.block_pool.seals, manager.coordinator.managers
        for request in scheduler.running:
            if not scheduler.state.recompute_ownership.holds_back(request.request_id):
                for block in manager.get_blocks(request.request_id).blocks[0][: group.num_sealed_block[request.request_id]]:
                    is_sealed = seals.sealed_generation(block.block_id) == block.generation
                    assert is_sealed or block.block_id in being_filled, (request, block)

    def blocks_being_filled(self) -> set[int]:
        """Return the blocks that steps in flight fill, if they are going to seal them."""
        state, manager = self.world.scheduler.state, self.world.manager
        found = set()
        for request in state.running:
            loads = any(request in step.synchronous_loads for step in state.inflight_steps)
            start = 0 if loads else request.num_computed_tokens - request.num_in_flight_tokens
            found.update(manager.get_block_ids(request.request_id)[0][start // 4 :])
        for departure in state.departures:
            start = 0 if departure.request in departure.step.synchronous_loads else departure.start
            found.update(departure.live_block_ids()[0][start // 4 :])
        return found

    @invariant()
    def the_cache_is_consistent(self):
        assert find_violations(self.world.manager, self.held_blocks()) == []

    def held_blocks(self) -> Counter[int]:
        """Count the references that no block table accounts for."""
        return self.world.held_blocks()

    @property
    def quarantined(self) -> set[int]:
        return self.world.scheduler.state.quarantined

    @invariant()
    def waiting_requests_are_in_order(self):
        """Requests that had blocks before come first, even before requests that were passed over then."""
        scheduler, state = self.world.scheduler, self.world.scheduler.state
        waiting = [
            (bool(request.num_preemptions) or request.request_id in state.empty_handed, request)
            for request in scheduler.waiting
        ]
        had_blocks = [had for had, _ in waiting]
        arrivals = [request.arrival_time for had, request in waiting if not had]
        if self.world.config.policy == "fcfs":
            assert arrivals == sorted(arrivals)
            assert had_blocks == sorted(had_blocks, reverse=True)

    @invariant()
    def unfinished_prefills_are_known(self):
        state = self.world.scheduler.state
        holders = {request.request_id: request for request in (*state.running, *state.kv_holding_waiting)}
        assert set(state.inflight_prefills) <= set(holders)
        lacking = {name for name, request in holders.items() if request.num_tokens - request.num_computed_tokens > 1}
        assert lacking <= set(state.inflight_prefills)

    @invariant()
    def tokens_are_those_of_the_oracle(self):
        for name, tokens in self.world.tokens.items():
            assert tokens == self.world.expected(self.prompts[name], len(tokens)), name
            assert len(tokens) <= self.max_tokens[name]

    def check_step(self) -> None:
        """Run one step and check its budget, and that it does something if something can be done."""
        world, config = self.world, self.world.config
        parked_before = set(world.script.loading)
        output = world.schedule()
        assert sum(output.num_scheduled_tokens.values()) == output.total_num_scheduled_tokens
        assert output.total_num_scheduled_tokens <= config.max_num_batched_tokens
        assert all(count > 0 for count in output.num_scheduled_tokens.values())
        assert len(world.scheduler.running) <= config.max_num_seqs
        assert len(output.scheduled_cached_reqs.req_ids) + len(output.scheduled_new_reqs) == len(output.num_scheduled_tokens)
        reports = world.script.report
        did_something = bool(output.num_scheduled_tokens or output.preempted_req_ids or not reports.is_empty())
        did_something |= bool(world.in_flight)
        world.finish_step()
        self.note_ends()
        if not did_something and set(world.script.loading) == parked_before:
            if not self.waits_for_others():
                assert not world.scheduler.has_unfinished_requests(), "the engine has work and does nothing"
            if not output.finished_req_ids:
                self.check_stall()

    def check_stall(self) -> None:
        """The engine sleeps after a step in which nothing happened, so one more must not do anything either."""
        output = self.world.schedule()
        done = output.num_scheduled_tokens or output.preempted_req_ids or output.finished_req_ids
        assert not done, "the engine would have slept too early"
        assert self.world.finish_step() == []

    def waits_for_others(self) -> bool:
        script = self.world.script
        alive = set(self.alive())
        is_deferred = any(remote.num_tokens is None for name, remote in script.remote.items() if name in alive)
        return bool(script.loading or self.failing or self.sending or is_deferred or self.quarantined)

    def alive(self) -> list[str]:
        return [name for name, request in self.world.scheduler.requests.items() if not request.status.is_finished]

    def loading(self) -> list[str]:
        return sorted(set(self.world.script.loading) - self.failing)

    def abort_now(self, request_id: str) -> None:
        assert self.world.abort(request_id) == [request_id]
        self.aborted.add(request_id)

    def note_ends(self) -> None:
        state = self.world.scheduler.state
        self.has_rolled_back |= bool(state.rolled_back or state.failed_recving_kv_req_ids)
        for name, reason in self.world.ends.items():
            if name in self.world.script.keep and reason in ("stop", "length"):
                self.world.script.keep.remove(name)
                self.sending.add(name)

    def teardown(self) -> None:
        """Let everything end; then nothing is left, and every request has all its tokens or a declared error."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for _ in range(600):
            if not world.scheduler.has_requests():
                break
            for remote in world.script.remote.values():
                remote.num_tokens = remote.num_tokens or 0
            for request_id in sorted(self.failing):
                self.end_failing(request_id)
            world.end_quarantine()
            for request_id in sorted(world.script.loading):
                world.complete_load(request_id)
            for request_id in sorted(self.sending):
                world.complete_send(request_id)
            self.sending.clear()
            self.check_step()
        world.assert_clean()
        assert set(world.ends) | self.aborted == set(self.prompts)
        for name, reason in world.ends.items():
            num_tokens = min(self.max_tokens[name], world.scheduler.max_model_len - len(self.prompts[name]))
            assert reason != "error" or name in self.may_fail, name
            assert reason == "error" or len(world.tokens[name]) == num_tokens, name
            if reason == "length":
                assert world.tokens[name] == world.expected(self.prompts[name], num_tokens)


@pytest.fixture
def run_machine(make_world, remote, kv_of, load_error):
    class Machine(SchedulerMachine):
        pass

    Machine.make_world, Machine.make_remote = staticmethod(make_world), staticmethod(remote)
    Machine.kv_of, Machine.load_error = staticmethod(kv_of), load_error

    def run(num_examples: int, async_scheduling: bool = False) -> None:
        Machine.async_scheduling = async_scheduling
        _run(Machine, num_examples)

    return run


def _run(machine: type[SchedulerMachine], num_examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
def test_random_histories_give_the_oracles_tokens_and_leak_nothing(run_machine):
    run_machine(NUM_EXAMPLES)


@pytest.mark.slow
def test_random_histories_with_async_scheduling(run_machine):
    run_machine(NUM_EXAMPLES // 2, async_scheduling=True)


@pytest.mark.slow
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_many_random_histories(run_machine, async_scheduling):
    run_machine(settings.default.max_examples, async_scheduling)
