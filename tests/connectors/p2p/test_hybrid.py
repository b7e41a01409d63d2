"""Handoffs of several KV cache groups: what the owner describes is what the reader lacks, for all chunks and blocks.

Two scheduler sides with real managers and no memory: who holds which block, and which are read, is all that matters here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest

from connectors.p2p.actions import LeaseGrant, PullRequest
from connectors.p2p.scheduler import P2PConnectorScheduler
from core.ids import SeededIds
from core.kv.block import NULL_BLOCK_ID
from core.kv.hashing import BlockHasher
from core.kv.invariants import find_violations
from core.kv.manager import KVCacheManager
from core.kv.seals import SealTable, decode_seal, find_mismatch, layout_fingerprint, map_seal_memory
from core.request import NewRequest, Request, RequestStatus, SchedulerOutput
from core.testing.clock import FakeClock
from core.testing.hash_model import HashAttention, hash_model_kv_config, hash_model_layout
from core.wire.kv import GroupBlocks, KVHandoff
from core.wire.sampling import SamplingParams

NUM_BLOCKS, MAX_MODEL_LEN = 200, 512
WINDOW = 40
ATTENTIONS = (HashAttention(window=WINDOW), HashAttention(), HashAttention(window=17))


@dataclass
class Side:
    """A worker's manager and the scheduler side of its connector."""

    connector: P2PConnectorScheduler
    hasher: BlockHasher
    block_size: int
    incarnation: int
    grants: list[LeaseGrant] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.layout = hash_model_layout(self.block_size, len(ATTENTIONS))
        self.seals = SealTable(map_seal_memory(NUM_BLOCKS), self.incarnation, layout_fingerprint(self.layout))
        self.manager = KVCacheManager(
            hash_model_kv_config(NUM_BLOCKS, self.block_size, ATTENTIONS),
            MAX_MODEL_LEN,
            scheduler_block_size=self.block_size,
            hash_block_size=16,
            seals=self.seals,
        )
        self.connector.bind_kv_cache_manager(self.manager)

    def request(self, name: str, prompt: list[int], handoff: KVHandoff | None = None) -> Request:
        new = NewRequest(
            request_id=name,
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=1),
            output_token_ids=() if handoff is None else (7,),
            needs_handoff=handoff is None,
            kv_handoff=handoff,
        )
        request = Request(new, self.hasher)
        self.connector.on_new_request(request)
        return request

    def compute(self, request: Request, chunk: int) -> None:
        """Compute what is left of a request, some tokens a step."""
        while request.num_computed_tokens < request.num_tokens:
            num_new = min(chunk, request.num_tokens - request.num_computed_tokens)
            assert self.manager.allocate_slots(request, num_new) is not None
            request.num_computed_tokens += num_new
            self.manager.seal_blocks(request, request.num_computed_tokens)

    def prefill(self, name: str, prompt: list[int], chunk: int) -> KVHandoff:
        request = self.request(name, prompt)
        self.compute(request, chunk)
        request.append_output_token(7)
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        block_ids = self.manager.get_block_ids_for_computed_tokens(name, request.num_computed_tokens)
        is_kept, handoff = self.connector.request_finished(request, block_ids)
        assert is_kept
        return handoff

    def load(self, name: str, prompt: list[int], handoff: KVHandoff) -> tuple[Request, PullRequest]:
        request = self.request(name, prompt, handoff)
        hits, num_hits = self.manager.get_computed_blocks(request)
        num_external, _ = self.connector.get_num_new_matched_tokens(request, num_hits)
        allocated = self.manager.allocate_slots(
            request, 0, num_hits, hits, num_external_computed_tokens=num_external, delay_cache_blocks=True
        )
        assert allocated is not None
        self.connector.update_state_after_alloc(request, self.manager.get_blocks(name), num_external)
        metadata = self.connector.build_connector_meta(SchedulerOutput())
        assert not metadata.refused, metadata.refused
        request.num_computed_tokens = num_hits + num_external
        return request, metadata.pulls[0]

    def end_load(self, request: Request) -> None:
        self.manager.cache_blocks(request, request.num_computed_tokens)
        self.manager.seal_blocks(request, request.num_computed_tokens)

    def tables(self, name: str) -> tuple[list[int], ...]:
        return self.manager.get_block_ids(name)


@pytest.fixture
def make_side(make_identity):
    def make(block_size: int, incarnation: int) -> Side:
        identity = make_identity("worker", incarnation, layout=hash_model_layout(block_size, len(ATTENTIONS)))
        grants: list[LeaseGrant] = []
        connector = P2PConnectorScheduler(
            identity, lease_ms=1000, ids=SeededIds(incarnation), grant=grants.append, now=FakeClock().now
        )
        connector.control_address = "tcp://10.0.0.1:5600"
        return Side(connector, BlockHasher(identity.model_fingerprint), block_size, incarnation, grants)

    return make


def prompt_of(num_tokens: int, salt: int = 0) -> list[int]:
    return [salt * 1000 + token for token in range(num_tokens)]


