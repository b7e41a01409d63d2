"""Random histories of a KV cache against a naive model that predicts every block, reference, hash, generation and seal.

One to three KV cache groups, of full, sliding-window and chunked-local attention. The model is
``tests.support.reference_kv_cache``.
"""

import functools
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from core.kv.events import AllBlocksCleared, BlockStored
from core.kv.hashing import BlockHasher
from core.kv.invariants import find_violations
from core.kv.manager import KVCacheManager
from core.kv.pool import cache_key
from core.kv.seals import BROKEN, SealTable, decode_seal, map_seal_memory
from core.kv.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheGroup, SlidingWindowSpec
from core.request import NewRequest, Request
from core.wire.sampling import SamplingParams
from tests.support.reference_kv_cache import NaiveAttention, NaiveKVCache, NaiveSizes

HASHER = BlockHasher(b"model of the state machine")
MAX_MODEL_LEN = 150
MAX_IN_FLIGHT = 90
SHAPE = {"num_kv_heads": 1, "head_dim": 8, "dtype_bytes": 2}


def spec_of(group):
    if group.window:
        return SlidingWindowSpec(block_size=group.block_size, sliding_window=group.window, **SHAPE)
    if group.chunk:
        return ChunkedLocalAttentionSpec(block_size=group.block_size, attention_chunk_size=group.chunk, **SHAPE)
    return FullAttentionSpec(block_size=group.block_size, **SHAPE)


block_sizes = st.sampled_from([16, 32])
full = st.builds(NaiveAttention, block_sizes)
attentions = (
    full
    | st.builds(NaiveAttention, block_sizes, window=st.sampled_from([1, 2, 16, 17, 33, 40, 64, 100]))
    | st.builds(NaiveAttention, block_sizes, chunk=st.sampled_from([32, 64, 96]))
)
choices = st.integers(0, 100)
prompts = st.tuples(
    st.integers(0, 1),  # family
    st.integers(1, 140) | st.sampled_from([64, 96, 128]),  # length
    st.sampled_from([0, 20, 40, 40, 500, 500]),  # fork
    st.sampled_from(["", "", "", "tenant"]),  # salt
)
admissions = st.tuples(
    st.integers(1, MAX_IN_FLIGHT),  # chunk
    st.sampled_from([0, 0, 0, 1, 30, 64, 150]),  # external tokens
    st.booleans(),  # the whole sequence must fit
    st.booleans(),  # no other request runs
    st.sampled_from([0, 0, 0, 2]),  # reserved blocks
)


def choose(requests, which):
    return requests[sorted(requests)[which % len(requests)]]


@functools.cache
def hash_of(salt, tokens):
    new = NewRequest(request_id="r", prompt_token_ids=tokens, sampling=SamplingParams(), cache_salt=salt)
    request = Request(new, HASHER)
    return HASHER.prefix_hash(request.block_hashes, request.all_token_ids, len(tokens), request.extra_keys)


