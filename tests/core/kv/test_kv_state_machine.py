"""Random lives of a KV cache against a naive model that predicts every block, reference, hash, generation and seal.

One to three KV cache groups, of full, sliding-window and chunked-local attention. The model is written for clarity, with lists
and whole prefixes where the code has links and hashes: a prefix is the group, the tenant's salt and a tuple of tokens, the free
queue a list, a lookup a scan over all blocks. 0 stands for the null block.
"""

import functools
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from core.kv.events import AllBlocksCleared, BlockStored
from core.kv.hashing import BlockHasher
from core.kv.integrity import find_violations
from core.kv.manager import KVCacheManager
from core.kv.pool import cache_key
from core.kv.seals import BROKEN, SealTable, decode_seal, map_seal_memory
from core.kv.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheGroup, SlidingWindowSpec
from core.request import NewRequest, Request
from core.wire.sampling import SamplingParams

HASHER = BlockHasher(b"model of the state machine")
MAX_MODEL_LEN = 150
MAX_IN_FLIGHT = 90
SHAPE = {"num_kv_heads": 1, "head_dim": 8, "dtype_bytes": 2}


@dataclass(frozen=True)
class Attention:
    """How the layers of a group attend: at most one of the two is set, in tokens."""

    block_size: int
    window: int = 0
    chunk: int = 0

    def first_token(self, position):
        """The first token that the one at ``position`` attends to."""
        return max(0, position - self.window + 1) if self.window else position // self.chunk * self.chunk if self.chunk else 0

    def first_block(self, position):
        return self.first_token(position) // self.block_size

    def blocks_behind(self, position):
        """Blocks before ``position``, a multiple of the block size, that the token there attends to."""
        return range(self.first_block(position), position // self.block_size)

    def most_blocks(self):
        if self.window:
            return -(-min(self.window - 1 + MAX_IN_FLIGHT, MAX_MODEL_LEN) // self.block_size) + 1
        return -(-min(self.chunk + MAX_IN_FLIGHT, MAX_MODEL_LEN) // self.block_size) if self.chunk else 10**6

    def spec(self):
        if self.window:
            return SlidingWindowSpec(block_size=self.block_size, sliding_window=self.window, **SHAPE)
        if self.chunk:
            return ChunkedLocalAttentionSpec(block_size=self.block_size, attention_chunk_size=self.chunk, **SHAPE)
        return FullAttentionSpec(block_size=self.block_size, **SHAPE)


block_sizes = st.sampled_from([16, 32])
full = st.builds(Attention, block_sizes)
attentions = (
    full
    | st.builds(Attention, block_sizes, window=st.sampled_from([1, 2, 16, 17, 33, 40, 64, 100]))
    | st.builds(Attention, block_sizes, chunk=st.sampled_from([32, 64, 96]))
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


def prefix_of(group_id, request, num_tokens):
    return group_id, request.cache_salt, tuple(request.all_token_ids[:num_tokens])


@functools.cache
def hash_of(salt, tokens):
    new = NewRequest(request_id="r", prompt_token_ids=tokens, sampling=SamplingParams(), cache_salt=salt)
    request = Request(new, HASHER)
    return HASHER.prefix_hash(request.block_hashes, request.all_token_ids, len(tokens), request.extra_keys)


class ModelPool:
    """What the pool must be: plain containers, one entry per block id."""

    def __init__(self, num_blocks):
        self.free = list(range(1, num_blocks))
        self.refs = Counter()
        self.generation = Counter()
        self.prefix = {}  # block id -> (group, salt, tokens up to the end of the block), while it is a hit
        self.sealed = {}  # block id -> (group, salt, tokens up to the last one in the block), while it has a seal

    def allocate(self, count):
        taken, self.free = self.free[:count], self.free[count:]
        for block_id in taken:
            assert self.refs[block_id] == 0
            self.prefix.pop(block_id, None)
            self.sealed.pop(block_id, None)
            self.generation[block_id] += 1
            self.refs[block_id] = 1
        return taken

    def touch(self, block_ids):
        for block_id in block_ids:
            if self.refs[block_id] == 0:
                self.free.remove(block_id)
            self.refs[block_id] += 1

    def release(self, block_ids):
        """Drop references in the given order."""
        unhashed, hashed = [], []
        for block_id in filter(None, block_ids):
            self.refs[block_id] -= 1
            if self.refs[block_id] == 0:
                (hashed if block_id in self.prefix else unhashed).append(block_id)
        self.free = unhashed + self.free + hashed


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
        self.groups = groups
        self.unit = groups[0].block_size if len(groups) == 1 else hits_end_at
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks, tuple(KVCacheGroup((number,), group.spec()) for number, group in enumerate(groups))),
            MAX_MODEL_LEN,
            self.unit,
            16,
            max_in_flight_tokens=MAX_IN_FLIGHT,
            enable_caching=enable_caching,
            enable_kv_cache_events=True,
            watermark=watermark,
            seals=SealTable(map_seal_memory(num_blocks), incarnation=9, layout_version=5),
        )
        self.caching = enable_caching
        self.num_usable, self.watermark = num_blocks - 1, int(watermark * num_blocks)
        self.pool = ModelPool(num_blocks)
        self.live = {}  # request id -> request with blocks
        self.waiting = {}  # request id -> request without blocks
        self.loading = set()  # ids whose external tokens have not arrived
        self.tables = {}  # request id -> block ids of each group
        self.num_cached = {}  # request id -> a number for each group
        self.num_sealed = {}
        self.pins = []  # lists of block ids referenced by no request
        self.followed = set()  # keys of the prefix map as the events tell them
        self.num_requests = 0
        for prompt in first_prompts:
            self.try_to_admit(self.add_request(*prompt), 64, external=0, whole=False, alone=False, reserved=0)

    # ---- the model's own rules -------------------------------------------------------------------------------------

    def predict_hits(self, request):
        """The longest prefix behind which every group can go on: its length, and for each group sets of copies by position.

        The lookup takes one of each set. A position that nobody needs is None.
        """
        if not self.caching:
            return 0, [[] for _ in self.groups]
        copies = {}
        for block_id, prefix in self.pool.prefix.items():
            copies.setdefault(prefix, set()).add(block_id)
        for length in range((request.num_tokens - 1) // self.unit * self.unit, 0, -self.unit):
            found = []
            for number, group in enumerate(self.groups):
                ends = ((index + 1) * group.block_size for index in group.blocks_behind(length))
                needed = [copies.get(prefix_of(number, request, end)) for end in ends]
                found.append([None] * group.first_block(length) + needed)
            if all(all(group[self.groups[number].first_block(length) :]) for number, group in enumerate(found)):
                return length, found
        return 0, [[] for _ in self.groups]

    def can_be_a_hit(self, group, index):
        """Whether a request can ever go on at a place where hits end, and need this block there."""
        start = (index + 1) * group.block_size
        places = range(-(-start // self.unit) * self.unit, MAX_MODEL_LEN + 2 * self.unit, self.unit)
        return any(index in group.blocks_behind(place) for place in places)

    def remember_cached(self, request, num_tokens):
        if not self.caching:
            return
        num_cached = self.num_cached[request.request_id]
        for number, group in enumerate(self.groups):
            table = self.tables[request.request_id][number]
            for index in range(num_cached[number], num_tokens // group.block_size):
                if table[index] and self.can_be_a_hit(group, index):
                    prefix = prefix_of(number, request, (index + 1) * group.block_size)
                    assert self.pool.prefix.setdefault(table[index], prefix) == prefix
            num_cached[number] = max(num_cached[number], num_tokens // group.block_size)

    def drop(self, request):
        """Forget a request in the model; return its blocks in the order of their release: the last tokens' first."""
        request_id = request.request_id
        self.loading.discard(request_id)
        del self.live[request_id], self.num_cached[request_id], self.num_sealed[request_id]
        ends = [
            (-(index + 1) * group.block_size, number, block_id)
            for number, (group, table) in enumerate(zip(self.groups, self.tables.pop(request_id), strict=True))
            for index, block_id in enumerate(table)
            if block_id
        ]
        return [block_id for _, _, block_id in sorted(ends)]

    def give_back_skipped(self, request_id, position):
        for group, table in zip(self.groups, self.tables.get(request_id, ()), strict=False):
            end = min(group.first_block(position), len(table))
            skipped, table[:end] = table[:end][::-1], [0] * end
            self.pool.release(skipped)

    def is_evictable(self, block_id):
        return block_id != 0 and self.pool.refs[block_id] == 0

    def num_missing(self, group, table, num_tokens):
        return max(0, -(-min(num_tokens, MAX_MODEL_LEN) // group.block_size) - len(table))

    def first_table(self, group, hit_ids, position):
        first = group.first_block(position)
        return [0] * first + hit_ids[first:]

    def most_blocks_taken(self, request, tables, is_admission):
        """Over all groups: what the request takes at most at a time, until it has all slots."""
        taken = 0
        for group, table in zip(self.groups, tables, strict=True):
            num_missing = self.num_missing(group, table, request.num_tokens)
            if is_admission:
                num_missing += sum(map(self.is_evictable, table))
            num_own = 0 if is_admission else sum(self.pool.refs[block_id] == 1 for block_id in table if block_id)
            taken += max(0, min(num_missing, group.most_blocks() - num_own))
        return taken

    def allocate(self, request, num_new, hits=(), num_external=0, *, whole=False, reserved=0, alone=False):
        """Call ``allocate_slots`` and hold it to the model, refusals included. True if it succeeded.

        ``hits``: their number of tokens and their block ids for each group.
        """
        request_id = request.request_id
        is_admission = request_id not in self.tables
        num_hit_tokens, hit_ids = hits or (0, [[] for _ in self.groups])
        num_computed = min(request.num_computed_tokens + num_hit_tokens + num_external, MAX_MODEL_LEN)
        num_slots = min(num_computed + num_new, MAX_MODEL_LEN)
        position = min(num_computed, request.num_tokens - 1)  # of the first query to come
        found, num_found = self.manager.get_computed_blocks(request) if num_hit_tokens else (None, 0)
        self.give_back_skipped(request_id, position)
        tables = self.tables.get(request_id)
        if is_admission:
            tables = [self.first_table(group, ids, position) for group, ids in zip(self.groups, hit_ids, strict=True)]
        margin = self.watermark if is_admission and not alone else 0
        needed = sum(self.num_missing(group, table, num_slots) for group, table in zip(self.groups, tables, strict=True))
        if is_admission:
            needed += sum(self.is_evictable(block_id) for table in tables for block_id in table)
        must_fail = needed + margin > len(self.pool.free) - reserved
        must_fail |= whole and self.most_blocks_taken(request, tables, is_admission) + margin > len(self.pool.free)

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
        if is_admission:
            self.num_cached[request_id] = [len(ids) for ids in hit_ids]
            self.num_sealed[request_id] = [len(ids) for ids in hit_ids]
            for table in tables:
                self.pool.touch(filter(None, table))
        self.tables[request_id] = tables
        new_ids = self.extend_tables(tables, num_computed, num_slots)
        assert got.get_block_ids() == tuple(new_ids)
        held = [ids for other, groups in self.tables.items() if other != request_id for ids in groups] + self.pins
        assert not {block_id for ids in new_ids for block_id in ids} & {block_id for ids in held for block_id in ids}
        self.live[request_id] = request
        if num_new:
            self.unseal(request, num_computed)
        request.num_computed_tokens = min(num_computed + num_new, MAX_MODEL_LEN)
        if not num_external:
            self.remember_cached(request, min(request.num_computed_tokens, request.num_tokens))
        return True

    def extend_tables(self, tables, *lengths):
        """Give every group slots for the first length, then every group slots for the next one."""
        added = [[] for _ in tables]
        for num_slots in lengths:
            for number, group in enumerate(self.groups):
                new_ids = self.pool.allocate(self.num_missing(group, tables[number], num_slots))
                tables[number].extend(new_ids)
                added[number] += new_ids
        return added

    def seal(self, request):
        """The step that computed its tokens has run, and was good."""
        num_tokens = min(request.num_computed_tokens, request.num_tokens)
        self.manager.seal_blocks(request, num_tokens)
        num_sealed = self.num_sealed[request.request_id]
        for number, group in enumerate(self.groups):
            for index in range(num_sealed[number], num_tokens // group.block_size):
                self.note_seal(request, number, index, (index + 1) * group.block_size)
                num_sealed[number] = index + 1

    def note_seal(self, request, number, index, num_tokens):
        block_id = self.tables[request.request_id][number][index]
        if block_id:
            self.pool.sealed[block_id] = prefix_of(number, request, num_tokens)

    def unseal(self, request, num_kept_tokens):
        """What lies beyond is going to be written again: the seals break, and the next ones are of another generation."""
        num_sealed = self.num_sealed[request.request_id]
        for number, group in enumerate(self.groups):
            kept = min(num_sealed[number], num_kept_tokens // group.block_size)
            for block_id in filter(None, self.tables[request.request_id][number][kept : num_sealed[number]]):
                self.pool.sealed.pop(block_id, None)
                self.pool.generation[block_id] += 1
            num_sealed[number] = kept

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
        num_expected, expected = self.predict_hits(request)
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

    def place_to_go_on(self, request, wanted):
        """Where a request can go on from: at ``wanted`` or before it every group must hold what the next token attends to."""
        tables = self.tables[request.request_id]
        if not any(group.window or group.chunk for group in self.groups):
            return wanted  # anywhere
        for place in range(wanted // self.unit * self.unit, 0, -self.unit):
            needs = zip(self.groups, tables, strict=True)
            if all(all(table[index] for index in group.blocks_behind(place)) for group, table in needs):
                return place
        return 0

    def truncate(self, request, kept):
        """Go back to ``kept`` tokens: null blocks and those of others are given up, the rest is rewritten in place."""
        request_id = request.request_id
        request.num_computed_tokens = kept
        self.manager.drop_shared_tail(request, kept)
        dropped = []
        for group, table in zip(self.groups, self.tables[request_id], strict=True):
            behind = range(-(-kept // group.block_size), len(table))
            cut = next((index for index in behind if not table[index] or self.pool.refs[table[index]] > 1), len(table))
            dropped += table[cut:][::-1]
            del table[cut:]
        self.pool.release(dropped)
        beyond = [table[kept // group.block_size :] for group, table in zip(self.groups, self.tables[request_id], strict=True)]
        assert self.manager.truncate(request, kept).get_block_ids() == tuple(beyond)
        for block_id in [block_id for ids in beyond for block_id in ids]:
            self.pool.prefix.pop(block_id, None)
            self.pool.sealed.pop(block_id, None)
            self.pool.generation[block_id] += 1
        for counts in (self.num_sealed[request_id], self.num_cached[request_id]):
            for number, group in enumerate(self.groups):
                counts[number] = min(counts[number], kept // group.block_size)

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
            kept = self.place_to_go_on(request, min(kept, request.num_computed_tokens))
            if not kept:
                self.manager.free(request)
                self.pool.release(self.drop(request))
                request.num_computed_tokens = 0
                self.waiting[request_id] = request
                return
            self.truncate(request, kept)
        self.manager.cache_blocks(request, request.num_computed_tokens)
        self.remember_cached(request, request.num_computed_tokens)
        self.seal(request)
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)

    @rule(which=choices, kept=st.integers(0, MAX_MODEL_LEN))
    def roll_back(self, which, kept):
        """Some of its blocks turned out to be invalid: they will be recomputed in place."""
        running = {key: self.live[key] for key in self.live.keys() - self.loading}
        if running:
            request = choose(running, which)
            kept = min(kept, request.num_computed_tokens)
            place = self.place_to_go_on(request, kept)
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
        self.manager.free(request)
        self.pool.release(self.drop(request))
        if how == "preempt":
            request.num_computed_tokens = 0
            self.waiting[request.request_id] = request

    def seal_tail(self, request):
        """Describe what it has computed to a reader: the last block, full or not, is sealed too."""
        num_tokens = min(request.num_computed_tokens, request.num_tokens)
        if not num_tokens:
            return
        block_hash = HASHER.prefix_hash(request.block_hashes, request.all_token_ids, num_tokens, request.extra_keys)
        self.manager.seal_partial_block(request, num_tokens, block_hash)
        for number, group in enumerate(self.groups):
            index = num_tokens // group.block_size
            if num_tokens % group.block_size and index >= self.num_sealed[request.request_id][number]:
                self.note_seal(request, number, index, num_tokens)

    # ---- what happens to blocks ------------------------------------------------------------------------------------

    @rule(which=choices, count=st.integers(1, 4))
    def pin(self, which, count):
        if self.live and len(self.pins) < 3:
            tables = self.tables[choose(self.live, which).request_id]
            ids = [block_id for table in tables for block_id in table if block_id][:count]
            self.manager.block_pool.touch([self.manager.block_pool.blocks[block_id] for block_id in ids])
            self.pool.touch(ids)
            self.pins.append(list(ids))

    @rule(which=choices)
    def unpin(self, which):
        if self.pins:
            ids = self.pins.pop(which % len(self.pins))
            self.manager.block_pool.free_blocks([self.manager.block_pool.blocks[block_id] for block_id in ids])
            self.pool.release(ids)

    @rule(numbers=st.sets(st.integers(0, 100), max_size=3))
    def evict(self, numbers):
        ids = {number % (self.num_usable + 1) for number in numbers}
        self.manager.evict_blocks(ids)
        for block_id in ids:
            self.pool.prefix.pop(block_id, None)
            self.pool.sealed.pop(block_id, None)

    @rule()
    def reset(self):
        is_idle = not +self.pool.refs
        assert self.manager.reset_prefix_cache() is is_idle
        if is_idle:
            self.pool.prefix.clear()

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
        assert [block.block_id for block in pool.free_block_queue] == self.pool.free
        for block in pool.blocks:
            block_id = block.block_id
            assert block.ref_cnt == self.pool.refs[block_id], block
            assert block.generation == self.pool.generation[block_id], block
            assert (block.block_hash is not None) == (block_id in self.pool.prefix), block
        for number, group in enumerate(self.manager.coordinator.managers):
            tables = {key: groups[number] for key, groups in self.tables.items()}
            assert {key: [b.block_id for b in blocks] for key, blocks in group.req_to_blocks.items()} == tables
            if self.caching:
                assert group.num_cached_block == {key: counts[number] for key, counts in self.num_cached.items()}
        assert self.manager.usage == pytest.approx(1 - len(self.pool.free) / self.num_usable)

    def check_integrity(self):
        held = Counter(block_id for ids in self.pins for block_id in ids)
        assert find_violations(self.manager, held) == []

    def check_seals(self):
        """A block is sealed exactly if it should be, and its seal says what its tokens say."""
        seals = self.manager.block_pool.seals
        for block in self.manager.block_pool.blocks:
            if block.block_id not in self.pool.sealed:
                assert seals.sealed_generation(block.block_id) == BROKEN, block
                continue
            number, salt, tokens = self.pool.sealed[block.block_id]
            seal = decode_seal(seals.row(block.block_id))
            assert (seal.incarnation, seal.layout_version, seal.group_id, seal.digest) == (9, 5, number, None)
            assert seal.generation == self.pool.generation[block.block_id]
            assert seal.num_tokens == (len(tokens) - 1) % self.groups[number].block_size + 1
            assert seal.block_hash == hash_of(salt, tokens)

    def check_hashes(self):
        """Equal hashes mean equal prefixes, and the other way round."""
        blocks = self.manager.block_pool.blocks
        pairs = {(cache_key(blocks[b].block_hash, blocks[b].group_id), prefix) for b, prefix in self.pool.prefix.items()}
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
TestKVCache = KVCacheMachine.TestCase