@pytest.mark.parametrize("chunk", [7, 64, 512])
@pytest.mark.parametrize(("owner_block", "reader_block"), [(16, 16), (16, 64), (64, 16), (32, 48)])
@pytest.mark.parametrize("num_tokens", [1, 30, 64, 100, 200])
def test_owner_describes_what_the_reader_needs_and_its_seals_say_so(make_side, chunk, owner_block, reader_block, num_tokens):
    owner, reader = make_side(owner_block, 1), make_side(reader_block, 2)
    handoff = owner.prefill("p", prompt_of(num_tokens), chunk)
    _, pull = reader.load("d", prompt_of(num_tokens), handoff)
    version = layout_fingerprint(owner.layout)
    for unit in pull.units:
        for row, expected in zip(unit.remote_rows, unit.expected, strict=True):
            assert find_mismatch(owner.seals.row(row), expected, 1, version) is None
    wanted = {
        block for table in reader.tables("d") for block in table[: -(-num_tokens // reader_block)] if block != NULL_BLOCK_ID
    }
    assert set(pull.local_rows) == wanted
    assert not find_violations(owner.manager)


def test_only_the_tail_of_a_window_is_named_and_kept_until_the_lease_ends(make_side):
    owner = make_side(16, 1)
    handoff = owner.prefill("p", prompt_of(200), chunk=512)
    assert [(group.first_block, len(group.block_ids)) for group in handoff.groups] == [(10, 3), (0, 13), (11, 2)]
    assert owner.grants == [LeaseGrant(handoff.transfer_id, "p", 18)]
    pool = owner.manager.block_pool
    assert pool.num_usable_blocks - pool.num_free_blocks == 18
    for group, table in zip(handoff.groups, owner.tables("p"), strict=True):
        assert group.block_ids == tuple(block for block in table if block != NULL_BLOCK_ID)
        for block_id, block_hash in zip(group.block_ids, group.block_hashes, strict=True):
            assert decode_seal(owner.seals.row(block_id)).block_hash == block_hash


def test_seals_name_their_group(make_side):
    owner = make_side(16, 1)
    handoff = owner.prefill("p", prompt_of(100), chunk=32)
    for group_id, group in enumerate(handoff.groups):
        assert {decode_seal(owner.seals.row(block_id)).group_id for block_id in group.block_ids} == {group_id}


def test_local_hit_shorter_than_the_window_is_gone_on_from(make_side):
    """Its blocks stay in the window of the tokens after it, and are not read again."""
    owner, reader = make_side(16, 1), make_side(16, 2)
    short = reader.request("before", prompt_of(37))
    reader.compute(short, 512)
    handoff = owner.prefill("p", prompt_of(60), chunk=512)
    _, pull = reader.load("d", prompt_of(60), handoff)
    assert pull.num_tokens == 60 - 32
    window = reader.tables("d")[0]
    assert window[1] == reader.tables("before")[0][1], "tokens 16 to 31 are of the local hit"
    assert NULL_BLOCK_ID not in window[1:4]
    assert set(pull.local_rows).isdisjoint(window[:2])


@pytest.mark.parametrize("num_tokens", [100, 190, 200])
def test_block_that_lacks_its_first_tokens_is_neither_a_hit_nor_sealed(make_side, num_tokens):
    owner, reader = make_side(16, 1), make_side(64, 2)
    request, _ = reader.load("d", prompt_of(num_tokens), owner.prefill("p", prompt_of(num_tokens), 512))
    reader.end_load(request)
    request.append_output_token(8)
    reader.compute(request, 1)
    for _ in range(70):
        request.append_output_token(9)
        reader.compute(request, 1)
    assert not find_violations(reader.manager)
    full = reader.tables("d")[1]
    assert decode_seal(reader.seals.row(full[0])) is not None
    for group_id in (0, 2):
        first_needed = (num_tokens - ATTENTIONS[group_id].window + 1) // 64
        lacks = (num_tokens - ATTENTIONS[group_id].window + 1) // 16 * 16 > first_needed * 64
        chain_end = request.block_hashes[first_needed * 4 + 3]
        assert (reader.manager.block_pool.get_cached_block(chain_end, group_id) is None) == lacks


def test_owner_that_lacks_a_block_of_the_window_is_refused(make_side):
    owner, reader = make_side(16, 1), make_side(16, 2)
    handoff = owner.prefill("p", prompt_of(100), chunk=512)
    cut = GroupBlocks(group_id=0, first_block=7, block_ids=(), generations=(), block_hashes=())
    forged = msgspec.structs.replace(handoff, groups=(cut, *handoff.groups[1:]))
    request = reader.request("d", prompt_of(100), forged)
    allocated = reader.manager.allocate_slots(request, 0, num_external_computed_tokens=100, delay_cache_blocks=True)
    assert allocated is not None
    reader.connector.update_state_after_alloc(request, reader.manager.get_blocks("d"), 100)
    (refusal,) = reader.connector.build_connector_meta(SchedulerOutput()).refused.values()
    assert refusal.error.code == "stale"
    assert "group 0" in refusal.error.message
