from array import array

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.engine.input_batch import InputBatch
from core.kv.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup, ceil_div
from core.request import NewRequestData
from core.wire.sampling import SamplingParams

BLOCK = 16
MAX_SEQS = 5
MAX_LEN = 80


def cache_config(num_groups=1):
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_dim=8, dtype_bytes=4)
    return KVCacheConfig(100, tuple(KVCacheGroup((group,), spec) for group in range(num_groups)))


def new_request(name, token_ids, num_prompt, block_ids, num_computed=0, **sampling):
    return NewRequestData(
        request_id=name,
        token_ids=array("i", token_ids),
        num_prompt_tokens=num_prompt,
        sampling=SamplingParams(**sampling),
        choice_index=0,
        block_ids=block_ids,
        num_computed_tokens=num_computed,
    )


class NaiveRequest:
    """A request as plain lists: the oracle."""

    def __init__(self, tokens, num_prompt, computed):
        self.tokens, self.num_prompt, self.computed = list(tokens), num_prompt, computed
        self.blocks: list[int] = []


class InputBatchMachine(RuleBasedStateMachine):
    """Random lives of requests; every step's arrays must equal those built by hand from plain lists."""

    def __init__(self):
        super().__init__()
        self.batch = InputBatch(cache_config(), MAX_SEQS, MAX_LEN)
        self.oracle: dict[str, NaiveRequest] = {}
        self.next_name = 0
        self.next_block = 1

    def take_blocks(self, request, num_tokens):
        count = ceil_div(num_tokens, BLOCK) - len(request.blocks)
        fresh = list(range(self.next_block, self.next_block + count))
        self.next_block += max(0, count)
        request.blocks += fresh
        return fresh

    def make(self, name, tokens, num_prompt, computed):
        request = self.oracle[name] = NaiveRequest(tokens, num_prompt, computed)
        self.take_blocks(request, len(tokens))
        self.batch.add(new_request(name, tokens, num_prompt, (request.blocks,), computed, temperature=0.5, seed=num_prompt))

    @precondition(lambda self: len(self.oracle) < MAX_SEQS)
    @rule(length=st.integers(1, 60), output=st.integers(0, 5), data=st.data())
    def add(self, length, output, data):
        tokens = np.random.default_rng(self.next_name).integers(0, 1000, length + output).tolist()
        computed = data.draw(st.integers(0, length + output - 1))
        name = f"r{self.next_name}"
        self.next_name += 1
        self.make(name, tokens, length, computed)

    @precondition(lambda self: self.oracle)
    @rule(data=st.data())
    def remove(self, data):
        name = data.draw(st.sampled_from(sorted(self.oracle)))
        self.batch.remove(name)
        self.batch.remove(name)
        del self.oracle[name]

    @precondition(lambda self: self.oracle)
    @rule(data=st.data())
    def resume_after_preemption(self, data):
        name = data.draw(st.sampled_from(sorted(self.oracle)))
        request = self.oracle[name]
        self.make(name, request.tokens, request.num_prompt, data.draw(st.integers(0, len(request.tokens) - 1)))

    @precondition(lambda self: self.oracle)
    @rule(data=st.data())
    def step(self, data):
        names = data.draw(st.lists(st.sampled_from(sorted(self.oracle)), unique=True, min_size=1))
        scheduled = {}
        for name in names:
            request = self.oracle[name]
            if request.computed == len(request.tokens) or len(request.tokens) >= MAX_LEN:
                continue
            scheduled[name] = data.draw(st.integers(1, len(request.tokens) - request.computed))
            fresh = self.take_blocks(request, request.computed + scheduled[name])
            self.batch.advance([name], [request.computed], [(fresh,) if fresh else None])
        if scheduled:
            self.check_step(scheduled)

    def check_step(self, scheduled):
        inputs = self.batch.prepare(scheduled)
        (batch,) = inputs.batches
        ids, positions, slots, starts, samples, partial = [], [], [], [0], [], []
        for number, (name, count) in enumerate(scheduled.items()):
            request = self.oracle[name]
            end = request.computed + count
            for position in range(request.computed, end):
                ids.append(request.tokens[position])
                positions.append(position)
                slots.append(request.blocks[position // BLOCK] * BLOCK + position % BLOCK)
            starts.append(len(ids))
            blocks = ceil_div(end, BLOCK)
            assert batch.block_tables[number, :blocks].tolist() == request.blocks[:blocks]
            assert batch.seq_lens[number] == end
            if end == len(request.tokens):
                samples.append(number)
            if end % BLOCK and (end // BLOCK) * BLOCK >= request.computed:
                partial.append(request.blocks[end // BLOCK])
        assert inputs.request_ids == list(scheduled)
        assert inputs.input_ids.tolist() == ids
        assert inputs.positions.tolist() == positions
        assert batch.slot_mapping.tolist() == slots
        assert batch.query_start_loc.tolist() == starts
        assert inputs.samples.tolist() == samples
        assert sorted(inputs.fresh_partial_blocks) == sorted(partial)
        assert [array.dtype for array in (inputs.input_ids, batch.seq_lens, batch.query_start_loc)] == [np.int32] * 3
        assert [array.dtype for array in (inputs.positions, batch.slot_mapping)] == [np.int64] * 2
        self.finish_step(inputs, scheduled)

    def finish_step(self, inputs, scheduled):
        names = list(scheduled)
        for name, count in scheduled.items():
            self.oracle[name].computed += count
        if len(inputs.samples):
            tokens = [7000 + len(self.oracle[names[number]].tokens) for number in inputs.samples]
            self.batch.keep(self.batch.promise(inputs.rows[inputs.samples]), tokens)
            for number, token in zip(inputs.samples, tokens, strict=True):
                self.oracle[names[number]].tokens.append(token)

    @invariant()
    def rows_are_dense_and_hold_each_request_once(self):
        assert sorted(self.batch.request_ids) == sorted(self.oracle)
        for name, request in self.oracle.items():
            row = self.batch._row_of[name]
            assert self.batch.request_ids[row] == name
            assert self.batch.num_tokens[row] == len(request.tokens)
            assert self.batch.token_ids[row, : len(request.tokens)].tolist() == request.tokens[:MAX_LEN]
            assert self.batch.sampling.num_output_tokens[row] == len(request.tokens) - request.num_prompt
            assert self.batch.sampling.streams[row] == (request.num_prompt, 0)


InputBatchMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestInputBatch = pytest.mark.slow(InputBatchMachine.TestCase)


def test_pure_decode_of_all_rows_reads_the_persistent_table_in_place():
    batch = InputBatch(cache_config(), MAX_SEQS, MAX_LEN)
    for name in ("a", "b"):
        batch.add(new_request(name, range(20), 20, ([1, 2],), 19))
    inputs = batch.prepare({"a": 1, "b": 1})
    assert np.shares_memory(inputs.batches[0].block_tables, batch.block_tables[0].block_ids)
    assert inputs.positions.tolist() == [19, 19]


def test_each_group_has_its_own_table_and_slots():
    batch = InputBatch(cache_config(num_groups=2), MAX_SEQS, MAX_LEN)
    batch.add(new_request("a", range(17), 17, ([3, 4], [8, 9]), 15))
    first, second = batch.prepare({"a": 2}).batches
    assert first.slot_mapping.tolist() == [3 * BLOCK + 15, 4 * BLOCK]
    assert second.slot_mapping.tolist() == [8 * BLOCK + 15, 9 * BLOCK]


def test_a_group_may_have_null_blocks_where_nothing_is_written():
    batch = InputBatch(cache_config(num_groups=2), MAX_SEQS, MAX_LEN)
    batch.add(new_request("a", range(40), 40, ([3, 4, 5], [0, 0, 9]), 33))
    full, sliding = batch.prepare({"a": 3}).batches
    assert sliding.block_tables[0, :3].tolist() == [0, 0, 9]
    assert sliding.slot_mapping.tolist() == [9 * BLOCK + offset for offset in (1, 2, 3)]
    assert full.slot_mapping.tolist() == [5 * BLOCK + offset for offset in (1, 2, 3)]


def test_writing_into_the_null_block_is_a_bug_that_shows_at_once():
    batch = InputBatch(cache_config(num_groups=2), MAX_SEQS, MAX_LEN)
    batch.add(new_request("a", range(40), 40, ([3, 4, 5], [0, 0, 9]), 31))
    with pytest.raises(AssertionError, match="null block"):
        batch.prepare({"a": 3})


def test_a_block_first_written_and_not_filled_is_named_in_each_group():
    batch = InputBatch(cache_config(num_groups=2), MAX_SEQS, MAX_LEN)
    batch.add(new_request("a", range(40), 40, ([3, 4, 5], [0, 8, 9]), 30))
    assert sorted(batch.prepare({"a": 5}).fresh_partial_blocks) == [5, 9]


def test_a_token_past_the_longest_length_is_counted_and_not_stored():
    batch = InputBatch(cache_config(), MAX_SEQS, MAX_LEN)
    batch.add(new_request("a", range(MAX_LEN), 1, (list(range(1, 6)),), MAX_LEN - 1))
    inputs = batch.prepare({"a": 1})
    batch.keep(batch.promise(inputs.rows), [5])
    assert batch.num_tokens[0] == MAX_LEN + 1
    assert batch.token_ids[0, -1] == MAX_LEN - 1


def test_condensing_keeps_penalties_with_their_request():
    batch = InputBatch(cache_config(), MAX_SEQS, MAX_LEN)
    batch.add(new_request("a", [1, 2], 2, ([1],)))
    batch.add(new_request("b", [1, 2], 2, ([2],), presence_penalty=1.0))
    batch.remove("a")
    assert batch.sampling.has_edits[0]
    batch.add(new_request("c", [1, 2], 2, ([1],)))
    assert not batch.sampling.has_edits[1]
    assert batch.sampling.edits[1] is None


@pytest.mark.parametrize("name", ["unknown"])
def test_removing_an_unknown_request_is_ignored(name):
    batch = InputBatch(cache_config(), MAX_SEQS, MAX_LEN)
    batch.remove(name)
    assert len(batch) == 0


@pytest.mark.parametrize("removed", ["a", "b"])
def test_rows_that_no_request_uses_keep_no_edits(removed):
    batch = InputBatch(cache_config(), MAX_SEQS, MAX_LEN)
    for block_id, name in enumerate("ab", start=1):
        batch.add(new_request(name, [1, 2, 3], 3, ([block_id],), min_tokens=2, max_tokens=4))
    batch.remove(removed)
    assert batch.sampling.edits[0] is not None
    assert batch.sampling.edits[1:] == [None] * (MAX_SEQS - 1)
    assert batch.sampling.has_edits.tolist() == [True, *[False] * (MAX_SEQS - 1)]
