"""Requests that fit run at last, requests that can never fit do not wait: several KV cache groups under the real scheduler.

Some prompts are loaded, in part or whole, and some loads fail.

The runner of these tests has no model. It keeps in every slot what was written there, the group and the prefix, and demands of
every query that all it attends to is there. So a block given back too early, or a table that is wrong, is an error at once.
"""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.config_workers import SchedulerSection
from core.connector import KVConnectorScheduler
from core.errors import ContextTooLong
from core.kv.hashing import BlockHasher
from core.kv.invariants import find_violations
from core.kv.manager import KVCacheManager
from core.kv.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheGroup, SlidingWindowSpec
from core.request import KVConnectorMetadata, KVConnectorOutput, ModelRunnerOutput, NewRequest, Request
from core.sched.scheduler import Scheduler
from core.testing.clock import FakeClock
from core.wire.messages import ErrorInfo
from core.wire.sampling import SamplingParams

BLOCK = 16
LOAD_ERROR = ErrorInfo(code="peer_lost", message="the peer went away", http_status=502, retryable=True)
SHAPE = {"block_size": BLOCK, "num_kv_heads": 1, "head_dim": 8, "dtype_bytes": 2}
HASHER = BlockHasher(b"hybrid")
MOST_EMPTY_STEPS = 2  # a step may preempt the last running request, and the next one only settle the holders


def full():
    return FullAttentionSpec(**SHAPE)


def window(size):
    return SlidingWindowSpec(sliding_window=size, **SHAPE)


def chunks(size):
    return ChunkedLocalAttentionSpec(attention_chunk_size=size, **SHAPE)


class Loads(KVConnectorScheduler):
    """A connector that loads the first tokens of some requests; the test says when they have arrived."""

    def __init__(self):
        self.num_remote = {}  # request id -> tokens that can be loaded
        self.loading = {}  # request id -> (request, tables, first and last token)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        num_external = max(0, self.num_remote.get(request.request_id, 0) - num_computed_tokens)
        return num_external, num_external > 0

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            end = self.num_remote.pop(request.request_id)
            self.loading[request.request_id] = (request, blocks.get_block_ids(), end - num_external_tokens, end)

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()


@dataclass
class Row:
    token_ids: list[int]
    tables: list[list[int]]


