"""Random failures: loads that bring garbage, blocks that go bad while they are shared, bytes that come late.

Everything is real but the connector. All prompts begin alike, so that most blocks are shared, and the pool is small. Whatever
happens, every token is the oracle's, every request ends as its policy says, and nothing is left.
"""

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from core.request import RequestStatus

NUM_EXAMPLES = int(os.environ.get("KVFERRY_TEST_EXAMPLES", "60"))
BLOCK_SIZE = 4
KINDS = ["computed", "computed", "async", "async", "sync", "corrupt"]
POLICIES = [None, None, None, "fail"]

choices = st.integers(0, 20)  # an index into the list at hand
masks = st.integers(0, 63)  # bit i stands for the i-th block that a load writes


class FailureMachine(RuleBasedStateMachine):
    make_world: staticmethod
    make_remote: staticmethod
    load_error: object
    async_scheduling = False

    @initialize(
        num_blocks=st.integers(10, 24),
        max_num_batched_tokens=st.sampled_from([5, 12, 64]),
        max_num_seqs=st.integers(2, 5),
        policy=st.sampled_from(["fcfs", "fcfs", "priority"]),
        long_prefill_token_threshold=st.sampled_from([0, 3]),  # then others run alongside the request that recomputes
        kinds=st.lists(st.sampled_from(KINDS), min_size=2, max_size=4),
    )
    def build(self, kinds, **config):
        config |= {"with_connector": True, "hash_block_size": 4, "async_scheduling": self.async_scheduling}
        self.world = self.make_world(block_size=BLOCK_SIZE, max_model_len=40, **config)
        self.text = self.world.prompt(30)
        self.requests = {}
        self.aborted = set()
        self.late = set()  # blocks that may be written at any time
        for kind in kinds:
            self.add(kind, 20, 6, None, 0)
            self.world.step()

    # ---- what may happen

    @rule(
        kind=st.sampled_from(KINDS),
        length=st.integers(3, 28),
        max_tokens=st.integers(1, 8),
        policy=st.sampled_from(POLICIES),
        priority=st.integers(0, 1),
    )
    def add(self, kind, length, max_tokens, policy, priority):
        name = f"r{len(self.requests)}"
        if kind != "computed":
            num_tokens = length if kind == "async" else length - 1
            self.world.script.remote[name] = self.make_remote(num_tokens, kind == "async", kind == "corrupt")
        self.requests[name] = self.world.add(
            name,
            self.text[:length],
            max_tokens=max_tokens,
            priority=priority,
            arrival_time=len(self.requests) + 1.0,
            kv_load_failure_policy=policy,
        )

    @rule(count=st.integers(1, 3))
    def step(self, count):
        for _ in range(count):
            self.world.step()

    @precondition(lambda self: self.world.script.loading)
    @rule(which=choices, good=st.booleans(), bad=masks, late=masks, first=st.integers(0, 3), is_whole=st.booleans())
    def load_ends(self, which, good, bad, late, first, is_whole):
        names = list(self.world.script.loading)
        name = names[which % len(names)]
        load = self.world.script.loading[name]
        positions = range(load.start // BLOCK_SIZE, -(-load.end // BLOCK_SIZE))
        if good:
            self.world.complete_load(name)
            return
        chosen = [[at for bit, at in enumerate(positions) if (mask << first) >> bit & 1] for mask in (bad, late)]
        self.world.end_load_partly(name, *chosen)
        self.late |= {load.block_ids[at] for at in chosen[1]}
        if is_whole:
            self.world.script.report.failed_recving[name] = self.load_error

    @precondition(lambda self: self.world.script.loading)
    @rule(which=choices)
    def loading_block_is_known_to_be_bad_already(self, which):
        """It is reported once more, with the others, when the load ends."""
        names = list(self.world.script.loading)
        load = self.world.script.loading[names[which % len(names)]]
        position = load.start // BLOCK_SIZE + which % (-(-load.end // BLOCK_SIZE) - load.start // BLOCK_SIZE)
        self.world.script.report.invalid_block_ids.add(load.block_ids[position])

    @precondition(lambda self: self.world.scheduler.running)
    @rule(which=choices, only_shared=st.booleans())
    def block_goes_bad(self, which, only_shared):
        """In the step that reports it: what it computes from there counts for nothing."""
        self.world.drain()
        self.world.schedule()
        blocks = self.world.manager.block_pool.blocks
        found = [block.block_id for block in blocks if block.ref_cnt > (1 if only_shared else 0)]
        if found:
            block_id = found[which % len(found)]
            self.world.spoil(block_id)
            self.world.script.report.invalid_block_ids.add(block_id)
        self.world.finish_step()

    @precondition(lambda self: self.late)
    @rule(is_within_a_step=st.booleans())
    def late_bytes_arrive(self, is_within_a_step):
        if is_within_a_step:
            self.world.schedule()
        self.world.spoil(*self.late)
        if is_within_a_step:
            self.world.finish_step()

    @precondition(lambda self: self.late)
    @rule(mask=masks)
    def quarantine_ends(self, mask):
        self.end_quarantine({block_id for bit, block_id in enumerate(sorted(self.late)) if mask >> bit & 1})

    def end_quarantine(self, block_ids):
        """Only of blocks that the engine knows to be in quarantine."""
        report = self.world.script.report
        ended = block_ids - report.quarantined_block_ids
        report.unquarantined_block_ids |= ended
        self.late -= ended

    @precondition(lambda self: self.alive)
    @rule(which=choices, is_within_a_step=st.booleans())
    def abort(self, which, is_within_a_step):
        name = self.alive[which % len(self.alive)]
        if is_within_a_step:
            self.world.schedule()
        self.world.abort(name)
        self.aborted.add(name)
        if is_within_a_step:
            self.world.finish_step()

    # ---- what must hold

    @property
    def quarantined(self) -> set[int]:
        return self.world.scheduler.state.quarantined

    @property
    def alive(self) -> list[str]:
        return [name for name, request in self.world.scheduler.requests.items() if not request.status.is_finished]

    @invariant()
    def tokens_are_the_oracles(self):
        for name, tokens in self.world.tokens.items():
            prompt = self.requests[name].all_token_ids[: self.requests[name].num_prompt_tokens].tolist()
            assert tokens == self.world.expected(prompt, len(tokens)), name

    @invariant()
    def cache_is_consistent(self):
        self.world.assert_sound()

    @invariant()
    def nobody_writes_into_a_quarantined_block(self):
        for request in self.world.scheduler.running:
            assert not self.quarantined & set(self.world.manager.get_block_ids(request.request_id)[0]), request
        report = self.world.script.report
        assert self.quarantined == self.late - report.quarantined_block_ids | report.unquarantined_block_ids
        assert self.world.scheduler.make_stats().num_quarantined_blocks == len(self.quarantined)

    @invariant()
    def requests_hold_blocks_for_what_they_have(self):
        scheduler = self.world.scheduler
        for request in (*scheduler.running, *scheduler.kv_holding_waiting):
            assert self.world.num_blocks_of(request.request_id) >= -(-request.num_computed_tokens // BLOCK_SIZE), request
            assert request.num_in_flight_tokens == 0 or self.world.in_flight
        for request in scheduler.waiting:
            assert self.world.num_blocks_of(request.request_id) == 0

    @invariant()
    def loading_requests_can_only_be_freed_by_their_load(self):
        for name in self.world.script.loading:
            request = self.world.scheduler.requests[name]
            assert request.status.is_finished or request.status is RequestStatus.WAITING_FOR_REMOTE_KVS

    def teardown(self):
        """Let all loads arrive and the quarantine end: then everything ends, as its policy says."""
        if not hasattr(self, "world"):
            return
        world = self.world
        num_idle = 0
        while world.scheduler.has_requests():
            for name in list(world.script.loading):
                world.complete_load(name)
            self.end_quarantine(set(self.late))
            reported = not world.script.report.is_empty()
            world.step()
            did_something = reported or world.last.num_scheduled_tokens or world.last.finished_req_ids
            num_idle = 0 if did_something or world.last.preempted_req_ids else num_idle + 1
            assert num_idle < 2, list(world.scheduler.requests.values())
        world.assert_clean()
        assert not world.scheduler.state.recompute_ownership
        assert set(world.ends) | self.aborted == set(self.requests)
        for name, reason in world.ends.items():
            request = self.requests[name]
            if reason == "error":
                assert request.kv_load_failure_policy == "fail", name
            else:
                world.assert_right(request, min(request.max_tokens, world.scheduler.max_model_len - request.num_prompt_tokens))


@pytest.fixture
def run_machine(make_world, remote, load_error):
    class Machine(FailureMachine):
        pass

    Machine.make_world, Machine.make_remote, Machine.load_error = staticmethod(make_world), staticmethod(remote), load_error

    def run(num_examples: int, async_scheduling: bool = False) -> None:
        Machine.async_scheduling = async_scheduling
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=num_examples,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )

    return run


@pytest.mark.slow
def test_random_failures_change_no_token_and_leak_nothing(run_machine):
    run_machine(NUM_EXAMPLES)


@pytest.mark.slow
def test_random_failures_with_async_scheduling(run_machine):
    run_machine(NUM_EXAMPLES // 2, async_scheduling=True)


@pytest.mark.slow
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_many_random_failures(run_machine, async_scheduling):
    run_machine(settings.default.max_examples, async_scheduling)