class KVCacheMachine(RuleBasedStateMachine):
    """Requests that come, grow, load, roll back, are preempted and leave, in one small pool."""

    @initialize(
        num_blocks=st.integers(2, 12) | st.integers(12, 32) | st.integers(32, 64),
        groups=st.lists(full, min_size=1, max_size=1) | st.lists(attentions, min_size=1, max_size=3),
        hits_end_at=st.sampled_from([32, 32, 64]),
        watermark=st.sampled_from([0.0, 0.2]),
        enable_caching=st.sampled_from([True, True, True, False]),
        first_prompts=st.lists(prompts, min_size=1, max_size=3),
    )
    def build(self, num_blocks, groups, hits_end_at, watermark, enable_caching, first_prompts):
        unit = groups[0].block_size if len(groups) == 1 else hits_end_at
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks, tuple(KVCacheGroup((number,), spec_of(group)) for number, group in enumerate(groups))),
            MAX_MODEL_LEN,
            unit,
            16,
            max_in_flight_tokens=MAX_IN_FLIGHT,
            enable_caching=enable_caching,
            enable_kv_cache_events=True,
            watermark=watermark,
            seals=SealTable(map_seal_memory(num_blocks), incarnation=9, layout_version=5),
        )
        sizes = NaiveSizes(num_blocks, unit, int(watermark * num_blocks), MAX_MODEL_LEN, MAX_IN_FLIGHT)
        self.model = NaiveKVCache(groups, sizes, is_caching=enable_caching)
        self.live = {}  # request id -> request with blocks
        self.waiting = {}  # request id -> request without blocks
        self.loading = set()  # ids whose external tokens have not arrived
        self.pins = []  # lists of block ids referenced by no request
        self.followed = set()  # keys of the prefix map as the events tell them
        self.num_requests = 0
        for prompt in first_prompts:
            self.try_to_admit(self.add_request(*prompt), 64, external=0, whole=False, alone=False, reserved=0)

    # ---- one step of one request, for the model too --------------------------------------------------------------------

    def allocate(self, request, num_new, hits=None, num_external=0, *, whole=False, reserved=0, alone=False):
        """Call ``allocate_slots`` and hold it to the model, refusals included. True if it succeeded.

        ``hits``: their number of tokens and their block ids for each group.
        """
        num_hit_tokens, hit_ids = hits or (0, [[] for _ in self.model.groups])
        found, num_found = self.manager.get_computed_blocks(request) if num_hit_tokens else (None, 0)
        wanted = self.model.want(request, num_new, num_hit_tokens + num_external, hit_ids)
        must_fail = self.model.must_refuse(wanted, is_alone=alone, num_reserved=reserved, must_fit_whole=whole)
        got = self.manager.allocate_slots(
            request,
            num_new,
            num_found,
            found,
            num_external_computed_tokens=num_external,
            delay_cache_blocks=num_external > 0,
            full_sequence_must_fit=whole,
            reserved_blocks=reserved,
            has_scheduled_reqs=not alone,
        )
        assert (got is None) == must_fail
        if got is None:
            return False  # the invariants check that nothing has changed
        request_id = request.request_id
        new_ids = self.model.grant(wanted)
        assert got.get_block_ids() == tuple(new_ids)
        held = [ids for other, groups in self.model.tables.items() if other != request_id for ids in groups] + self.pins
        assert not {block_id for ids in new_ids for block_id in ids} & {block_id for ids in held for block_id in ids}
        self.live[request_id] = request
        if num_new:
            self.model.unseal(request_id, wanted.num_computed)
        request.num_computed_tokens = wanted.num_slots
        if not num_external:
            self.model.cache(request, min(request.num_computed_tokens, request.num_tokens))
        return True

    def seal(self, request):
        """The step that computed its tokens has run, and was good."""
        num_tokens = min(request.num_computed_tokens, request.num_tokens)
        self.manager.seal_blocks(request, num_tokens)
        self.model.seal(request, num_tokens)

    def truncate(self, request, kept):
        """Go back to ``kept`` tokens, to compute the rest again."""
        request.num_computed_tokens = kept
        self.manager.drop_shared_tail(request, kept)
        rewritten = self.manager.truncate(request, kept).get_block_ids()
        assert rewritten == tuple(self.model.truncate(request.request_id, kept))

    def free(self, request):
        """It leaves; its references go with it."""
        self.loading.discard(request.request_id)
        del self.live[request.request_id]
        self.manager.free(request)
        self.model.pool.release(self.model.drop(request.request_id))

    def put_back(self, request):
        """It must start again."""
        self.free(request)
        request.num_computed_tokens = 0
        self.waiting[request.request_id] = request

    def add_request(self, family, length, fork, salt):
        """Prompts of one family agree up to the smaller fork, but a salted one shares nothing with an unsalted one."""
        tokens = [family * 1000 + i + (7000 + fork) * (i >= fork) for i in range(length)]
        self.num_requests += 1
        request_id = f"r{self.num_requests:03}"
        sampling = SamplingParams(max_tokens=500)
        new = NewRequest(request_id=request_id, prompt_token_ids=tokens, sampling=sampling, cache_salt=salt)
        self.waiting[request_id] = Request(new, HASHER)
        return self.waiting[request_id]

    def try_to_admit(self, request, chunk, external, whole, alone, reserved):
        """Look up, compare the hits with the model, and allocate for a chunk or for an external load."""
        num_expected, expected = self.model.hits(request)
        blocks, num_hit_tokens = self.manager.get_computed_blocks(request)
        hits = blocks.get_block_ids()
        assert num_hit_tokens == num_expected
        for ids, positions in zip(hits, expected, strict=True):
            for block_id, copies in zip(ids, positions, strict=True):
                assert block_id in (copies or {0})
        num_left = request.num_tokens - num_hit_tokens
        num_external = min(external, num_left)
        num_new = 0 if num_external else min(chunk, num_left)
        if self.allocate(request, num_new, (num_hit_tokens, hits), num_external, whole=whole, alone=alone, reserved=reserved):
            del self.waiting[request.request_id]
            if num_external:
                self.loading.add(request.request_id)
            else:
                self.seal(request)

    # ---- what happens to requests ----------------------------------------------------------------------------------

    @rule(prompt=prompts, admission=admissions)
    def arrive(self, prompt, admission):
        if len(self.waiting) < 4:
            self.try_to_admit(self.add_request(*prompt), *admission)

    @rule(which=choices, admission=admissions)
    def admit_waiting(self, which, admission):
        if self.waiting:
            self.try_to_admit(choose(self.waiting, which), *admission)

    @rule(
        chunk=st.integers(1, 40),
        num_steps=st.integers(1, 20),
        is_good=st.sampled_from([True, True, True, False]),
    )
    def advance_all(self, chunk, num_steps, is_good):
        """Steps of all running requests: the next chunk of each, or a new token of those that have caught up.

        Blocks of steps that are not good are sealed by a later one that is.
        """
        for _ in range(num_steps):
            for request_id in sorted(self.live.keys() - self.loading):
                request = self.live[request_id]
                if request.num_computed_tokens == request.num_tokens:
                    request.append_output_token(request.num_tokens % 3)
                num_left = min(request.num_tokens, MAX_MODEL_LEN) - request.num_computed_tokens
                if num_left > 0 and self.allocate(request, min(chunk, num_left)) and is_good:
                    self.seal(request)
            self.check_all()

    @rule(which=choices, outcome=st.sampled_from(["arrives", "arrives", "fails in part"]), kept=st.integers(0, MAX_MODEL_LEN))
    def load_ends(self, which, outcome, kept):
        if not self.loading:
            return
        request_id = choose({key: key for key in self.loading}, which)
        request = self.live[request_id]
        self.loading.remove(request_id)
        if outcome == "fails in part":
            kept = self.model.place_to_go_on(request_id, min(kept, request.num_computed_tokens))
            if not kept:
                self.put_back(request)
                return
            self.truncate(request, kept)
        self.manager.cache_blocks(request, request.num_computed_tokens)
        self.model.cache(request, request.num_computed_tokens)
        self.seal(request)
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)

    @rule(which=choices, kept=st.integers(0, MAX_MODEL_LEN))
    def roll_back(self, which, kept):
        """Some of its blocks turned out to be invalid: they will be recomputed in place."""
        running = {key: self.live[key] for key in self.live.keys() - self.loading}
        if running:
            request = choose(running, which)
            kept = min(kept, request.num_computed_tokens)
            place = self.model.place_to_go_on(request.request_id, kept)
            if place < kept:
                assert self.manager.find_boundary(request.request_id, kept) == place
            self.truncate(request, place)

    @rule(which=choices, how=st.sampled_from(["preempt", "finish", "abort before admission"]))
    def leave(self, which, how):
        if how == "abort before admission":
            if self.waiting:
                request = choose(self.waiting, which)
                self.manager.free(request)
                del self.waiting[request.request_id]
            return
        if not self.live:
            return
        request = choose(self.live, which)
        if how != "preempt" and request.request_id not in self.loading:
            self.seal_tail(request)
        if how == "preempt":
            self.put_back(request)
        else:
            self.free(request)

    def seal_tail(self, request):
        """Describe what it has computed to a reader: the last block, full or not, is sealed too."""
        num_tokens = min(request.num_computed_tokens, request.num_tokens)
        if not num_tokens:
            return
        block_hash = HASHER.prefix_hash(request.block_hashes, request.all_token_ids, num_tokens, request.extra_keys)
        self.manager.seal_partial_block(request, num_tokens, block_hash)
        self.model.seal_tail(request, num_tokens)

    # ---- what happens to blocks ------------------------------------------------------------------------------------

    @rule(which=choices, count=st.integers(1, 4))
    def pin(self, which, count):
        if self.live and len(self.pins) < 3:
            tables = self.model.tables[choose(self.live, which).request_id]
            ids = [block_id for table in tables for block_id in table if block_id][:count]
            self.manager.block_pool.touch([self.manager.block_pool.blocks[block_id] for block_id in ids])
            self.model.pool.touch(ids)
            self.pins.append(list(ids))

    @rule(which=choices)
    def unpin(self, which):
        if self.pins:
            ids = self.pins.pop(which % len(self.pins))
            self.manager.block_pool.free_blocks([self.manager.block_pool.blocks[block_id] for block_id in ids])
            self.model.pool.release(ids)

    @rule(numbers=st.sets(st.integers(0, 100), max_size=3))
    def evict(self, numbers):
        ids = {number % self.model.sizes.num_blocks for number in numbers}
        self.manager.evict_blocks(ids)
        for block_id in ids:
            self.model.pool.evict(block_id)

    @rule()
    def reset(self):
        is_idle = not +self.model.pool.refs
        assert self.manager.reset_prefix_cache() is is_idle
        if is_idle:
            self.model.pool.prefix.clear()
            self.model.pool.sealed.clear()

    # ---- what always holds -----------------------------------------------------------------------------------------

    @invariant()
    def check_all(self):
        self.check_against_model()
        self.check_integrity()
        self.check_seals()
        self.check_hashes()
        self.check_events()

    def check_against_model(self):
        pool = self.manager.block_pool
        assert [block.block_id for block in pool.free_block_queue] == self.model.pool.free
        for block in pool.blocks:
            block_id = block.block_id
            assert block.ref_cnt == self.model.pool.refs[block_id], block
            assert block.generation == self.model.pool.generation[block_id], block
            assert (block.block_hash is not None) == (block_id in self.model.pool.prefix), block
        for number, group in enumerate(self.manager.coordinator.managers):
            tables = {key: groups[number] for key, groups in self.model.tables.items()}
            assert {key: [b.block_id for b in blocks] for key, blocks in group.req_to_blocks.items()} == tables
            if self.model.is_caching:
                assert group.num_cached_block == {key: counts[number] for key, counts in self.model.num_cached.items()}
        assert self.manager.usage == pytest.approx(1 - len(self.model.pool.free) / (self.model.sizes.num_blocks - 1))

    def check_integrity(self):
        held = Counter(block_id for ids in self.pins for block_id in ids)
        assert find_violations(self.manager, held) == []

    def check_seals(self):
        """A block is sealed exactly if it should be, and its seal says what its tokens say."""
        seals = self.manager.block_pool.seals
        for block in self.manager.block_pool.blocks:
            if block.block_id not in self.model.pool.sealed:
                assert seals.sealed_generation(block.block_id) == BROKEN, block
                continue
            number, salt, tokens = self.model.pool.sealed[block.block_id]
            seal = decode_seal(seals.row(block.block_id))
            assert (seal.incarnation, seal.layout_version, seal.group_id, seal.digest) == (9, 5, number, None)
            assert seal.generation == self.model.pool.generation[block.block_id]
            assert seal.num_tokens == (len(tokens) - 1) % self.model.groups[number].block_size + 1
            assert seal.block_hash == hash_of(salt, tokens)

    def check_hashes(self):
        """Equal hashes mean equal prefixes, and the other way round."""
        blocks = self.manager.block_pool.blocks
        pairs = {(cache_key(blocks[b].block_hash, blocks[b].group_id), prefix) for b, prefix in self.model.pool.prefix.items()}
        assert len({key for key, _ in pairs}) == len({prefix for _, prefix in pairs}) == len(pairs)

    def check_events(self):
        """Whoever follows the events knows the prefix map."""
        for event in self.manager.take_events():
            if isinstance(event, AllBlocksCleared):
                self.followed.clear()
                continue
            keys = {cache_key(block_hash, event.group_id) for block_hash in event.block_hashes}
            if isinstance(event, BlockStored):
                self.followed |= keys
            else:
                assert keys <= self.followed
                self.followed -= keys
        assert self.followed == {key for key, _ in self.manager.block_pool.cached_blocks.items()}

    def teardown(self):
        """After everything has ended no block may be lost."""
        if not hasattr(self, "manager"):
            return
        for request in list(self.live.values()):
            self.manager.free(request)
        for ids in self.pins:
            self.manager.block_pool.free_blocks([self.manager.block_pool.blocks[block_id] for block_id in ids])
        assert self.manager.usage == 0.0
        assert find_violations(self.manager) == []


KVCacheMachine.TestCase.settings = settings(stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TestKVCache = pytest.mark.slow(KVCacheMachine.TestCase)