@dataclass
class Engine:
    """Scheduler, manager and the runner without a model."""

    specs: list
    num_blocks: int
    max_num_batched_tokens: int
    max_model_len: int = 400
    options: dict = field(default_factory=dict)
    is_capped: bool = True
    checks_content: bool = True
    outcomes: dict = field(default_factory=dict)  # of loads: blocks at the end that are bad, 0 = all failed, -1 = none

    def __post_init__(self):
        groups = tuple(KVCacheGroup((number,), spec) for number, spec in enumerate(self.specs))
        self.manager = KVCacheManager(
            KVCacheConfig(self.num_blocks, groups),
            self.max_model_len,
            BLOCK,
            16,
            max_in_flight_tokens=self.max_num_batched_tokens if self.is_capped else None,
            **self.options,
        )
        self.loads = Loads()
        section = SchedulerSection(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=16,
            long_prefill_token_threshold=self.max_num_batched_tokens // 4,  # long prompts take turns in every step
        )
        self.scheduler = Scheduler(section, self.manager, self.max_model_len, self.loads, FakeClock())
        self.arrived = set()
        self.report = KVConnectorOutput()
        self.rows = {}
        self.content = {}  # (block id, offset) -> what was written there last
        self.finished = []
        self.most_running = 0

    def add(self, request_id, token_ids, max_tokens=1, num_remote=0):
        self.loads.num_remote[request_id] = num_remote
        sampling = SamplingParams(max_tokens=max_tokens)
        request = Request(NewRequest(request_id=request_id, prompt_token_ids=token_ids, sampling=sampling), HASHER)
        self.scheduler.add_request(request)

    def step(self):
        """Run one step; return the number of tokens it computed."""
        scheduler, step = self.scheduler, self.scheduler.schedule()
        cached = step.scheduled_cached_reqs
        for new in step.scheduled_new_reqs:
            self.rows[new.request_id] = Row(list(new.token_ids), [list(ids) for ids in new.block_ids])
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            row = self.rows[request_id]
            row.token_ids = list(scheduler.requests[request_id].all_token_ids)
            for number, ids in enumerate(block_ids or ()):
                row.tables[number].extend(ids)
        sampled = {}
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            request = scheduler.requests[request_id]
            self.compute(self.rows[request_id], request.num_computed_tokens - num_tokens, request.num_computed_tokens)
            if request.num_computed_tokens == request.num_tokens:
                sampled[request_id] = [request.num_tokens % 7]
        report, self.report, self.arrived = self.report, KVConnectorOutput(), set()
        self.most_running = max(self.most_running, len(scheduler.running))
        for output in scheduler.update_from_output(step, ModelRunnerOutput(sampled, kv_connector_output=report)):
            if output.finish_reason is not None:
                self.finished.append(output.request_id)
        return step.total_num_scheduled_tokens

    def compute(self, row, start, end):
        """Write the slots [start, end) of every group, then look at all that these queries attend to."""
        if not self.checks_content:
            return
        for number, spec in enumerate(self.specs):
            table = row.tables[number]
            for position in range(start, end):
                self.write(number, table, row.token_ids, position)
            for position in range(spec.num_skipped_tokens(start), end):
                found = self.content.get((table[position // BLOCK], position % BLOCK))
                assert found == (number, hash(tuple(row.token_ids[: position + 1]))), (number, position)

    def write(self, number, table, token_ids, position):
        assert table[position // BLOCK], f"a write to the null block, group {number}, position {position}"
        self.content[table[position // BLOCK], position % BLOCK] = (number, hash(tuple(token_ids[: position + 1])))

    def fail_load(self, request_id, num_bad):
        """End a load that brings nothing, or (``num_bad``) everything but the last blocks of each table."""
        if num_bad:
            _, tables, start, _ = self.loads.loading[request_id]
            bad = {block_id for table in tables for block_id in table[start // BLOCK :][-num_bad:] if block_id}
            self.end_load(request_id)
            for key in [key for key in self.content if key[0] in bad]:
                del self.content[key]
            self.report.invalid_block_ids |= bad
            return
        del self.loads.loading[request_id]
        self.report.failed_recving[request_id] = LOAD_ERROR
        self.report.finished_recving.add(request_id)
        self.arrived.add(request_id)

    def end_load(self, request_id):
        """Bring the tokens of a load, as far as the tables have blocks for them."""
        request, tables, start, end = self.loads.loading.pop(request_id)
        for number, table in enumerate(tables):
            for position in range(start, end):
                if table[position // BLOCK]:
                    self.write(number, table, list(request.all_token_ids), position)
        self.report.finished_recving.add(request_id)
        self.arrived.add(request_id)

    def run(self):
        """Step until nothing is left; fail as soon as the engine does nothing although nothing keeps it from working."""
        num_empty = 0
        while self.scheduler.has_unfinished_requests():
            if self.loads.loading:
                request_id = min(self.loads.loading)
                outcome = self.outcomes.get(request_id, -1)
                if outcome < 0:
                    self.end_load(request_id)
                else:
                    self.fail_load(request_id, outcome)
            num_empty = 0 if self.step() or self.loads.loading or self.arrived else num_empty + 1
            assert num_empty <= MOST_EMPTY_STEPS, list(self.scheduler.requests.values())
            if self.checks_content:
                assert find_violations(self.manager) == []


specs = st.lists(
    st.sampled_from([16, 17, 33, 48, 100]).map(window) | st.sampled_from([16, 32, 64]).map(chunks) | st.builds(full),
    min_size=1,
    max_size=3,
)
requests = st.lists(
    st.tuples(
        st.integers(0, 1),  # family: prompts of one family are prefixes of each other
        st.integers(1, 400),  # prompt
        st.integers(1, 40),  # output
        st.sampled_from([0, 0, 0, 10, 100, 400]),  # tokens that can be loaded
        st.sampled_from([-1, -1, 0, 1, 3]),  # what becomes of the load: good, failed, or blocks at its end are bad
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.slow
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    specs=specs,
    num_blocks=st.integers(2, 60),
    max_num_batched_tokens=st.sampled_from([1, 5, 16, 64, 100]),
    enable_caching=st.booleans(),
    watermark=st.sampled_from([0.0, 0.2]),
    requests=requests,
)
def test_whatever_fits_ends_and_whatever_cannot_is_refused_at_once(
    specs, num_blocks, max_num_batched_tokens, enable_caching, watermark, requests
):
    options = {"enable_caching": enable_caching, "watermark": watermark}
    engine = Engine(specs, num_blocks, max_num_batched_tokens, options=options)
    accepted = []
    engine.outcomes = {f"r{number}": request[-1] for number, request in enumerate(requests)}
    for number, (family, num_prompt, num_output, num_remote, _) in enumerate(requests):
        source = random.Random(family)
        prompt = [source.randrange(100) for _ in range(num_prompt)]
        if num_prompt >= engine.manager.max_tokens_that_fit:  # there must be room for a token of output
            with pytest.raises(ContextTooLong, match=f"has {num_prompt} tokens.* {engine.scheduler.max_model_len} tokens"):
                engine.add(f"r{number}", prompt)
            continue
        engine.add(f"r{number}", prompt, num_output, min(num_remote, num_prompt))
        accepted.append(f"r{number}")
    engine.run()
    assert sorted(engine.finished) == accepted
    assert engine.manager.usage == 0.0


# ---- a prompt of 16K tokens on a model that mixes attention types -------------------------------------------------------

MIXED = [full(), *[window(512)] * 5]
PROMPT = 16_384
IN_FLIGHT = 512
BLOCKS_OF_ONE = 1025 + 5 * (64 + 1)  # full attention: every block; a window: 511 + 512 tokens, and a block for its start


def mixed_engine(num_blocks, is_capped):
    options = {"enable_caching": False}
    return Engine(MIXED, num_blocks + 1, IN_FLIGHT, PROMPT + 16, options, is_capped, checks_content=False)


def add_prompts(engine, count):
    for number in range(count):
        engine.add(f"r{number}", list(range(PROMPT)))


def test_long_prompt_runs_in_a_pool_sized_by_what_it_really_holds():
    engine = mixed_engine(BLOCKS_OF_ONE, is_capped=True)
    assert engine.manager.kv_cache_config.num_blocks_of_sequence(PROMPT + 1, IN_FLIGHT, PROMPT + 16) == BLOCKS_OF_ONE
    add_prompts(engine, 1)
    engine.run()
    assert engine.finished == ["r0"]


def test_without_the_cap_that_prompt_would_never_be_admitted():
    """The gate would want a block of every group for every token, and no pool sized by the bound has so many."""
    engine = mixed_engine(BLOCKS_OF_ONE, is_capped=False)
    with pytest.raises(ContextTooLong, match=f"the request has {PROMPT} tokens"):
        add_prompts(engine, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("is_capped", "num_together"), [(True, 4), (False, 1)])
def test_several_long_prompts_run_together_where_an_uncapped_gate_runs_one(is_capped, num_together):
    engine = mixed_engine(6 * 1025, is_capped)  # one such prompt, if every layer kept everything
    add_prompts(engine, 5)
    engine.run()
    assert len(engine.finished) == 5
    assert engine.most_running == num_together


def test_prompt_that_can_never_fit_is_refused_with_both_numbers_and_leaves_nothing():
    engine = mixed_engine(BLOCKS_OF_ONE - 1, is_capped=True)
    with pytest.raises(ContextTooLong, match=f"has {PROMPT} tokens.*context length of {PROMPT} tokens") as refused:
        add_prompts(engine, 1)
    assert refused.value.http_status == 400
    assert not engine.scheduler.has_requests()
